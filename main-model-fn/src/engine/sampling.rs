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
    /// The prompt.
    pub(crate) prompt: &'a [u32],
    /// Tokens drawn so far with their counts.
    pub(crate) output: &'a HashMap<u32, u32>,
    /// Tokens that must not be drawn now (ends before `min_tokens`).
    pub(crate) banned: &'a [u32],
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
        let mut seen: Vec<u32> = drawn.prompt.iter().chain(drawn.output.keys()).copied().collect();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
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

fn draw(logits: &[f32], sampling: &Sampling, number: f64) -> u32 {
    let temperature = f64::from(sampling.temperature);
    let mut tokens: Vec<(u32, f32)> =
        (0..).zip(logits.iter().copied()).filter(|(_, logit)| *logit > f32::NEG_INFINITY).collect();
    if sampling.top_k > 0 && sampling.top_k < tokens.len() {
        tokens.select_nth_unstable_by(sampling.top_k, likelier);
        tokens.truncate(sampling.top_k);
    }
    // One order of summation whatever the filters: most likely first.
    tokens.sort_unstable_by(likelier);
    let Some(&(first, best)) = tokens.first() else {
        return argmax(logits);
    };
    let weights: Vec<f64> =
        tokens.iter().map(|&(_, logit)| ((f64::from(logit) - f64::from(best)) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut kept = 0;
    let mut mass = 0.0;
    for &weight in &weights {
        // The most likely token always stays; its weight is exactly 1.
        let small = weight < f64::from(sampling.min_p);
        let enough = mass >= f64::from(sampling.top_p) * total;
        if kept > 0 && (small || enough) {
            break;
        }
        mass += weight;
        kept += 1;
    }
    let mut left = number * mass;
    for (&(token, _), weight) in tokens.iter().zip(&weights[..kept]) {
        left -= weight;
        if left < 0.0 {
            return token;
        }
    }
    // Rounding can leave a remainder after the last kept token.
    tokens[..kept].last().map_or(first, |&(token, _)| token)
}

/// Log-probabilities of `token` and of the `top` most likely tokens under unmodified `logits`.
pub(crate) fn logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    let normaliser = f64::from(max) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
    let mut tokens: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    if top < tokens.len() {
        tokens.select_nth_unstable_by(top, likelier);
        tokens.truncate(top);
    }
    tokens.sort_unstable_by(likelier);
    TokenLogprobs {
        token,
        logprob: logprob(logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY)),
        top: tokens.into_iter().map(|(token, logit)| (token, logprob(logit))).collect(),
    }
}

fn likelier(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
