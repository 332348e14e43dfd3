//! Which path computes one row the fastest, found out at work.
//!
//! One row is bound by reading weights, and how well a path keeps memory busy shows in a model's own weights alone: of paths that differ by
//! nothing in a cache, where [`super::trial`] times them, one may decode a quarter faster, and some minutes later on the same machine another one. So they take turns while
//! the first weights are read, and again now and then. All of them compute the same bits.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Panels of fewer bytes take no part: telling the time would count.
pub(crate) const LEAST_BYTES: u64 = 32 << 10;
/// Bytes of weights that a turn lasts: some milliseconds, so that what a path does to the processor's clock counts.
const TURN: u64 = 32 << 20;
/// How often everybody's turn comes in a contest.
const TURNS: u64 = 4;
/// Bytes between two contests: their share of all work stays below a hundredth.
const REST: u64 = 64 << 30;
/// Most panels of one entrant that are remembered.
const MOST_TIMES: usize = 4096;
/// No one has won yet.
const NOBODY: usize = usize::MAX;

/// Contests among the paths of one class, one after the other.
pub(crate) struct Contest {
    /// Bytes of weights that were dealt since the last contest began.
    dealt: AtomicU64,
    winner: AtomicUsize,
    /// Whether there are times that nobody has judged.
    is_open: AtomicBool,
    /// Nanoseconds per MiB of each panel, by entrant.
    times: Mutex<Vec<Vec<u64>>>,
}

/// Who computes a panel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// This entrant, and it is to be timed.
    Timed(usize),
    /// The winner.
    Won(usize),
    /// Nobody has won so far.
    Unknown,
}

impl Contest {
    pub(crate) const fn new() -> Self {
        Self {
            dealt: AtomicU64::new(0),
            winner: AtomicUsize::new(NOBODY),
            is_open: AtomicBool::new(false),
            times: Mutex::new(Vec::new()),
        }
    }

    /// Deals a panel of `bytes` to one of so many `entrants`, always as many.
    pub(crate) fn deal(&self, entrants: usize, bytes: u64) -> Turn {
        let dealt = self.dealt.fetch_add(bytes, Ordering::Relaxed);
        let length = TURN * TURNS * entrants as u64;
        if dealt < length {
            return Turn::Timed((dealt / TURN) as usize % entrants);
        }
        if self.is_open.load(Ordering::Relaxed) && self.is_open.swap(false, Ordering::AcqRel) {
            self.judge(entrants);
        }
        if dealt >= length + REST {
            self.dealt.store(0, Ordering::Relaxed);
        }
        match self.winner.load(Ordering::Relaxed) {
            NOBODY => Turn::Unknown,
            winner => Turn::Won(winner),
        }
    }

    /// Notes how long an entrant, whose turn it was, took for a panel of `bytes`.
    pub(crate) fn took(&self, entrant: usize, bytes: u64, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() <= entrant {
            times.resize(entrant + 1, Vec::new());
        }
        if times[entrant].len() < MOST_TIMES {
            times[entrant].push(nanos.saturating_mul(1 << 20) / bytes.max(1));
        }
        self.is_open.store(true, Ordering::Release);
    }

    /// The winner is whose median is the least: what interrupts a thread takes longer than any panel. Times that came after the end are not all of a contest's, and decide nothing.
    fn judge(&self, entrants: usize) {
        let times = std::mem::take(&mut *self.times.lock().unwrap_or_else(PoisonError::into_inner));
        let medians: Vec<u64> = times.into_iter().filter_map(median).collect();
        let fastest = (0..medians.len()).min_by_key(|entrant| medians[*entrant]);
        if let (true, Some(fastest)) = (medians.len() == entrants, fastest) {
            self.winner.store(fastest, Ordering::Relaxed);
        }
    }
}

fn median(mut times: Vec<u64>) -> Option<u64> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PANEL: u64 = 256 << 10;

    /// Deals panels until nobody is timed, each entrant taking so many nanoseconds, and every tenth panel an interruption.
    fn hold(contest: &Contest, nanos: &[u64]) -> Turn {
        for panel in 0.. {
            match contest.deal(nanos.len(), PANEL) {
                Turn::Timed(entrant) => {
                    let interruption = if panel % 10 == 0 { 3_000_000 } else { 0 };
                    contest.took(entrant, PANEL, Duration::from_nanos(nanos[entrant] + interruption));
                }
                turn => return turn,
            }
        }
        unreachable!("a contest ends")
    }

    #[test]
    fn the_fastest_wins_until_another_one_is() {
        let contest = Contest::new();
        assert_eq!(hold(&contest, &[20_000, 16_000, 17_000]), Turn::Won(1));
        let mut won = 0;
        while let Turn::Won(winner) = contest.deal(3, PANEL) {
            assert_eq!(winner, 1);
            won += PANEL;
        }
        assert!(won.abs_diff(REST) <= 2 * PANEL, "{won}");
        assert_eq!(hold(&contest, &[15_000, 16_000, 17_000]), Turn::Won(0));
    }

    #[test]
    fn turns_are_of_the_same_length() {
        let contest = Contest::new();
        let mut dealt = [0; 3];
        while let Turn::Timed(entrant) = contest.deal(3, PANEL) {
            dealt[entrant] += PANEL;
        }
        assert_eq!(dealt, [TURN * TURNS; 3]);
    }

    #[test]
    fn nobody_wins_by_what_others_did_not_do() {
        let contest = Contest::new();
        while contest.deal(2, PANEL) != Turn::Unknown {}
        contest.took(0, PANEL, Duration::from_nanos(1));
        assert_eq!(contest.deal(2, PANEL), Turn::Unknown);
        // Late times do not count in the next contest either.
        contest.took(1, PANEL, Duration::from_nanos(1));
        assert_eq!(contest.deal(2, PANEL), Turn::Unknown);
    }

    #[test]
    fn threads_deal_at_the_same_time() {
        let contest = Contest::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| hold(&contest, &[20_000, 10_000]));
            }
        });
        assert_eq!(contest.deal(2, PANEL), Turn::Won(1));
    }
}
