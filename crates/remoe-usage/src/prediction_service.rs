//! Service that runs a [`UsagePredictor`] on its own thread, so that no request waits for it.

use crate::history_store::StoredRequest;
use crate::joint_usage::JointUsage;
use crate::peer_history::PeerHistoryReader;
use crate::tenant::Tenant;
use crate::usage_predictor::{RequestArrival, Retention, UsagePredictor};
use std::any::Any;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::time::Duration;

/// Largest number of queued arrivals; further requests are served without a prediction.
const MAX_QUEUED_ARRIVALS: usize = 256;
/// Largest body that gets a prediction, in bytes.
const MAX_BODY_BYTES: usize = 256 << 10;

/// Handle of the predictor's thread: queues events of requests and predicts the usage of active ones.
///
/// The thread handles events in order and ends when the handle is dropped.
#[derive(Debug)]
pub struct PredictionService {
    events: Sender<ServiceEvent>,
    queued_arrivals: Arc<AtomicUsize>,
    is_loaded: Arc<AtomicBool>,
    /// Ends the thread that reads the files of other gateways, which holds the receiver, on drop.
    _stop_reads: SyncSender<()>,
}

/// Access to the history files of other gateways.
pub struct PeerGateways {
    /// Interval between two reads.
    pub poll_interval: Duration,
    /// Lists the present files.
    pub files: Box<dyn FnMut() -> Vec<PathBuf> + Send>,
    /// Visits the file of each ended gateway and prevents other writers meanwhile.
    pub for_each_ended: ForEachEnded,
}

/// Function that calls its argument with the file of each ended gateway.
pub type ForEachEnded = Box<dyn FnMut(&mut dyn FnMut(&Path)) + Send>;

/// Function that loads a predictor on demand. Returns `None`, after logging the cause, if it cannot load one now.
pub type PredictorLoader = Box<dyn FnMut() -> Option<LoadedPredictor> + Send>;

/// Predictor in memory with the resources that it holds.
pub struct LoadedPredictor {
    /// Loaded predictor.
    pub predictor: UsagePredictor,
    /// Guard that is dropped together with the predictor, such as a reservation of memory.
    pub guard: Box<dyn Any + Send>,
}

/// Cause of a change of the training history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HistoryUpdate {
    /// A request ended and its expert usage was learned.
    Answered,
    /// Requests of other gateways were learned.
    Shared,
}

#[derive(Debug)]
enum ServiceEvent {
    Arrived { id: u64, tenant: Tenant, retention: Retention, body: Vec<u8> },
    UsageReported { id: u64, activations: String },
    Ended { id: u64 },
    PredictionRequested { answer: SyncSender<Option<JointUsage>> },
    Shared { records: Vec<StoredRequest>, learned: SyncSender<()> },
}

impl PredictionService {
    /// Starts the thread with a loaded predictor. It calls `learned` after each request whose usage it learned and,
    /// with `peers`, after it learned from other gateways.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        predictor: UsagePredictor,
        peers: Option<PeerGateways>,
        learned: impl FnMut(&UsagePredictor, HistoryUpdate) + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_loaded(LoadedPredictor { predictor, guard: Box::new(()) }, peers, learned)
    }

    /// Starts the thread as [`Self::start`] does and keeps the guard of `loaded` until the predictor is dropped.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start_loaded(
        loaded: LoadedPredictor,
        peers: Option<PeerGateways>,
        learned: impl FnMut(&UsagePredictor, HistoryUpdate) + Send + 'static,
    ) -> io::Result<Self> {
        Self::spawn(PredictorSource { loaded: Some(loaded), load: None }, peers, learned)
    }

    /// Starts the thread without a predictor in memory. It calls `load` at the next request and drops the predictor
    /// when no request arrived for `idle`. Anything learned since and not stored is lost.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start_unloaded(
        load: PredictorLoader,
        idle: Duration,
        peers: Option<PeerGateways>,
        learned: impl FnMut(&UsagePredictor, HistoryUpdate) + Send + 'static,
    ) -> io::Result<Self> {
        Self::spawn(PredictorSource { loaded: None, load: Some((load, idle)) }, peers, learned)
    }

    fn spawn(
        source: PredictorSource,
        peers: Option<PeerGateways>,
        learned: impl FnMut(&UsagePredictor, HistoryUpdate) + Send + 'static,
    ) -> io::Result<Self> {
        let (events, event_receiver) = channel();
        let (stop_reads, stopped) = sync_channel(0);
        let (reader_sender, readers) = channel();
        let queued_arrivals = Arc::new(AtomicUsize::new(0));
        let is_loaded = Arc::new(AtomicBool::new(source.loaded.is_some()));
        if let Some(reader) = source.loaded.as_ref().and_then(|loaded| loaded.predictor.peer_history_reader())
        {
            // The receiver lives in this function.
            let _connected = reader_sender.send(reader);
        }
        let (thread_queued_arrivals, thread_is_loaded) = (queued_arrivals.clone(), is_loaded.clone());
        std::thread::Builder::new().name("usage-predictor".to_owned()).spawn(move || {
            handle_events(
                source,
                &event_receiver,
                (&thread_queued_arrivals, &thread_is_loaded),
                &reader_sender,
                learned,
            )
        })?;
        if let Some(peers) = peers {
            let events = events.clone();
            std::thread::Builder::new()
                .name("peer-history".to_owned())
                .spawn(move || read_peers(&readers, peers, &events, &stopped))?;
        }
        Ok(Self { events, queued_arrivals, is_loaded, _stop_reads: stop_reads })
    }

    /// Returns true if the predictor is in memory.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.is_loaded.load(Ordering::Relaxed)
    }

    /// Queues the arrival of request `id` of `tenant`. Returns false if the request is not tracked; the caller then
    /// reports nothing else about it.
    pub fn begin_request(&self, id: u64, tenant: &str, retention: Retention, body: &[u8]) -> bool {
        if body.len() > MAX_BODY_BYTES && retention.keeps_records() {
            return false;
        }
        // This check bounds the whole queue: every other event belongs to a request that was admitted here, and
        // histories of other gateways are sent one batch at a time (invariant 7 of ARCHITECTURE.md).
        if self.queued_arrivals.fetch_add(1, Ordering::Relaxed) >= MAX_QUEUED_ARRIVALS {
            self.queued_arrivals.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        let is_tracked = retention != Retention::Nothing && body.len() <= MAX_BODY_BYTES;
        // An untracked request only makes the predictor forget the tenant's history.
        let (retention, body) = if is_tracked { (retention, body) } else { (Retention::Nothing, &[][..]) };
        self.send(ServiceEvent::Arrived {
            id,
            tenant: Tenant::named(tenant),
            retention,
            body: body.to_vec(),
        });
        is_tracked
    }

    /// Queues the activations that a main function reported for request `id`.
    pub fn record_usage(&self, id: u64, activations: &str) {
        if activations.len() <= remoe_predictor::MAX_ACTIVATIONS_BYTES {
            self.send(ServiceEvent::UsageReported { id, activations: activations.to_owned() });
        }
    }

    /// Queues the end of request `id`.
    pub fn end_request(&self, id: u64) {
        self.send(ServiceEvent::Ended { id });
    }

    /// Predicts the joint usage of the active requests. Blocks for at most `timeout`. Returns `None` if nothing is
    /// known by then.
    #[must_use]
    pub fn predict_joint_usage(&self, timeout: Duration) -> Option<JointUsage> {
        let (answer, answered) = sync_channel(1);
        self.send(ServiceEvent::PredictionRequested { answer });
        answered.recv_timeout(timeout).ok().flatten()
    }

    fn send(&self, event: ServiceEvent) {
        // The receiver lives until this handle is dropped.
        let _connected = self.events.send(event);
    }
}

/// Predictor of a model and the means to load it again.
struct PredictorSource {
    loaded: Option<LoadedPredictor>,
    load: Option<(PredictorLoader, Duration)>,
}

impl PredictorSource {
    /// Waits for the next event. Drops the predictor after the idle window. Returns `None` if there will be no
    /// further event.
    fn next(&mut self, events: &Receiver<ServiceEvent>, is_loaded: &AtomicBool) -> Option<ServiceEvent> {
        while let (Some(loaded), Some((_, idle))) = (&self.loaded, &self.load) {
            match events.recv_timeout(*idle) {
                Ok(event) => return Some(event),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) if loaded.predictor.is_idle() => {
                    is_loaded.store(false, Ordering::Relaxed);
                    self.loaded = None;
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        events.recv().ok()
    }

    /// Returns the predictor. Loads it first if `event` is an arrival.
    fn for_event(
        &mut self,
        event: &ServiceEvent,
        is_loaded: &AtomicBool,
        readers: &Sender<PeerHistoryReader>,
    ) -> Option<&mut UsagePredictor> {
        if self.loaded.is_none()
            && matches!(event, ServiceEvent::Arrived { .. })
            && let Some((load, _)) = &mut self.load
        {
            self.loaded = load();
            is_loaded.store(self.loaded.is_some(), Ordering::Relaxed);
            if let Some(reader) =
                self.loaded.as_ref().and_then(|loaded| loaded.predictor.peer_history_reader())
            {
                // Without peers there is no receiver.
                let _unread = readers.send(reader);
            }
        }
        self.loaded.as_mut().map(|loaded| &mut loaded.predictor)
    }
}

fn handle_events(
    mut source: PredictorSource,
    events: &Receiver<ServiceEvent>,
    (queued_arrivals, is_loaded): (&AtomicUsize, &AtomicBool),
    readers: &Sender<PeerHistoryReader>,
    mut learned: impl FnMut(&UsagePredictor, HistoryUpdate),
) {
    while let Some(event) = source.next(events, is_loaded) {
        if matches!(event, ServiceEvent::Arrived { .. }) {
            queued_arrivals.fetch_sub(1, Ordering::Relaxed);
        }
        // Without a predictor, the dropped reply channel tells the caller that nothing is known.
        let Some(predictor) = source.for_event(&event, is_loaded, readers) else { continue };
        match event {
            ServiceEvent::Arrived { id, tenant, retention, body } => {
                predictor.begin_request(RequestArrival { id, tenant, retention, body: &body });
            }
            ServiceEvent::UsageReported { id, activations } => match predictor.record_usage(id, &activations)
            {
                Ok(()) => learned(predictor, HistoryUpdate::Answered),
                Err(error) => tracing::warn!(%error, "request not learned"),
            },
            ServiceEvent::Ended { id } => predictor.end_request(id),
            ServiceEvent::PredictionRequested { answer } => {
                let usage = predictor.predict_joint_usage().unwrap_or_else(|error| {
                    tracing::warn!(%error, "prediction for waiting requests failed");
                    None
                });
                // The caller may have timed out.
                let _late = answer.try_send(usage);
            }
            ServiceEvent::Shared { records, learned: acknowledge } => {
                if predictor.learn_shared(&records) > 0 {
                    learned(predictor, HistoryUpdate::Shared);
                }
                // The reading thread may have ended.
                let _gone = acknowledge.try_send(());
            }
        }
    }
}

/// Sends the histories of other gateways to `events`, each batch after the previous one was learned, until `stopped`
/// disconnects. Uses the latest of `readers`: each load of the predictor sends a new one.
fn read_peers(
    readers: &Receiver<PeerHistoryReader>,
    mut peers: PeerGateways,
    events: &Sender<ServiceEvent>,
    stopped: &Receiver<()>,
) {
    let mut reader = None;
    loop {
        reader = readers.try_iter().last().or(reader);
        if let Some(reader) = &mut reader {
            read_peers_once(reader, &mut peers, events, stopped);
        }
        if stopped.recv_timeout(peers.poll_interval) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

fn read_peers_once(
    reader: &mut PeerHistoryReader,
    peers: &mut PeerGateways,
    events: &Sender<ServiceEvent>,
    stopped: &Receiver<()>,
) {
    reader.read_new(&(peers.files)(), |records| {
        let (learned, acknowledged) = sync_channel(1);
        let is_stopped = stopped.try_recv() != Err(TryRecvError::Empty);
        !is_stopped
            && events.send(ServiceEvent::Shared { records, learned }).is_ok()
            && acknowledged.recv().is_ok()
    });
    (peers.for_each_ended)(&mut |file| {
        if let Err(error) = reader.erase_opted_out(file) {
            tracing::error!(%error, "cannot erase a tenant's training history of an ended gateway");
        }
    });
}
