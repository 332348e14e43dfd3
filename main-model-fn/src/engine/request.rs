//! Requests to the engine, and the events that it answers with.

pub use super::thought::ThoughtBudget;
pub use crate::dispatch::{ExpertTally, ExpertTime};
pub use crate::transformer::{InspectLevel, LayerRouting};

use crate::grammar::Grammar;
use crate::pages::CacheScope;
use remoe_billing::RequestWork;
use remoe_otel::SpanRef;
use remoe_predictor::Activations;
use remoe_proto::ServiceError;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

/// One request: a prompt and how to continue it.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// How many independent continuations; the prompt is computed once for all of them.
    pub choices: usize,
    /// Most tokens per choice; 0 computes the prompt only.
    pub max_tokens: usize,
    /// How a token is drawn.
    pub sampling: Sampling,
    /// When a choice ends before `max_tokens`.
    pub stop: StopRules,
    /// Grammar that every choice must match. It allows the end of a sequence only where it is complete, and ends a
    /// choice where nothing can follow.
    pub grammar: Option<Grammar>,
    /// Special tokens are written out in the text; else they give none.
    pub special_text: bool,
    /// Special tokens that are written out in any case.
    pub shown: Vec<u32>,
    /// Alternatives reported with each generated token (0: only the token's own log-probability).
    pub logprobs: Option<usize>,
    /// As [`Self::logprobs`], for the prompt's tokens.
    pub prompt_logprobs: Option<usize>,
    /// Record the routing, and the hidden states too, of the prompt.
    pub inspect: Option<InspectLevel>,
    /// Give the mean of the prompt's hidden states.
    pub embeds: bool,
    /// With whose requests it shares keys and values of equal beginnings.
    pub tenant: CacheScope,
    /// Where its experts are counted; comes back with its figures.
    pub activations: Option<Box<Activations>>,
    /// The span that its own are parts of.
    pub span: SpanRef,
    /// Priority class: interactive requests go first.
    pub priority: Priority,
    /// How long it may wait before its first row is computed; none: as long as it takes.
    pub queue_deadline: Option<Duration>,
    /// Most tokens of the thought that an answer begins with.
    pub thought_budget: Option<ThoughtBudget>,
}

/// Most of the likeliest tokens that are worth selecting on a device.
const MOST_LIKELIEST: usize = 64;

impl Request {
    /// Returns how many of the likeliest tokens are enough to draw from; `None` if every logit is wanted.
    pub(crate) fn likeliest(&self) -> Option<usize> {
        let sampling = &self.sampling;
        let is_plain = sampling.repetition_penalty == 1.0
            && sampling.presence_penalty == 0.0
            && sampling.frequency_penalty == 0.0
            && sampling.logit_bias.is_empty()
            && self.stop.min_tokens == 0
            && self.grammar.is_none()
            && self.thought_budget.is_none();
        let is_reported = self.logprobs.is_some() || self.prompt_logprobs.is_some() || self.inspect.is_some();
        let count = if sampling.temperature == 0.0 { 1 } else { sampling.top_k };
        (is_plain && !is_reported && (1..=MOST_LIKELIEST).contains(&count)).then_some(count)
    }
}

/// The class of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Priority {
    /// A client waits for the answer.
    #[default]
    Interactive,
    /// The prompt is computed while no interactive prompt waits, from layer to layer; the request never fails for
    /// that.
    Batch,
}

impl Request {
    /// Computes `prompt` and generates nothing.
    pub(crate) fn of_prompt(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            choices: 1,
            max_tokens: 0,
            sampling: Sampling::default(),
            stop: StopRules::default(),
            grammar: None,
            special_text: false,
            shown: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            inspect: None,
            embeds: false,
            tenant: CacheScope::default(),
            activations: None,
            span: SpanRef::default(),
            priority: Priority::default(),
            queue_deadline: None,
            thought_budget: None,
        }
    }
}

/// How one token is drawn from the logits. Steps apply in the order of the fields.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divides (positive) or multiplies (negative) the logits of tokens seen in prompt or output.
    pub repetition_penalty: f32,
    /// Subtracted once for a token that the output contains.
    pub presence_penalty: f32,
    /// Subtracted for every time that the output contains a token.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens. The prompts of one body share it.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// 0: the most likely token, ties to the lower id.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0: all.
    pub top_k: usize,
    /// Keep the smallest set of most likely tokens with at least this probability; 1: all.
    pub top_p: f32,
    /// Keep tokens with at least this share of the most likely token's probability; 0: all.
    pub min_p: f32,
    /// With choice and position, all that a random number depends on.
    pub seed: u64,
}

impl Default for Sampling {
    /// Greedy, no penalties.
    fn default() -> Self {
        Self {
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Arc::default(),
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Most tokens of a logit bias: each is looked at for every token that is drawn.
    pub(crate) const BIASES: usize = 1024;

    /// # Errors
    /// The first value that is no number or out of its range.
    pub(crate) fn check(&self) -> Result<(), ServiceError> {
        let check = |field: String, value: f32, range: RangeInclusive<f32>| {
            if range.contains(&value) {
                return Ok(());
            }
            let (low, high) = range.into_inner();
            let message = format!("invalid `{field}`: expected {low} to {high}, got {value}");
            Err(ServiceError::invalid(&field, message))
        };
        check("temperature".to_owned(), self.temperature, 0.0..=2.0)?;
        check("top_p".to_owned(), self.top_p, 0.0..=1.0)?;
        check("min_p".to_owned(), self.min_p, 0.0..=1.0)?;
        check("repetition_penalty".to_owned(), self.repetition_penalty, 0.01..=100.0)?;
        check("presence_penalty".to_owned(), self.presence_penalty, -2.0..=2.0)?;
        check("frequency_penalty".to_owned(), self.frequency_penalty, -2.0..=2.0)?;
        if self.logit_bias.len() > Self::BIASES {
            let (most, tokens) = (Self::BIASES, self.logit_bias.len());
            let message = format!("invalid `logit_bias`: expected at most {most} tokens, got {tokens}");
            return Err(ServiceError::invalid("logit_bias", message));
        }
        for &(token, bias) in self.logit_bias.iter() {
            check(format!("logit_bias.{token}"), bias, -100.0..=100.0)?;
        }
        Ok(())
    }
}

/// When a choice ends.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopRules {
    /// The output ends before the first of these; needs a tokenizer.
    pub strings: Vec<String>,
    /// Ends like an end-of-sequence token.
    pub token_ids: Vec<u32>,
    /// Generate on past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Nothing ends a choice before so many tokens: no end-of-sequence or stop token is drawn, and a
    /// stop string that is complete by then is text like any other.
    pub min_tokens: usize,
}

impl StopRules {
    /// Most stop strings, and the length of each in bytes: all of them are looked for at every token.
    const STRINGS: usize = 32;
    const STRING_BYTES: usize = 1024;

    /// # Errors
    /// Too many stop strings, or one that is too long.
    pub(crate) fn check(&self) -> Result<(), ServiceError> {
        let long = |stop: &String| stop.is_empty() || stop.len() > Self::STRING_BYTES;
        if self.strings.len() > Self::STRINGS || self.strings.iter().any(long) {
            let (most, bytes) = (Self::STRINGS, Self::STRING_BYTES);
            let message = format!("invalid `stop`: expected at most {most} strings of 1 to {bytes} bytes");
            return Err(ServiceError::invalid("stop", message));
        }
        Ok(())
    }
}

/// One step of a request's answer. A request ends with exactly one [`Event::Done`] or
/// [`Event::Failed`].
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Log-probabilities of the prompt's tokens, the first without; only when asked for, once.
    Prompt(Vec<Option<TokenLogprobs>>),
    /// Records of an inspection; only when asked for, once.
    Inspection(Box<Inspection>),
    /// The mean over the prompt of the hidden states behind the final norm; only when asked for, once.
    Embedding(Vec<f32>),
    /// One step of one choice. Text held back (partial characters, possible beginnings of a stop
    /// string) comes with a later delta, its tokens with the step that they were drawn in.
    Delta(Delta),
    /// One choice has ended.
    Finished {
        /// Which choice.
        choice: usize,
        /// Why.
        reason: FinishReason,
    },
    /// All choices have ended.
    Done(Figures),
    /// The request failed; nothing follows.
    Failed(ServiceError),
}

/// New output of one choice.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Delta {
    /// Which choice.
    pub choice: usize,
    /// The token drawn in this step; none when only held-back text is released. A token that ends
    /// the choice (end of sequence, stop token) is not reported.
    pub token: Option<u32>,
    /// Text that became certain in this step; empty without a tokenizer.
    pub text: String,
    /// The token's log-probabilities, when asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// The log-probability of one token, and its most likely rivals.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token that was drawn (or stands in the prompt).
    pub token: u32,
    /// Natural log-probability of the token under the unmodified logits.
    pub logprob: f32,
    /// The most likely tokens, most likely first, ties to the lower id.
    pub top: Vec<(u32, f32)>,
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or the end of the grammar.
    Stop,
    /// A stop string, by its place in the request.
    StopString(usize),
    /// `max_tokens` or the context's end.
    Length,
}

impl FinishReason {
    /// The name in JSON answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop | Self::StopString(_) => "stop",
            Self::Length => "length",
        }
    }
}

/// The figures of a finished request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Figures {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens drawn, closing end-of-sequence tokens included, all choices together.
    pub completion_tokens: usize,
    /// Tokens of the prompt whose keys and values were kept from earlier requests; they do not go through the
    /// model.
    pub cached_tokens: usize,
    /// Positions that went through the model: prompt - cached + generated - 1 for one choice.
    pub forwarded_positions: u64,
    /// Where its experts were computed.
    pub experts: ExpertTally,
    /// From submission to the start of its first iteration.
    pub queued: Duration,
    /// From submission to the first token.
    pub ttft: Duration,
    /// From the start of its first iteration to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Time of the experts in the iterations of the prefill.
    pub prefill_experts: ExpertTime,
    /// Time of the experts in the iterations of decoding.
    pub decode_experts: ExpertTime,
    /// Share of the time of functions. Unlike the other times, shares of requests add up.
    pub work: Box<RequestWork>,
    /// Which experts its positions used, where the request asks.
    pub activations: Option<Box<Activations>>,
}

/// A prompt's way through the model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Inspection {
    /// `vocab_size` logits of the last position.
    pub last_logits: Vec<f32>,
    /// Per MoE layer, per prompt token: the selected experts, ascending, and their weights.
    pub routing: Vec<LayerRouting>,
    /// prompt x hidden elements before the final norm, compute dtype, little endian; empty unless
    /// asked for.
    pub hidden: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_values_out_of_range_are_refused_by_name() {
        assert_eq!(Sampling::default().check(), Ok(()));
        type SamplingChange = fn(&mut Sampling, f32);
        let fields: [(&str, SamplingChange, f32, f32); 7] = [
            ("temperature", |it, value| it.temperature = value, 0.0, 2.0),
            ("top_p", |it, value| it.top_p = value, 0.0, 1.0),
            ("min_p", |it, value| it.min_p = value, 0.0, 1.0),
            ("repetition_penalty", |it, value| it.repetition_penalty = value, 0.01, 100.0),
            ("presence_penalty", |it, value| it.presence_penalty = value, -2.0, 2.0),
            ("frequency_penalty", |it, value| it.frequency_penalty = value, -2.0, 2.0),
            ("logit_bias.7", |it, value| it.logit_bias = [(7, value)].into(), -100.0, 100.0),
        ];
        for (field, change, low, high) in fields {
            let checked = |value| {
                let mut sampling = Sampling::default();
                change(&mut sampling, value);
                sampling.check()
            };
            assert_eq!((checked(low), checked(high)), (Ok(()), Ok(())), "{field}");
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, low - 0.1, high + 0.1] {
                let refused = checked(value).err().and_then(|error| error.field);
                assert_eq!(refused.as_deref(), Some(field), "{field} {value}");
            }
        }
    }

    #[test]
    fn stop_strings_are_bounded() {
        let rules = |strings: Vec<String>| StopRules { strings, ..StopRules::default() };
        assert_eq!(rules(vec!["x".repeat(1024); 32]).check(), Ok(()));
        for strings in [vec!["x".to_owned(); 33], vec!["x".repeat(1025)], vec![String::new()]] {
            assert!(rules(strings).check().is_err());
        }
    }
}
