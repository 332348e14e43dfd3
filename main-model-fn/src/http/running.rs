//! Merged engine events of all prompts of a generation.

use super::metrics::Stopwatch;
use super::state::HttpState;
use super::timing::Timeline;
use crate::engine::request::{Event, Figures, Request};
use axum::http::HeaderMap;
use remoe_billing::ReportedCost;
use remoe_otel::SpanRef;
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{StreamExt, StreamMap};

/// A running generation. Dropping it cancels its requests in the engine.
pub(super) struct RunningGeneration {
    events: StreamMap<usize, ReceiverStream<Event>>,
    /// Number of prompts that have not ended.
    open: usize,
    /// Number of choices per prompt.
    choices: usize,
    figures: Figures,
    /// Counterfactual costs of the ended prompts, in nanodollars by alternative.
    rivals: BTreeMap<String, u64>,
    /// Cost of the request; `None` before the end, or if no gateway sent rates.
    cost: Option<ReportedCost>,
    timeline: Timeline,
    /// Tracing span of the HTTP request.
    pub(super) span: SpanRef,
    pub(super) stopwatch: Stopwatch,
    /// Number of tokens in thoughts; 0 before the end.
    pub(super) reasoning_tokens: usize,
}

impl RunningGeneration {
    /// Submits `requests` to the engine, all or none. `field` is the field of the prompts.
    ///
    /// # Errors
    /// Fails if the engine refuses one of them.
    pub(super) fn start(
        state: &Arc<HttpState>,
        requests: Vec<Request>,
        field: &str,
        timeline: Timeline,
        span: SpanRef,
    ) -> Result<Self, ServiceError> {
        let choices = requests.first().map_or(1, |request| request.choices);
        let stopwatch = Stopwatch::start(state.clone(), requests.len() * choices);
        let mut events = StreamMap::with_capacity(requests.len());
        let many = requests.len() > 1;
        for (index, mut request) in requests.into_iter().enumerate() {
            request.span.clone_from(&span);
            let deadline = request.queue_deadline.or(state.engine.limits().queue_deadline);
            request.queue_deadline = deadline.map(|limit| limit.saturating_sub(timeline.waited_in_gateway()));
            let receiver = state.engine.submit(request).map_err(|mut error| {
                if error.field.as_deref() == Some("prompt") {
                    error.field = Some(if many { format!("{field}[{index}]") } else { field.to_owned() });
                }
                error
            })?;
            events.insert(index, ReceiverStream::new(receiver));
        }
        Ok(Self {
            open: events.len(),
            events,
            choices,
            figures: Figures::default(),
            rivals: BTreeMap::new(),
            cost: None,
            timeline,
            span,
            stopwatch,
            reasoning_tokens: 0,
        })
    }

    /// Returns the next event and the index of its prompt; `None` once all prompts have ended.
    ///
    /// # Errors
    /// Fails if the engine does. No event follows.
    pub(super) async fn next(&mut self) -> Result<Option<(usize, Event)>, ServiceError> {
        while self.open > 0 {
            let Some((prompt, event)) = self.events.next().await else {
                return Err(ServiceError::new(
                    ErrorCode::Unavailable,
                    "cannot complete the answer: the engine stopped",
                ));
            };
            match event {
                Event::Done(figures) => {
                    self.open -= 1;
                    self.stopwatch.prompt_done(&figures);
                    self.add_figures(figures);
                }
                Event::Failed(error) => return Err(error),
                event => {
                    self.record_event(prompt, &event);
                    return Ok(Some((prompt, event)));
                }
            }
        }
        self.stopwatch.done();
        let attribute = |tokens: usize| i64::try_from(tokens).unwrap_or(i64::MAX);
        self.span.set("gen_ai.usage.input_tokens", attribute(self.figures.prompt_tokens));
        self.span.set("gen_ai.usage.output_tokens", attribute(self.figures.completion_tokens));
        self.span.set("gen_ai.usage.cache_read.input_tokens", attribute(self.figures.cached_tokens));
        let report = |rates| self.stopwatch.state().meter.report(&self.figures.work, rates);
        let rivals = std::mem::take(&mut self.rivals);
        self.cost = self.timeline.rates().map(report).map(|cost| ReportedCost { rivals, ..cost });
        Ok(None)
    }

    /// Returns the figures of the ended prompts: sums of counts, and times of the slowest prompt.
    pub(super) fn figures(&self) -> &Figures {
        &self.figures
    }

    /// Reports if the gateway gets the cost. Valid once all prompts have ended.
    pub(super) fn has_cost(&self) -> bool {
        self.cost.is_some()
    }

    /// Returns the measurements of the time to first token.
    pub(super) fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Returns the headers or trailers for the gateway. Valid once all prompts have ended.
    pub(super) fn gateway_headers(&self) -> HeaderMap {
        let Figures { prompt_tokens, completion_tokens, activations, .. } = &self.figures;
        let cost = self.cost.as_ref();
        self.timeline.gateway_headers(*prompt_tokens, *completion_tokens, cost, activations.as_deref())
    }

    fn record_event(&mut self, prompt: usize, event: &Event) {
        match event {
            Event::Delta(delta) if delta.token.is_some() => {
                self.timeline.record_token();
                self.stopwatch.token(prompt * self.choices + delta.choice);
            }
            Event::Finished { reason, .. } => self.stopwatch.choice_finished(*reason),
            _ => (),
        }
    }

    fn add_figures(&mut self, one: Figures) {
        if self.timeline.rates().is_some()
            && let Some(account) = self.stopwatch.state().account()
        {
            let steps = one.completion_tokens.saturating_sub(self.choices);
            for (rival, dollars) in account.baseline_costs(one.prompt_tokens, steps) {
                // The conversion saturates for costs that no price list reaches.
                *self.rivals.entry(rival.to_owned()).or_default() += (dollars * 1e9).round() as u64;
            }
        }
        let all = &mut self.figures;
        all.prompt_tokens += one.prompt_tokens;
        all.cached_tokens += one.cached_tokens;
        all.completion_tokens += one.completion_tokens;
        all.forwarded_positions += one.forwarded_positions;
        all.experts += one.experts;
        all.queued = all.queued.max(one.queued);
        all.ttft = all.ttft.max(one.ttft);
        all.prefill = all.prefill.max(one.prefill);
        all.decode = all.decode.max(one.decode);
        all.prefill_experts = all.prefill_experts.max(one.prefill_experts);
        all.decode_experts = all.decode_experts.max(one.decode_experts);
        all.work.join(*one.work);
        match (&mut all.activations, one.activations) {
            (Some(all), Some(one)) => all.add(&one),
            (all @ None, one) => *all = one,
            (Some(_), None) => {}
        }
    }
}
