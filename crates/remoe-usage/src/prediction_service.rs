//! A [`UsagePredictor`] with a thread of its own, so that no request waits for it.

use crate::exchange::Exchange;
use crate::joint_usage::JointUsage;
use crate::store::StoredRequest;
use crate::tenant::Tenant;
use crate::usage_predictor::{Arrival, Retention, UsagePredictor};
use std::any::Any;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::time::Duration;

/// Requests that have come and were not looked at yet, at most; further ones are served without a prediction.
const QUEUE: usize = 256;
/// A longer body is served without a prediction.
const LONGEST_BODY: usize = 256 << 10;

/// Takes note of requests, and answers what those who are here will use.
///
/// Events are looked at in their order by one thread, which ends when this is dropped.
#[derive(Debug)]
pub struct PredictionService {
    events: Sender<LearnerEvent>,
    queued: Arc<AtomicUsize>,
    is_open: Arc<AtomicBool>,
    /// Dropped with the watch: the thread that reads the files of other gateways holds the other end, and ends then.
    _reads: SyncSender<()>,
}

/// Other gateways whose files are read.
pub struct Peers {
    /// Between two looks.
    pub every: Duration,
    /// Which files there are by now.
    pub files: Box<dyn FnMut() -> Vec<PathBuf> + Send>,
    /// Hands over each of those whose gateway has ended, and keeps others from beginning to write it meanwhile.
    pub ended: Ended,
}

/// Calls what it is given with the file of each gateway that has ended.
pub type Ended = Box<dyn FnMut(&mut dyn FnMut(&Path)) + Send>;

/// Opens what is known of a model where a request needs it; `None`: not now, as the log says.
pub type PredictorOpener = Box<dyn FnMut() -> Option<Opened> + Send>;

/// Predictor of a model in memory.
pub struct Opened {
    /// The predictor.
    pub predictor: UsagePredictor,
    /// Let go with it: a reservation of its memory, say.
    pub held: Box<dyn Any + Send>,
}

/// Kind of news that the predictor has learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LearnedUpdate {
    /// Expert usage of a request.
    Answered,
    /// Requests from other gateways.
    Shared,
}

#[derive(Debug)]
enum LearnerEvent {
    Came { id: u64, tenant: Tenant, keeps: Retention, body: Vec<u8> },
    Told { id: u64, activations: String },
    Left { id: u64 },
    Asked { answer: SyncSender<Option<JointUsage>> },
    Shared { records: Vec<StoredRequest>, taken: SyncSender<()> },
}

impl PredictionService {
    /// Starts the thread. It calls `learned` after every request whose activations were told, and where there are `peers` when
    /// something of what they store was learned.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        predictor: UsagePredictor,
        peers: Option<Peers>,
        learned: impl FnMut(&UsagePredictor, LearnedUpdate) + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_opened(Opened { predictor, held: Box::new(()) }, peers, learned)
    }

    /// As [`Self::start`], of what is held until this is dropped.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start_opened(
        opened: Opened,
        peers: Option<Peers>,
        learned: impl FnMut(&UsagePredictor, LearnedUpdate) + Send + 'static,
    ) -> io::Result<Self> {
        Self::spawn(PredictorSource { opened: Some(opened), open: None }, peers, learned)
    }

    /// Starts the thread with nothing in memory: `open` is called when a request comes, and what it gave is let go when none
    /// has come for `idle`. What was learned and not stored goes with it.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start_closed(
        open: PredictorOpener,
        idle: Duration,
        peers: Option<Peers>,
        learned: impl FnMut(&UsagePredictor, LearnedUpdate) + Send + 'static,
    ) -> io::Result<Self> {
        Self::spawn(PredictorSource { opened: None, open: Some((open, idle)) }, peers, learned)
    }

    fn spawn(
        source: PredictorSource,
        peers: Option<Peers>,
        learned: impl FnMut(&UsagePredictor, LearnedUpdate) + Send + 'static,
    ) -> io::Result<Self> {
        let (events, inlet) = channel();
        let (reads, ends) = sync_channel(0);
        let (tell, exchanges) = channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let is_open = Arc::new(AtomicBool::new(source.opened.is_some()));
        if let Some(exchange) = source.opened.as_ref().and_then(|opened| opened.predictor.exchange()) {
            // Its other end is below.
            let _always_there = tell.send(exchange);
        }
        let (seen, shown) = (queued.clone(), is_open.clone());
        std::thread::Builder::new()
            .name("foresight".to_owned())
            .spawn(move || follow(source, &inlet, (&seen, &shown), &tell, learned))?;
        if let Some(peers) = peers {
            let events = events.clone();
            std::thread::Builder::new()
                .name("exchange".to_owned())
                .spawn(move || read(&exchanges, peers, &events, &ends))?;
        }
        Ok(Self { events, queued, is_open, _reads: reads })
    }

    /// Returns true if what is known of the model is in memory.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// The request `id` of `tenant` has come. False where it will not be followed: then nothing else is to be said of it.
    pub fn came(&self, id: u64, tenant: &str, keeps: Retention, body: &[u8]) -> bool {
        if body.len() > LONGEST_BODY && keeps.are_records() {
            return false;
        }
        // Every event but this one belongs to a request that was let in here, and what others have learned is told piece by
        // piece: the queue is bounded by them.
        if self.queued.fetch_add(1, Ordering::Relaxed) >= QUEUE {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        let is_followed = keeps != Retention::Nothing && body.len() <= LONGEST_BODY;
        // Of what is not followed it is only taken note that the tenant's past goes.
        let (keeps, body) = if is_followed { (keeps, body) } else { (Retention::Nothing, &[][..]) };
        self.send(LearnerEvent::Came { id, tenant: Tenant::named(tenant), keeps, body: body.to_vec() });
        is_followed
    }

    /// Learns from what a main function reported of the request `id`.
    pub fn told(&self, id: u64, activations: &str) {
        if activations.len() <= remoe_predictor::MAX_ACTIVATIONS_BYTES {
            self.send(LearnerEvent::Told { id, activations: activations.to_owned() });
        }
    }

    /// The request `id` is over.
    pub fn left(&self, id: u64) {
        self.send(LearnerEvent::Left { id });
    }

    /// Predicts the joint usage of the requests that have come by now. Blocks for `most` at most; `None` if nothing is
    /// known by then.
    #[must_use]
    pub fn mix(&self, most: Duration) -> Option<JointUsage> {
        let (answer, answered) = sync_channel(1);
        self.send(LearnerEvent::Asked { answer });
        answered.recv_timeout(most).ok().flatten()
    }

    fn send(&self, event: LearnerEvent) {
        // The thread ends with this.
        let _always_there = self.events.send(event);
    }
}

/// Predictor of a model, and how it is opened again.
struct PredictorSource {
    opened: Option<Opened>,
    open: Option<(PredictorOpener, Duration)>,
}

impl PredictorSource {
    /// The next event; `None` where there will be none. While nothing comes, what is known is let go.
    fn next(&mut self, events: &Receiver<LearnerEvent>, is_open: &AtomicBool) -> Option<LearnerEvent> {
        while let (Some(opened), Some((_, idle))) = (&self.opened, &self.open) {
            match events.recv_timeout(*idle) {
                Ok(event) => return Some(event),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) if opened.predictor.is_idle() => {
                    is_open.store(false, Ordering::Relaxed);
                    self.opened = None;
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        events.recv().ok()
    }

    /// Returns the predictor, if it is open or `event` needs it.
    fn for_event(
        &mut self,
        event: &LearnerEvent,
        is_open: &AtomicBool,
        exchanges: &Sender<Exchange>,
    ) -> Option<&mut UsagePredictor> {
        if self.opened.is_none()
            && matches!(event, LearnerEvent::Came { .. })
            && let Some((open, _)) = &mut self.open
        {
            self.opened = open();
            is_open.store(self.opened.is_some(), Ordering::Relaxed);
            if let Some(exchange) = self.opened.as_ref().and_then(|opened| opened.predictor.exchange()) {
                // There may be no peers.
                let _unread = exchanges.send(exchange);
            }
        }
        self.opened.as_mut().map(|opened| &mut opened.predictor)
    }
}

fn follow(
    mut source: PredictorSource,
    events: &Receiver<LearnerEvent>,
    (queued, is_open): (&AtomicUsize, &AtomicBool),
    exchanges: &Sender<Exchange>,
    mut learned: impl FnMut(&UsagePredictor, LearnedUpdate),
) {
    while let Some(event) = source.next(events, is_open) {
        if matches!(event, LearnerEvent::Came { .. }) {
            queued.fetch_sub(1, Ordering::Relaxed);
        }
        // Who asks or tells something meanwhile gets no answer, which says that nothing is known.
        let Some(predictor) = source.for_event(&event, is_open, exchanges) else { continue };
        match event {
            LearnerEvent::Came { id, tenant, keeps, body } => {
                predictor.came(Arrival { id, tenant, keeps, body: &body });
            }
            LearnerEvent::Told { id, activations } => match predictor.told(id, &activations) {
                Ok(()) => learned(predictor, LearnedUpdate::Answered),
                Err(error) => tracing::warn!(%error, "request not learned"),
            },
            LearnerEvent::Left { id } => predictor.left(id),
            LearnerEvent::Asked { answer } => {
                let mix = predictor.mix().unwrap_or_else(|error| {
                    tracing::warn!(%error, "prediction for waiting requests failed");
                    None
                });
                // Who asked may have gone on without it.
                let _late = answer.try_send(mix);
            }
            LearnerEvent::Shared { records, taken } => {
                if predictor.share(&records) > 0 {
                    learned(predictor, LearnedUpdate::Shared);
                }
                // Who told it may have ended.
                let _gone = taken.try_send(());
            }
        }
    }
}

/// Tells `events` what other gateways have learned, a piece when the one before was taken in, until the other end of `ends` goes.
/// Reads by the latest of `exchanges`: each is of what is known since it was opened.
fn read(
    exchanges: &Receiver<Exchange>,
    mut peers: Peers,
    events: &Sender<LearnerEvent>,
    ends: &Receiver<()>,
) {
    let mut exchange = None;
    loop {
        exchange = exchanges.try_iter().last().or(exchange);
        if let Some(exchange) = &mut exchange {
            look(exchange, &mut peers, events, ends);
        }
        if ends.recv_timeout(peers.every) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

fn look(exchange: &mut Exchange, peers: &mut Peers, events: &Sender<LearnerEvent>, ends: &Receiver<()>) {
    exchange.look(&(peers.files)(), |records| {
        let (taken, told) = sync_channel(1);
        let is_over = ends.try_recv() != Err(TryRecvError::Empty);
        !is_over && events.send(LearnerEvent::Shared { records, taken }).is_ok() && told.recv().is_ok()
    });
    (peers.ended)(&mut |file| {
        if let Err(error) = exchange.rid(file) {
            tracing::error!(%error, "cannot erase a tenant's training history of an ended gateway");
        }
    });
}
