//! Body of a generation: all known fields of all routes. Unknown fields are ignored.

use super::fields::{Given, Json, LogitBias, Logprobs, Object, Prompts, Seed, Strings};
use super::messages::Messages;
use super::reasoning::Reasoning;
use super::structured::{ResponseFormat, StructuredOutputs};
use super::tools::{ToolChoice, Tools};
use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RequestBody {
    pub(super) model: Option<String>,
    /// Prompt of a completion.
    pub(super) prompt: Option<Prompts>,
    /// Text behind a completion.
    pub(super) suffix: Given,
    /// Messages of a chat.
    pub(super) messages: Option<Messages>,

    // Amount of output.
    pub(super) max_tokens: Option<i64>,
    pub(super) max_completion_tokens: Option<i64>,
    pub(super) n: Option<i64>,
    pub(super) best_of: Option<i64>,

    // Sampling.
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) top_k: Option<i64>,
    pub(super) min_p: Option<f64>,
    pub(super) seed: Option<Seed>,
    pub(super) presence_penalty: Option<f64>,
    pub(super) frequency_penalty: Option<f64>,
    pub(super) repetition_penalty: Option<f64>,
    pub(super) logit_bias: Option<LogitBias>,

    // End of a choice.
    pub(super) stop: Option<Strings>,
    pub(super) stop_token_ids: Option<Vec<u32>>,
    pub(super) min_tokens: Option<i64>,
    pub(super) ignore_eos: Option<bool>,

    // Construction of the prompt.
    pub(super) add_special_tokens: Option<bool>,
    pub(super) add_generation_prompt: Option<bool>,

    // Content of the answer.
    pub(super) echo: Option<bool>,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) top_logprobs: Option<i64>,
    pub(super) stream: Option<bool>,
    pub(super) stream_options: Option<Object<StreamOptions>>,
    pub(super) return_token_ids: Option<bool>,
    pub(super) skip_special_tokens: Option<bool>,
    /// Remoe's own field: adds the request's figures to the usage.
    pub(super) include_figures: Option<bool>,

    // Scheduling.
    pub(super) priority: Option<String>,
    pub(super) queue_deadline: Option<String>,

    // Tools.
    pub(super) tools: Option<Tools>,
    pub(super) tool_choice: Option<ToolChoice>,
    pub(super) parallel_tool_calls: Option<bool>,

    // Thoughts, and variables of the chat template.
    pub(super) reasoning_effort: Given,
    pub(super) reasoning: Option<Object<Reasoning>>,
    pub(super) enable_thinking: Option<bool>,
    pub(super) thinking_token_budget: Option<i64>,
    pub(super) chat_template_kwargs: Option<Json>,

    // Structure of the answer.
    pub(super) response_format: Option<Object<ResponseFormat>>,
    pub(super) structured_outputs: Option<Object<StructuredOutputs>>,
    pub(super) guided_json: Option<Json>,
    pub(super) guided_regex: Option<String>,
    pub(super) guided_choice: Option<Vec<String>>,
    pub(super) guided_grammar: Option<String>,
    pub(super) guided_whitespace_pattern: Option<String>,

    // Fields that are refused if they demand anything.
    pub(super) functions: Given,
    pub(super) function_call: Given,
    pub(super) modalities: Option<Vec<String>>,
    pub(super) audio: Given,
    pub(super) web_search_options: Given,
    pub(super) use_beam_search: Given,
    pub(super) include_stop_str_in_output: Given,
    pub(super) truncate_prompt_tokens: Given,
    pub(super) allowed_token_ids: Given,
    pub(super) bad_words: Given,
    pub(super) prompt_embeds: Given,
    pub(super) prompt_logprobs: Option<i64>,
    pub(super) chat_template: Given,
    pub(super) continue_final_message: Given,
    pub(super) documents: Given,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamOptions {
    pub(super) include_usage: Option<bool>,
    pub(super) continuous_usage_stats: Given,
}
