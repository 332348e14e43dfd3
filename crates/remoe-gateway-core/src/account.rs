//! Usage of one request: tokens for its tenant's limits, and its cost as the main function tells it at the end.

use crate::access_log::RequestFacts;
use crate::bill::Bill;
use crate::headers::COST;
use crate::metrics::StreamFailure;
use crate::model::Wake;
use crate::tenant::Permit;
use crate::usage_bound::UsageBound;
use crate::usage_observer::ObservedRequest;
use axum::http::{HeaderMap, HeaderName};
use remoe_billing::RequestCost;
use remoe_http::internal_headers::{ACTIVATIONS, TOKENS, TOLD};
use remoe_otel::SpanRef;
use std::sync::Arc;

/// Where the time to the first token went.
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Bytes of a prompt for a token, where no main function has counted.
const BYTES_PER_TOKEN: u64 = 4;
/// Bytes of what a main function tells in JSON or of expert usage: it sends 14 KiB at most. In memory they are a
/// multiple.
const MOST_TOLD: usize = 16 << 10;

/// Account of a request: its part of the tenant's limits, and its bill. It is settled when it is dropped at the latest.
pub(crate) struct RequestAccount {
    pub(crate) bill: Arc<Bill>,
    permit: Option<Permit>,
    body_bytes: u64,
    /// Tokens that are believed.
    bound: UsageBound,
    pub(crate) events: u64,
    tokens: Option<(u64, u64)>,
    /// A wake that the request waited for, until the main function tells when its first token came.
    pub(crate) wake: Option<Wake>,
    observed_request: Option<ObservedRequest>,
    /// Span of the request.
    span: SpanRef,
    /// For the access log.
    facts: Arc<RequestFacts>,
}

impl RequestAccount {
    pub(crate) fn new(
        bill: Arc<Bill>,
        permit: Option<Permit>,
        (body_bytes, bound): (usize, UsageBound),
        observed_request: Option<ObservedRequest>,
        (span, facts): (SpanRef, Arc<RequestFacts>),
    ) -> Self {
        Self {
            bill,
            permit,
            body_bytes: body_bytes as u64,
            bound,
            events: 0,
            tokens: None,
            wake: None,
            observed_request,
            span,
            facts,
        }
    }

    /// A stream ends with an error.
    pub(crate) fn failed(&self, failure: StreamFailure) {
        self.span.fail(failure.reason(), "stream failed after status 200");
        self.bill.gateway.metrics().stream_failed(&self.bill.model, failure);
    }

    /// Takes the backend's account out of headers or trailers, and writes it down. Returns the cost that is in the
    /// ledger.
    pub(crate) fn read(&mut self, headers: &mut HeaderMap) -> Option<RequestCost> {
        let first = first_token(headers);
        if let Some(seconds) = first {
            // The first answer that tells it is the one that the client gets.
            let _first = self.facts.first_token.set(seconds);
        }
        if let (Some(wake), Some(seconds)) = (&self.wake, first) {
            let seconds = seconds.min(wake.so_far());
            wake.is_over(seconds);
            self.bill.gateway.metrics().first_token_after_cold_start(&self.bill.model, seconds);
            self.wake = None;
        }
        let [told, activations] =
            [TOLD, ACTIVATIONS].map(|name| headers.remove(name).filter(|value| value.len() <= MOST_TOLD));
        if let (Some(observed_request), Some(activations)) = (&self.observed_request, activations)
            && let Ok(activations) = activations.to_str()
        {
            observed_request.told(activations);
        }
        let value = headers.remove(TOKENS)?;
        let numbers = value.to_str().unwrap_or_default().split(',');
        let mut numbers = numbers.filter_map(|number| number.trim().parse::<u64>().ok());
        let said = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let (prompt, completion) = self.bound.clamp(said.0, said.1);
        if (prompt, completion) != said {
            self.bill.implausible("tokens", &said, &(prompt, completion));
        }
        self.tokens = Some((prompt, completion));
        let _first = self.facts.tokens.set((prompt, completion));
        self.span.set("gen_ai.usage.input_tokens", i64::try_from(prompt).unwrap_or(i64::MAX));
        self.span.set("gen_ai.usage.output_tokens", i64::try_from(completion).unwrap_or(i64::MAX));
        let told = told.and_then(|told| serde_json::from_slice(told.as_bytes()).ok());
        let cost = told.and_then(|told| self.bill.settle(told, prompt, completion));
        if cost.is_none() {
            // It generated, and its main function does not say for how much.
            self.bill.lost(prompt.saturating_add(completion));
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
        // Events are about as many as tokens. A client that leaves before an answer has had its prompt computed.
        let estimate = || match self.bill.is_owed() {
            false => 0,
            true => {
                let (prompt, completion) = self.bound.clamp(self.body_bytes / BYTES_PER_TOKEN, self.events);
                prompt.saturating_add(completion)
            }
        };
        let tokens =
            self.tokens.map_or_else(estimate, |(prompt, completion)| prompt.saturating_add(completion));
        if tokens > 0 {
            self.bill.gateway.metrics().took(&self.bill.model, &self.bill.tenant, tokens);
        }
        if self.tokens.is_none() {
            self.bill.lost(tokens);
        }
        if let Some(permit) = &self.permit {
            permit.charge(tokens);
        }
    }
}

/// Seconds until the first token, as a main function tells them in `Server-Timing`.
fn first_token(headers: &HeaderMap) -> Option<f64> {
    let mut parts = headers.get(SERVER_TIMING)?.to_str().ok()?.split(',');
    let told = parts.find_map(|part| part.trim().strip_prefix("first;dur="))?;
    let milliseconds = told.parse::<f64>().ok().filter(|told| told.is_finite() && *told >= 0.0)?;
    Some(milliseconds / 1e3)
}
