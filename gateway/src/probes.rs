//! Readiness probes of main functions. The gateway probes by itself because kubelets probe once a second at most.

use crate::main_functions::uri;
use bytes::Bytes;
use http_body_util::Empty;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use remoe_api::MainFunction;
use remoe_gateway_core::Connector;
use remoe_proto::identity::Keyring;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Time between two probes of a function that does not serve.
const UNREADY_INTERVAL: Duration = Duration::from_millis(50);
/// Time between two probes of a function that serves.
const READY_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of a probe.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Number of failed probes in a row after which a function no longer counts as serving.
const MAX_FAILURES: u32 = 3;

/// Latest probe result of a main function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ProbeResult {
    /// Set if the port is open.
    pub(crate) listens: bool,
    /// Set if the function serves requests.
    pub(crate) serves: bool,
}

/// Probes of one deployment's main functions.
pub(crate) struct MainProbes {
    known: BTreeMap<String, (MainFunction, watch::Receiver<ProbeResult>, tokio::task::AbortHandle)>,
    tasks: JoinSet<()>,
    client: Client<Connector, Empty<Bytes>>,
    changed: watch::Sender<()>,
}

impl MainProbes {
    /// Makes probes of no function yet. Notifies `changed` whenever a result changes. `keyring` has the credentials
    /// for functions that authenticate gateways.
    pub(crate) fn new(changed: watch::Sender<()>, keyring: Option<Arc<Keyring>>) -> Self {
        let connector = Connector::new(keyring, PROBE_TIMEOUT);
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(1).build(connector);
        Self { known: BTreeMap::new(), tasks: JoinSet::new(), client, changed }
    }

    /// Probes exactly `mains` from now on.
    pub(crate) fn set_targets(&mut self, mains: &[MainFunction]) {
        self.known.retain(|_, (known, _, task)| {
            let stays = mains.iter().any(|main| {
                (&main.uid, &main.address, &main.identity) == (&known.uid, &known.address, &known.identity)
            });
            if !stays {
                task.abort();
            }
            stays
        });
        while self.tasks.try_join_next().is_some() {}
        for main in mains {
            if !self.known.contains_key(&main.uid) {
                let (results, latest) = watch::channel(ProbeResult::default());
                let asking = probe(self.client.clone(), main.clone(), results, self.changed.clone());
                let task = self.tasks.spawn(asking);
                self.known.insert(main.uid.clone(), (main.clone(), latest, task));
            }
        }
    }

    /// Returns the latest result of the main function with `uid`.
    pub(crate) fn result(&self, uid: &str) -> ProbeResult {
        self.known.get(uid).map_or_else(ProbeResult::default, |(_, latest, _)| *latest.borrow())
    }
}

/// Probes one main function periodically. Never returns, unless its address is invalid.
async fn probe(
    client: Client<Connector, Empty<Bytes>>,
    main: MainFunction,
    results: watch::Sender<ProbeResult>,
    changed: watch::Sender<()>,
) {
    let Some(uri) = uri(&main, "/health") else { return };
    let mut failures = 0;
    loop {
        let mut result = *results.borrow();
        match timeout(PROBE_TIMEOUT, client.get(uri.clone())).await {
            Ok(Ok(response)) => {
                result = ProbeResult { listens: true, serves: response.status().is_success() };
                failures = 0;
            }
            Ok(Err(_)) | Err(_) => {
                failures += 1;
                result.serves &= failures < MAX_FAILURES;
                // An open port is a step of the cold start, even if the function does not serve yet.
                result.listens = result.listens
                    || matches!(timeout(PROBE_TIMEOUT, TcpStream::connect(&main.address)).await, Ok(Ok(_)));
            }
        }
        if results.send_if_modified(|known| std::mem::replace(known, result) != result) {
            changed.send_replace(());
        }
        sleep(if result.serves && failures == 0 { READY_INTERVAL } else { UNREADY_INTERVAL }).await;
    }
}
