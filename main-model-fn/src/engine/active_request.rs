//! An admitted request: its prompt, its choices, and its rows in forwards.

use super::choice::OpenChoice;
use super::failure_backoff::FailureBackoff;
use super::handle::QueuedRequest;
use super::iteration_rows::PrefillRows;
use super::request::{ExpertTally, ExpertTime, Figures, Inspection, Priority, Request, TokenLogprobs};
use super::request_spans::RequestSpans;
use super::sampling::distinct;
use super::scheduler::PendingRows;
use crate::grammar::{Grammar, GrammarProgress};
use crate::pages::{BlockPages, SequenceCache};
use crate::records::{Recording, Step};
use crate::transformer::{OutputRows, Segment, Trace};
use remoe_billing::{BilledRequest, Phase, RequestWork};
use remoe_model::text::Tokenizer;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokenizer and end-of-sequence ids of the model.
pub(crate) struct Vocabulary {
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    pub(crate) end_ids: Vec<u32>,
}

/// Most rows of a prompt in one iteration if the logits of every row are needed: a row of logits is as long as the
/// vocabulary.
const MAX_SCORED_ROWS: usize = 64;

/// An admitted request.
pub(crate) struct ActiveRequest {
    /// Never reused; later requests have larger ids.
    pub(crate) id: u64,
    pub(super) queued: QueuedRequest,
    pub(super) stage: RequestStage,
    /// Copies of the prompt's last page, if it is not full: every choice but one needs a copy.
    pub(super) copies: Vec<BlockPages>,
    /// Start of the iteration with the request's first rows.
    pub(super) started: Option<Instant>,
    /// Rows in the layered prefill that the request takes part in.
    pub(super) prefill: Option<PrefillRows>,
    pub(super) first_token: Option<Instant>,
    pub(super) figures: Figures,
    pub(super) inspection: Inspection,
    pub(super) prompt_logprobs: Vec<Option<TokenLogprobs>>,
    /// Sum of the prompt's hidden states so far; empty before the first.
    pub(super) states: Vec<f64>,
    /// Tokens that end a choice.
    pub(super) ends: Vec<u32>,
    /// The prompt's tokens for the repetition penalty; empty without one.
    pub(super) prompt_tokens: Vec<u32>,
    /// Grammar progress of the choices before their first token; empty without a grammar.
    pub(super) initial_progress: Vec<GrammarProgress>,
    /// Token counts of a choice without tokens.
    pub(super) no_counts: HashMap<u32, u32>,
    /// Record of activations, if they are recorded.
    pub(super) recording: Option<Recording>,
    /// Set after a failed iteration, until the next progress.
    pub(super) failure_backoff: Option<FailureBackoff>,
    /// Tracing spans, if the request is traced.
    pub(super) spans: Option<Box<RequestSpans>>,
}

impl BilledRequest for ActiveRequest {
    fn work(&mut self) -> (&mut RequestWork, Phase) {
        let phase = match &self.stage {
            RequestStage::Prompt(_) => Phase::Prefill,
            RequestStage::Choices(_) => Phase::Decode,
        };
        (&mut *self.figures.work, phase)
    }
}

/// Stage of an admitted request.
pub(super) enum RequestStage {
    /// Prefill. The cache's length is the part of the prompt that is done.
    Prompt(SequenceCache),
    /// Decode: the choices that have not ended.
    Choices(Vec<OpenChoice>),
}

impl ActiveRequest {
    pub(crate) fn new(
        id: u64,
        mut queued: QueuedRequest,
        vocabulary: &Vocabulary,
        recording: Option<Recording>,
    ) -> Self {
        let activations = queued.request.activations.take();
        let request = &queued.request;
        let figures = Figures { prompt_tokens: request.prompt.len(), activations, ..Figures::default() };
        let mut ends = request.stop.token_ids.clone();
        if !request.stop.ignore_eos {
            ends.extend(&vocabulary.end_ids);
        }
        let prompt_tokens = match request.sampling.repetition_penalty {
            1.0 => Vec::new(),
            _ => distinct(&request.prompt),
        };
        let cache = SequenceCache::new(request.tenant);
        let initial_progress =
            request.grammar.iter().cycle().take(request.choices).map(Grammar::begin).collect();
        Self {
            id,
            queued,
            stage: RequestStage::Prompt(cache),
            copies: Vec::new(),
            started: None,
            prefill: None,
            first_token: None,
            figures,
            inspection: Inspection::default(),
            prompt_logprobs: Vec::new(),
            states: Vec::new(),
            ends,
            prompt_tokens,
            initial_progress,
            no_counts: HashMap::new(),
            recording,
            failure_backoff: None,
            spans: None,
        }
    }

    /// Records that the first rows are about to be computed, if it is the first time.
    pub(super) fn mark_started(&mut self, now: Instant) {
        if self.started.is_none() {
            self.started = Some(now);
            self.figures.queued = now - self.queued.submitted;
            self.spans = RequestSpans::begin(&self.queued.request.span, self.queued.submitted, now);
        }
    }

    /// Reports if the queue deadline passed before the first row was computed.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.started.is_none() && self.queued.is_overdue(now)
    }

    /// Reports if the request has batch priority so interactive requests may preempt it.
    pub(super) fn is_batch(&self) -> bool {
        self.request().priority == Priority::Batch
    }

    pub(crate) fn request(&self) -> &Request {
        &self.queued.request
    }

    /// Reports if the client has received a token.
    pub(super) fn has_answered(&self) -> bool {
        self.first_token.is_some()
    }

    /// Reports if every row of the prompt must be computed. The prefix cache does not hold the records, inspections and
    /// scores of rows.
    pub(super) fn wants_prompt_rows(&self) -> bool {
        let request = self.request();
        self.recording.is_some()
            || request.inspect.is_some()
            || request.prompt_logprobs.is_some()
            || request.embeds
    }

    /// Reports if the expert ids of the request's rows are needed.
    pub(super) fn wants_routing(&self) -> bool {
        self.recording.is_some() || self.figures.activations.is_some()
    }

    /// Returns the tokens of a starting prompt that were looked up in the prefix cache, and those that were found.
    pub(crate) fn prefix_lookup(&self) -> (usize, usize) {
        match self.stage {
            RequestStage::Prompt(_) if !self.wants_prompt_rows() => {
                (self.request().prompt.len(), self.figures.cached_tokens)
            }
            _ => (0, 0),
        }
    }

    /// Reports if the receiver of the events is gone.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.queued.events.is_closed()
    }

    pub(crate) fn failure_backoff(&self) -> Option<FailureBackoff> {
        self.failure_backoff
    }

    /// Backs off after the iteration from `started` failed because experts of the request were out of reach. Returns false
    /// if the request must fail.
    pub(crate) fn back_off(&mut self, started: Instant) -> bool {
        self.failure_backoff = FailureBackoff::after(self.failure_backoff, started, Instant::now());
        if let Some(spans) = &self.spans {
            spans.event("experts out of reach");
        }
        self.failure_backoff.is_some()
    }

    /// Reports if the request takes part in decode iterations: each sequence has at most one row to forward, and the request
    /// is in no layered prefill.
    pub(super) fn decodes(&self) -> bool {
        let prompt = &self.request().prompt;
        self.prefill.is_none()
            && match &self.stage {
                RequestStage::Prompt(cache) => cache.length() + 1 == prompt.len(),
                RequestStage::Choices(choices) => {
                    choices.iter().all(|choice| choice.pending_rows(prompt) <= 1)
                }
            }
    }

    /// Records that the prompt advanced for `time`; this counts as progress after a failure.
    pub(super) fn record_progress(&mut self, time: Duration) {
        if let Some(backoff) = &mut self.failure_backoff {
            backoff.exclude(time);
        }
    }

    /// Returns the rows that each sequence could forward now, in chunks of at most `chunk` rows: the rest of a prompt, one
    /// row of a choice, or all known tokens of a preempted choice.
    pub(crate) fn pending_rows(&self, chunk: usize) -> Vec<PendingRows> {
        let prompt = &self.request().prompt;
        match &self.stage {
            RequestStage::Prompt(cache) => {
                let scored = self.request().prompt_logprobs.is_some();
                let chunk = if scored { chunk.min(MAX_SCORED_ROWS) } else { chunk };
                vec![PendingRows { rows: prompt.len() - cache.length(), chunk }]
            }
            RequestStage::Choices(choices) => choices
                .iter()
                .map(|choice| PendingRows { rows: choice.pending_rows(prompt), chunk })
                .collect(),
        }
    }

    /// Appends the segments of the next forward. `rows` has the rows of each sequence.
    pub(crate) fn append_segments<'a>(&'a mut self, rows: &[usize], segments: &mut Vec<Segment<'a>>) {
        let last = self.queued.request.largest_logits().map_or(OutputRows::Last, OutputRows::Largest);
        let prompt = self.queued.request.prompt.as_slice();
        match &mut self.stage {
            RequestStage::Prompt(cache) => {
                let take = rows.first().copied().unwrap_or(0);
                if take == 0 {
                    return;
                }
                let done = cache.length();
                let wanted = if self.queued.request.embeds {
                    OutputRows::States
                } else if self.queued.request.prompt_logprobs.is_some() {
                    OutputRows::All
                } else if done + take == prompt.len() {
                    last
                } else {
                    OutputRows::None
                };
                segments.push(Segment { tokens: &prompt[done..done + take], cache, wanted });
            }
            RequestStage::Choices(choices) => {
                for (choice, &take) in choices.iter_mut().zip(rows) {
                    let (tokens, cache, is_complete) = choice.take_rows(prompt, take);
                    if take > 0 {
                        let wanted = if is_complete { last } else { OutputRows::None };
                        segments.push(Segment { tokens, cache, wanted });
                    }
                }
            }
        }
    }

    /// Counts forwarded rows and their experts, and records the experts if requested.
    ///
    /// `tally` has the counts of each row; `first_row` is the request's first row in the iteration.
    pub(crate) fn count_rows(
        &mut self,
        tally: &[ExpertTally],
        time: ExpertTime,
        trace: Option<&Trace>,
        first_row: usize,
    ) {
        match &self.stage {
            RequestStage::Prompt(_) => self.figures.prefill_experts += time,
            RequestStage::Choices(_) => self.figures.decode_experts += time,
        }
        for (row, step) in self.new_rows(tally.len()) {
            self.figures.forwarded_positions += 1;
            self.figures.experts += tally[row];
            let Some(trace) = trace else { continue };
            if let Some(recording) = &mut self.recording {
                recording.count(&trace.routing, first_row + row, step);
            }
            if let Some(activations) = &mut self.figures.activations {
                let layers = trace.routing.iter().filter_map(|layer| layer.tokens.get(first_row + row));
                activations.count(step.phase(), layers.map(Vec::as_slice));
            }
        }
    }

    /// Returns those of the request's `rows` rows that were forwarded for the first time, not again after a preemption.
    fn new_rows(&self, rows: usize) -> Vec<(usize, Step)> {
        match &self.stage {
            RequestStage::Prompt(_) => (0..rows).map(|row| (row, Step::Prefill)).collect(),
            RequestStage::Choices(choices) => {
                let mut end = 0;
                let mut new = Vec::with_capacity(choices.len());
                for choice in choices {
                    end += choice.iteration_rows;
                    if choice.is_due(&self.queued.request.prompt) {
                        new.push((end - 1, Step::Decode));
                    }
                }
                new
            }
        }
    }

    /// Returns the request's record of activations.
    pub(crate) fn into_recording(self) -> Option<Recording> {
        self.recording
    }

    /// Appends the traced rows of the prompt to the requested inspection.
    pub(crate) fn record_inspection(
        &mut self,
        trace: &Trace,
        first_row: usize,
        rows: usize,
        row_bytes: usize,
    ) {
        let (Some(level), RequestStage::Prompt(_)) = (self.queued.request.inspect, &self.stage) else {
            return;
        };
        for (index, layer) in trace.routing.iter().enumerate() {
            if self.inspection.routing.len() <= index {
                self.inspection
                    .routing
                    .push(super::request::LayerRouting { layer: layer.layer, tokens: Vec::new() });
            }
            let tokens = layer.tokens[first_row..first_row + rows].iter().cloned();
            self.inspection.routing[index].tokens.extend(tokens);
        }
        if level == super::request::InspectLevel::Hidden {
            let bytes = &trace.hidden[first_row * row_bytes..(first_row + rows) * row_bytes];
            self.inspection.hidden.extend_from_slice(bytes);
        }
    }

    /// Adds hidden states of the prompt's next positions, `hidden` elements each, to their sum. Positions are added one by
    /// one in order, so the division of the prompt into chunks does not change the sum.
    pub(super) fn add_states(&mut self, states: &[f32], hidden: usize) {
        for row in states.chunks_exact(hidden) {
            self.states.resize(hidden, 0.0);
            self.states.iter_mut().zip(row).for_each(|(sum, state)| *sum += f64::from(*state));
        }
    }
}
