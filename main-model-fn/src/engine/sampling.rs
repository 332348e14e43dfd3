//! From logits to a token. Pure.

use super::draw::{argmax, draw, likelier};
use super::random::uniform;
use super::request::{Sampling, TokenLogprobs};
use super::softmax::{Weights, largest, maxima};
use crate::grammar::{GrammarError, GrammarProgress};
use remoe_kernels::Pool;
use std::collections::HashMap;

/// Facts about the sequence so far that sampling needs.
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

/// Reports if [`sample`] changes any logit.
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
    pub(crate) grammar: Option<&'a mut GrammarProgress>,
    /// Token that is taken whatever the logits are.
    pub(crate) given: Option<u32>,
    /// How many alternatives are reported, where log-probabilities are.
    pub(crate) logprobs: Option<usize>,
}

/// A drawn token.
pub(crate) struct DrawnToken {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// Why no token was drawn.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DrawError {
    /// The grammar asks for too much.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// Weights or an input have an infinity or a NaN, or a sum overflowed.
    #[error("the model's logits are not finite; the checkpoint may be damaged, or overflow in this dtype")]
    NotFinite,
}

impl Draw<'_> {
    fn make(&mut self) -> Result<DrawnToken, DrawError> {
        // A NaN is never the largest logit: without this check the lowest token would be drawn for ever.
        if !are_finite(self.logits) {
            return Err(DrawError::NotFinite);
        }
        if let Some(token) = self.given {
            return Ok(DrawnToken {
                token,
                logprobs: self.logprobs.map(|top| logprobs(self.logits, token, top)),
            });
        }
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
        Ok(DrawnToken { token, logprobs: self.logprobs.map(|top| logprobs(self.logits, token, top)) })
    }
}

fn are_finite(logits: &[f32]) -> bool {
    // Infinities and NaNs are the patterns whose exponent is all ones. Without a branch, for the compiler's vectors.
    logits.iter().fold(0, |largest, logit| largest.max(logit.to_bits() & 0x7fff_ffff)) < 0x7f80_0000
}

/// From this many logits on, drawing is worth the pool's other threads.
const SHARED_LOGITS: usize = 1 << 15;

/// Makes all `draws`, on the threads of `pool` where it is much work.
pub(crate) fn make_all(draws: Vec<Draw<'_>>, pool: &Pool) -> Vec<Result<DrawnToken, DrawError>> {
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
    for &(token, bias) in sampling.logit_bias.iter() {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::draw::tests::logits;
    use super::*;
    use proptest::prelude::*;
    use remoe_kernels::PoolConfig;

    fn draw_at(logits: &[f32], sampling: &Sampling, position: usize) -> u32 {
        let drawn =
            Drawn { choice: 0, position, prompt: &[0], output: &HashMap::from([(2, 2)]), banned: &[] };
        Draw { logits, sampling, drawn, grammar: None, given: None, logprobs: None }.make().unwrap().token
    }

    #[test]
    fn greedy_takes_the_lower_id_of_equals() {
        assert_eq!(draw_at(&[0.0, 3.0, 3.0, 1.0], &Sampling::default(), 0), 1);
    }

    #[test]
    fn nothing_is_drawn_from_logits_that_are_not_finite() {
        for strange in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for position in 0..4 {
                let mut logits = [0.0, 3.0, f32::MAX, f32::MIN];
                logits[position] = strange;
                let drawn =
                    Drawn { choice: 0, position: 0, prompt: &[], output: &HashMap::new(), banned: &[] };
                let sampling = &Sampling::default();
                let mut draw =
                    Draw { logits: &logits, sampling, drawn, grammar: None, given: None, logprobs: None };
                assert_eq!(draw.make().err(), Some(DrawError::NotFinite));
            }
        }
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
        assert_eq!(hot(|s| s.logit_bias = [(0, -1e6), (9, 5.0)].into()), [1, 2, 3]);
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
                s.logit_bias = [(1, 0.1)].into()
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

    /// [`logprobs`]' alternatives with everything sorted.
    fn top_plainly(logits: &[f32], top: usize) -> Vec<u32> {
        let mut tokens: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        tokens.sort_by(likelier);
        tokens.into_iter().take(top).map(|(token, _)| token).collect()
    }

    proptest! {
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
                Draw { logits: &logits, sampling, drawn, grammar: None, given: None, logprobs: Some(2) }
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
