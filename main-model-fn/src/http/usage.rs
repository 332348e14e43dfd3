//! Usage of a request: tokens, time and cost.

use super::placement::measured;
use super::running::RunningGeneration;
use super::timing::Timing;
use crate::engine::request::ExpertTime;
use remoe_plan::{Comparison, PlanAccount};
use serde::Serialize;

/// Field `usage` of an answer.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
    /// Only in chats.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionTokensDetails>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remoe: Option<RemoeFigures>,
}

/// Named as in OpenAI's API.
#[derive(Debug, Clone, Serialize)]
struct PromptTokensDetails {
    /// Tokens found in the prefix cache.
    cached_tokens: usize,
}

/// Named as in OpenAI's API.
#[derive(Debug, Clone, Serialize)]
struct CompletionTokensDetails {
    /// Tokens in thoughts.
    reasoning_tokens: usize,
}

/// Remoe's extension, in requests with `include_figures`.
#[derive(Debug, Clone, Serialize)]
struct RemoeFigures {
    experts: ExpertCounts,
    ttft_s: f64,
    prefill_s: f64,
    decode_s: f64,
    queued_s: f64,
    expert_seconds: ExpertSeconds,
    forwarded_positions: u64,
    /// Comparison with the plan's expectation; absent if the placement was not planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<Comparison>,
    /// Parts of the time to first token; absent without a gateway's parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<Timing>,
    /// Placeholder of the cost, which the gateway replaces once it has recorded the request. Last field, because the gateway
    /// searches for the comma before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<String>,
}

/// Expert time of the request's iterations.
#[derive(Debug, Clone, Serialize)]
struct ExpertSeconds {
    prefill: Seconds,
    decode: Seconds,
}

/// Seconds in local kernels, waiting for remote functions, and reported by remote functions.
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

/// (token, expert) pairs by where they were computed, and retried messages.
#[derive(Debug, Clone, Serialize)]
struct ExpertCounts {
    local: u64,
    remote: u64,
    fallback: u64,
    retries: u64,
}

impl Usage {
    /// Creates the usage, with Remoe's figures if the request asks for them. `account` is the plan to compare with.
    pub(super) fn new(
        running: &RunningGeneration,
        reasoning_tokens: Option<usize>,
        include_figures: bool,
        account: Option<&PlanAccount>,
    ) -> Self {
        let figures = running.figures();
        Self {
            prompt_tokens: figures.prompt_tokens,
            completion_tokens: figures.completion_tokens,
            total_tokens: figures.prompt_tokens + figures.completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: figures.cached_tokens },
            completion_tokens_details: reasoning_tokens
                .map(|reasoning_tokens| CompletionTokensDetails { reasoning_tokens }),
            remoe: include_figures.then_some(RemoeFigures {
                experts: ExpertCounts {
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
                plan: account.map(|account| account.compare(&measured(figures))),
                timing: running.timeline().timing(),
                cost: running.timeline().cost_placeholder().filter(|_| running.has_cost()).map(str::to_owned),
            }),
        }
    }
}
