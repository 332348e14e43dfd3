//! Which rows go through the model next. Pure.

/// Rows of each sequence in the next iteration, given how many known tokens each has not forwarded
/// yet, in the order of arrival.
///
/// Every sequence with one pending token (all that decode) takes part in every iteration, so that
/// running requests keep their pace while long prompts are computed; what is left of `budget` goes
/// to longer prompts, first come first served, in chunks of at most `chunk` rows.
pub(crate) fn plan(pending: &[usize], budget: usize, chunk: usize) -> Vec<usize> {
    let decoding = pending.iter().filter(|&&rows| rows == 1).count();
    // At least one row, or prompts would never come to an end beside many that decode.
    let mut left = budget.saturating_sub(decoding).max(1);
    pending
        .iter()
        .map(|&pending| {
            if pending <= 1 {
                return pending;
            }
            let take = pending.min(chunk).min(left);
            left -= take;
            take
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::plan;
    use proptest::prelude::*;

    #[test]
    fn decoding_first_then_prompts_in_order() {
        assert_eq!(plan(&[100, 1, 30, 1, 7], 40, 32), [32, 1, 6, 1, 0]);
        assert_eq!(plan(&[1, 1, 1], 2, 32), [1, 1, 1]);
        assert_eq!(plan(&[5], 0, 32), [1]);
        assert_eq!(plan(&[], 8, 8), [0_usize; 0]);
    }

    proptest! {
        #[test]
        fn everything_is_forwarded_once_and_decoding_never_waits(
            prompts in prop::collection::vec(1_usize..300, 1..20),
            budget in 0_usize..64,
            chunk in 1_usize..64,
        ) {
            let mut pending = prompts.clone();
            let mut iterations = 0;
            while pending.iter().any(|&rows| rows > 0) {
                let rows = plan(&pending, budget, chunk);
                let decoding = pending.iter().filter(|&&rows| rows == 1).count();
                prop_assert!(rows.iter().sum::<usize>() <= budget.max(decoding + 1));
                for (pending, rows) in pending.iter_mut().zip(&rows) {
                    prop_assert!(*rows <= *pending);
                    prop_assert!(*pending != 1 || *rows == 1);
                    *pending -= rows;
                }
                iterations += 1;
                prop_assert!(iterations <= prompts.iter().sum::<usize>());
            }
        }
    }
}
