//! Scheduler of prefill: selects the prompt that advances next, between two decode iterations.
//!
//! The shortest prompt goes first (shortest remaining processing time). If an older prompt waits behind it, the oldest
//! gets half of the time. So no prompt starves: a prompt takes at most twice as long as it would with only the earlier
//! ones. Batch prompts get time while no interactive prompt can use it.

use super::request::Priority;
use std::time::Duration;

/// Prefill of one request or group: a prompt, or known tokens after a preemption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PrefillWork {
    /// Rows that remain.
    pub(crate) rows: usize,
    pub(crate) priority: Priority,
}

/// Balance between the oldest and the shortest prompt.
#[derive(Debug, Default)]
pub(crate) struct PrefillOrder {
    /// Seconds by which shorter prompts had more time than the oldest; negative if they had less.
    oldest_deficit: f64,
}

/// Largest absolute deficit, in seconds.
const MAX_DEFICIT: f64 = 1.0;

impl PrefillOrder {
    /// Returns the index of the prompt that advances next. `prompts` are in the order of arrival.
    pub(crate) fn next(&self, prompts: &[PrefillWork]) -> Option<usize> {
        let (oldest, shortest) = candidates(prompts)?;
        Some(if self.oldest_deficit > 0.0 { oldest } else { shortest })
    }

    /// Records that prompt `index` of `prompts` advanced for `time`.
    pub(crate) fn record(&mut self, prompts: &[PrefillWork], index: usize, time: Duration) {
        let Some((oldest, shortest)) = candidates(prompts) else { return };
        let time = time.as_secs_f64();
        self.oldest_deficit = match index {
            _ if oldest == shortest => 0.0,
            _ if index == oldest => (self.oldest_deficit - time).max(-MAX_DEFICIT),
            _ => (self.oldest_deficit + time).min(MAX_DEFICIT),
        };
    }
}

/// Returns the oldest and the shortest prompt of the highest priority.
fn candidates(prompts: &[PrefillWork]) -> Option<(usize, usize)> {
    let highest = prompts.iter().map(|prompt| prompt.priority).min()?;
    let these = || prompts.iter().enumerate().filter(|(_, prompt)| prompt.priority == highest);
    let (oldest, _) = these().next()?;
    let (shortest, _) = these().min_by_key(|(_, prompt)| prompt.rows)?;
    Some((oldest, shortest))
}

/// Distributes at most `max_rows` rows, at least one, over the sequences of a request.
pub(crate) fn rows_per_sequence(pending: &[PendingRows], max_rows: usize) -> Vec<usize> {
    let mut left = max_rows.max(1);
    pending
        .iter()
        .map(|pending| {
            let take = pending.rows.min(pending.chunk).min(left);
            left -= take;
            take
        })
        .collect()
}

/// Rows of one sequence that can be forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingRows {
    /// Known tokens that are not forwarded yet.
    pub(crate) rows: usize,
    /// Most rows in one forward or prefill.
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
    fn short_prompts_overtake_but_the_oldest_gets_half_the_time() {
        let mut order = PrefillOrder::default();
        let prompts = [prompt(8000), prompt(20)];
        let sequence: Vec<usize> = (0..6)
            .map(|_| {
                let next = order.next(&prompts).unwrap();
                order.record(&prompts, next, SLICE);
                next
            })
            .collect();
        assert_eq!(sequence, [1, 0, 1, 0, 1, 0]);
        // A prompt that was alone leaves no deficit.
        order.record(&prompts[..1], 0, 100 * SLICE);
        assert_eq!(order.next(&prompts), Some(1));
        assert_eq!(order.next(&[]), None);
    }

    #[test]
    fn batch_prompts_wait_for_interactive_ones() {
        let batch = PrefillWork { priority: Priority::Batch, ..prompt(5) };
        let mut order = PrefillOrder::default();
        for _ in 0..3 {
            assert_eq!(order.next(&[batch, prompt(100)]), Some(1));
            order.record(&[batch, prompt(100)], 1, SLICE);
        }
        assert_eq!(order.next(&[batch]), Some(0));
    }

    proptest! {
        /// Whatever shorter prompts arrive, the oldest gets half of the time, up to a second.
                #[test]
                fn oldest_prompt_never_starves(
            others in prop::collection::vec((1_usize..500, 1_u64..200), 1..200),
        ) {
            let mut order = PrefillOrder::default();
                        let (mut all, mut oldest) = (Duration::ZERO, Duration::ZERO);
                        for (rows, ms) in others {
                            let prompts = [prompt(1000), prompt(rows)];
                            let next = order.next(&prompts).unwrap();
                            let time = Duration::from_millis(ms);
                            order.record(&prompts, next, time);
                            all += time;
                            oldest += if next == 0 { time } else { Duration::ZERO };
            }
            prop_assert!(2 * oldest + Duration::from_millis(2400) >= all, "{oldest:?} of {all:?}");
        }

        #[test]
        fn rows_per_sequence_stay_within_chunks_and_limit(
                    pending in prop::collection::vec((0_usize..300, 1_usize..100), 1..6),
                    max_rows in 0_usize..400,
                ) {
                    let pending: Vec<_> =
                        pending.into_iter().map(|(rows, chunk)| PendingRows { rows, chunk }).collect();
                    let rows = rows_per_sequence(&pending, max_rows);
                    prop_assert!(rows.iter().sum::<usize>() <= max_rows.max(1));
                    let fits = |(rows, pending): (&usize, &PendingRows)| *rows <= pending.rows.min(pending.chunk);
                    prop_assert!(rows.iter().zip(&pending).all(fits));
                    let has_pending = pending.iter().any(|pending| pending.rows > 0);
                    prop_assert_eq!(rows.iter().any(|rows| *rows > 0), has_pending);
        }
    }
}
