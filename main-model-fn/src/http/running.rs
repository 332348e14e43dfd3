//! The engine's events for all prompts of a generation, merged.

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

/// A running generation. Dropping it ends the engine's work on it.
pub(super) struct RunningGeneration {
    events: StreamMap<usize, ReceiverStream<Event>>,
    /// Prompts whose end has not come.
    open: usize,
    /// Choices of each prompt.
    choices: usize,
    figures: Figures,
    /// Counterfactual cost of its prompts, in nanodollars by alternative.
    rivals: BTreeMap<String, u64>,
    /// Known at the end, where a gateway says what functions cost.
    cost: Option<ReportedCost>,
    timeline: Timeline,
    /// Span of the HTTP request.
    pub(super) span: SpanRef,
    pub(super) stopwatch: Stopwatch,
    /// Tokens of thoughts, known at the end.
    pub(super) reasoning_tokens: usize,
}

impl RunningGeneration {
    /// Hands `requests` to the engine: all or none. Their prompts stand in `field`.
    ///
    /// # Errors
    /// The engine refuses one of them.
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
            request.queue_deadline = deadline.map(|limit| limit.saturating_sub(timeline.waited()));
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

    /// The next event and the prompt it belongs to; `None` once all prompts are done.
    ///
    /// # Errors
    /// The engine failed; nothing follows.
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
                    self.add(figures);
                }
                Event::Failed(error) => return Err(error),
                event => {
                    self.measure(prompt, &event);
                    return Ok(Some((prompt, event)));
                }
            }
        }
        self.stopwatch.done();
        let count = |tokens: usize| i64::try_from(tokens).unwrap_or(i64::MAX);
        self.span.set("gen_ai.usage.input_tokens", count(self.figures.prompt_tokens));
        self.span.set("gen_ai.usage.output_tokens", count(self.figures.completion_tokens));
        self.span.set("gen_ai.usage.cache_read.input_tokens", count(self.figures.cached_tokens));
        let tell = |rates| self.stopwatch.state().meter.tell(&self.figures.work, rates);
        let rivals = std::mem::take(&mut self.rivals);
        self.cost = self.timeline.rates().map(tell).map(|told| ReportedCost { rivals, ..told });
        Ok(None)
    }

    /// The figures of the prompts that are done: counts are summed, times are the slowest prompt's.
    pub(super) fn figures(&self) -> &Figures {
        &self.figures
    }

    /// Returns whether a gateway is told what the request cost, once all prompts are done.
    pub(super) fn has_cost(&self) -> bool {
        self.cost.is_some()
    }

    /// Where the time to the first token went.
    pub(super) fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Returns the headers for a gateway when all prompts are done.
    pub(super) fn told(&self) -> HeaderMap {
        let Figures { prompt_tokens, completion_tokens, activations, .. } = &self.figures;
        let cost = self.cost.as_ref();
        self.timeline.headers(*prompt_tokens, *completion_tokens, cost, activations.as_deref())
    }

    fn measure(&mut self, prompt: usize, event: &Event) {
        match event {
            Event::Delta(delta) if delta.token.is_some() => {
                self.timeline.token();
                self.stopwatch.token(prompt * self.choices + delta.choice);
            }
            Event::Finished { reason, .. } => self.stopwatch.choice_finished(*reason),
            _ => (),
        }
    }

    fn add(&mut self, one: Figures) {
        if self.timeline.rates().is_some()
            && let Some(account) = self.stopwatch.state().account()
        {
            let steps = one.completion_tokens.saturating_sub(self.choices);
            for (rival, dollars) in account.baseline_costs(one.prompt_tokens, steps) {
                // Dollars that no price list reaches saturate.
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
