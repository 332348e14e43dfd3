//! What a request took.

use crate::engine::request::{ExpertTime, Figures};
use remoe_planner::{Account, Measured};
use serde::Serialize;

/// `usage` of an answer.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    remoe: Option<RemoeFigures>,
}

/// Remoe's extension, for requests with `include_figures`.
#[derive(Debug, Clone, Serialize)]
struct RemoeFigures {
    experts: Experts,
    ttft_s: f64,
    prefill_s: f64,
    decode_s: f64,
    queued_s: f64,
    expert_seconds: ExpertSeconds,
    forwarded_positions: u64,
    /// Absent where nobody planned the placement.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<Comparison>,
}

/// What the plan expected of a request of this length, and what it took. Dollars.
#[derive(Debug, Clone, Serialize)]
struct Comparison {
    expected: Outcome,
    measured: Outcome,
}

#[derive(Debug, Clone, Serialize)]
struct Outcome {
    ttft_s: f64,
    tpot_s: f64,
    cost: f64,
}

impl Comparison {
    fn new(account: &Account, figures: &Figures) -> Self {
        let steps = figures.completion_tokens.saturating_sub(1);
        let expected = account.expect(figures.prompt_tokens, steps);
        let (prefill, decode) = (figures.prefill.as_secs_f64(), figures.decode.as_secs_f64());
        let mut experts = figures.prefill_experts;
        experts += figures.decode_experts;
        let measured = Measured {
            prefill_seconds: prefill,
            decode_seconds: decode,
            remote_seconds: experts.remote.as_secs_f64(),
            remote_calls: experts.calls as f64,
        };
        Self {
            expected: Outcome {
                ttft_s: expected.ttft_seconds,
                tpot_s: expected.tpot_seconds,
                cost: expected.cost,
            },
            measured: Outcome {
                ttft_s: figures.ttft.as_secs_f64(),
                tpot_s: if steps > 0 { decode / steps as f64 } else { 0.0 },
                cost: account.bill(figures.prompt_tokens, steps, &measured),
            },
        }
    }
}

/// What the experts of the request's iterations took.
#[derive(Debug, Clone, Serialize)]
struct ExpertSeconds {
    prefill: Seconds,
    decode: Seconds,
}

/// In local kernels, then waiting for remote functions, and what those say that they computed.
#[derive(Debug, Clone, Serialize)]
struct Seconds {
    local: f64,
    waited: f64,
    remote: f64,
}

impl From<ExpertTime> for Seconds {
    fn from(time: ExpertTime) -> Self {
        Self {
            local: time.local.as_secs_f64(),
            waited: time.waited.as_secs_f64(),
            remote: time.remote.as_secs_f64(),
        }
    }
}

/// (token, expert) pairs by where they were computed, and messages sent again.
#[derive(Debug, Clone, Serialize)]
struct Experts {
    local: u64,
    remote: u64,
    fallback: u64,
    retries: u64,
}

impl Usage {
    /// With Remoe's own figures where the request asks for them, compared with the plan of `account`.
    pub(super) fn new(figures: &Figures, include_figures: bool, account: Option<&Account>) -> Self {
        Self {
            prompt_tokens: figures.prompt_tokens,
            completion_tokens: figures.completion_tokens,
            total_tokens: figures.prompt_tokens + figures.completion_tokens,
            remoe: include_figures.then_some(RemoeFigures {
                experts: Experts {
                    local: figures.experts.local,
                    remote: figures.experts.remote,
                    fallback: figures.experts.fallback,
                    retries: figures.experts.retries,
                },
                ttft_s: figures.ttft.as_secs_f64(),
                prefill_s: figures.prefill.as_secs_f64(),
                decode_s: figures.decode.as_secs_f64(),
                queued_s: figures.queued.as_secs_f64(),
                expert_seconds: ExpertSeconds {
                    prefill: figures.prefill_experts.into(),
                    decode: figures.decode_experts.into(),
                },
                forwarded_positions: figures.forwarded_positions,
                plan: account.map(|account| Comparison::new(account, figures)),
            }),
        }
    }
}
