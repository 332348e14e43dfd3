//! Problems with one figure that is not what was planned with.

use crate::problem::stressed::stressed_scales;
use crate::problem::{CpuProfile, ErrorFactor, Problem, Start};
use serde::Serialize;

/// By which share each term of a profile may be wrong.
const WRONG: f64 = 0.3;
/// By how much the arrival rate may be.
const RATE: f64 = 2.0;

/// A figure that may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WrongFigure {
    /// Seconds of experts in the main function, and in remote ones without figures of their own: by 30 %.
    Experts,
    /// Seconds of experts in remote functions: by 30 %.
    RemoteExperts,
    /// Seconds of everything but routed experts: by 30 %.
    Rest,
    /// Calls take other times by 30 %, and the way has as much less or more bandwidth.
    Transport,
    /// Functions take 30 % longer or shorter to start; a figure only where functions end without requests.
    Starts,
    /// Remote experts are used more or less than predicted: as far as the prediction errs in 5 % of the cases where
    /// that is known, else routing is half way to uniform, or as far away from it.
    Prediction,
    /// Twice or half as many requests come.
    ArrivalRate,
}

/// On which side of the planned figure the true one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Truth {
    /// More seconds, more remote work, more requests: limits may break.
    Worse,
    /// Less of them: the plan may be dearer than it had to be.
    Better,
}

impl Truth {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Worse, Self::Better];

    /// Factor of a term of seconds.
    fn of_seconds(self) -> f64 {
        match self {
            Self::Worse => 1.0 + WRONG,
            Self::Better => 1.0 - WRONG,
        }
    }

    fn of_rate(self) -> f64 {
        match self {
            Self::Worse => RATE,
            Self::Better => 1.0 / RATE,
        }
    }
}

impl WrongFigure {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Experts,
        Self::RemoteExperts,
        Self::Rest,
        Self::Transport,
        Self::Starts,
        Self::Prediction,
        Self::ArrivalRate,
    ];

    /// In words, when the truth is worse.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.named(Truth::Worse)
    }

    /// In words.
    #[must_use]
    pub fn named(self, truth: Truth) -> &'static str {
        match (self, truth) {
            (Self::Experts, Truth::Worse) => "experts 30 % slower",
            (Self::Experts, Truth::Better) => "experts 30 % quicker",
            (Self::RemoteExperts, Truth::Worse) => "remote experts 30 % slower",
            (Self::RemoteExperts, Truth::Better) => "remote experts 30 % quicker",
            (Self::Rest, Truth::Worse) => "everything but experts 30 % slower",
            (Self::Rest, Truth::Better) => "everything but experts 30 % quicker",
            (Self::Transport, Truth::Worse) => "calls 30 % slower",
            (Self::Transport, Truth::Better) => "calls 30 % quicker",
            (Self::Starts, Truth::Worse) => "starts 30 % slower",
            (Self::Starts, Truth::Better) => "starts 30 % quicker",
            (Self::Prediction, Truth::Worse) => "remote experts used more than predicted",
            (Self::Prediction, Truth::Better) => "remote experts used less than predicted",
            (Self::ArrivalRate, Truth::Worse) => "twice as many requests",
            (Self::ArrivalRate, Truth::Better) => "half as many requests",
        }
    }

    /// `problem` as it truly is when this figure of it is wrong; none where it has no such figure.
    #[must_use]
    pub fn of(self, problem: &Problem, truth: Truth) -> Option<Problem> {
        let mut is = problem.clone();
        let factor = truth.of_seconds();
        match self {
            Self::Experts => is.layers.iter_mut().for_each(|layer| scale(&mut layer.expert_seconds, factor)),
            Self::RemoteExperts => {
                for layer in &mut is.layers {
                    let own = layer.remote_expert_seconds.get_or_insert_with(|| layer.expert_seconds.clone());
                    scale(own, factor);
                }
            }
            Self::Rest => {
                for layer in &mut is.layers {
                    layer.nonexpert_decode_seconds *= factor;
                    layer.nonexpert_prefill_seconds = layer.nonexpert_prefill_seconds.scaled(factor);
                    layer.context_seconds_per_token *= factor;
                    let on_cpus =
                        layer.cpu_nonexpert_seconds.iter_mut().chain(&mut layer.cpu_context_seconds);
                    on_cpus.for_each(|profile| scale(profile, factor));
                }
                is.swap_seconds = is.swap_seconds.scaled(factor);
            }
            Self::Transport => {
                is.transport.invoke_seconds *= factor;
                is.transport.send_seconds *= factor;
                is.transport.main_cpu_seconds *= factor;
                is.transport.function_cpu_seconds *= factor;
                is.transport.bytes_per_second /= factor;
            }
            Self::Starts => {
                is.arrivals.as_ref()?.idle_seconds.or(is.remote_idle_seconds)?;
                let starts = is.starts.as_mut()?;
                for Start { process_seconds, load_bytes_per_second } in [&mut starts.main, &mut starts.remote]
                {
                    *process_seconds *= factor;
                    *load_bytes_per_second /= factor;
                }
            }
            Self::Prediction => {
                let factors = is.prediction_p95.clone();
                for (layer, shares) in is.prediction.as_mut()?.iter_mut().enumerate() {
                    match factors.as_ref().and_then(|factors| factors.get(layer)) {
                        Some(factor) => erring(shares, factor, truth),
                        None => bent(shares, truth),
                    }
                }
            }
            Self::ArrivalRate => {
                let (arrivals, rate) = (is.arrivals.as_mut()?, truth.of_rate());
                arrivals.per_second *= rate;
                arrivals.recorded_seconds.iter_mut().flatten().for_each(|time| *time /= rate);
            }
        }
        Some(is)
    }
}

fn scale(profile: &mut CpuProfile, factor: f64) {
    profile.seconds.iter_mut().flatten().for_each(|seconds| *seconds *= factor);
}

/// Routing half way to uniform, where rare experts are used more, or as far away from it.
fn bent(shares: &mut [f64], truth: Truth) {
    let even = 1.0 / shares.len() as f64;
    for share in shares.iter_mut() {
        *share = match truth {
            Truth::Worse => f64::midpoint(*share, even),
            Truth::Better => (*share + 0.5 * (*share - even)).max(0.0),
        };
    }
    let sum: f64 = shares.iter().sum();
    shares.iter_mut().for_each(|share| *share /= sum);
}

/// The half of the experts that is predicted to be used least is used as much more, or less, as the prediction errs for
/// sets of that size; the others make up for it.
fn erring(shares: &mut [f64], factor: &ErrorFactor, truth: Truth) {
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|a, b| shares[*a].total_cmp(&shares[*b]).then(a.cmp(b)));
    let (rare, often) = order.split_at(shares.len() / 2);
    let stated = factor.of(rare.len());
    let by = if truth == Truth::Worse { stated } else { 1.0 / stated };
    let (up, down) = stressed_scales(rare.iter().map(|expert| shares[*expert]).sum(), by);
    rare.iter().for_each(|expert| shares[*expert] *= up);
    often.iter().for_each(|expert| shares[*expert] *= down);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rare_half_is_used_as_the_prediction_errs() {
        let mut shares = [0.1, 0.4, 0.2, 0.3];
        erring(&mut shares, &ErrorFactor::Any(1.5), Truth::Worse);
        assert!(
            (shares[0] + shares[2] - 0.45).abs() < 1e-12 && (shares.iter().sum::<f64>() - 1.0).abs() < 1e-12
        );
        let mut shares = [0.1, 0.4, 0.2, 0.3];
        erring(&mut shares, &ErrorFactor::Any(1.5), Truth::Better);
        assert!(
            (shares[0] + shares[2] - 0.2).abs() < 1e-12 && (shares.iter().sum::<f64>() - 1.0).abs() < 1e-12
        );
    }
}
