//! Which main functions answer: asked by this gateway itself, since a node looks once a second at most.

use crate::mains::uri;
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

/// Between two questions to one that does not answer yet.
const SOON: Duration = Duration::from_millis(50);
/// Between two questions to one that answers.
const LATER: Duration = Duration::from_secs(1);
/// One question takes at most this long.
const CALL: Duration = Duration::from_millis(500);
/// So many questions in a row without an answer, and it is no longer counted on.
const PATIENCE: u32 = 3;

/// Answers of a main function to its probes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Answers {
    /// Set if its port is open.
    pub(crate) listens: bool,
    /// Set if it takes requests.
    pub(crate) serves: bool,
}

/// The probes of one deployment's main functions.
pub(crate) struct Probes {
    known: BTreeMap<String, (MainFunction, watch::Receiver<Answers>, tokio::task::AbortHandle)>,
    tasks: JoinSet<()>,
    client: Client<Connector, Empty<Bytes>>,
    changed: watch::Sender<()>,
}

impl Probes {
    /// Makes the probes of no function yet; `changed` is told when a function answers something new. What is in
    /// `keyring` is shown to functions that check the caller's identity.
    pub(crate) fn new(changed: watch::Sender<()>, keyring: Option<Arc<Keyring>>) -> Self {
        let connector = Connector::new(keyring, CALL);
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(1).build(connector);
        Self { known: BTreeMap::new(), tasks: JoinSet::new(), client, changed }
    }

    /// Probes `mains` and no others from now on.
    pub(crate) fn keep(&mut self, mains: &[MainFunction]) {
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
                let (said, answers) = watch::channel(Answers::default());
                let asking = ask(self.client.clone(), main.clone(), said, self.changed.clone());
                let task = self.tasks.spawn(asking);
                self.known.insert(main.uid.clone(), (main.clone(), answers, task));
            }
        }
    }

    /// Returns the latest answers of the main function with `uid`.
    pub(crate) fn answers(&self, uid: &str) -> Answers {
        self.known.get(uid).map_or_else(Answers::default, |(_, answers, _)| *answers.borrow())
    }
}

/// Asks one main function for ever.
async fn ask(
    client: Client<Connector, Empty<Bytes>>,
    main: MainFunction,
    said: watch::Sender<Answers>,
    changed: watch::Sender<()>,
) {
    let Some(uri) = uri(&main, "/health") else { return };
    let mut silent = 0;
    loop {
        let mut answers = *said.borrow();
        match timeout(CALL, client.get(uri.clone())).await {
            Ok(Ok(response)) => {
                answers = Answers { listens: true, serves: response.status().is_success() };
                silent = 0;
            }
            Ok(Err(_)) | Err(_) => {
                silent += 1;
                answers.serves &= silent < PATIENCE;
                // A port that opens is a step on the way, whatever is said there.
                answers.listens = answers.listens
                    || matches!(timeout(CALL, TcpStream::connect(&main.address)).await, Ok(Ok(_)));
            }
        }
        if said.send_if_modified(|known| std::mem::replace(known, answers) != answers) {
            changed.send_replace(());
        }
        sleep(if answers.serves && silent == 0 { LATER } else { SOON }).await;
    }
}
