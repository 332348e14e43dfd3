//! Scheduler of continuous batching: the prompt whose prefill goes on next. Pure.
//!
//! All that decode take part in every iteration; the time between two of them belongs to prompts. It goes to the
//! shortest prompt (shortest remaining processing time first), but where an older one waits behind it, half of the time
//! goes to the oldest: a prompt takes at most twice as long as alone with those that came before it, and no longer
//! prompt starves. Batch requests get time while no interactive prompt can use it.

use super::request::Priority;
use std::time::Duration;

/// Something to compute of a request: its prompt, or known tokens after a preemption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PrefillWork {
    /// Rows that are left of it.
    pub(crate) rows: usize,
    pub(crate) priority: Priority,
}

/// Whose turn it is, the oldest prompt's or the shortest's.
#[derive(Debug, Default)]
pub(crate) struct PrefillOrder {
    /// Seconds that the shortest had and the oldest is owed; below 0 the other way round.
    owed: f64,
}

/// The most that either is owed, in seconds.
const MOST_OWED: f64 = 1.0;

impl PrefillOrder {
    /// Index of the prompt that goes on next, of `prompts` in the order of arrival.
    pub(crate) fn next(&self, prompts: &[PrefillWork]) -> Option<usize> {
        let (oldest, shortest) = candidates(prompts)?;
        Some(if self.owed > 0.0 { oldest } else { shortest })
    }

    /// Prompt `index` of `prompts` has had `time`.
    pub(crate) fn had(&mut self, prompts: &[PrefillWork], index: usize, time: Duration) {
        let Some((oldest, shortest)) = candidates(prompts) else { return };
        let time = time.as_secs_f64();
        self.owed = match index {
            _ if oldest == shortest => 0.0,
            _ if index == oldest => (self.owed - time).max(-MOST_OWED),
            _ => (self.owed + time).min(MOST_OWED),
        };
    }
}

/// The oldest and the shortest of the prompts of the highest priority that there is.
fn candidates(prompts: &[PrefillWork]) -> Option<(usize, usize)> {
    let highest = prompts.iter().map(|prompt| prompt.priority).min()?;
    let these = || prompts.iter().enumerate().filter(|(_, prompt)| prompt.priority == highest);
    let (oldest, _) = these().next()?;
    let (shortest, _) = these().min_by_key(|(_, prompt)| prompt.rows)?;
    Some((oldest, shortest))
}

/// Rows of each of a request's sequences in a pass of at most `most` rows, given what each could forward and its
/// largest chunk. One at least.
pub(crate) fn rows_of(pending: &[Pending], most: usize) -> Vec<usize> {
    let mut left = most.max(1);
    pending
        .iter()
        .map(|pending| {
            let take = pending.rows.min(pending.chunk).min(left);
            left -= take;
            take
        })
        .collect()
}

/// Rows that a sequence could forward now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pending {
    /// Known tokens that are not forwarded yet.
    pub(crate) rows: usize,
    /// Most rows of it in one pass.
    pub(crate) chunk: usize,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SLICE: Duration = Duration::from_millis(50);

    fn prompt(rows: usize) -> PrefillWork {
        PrefillWork { rows, priority: Priority::Interactive }
    }

    #[test]
    fn short_ones_pass_long_ones_which_get_half_of_the_time() {
        let mut turns = PrefillOrder::default();
        let prompts = [prompt(8000), prompt(20)];
        let order: Vec<usize> = (0..6)
            .map(|_| {
                let next = turns.next(&prompts).unwrap();
                turns.had(&prompts, next, SLICE);
                next
            })
            .collect();
        assert_eq!(order, [1, 0, 1, 0, 1, 0]);
        // Nothing is owed by who was alone.
        turns.had(&prompts[..1], 0, 100 * SLICE);
        assert_eq!(turns.next(&prompts), Some(1));
        assert_eq!(turns.next(&[]), None);
    }

    #[test]
    fn batch_prompts_wait_for_interactive_ones() {
        let batch = PrefillWork { priority: Priority::Batch, ..prompt(5) };
        let mut turns = PrefillOrder::default();
        for _ in 0..3 {
            assert_eq!(turns.next(&[batch, prompt(100)]), Some(1));
            turns.had(&[batch, prompt(100)], 1, SLICE);
        }
        assert_eq!(turns.next(&[batch]), Some(0));
    }

    proptest! {
        /// Whatever shorter prompts come and go, the oldest gets half of the time, but for a second.
        #[test]
        fn the_oldest_never_starves(
            others in prop::collection::vec((1_usize..500, 1_u64..200), 1..200),
        ) {
            let (mut turns, mut all, mut its) = (PrefillOrder::default(), Duration::ZERO, Duration::ZERO);
            for (rows, ms) in others {
                let prompts = [prompt(1000), prompt(rows)];
                let next = turns.next(&prompts).unwrap();
                let time = Duration::from_millis(ms);
                turns.had(&prompts, next, time);
                all += time;
                its += if next == 0 { time } else { Duration::ZERO };
            }
            prop_assert!(2 * its + Duration::from_millis(2400) >= all, "{its:?} of {all:?}");
        }

        #[test]
        fn a_pass_takes_what_fits(
            pending in prop::collection::vec((0_usize..300, 1_usize..100), 1..6),
            most in 0_usize..400,
        ) {
            let pending: Vec<_> = pending.into_iter().map(|(rows, chunk)| Pending { rows, chunk }).collect();
            let rows = rows_of(&pending, most);
            prop_assert!(rows.iter().sum::<usize>() <= most.max(1));
            prop_assert!(rows.iter().zip(&pending).all(|(rows, it)| *rows <= it.rows.min(it.chunk)));
            let waits = pending.iter().any(|pending| pending.rows > 0);
            prop_assert_eq!(rows.iter().any(|rows| *rows > 0), waits);
        }
    }
}
