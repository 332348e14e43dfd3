//! What a caller asks of the engine and what it hears back.

use remoe_wire::ServiceError;
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
    /// Alternatives reported with each generated token (0: only the token's own log-probability).
    pub logprobs: Option<usize>,
    /// The same for the prompt's tokens.
    pub prompt_logprobs: Option<usize>,
    /// Record the routing, and the hidden states too, of the prompt.
    pub inspect: Option<InspectLevel>,
}

/// What an inspection records beside logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InspectLevel {
    /// Selected experts and their weights.
    Routing,
    /// Routing and the hidden states of every position before the final norm.
    Hidden,
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
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
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
            logit_bias: Vec::new(),
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
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
    /// No end-of-sequence or stop token before so many tokens.
    pub min_tokens: usize,
}

/// One step of a request's answer. A request ends with exactly one [`Event::Done`] or
/// [`Event::Failed`].
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Log-probabilities of the prompt's tokens, the first without; only when asked for, once.
    Prompt(Vec<Option<TokenLogprobs>>),
    /// What an inspection recorded; only when asked for, once.
    Inspection(Box<Inspection>),
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
    /// Its natural log-probability under the unmodified logits.
    pub logprob: f32,
    /// The most likely tokens, most likely first, ties to the lower id.
    pub top: Vec<(u32, f32)>,
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
}

impl FinishReason {
    /// The name in JSON answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// The figures of a finished request.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Figures {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens drawn, closing end-of-sequence tokens included, all choices together.
    pub completion_tokens: usize,
    /// Positions that went through the model: prompt + generated - 1 for one choice.
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
}

/// (token, expert) pairs by where they were computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpertTally {
    /// By the kernels beside the engine.
    pub local: u64,
    /// By remote functions.
    pub remote: u64,
    /// Placed remotely, computed locally because no replica answered.
    pub fallback: u64,
    /// Messages that were sent again, to another replica.
    pub retries: u64,
}

impl std::ops::AddAssign for ExpertTally {
    fn add_assign(&mut self, other: Self) {
        self.local += other.local;
        self.remote += other.remote;
        self.fallback += other.fallback;
        self.retries += other.retries;
    }
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

/// The routing of one MoE layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerRouting {
    /// The model's layer id.
    pub layer: usize,
    /// Per token: (expert, weight), experts ascending.
    pub tokens: Vec<Vec<(u32, f32)>>,
}
