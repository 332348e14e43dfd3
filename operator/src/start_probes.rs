//! Probes the readiness of starting remote functions. The kubelet probes at most once a second, and a client may be
//! waiting.
//!
//! A positive answer counts until the kubelet reports readiness itself. As in [`main_pollers`](super::main_pollers),
//! no reconcile waits for a pod; a new answer requests a reconcile.

use super::pods::ContainerRun;
use super::ports::HEALTH_PORT;
use kube::runtime::reflector::ObjectRef;
use remoe_api::MoEDeployment;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

/// Maximum number of probed functions of one deployment.
const MAX_PROBED: usize = 512;
/// Interval between two probes.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);
/// Timeout of one probe.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest probing of one container. If it takes longer, the kubelet's probe suffices.
const MAX_PROBING: Duration = Duration::from_secs(60);

/// Probes of all deployments.
pub(crate) struct StartProbes {
    deployments: Mutex<HashMap<ObjectRef<MoEDeployment>, DeploymentStarts>>,
    reconcile_requests: mpsc::Sender<ObjectRef<MoEDeployment>>,
}

/// Probes of one deployment.
#[derive(Default)]
struct DeploymentStarts {
    functions: BTreeMap<ContainerRun, StartingFunction>,
    /// Tasks; dropping the set aborts them.
    tasks: JoinSet<()>,
}

struct StartingFunction {
    ready: Arc<AtomicBool>,
    task: AbortHandle,
}

impl StartProbes {
    /// Creates an empty set of probes. Deployments with a new answer are sent to `reconcile_requests`.
    pub(crate) fn new(reconcile_requests: mpsc::Sender<ObjectRef<MoEDeployment>>) -> Self {
        Self { deployments: Mutex::default(), reconcile_requests }
    }

    /// Returns the containers of `owner` that answered that they are ready.
    pub(crate) fn serving(&self, owner: &MoEDeployment) -> BTreeSet<ContainerRun> {
        let deployments = self.lock();
        let functions = deployments.get(&ObjectRef::from_obj(owner)).map(|starts| &starts.functions);
        let serving =
            functions.into_iter().flatten().filter(|(_, function)| function.ready.load(Ordering::Acquire));
        serving.map(|(run, _)| run.clone()).collect()
    }

    /// Probes exactly the containers `starting` of `owner` from now on.
    pub(crate) fn probe_only(&self, owner: &MoEDeployment, starting: BTreeMap<ContainerRun, IpAddr>) {
        let key = ObjectRef::from_obj(owner);
        let mut deployments = self.lock();
        if starting.is_empty() {
            deployments.remove(&key);
            return;
        }
        let starts = deployments.entry(key.clone()).or_default();
        starts.functions.retain(|run, function| {
            let stays = starting.contains_key(run);
            if !stays {
                function.task.abort();
            }
            stays
        });
        while starts.tasks.try_join_next().is_some() {}
        for (run, ip) in starting.into_iter().take(MAX_PROBED) {
            starts.functions.entry(run).or_insert_with(|| {
                let ready = Arc::new(AtomicBool::new(false));
                let task = starts.tasks.spawn(probe_until_ready(
                    ip,
                    ready.clone(),
                    self.reconcile_requests.clone(),
                    key.clone(),
                ));
                StartingFunction { ready, task }
            });
        }
    }

    /// Ends all probes of `deployment`.
    pub(crate) fn cancel(&self, deployment: &ObjectRef<MoEDeployment>) {
        self.lock().remove(deployment);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, DeploymentStarts>> {
        // Every critical section keeps the map consistent up to any panic.
        self.deployments.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Probes until the function is ready or `MAX_PROBING` has passed.
async fn probe_until_ready(
    ip: IpAddr,
    ready: Arc<AtomicBool>,
    reconcile_requests: mpsc::Sender<ObjectRef<MoEDeployment>>,
    deployment: ObjectRef<MoEDeployment>,
) {
    let cancel = Instant::now() + MAX_PROBING;
    while Instant::now() < cancel {
        if matches!(timeout(PROBE_TIMEOUT, is_ready(ip)).await, Ok(Ok(true))) {
            ready.store(true, Ordering::Release);
            // If the channel is full, the next periodic reconcile sees it.
            let _no_room = reconcile_requests.try_send(deployment);
            return;
        }
        sleep(PROBE_INTERVAL).await;
    }
}

/// Returns whether the readiness endpoint at `ip` answers 200.
async fn is_ready(ip: IpAddr) -> std::io::Result<bool> {
    const OK: &[u8] = b"HTTP/1.1 200 ";
    let mut stream = TcpStream::connect((ip, HEALTH_PORT)).await?;
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: function\r\nConnection: close\r\n\r\n").await?;
    let mut status = [0; OK.len()];
    stream.read_exact(&mut status).await?;
    Ok(status == OK)
}
