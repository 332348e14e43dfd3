//! Token sampling: penalties, biases, grammar masks and log-probabilities. [`super::draw`] selects the token.

use super::draw::{argmax, draw, likelier};
use super::random::uniform;
use super::request::{Sampling, TokenLogprobs};
use super::softmax::{Weights, largest, maxima};
use crate::grammar::{GrammarError, GrammarProgress};
use remoe_kernels::Pool;
use std::collections::HashMap;

/// State of the sequence that sampling depends on.
pub(crate) struct SequenceState<'a> {
    /// Index of the choice in its request.
    pub(crate) choice: usize,
    /// Position of the token to sample; the prompt starts at 0.
    pub(crate) position: usize,
    /// The prompt's tokens by [`distinct`]; needed for a repetition penalty only.
    pub(crate) prompt: &'a [u32],
    /// Number of occurrences of each generated token.
    pub(crate) output: &'a HashMap<u32, u32>,
    /// Tokens that must not be sampled now: those that end a choice, before `min_tokens`.
    pub(crate) banned: &'a [u32],
}

/// Returns the tokens of `prompt` without duplicates, ascending.
pub(crate) fn distinct(prompt: &[u32]) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

/// Reports if [`sample`] would change any logit.
pub(crate) fn changes_logits(sampling: &Sampling, state: &SequenceState<'_>) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
        || !sampling.logit_bias.is_empty()
        || !state.banned.is_empty()
}

/// Input for sampling one token.
pub(crate) struct Draw<'a> {
    /// One logit per vocabulary entry.
    pub(crate) logits: &'a [f32],
    pub(crate) sampling: &'a Sampling,
    pub(crate) state: SequenceState<'a>,
    /// Grammar that limits the tokens.
    pub(crate) grammar: Option<&'a mut GrammarProgress>,
    /// Token that is forced, whatever the logits are.
    pub(crate) forced: Option<u32>,
    /// Number of alternatives to report, if log-probabilities are requested.
    pub(crate) logprobs: Option<usize>,
}

/// A sampled token.
pub(crate) struct DrawnToken {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// Failure to sample a token.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DrawError {
    /// The grammar exceeds its limits.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The logits have an infinity or a NaN: so have the weights or an input, or a sum overflowed.
    #[error("the model's logits are not finite; the checkpoint may be damaged, or overflow in this dtype")]
    NotFinite,
}

impl Draw<'_> {
    fn run(&mut self) -> Result<DrawnToken, DrawError> {
        // A NaN is never the largest logit: without this check, the lowest token would be sampled for ever.
        if !are_finite(self.logits) {
            return Err(DrawError::NotFinite);
        }
        if let Some(token) = self.forced {
            return Ok(DrawnToken {
                token,
                logprobs: self.logprobs.map(|top| logprobs(self.logits, token, top)),
            });
        }
        let mask = self.grammar.as_mut().map(|grammar| grammar.mask()).transpose()?;
        let token = match mask.is_some() || changes_logits(self.sampling, &self.state) {
            true => {
                let mut logits = self.logits.to_vec();
                if let Some(mask) = mask {
                    mask.apply(&mut logits);
                }
                sample(&mut logits, self.sampling, &self.state)
            }
            false => select_token(self.logits, self.sampling, &self.state),
        };
        Ok(DrawnToken { token, logprobs: self.logprobs.map(|top| logprobs(self.logits, token, top)) })
    }
}

fn are_finite(logits: &[f32]) -> bool {
    // Infinities and NaNs have an exponent of all ones. Branch-free, so that the compiler vectorises it.
    logits.iter().fold(0, |largest, logit| largest.max(logit.to_bits() & 0x7fff_ffff)) < 0x7f80_0000
}

/// Number of logits from which on draws are distributed over the pool's threads.
const MIN_PARALLEL_LOGITS: usize = 1 << 15;

/// Runs all `draws`, on several threads of `pool` if that pays off.
pub(crate) fn run_all(draws: Vec<Draw<'_>>, pool: &Pool) -> Vec<Result<DrawnToken, DrawError>> {
    let logits: usize = draws.iter().map(|draw| draw.logits.len()).sum();
    let mut outcomes: Vec<_> = draws.into_iter().map(|draw| (draw, None)).collect();
    if outcomes.len() > 1 && logits >= MIN_PARALLEL_LOGITS {
        // If a thread panicked, its draws are run below.
        let _panicked = pool.each(&mut outcomes, |(draw, outcome)| *outcome = Some(draw.run()));
    }
    outcomes.into_iter().map(|(mut draw, outcome)| outcome.unwrap_or_else(|| draw.run())).collect()
}

/// Applies penalties, biases and bans to `logits` in place, then samples a token.
fn sample(logits: &mut [f32], sampling: &Sampling, state: &SequenceState<'_>) -> u32 {
    apply_penalties(logits, sampling, state);
    for &(token, bias) in sampling.logit_bias.iter() {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    for &token in state.banned {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    select_token(logits, sampling, state)
}

fn select_token(logits: &[f32], sampling: &Sampling, state: &SequenceState<'_>) -> u32 {
    if sampling.temperature == 0.0 {
        return argmax(logits);
    }
    draw(logits, sampling, uniform(sampling.seed, state.choice, state.position))
}

fn apply_penalties(logits: &mut [f32], sampling: &Sampling, state: &SequenceState<'_>) {
    if sampling.repetition_penalty != 1.0 {
        let penalty = sampling.repetition_penalty;
        let mut penalise = |token: u32| {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        };
        state.prompt.iter().for_each(|&token| penalise(token));
        let new = state.output.keys().filter(|token| state.prompt.binary_search(token).is_err());
        new.for_each(|&token| penalise(token));
    }
    if sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0 {
        for (&token, &count) in state.output {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= sampling.presence_penalty + sampling.frequency_penalty * count as f32;
            }
        }
    }
}

/// Computes the log-probabilities of `token` and of the `top` most likely tokens under unmodified `logits`.
pub(crate) fn logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let maxima = maxima(logits);
    let max = largest(&maxima);
    let weights = Weights::new(max, 1.0, 0.0);
    let sum: f64 = weights.sums(logits, &maxima).iter().sum();
    let normaliser = f64::from(max) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
    // `top` is small: one pass over the vocabulary keeps the best in order.
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(top.min(logits.len()) + 1);
    for candidate in (0..).zip(logits.iter().copied()) {
        let is_full = best.len() == top;
        if is_full && best.last().is_none_or(|last| likelier(last, &candidate).is_lt()) {
            continue;
        }
        let index = best.partition_point(|better| likelier(better, &candidate).is_lt());
        best.insert(index, candidate);
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
        let state = SequenceState {
            choice: 0,
            position,
            prompt: &[0],
            output: &HashMap::from([(2, 2)]),
            banned: &[],
        };
        Draw { logits, sampling, state, grammar: None, forced: None, logprobs: None }.run().unwrap().token
    }

    #[test]
    fn greedy_decoding_takes_the_lower_id_of_equals() {
        assert_eq!(draw_at(&[0.0, 3.0, 3.0, 1.0], &Sampling::default(), 0), 1);
    }

    #[test]
    fn sampling_fails_if_logits_are_not_finite() {
        for non_finite in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for position in 0..4 {
                let mut logits = [0.0, 3.0, f32::MAX, f32::MIN];
                logits[position] = non_finite;
                let output = HashMap::new();
                let state =
                    SequenceState { choice: 0, position: 0, prompt: &[], output: &output, banned: &[] };
                let sampling = &Sampling::default();
                let mut draw =
                    Draw { logits: &logits, sampling, state, grammar: None, forced: None, logprobs: None };
                assert_eq!(draw.run().err(), Some(DrawError::NotFinite));
            }
        }
    }

    #[test]
    fn sampled_frequencies_follow_the_distribution() {
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
    fn filters_keep_the_configured_tokens() {
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
    fn penalties_apply_to_tokens_of_prompt_and_output() {
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

    /// Computes the alternatives of [`logprobs`] by sorting all tokens.
    fn top_by_sorting(logits: &[f32], top: usize) -> Vec<u32> {
        let mut tokens: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        tokens.sort_by(likelier);
        tokens.into_iter().take(top).map(|(token, _)| token).collect()
    }

    proptest! {
        #[test]
        fn threads_of_the_pool_change_no_token(
            logits in prop::collection::vec(-9.0_f32..9.0, 9000),
            seeds in prop::collection::vec(0_u64..1000, 0..9),
        ) {
            let counts = HashMap::new();
            let pool = Pool::new(PoolConfig { threads: 2, ..PoolConfig::default() }).unwrap();
            let sampling = |&seed: &u64| Sampling { temperature: 0.8, seed, ..Sampling::default() };
            let sampling: Vec<Sampling> = seeds.iter().map(sampling).collect();
            let draw = |sampling| {
                            let state =
                                SequenceState { choice: 0, position: 3, prompt: &[], output: &counts, banned: &[] };
                            Draw { logits: &logits, sampling, state, grammar: None, forced: None, logprobs: Some(2) }
                        };
                        let together = run_all(sampling.iter().map(draw).collect(), &pool);
                        prop_assert_eq!(together.len(), seeds.len());
                        for (drawn, sampling) in together.iter().zip(&sampling) {
                            let (drawn, alone) = (drawn.as_ref().unwrap(), draw(sampling).run().unwrap());
                            prop_assert_eq!((drawn.token, &drawn.logprobs), (alone.token, &alone.logprobs));
            }
        }

        #[test]
        fn alternatives_are_the_likeliest_in_order(logits in logits(), top in 0_usize..30) {
            let found: Vec<u32> = logprobs(&logits, 0, top).top.into_iter().map(|(token, _)| token).collect();
            prop_assert_eq!(found, top_by_sorting(&logits, top));
        }

        #[test]
        fn repetition_penalty_applies_once_per_token(
            prompt in prop::collection::vec(0_u32..12, 1..30),
            output in prop::collection::hash_map(0_u32..12, 1_u32..4, 0..6),
        ) {
            let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
            let mut logits: Vec<f32> = (0..10).map(|token| token as f32 - 5.0).collect();
            let prompt = distinct(&prompt);
            let state = SequenceState { choice: 0, position: 0, prompt: &prompt, output: &output, banned: &[] };
            apply_penalties(&mut logits, &sampling, &state);
            for token in 0..10_u32 {
                let plain = token as f32 - 5.0;
                let is_seen = prompt.contains(&token) || output.contains_key(&token);
                let penalised = if plain > 0.0 { plain / 2.0 } else { plain * 2.0 };
                prop_assert_eq!(logits[token as usize], if is_seen { penalised } else { plain });
            }
        }
    }
}
