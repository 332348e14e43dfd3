//! Readiness of remote functions that start: the operator asks them, since their node looks once a second at most, and
//! a client may be waiting.
//!
//! Their answer counts until the node reports readiness itself. As in [`main_pollers`](super::conversations) no
//! reconcile waits for a pod, and news has the deployment reconciled again.

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

/// Functions of one deployment that are asked.
const MOST: usize = 512;
/// Between two questions.
const PAUSE: Duration = Duration::from_millis(50);
/// One question takes at most this long.
const CALL: Duration = Duration::from_millis(500);
/// One that takes longer to load can wait for its node's word.
const LONGEST: Duration = Duration::from_secs(60);

/// All functions that are asked.
pub(crate) struct StartProbes {
    deployments: Mutex<HashMap<ObjectRef<MoEDeployment>, DeploymentStarts>>,
    reconcile_requests: mpsc::Sender<ObjectRef<MoEDeployment>>,
}

/// Functions of one deployment that are asked.
#[derive(Default)]
struct DeploymentStarts {
    functions: BTreeMap<ContainerRun, StartingFunction>,
    /// Ends the tasks with it.
    tasks: JoinSet<()>,
}

struct StartingFunction {
    serves: Arc<AtomicBool>,
    task: AbortHandle,
}

impl StartProbes {
    /// Starts without a function to ask; `reconcile_requests` is told which deployments are to be reconciled.
    pub(crate) fn new(reconcile_requests: mpsc::Sender<ObjectRef<MoEDeployment>>) -> Self {
        Self { deployments: Mutex::default(), reconcile_requests }
    }

    /// The functions of `owner` that said that they serve.
    pub(crate) fn serving(&self, owner: &MoEDeployment) -> BTreeSet<ContainerRun> {
        let deployments = self.lock();
        let functions = deployments.get(&ObjectRef::from_obj(owner)).map(|known| &known.functions);
        let serving =
            functions.into_iter().flatten().filter(|(_, function)| function.serves.load(Ordering::Acquire));
        serving.map(|(run, _)| run.clone()).collect()
    }

    /// Asks the functions `starting` of `owner`, and no others.
    pub(crate) fn keep(&self, owner: &MoEDeployment, starting: BTreeMap<ContainerRun, IpAddr>) {
        let key = ObjectRef::from_obj(owner);
        let mut deployments = self.lock();
        if starting.is_empty() {
            deployments.remove(&key);
            return;
        }
        let known = deployments.entry(key.clone()).or_default();
        known.functions.retain(|run, function| {
            let stays = starting.contains_key(run);
            if !stays {
                function.task.abort();
            }
            stays
        });
        while known.tasks.try_join_next().is_some() {}
        for (run, ip) in starting.into_iter().take(MOST) {
            known.functions.entry(run).or_insert_with(|| {
                let serves = Arc::new(AtomicBool::new(false));
                let task =
                    known.tasks.spawn(ask(ip, serves.clone(), self.reconcile_requests.clone(), key.clone()));
                StartingFunction { serves, task }
            });
        }
    }

    /// Ends all questions to functions of `deployment`.
    pub(crate) fn end(&self, deployment: &ObjectRef<MoEDeployment>) {
        self.lock().remove(deployment);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, DeploymentStarts>> {
        // Every change of it is whole: a panic elsewhere cannot have left it half-done.
        self.deployments.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks until the function serves, or for as long as it is worth it.
async fn ask(
    ip: IpAddr,
    serves: Arc<AtomicBool>,
    reconcile_requests: mpsc::Sender<ObjectRef<MoEDeployment>>,
    deployment: ObjectRef<MoEDeployment>,
) {
    let end = Instant::now() + LONGEST;
    while Instant::now() < end {
        if matches!(timeout(CALL, is_ready(ip)).await, Ok(Ok(true))) {
            serves.store(true, Ordering::Release);
            // Where there is no room, the next look sees it.
            let _no_room = reconcile_requests.try_send(deployment);
            return;
        }
        sleep(PAUSE).await;
    }
}

/// Reports if the probe of the function at `ip` says that it serves.
async fn is_ready(ip: IpAddr) -> std::io::Result<bool> {
    const OK: &[u8] = b"HTTP/1.1 200 ";
    let mut stream = TcpStream::connect((ip, HEALTH_PORT)).await?;
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: function\r\nConnection: close\r\n\r\n").await?;
    let mut status = [0; OK.len()];
    stream.read_exact(&mut status).await?;
    Ok(status == OK)
}
