//! What the requests to one deployment use, as far as its operator wants to know.
//!
//! What it takes to predict comes from a main function, once: a [`Primer`]. It is kept, so that a gateway that begins anew
//! can predict for those who wake a deployment.

use crate::experience::{forget_past, keep_primer, others, others_ended, read_primer};
use crate::mains::uri;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use remoe_demand::{
    DemandPhase, MOST_SHARES, MainFunction, MixOf, MoEDemandSpec, PredictionOrder, RequestMix,
};
use remoe_foresight::{
    ForesightMetrics, ForesightOptions, Keeps, MAX_PRIMER, MEMORY, Mix, ModelForesightMetrics, News, Peers,
    Primer, PrimerError, Watch,
};
use remoe_gateway::{Connector, Privacy, Witness};
use remoe_wire::identity::Keyring;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

/// What could not be begun is tried again after so long, and after twice as long each time, up to the longest pause.
const AGAIN: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// A primer arrives within this time.
const PRIMING: Duration = Duration::from_secs(120);
/// What an entry waits for the predictions of those who wait, at most. They take less than a millisecond each.
const PREDICTIONS: Duration = Duration::from_millis(250);
/// Those who come within this time of the first are planned for with it.
const TOGETHER: Duration = Duration::from_millis(10);
/// In what part of the time between two revisions it is said what requests use.
const SAID: u32 = 4;
/// And how rarely at least.
const RARELY: Duration = Duration::from_secs(10);

/// What all deployments share.
#[derive(Clone)]
pub(crate) struct Means {
    /// Memory for predictions, in MiB.
    memory: Arc<Semaphore>,
    /// One primer is fetched and opened at a time: that takes memory beside.
    turn: Arc<Semaphore>,
    /// Bytes of past requests of one deployment.
    experience_bytes: u64,
    /// Between two looks at what other gateways have learned.
    exchanged: Duration,
    metrics: ForesightMetrics,
    /// What main functions are shown that want to know who asks.
    keyring: Option<Arc<Keyring>>,
}

impl Means {
    /// `memory` bytes for all deployments, of each of which past requests take at most `experience_bytes`; what other gateways
    /// have learned is looked at once in `exchanged`.
    pub(crate) fn new(
        (memory, experience_bytes): (u64, u64),
        exchanged: Duration,
        metrics: ForesightMetrics,
        keyring: Option<Arc<Keyring>>,
    ) -> Self {
        let memory = usize::try_from(memory >> 20).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self {
            memory: Arc::new(Semaphore::new(memory)),
            turn: Arc::new(Semaphore::new(1)),
            experience_bytes,
            exchanged,
            metrics,
            keyring,
        }
    }
}

/// Follows the requests of one deployment.
pub(crate) struct Seer {
    /// None until there is a primer.
    watch: RwLock<Option<Following>>,
    /// With the model that the answers were of.
    answered: watch::Sender<Option<(String, Mix)>>,
    folder: Option<PathBuf>,
    means: Means,
    metrics: ModelForesightMetrics,
}

struct Following {
    watch: Arc<Watch>,
    order: PredictionOrder,
    /// Its memory is others' again when this goes.
    _memory: OwnedSemaphorePermit,
}

impl Witness for Seer {
    fn came(&self, id: u64, tenant: &str, privacy: Privacy, body: &Bytes) -> bool {
        let keeps = match privacy {
            Privacy::None => Keeps::Records,
            Privacy::CountsOnly => Keeps::Counts,
            Privacy::LeftOut => Keeps::Nothing,
        };
        self.watch().is_some_and(|watch| watch.came(id, tenant, keeps, body))
    }

    fn told(&self, id: u64, activations: &str) {
        if let Some(watch) = self.watch() {
            watch.told(id, activations);
        }
    }

    fn left(&self, id: u64) {
        if let Some(watch) = self.watch() {
            watch.left(id);
        }
    }
}

/// Why requests of a model are not followed.
#[derive(Debug, thiserror::Error)]
enum Unprimed {
    /// The main function says something else, or nothing.
    #[error("main function {address}: {why}")]
    Main { address: String, why: String },
    /// It is of another model.
    #[error("main function {address} has model {found}, and {wanted} is to be followed")]
    OtherModel { address: String, found: String, wanted: String },
    /// There is no room.
    #[error("predictions of this model take {wanted} MiB, {left} are left (--prediction-bytes)")]
    Memory { wanted: usize, left: usize },
    #[error(transparent)]
    Primer(#[from] PrimerError),
    #[error("{0}")]
    Thread(String),
}

/// Whether nothing of what is known has to go for another order.
fn is_same(one: &PredictionOrder, other: &PredictionOrder) -> bool {
    (&one.model, one.counts_only) == (&other.model, other.counts_only)
}

impl Seer {
    /// Of the deployment `name`, of which is kept in `folder` what is known.
    pub(crate) fn new(name: &str, folder: Option<PathBuf>, means: Means) -> Arc<Self> {
        let metrics = means.metrics.of_model(name);
        Arc::new(Self {
            watch: RwLock::default(),
            answered: watch::Sender::new(None),
            folder,
            means,
            metrics,
        })
    }

    fn watch(&self) -> Option<Arc<Watch>> {
        let following = self.watch.read().unwrap_or_else(PoisonError::into_inner);
        following.as_ref().map(|following| following.watch.clone())
    }

    /// By which order requests are followed.
    fn order(&self) -> Option<PredictionOrder> {
        let following = self.watch.read().unwrap_or_else(PoisonError::into_inner);
        following.as_ref().map(|following| following.order.clone())
    }

    fn replace(&self, following: Option<Following>) {
        *self.watch.write().unwrap_or_else(PoisonError::into_inner) = following;
        self.answered.send_replace(None);
    }

    /// Follows what `told` orders, until that ends.
    pub(crate) async fn keep(self: Arc<Self>, mut told: watch::Receiver<MoEDemandSpec>) {
        // What could not be done is said once, and tried again ever less often.
        let (mut said, mut pause, mut attempts) = (String::new(), AGAIN, 0);
        loop {
            let now = told.borrow_and_update().clone();
            let known = self.order();
            let is_known =
                |order: &PredictionOrder| known.as_ref().is_some_and(|known| is_same(known, order));
            let Some(order) = now.prediction.clone().filter(|order| !is_known(order)) else {
                if now.prediction.is_none() && known.is_some() {
                    self.replace(None);
                }
                if told.changed().await.is_err() {
                    return;
                }
                continue;
            };
            if known.is_some() {
                self.replace(None);
            }
            attempts += 1;
            match self.begin(&order, &now, attempts).await {
                Ok(true) => {
                    (pause, attempts) = (AGAIN, 0);
                    continue;
                }
                Ok(false) => {}
                Err(error) => {
                    let error = error.to_string();
                    if error != said {
                        tracing::warn!(error, model = now.served_name, "what requests use is not followed");
                        said = error;
                    }
                }
            }
            // Whatever is told meanwhile: a main function reads its whole embedding for an answer. Only another order, or
            // functions that serve, are worth another try at once.
            let is_news = |next: &MoEDemandSpec| {
                let begins = next.phase == DemandPhase::Active && now.phase != DemandPhase::Active;
                begins || next.prediction.as_ref().is_none_or(|next| !is_same(next, &order))
            };
            if let Ok(Err(_over)) = timeout(pause, told.wait_for(is_news)).await {
                return;
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Begins to follow; false where nobody has a primer yet.
    async fn begin(
        self: &Arc<Self>,
        order: &PredictionOrder,
        told: &MoEDemandSpec,
        attempt: usize,
    ) -> Result<bool, Unprimed> {
        let Ok(_turn) = self.means.turn.clone().acquire_owned().await else { return Ok(false) };
        let (folder, model, forgets) = (self.folder.clone(), order.model.clone(), order.counts_only);
        let kept = spawn_blocking(move || {
            let Some(folder) = folder else { return Ok(None) };
            if forgets {
                forget_past(&folder, &model)?;
            }
            read_primer(&folder)
        });
        let kept = kept.await.map_err(|error| Unprimed::Thread(error.to_string()))?;
        let kept = kept.map_err(PrimerError::from)?.map(Bytes::from);
        if let Some(primer) = kept.and_then(|bytes| Primer::from_bytes(&bytes).ok())
            && primer.model() == order.model
        {
            match self.follow(primer, order).await {
                Ok(()) => return Ok(true),
                Err(error @ Unprimed::Memory { .. }) => return Err(error),
                // Another one may be better: what makes tokens is no part of a model's fingerprint.
                Err(error) => tracing::warn!(%error, "a primer that was kept cannot be used"),
            }
        }
        // One that does not answer must not keep the others from it.
        let main = told.mains.get(attempt % told.mains.len().max(1));
        let Some(main) = main.filter(|_| told.phase == DemandPhase::Active) else { return Ok(false) };
        let address = main.address.clone();
        let asked = ask(main, self.means.keyring.clone()).await;
        let bytes = asked.map_err(|why| Unprimed::Main { address: address.clone(), why })?;
        let primer = Primer::from_bytes(&bytes)?;
        if primer.model() != order.model {
            let (found, wanted) = (primer.model().to_owned(), order.model.clone());
            return Err(Unprimed::OtherModel { address, found, wanted });
        }
        if let Some(folder) = self.folder.clone() {
            let model = order.model.clone();
            let kept = spawn_blocking(move || keep_primer(&folder, &model, &bytes)).await;
            if let Ok(Err(error)) = kept {
                tracing::warn!(%error, "a primer is not kept: after a restart it is asked for again");
            }
        }
        self.follow(primer, order).await?;
        Ok(true)
    }

    async fn follow(self: &Arc<Self>, primer: Primer, order: &PredictionOrder) -> Result<(), Unprimed> {
        let past = self.folder.as_ref().map_or(MEMORY, |_| self.means.experience_bytes);
        let bytes = primer.memory_bytes() + past;
        let wanted = usize::try_from(bytes.div_ceil(1 << 20)).unwrap_or(usize::MAX);
        let all = &self.means.memory;
        let permits = u32::try_from(wanted).unwrap_or(u32::MAX);
        let memory = all.clone().try_acquire_many_owned(permits);
        let memory = memory.map_err(|_| Unprimed::Memory { wanted, left: all.available_permits() })?;
        let options = ForesightOptions {
            // Another model's is another folder.
            store: self
                .folder
                .as_ref()
                .map(|folder| (folder.join(primer.model()), self.means.experience_bytes)),
            forgets: order.counts_only,
            output_tokens: f64::from(order.output_tokens),
        };
        let peers = self.folder.clone().map(|folder| {
            let (here, of) = (folder.clone(), order.model.clone());
            let model = order.model.clone();
            Peers {
                every: self.means.exchanged,
                files: Box::new(move || others(&folder, &model)),
                ended: Box::new(move |each| {
                    if let Err(error) = others_ended(&here, &of, each) {
                        tracing::warn!(%error, "parts of gateways that have ended cannot be looked at");
                    }
                }),
            }
        });
        let seer = Arc::downgrade(self);
        let model = order.model.clone();
        let opened = spawn_blocking(move || -> Result<Watch, Unprimed> {
            let foresight = primer.open(options)?;
            let learned = move |foresight: &remoe_foresight::Foresight, news| {
                let Some(seer) = seer.upgrade() else { return };
                seer.metrics.show(foresight);
                if news == News::Answered
                    && let Ok(Some(mix)) = foresight.observed().mix()
                {
                    seer.answered.send_replace(Some((model.clone(), mix)));
                }
            };
            Watch::start(foresight, peers, learned).map_err(|error| Unprimed::Thread(error.to_string()))
        });
        // What a primer makes a library do is contained: it comes from functions in tenants' namespaces.
        let watch = opened.await.map_err(|error| Unprimed::Thread(error.to_string()))??;
        tracing::info!(model = order.model, "what requests use is followed");
        self.replace(Some(Following { watch: Arc::new(watch), order: order.clone(), _memory: memory }));
        Ok(())
    }

    /// What was answered of late, now and whenever that changes.
    pub(crate) fn answered(&self) -> watch::Receiver<Option<(String, Mix)>> {
        self.answered.subscribe()
    }

    /// What is to be said of requests while functions are in `phase`, where `waiting` of them wait.
    pub(crate) async fn mix(&self, phase: DemandPhase, waiting: usize) -> Option<RequestMix> {
        let model = self.order()?.model;
        let is_cold = matches!(phase, DemandPhase::Asleep | DemandPhase::Waking) && waiting > 0;
        let expected = match self.watch().filter(|_| is_cold) {
            Some(watch) => {
                sleep(TOGETHER).await;
                spawn_blocking(move || watch.mix(PREDICTIONS)).await.ok().flatten()
            }
            None => None,
        };
        // The thread of a model before may have had something left to say.
        let answered = || self.answered.borrow().clone().filter(|(of, _)| *of == model);
        let answered = || answered().map(|(_, mix)| (MixOf::Answered, mix));
        let (of, mix) = expected.map(|mix| (MixOf::Waiting, mix)).or_else(answered)?;
        Some(RequestMix {
            of,
            model,
            requests: mix.requests.round().min(f64::from(u32::MAX)) as u32,
            tokens: mix.tokens.round() as u64,
            shares: mix.shares.to_text(MOST_SHARES)?,
        })
    }
}

/// Between two entries that say what requests use, where there is nothing else to say; none: nobody wants to know.
pub(crate) fn pause(told: &MoEDemandSpec) -> Option<Duration> {
    let order = told.prediction.as_ref()?;
    Some((Duration::from_secs(order.every_seconds.into()) / SAID).max(RARELY))
}

/// The primer of `main`, to which what is in `keyring` is shown, or why there is none.
async fn ask(main: &MainFunction, keyring: Option<Arc<Keyring>>) -> Result<Bytes, String> {
    let uri = uri(main, "/v1/primer").ok_or("there is no such address or name")?;
    let client: Client<Connector, Empty<Bytes>> =
        Client::builder(TokioExecutor::new()).build(Connector::new(keyring, PRIMING));
    let asking = async {
        let answer = client.get(uri).await.map_err(|error| error.to_string())?;
        if !answer.status().is_success() {
            return Err(format!("answers {}", answer.status()));
        }
        let body = Limited::new(answer.into_body(), MAX_PRIMER).collect().await;
        body.map(|body| body.to_bytes()).map_err(|error| error.to_string())
    };
    timeout(PRIMING, asking).await.map_err(|_| format!("no primer within {PRIMING:?}"))?
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::experience::Experience;
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use prometheus::Registry;
    use remoe_foresight::{Store, write_primer};
    use remoe_model::Checkpoint;
    use remoe_predictor::record::RecordHeader;
    use remoe_predictor::{Activations, Phase, Shares};
    use std::io::{Read, Write};
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// What requests of the test have the demo model use.
    const USED: [(u32, f32); 2] = [(3, 0.5), (5, 0.5)];
    const UID: &str = "the-demand";

    struct Main {
        header: RecordHeader,
        address: String,
        asked: Arc<AtomicUsize>,
    }

    /// A main function of the demo model, as far as primers go.
    fn main() -> Main {
        let checkpoint =
            Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/model")).unwrap();
        let config = checkpoint.config();
        let layers = config.moe_layers();
        let header = RecordHeader {
            model: checkpoint.fingerprint().unwrap().to_string(),
            layers: layers.iter().map(|&layer| layer as u32).collect(),
            experts: config.moe(layers[0]).unwrap().experts as u32,
            top_k: 2,
            dtype: "bfloat16".to_owned(),
            tokens: false,
        };
        let mut primer = Vec::new();
        let take = |part: Vec<u8>| {
            primer.extend(part);
            true
        };
        write_primer(&checkpoint, &header, take).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, asked) = (listener.local_addr().unwrap().to_string(), Arc::new(AtomicUsize::new(0)));
        let counted = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut request = [0; 1024];
                let read = stream.read(&mut request).unwrap();
                assert!(request[..read].starts_with(b"GET /v1/primer HTTP/1.1\r\n"));
                counted.fetch_add(1, Ordering::SeqCst);
                let head = format!(
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                    primer.len()
                );
                stream.write_all(head.as_bytes()).unwrap();
                stream.write_all(&primer).unwrap();
            }
        });
        Main { header, address, asked }
    }

    fn told(main: &Main, phase: DemandPhase, model: &str) -> MoEDemandSpec {
        let uid = "u".to_owned();
        MoEDemandSpec {
            served_name: "demo".to_owned(),
            context_length: 0,
            phase,
            turn: 1,
            since: MicroTime(Timestamp::UNIX_EPOCH),
            wakes: 0,
            wake_told: 0,
            sleeps: true,
            follows_load: false,
            mains: vec![MainFunction {
                uid,
                pod: "p".to_owned(),
                address: main.address.clone(),
                identity: None,
                room: 1,
            }],
            functions: Vec::new(),
            groups: Vec::new(),
            prediction: Some(PredictionOrder {
                model: model.to_owned(),
                every_seconds: 60,
                counts_only: false,
                output_tokens: 16,
            }),
        }
    }

    /// One that has the part `0` of `folder`.
    fn seer(folder: &Path, mebibytes: u64) -> Arc<Seer> {
        seer_of(&folder.join("0").join(UID), mebibytes)
    }

    fn seer_of(folder: &Path, mebibytes: u64) -> Arc<Seer> {
        let metrics = ForesightMetrics::register(&Registry::new()).unwrap();
        let means = Means::new((mebibytes << 20, 1 << 20), Duration::from_millis(5), metrics, None);
        Seer::new("ns/demo", Some(folder.to_owned()), means)
    }

    fn came(seer: &Seer, id: u64, tenant: &str, privacy: Privacy) -> bool {
        seer.came(id, tenant, privacy, &Bytes::from_static(BODY))
    }

    /// What a main function tells of a request that used these experts.
    fn activations(main: &Main) -> String {
        let mut activations = Activations::new(main.header.layers.len(), main.header.experts as usize);
        let layers = vec![&USED[..]; main.header.layers.len()];
        (0..100).for_each(|_| activations.count(Phase::Prefill, layers.iter().copied()));
        activations.to_text().unwrap()
    }

    /// The share of those experts in what is said.
    fn used(main: &Main, mix: &RequestMix) -> f64 {
        let shares = Shares::from_text(&mix.shares, main.header.layers.len(), main.header.experts as usize);
        let rows = shares.unwrap().to_rows();
        rows.iter().map(|row| row[3] + row[5]).sum::<f64>() / rows.len() as f64
    }

    async fn until(what: &str, mut is: impl FnMut() -> bool) {
        for _ in 0..3000 {
            if is() {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("{what} does not come");
    }

    const BODY: &[u8] = br#"{"prompt": "And the LORD spake unto Moses", "max_tokens": 8}"#;

    #[tokio::test]
    async fn what_requests_use_is_said_and_survives_the_gateway() {
        let (main, folder) = (main(), tempfile::tempdir().unwrap());
        let first = seer(folder.path(), 128);
        assert!(!came(&first, 1, "", Privacy::None), "nothing is known of the model");
        let (tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
        let keeping = tokio::spawn(first.clone().keep(telling));
        until("a primer", || first.order().is_some()).await;
        assert_eq!(first.mix(DemandPhase::Active, 0).await, None);
        let mut answered = first.answered();
        for id in 1..=6 {
            assert!(came(&first, id, "", Privacy::None));
            first.told(id, &activations(&main));
            first.left(id);
        }
        let used = |mix: &RequestMix| used(&main, mix);
        answered.wait_for(|said| said.as_ref().is_some_and(|(_, mix)| mix.requests > 5.5)).await.unwrap();
        let mix = first.mix(DemandPhase::Active, 0).await.unwrap();
        assert_eq!((mix.of, mix.requests, &mix.model), (MixOf::Answered, 6, &main.header.model));
        assert!((540..=600).contains(&mix.tokens) && used(&mix) > 0.95, "{} {}", mix.tokens, used(&mix));
        assert_eq!(pause(&tell.borrow()), Some(Duration::from_secs(15)));
        keeping.abort();
        assert!(keeping.await.unwrap_err().is_cancelled());
        drop(first);

        // The next one knows what it knew, while nobody is there to ask, and says whom those who wait resemble.
        let second = seer(folder.path(), 128);
        let (_tell, telling) = watch::channel(told(&main, DemandPhase::Asleep, &main.header.model));
        let _keeping = tokio::spawn(second.clone().keep(telling));
        until("what was kept", || second.order().is_some()).await;
        assert_eq!(main.asked.load(Ordering::SeqCst), 1);
        assert!(came(&second, 7, "", Privacy::None));
        let mix = second.mix(DemandPhase::Asleep, 1).await.unwrap();
        assert_eq!((mix.of, mix.requests), (MixOf::Waiting, 1));
        assert!(used(&mix) > 0.5, "{}", used(&mix));
    }

    #[tokio::test]
    async fn a_model_that_is_another_or_finds_no_room_is_served_without() {
        let (main, folder) = (main(), tempfile::tempdir().unwrap());
        let seer_of = |mebibytes| seer(folder.path(), mebibytes);
        let order = told(&main, DemandPhase::Active, "another");
        let other = seer_of(128);
        let refused = other.begin(order.prediction.as_ref().unwrap(), &order, 0).await;
        assert!(matches!(refused, Err(Unprimed::OtherModel { .. })), "{refused:?}");
        let order = told(&main, DemandPhase::Active, &main.header.model);
        let cramped = seer_of(1);
        let refused = cramped.begin(order.prediction.as_ref().unwrap(), &order, 0).await;
        assert!(matches!(refused, Err(Unprimed::Memory { left: 1, .. })), "{refused:?}");
        assert!(!came(&cramped, 1, "", Privacy::None));
        // It is not asked for again where there is a folder.
        let refused = cramped.begin(order.prediction.as_ref().unwrap(), &order, 1).await;
        assert!(matches!(refused, Err(Unprimed::Memory { .. })), "{refused:?}");
        assert_eq!(main.asked.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn who_is_told_to_keep_counts_only_forgets() {
        let (main, folder) = (main(), tempfile::tempdir().unwrap());
        let seer = seer(folder.path(), 128);
        let (tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
        let _keeping = tokio::spawn(seer.clone().keep(telling));
        until("a primer", || seer.order().is_some()).await;
        let past = folder.path().join("0").join(UID).join(&main.header.model);
        assert!(past.exists());
        tell.send_modify(|told| told.prediction.as_mut().unwrap().counts_only = true);
        until("the other order", || seer.order().is_some_and(|order| order.counts_only)).await;
        assert!(!past.exists());
    }

    #[tokio::test]
    async fn what_one_gateway_serves_another_one_predicts_by() {
        let (main, folder) = (main(), tempfile::tempdir().unwrap());
        let [one, other] = ["0", "1"].map(|part| seer_of(&folder.path().join(part).join(UID), 128));
        let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
        let _keeping = [&one, &other].map(|seer| tokio::spawn(seer.clone().keep(telling.clone())));
        until("a primer", || one.order().is_some() && other.order().is_some()).await;
        assert!(came(&other, 1, "t", Privacy::None));
        assert_eq!(other.mix(DemandPhase::Asleep, 1).await, None, "it knows nothing");
        other.left(1);
        for id in 1..=6 {
            assert!(came(&one, id, "t", Privacy::None));
            one.told(id, &activations(&main));
        }
        let metrics = &other.metrics;
        until("what the other one learned", || metrics.shared() == 6).await;
        assert!(came(&other, 2, "t", Privacy::None));
        let mix = other.mix(DemandPhase::Asleep, 1).await.unwrap();
        assert_eq!((mix.of, mix.requests), (MixOf::Waiting, 1));
        assert!(used(&main, &mix) > 0.5, "{}", used(&main, &mix));
        other.left(2);
        // It has answered nobody: the operator adds up what all of them say.
        assert_eq!(other.mix(DemandPhase::Active, 0).await, None);
        // Of another tenant nothing is known.
        assert!(came(&other, 3, "u", Privacy::None));
        assert_eq!(other.mix(DemandPhase::Asleep, 1).await, None);
    }

    #[tokio::test]
    async fn what_a_gateway_that_has_ended_kept_of_a_tenant_goes_when_that_says_so() {
        let (main, folder) = (main(), tempfile::tempdir().unwrap());
        let file = {
            let ended = Experience::take(folder.path()).unwrap();
            let seer = seer_of(&ended.of(UID), 128);
            let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
            let keeping = tokio::spawn(seer.clone().keep(telling));
            until("a primer", || seer.order().is_some()).await;
            for (id, tenant) in [(1, "t"), (2, "u"), (3, "t")] {
                assert!(came(&seer, id, tenant, Privacy::None));
                seer.told(id, &activations(&main));
            }
            let file = Store::file_in(&ended.of(UID).join(&main.header.model));
            let mut answered = seer.answered();
            answered.wait_for(|said| said.as_ref().is_some_and(|(_, mix)| mix.requests > 2.5)).await.unwrap();
            keeping.abort();
            let _aborted = keeping.await;
            file
        };
        let bytes = || std::fs::metadata(&file).unwrap().len();
        let before = bytes();
        // Another gateway has its part, and a further one hears of the tenant.
        let parts = [(); 2].map(|()| Experience::take(folder.path()).unwrap());
        let [inherited, other] = parts;
        assert!(file.starts_with(inherited.of(UID)));
        let seer = seer_of(&other.of(UID), 128);
        let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
        let _keeping = tokio::spawn(seer.clone().keep(telling));
        until("a primer", || seer.order().is_some()).await;
        assert!(came(&seer, 1, "t", Privacy::CountsOnly));
        assert_eq!(seer.mix(DemandPhase::Asleep, 1).await, None, "and it is not read again");
        // Whoever has a part sees to it himself; when nobody has it any more, the others do.
        assert_eq!(bytes(), before);
        drop(inherited);
        until("the file without the tenant", || bytes() < before).await;
        let own = Store::file_in(&other.of(UID).join(&main.header.model));
        assert_eq!(
            bytes(),
            std::fs::metadata(own).unwrap().len(),
            "as in its own part: the other tenant's is there"
        );
        seer.left(1);
        assert!(came(&seer, 2, "u", Privacy::None));
        assert!(seer.mix(DemandPhase::Asleep, 1).await.is_some_and(|mix| mix.of == MixOf::Waiting));
    }

    #[tokio::test]
    async fn of_a_tenant_that_leaves_itself_out_nothing_is_said() {
        let (main, folder) = (main(), tempfile::tempdir().unwrap());
        let seer = seer(folder.path(), 128);
        let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
        let _keeping = tokio::spawn(seer.clone().keep(telling));
        until("a primer", || seer.order().is_some()).await;
        let mut answered = seer.answered();
        assert!(came(&seer, 1, "t", Privacy::None));
        seer.told(1, &activations(&main));
        answered.wait_for(Option::is_some).await.unwrap();
        assert!(came(&seer, 2, "t", Privacy::None));
        assert!(seer.mix(DemandPhase::Asleep, 1).await.is_some_and(|mix| mix.of == MixOf::Waiting));
        seer.left(2);
        // It waits, and what is said is what is known without it: of those who wait nothing.
        assert!(!came(&seer, 3, "t", Privacy::LeftOut));
        let mix = seer.mix(DemandPhase::Asleep, 1).await.unwrap();
        assert_eq!((mix.of, mix.requests), (MixOf::Answered, 1));
        // Its past is gone.
        assert!(came(&seer, 4, "t", Privacy::CountsOnly));
        let mix = seer.mix(DemandPhase::Asleep, 1).await.unwrap();
        assert_eq!(mix.of, MixOf::Answered, "nothing is known of its like");
    }
}
