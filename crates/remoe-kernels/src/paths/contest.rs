//! Which path computes one row the fastest, found out at work.
//!
//! One row is bound by reading weights, and how well a path keeps memory busy shows in a model's own weights alone: of
//! paths that differ by nothing in a cache, where [`super::trial`] times them, one may decode a quarter faster, and
//! some minutes later on the same machine another one. So they take turns while the first weights are read, and again
//! now and then. All of them compute the same bits.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Panels of fewer bytes are not timed: telling the time would count.
const LEAST_BYTES: u64 = 32 << 10;
/// Least duration of a turn.
const TURN: Duration = Duration::from_millis(5);
/// Part of a turn, at its start, that is not timed: panels of the turn before may still be computed, and the processor
/// may keep the clock that they asked for.
const SETTLING: Duration = Duration::from_millis(2);
/// Panels that are timed in a turn, at least and at most.
const PANELS: std::ops::Range<usize> = 32..1024;
/// Turns of each entrant in a contest. Even: the order is turned around every time, so that no entrant always follows
/// the same one.
const ROUNDS: usize = 4;
/// Bytes of weights between the first contest and the second. The first one may take place while others are still
/// loading, so that every later rest is at most twice as long as the one before.
const FIRST_REST: u64 = 8 << 30;
/// Bytes of all work per byte of contests, once rests have grown so long.
const SHARE: u64 = 100;
/// If so many bytes were dealt without a panel of its size, a contest restarts with panels of another size.
const FORGOTTEN: u64 = 4 << 30;
/// No one has won yet.
const NO_WINNER: usize = usize::MAX;

/// Contests among the paths of one class, one after the other. No thread waits for another one: where two deal or tell
/// their times in the same moment, one does without.
#[repr(align(128))]
pub(crate) struct Contest {
    /// Bytes of weights that were dealt since the last contest.
    rested: AtomicU64,
    /// How many there are to be before the next one.
    rest: AtomicU64,
    winner: AtomicUsize,
    running: Mutex<OpenContest>,
}

/// The contest that is held.
struct OpenContest {
    /// Bytes of the panels that it is about: panels of other sizes take longer or less long for a byte, and might all
    /// fall into the turns of one entrant. 0 where none is held.
    bytes: u64,
    /// Bytes that had been dealt since the last contest when a panel of this size last came.
    seen: u64,
    /// The turn, numbered through all contests; 0 before the first.
    turn: u64,
    /// How many turns of this contest are over.
    over: usize,
    began: Option<Instant>,
    /// Panels that were timed in this turn.
    timed: usize,
    /// Nanoseconds of each panel, by entrant.
    times: Vec<Vec<u64>>,
}

/// Entrant that computes a panel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PanelTurn {
    /// This entrant, whose turn it is.
    Untimed(usize),
    /// This entrant, whose turn it is, and how long it takes from then on is to be told.
    Timed(TimedPanel),
    /// The winner of the last contest.
    Won(usize),
    /// No entrant has won so far.
    Unknown,
}

/// A panel that an entrant computes in its turn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TimedPanel {
    pub(crate) entrant: usize,
    turn: u64,
    begun: Instant,
}

impl Contest {
    pub(crate) const fn new() -> Self {
        Self {
            rested: AtomicU64::new(0),
            rest: AtomicU64::new(0),
            winner: AtomicUsize::new(NO_WINNER),
            running: Mutex::new(OpenContest {
                bytes: 0,
                seen: 0,
                turn: 0,
                over: 0,
                began: None,
                timed: 0,
                times: Vec::new(),
            }),
        }
    }

    /// Deals a panel of `bytes` of weights, more than none, to one of so many `entrants`, always as many. `now` tells
    /// the time.
    pub(crate) fn deal(&self, entrants: usize, bytes: u64, now: impl FnOnce() -> Instant) -> PanelTurn {
        let rested = self.rested.fetch_add(bytes, Ordering::Relaxed);
        if rested < self.rest.load(Ordering::Relaxed) || bytes < LEAST_BYTES || entrants < 2 {
            return self.last();
        }
        let Some(mut running) = self.try_lock() else { return self.last() };
        // Another thread may have ended the contest meanwhile.
        let (rested, rest) = (self.rested.load(Ordering::Relaxed), self.rest.load(Ordering::Relaxed));
        if rested < rest {
            return self.last();
        }
        if running.bytes == 0 || rested.saturating_sub(running.seen) >= FORGOTTEN {
            running.open(entrants, bytes);
        }
        if running.bytes != bytes {
            return self.last();
        }
        running.seen = rested;
        match running.deal(entrants, now()) {
            Some(turn) => turn,
            None => {
                self.winner.store(running.judge(), Ordering::Relaxed);
                let contested = rested - rest;
                let most = contested.saturating_mul(SHARE).max(FIRST_REST);
                self.rest.store(rest.saturating_mul(2).clamp(FIRST_REST, most), Ordering::Relaxed);
                self.rested.store(0, Ordering::Relaxed);
                self.last()
            }
        }
    }

    /// The panel has been computed.
    pub(crate) fn end(&self, entry: &TimedPanel, now: Instant) {
        if let Some(mut running) = self.try_lock() {
            running.end(entry, now);
        }
    }

    /// Returns the winner of the last contest.
    pub(crate) fn winner(&self) -> Option<usize> {
        Some(self.winner.load(Ordering::Relaxed)).filter(|winner| *winner != NO_WINNER)
    }

    fn last(&self) -> PanelTurn {
        self.winner().map_or(PanelTurn::Unknown, PanelTurn::Won)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, OpenContest>> {
        match self.running.try_lock() {
            Ok(running) => Some(running),
            Err(TryLockError::Poisoned(poisoned)) => Some(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl OpenContest {
    /// Begins a contest about panels of so many bytes.
    fn open(&mut self, entrants: usize, bytes: u64) {
        self.bytes = bytes;
        self.turn += 1;
        self.over = 0;
        self.began = None;
        self.timed = 0;
        self.times.resize(entrants, Vec::new());
        self.times.iter_mut().for_each(Vec::clear);
    }

    /// Returns the next turn; `None` when the last turn is over.
    fn deal(&mut self, entrants: usize, now: Instant) -> Option<PanelTurn> {
        let began = *self.began.get_or_insert(now);
        let mut lasted = now.saturating_duration_since(began);
        if lasted >= TURN && self.timed >= PANELS.start {
            self.over += 1;
            self.turn += 1;
            self.began = Some(now);
            self.timed = 0;
            lasted = Duration::ZERO;
        }
        let (round, place) = (self.over / entrants, self.over % entrants);
        if round == ROUNDS {
            return None;
        }
        let entrant = if round % 2 == 0 { place } else { entrants - 1 - place };
        Some(if lasted < SETTLING {
            PanelTurn::Untimed(entrant)
        } else {
            PanelTurn::Timed(TimedPanel { entrant, turn: self.turn, begun: now })
        })
    }

    fn end(&mut self, entry: &TimedPanel, now: Instant) {
        let is_its_turn = self.bytes != 0 && entry.turn == self.turn && self.timed < PANELS.end;
        if let (true, Some(times)) = (is_its_turn, self.times.get_mut(entry.entrant)) {
            let time = now.saturating_duration_since(entry.begun);
            times.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
            self.timed += 1;
        }
    }

    /// Ends the contest. The winner is whose median is the least: what interrupts a thread takes longer than any panel.
    fn judge(&mut self) -> usize {
        self.bytes = 0;
        let medians = self.times.iter_mut().map(|times| {
            times.sort_unstable();
            times.get(times.len() / 2).copied()
        });
        let medians: Vec<Option<u64>> = medians.collect();
        let timed = (0..medians.len()).filter(|entrant| medians[*entrant].is_some());
        timed.min_by_key(|entrant| medians[*entrant]).unwrap_or(NO_WINNER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const PANEL: u64 = 256 << 10;

    /// A clock that goes on when it is told to.
    struct Clock {
        start: Instant,
        passed: Cell<Duration>,
    }

    impl Clock {
        fn new() -> Self {
            Self { start: Instant::now(), passed: Cell::new(Duration::ZERO) }
        }

        fn now(&self) -> Instant {
            self.start + self.passed.get()
        }

        fn pass(&self, nanos: u64) {
            self.passed.set(self.passed.get() + Duration::from_nanos(nanos));
        }
    }

    /// Deals panels of these sizes, over and over, until the contest is over, each entrant taking so many nanoseconds
    /// for a byte; every tenth panel is interrupted. The winner, and how many panels of the first size each entrant
    /// got.
    fn hold(contest: &Contest, clock: &Clock, nanos: &[f64], sizes: &[u64]) -> (usize, Vec<u64>) {
        let mut dealt = vec![0; nanos.len()];
        for panel in 0..10_000_000 {
            let bytes = sizes[panel % sizes.len()];
            let turn = contest.deal(nanos.len(), bytes, || clock.now());
            if contest.running.lock().unwrap().bytes == 0 {
                let PanelTurn::Won(winner) = turn else { panic!("{turn:?} after a contest") };
                return (winner, dealt);
            }
            let entrant = match &turn {
                PanelTurn::Untimed(entrant) => *entrant,
                PanelTurn::Timed(entry) => entry.entrant,
                PanelTurn::Won(_) | PanelTurn::Unknown => {
                    assert_ne!(bytes, sizes[0], "panels of the first size are dealt in turn");
                    clock.pass(bytes / 10);
                    continue;
                }
            };
            dealt[entrant] += 1;
            clock.pass((bytes as f64 * nanos[entrant]) as u64 + if panel % 10 == 0 { 3_000_000 } else { 0 });
            if let PanelTurn::Timed(entry) = &turn {
                contest.end(entry, clock.now());
            }
        }
        panic!("a contest ends")
    }

    /// Deals until the next contest; how many bytes the winner got.
    fn rest(contest: &Contest, clock: &Clock, entrants: usize, winner: usize) -> u64 {
        let mut won = 0;
        while contest.deal(entrants, PANEL, || clock.now()) == PanelTurn::Won(winner) {
            won += PANEL;
        }
        won
    }

    #[test]
    fn the_fastest_wins_until_another_one_is() {
        let (contest, clock) = (Contest::new(), Clock::new());
        assert_eq!(hold(&contest, &clock, &[0.08, 0.07, 0.075], &[PANEL]).0, 1);
        let mut expected = FIRST_REST;
        for _ in 0..5 {
            let won = rest(&contest, &clock, 3, 1);
            assert!(won.abs_diff(expected) <= 4 * SHARE * PANEL, "{won}, not {expected}");
            let (winner, dealt) = hold(&contest, &clock, &[0.08, 0.07, 0.075], &[PANEL]);
            assert_eq!(winner, 1);
            let contested = dealt.iter().sum::<u64>() * PANEL;
            expected = (2 * expected).min(SHARE * contested).max(FIRST_REST);
        }
        assert!(expected > FIRST_REST);
        rest(&contest, &clock, 3, 1);
        assert_eq!(hold(&contest, &clock, &[0.06, 0.07, 0.075], &[PANEL]).0, 0);
    }

    #[test]
    fn everybody_gets_as_much() {
        for entrants in 2..=4 {
            let (contest, clock) = (Contest::new(), Clock::new());
            let (_, dealt) = hold(&contest, &clock, &vec![0.07; entrants], &[PANEL]);
            let (least, most) = (dealt.iter().min().unwrap(), dealt.iter().max().unwrap());
            assert!(most - least <= most / 10, "{dealt:?}");
        }
    }

    #[test]
    fn who_gets_the_smaller_panels_does_not_win_by_them() {
        // Gate and up of some experts and their down projections: turns of as many bytes would see one kind alone.
        for experts in 1..=16 {
            let sizes = [[PANEL; 32], [PANEL / 2; 32]].map(|kind| kind.repeat(experts)).concat();
            let (contest, clock) = (Contest::new(), Clock::new());
            assert_eq!(hold(&contest, &clock, &[0.072, 0.07, 0.071], &sizes).0, 1, "{experts} experts");
        }
    }

    #[test]
    fn contest_over_vanished_panels_restarts_with_current_ones() {
        let (contest, clock) = (Contest::new(), Clock::new());
        assert!(matches!(contest.deal(2, PANEL, || clock.now()), PanelTurn::Untimed(_)));
        let mut dealt = 0;
        while contest.deal(2, PANEL / 2, || clock.now()) == PanelTurn::Unknown {
            dealt += PANEL / 2;
        }
        assert!(dealt.abs_diff(FORGOTTEN) <= 2 * PANEL, "{dealt}");
        assert_eq!(hold(&contest, &clock, &[0.08, 0.07], &[PANEL / 2]).0, 1);
    }

    #[test]
    fn times_of_another_turn_do_not_count() {
        let (contest, clock) = (Contest::new(), Clock::new());
        let mut late = Vec::new();
        let mut turn = contest.deal(2, PANEL, || clock.now());
        // Entrant 1 is faster by far, and entrant 0 tells wrong times when its turn is over, and when the contest is.
        while !matches!(turn, PanelTurn::Won(_)) {
            let (entrant, timed) = match turn {
                PanelTurn::Timed(entry) => (entry.entrant, Some(entry)),
                PanelTurn::Untimed(entrant) => (entrant, None),
                turn => panic!("{turn:?}"),
            };
            clock.pass(if entrant == 0 { 20_000 } else { 10_000 });
            if let Some(entry) = timed {
                contest.end(&entry, clock.now());
                late.push(TimedPanel { begun: clock.now(), ..entry });
            }
            for entry in late.iter().filter(|entry| entry.entrant != entrant) {
                contest.end(entry, clock.now());
            }
            turn = contest.deal(2, PANEL, || clock.now());
        }
        assert_eq!(turn, PanelTurn::Won(1));
        let times = contest.running.lock().unwrap().times.clone();
        assert_eq!(times.iter().flatten().filter(|time| **time < 10_000).count(), 0);
        late.iter().for_each(|entry| contest.end(entry, clock.now()));
        assert_eq!(contest.deal(2, PANEL, || clock.now()), PanelTurn::Won(1));
        assert_eq!(contest.running.lock().unwrap().times, times);
    }

    #[test]
    fn small_panels_and_a_single_path_hold_no_contest() {
        let (contest, clock) = (Contest::new(), Clock::new());
        for _ in 0..10_000 {
            assert_eq!(
                contest.deal(3, LEAST_BYTES - 64, || panic!("the clock is not read")),
                PanelTurn::Unknown
            );
            assert_eq!(contest.deal(1, PANEL, || panic!("the clock is not read")), PanelTurn::Unknown);
        }
        assert_eq!(hold(&contest, &clock, &[0.08, 0.07], &[PANEL]).0, 1);
        assert_eq!(contest.deal(2, LEAST_BYTES - 64, || panic!("the clock is not read")), PanelTurn::Won(1));
    }

    #[test]
    fn threads_deal_at_the_same_time() {
        let contest = Contest::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    loop {
                        match contest.deal(2, PANEL, Instant::now) {
                            PanelTurn::Timed(entry) => {
                                let time = Duration::from_micros(if entry.entrant == 0 { 40 } else { 10 });
                                contest.end(&entry, entry.begun + time);
                            }
                            PanelTurn::Untimed(_) | PanelTurn::Unknown => std::thread::yield_now(),
                            PanelTurn::Won(winner) => return assert_eq!(winner, 1),
                        }
                    }
                });
            }
        });
    }
}
