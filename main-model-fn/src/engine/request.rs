//! Requests to the engine and the events of their answers.

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

/// A prompt and how to continue it.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Number of independent continuations; the prompt is computed once for all of them.
    pub choices: usize,
    /// Most tokens per choice; 0 computes the prompt only.
    pub max_tokens: usize,
    /// Parameters of token sampling.
    pub sampling: Sampling,
    /// Conditions that end a choice before `max_tokens`.
    pub stop: StopRules,
    /// Grammar that every choice must match. It allows the end of a sequence only where the match is complete, and ends a
    /// choice where nothing can follow.
    pub grammar: Option<Grammar>,
    /// True if the text includes special tokens; otherwise they give no text.
    pub special_text: bool,
    /// Special tokens that the text includes in any case.
    pub shown: Vec<u32>,
    /// Number of alternatives reported with each generated token (0: only the token's own log-probability).
    pub logprobs: Option<usize>,
    /// Number of alternatives reported with each prompt token.
    pub prompt_logprobs: Option<usize>,
    /// Level of the prompt's records: routing, or hidden states as well.
    pub inspect: Option<InspectLevel>,
    /// True if the answer is the mean of the prompt's hidden states.
    pub embeds: bool,
    /// Scope within which cached prefixes are shared.
    pub tenant: CacheScope,
    /// Counter of the experts that the request uses; returned with its [`Figures`].
    pub activations: Option<Box<Activations>>,
    /// Parent of the request's tracing spans.
    pub span: SpanRef,
    /// Priority class: interactive requests go first.
    pub priority: Priority,
    /// Longest wait until the first row is computed; `None`: no limit.
    pub queue_deadline: Option<Duration>,
    /// Budget of the thought (reasoning) at the beginning of the answer.
    pub thought_budget: Option<ThoughtBudget>,
}

/// Largest number of logits for which selection on a device pays off.
const MAX_SELECTED_LOGITS: usize = 64;

impl Request {
    /// Returns how many of the largest logits are enough for sampling; `None` if every logit is needed.
    pub(crate) fn largest_logits(&self) -> Option<usize> {
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
        (is_plain && !is_reported && (1..=MAX_SELECTED_LOGITS).contains(&count)).then_some(count)
    }
}

/// Priority class of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Priority {
    /// A client waits for the answer.
    #[default]
    Interactive,
    /// The prompt is computed only while no interactive prompt waits. The request does not fail because of this.
    Batch,
}

impl Request {
    /// Creates a request that computes `prompt` and generates nothing.
    pub(crate) fn prompt_only(prompt: Vec<u32>) -> Self {
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

/// Parameters of token sampling, applied in the order of the fields.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divides positive and multiplies negative logits of tokens that prompt or output contain.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens that the output contains.
    pub presence_penalty: f32,
    /// Subtracted from the logits of a token once for each of its occurrences in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens. The prompts of one HTTP body share it.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Divisor of the logits. 0: the most likely token, ties to the lower id.
    pub temperature: f32,
    /// Number of most likely tokens to sample from; 0: all.
    pub top_k: usize,
    /// Smallest total probability of the most likely tokens to sample from; 1: all tokens.
    pub top_p: f32,
    /// Smallest probability of tokens to sample from, relative to the most likely token; 0: all.
    pub min_p: f32,
    /// Seed. A random number depends on seed, choice and position only.
    pub seed: u64,
}

impl Default for Sampling {
    /// Greedy decoding without penalties.
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
    /// Most tokens of a logit bias, because each is processed for every sampled token.
    pub(crate) const MAX_BIASES: usize = 1024;

    /// Checks the ranges of all values.
    ///
    /// # Errors
    /// Fails with the first value that is out of range or not a number.
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
        if self.logit_bias.len() > Self::MAX_BIASES {
            let (most, tokens) = (Self::MAX_BIASES, self.logit_bias.len());
            let message = format!("invalid `logit_bias`: expected at most {most} tokens, got {tokens}");
            return Err(ServiceError::invalid("logit_bias", message));
        }
        for &(token, bias) in self.logit_bias.iter() {
            check(format!("logit_bias.{token}"), bias, -100.0..=100.0)?;
        }
        Ok(())
    }
}

/// Conditions that end a choice.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopRules {
    /// Strings before which the output ends; these need a tokenizer.
    pub strings: Vec<String>,
    /// Tokens that end the output like an end-of-sequence token.
    pub token_ids: Vec<u32>,
    /// True if end-of-sequence tokens do not end the output.
    pub ignore_eos: bool,
    /// Fewest tokens of a choice. Until then, end-of-sequence and stop tokens are not sampled, and stop strings count as
    /// ordinary text.
    pub min_tokens: usize,
}

impl StopRules {
    /// Most stop strings: each is searched for after every token.
    const MAX_STRINGS: usize = 32;
    /// Longest stop string in bytes.
    const MAX_STRING_BYTES: usize = 1024;

    /// Checks the number and length of stop strings.
    ///
    /// # Errors
    /// Fails if there are too many stop strings, or if one is empty or too long.
    pub(crate) fn check(&self) -> Result<(), ServiceError> {
        let is_invalid = |stop: &String| stop.is_empty() || stop.len() > Self::MAX_STRING_BYTES;
        if self.strings.len() > Self::MAX_STRINGS || self.strings.iter().any(is_invalid) {
            let (most, bytes) = (Self::MAX_STRINGS, Self::MAX_STRING_BYTES);
            let message = format!("invalid `stop`: expected at most {most} strings of 1 to {bytes} bytes");
            return Err(ServiceError::invalid("stop", message));
        }
        Ok(())
    }
}

/// Event of a request's answer. A request ends with exactly one [`Event::Done`] or [`Event::Failed`].
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Log-probabilities of the prompt's tokens; the first token has none. Sent once, if requested.
    Prompt(Vec<Option<TokenLogprobs>>),
    /// Records of the prompt. Sent once, if requested.
    Inspection(Box<Inspection>),
    /// Mean of the prompt's hidden states behind the final norm. Sent once, if requested.
    Embedding(Vec<f32>),
    /// Next token or text of one choice. Text that is held back (partial characters, possible beginnings of a stop
    /// string) comes with a later delta than its tokens.
    Delta(Delta),
    /// One choice has ended.
    Finished {
        /// Index of the choice.
        choice: usize,
        /// Reason for the end.
        reason: FinishReason,
    },
    /// All choices have ended.
    Done(Figures),
    /// The request failed. This is the last event.
    Failed(ServiceError),
}

/// New output of one choice.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Delta {
    /// Index of the choice.
    pub choice: usize,
    /// Sampled token; `None` if only held-back text is released. A token that ends the choice (end of sequence, stop
    /// token) is not reported.
    pub token: Option<u32>,
    /// Text that no later token can change; empty without a tokenizer.
    pub text: String,
    /// Log-probabilities of the token, if requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// Log-probability of one token and of the most likely alternatives.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Token of the output or prompt.
    pub token: u32,
    /// Natural logarithm of the token's probability under the unmodified logits.
    pub logprob: f32,
    /// Most likely tokens with their log-probabilities, in descending order; ties to the lower id.
    pub top: Vec<(u32, f32)>,
}

/// Reason why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or the end of the grammar.
    Stop,
    /// Stop string, by its index in the request.
    StopString(usize),
    /// `max_tokens`, or the end of the context.
    Length,
}

impl FinishReason {
    /// Returns the name in JSON answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop | Self::StopString(_) => "stop",
            Self::Length => "length",
        }
    }
}

/// Counts and times of a finished request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Figures {
    /// Number of prompt tokens.
    pub prompt_tokens: usize,
    /// Number of sampled tokens of all choices, including end-of-sequence tokens.
    pub completion_tokens: usize,
    /// Number of prompt tokens found in the prefix cache, which are not computed again.
    pub cached_tokens: usize,
    /// Number of positions that went through the model: prompt - cached + generated - 1 for one choice.
    pub forwarded_positions: u64,
    /// Numbers of (token, expert) pairs by where they were computed.
    pub experts: ExpertTally,
    /// Time from submission to the start of the first iteration.
    pub queued: Duration,
    /// Time to first token (TTFT): from submission to the first token.
    pub ttft: Duration,
    /// Time from the start of the first iteration to the first token.
    pub prefill: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
    /// Expert time of the iterations of prefill.
    pub prefill_experts: ExpertTime,
    /// Expert time of the iterations of decoding.
    pub decode_experts: ExpertTime,
    /// Share of the functions' time. Shares of all requests add up to the whole, unlike the times above.
    pub work: Box<RequestWork>,
    /// Experts that the positions used, if requested.
    pub activations: Option<Box<Activations>>,
}

/// Records of a prompt's way through the model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Inspection {
    /// Logits of the last position, `vocab_size` elements.
    pub last_logits: Vec<f32>,
    /// Selected experts and weights, per MoE layer and prompt token; experts ascending.
    pub routing: Vec<LayerRouting>,
    /// prompt x hidden elements before the final norm, compute dtype, little endian; empty below
    /// [`InspectLevel::Hidden`].
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
            ("temperature", |sampling, value| sampling.temperature = value, 0.0, 2.0),
            ("top_p", |sampling, value| sampling.top_p = value, 0.0, 1.0),
            ("min_p", |sampling, value| sampling.min_p = value, 0.0, 1.0),
            ("repetition_penalty", |sampling, value| sampling.repetition_penalty = value, 0.01, 100.0),
            ("presence_penalty", |sampling, value| sampling.presence_penalty = value, -2.0, 2.0),
            ("frequency_penalty", |sampling, value| sampling.frequency_penalty = value, -2.0, 2.0),
            ("logit_bias.7", |sampling, value| sampling.logit_bias = [(7, value)].into(), -100.0, 100.0),
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
