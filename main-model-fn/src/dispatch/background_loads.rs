//! Loads local experts in the background, while their placement is already in force. This shortens cold starts: the
//! first answer waits for the experts that it uses, not for the whole model.
//!
//! Experts are loaded layer by layer, but those that an iteration waits for (on demand) come first. An iteration waits
//! for one layer at a time, and a load is never interrupted. So after a demand load, a loader waits briefly for the next
//! layer's demand before it prefetches. It waits at most as long as the load took, which is the cost of a wrong guess.

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

/// Attempts at a read that fails with a transient error, and the pause between two attempts.
const ATTEMPTS: u32 = 3;
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Wait for the first demand before the first prefetch.
const FIRST_DEMAND_WAIT: Duration = Duration::from_millis(2);
/// Longest wait for demand after a demand load.
const MAX_DEMAND_WAIT: Duration = Duration::from_millis(50);

/// Layer and expert.
type ExpertKey = (usize, u32);

/// Holder of a local expert; empty until the expert is loaded.
pub(super) type ExpertSlot = Arc<OnceLock<Arc<PackedExpert>>>;

/// Local experts that are being loaded, shared by the engine and the loading threads.
pub(crate) struct BackgroundLoads {
    pending: Mutex<PendingLoads>,
    /// Metric: number of experts that are not loaded.
    remaining: IntGauge,
    /// Number of experts that were loaded.
    loaded: AtomicU64,
    /// Notified of each loaded expert.
    changed: Notify,
    /// Notified of each demand.
    demand: Condvar,
}

#[derive(Default)]
struct PendingLoads {
    /// Experts whose load has not begun.
    slots: BTreeMap<ExpertKey, ExpertSlot>,
    /// Keys of `slots` that an iteration waits for, in order of demand. Keys that are no longer in `slots` are skipped.
    demanded: VecDeque<ExpertKey>,
    /// True once loading was stopped.
    stopped: bool,
}

impl BackgroundLoads {
    /// Creates the loads of the experts in `slots`. `remaining` shows how many are not loaded.
    pub(super) fn new(slots: BTreeMap<ExpertKey, ExpertSlot>, remaining: IntGauge) -> Self {
        remaining.set(i64::try_from(slots.len()).unwrap_or(i64::MAX));
        Self {
            pending: Mutex::new(PendingLoads { slots, ..PendingLoads::default() }),
            remaining,
            loaded: AtomicU64::new(0),
            changed: Notify::new(),
            demand: Condvar::new(),
        }
    }

    /// Returns the number of experts loaded so far. A changed number means that a new expert is available.
    pub(super) fn loaded_count(&self) -> u64 {
        self.loaded.load(Ordering::Acquire)
    }

    /// Waits until an expert was loaded since the last call. For a single caller.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Loads `expert` of `layer` before others, because an iteration waits for it.
    pub(super) fn prioritise(&self, layer: usize, expert: u32) {
        let mut pending = self.lock();
        let key = (layer, expert);
        // A repeated iteration asks again; the expert keeps its position.
        if pending.slots.contains_key(&key) && !pending.demanded.contains(&key) {
            pending.demanded.push_back(key);
            drop(pending);
            self.demand.notify_one();
        }
    }

    /// Returns the number of experts in demand.
    #[cfg(test)]
    pub(crate) fn demanded_count(&self) -> usize {
        self.lock().demanded.len()
    }

    /// Loads all experts on `threads` threads. Returns when all are loaded or [`stop`](Self::stop) was called.
    ///
    /// # Errors
    /// Fails with the first expert that cannot be read after several attempts.
    pub(crate) fn load_all(
        &self,
        checkpoint: &Checkpoint,
        class: NumericsClass,
        threads: usize,
    ) -> Result<(), LoadError> {
        let load = || {
            let outcome =
                self.load_until_empty(|(layer, expert)| load_expert(checkpoint, layer, expert, class));
            if outcome.is_err() {
                // Other threads end, too.
                self.stop();
            }
            outcome
        };
        std::thread::scope(|scope| {
            let spawn = |number| {
                let name = format!("arrivals-{number}");
                std::thread::Builder::new().name(name).spawn_scoped(scope, load).ok()
            };
            let others: Vec<_> = (1..threads.max(1)).map_while(spawn).collect();
            let mut outcome = load();
            for other in others {
                outcome = outcome.and(other.join().unwrap_or(Err(LoadError::Panicked)));
            }
            outcome
        })
    }

    /// Stops loading: experts whose load has not begun are not loaded.
    pub(crate) fn stop(&self) {
        let mut pending = self.lock();
        pending.stopped = true;
        drop(pending);
        self.demand.notify_all();
        self.changed.notify_one();
    }

    /// Loads experts one after the other until none is pending.
    fn load_until_empty(
        &self,
        load: impl Fn(ExpertKey) -> Result<PackedExpert, LoadError>,
    ) -> Result<(), LoadError> {
        let mut prefetch_from = Instant::now() + FIRST_DEMAND_WAIT;
        while let Some(NextLoad { key, slot, is_demanded }) = self.next(prefetch_from) {
            let started = Instant::now();
            let (layer, expert) = key;
            let packed = with_retries(format_args!("expert {expert} of layer {layer}"), || load(key))?;
            if is_demanded {
                prefetch_from = Instant::now() + started.elapsed().min(MAX_DEMAND_WAIT);
            }
            // Only this thread fills the slot.
            let _was_empty = slot.set(Arc::new(packed));
            self.loaded.fetch_add(1, Ordering::AcqRel);
            self.remaining.dec();
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Takes the next expert to load; before `prefetch_from`, only one in demand. Returns `None` if none is pending.
    fn next(&self, prefetch_from: Instant) -> Option<NextLoad> {
        let mut pending = self.lock();
        loop {
            if pending.stopped {
                return None;
            }
            while let Some(key) = pending.demanded.pop_front() {
                if let Some(slot) = pending.slots.remove(&key) {
                    return self.taken(&pending, NextLoad { key, slot, is_demanded: true });
                }
            }
            let left = prefetch_from.saturating_duration_since(Instant::now());
            if left.is_zero() || pending.slots.is_empty() {
                let (key, slot) = pending.slots.pop_first()?;
                return self.taken(&pending, NextLoad { key, slot, is_demanded: false });
            }
            (pending, _) = self.demand.wait_timeout(pending, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns `next`. If it was the last pending load, wakes the threads that wait for another.
    fn taken(&self, pending: &PendingLoads, next: NextLoad) -> Option<NextLoad> {
        if pending.slots.is_empty() {
            self.demand.notify_all();
        }
        Some(next)
    }

    fn lock(&self) -> MutexGuard<'_, PendingLoads> {
        // Each change is a single step, so a panic elsewhere leaves consistent data.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Expert to load next.
struct NextLoad {
    key: ExpertKey,
    slot: ExpertSlot,
    /// True if an iteration waits for it.
    is_demanded: bool,
}

/// Calls `read` again, a few times, if it fails with a transient error of a disk or network. `what` names it in the log.
pub(crate) fn with_retries<T>(
    what: impl fmt::Display,
    read: impl Fn() -> Result<T, LoadError>,
) -> Result<T, LoadError> {
    let mut attempts = 1;
    loop {
        match read() {
            Err(LoadError::Checkpoint(error)) if error.is_transient() && attempts < ATTEMPTS => {
                tracing::warn!(%error, %what, "read failed, retrying");
                std::thread::sleep(RETRY_PAUSE);
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

    fn loads(keys: &[ExpertKey]) -> (BackgroundLoads, BTreeMap<ExpertKey, ExpertSlot>) {
        let slots: BTreeMap<ExpertKey, ExpertSlot> =
            keys.iter().map(|&key| (key, ExpertSlot::default())).collect();
        (BackgroundLoads::new(slots.clone(), IntGauge::new("loading", "remaining").unwrap()), slots)
    }

    #[test]
    fn demanded_experts_load_first_and_others_in_order() {
        let (loads, slots) = loads(&[(0, 0), (0, 1), (1, 0), (1, 1)]);
        loads.prioritise(1, 1);
        // A repeated iteration asks again. An expert that is not pending is never loaded.
        loads.prioritise(1, 1);
        loads.prioritise(7, 7);
        loads.prioritise(0, 1);
        assert_eq!(loads.demanded_count(), 2);
        let order = Mutex::new(Vec::new());
        let checkpoint = fixture();
        let outcome = loads.load_until_empty(|(layer, expert)| {
            order.lock().unwrap().push((layer, expert));
            load_expert(&checkpoint, layer, expert, Dtype::F32)
        });
        outcome.unwrap();
        assert_eq!(order.into_inner().unwrap(), [(1, 1), (0, 1), (0, 0), (1, 0)]);
        assert!(slots.values().all(|slot| slot.get().is_some()));
        assert_eq!((loads.loaded_count(), loads.remaining.get()), (4, 0));
    }

    /// An iteration demands experts of the next layer only after it has those of the layer before.
    #[test]
    fn loader_waits_for_next_layer_after_demand_load() {
        let (loads, _slots) = loads(&[(0, 0), (0, 1), (1, 1)]);
        let later = Instant::now() + Duration::from_secs(20);
        let next = |prefetch_from| loads.next(prefetch_from).map(|next| (next.key, next.is_demanded));
        // Usually the spawned thread waits by then; the result is the same in either order.
        let meanwhile = || std::thread::sleep(Duration::from_millis(20));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| next(later));
            meanwhile();
            loads.prioritise(1, 1);
            assert_eq!(waiting.join().unwrap(), Some(((1, 1), true)));
            assert_eq!(next(Instant::now()), Some(((0, 0), false)), "prefetch after the wait");
            // When the last load begins, nothing is left to wait for.
            let waiting = scope.spawn(|| next(later));
            meanwhile();
            loads.prioritise(0, 1);
            assert_eq!(waiting.join().unwrap(), Some(((0, 1), true)));
            assert_eq!(next(later), None);
        });
    }

    #[test]
    fn stop_wakes_waiting_loaders() {
        let (loads, _slots) = loads(&[(0, 0)]);
        let later = Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| loads.next(later).is_none());
            std::thread::sleep(Duration::from_millis(20));
            loads.stop();
            assert!(waiting.join().unwrap());
        });
    }

    #[test]
    fn unreadable_expert_ends_all_loads() {
        let (loads, slots) = loads(&[(0, 0), (0, 1_000), (1, 0)]);
        loads.prioritise(0, 1_000);
        let error = loads.load_all(&fixture(), Dtype::F32.into(), 1).unwrap_err();
        assert!(matches!(error, LoadError::NoSuchExpert { expert: 1_000, .. }), "{error}");
        assert!(slots.values().all(|slot| slot.get().is_none()));
    }

    #[test]
    fn stopped_loads_begin_no_more_experts() {
        let (loads, slots) = loads(&[(0, 0), (0, 1)]);
        let checkpoint = fixture();
        let outcome = loads.load_until_empty(|(layer, expert)| {
            loads.stop();
            load_expert(&checkpoint, layer, expert, Dtype::F32)
        });
        outcome.unwrap();
        assert_eq!(slots.values().filter(|slot| slot.get().is_some()).count(), 1);
    }
}
