//! Online tuning: finds the instruction path that computes single rows fastest, during work.
//!
//! Single rows are bound by memory bandwidth. How well a path uses it shows only on the model's own weights: of paths
//! that are equally fast on cached data, where [`super::trial`] times them, one may decode a quarter faster, and some
//! minutes later another one. So a round of tuning times all paths, the candidates, on real panels: one in the beginning,
//! and others from time to time. All candidates compute the same bits.
//!
//! In a round the candidates take turns in time slices of [`SLICE`]. The candidate with the least median time wins.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Panels of fewer bytes are not timed: reading the clock would distort their times.
const MIN_TIMED_BYTES: u64 = 32 << 10;
/// Minimum duration of a slice.
const SLICE: Duration = Duration::from_millis(5);
/// Beginning of a slice that is not timed. Panels of the previous slice may still be computed, and the processor may
/// still run at the clock rate that they caused.
const WARM_UP: Duration = Duration::from_millis(2);
/// Minimum and maximum (exclusive) number of timed panels in a slice.
const SAMPLES_PER_SLICE: std::ops::Range<usize> = 32..1024;
/// Slices of each candidate in a round. Even, because every second pass through the candidates is in reverse order, so
/// that no candidate always follows the same one.
const SLICES_PER_CANDIDATE: usize = 4;
/// Bytes of weights between the first two rounds. The first round may run while the model is still loading. Each later
/// interval is at most twice as long as the one before.
const MIN_INTERVAL_BYTES: u64 = 8 << 30;
/// Upper bound of an interval, as a multiple of the bytes of the round before it. Tuning then takes 1 % of all work.
const MAX_INTERVAL_PER_ROUND: u64 = 100;
/// A round restarts with another panel size after this many bytes without a panel of its own size.
const RESTART_BYTES: u64 = 4 << 30;
/// Stands for "no fastest candidate yet".
const NO_CANDIDATE: usize = usize::MAX;

/// Tuner for the paths of one class. No thread waits for another: if two want to access the round at the same moment,
/// one of them skips it.
#[repr(align(128))]
pub(crate) struct OnlineTuner {
    /// Bytes of weights assigned since the last round ended.
    assigned_bytes: AtomicU64,
    /// Bytes to be assigned before the next round begins.
    interval_bytes: AtomicU64,
    /// Candidate that the last round found to be the fastest, or [`NO_CANDIDATE`].
    fastest: AtomicUsize,
    round: Mutex<TuningRound>,
}

/// The current round of tuning.
struct TuningRound {
    /// Bytes of a timed panel, or 0 if no round is running. Only panels of one size are compared: others take another
    /// time per byte, and might all fall into the slices of one candidate.
    panel_bytes: u64,
    /// Value of [`OnlineTuner::assigned_bytes`] when a panel of this size was last assigned.
    last_panel_at: u64,
    /// Number of the slice, counted through all rounds; 0 before the first.
    slice: u64,
    /// Number of completed slices of this round.
    completed_slices: usize,
    slice_start: Option<Instant>,
    /// Panels timed in this slice.
    samples: usize,
    /// Nanoseconds of each timed panel, by candidate.
    times: Vec<Vec<u64>>,
}

/// Candidate that computes a panel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Assignment {
    /// The candidate of the current slice. The panel is not timed.
    Untimed(usize),
    /// The candidate of the current slice. The caller reports the end by [`OnlineTuner::record_time`].
    Timed(TimedPanel),
    /// The fastest candidate of the last round.
    Fastest(usize),
    /// No round has ended so far.
    Unknown,
}

/// A panel that is timed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TimedPanel {
    pub(crate) candidate: usize,
    slice: u64,
    start: Instant,
}

impl OnlineTuner {
    pub(crate) const fn new() -> Self {
        Self {
            assigned_bytes: AtomicU64::new(0),
            interval_bytes: AtomicU64::new(0),
            fastest: AtomicUsize::new(NO_CANDIDATE),
            round: Mutex::new(TuningRound {
                panel_bytes: 0,
                last_panel_at: 0,
                slice: 0,
                completed_slices: 0,
                slice_start: None,
                samples: 0,
                times: Vec::new(),
            }),
        }
    }

    /// Assigns a panel of `bytes` of weights, at least 1, to one of `candidates` candidates. Every call passes the same
    /// number of candidates. `now` reads the clock.
    pub(crate) fn assign(&self, candidates: usize, bytes: u64, now: impl FnOnce() -> Instant) -> Assignment {
        let assigned = self.assigned_bytes.fetch_add(bytes, Ordering::Relaxed);
        if assigned < self.interval_bytes.load(Ordering::Relaxed) || bytes < MIN_TIMED_BYTES || candidates < 2
        {
            return self.last_result();
        }
        let Some(mut round) = self.try_lock() else { return self.last_result() };
        // Another thread may have ended the round meanwhile.
        let assigned = self.assigned_bytes.load(Ordering::Relaxed);
        let interval = self.interval_bytes.load(Ordering::Relaxed);
        if assigned < interval {
            return self.last_result();
        }
        if round.panel_bytes == 0 || assigned.saturating_sub(round.last_panel_at) >= RESTART_BYTES {
            round.start(candidates, bytes);
        }
        if round.panel_bytes != bytes {
            return self.last_result();
        }
        round.last_panel_at = assigned;
        match round.assign(candidates, now()) {
            Some(assignment) => assignment,
            None => {
                self.fastest.store(round.finish(), Ordering::Relaxed);
                let round_bytes = assigned - interval;
                let longest = round_bytes.saturating_mul(MAX_INTERVAL_PER_ROUND).max(MIN_INTERVAL_BYTES);
                let next_interval = interval.saturating_mul(2).clamp(MIN_INTERVAL_BYTES, longest);
                self.interval_bytes.store(next_interval, Ordering::Relaxed);
                self.assigned_bytes.store(0, Ordering::Relaxed);
                self.last_result()
            }
        }
    }

    /// Records that a timed panel was completed at `now`.
    pub(crate) fn record_time(&self, panel: &TimedPanel, now: Instant) {
        if let Some(mut round) = self.try_lock() {
            round.record_time(panel, now);
        }
    }

    /// Returns the fastest candidate of the last round.
    pub(crate) fn fastest(&self) -> Option<usize> {
        Some(self.fastest.load(Ordering::Relaxed)).filter(|candidate| *candidate != NO_CANDIDATE)
    }

    fn last_result(&self) -> Assignment {
        self.fastest().map_or(Assignment::Unknown, Assignment::Fastest)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, TuningRound>> {
        match self.round.try_lock() {
            Ok(round) => Some(round),
            Err(TryLockError::Poisoned(poisoned)) => Some(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl TuningRound {
    /// Starts a round with panels of `bytes` bytes.
    fn start(&mut self, candidates: usize, bytes: u64) {
        self.panel_bytes = bytes;
        self.slice += 1;
        self.completed_slices = 0;
        self.slice_start = None;
        self.samples = 0;
        self.times.resize(candidates, Vec::new());
        self.times.iter_mut().for_each(Vec::clear);
    }

    /// Assigns a panel to the candidate of the current slice, or of the next one. Returns `None` after the last slice.
    fn assign(&mut self, candidates: usize, now: Instant) -> Option<Assignment> {
        let start = *self.slice_start.get_or_insert(now);
        let mut elapsed = now.saturating_duration_since(start);
        if elapsed >= SLICE && self.samples >= SAMPLES_PER_SLICE.start {
            self.completed_slices += 1;
            self.slice += 1;
            self.slice_start = Some(now);
            self.samples = 0;
            elapsed = Duration::ZERO;
        }
        let (pass, position) = (self.completed_slices / candidates, self.completed_slices % candidates);
        if pass == SLICES_PER_CANDIDATE {
            return None;
        }
        let candidate = if pass % 2 == 0 { position } else { candidates - 1 - position };
        Some(if elapsed < WARM_UP {
            Assignment::Untimed(candidate)
        } else {
            Assignment::Timed(TimedPanel { candidate, slice: self.slice, start: now })
        })
    }

    /// Adds the time of a panel, unless its slice has ended or has enough samples.
    fn record_time(&mut self, panel: &TimedPanel, now: Instant) {
        let counts =
            self.panel_bytes != 0 && panel.slice == self.slice && self.samples < SAMPLES_PER_SLICE.end;
        if let (true, Some(times)) = (counts, self.times.get_mut(panel.candidate)) {
            let time = now.saturating_duration_since(panel.start);
            times.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
            self.samples += 1;
        }
    }

    /// Ends the round and returns the candidate with the least median time. Medians ignore interruptions, which take
    /// longer than any panel.
    fn finish(&mut self) -> usize {
        self.panel_bytes = 0;
        let medians = self.times.iter_mut().map(|times| {
            times.sort_unstable();
            times.get(times.len() / 2).copied()
        });
        let medians: Vec<Option<u64>> = medians.collect();
        let timed = (0..medians.len()).filter(|candidate| medians[*candidate].is_some());
        timed.min_by_key(|candidate| medians[*candidate]).unwrap_or(NO_CANDIDATE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const PANEL: u64 = 256 << 10;

    /// A clock that only advances by [`Clock::advance`].
    struct Clock {
        start: Instant,
        elapsed: Cell<Duration>,
    }

    impl Clock {
        fn new() -> Self {
            Self { start: Instant::now(), elapsed: Cell::new(Duration::ZERO) }
        }

        fn now(&self) -> Instant {
            self.start + self.elapsed.get()
        }

        fn advance(&self, nanos: u64) {
            self.elapsed.set(self.elapsed.get() + Duration::from_nanos(nanos));
        }
    }

    /// Runs one round with panels of `sizes`, repeated in order. Candidates take `nanos` nanoseconds per byte, and every
    /// tenth panel is interrupted. Returns the fastest candidate, and the number of panels of the first size that each
    /// candidate computed.
    fn run_round(tuner: &OnlineTuner, clock: &Clock, nanos: &[f64], sizes: &[u64]) -> (usize, Vec<u64>) {
        let mut assigned = vec![0; nanos.len()];
        for panel in 0..10_000_000 {
            let bytes = sizes[panel % sizes.len()];
            let assignment = tuner.assign(nanos.len(), bytes, || clock.now());
            if tuner.round.lock().unwrap().panel_bytes == 0 {
                let Assignment::Fastest(fastest) = assignment else { panic!("{assignment:?} after a round") };
                return (fastest, assigned);
            }
            let candidate = match &assignment {
                Assignment::Untimed(candidate) => *candidate,
                Assignment::Timed(panel) => panel.candidate,
                Assignment::Fastest(_) | Assignment::Unknown => {
                    assert_ne!(bytes, sizes[0], "panels of the first size belong to the round");
                    clock.advance(bytes / 10);
                    continue;
                }
            };
            assigned[candidate] += 1;
            clock.advance(
                (bytes as f64 * nanos[candidate]) as u64 + if panel % 10 == 0 { 3_000_000 } else { 0 },
            );
            if let Assignment::Timed(panel) = &assignment {
                tuner.record_time(panel, clock.now());
            }
        }
        panic!("the round does not end")
    }

    /// Assigns panels until the next round begins. Returns the bytes of panels that the fastest candidate computed.
    fn run_interval(tuner: &OnlineTuner, clock: &Clock, candidates: usize, fastest: usize) -> u64 {
        let mut fastest_bytes = 0;
        while tuner.assign(candidates, PANEL, || clock.now()) == Assignment::Fastest(fastest) {
            fastest_bytes += PANEL;
        }
        fastest_bytes
    }

    #[test]
    fn fastest_candidate_is_used_until_another_is_faster() {
        let (tuner, clock) = (OnlineTuner::new(), Clock::new());
        assert_eq!(run_round(&tuner, &clock, &[0.08, 0.07, 0.075], &[PANEL]).0, 1);
        let mut expected = MIN_INTERVAL_BYTES;
        for _ in 0..5 {
            let fastest_bytes = run_interval(&tuner, &clock, 3, 1);
            assert!(
                fastest_bytes.abs_diff(expected) <= 4 * MAX_INTERVAL_PER_ROUND * PANEL,
                "{fastest_bytes}, not {expected}"
            );
            let (fastest, assigned) = run_round(&tuner, &clock, &[0.08, 0.07, 0.075], &[PANEL]);
            assert_eq!(fastest, 1);
            let round_bytes = assigned.iter().sum::<u64>() * PANEL;
            expected = (2 * expected).min(MAX_INTERVAL_PER_ROUND * round_bytes).max(MIN_INTERVAL_BYTES);
        }
        assert!(expected > MIN_INTERVAL_BYTES);
        run_interval(&tuner, &clock, 3, 1);
        assert_eq!(run_round(&tuner, &clock, &[0.06, 0.07, 0.075], &[PANEL]).0, 0);
    }

    #[test]
    fn candidates_compute_equally_many_panels() {
        for candidates in 2..=4 {
            let (tuner, clock) = (OnlineTuner::new(), Clock::new());
            let (_, assigned) = run_round(&tuner, &clock, &vec![0.07; candidates], &[PANEL]);
            let (least, most) = (assigned.iter().min().unwrap(), assigned.iter().max().unwrap());
            assert!(most - least <= most / 10, "{assigned:?}");
        }
    }

    #[test]
    fn smaller_panels_give_a_candidate_no_advantage() {
        // Panels of gate and up, then of the down projection: slices of equal bytes would see only one kind.
        for experts in 1..=16 {
            let sizes = [[PANEL; 32], [PANEL / 2; 32]].map(|kind| kind.repeat(experts)).concat();
            let (tuner, clock) = (OnlineTuner::new(), Clock::new());
            assert_eq!(run_round(&tuner, &clock, &[0.072, 0.07, 0.071], &sizes).0, 1, "{experts} experts");
        }
    }

    #[test]
    fn round_without_panels_of_its_size_restarts_with_another() {
        let (tuner, clock) = (OnlineTuner::new(), Clock::new());
        assert!(matches!(tuner.assign(2, PANEL, || clock.now()), Assignment::Untimed(_)));
        let mut assigned = 0;
        while tuner.assign(2, PANEL / 2, || clock.now()) == Assignment::Unknown {
            assigned += PANEL / 2;
        }
        assert!(assigned.abs_diff(RESTART_BYTES) <= 2 * PANEL, "{assigned}");
        assert_eq!(run_round(&tuner, &clock, &[0.08, 0.07], &[PANEL / 2]).0, 1);
    }

    #[test]
    fn times_reported_after_the_slice_do_not_count() {
        let (tuner, clock) = (OnlineTuner::new(), Clock::new());
        let mut late = Vec::new();
        let mut assignment = tuner.assign(2, PANEL, || clock.now());
        // Candidate 1 is far faster. Candidate 0 reports wrong times after its slice, and after the round.
        while !matches!(assignment, Assignment::Fastest(_)) {
            let (candidate, timed) = match assignment {
                Assignment::Timed(panel) => (panel.candidate, Some(panel)),
                Assignment::Untimed(candidate) => (candidate, None),
                assignment => panic!("{assignment:?}"),
            };
            clock.advance(if candidate == 0 { 20_000 } else { 10_000 });
            if let Some(panel) = timed {
                tuner.record_time(&panel, clock.now());
                late.push(TimedPanel { start: clock.now(), ..panel });
            }
            for panel in late.iter().filter(|panel| panel.candidate != candidate) {
                tuner.record_time(panel, clock.now());
            }
            assignment = tuner.assign(2, PANEL, || clock.now());
        }
        assert_eq!(assignment, Assignment::Fastest(1));
        let times = tuner.round.lock().unwrap().times.clone();
        assert_eq!(times.iter().flatten().filter(|time| **time < 10_000).count(), 0);
        late.iter().for_each(|panel| tuner.record_time(panel, clock.now()));
        assert_eq!(tuner.assign(2, PANEL, || clock.now()), Assignment::Fastest(1));
        assert_eq!(tuner.round.lock().unwrap().times, times);
    }

    #[test]
    fn small_panels_and_single_candidates_start_no_round() {
        let (tuner, clock) = (OnlineTuner::new(), Clock::new());
        for _ in 0..10_000 {
            assert_eq!(
                tuner.assign(3, MIN_TIMED_BYTES - 64, || panic!("the clock is not read")),
                Assignment::Unknown
            );
            assert_eq!(tuner.assign(1, PANEL, || panic!("the clock is not read")), Assignment::Unknown);
        }
        assert_eq!(run_round(&tuner, &clock, &[0.08, 0.07], &[PANEL]).0, 1);
        assert_eq!(
            tuner.assign(2, MIN_TIMED_BYTES - 64, || panic!("the clock is not read")),
            Assignment::Fastest(1)
        );
    }

    #[test]
    fn panels_are_assigned_to_concurrent_threads() {
        let tuner = OnlineTuner::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    loop {
                        match tuner.assign(2, PANEL, Instant::now) {
                            Assignment::Timed(panel) => {
                                let time = Duration::from_micros(if panel.candidate == 0 { 40 } else { 10 });
                                tuner.record_time(&panel, panel.start + time);
                            }
                            Assignment::Untimed(_) | Assignment::Unknown => std::thread::yield_now(),
                            Assignment::Fastest(fastest) => return assert_eq!(fastest, 1),
                        }
                    }
                });
            }
        });
    }
}
