//! From logits to a token. Pure.

use super::random::uniform;
use super::request::{Sampling, TokenLogprobs};
use std::collections::HashMap;

/// What sampling must know about the sequence so far.
pub(crate) struct Drawn<'a> {
    /// Which choice of the request.
    pub(crate) choice: usize,
    /// Position of the token to draw, the prompt's first being 0.
    pub(crate) position: usize,
    /// The prompt's tokens as [`distinct`] gives them; only a repetition penalty asks for them.
    pub(crate) prompt: &'a [u32],
    /// Tokens drawn so far with their counts.
    pub(crate) output: &'a HashMap<u32, u32>,
    /// Tokens that must not be drawn now (ends before `min_tokens`).
    pub(crate) banned: &'a [u32],
}

/// The tokens of `prompt`, each once, ascending.
pub(crate) fn distinct(prompt: &[u32]) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

/// Whether [`sample`] changes any logit.
pub(crate) fn modifies(sampling: &Sampling, drawn: &Drawn<'_>) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
        || !sampling.logit_bias.is_empty()
        || !drawn.banned.is_empty()
}

/// Draws one token from `logits` (one per vocabulary entry), modifying them in place.
pub(crate) fn sample(logits: &mut [f32], sampling: &Sampling, drawn: &Drawn<'_>) -> u32 {
    penalise(logits, sampling, drawn);
    for &(token, bias) in &sampling.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    for &token in drawn.banned {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    if sampling.temperature == 0.0 {
        return argmax(logits);
    }
    let number = uniform(sampling.seed, drawn.choice, drawn.position);
    draw(logits, sampling, number)
}

fn penalise(logits: &mut [f32], sampling: &Sampling, drawn: &Drawn<'_>) {
    if sampling.repetition_penalty != 1.0 {
        let penalty = sampling.repetition_penalty;
        let mut penalise = |token: u32| {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        };
        drawn.prompt.iter().for_each(|&token| penalise(token));
        let new = drawn.output.keys().filter(|token| drawn.prompt.binary_search(token).is_err());
        new.for_each(|&token| penalise(token));
    }
    if sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0 {
        for (&token, &count) in drawn.output {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= sampling.presence_penalty + sampling.frequency_penalty * count as f32;
            }
        }
    }
}

/// The index of the largest logit; equal ones go to the lower id, NaN never wins.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, &logit) in (0..).zip(logits) {
        if logit > best.1 {
            best = (token, logit);
        }
    }
    best.0
}

/// Sums over the candidates are made in the order of their ids, sums over those kept by `top_p` from
/// the likeliest on: neither depends on how far the candidates happen to be sorted.
fn draw(logits: &[f32], sampling: &Sampling, number: f64) -> u32 {
    let temperature = f64::from(sampling.temperature);
    let mut tokens: Vec<(u32, f32)> =
        (0..).zip(logits.iter().copied()).filter(|(_, logit)| *logit > f32::NEG_INFINITY).collect();
    if sampling.top_k > 0 && sampling.top_k < tokens.len() {
        tokens.select_nth_unstable_by(sampling.top_k, likelier);
        tokens.truncate(sampling.top_k);
        tokens.sort_unstable_by_key(|&(token, _)| token);
    }
    let Some(&(first, best)) = tokens.iter().min_by(|a, b| likelier(a, b)) else {
        return argmax(logits);
    };
    let weight = |logit: f32| ((f64::from(logit) - f64::from(best)) / temperature).exp();
    let (min_p, top_p) = (f64::from(sampling.min_p), f64::from(sampling.top_p));
    let total: f64 = match top_p < 1.0 {
        true => tokens.iter().map(|&(_, logit)| weight(logit)).sum(),
        false => tokens.iter().map(|&(_, logit)| weight(logit)).filter(|&weight| weight >= min_p).sum(),
    };
    let mut tokens = Descending::new(tokens);
    // The most likely token always stays; its weight is exactly 1.
    let mass = if top_p < 1.0 {
        let mut mass = 0.0;
        let mut kept = 0;
        while let Some((_, logit)) = tokens.get(kept) {
            let weight = weight(logit);
            if kept > 0 && (weight < min_p || mass >= top_p * total) {
                break;
            }
            mass += weight;
            kept += 1;
        }
        tokens.truncate(kept);
        mass
    } else {
        total
    };
    let mut left = number * mass;
    let mut last = first;
    let mut index = 0;
    while let Some((token, logit)) = tokens.get(index) {
        let weight = weight(logit);
        if index > 0 && weight < min_p {
            break;
        }
        left -= weight;
        last = token;
        if left < 0.0 {
            break;
        }
        index += 1;
    }
    // Rounding can leave a remainder after the last kept token.
    last
}

/// Tokens from the likeliest on, sorted only as far as they are asked for: of a vocabulary, sampling
/// looks at few.
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

    /// Keeps the first `count`, which have been asked for.
    fn truncate(&mut self, count: usize) {
        self.tokens.truncate(count);
        self.sorted = self.sorted.min(count);
    }
}

/// Log-probabilities of `token` and of the `top` most likely tokens under unmodified `logits`.
pub(crate) fn logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    let normaliser = f64::from(max) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
    // Few are asked for: they are kept in order on one way through the vocabulary.
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(top.min(logits.len()) + 1);
    for candidate in (0..).zip(logits.iter().copied()) {
        let full = best.len() == top;
        if full && best.last().is_none_or(|last| likelier(last, &candidate).is_lt()) {
            continue;
        }
        let place = best.partition_point(|better| likelier(better, &candidate).is_lt());
        best.insert(place, candidate);
        best.truncate(top);
    }
    TokenLogprobs {
        token,
        logprob: logprob(logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY)),
        top: best.into_iter().map(|(token, logit)| (token, logprob(logit))).collect(),
    }
}

fn likelier(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn draw_at(logits: &[f32], sampling: &Sampling, position: usize) -> u32 {
        let drawn =
            Drawn { choice: 0, position, prompt: &[0], output: &HashMap::from([(2, 2)]), banned: &[] };
        sample(&mut logits.to_vec(), sampling, &drawn)
    }

    #[test]
    fn greedy_takes_the_lower_id_of_equals() {
        assert_eq!(draw_at(&[0.0, 3.0, 3.0, f32::NAN], &Sampling::default(), 0), 1);
    }

    #[test]
    fn frequencies_follow_the_distribution() {
        let sampling = Sampling { temperature: 0.5, ..Sampling::default() };
        let logits = [0.0_f32, 0.5, 1.0];
        let weights: Vec<f64> = logits.iter().map(|&l| f64::from(2.0 * l).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut counts = [0_u32; 3];
        for position in 0..20_000 {
            counts[draw_at(&logits, &sampling, position) as usize] += 1;
        }
        for (count, weight) in counts.iter().zip(weights) {
            let expected = 20_000.0 * weight / total;
            assert!((f64::from(*count) - expected).abs() < 5.0 * expected.sqrt(), "{counts:?}");
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        let logits = [1.0, 4.0, 3.0, 2.0];
        let hot = |change: fn(&mut Sampling)| {
            let mut sampling = Sampling { temperature: 100.0, ..Sampling::default() };
            change(&mut sampling);
            let mut seen: Vec<u32> = (0..500).map(|p| draw_at(&logits, &sampling, p)).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(hot(|_| ()), [0, 1, 2, 3]);
        assert_eq!(hot(|s| s.top_k = 2), [1, 2]);
        assert_eq!(hot(|s| s.top_p = 1e-9), [1]);
        assert_eq!(hot(|s| s.top_p = 0.6), [1, 2, 3]);
        assert_eq!(hot(|s| s.min_p = 0.985), [1, 2]);
        assert_eq!(hot(|s| s.logit_bias = vec![(0, -1e6), (9, 5.0)]), [1, 2, 3]);
    }

    #[test]
    fn penalties_act_on_what_was_seen() {
        let logits = [1.0, 0.0, 2.0];
        let with = |change: fn(&mut Sampling)| {
            let mut sampling = Sampling::default();
            change(&mut sampling);
            draw_at(&logits, &sampling, 0)
        };
        assert_eq!(with(|_| ()), 2);
        assert_eq!(with(|s| s.presence_penalty = 1.5), 0);
        assert_eq!(with(|s| s.frequency_penalty = 0.6), 0);
        assert_eq!(
            with(|s| {
                s.repetition_penalty = 1e9;
                s.logit_bias = vec![(1, 0.1)]
            }),
            1
        );
    }

    #[test]
    fn logprobs_sum_to_one() {
        let logprobs = logprobs(&[0.5, -1.0, 2.0, 2.0], 1, 4);
        let sum: f32 = logprobs.top.iter().map(|(_, logprob)| logprob.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [2, 3, 0, 1]);
        assert_eq!(logprobs.logprob, logprobs.top[3].1);
    }

    /// [`draw`] with everything sorted.
    fn draw_plainly(logits: &[f32], sampling: &Sampling, number: f64) -> u32 {
        let mut tokens: Vec<(u32, f32)> =
            (0..).zip(logits.iter().copied()).filter(|(_, logit)| *logit > f32::NEG_INFINITY).collect();
        tokens.sort_by(likelier);
        if sampling.top_k > 0 {
            tokens.truncate(sampling.top_k);
        }
        let best = f64::from(tokens[0].1);
        let weight = |logit: f32| ((f64::from(logit) - best) / f64::from(sampling.temperature)).exp();
        let mut by_id = tokens.clone();
        by_id.sort_by_key(|&(token, _)| token);
        let likely = |logit: f32| weight(logit) >= f64::from(sampling.min_p);
        let mut kept = tokens.clone();
        let mass: f64 = if sampling.top_p < 1.0 {
            let total: f64 = by_id.iter().map(|&(_, logit)| weight(logit)).sum();
            kept.clear();
            let mut mass = 0.0;
            for &(token, logit) in &tokens {
                if !kept.is_empty() && (!likely(logit) || mass >= f64::from(sampling.top_p) * total) {
                    break;
                }
                mass += weight(logit);
                kept.push((token, logit));
            }
            mass
        } else {
            kept.retain(|&(_, logit)| likely(logit));
            by_id.iter().filter(|&&(_, logit)| likely(logit)).map(|&(_, logit)| weight(logit)).sum()
        };
        let mut left = number * mass;
        for &(token, logit) in &kept {
            left -= weight(logit);
            if left < 0.0 {
                return token;
            }
        }
        kept[kept.len() - 1].0
    }

    /// [`logprobs`]' alternatives with everything sorted.
    fn top_plainly(logits: &[f32], top: usize) -> Vec<u32> {
        let mut tokens: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        tokens.sort_by(likelier);
        tokens.into_iter().take(top).map(|(token, _)| token).collect()
    }

    /// Logits with many ties and some that cannot be drawn; longer than what is sorted at first.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
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
        fn partial_sorting_changes_nothing(
            logits in logits(),
            temperature in prop_oneof![Just(0.01_f32), 0.1_f32..3.0, Just(1e6_f32)],
            top_k in prop_oneof![Just(0_usize), 1_usize..800],
            top_p in prop_oneof![Just(1.0_f32), Just(0.0_f32), 0.0_f32..1.0],
            min_p in prop_oneof![Just(0.0_f32), 0.0_f32..1.0, Just(1.0_f32)],
            number in prop_oneof![Just(0.0_f64), 0.0_f64..1.0, Just(1.0_f64 - f64::EPSILON)],
        ) {
            let sampling = Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() };
            prop_assert_eq!(draw(&logits, &sampling, number), draw_plainly(&logits, &sampling, number));
        }

        #[test]
        fn alternatives_are_the_likeliest_in_order(logits in logits(), top in 0_usize..30) {
            let found: Vec<u32> = logprobs(&logits, 0, top).top.into_iter().map(|(token, _)| token).collect();
            prop_assert_eq!(found, top_plainly(&logits, top));
        }

        #[test]
        fn the_repetition_penalty_strikes_every_token_once(
            prompt in prop::collection::vec(0_u32..12, 1..30),
            output in prop::collection::hash_map(0_u32..12, 1_u32..4, 0..6),
        ) {
            let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
            let mut logits: Vec<f32> = (0..10).map(|token| token as f32 - 5.0).collect();
            let prompt = distinct(&prompt);
            let drawn = Drawn { choice: 0, position: 0, prompt: &prompt, output: &output, banned: &[] };
            penalise(&mut logits, &sampling, &drawn);
            for token in 0..10_u32 {
                let plain = token as f32 - 5.0;
                let seen = prompt.contains(&token) || output.contains_key(&token);
                let struck = if plain > 0.0 { plain / 2.0 } else { plain * 2.0 };
                prop_assert_eq!(logits[token as usize], if seen { struck } else { plain });
            }
        }
    }
}
