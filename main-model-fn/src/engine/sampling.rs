//! From logits to a token. Pure.

use super::random::uniform;
use super::request::{Sampling, TokenLogprobs};
use super::softmax::{BLOCK, Weights, largest, maxima};
use crate::grammar::{GrammarError, Progress};
use remoe_kernels::Pool;
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

/// A token to be drawn.
pub(crate) struct Draw<'a> {
    /// One per vocabulary entry.
    pub(crate) logits: &'a [f32],
    pub(crate) sampling: &'a Sampling,
    pub(crate) drawn: Drawn<'a>,
    /// Only what this allows is drawn.
    pub(crate) grammar: Option<&'a mut Progress>,
    /// How many alternatives are reported, where log-probabilities are.
    pub(crate) logprobs: Option<usize>,
}

/// A drawn token.
pub(crate) struct Outcome {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

impl Draw<'_> {
    fn make(&mut self) -> Result<Outcome, GrammarError> {
        let mask = self.grammar.as_mut().map(|grammar| grammar.mask()).transpose()?;
        let token = match mask.is_some() || modifies(self.sampling, &self.drawn) {
            true => {
                let mut logits = self.logits.to_vec();
                if let Some(mask) = mask {
                    mask.apply(&mut logits);
                }
                sample(&mut logits, self.sampling, &self.drawn)
            }
            false => choose(self.logits, self.sampling, &self.drawn),
        };
        Ok(Outcome { token, logprobs: self.logprobs.map(|top| logprobs(self.logits, token, top)) })
    }
}

/// From this many logits on, drawing is worth the pool's other threads.
const SHARED_LOGITS: usize = 1 << 15;

/// Makes all `draws`, on the threads of `pool` where it is much work.
pub(crate) fn make_all(draws: Vec<Draw<'_>>, pool: &Pool) -> Vec<Result<Outcome, GrammarError>> {
    let logits: usize = draws.iter().map(|draw| draw.logits.len()).sum();
    let mut made: Vec<_> = draws.into_iter().map(|draw| (draw, None)).collect();
    if made.len() > 1 && logits >= SHARED_LOGITS {
        // What a thread left undone is done below.
        let _panicked = pool.each(&mut made, |(draw, outcome)| *outcome = Some(draw.make()));
    }
    made.into_iter().map(|(mut draw, outcome)| outcome.unwrap_or_else(|| draw.make())).collect()
}

/// Draws one token from `logits` (one per vocabulary entry), modifying them in place.
fn sample(logits: &mut [f32], sampling: &Sampling, drawn: &Drawn<'_>) -> u32 {
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
    choose(logits, sampling, drawn)
}

fn choose(logits: &[f32], sampling: &Sampling, drawn: &Drawn<'_>) -> u32 {
    if sampling.temperature == 0.0 {
        return argmax(logits);
    }
    draw(logits, sampling, uniform(sampling.seed, drawn.choice, drawn.position))
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
    let best = largest(logits);
    (0..).zip(logits).find(|&(_, &logit)| logit == best).map_or(0, |(token, _)| token)
}

/// Draws from the tokens that `top_k`, `top_p` and `min_p` leave: the one at which the sum of their weights,
/// in the order of their ids, passes `number` (0 to 1) times the whole.
fn draw(logits: &[f32], sampling: &Sampling, number: f64) -> u32 {
    let maxima = maxima(logits);
    let best = largest(&maxima);
    if best == f32::NEG_INFINITY {
        return argmax(logits);
    }
    let weights = Weights::new(best, sampling.temperature, sampling.min_p);
    if sampling.top_k == 0 && sampling.top_p >= 1.0 {
        let sums = weights.sums(logits, &maxima);
        let mut left = number * sums.iter().sum::<f64>();
        // The last block that weighs anything keeps what rounding leaves of it: `pick` ends with its last token.
        let (mut chosen, mut passed) = (0, 0.0);
        for (block, &sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            left -= passed;
            (chosen, passed) = (block, sum);
            if left < sum {
                break;
            }
        }
        let tokens = (0..).zip(logits.iter().copied()).skip(chosen * BLOCK).take(BLOCK);
        return pick(tokens, &weights, left);
    }
    let tokens = candidates(logits, &maxima, best, sampling);
    let mass: f64 = tokens.iter().map(|&(_, logit)| f64::from(weights.of(logit))).sum();
    pick(tokens.into_iter(), &weights, number * mass)
}

/// The first of `tokens` at which the sum of the weights passes `left`, else the last that weighs anything:
/// rounding can leave a remainder.
fn pick(tokens: impl Iterator<Item = (u32, f32)>, weights: &Weights, mut left: f64) -> u32 {
    let mut last = 0;
    for (token, logit) in tokens {
        let weight = weights.of(logit);
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

/// What `top_k` and `top_p` leave of the tokens, in the order of their ids. `maxima` are the largest logits of
/// the blocks, `best` that of all.
fn candidates(logits: &[f32], maxima: &[f32], best: f32, sampling: &Sampling) -> Vec<(u32, f32)> {
    let weights = Weights::new(best, sampling.temperature, 0.0);
    let top_p = f64::from(sampling.top_p);
    let mut tokens: Vec<(u32, f32)>;
    let total: f64;
    if sampling.top_k == 0 {
        total = weights.sums(logits, maxima).iter().sum();
        // Tokens that weigh less than this together weigh less than what `top_p` leaves out. The logit
        // that belongs to it is a little lower than it needs to be, for roundings.
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
        total = tokens.iter().map(|&(_, logit)| f64::from(weights.of(logit))).sum();
    }
    if top_p < 1.0 {
        let mut descending = Descending::new(tokens);
        let (mut mass, mut kept) = (0.0, 0);
        // The most likely token always stays.
        while let Some((_, logit)) = descending.get(kept)
            && (kept == 0 || mass < top_p * total)
        {
            mass += f64::from(weights.of(logit));
            kept += 1;
        }
        tokens = descending.into_first(kept);
        tokens.sort_unstable_by_key(|&(token, _)| token);
    }
    tokens
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

    /// The first `count`, which have been asked for.
    fn into_first(mut self, count: usize) -> Vec<(u32, f32)> {
        self.tokens.truncate(count);
        self.tokens
    }
}

/// Log-probabilities of `token` and of the `top` most likely tokens under unmodified `logits`.
pub(crate) fn logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let maxima = maxima(logits);
    let max = largest(&maxima);
    let weights = Weights::new(max, 1.0, 0.0);
    let sum: f64 = weights.sums(logits, &maxima).iter().sum();
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use remoe_kernels::PoolConfig;

    fn draw_at(logits: &[f32], sampling: &Sampling, position: usize) -> u32 {
        let drawn =
            Drawn { choice: 0, position, prompt: &[0], output: &HashMap::from([(2, 2)]), banned: &[] };
        Draw { logits, sampling, drawn, grammar: None, logprobs: None }.make().unwrap().token
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
    fn the_last_number_draws_the_last_token_also_where_sums_are_rounded() {
        // Summed block by block, what goes before the last block and its own sum are a little less than the whole.
        let mut logits = [0.0; 514];
        for (token, logit) in [(105, 9.96358), (256, 9.5), (409, 9.75), (512, 9.75), (513, 9.88698)] {
            logits[token] = logit;
        }
        let sampling = Sampling { temperature: 0.01, ..Sampling::default() };
        assert_eq!(draw(&logits, &sampling, 1.0 - f64::EPSILON), 513);
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

    /// The tokens that can be drawn with their probabilities, in the order of their ids, with libm's
    /// exponential and everything sorted. None where rounding decides about a token.
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
        fn every_way_to_draw_follows_the_same_distribution(
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
            // The number lies in the token's part of the whole, but for rounding.
            let before: f64 = expected.iter().filter(|(other, _)| *other < token).map(|(_, part)| part).sum();
            let own = expected.iter().find(|(other, _)| *other == token).map(|(_, part)| part);
            let Some(own) = own else { return Err(TestCaseError::fail(format!("{token} is not kept"))) };
            prop_assert!(before - 1e-5 <= number && number <= before + own + 1e-5, "{before} {own}");
        }

        #[test]
        fn the_pool_changes_nothing(
            logits in prop::collection::vec(-9.0_f32..9.0, 9000),
            seeds in prop::collection::vec(0_u64..1000, 0..9),
        ) {
            let counts = HashMap::new();
            let pool = Pool::new(PoolConfig { threads: 2, ..PoolConfig::default() }).unwrap();
            let sampling = |&seed: &u64| Sampling { temperature: 0.8, seed, ..Sampling::default() };
            let sampling: Vec<Sampling> = seeds.iter().map(sampling).collect();
            let draw = |sampling| {
                let drawn = Drawn { choice: 0, position: 3, prompt: &[], output: &counts, banned: &[] };
                Draw { logits: &logits, sampling, drawn, grammar: None, logprobs: Some(2) }
            };
            let made = make_all(sampling.iter().map(draw).collect(), &pool);
            prop_assert_eq!(made.len(), seeds.len());
            for (made, sampling) in made.iter().zip(&sampling) {
                let (made, alone) = (made.as_ref().unwrap(), draw(sampling).make().unwrap());
                prop_assert_eq!((made.token, &made.logprobs), (alone.token, &alone.logprobs));
            }
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
