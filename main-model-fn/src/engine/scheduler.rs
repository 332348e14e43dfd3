//! Which rows go through the model next. Pure.

/// What a sequence could forward now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pending {
    /// Known tokens that are not forwarded yet.
    pub(crate) rows: usize,
    /// Most rows of it in one iteration.
    pub(crate) chunk: usize,
}

/// Rows of each sequence in the next iteration, in the order of arrival.
///
/// Every sequence with one pending token (all that decode) takes part in every iteration, so that
/// running requests keep their pace while long prompts are computed; what is left of `budget` goes
/// to longer prompts, first come first served, in chunks.
pub(crate) fn plan(pending: &[Pending], budget: usize) -> Vec<usize> {
    let decoding = pending.iter().filter(|pending| pending.rows == 1).count();
    // At least one row, or prompts would never come to an end beside many that decode.
    let mut left = budget.saturating_sub(decoding).max(1);
    pending
        .iter()
        .map(|pending| {
            if pending.rows <= 1 {
                return pending.rows;
            }
            let take = pending.rows.min(pending.chunk).min(left);
            left -= take;
            take
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pending(rows: &[usize], chunk: usize) -> Vec<Pending> {
        rows.iter().map(|&rows| Pending { rows, chunk }).collect()
    }

    #[test]
    fn decoding_first_then_prompts_in_order() {
        assert_eq!(plan(&pending(&[100, 1, 30, 1, 7], 32), 40), [32, 1, 6, 1, 0]);
        assert_eq!(plan(&pending(&[1, 1, 1], 32), 2), [1, 1, 1]);
        assert_eq!(plan(&pending(&[5], 32), 0), [1]);
        assert_eq!(plan(&[], 8), [0_usize; 0]);
    }

    #[test]
    fn one_short_chunk_does_not_shorten_the_others() {
        let mixed = [Pending { rows: 100, chunk: 8 }, Pending { rows: 100, chunk: 64 }];
        assert_eq!(plan(&mixed, 128), [8, 64]);
    }

    proptest! {
        #[test]
        fn everything_is_forwarded_once_and_decoding_never_waits(
            prompts in prop::collection::vec((1_usize..300, 1_usize..64), 1..20),
            budget in 0_usize..64,
        ) {
            let mut pending: Vec<Pending> = prompts.iter().map(|&(rows, chunk)| Pending { rows, chunk }).collect();
            let mut iterations = 0;
            while pending.iter().any(|pending| pending.rows > 0) {
                let rows = plan(&pending, budget);
                let decoding = pending.iter().filter(|pending| pending.rows == 1).count();
                prop_assert!(rows.iter().sum::<usize>() <= budget.max(decoding + 1));
                for (pending, rows) in pending.iter_mut().zip(&rows) {
                    prop_assert!(*rows <= pending.rows.min(pending.chunk));
                    prop_assert!(pending.rows != 1 || *rows == 1);
                    pending.rows -= rows;
                }
                iterations += 1;
                prop_assert!(iterations <= prompts.iter().map(|(rows, _)| rows).sum::<usize>());
            }
        }
    }
}
