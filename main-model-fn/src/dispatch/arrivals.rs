//! Shorter cold starts: local experts of a placement that is in force while they are still being read, so that the first answer waits for
//! what it uses and not for the whole model. They come layer by layer, those that an answer waits for before all
//! others.
//!
//! An answer says which experts it waits for one layer at a time, and a read is never interrupted. So after a demand
//! load, a loader waits briefly for the next layer's demand before it prefetches: at most as long as the load took,
//! which is what a wrong guess costs.

use prometheus::IntGauge;
use remoe_kernels::{NumericsClass, PackedExpert};
use remoe_model::Checkpoint;
use remoe_weights::{LoadError, load_expert};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// How often something is read that cannot be read for the moment, and how long after each time that is tried again.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);

/// How long the first answer is waited for, and how long any is at most.
const FIRST_WAIT: Duration = Duration::from_millis(2);
const LONGEST_WAIT: Duration = Duration::from_millis(50);

/// Layer and expert.
type ExpertKey = (usize, u32);

/// An expert that is there or will be.
pub(super) type ExpertSlot = Arc<OnceLock<Arc<PackedExpert>>>;

/// Experts on their way, and those who bring them.
pub(crate) struct Arrivals {
    open: Mutex<PendingLoads>,
    /// Number of experts that have not arrived, for monitoring.
    shown: IntGauge,
    /// How many have come.
    come: AtomicU64,
    /// Told of each that comes.
    changed: Notify,
    /// Told of each that is waited for.
    hurried: Condvar,
}

#[derive(Default)]
struct PendingLoads {
    /// Not begun yet.
    places: BTreeMap<ExpertKey, ExpertSlot>,
    /// Keys of `places` that an answer waits for, in order of demand. A key that is no longer in `places` is skipped.
    first: VecDeque<ExpertKey>,
    /// Set once no more experts will arrive.
    stopped: bool,
}

impl Arrivals {
    /// Creates the arrivals of experts that will be brought to `places`.
    pub(super) fn new(places: BTreeMap<ExpertKey, ExpertSlot>, shown: IntGauge) -> Self {
        shown.set(i64::try_from(places.len()).unwrap_or(i64::MAX));
        Self {
            open: Mutex::new(PendingLoads { places, ..PendingLoads::default() }),
            shown,
            come: AtomicU64::new(0),
            changed: Notify::new(),
            hurried: Condvar::new(),
        }
    }

    /// How many have come so far: another number than before says that there is something new.
    pub(super) fn come(&self) -> u64 {
        self.come.load(Ordering::Acquire)
    }

    /// Returns when another one has come since this was asked the last time. For one caller.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Moves `expert` of `layer` ahead of others, because an answer waits for it.
    pub(super) fn hurry(&self, layer: usize, expert: u32) {
        let mut open = self.open();
        let key = (layer, expert);
        // Asked for again by an iteration that is repeated, it keeps its turn.
        if open.places.contains_key(&key) && !open.first.contains(&key) {
            open.first.push_back(key);
            drop(open);
            self.hurried.notify_one();
        }
    }

    /// How many are waited for.
    #[cfg(test)]
    pub(crate) fn waited_for(&self) -> usize {
        self.open().first.len()
    }

    /// Reads all on `threads` threads until they are there, or until [`stop`](Self::stop) is called.
    ///
    /// # Errors
    /// The first expert that cannot be read, although that was tried several times.
    pub(crate) fn read(
        &self,
        checkpoint: &Checkpoint,
        class: NumericsClass,
        threads: usize,
    ) -> Result<(), LoadError> {
        let read = || {
            let read = self.read_some(|(layer, expert)| load_expert(checkpoint, layer, expert, class));
            if read.is_err() {
                // The others need not go on.
                self.stop();
            }
            read
        };
        std::thread::scope(|scope| {
            let spawn = |number| {
                let name = format!("arrivals-{number}");
                std::thread::Builder::new().name(name).spawn_scoped(scope, read).ok()
            };
            let others: Vec<_> = (1..threads.max(1)).map_while(spawn).collect();
            let mut outcome = read();
            for other in others {
                outcome = outcome.and(other.join().unwrap_or(Err(LoadError::Panicked)));
            }
            outcome
        })
    }

    /// Stops reading: an expert whose read has not begun is not read any more.
    pub(crate) fn stop(&self) {
        let mut open = self.open();
        open.stopped = true;
        drop(open);
        self.hurried.notify_all();
        self.changed.notify_one();
    }

    /// Reads one after the other until none is left to begin.
    fn read_some(
        &self,
        load: impl Fn(ExpertKey) -> Result<PackedExpert, LoadError>,
    ) -> Result<(), LoadError> {
        let mut until = Instant::now() + FIRST_WAIT;
        while let Some(NextLoad { key, place, hurried }) = self.begin(until) {
            let begun = Instant::now();
            let (layer, expert) = key;
            let packed = patiently(format_args!("expert {expert} of layer {layer}"), || load(key))?;
            if hurried {
                until = Instant::now() + begun.elapsed().min(LONGEST_WAIT);
            }
            // No other thread fills this place.
            let _first = place.set(Arc::new(packed));
            self.come.fetch_add(1, Ordering::AcqRel);
            self.shown.dec();
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Returns the next expert to read: before `until`, only one that an answer waits for.
    fn begin(&self, until: Instant) -> Option<NextLoad> {
        let mut open = self.open();
        loop {
            if open.stopped {
                return None;
            }
            while let Some(key) = open.first.pop_front() {
                if let Some(place) = open.places.remove(&key) {
                    return self.begun(&open, NextLoad { key, place, hurried: true });
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || open.places.is_empty() {
                let (key, place) = open.places.pop_first()?;
                return self.begun(&open, NextLoad { key, place, hurried: false });
            }
            (open, _) = self.hurried.wait_timeout(open, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns `next`. If it is the last one, wakes the threads that wait for another.
    fn begun(&self, open: &PendingLoads, next: NextLoad) -> Option<NextLoad> {
        if open.places.is_empty() {
            self.hurried.notify_all();
        }
        Some(next)
    }

    fn open(&self) -> MutexGuard<'_, PendingLoads> {
        // Changed in single steps, so a panic elsewhere cannot have left it half-written.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An expert to read.
struct NextLoad {
    key: ExpertKey,
    place: ExpertSlot,
    /// Set if an answer waits for it.
    hurried: bool,
}

/// Reads something, some times where a disk or a network has a bad moment.
pub(crate) fn patiently<T>(
    what: impl fmt::Display,
    read: impl Fn() -> Result<T, LoadError>,
) -> Result<T, LoadError> {
    let mut attempts = 1;
    loop {
        match read() {
            Err(LoadError::Checkpoint(error)) if error.is_transient() && attempts < ATTEMPTS => {
                tracing::warn!(%error, %what, "read failed, retrying");
                std::thread::sleep(PAUSE);
                attempts += 1;
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use remoe_kernels::Dtype;
    use std::path::Path;

    fn fixture() -> Checkpoint {
        Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral-basic"))
            .unwrap()
    }

    fn arrivals(keys: &[ExpertKey]) -> (Arrivals, BTreeMap<ExpertKey, ExpertSlot>) {
        let places: BTreeMap<ExpertKey, ExpertSlot> =
            keys.iter().map(|&key| (key, ExpertSlot::default())).collect();
        (Arrivals::new(places.clone(), IntGauge::new("arriving", "left").unwrap()), places)
    }

    #[test]
    fn awaited_experts_load_first_and_others_in_order() {
        let (arrivals, places) = arrivals(&[(0, 0), (0, 1), (1, 0), (1, 1)]);
        arrivals.hurry(1, 1);
        // Asked for twice, or by an iteration that is repeated; an expert that is not expected never arrives.
        arrivals.hurry(1, 1);
        arrivals.hurry(7, 7);
        arrivals.hurry(0, 1);
        assert_eq!(arrivals.waited_for(), 2);
        let order = Mutex::new(Vec::new());
        let checkpoint = fixture();
        let read = arrivals.read_some(|(layer, expert)| {
            order.lock().unwrap().push((layer, expert));
            load_expert(&checkpoint, layer, expert, Dtype::F32)
        });
        read.unwrap();
        assert_eq!(order.into_inner().unwrap(), [(1, 1), (0, 1), (0, 0), (1, 0)]);
        assert!(places.values().all(|place| place.get().is_some()));
        assert_eq!((arrivals.come(), arrivals.shown.get()), (4, 0));
    }

    /// Which experts of the next layer an answer waits for is known once it has those of the layer before.
    #[test]
    fn who_has_read_what_is_waited_for_waits_for_the_next_layer() {
        let (arrivals, _places) = arrivals(&[(0, 0), (0, 1), (1, 1)]);
        let until = Instant::now() + Duration::from_secs(20);
        let begin = |until| arrivals.begin(until).map(|next| (next.key, next.hurried));
        // Most often the thread that begins waits by then; it is right in either order.
        let meanwhile = || std::thread::sleep(Duration::from_millis(20));
        std::thread::scope(|scope| {
            let next = scope.spawn(|| begin(until));
            meanwhile();
            arrivals.hurry(1, 1);
            assert_eq!(next.join().unwrap(), Some(((1, 1), true)));
            assert_eq!(begin(Instant::now()), Some(((0, 0), false)), "no load waits for ever");
            // There is nothing left to wait for when the last one is begun.
            let next = scope.spawn(|| begin(until));
            meanwhile();
            arrivals.hurry(0, 1);
            assert_eq!(next.join().unwrap(), Some(((0, 1), true)));
            assert_eq!(begin(until), None);
        });
    }

    #[test]
    fn waiters_are_told_that_reading_stopped() {
        let (arrivals, _places) = arrivals(&[(0, 0)]);
        let until = Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            let next = scope.spawn(|| arrivals.begin(until).is_none());
            std::thread::sleep(Duration::from_millis(20));
            arrivals.stop();
            assert!(next.join().unwrap());
        });
    }

    #[test]
    fn an_expert_that_cannot_be_read_ends_the_reading_of_all() {
        let (arrivals, places) = arrivals(&[(0, 0), (0, 1_000), (1, 0)]);
        arrivals.hurry(0, 1_000);
        let error = arrivals.read(&fixture(), Dtype::F32.into(), 1).unwrap_err();
        assert!(matches!(error, LoadError::NoSuchExpert { expert: 1_000, .. }), "{error}");
        assert!(places.values().all(|place| place.get().is_none()));
    }

    #[test]
    fn what_is_stopped_reads_no_more() {
        let (arrivals, places) = arrivals(&[(0, 0), (0, 1)]);
        let checkpoint = fixture();
        let read = arrivals.read_some(|(layer, expert)| {
            arrivals.stop();
            load_expert(&checkpoint, layer, expert, Dtype::F32)
        });
        read.unwrap();
        assert_eq!(places.values().filter(|place| place.get().is_some()).count(), 1);
    }
}
