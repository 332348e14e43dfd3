//! Sampling of one token from logits, by a random number from 0 to 1.

use super::request::Sampling;
use super::softmax::{BLOCK, Weights, largest, maxima};

/// Returns the index of the largest logit. The lower id wins ties; NaN is never the largest.
pub(super) fn argmax(logits: &[f32]) -> u32 {
    let best = largest(logits);
    (0..).zip(logits).find(|&(_, &logit)| logit == best).map_or(0, |(token, _)| token)
}

/// Samples one of the tokens that `top_k`, `top_p` and `min_p` keep, by inversion of the cumulative weights: the first
/// token, in order of ids, at which their sum exceeds `number` (0 to 1) times the total.
pub(super) fn draw(logits: &[f32], sampling: &Sampling, number: f64) -> u32 {
    let maxima = maxima(logits);
    let best = largest(&maxima);
    if best == f32::NEG_INFINITY {
        return argmax(logits);
    }
    let weights = Weights::new(best, sampling.temperature, sampling.min_p);
    if sampling.top_k == 0 && sampling.top_p >= 1.0 {
        let sums = weights.sums(logits, &maxima);
        let mut left = number * sums.iter().sum::<f64>();
        // If rounding leaves a remainder, the last block with a weight gets it, and `pick` ends with its last token.
        let (mut chosen, mut block_weight) = (0, 0.0);
        for (block, &sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            left -= block_weight;
            (chosen, block_weight) = (block, sum);
            if left < sum {
                break;
            }
        }
        let tokens = (0..).zip(logits.iter().copied()).skip(chosen * BLOCK).take(BLOCK);
        return pick(tokens, &weights, left);
    }
    let tokens = candidates(logits, &maxima, best, sampling);
    let mass: f64 = tokens.iter().map(|&(_, logit)| f64::from(weights.weight(logit))).sum();
    pick(tokens.into_iter(), &weights, number * mass)
}

/// Returns the first of `tokens` at which the sum of weights exceeds `left`. If rounding leaves a remainder, returns the
/// last token with a weight.
fn pick(tokens: impl Iterator<Item = (u32, f32)>, weights: &Weights, mut left: f64) -> u32 {
    let mut last = 0;
    for (token, logit) in tokens {
        let weight = weights.weight(logit);
        if weight > 0.0 {
            last = token;
            left -= f64::from(weight);
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

/// Returns the tokens that `top_k` and `top_p` keep, in order of ids. `maxima`: largest logit of each block; `best`:
/// largest logit.
fn candidates(logits: &[f32], maxima: &[f32], best: f32, sampling: &Sampling) -> Vec<(u32, f32)> {
    let weights = Weights::new(best, sampling.temperature, 0.0);
    let top_p = f64::from(sampling.top_p);
    let mut tokens: Vec<(u32, f32)>;
    let total: f64;
    if sampling.top_k == 0 {
        total = weights.sums(logits, maxima).iter().sum();
        // Tokens below `least` weigh together less than what `top_p` leaves out. The corresponding logit is lowered a
        // little for rounding.
        let least = (1.0 - top_p) * total / logits.len() as f64;
        let least = f64::from(best) + f64::from(sampling.temperature) * (least.ln() - 1e-3);
        let least = (least as f32).next_down();
        let blocks = (0..).step_by(BLOCK).zip(logits.chunks(BLOCK)).zip(maxima);
        tokens = blocks
            .filter(|(_, largest)| **largest >= least)
            .flat_map(|((first, block), _)| (first..).zip(block.iter().copied()))
            .filter(|&(_, logit)| logit >= least && logit > f32::NEG_INFINITY)
            .collect();
    } else {
        tokens = (0..).zip(logits.iter().copied()).filter(|(_, logit)| *logit > f32::NEG_INFINITY).collect();
        if sampling.top_k < tokens.len() {
            tokens.select_nth_unstable_by(sampling.top_k, likelier);
            tokens.truncate(sampling.top_k);
            tokens.sort_unstable_by_key(|&(token, _)| token);
        }
        total = tokens.iter().map(|&(_, logit)| f64::from(weights.weight(logit))).sum();
    }
    if top_p < 1.0 {
        let mut descending = Descending::new(tokens);
        let (mut mass, mut kept) = (0.0, 0);
        // The most likely token always stays.
        while let Some((_, logit)) = descending.get(kept)
            && (kept == 0 || mass < top_p * total)
        {
            mass += f64::from(weights.weight(logit));
            kept += 1;
        }
        tokens = descending.into_first(kept);
        tokens.sort_unstable_by_key(|&(token, _)| token);
    }
    tokens
}

/// Tokens in descending order, sorted only as far as needed: sampling needs few tokens of a vocabulary.
struct Descending {
    tokens: Vec<(u32, f32)>,
    sorted: usize,
}

impl Descending {
    fn new(tokens: Vec<(u32, f32)>) -> Self {
        Self { tokens, sorted: 0 }
    }

    fn get(&mut self, index: usize) -> Option<(u32, f32)> {
        while index >= self.sorted && self.sorted < self.tokens.len() {
            let rest = &mut self.tokens[self.sorted..];
            let next = (3 * self.sorted).max(64).min(rest.len());
            if next < rest.len() {
                rest.select_nth_unstable_by(next, likelier);
            }
            rest[..next].sort_unstable_by(likelier);
            self.sorted += next;
        }
        self.tokens.get(index).copied()
    }

    /// Returns the first `count` tokens, which [`get`](Self::get) must have returned before.
    fn into_first(mut self, count: usize) -> Vec<(u32, f32)> {
        self.tokens.truncate(count);
        self.tokens
    }
}

/// Compares tokens: higher logits first, then lower ids.
pub(super) fn likelier(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn largest_random_number_draws_last_token_despite_rounding() {
        // The sums of the blocks, added up, are slightly below the sum of all weights.
        let mut logits = [0.0; 514];
        for (token, logit) in [(105, 9.96358), (256, 9.5), (409, 9.75), (512, 9.75), (513, 9.88698)] {
            logits[token] = logit;
        }
        let sampling = Sampling { temperature: 0.01, ..Sampling::default() };
        assert_eq!(draw(&logits, &sampling, 1.0 - f64::EPSILON), 513);
    }

    /// Computes the probability of each token that can be sampled, in order of ids, with libm's exponential and full sorting.
    /// Returns `None` if rounding decides whether a token is kept.
    fn distribution(logits: &[f32], sampling: &Sampling) -> Option<Vec<(u32, f64)>> {
        const CLOSE: f64 = 1e-4;
        let mut tokens: Vec<(u32, f32)> =
            (0..).zip(logits.iter().copied()).filter(|(_, logit)| *logit > f32::NEG_INFINITY).collect();
        tokens.sort_by(likelier);
        if sampling.top_k > 0 {
            tokens.truncate(sampling.top_k);
        }
        let best = tokens[0].1;
        let weight = |logit: f32| (f64::from(logit - best) / f64::from(sampling.temperature)).exp();
        let (top_p, min_p) = (f64::from(sampling.top_p), f64::from(sampling.min_p));
        if top_p < 1.0 {
            let total: f64 = tokens.iter().map(|&(_, logit)| weight(logit)).sum();
            let mut mass = 0.0;
            let mut kept = 0;
            for &(_, logit) in &tokens {
                if kept > 0 && (mass - top_p * total).abs() < CLOSE * total {
                    return None;
                }
                if kept > 0 && mass >= top_p * total {
                    break;
                }
                mass += weight(logit);
                kept += 1;
            }
            tokens.truncate(kept);
        }
        let mut kept: Vec<(u32, f64)> = tokens.iter().map(|&(token, logit)| (token, weight(logit))).collect();
        if min_p > 0.0 && kept.iter().any(|&(_, weight)| weight < 1.0 && (weight / min_p - 1.0).abs() < CLOSE)
        {
            return None;
        }
        kept.retain(|&(_, weight)| weight >= min_p);
        kept.sort_by_key(|&(token, _)| token);
        let mass: f64 = kept.iter().map(|(_, weight)| weight).sum();
        Some(kept.into_iter().map(|(token, weight)| (token, weight / mass)).collect())
    }

    /// Generates logits with ties and with infinities; some are longer than what [`Descending`] sorts first.
    pub(in super::super) fn logits() -> impl Strategy<Value = Vec<f32>> {
        let logit = prop_oneof![
            8 => (-40_i32..40).prop_map(|quarter| quarter as f32 / 4.0),
            8 => -10.0_f32..10.0,
            1 => Just(f32::NEG_INFINITY),
        ];
        let logits = prop::collection::vec(logit, 1..700);
        logits.prop_filter("something can be drawn", |logits| logits.iter().any(|logit| logit.is_finite()))
    }

    proptest! {
        #[test]
        fn sampling_follows_the_distribution(
            logits in logits(),
            temperature in prop_oneof![Just(0.01_f32), 0.1_f32..3.0, Just(1e6_f32)],
            top_k in prop_oneof![Just(0_usize), 1_usize..800],
            top_p in prop_oneof![Just(1.0_f32), Just(0.0_f32), 0.0_f32..1.0],
            min_p in prop_oneof![Just(0.0_f32), 0.0_f32..1.0, Just(1.0_f32)],
            number in prop_oneof![Just(0.0_f64), 0.0_f64..1.0, Just(1.0_f64 - f64::EPSILON)],
        ) {
            let sampling = Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() };
            let Some(expected) = distribution(&logits, &sampling) else { return Ok(()) };
            let token = draw(&logits, &sampling, number);
            // The number must lie in the token's interval of the cumulative distribution, up to rounding.
            let before: f64 = expected.iter().filter(|(other, _)| *other < token).map(|(_, part)| part).sum();
            let own = expected.iter().find(|(other, _)| *other == token).map(|(_, part)| part);
            let Some(own) = own else { return Err(TestCaseError::fail(format!("{token} is not kept"))) };
            prop_assert!(before - 1e-5 <= number && number <= before + own + 1e-5, "{before} {own}");
        }
    }
}
