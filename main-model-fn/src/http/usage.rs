//! What a request took.

use crate::engine::request::Figures;
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
    forwarded_positions: u64,
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
    pub(super) fn new(figures: &Figures, include_figures: bool) -> Self {
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
                forwarded_positions: figures.forwarded_positions,
            }),
        }
    }
}
