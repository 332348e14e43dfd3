//! Accounting of one request: its tokens, which count against its tenant's limits, and its cost, which the main
//! function reports at the end.

use crate::access_log::RequestFacts;
use crate::bill::Bill;
use crate::headers::COST;
use crate::metrics::StreamFailure;
use crate::model::AwaitedWake;
use crate::tenant::TenantPermit;
use crate::usage_bound::UsageBound;
use crate::usage_observer::ObservedRequest;
use axum::http::{HeaderMap, HeaderName};
use remoe_billing::RequestCost;
use remoe_http::internal_headers::{ACTIVATIONS, REPORTED_COST, TOKENS};
use remoe_otel::SpanRef;
use std::sync::Arc;

/// Header with the parts of the time to first token.
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Body bytes per prompt token, for an estimate if no main function has reported tokens.
const BYTES_PER_TOKEN: u64 = 4;
/// Largest header with a reported cost or expert usage, in bytes. Main functions send 14 KiB at most; parsed, it
/// takes several times the memory.
const MAX_REPORT_BYTES: usize = 16 << 10;

/// Account of a request: its share of the tenant's limits, and its bill. Dropping it settles what is left.
pub(crate) struct RequestAccount {
    pub(crate) bill: Arc<Bill>,
    permit: Option<TenantPermit>,
    body_bytes: u64,
    /// Largest number of tokens that a main function may report.
    usage_bound: UsageBound,
    /// Events of the stream so far.
    pub(crate) events: u64,
    /// Prompt tokens and completion tokens, once they are reported.
    tokens: Option<(u64, u64)>,
    /// Wake that the request waited for, until the main function reports the time to first token.
    pub(crate) wake: Option<AwaitedWake>,
    observed_request: Option<ObservedRequest>,
    /// Span of the request.
    span: SpanRef,
    /// For the access log.
    facts: Arc<RequestFacts>,
}

impl RequestAccount {
    pub(crate) fn new(
        bill: Arc<Bill>,
        permit: Option<TenantPermit>,
        (body_bytes, usage_bound): (usize, UsageBound),
        observed_request: Option<ObservedRequest>,
        (span, facts): (SpanRef, Arc<RequestFacts>),
    ) -> Self {
        Self {
            bill,
            permit,
            body_bytes: body_bytes as u64,
            usage_bound,
            events: 0,
            tokens: None,
            wake: None,
            observed_request,
            span,
            facts,
        }
    }

    /// Counts a stream that ends with an error.
    pub(crate) fn fail_stream(&self, failure: StreamFailure) {
        self.span.fail(failure.reason(), "stream failed after status 200");
        self.bill.gateway.metrics().count_failed_stream(&self.bill.model, failure);
    }

    /// Takes the main function's usage report out of headers or trailers, and records it. Returns the cost that was
    /// written to the ledger.
    pub(crate) fn take_report(&mut self, headers: &mut HeaderMap) -> Option<RequestCost> {
        let first_token = first_token_seconds(headers);
        if let Some(seconds) = first_token {
            // Set once: the first answer with this time is the one that the client gets.
            let _already_set = self.facts.first_token.set(seconds);
        }
        if let (Some(wake), Some(seconds)) = (&self.wake, first_token) {
            let seconds = seconds.min(wake.elapsed_seconds());
            wake.complete(seconds);
            self.bill.gateway.metrics().first_token_after_cold_start(&self.bill.model, seconds);
            self.wake = None;
        }
        let [reported_cost, activations] = [REPORTED_COST, ACTIVATIONS]
            .map(|name| headers.remove(name).filter(|value| value.len() <= MAX_REPORT_BYTES));
        if let (Some(observed_request), Some(activations)) = (&self.observed_request, activations)
            && let Ok(activations) = activations.to_str()
        {
            observed_request.report_usage(activations);
        }
        let value = headers.remove(TOKENS)?;
        let numbers = value.to_str().unwrap_or_default().split(',');
        let mut numbers = numbers.filter_map(|number| number.trim().parse::<u64>().ok());
        let reported = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let (prompt, completion) = self.usage_bound.clamp(reported.0, reported.1);
        if (prompt, completion) != reported {
            self.bill.report_implausible("tokens", &reported, &(prompt, completion));
        }
        self.tokens = Some((prompt, completion));
        let _already_set = self.facts.tokens.set((prompt, completion));
        self.span.set("gen_ai.usage.input_tokens", i64::try_from(prompt).unwrap_or(i64::MAX));
        self.span.set("gen_ai.usage.output_tokens", i64::try_from(completion).unwrap_or(i64::MAX));
        let reported_cost = reported_cost.and_then(|value| serde_json::from_slice(value.as_bytes()).ok());
        let cost = reported_cost.and_then(|reported| self.bill.settle(reported, prompt, completion));
        if cost.is_none() {
            // The request has used function time, but its main function reports no cost: estimate it.
            self.bill.record_lost(prompt.saturating_add(completion));
        }
        let cost = cost?;
        if self.bill.is_shown {
            headers.insert(COST, cost.total.into());
        }
        Some(cost)
    }
}

impl Drop for RequestAccount {
    fn drop(&mut self) {
        // A stream has about one event per token. If the client leaves early, its prompt has been computed
        // nevertheless.
        let estimate = || match self.bill.is_backend_working() {
            false => 0,
            true => {
                let (prompt, completion) =
                    self.usage_bound.clamp(self.body_bytes / BYTES_PER_TOKEN, self.events);
                prompt.saturating_add(completion)
            }
        };
        let tokens =
            self.tokens.map_or_else(estimate, |(prompt, completion)| prompt.saturating_add(completion));
        if tokens > 0 {
            self.bill.gateway.metrics().add_tokens(&self.bill.model, &self.bill.tenant, tokens);
        }
        if self.tokens.is_none() {
            self.bill.record_lost(tokens);
        }
        if let Some(permit) = &self.permit {
            permit.charge(tokens);
        }
    }
}

/// Returns the seconds to the first token, which a main function reports in `Server-Timing`.
fn first_token_seconds(headers: &HeaderMap) -> Option<f64> {
    let mut parts = headers.get(SERVER_TIMING)?.to_str().ok()?.split(',');
    let duration = parts.find_map(|part| part.trim().strip_prefix("first;dur="))?;
    let milliseconds = duration.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0)?;
    Some(milliseconds / 1e3)
}
