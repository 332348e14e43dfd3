//! Problems in which one input was misestimated when the plan was made, for sensitivity analyses.

use crate::problem::stressed::stressed_scales;
use crate::problem::{CpuProfile, ErrorFactor, Problem, Start};
use serde::Serialize;

/// Relative error of each measured time.
const TIME_ERROR: f64 = 0.3;
/// Factor between the true and the planned arrival rate.
const RATE_FACTOR: f64 = 2.0;

/// An input of a problem that may be misestimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MisestimatedInput {
    /// Seconds of experts in the main function, and in remote functions without their own measurements: by 30 %.
    Experts,
    /// Seconds of experts in remote functions: by 30 %.
    RemoteExperts,
    /// Seconds of everything but routed experts: by 30 %.
    Rest,
    /// Seconds of calls and network bandwidth: by 30 %.
    Transport,
    /// Seconds of a cold start: by 30 %. Only if functions scale to zero.
    Starts,
    /// Use of remote experts: by the error that the prediction exceeds in 5 % of the cases. If that is unknown, routing is
    /// half way to uniform, or as far away from it.
    Prediction,
    /// Arrival rate: by a factor of 2.
    ArrivalRate,
}

/// Side of the planned value on which the true value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorDirection {
    /// More seconds, remote work or requests than planned: limits may break.
    Worse,
    /// Less than planned: the plan may cost more than necessary.
    Better,
}

impl ErrorDirection {
    /// Both directions.
    pub const ALL: [Self; 2] = [Self::Worse, Self::Better];

    /// Returns the factor between true and planned seconds.
    fn time_factor(self) -> f64 {
        match self {
            Self::Worse => 1.0 + TIME_ERROR,
            Self::Better => 1.0 - TIME_ERROR,
        }
    }

    /// Returns the factor between the true and the planned arrival rate.
    fn rate_factor(self) -> f64 {
        match self {
            Self::Worse => RATE_FACTOR,
            Self::Better => 1.0 / RATE_FACTOR,
        }
    }
}

impl MisestimatedInput {
    /// All inputs.
    pub const ALL: [Self; 7] = [
        Self::Experts,
        Self::RemoteExperts,
        Self::Rest,
        Self::Transport,
        Self::Starts,
        Self::Prediction,
        Self::ArrivalRate,
    ];

    /// Returns a description of the error in the direction [`ErrorDirection::Worse`].
    #[must_use]
    pub fn name(self) -> &'static str {
        self.described(ErrorDirection::Worse)
    }

    /// Returns a description of the error in `direction`.
    #[must_use]
    pub fn described(self, direction: ErrorDirection) -> &'static str {
        match (self, direction) {
            (Self::Experts, ErrorDirection::Worse) => "experts 30 % slower",
            (Self::Experts, ErrorDirection::Better) => "experts 30 % quicker",
            (Self::RemoteExperts, ErrorDirection::Worse) => "remote experts 30 % slower",
            (Self::RemoteExperts, ErrorDirection::Better) => "remote experts 30 % quicker",
            (Self::Rest, ErrorDirection::Worse) => "everything but experts 30 % slower",
            (Self::Rest, ErrorDirection::Better) => "everything but experts 30 % quicker",
            (Self::Transport, ErrorDirection::Worse) => "calls 30 % slower",
            (Self::Transport, ErrorDirection::Better) => "calls 30 % quicker",
            (Self::Starts, ErrorDirection::Worse) => "starts 30 % slower",
            (Self::Starts, ErrorDirection::Better) => "starts 30 % quicker",
            (Self::Prediction, ErrorDirection::Worse) => "remote experts used more than predicted",
            (Self::Prediction, ErrorDirection::Better) => "remote experts used less than predicted",
            (Self::ArrivalRate, ErrorDirection::Worse) => "twice as many requests",
            (Self::ArrivalRate, ErrorDirection::Better) => "half as many requests",
        }
    }

    /// Returns the true problem if this input of the planned `problem` is misestimated, or `None` without this input.
    #[must_use]
    pub fn apply(self, problem: &Problem, direction: ErrorDirection) -> Option<Problem> {
        let mut actual = problem.clone();
        let factor = direction.time_factor();
        match self {
            Self::Experts => {
                actual.layers.iter_mut().for_each(|layer| scale(&mut layer.expert_seconds, factor))
            }
            Self::RemoteExperts => {
                for layer in &mut actual.layers {
                    let own = layer.remote_expert_seconds.get_or_insert_with(|| layer.expert_seconds.clone());
                    scale(own, factor);
                }
            }
            Self::Rest => {
                for layer in &mut actual.layers {
                    layer.nonexpert_decode_seconds *= factor;
                    layer.nonexpert_prefill_seconds = layer.nonexpert_prefill_seconds.scaled(factor);
                    layer.context_seconds_per_token *= factor;
                    let on_cpus =
                        layer.cpu_nonexpert_seconds.iter_mut().chain(&mut layer.cpu_context_seconds);
                    on_cpus.for_each(|profile| scale(profile, factor));
                }
                actual.swap_seconds = actual.swap_seconds.scaled(factor);
            }
            Self::Transport => {
                actual.transport.invoke_seconds *= factor;
                actual.transport.send_seconds *= factor;
                actual.transport.main_cpu_seconds *= factor;
                actual.transport.function_cpu_seconds *= factor;
                actual.transport.bytes_per_second /= factor;
            }
            Self::Starts => {
                actual.arrivals.as_ref()?.idle_seconds.or(actual.remote_idle_seconds)?;
                let starts = actual.starts.as_mut()?;
                for Start { process_seconds, load_bytes_per_second } in [&mut starts.main, &mut starts.remote]
                {
                    *process_seconds *= factor;
                    *load_bytes_per_second /= factor;
                }
            }
            Self::Prediction => {
                let factors = actual.prediction_p95.clone();
                for (layer, shares) in actual.prediction.as_mut()?.iter_mut().enumerate() {
                    match factors.as_ref().and_then(|factors| factors.get(layer)) {
                        Some(factor) => apply_prediction_error(shares, factor, direction),
                        None => shift_routing(shares, direction),
                    }
                }
            }
            Self::ArrivalRate => {
                let (arrivals, rate) = (actual.arrivals.as_mut()?, direction.rate_factor());
                arrivals.per_second *= rate;
                arrivals.recorded_seconds.iter_mut().flatten().for_each(|time| *time /= rate);
            }
        }
        Some(actual)
    }
}

fn scale(profile: &mut CpuProfile, factor: f64) {
    profile.seconds.iter_mut().flatten().for_each(|seconds| *seconds *= factor);
}

/// Moves `shares` half way to uniform routing, where rare experts are used more, or as far away from it.
fn shift_routing(shares: &mut [f64], direction: ErrorDirection) {
    let even = 1.0 / shares.len() as f64;
    for share in shares.iter_mut() {
        *share = match direction {
            ErrorDirection::Worse => f64::midpoint(*share, even),
            ErrorDirection::Better => (*share + 0.5 * (*share - even)).max(0.0),
        };
    }
    let sum: f64 = shares.iter().sum();
    shares.iter_mut().for_each(|share| *share /= sum);
}

/// Scales the shares of the least used half of the experts by the prediction error of sets of that size.
///
/// The shares of the other half change so that the sum stays 1.
fn apply_prediction_error(shares: &mut [f64], factor: &ErrorFactor, direction: ErrorDirection) {
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|a, b| shares[*a].total_cmp(&shares[*b]).then(a.cmp(b)));
    let (rare, often) = order.split_at(shares.len() / 2);
    let stated = factor.of(rare.len());
    let scale = if direction == ErrorDirection::Worse { stated } else { 1.0 / stated };
    let (up, down) = stressed_scales(rare.iter().map(|expert| shares[*expert]).sum(), scale);
    rare.iter().for_each(|expert| shares[*expert] *= up);
    often.iter().for_each(|expert| shares[*expert] *= down);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prediction_error_scales_the_least_used_half() {
        let mut shares = [0.1, 0.4, 0.2, 0.3];
        apply_prediction_error(&mut shares, &ErrorFactor::Any(1.5), ErrorDirection::Worse);
        assert!(
            (shares[0] + shares[2] - 0.45).abs() < 1e-12 && (shares.iter().sum::<f64>() - 1.0).abs() < 1e-12
        );
        let mut shares = [0.1, 0.4, 0.2, 0.3];
        apply_prediction_error(&mut shares, &ErrorFactor::Any(1.5), ErrorDirection::Better);
        assert!(
            (shares[0] + shares[2] - 0.2).abs() < 1e-12 && (shares.iter().sum::<f64>() - 1.0).abs() < 1e-12
        );
    }
}
