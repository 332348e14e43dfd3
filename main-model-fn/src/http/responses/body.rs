//! Body of `/v1/responses`, and refusal of unsupported fields.

use super::item::Input;
use crate::http::fields::{Given, Json, Object, Seed};
use crate::http::tools::Tools;
use crate::http::unsupported::unsupported;
use remoe_proto::ServiceError;
use serde::Deserialize;
use serde_json::Value;

/// Most entries of `metadata`, and most bytes of a name and of a value, as in OpenAI's API.
const METADATA: (usize, usize, usize) = (16, 64, 512);

/// Value of `include` that has no effect: reasoning is not encrypted, so nothing is added.
const INCLUDED: &str = "reasoning.encrypted_content";
/// Longest text that an answer repeats, in bytes.
const MAX_REPEATED_BYTES: usize = 512;

/// Fields of a request; unknown fields are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(in crate::http) struct ResponsesBody {
    pub(super) model: Option<String>,
    pub(super) input: Option<Input>,
    pub(super) instructions: Option<String>,
    pub(super) max_output_tokens: Option<i64>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) tools: Option<Tools>,
    pub(super) tool_choice: Option<Json>,
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) text: Option<Object<TextOptions>>,
    pub(super) reasoning: Option<Object<ReasoningOptions>>,
    pub(super) stream: Option<bool>,
    pub(super) previous_response_id: Option<String>,

    // Remoe's own fields, as in chats.
    pub(super) priority: Option<String>,
    pub(super) queue_deadline: Option<String>,
    pub(super) seed: Option<Seed>,
    pub(super) top_k: Option<i64>,
    pub(super) min_p: Option<f64>,
    pub(super) enable_thinking: Option<bool>,
    pub(super) thinking_token_budget: Option<i64>,
    pub(super) chat_template_kwargs: Option<Json>,

    // Fields that the answer repeats.
    pub(super) metadata: Option<Json>,
    pub(super) store: Option<bool>,
    pub(super) user: Option<String>,

    // Fields that are refused if they demand anything.
    include: Option<Vec<String>>,
    truncation: Option<String>,
    service_tier: Option<String>,
    background: Given,
    conversation: Given,
    prompt: Given,
    context_management: Given,
    max_tool_calls: Given,
    top_logprobs: Option<i64>,
}

/// Field `text`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TextOptions {
    pub(super) format: Option<Object<TextFormat>>,
    verbosity: Option<String>,
}

/// Field `text.format`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TextFormat {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) name: Option<String>,
    pub(super) schema: Option<Json>,
    pub(super) strict: Option<bool>,
}

/// Field `reasoning`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ReasoningOptions {
    pub(super) effort: Option<String>,
    /// No effect: answers contain the reasoning itself.
    pub(super) summary: Option<String>,
}

impl ResponsesBody {
    /// Refuses fields that would change the answer and are unsupported.
    ///
    /// # Errors
    /// Fails with the first such field.
    pub(super) fn refuse(&mut self, is_resolved: bool) -> Result<(), ServiceError> {
        if self.previous_response_id.is_some() && !is_resolved {
            let message = "`previous_response_id` needs a gateway, which stores responses; send all items as \
                           `input` instead";
            return Err(ServiceError::invalid("previous_response_id", message));
        }
        for (name, given) in [
            ("background", &self.background),
            ("conversation", &self.conversation),
            ("prompt", &self.prompt),
            ("context_management", &self.context_management),
            ("max_tool_calls", &self.max_tool_calls),
        ] {
            if *given != Given::Nothing {
                return Err(unsupported(name));
            }
        }
        if self.top_logprobs.is_some_and(|count| count != 0) {
            return Err(unsupported("top_logprobs"));
        }
        for (name, value, allowed) in [
            ("truncation", &self.truncation, &["disabled"][..]),
            ("service_tier", &self.service_tier, &["auto", "default"]),
            ("text.verbosity", &self.text.as_ref().and_then(|text| text.0.verbosity.clone()), &["medium"]),
        ] {
            expect_one_of(name, value.as_deref(), allowed)?;
        }
        let summary = self.reasoning.as_ref().and_then(|reasoning| reasoning.0.summary.as_ref());
        let format = self.text.as_ref().and_then(|text| text.0.format.as_ref());
        for (name, repeated) in [
            ("user", self.user.as_ref()),
            ("reasoning.summary", summary),
            ("text.format.name", format.and_then(|format| format.0.name.as_ref())),
        ] {
            if let Some(bytes) = repeated.map(String::len).filter(|bytes| *bytes > MAX_REPEATED_BYTES) {
                let message =
                    format!("invalid `{name}`: expected at most {MAX_REPEATED_BYTES} bytes, got {bytes}");
                return Err(ServiceError::invalid(name, message));
            }
        }
        for (index, included) in self.include.iter().flatten().enumerate() {
            expect_one_of(&format!("include[{index}]"), Some(included), &[INCLUDED])?;
        }
        check_metadata(self.metadata.as_ref())
    }
}

/// Checks that `value` is absent or one of `allowed`.
///
/// # Errors
/// Fails if it is another value.
fn expect_one_of(name: &str, value: Option<&str>, allowed: &[&str]) -> Result<(), ServiceError> {
    match value {
        Some(value) if !allowed.contains(&value) => {
            let message = format!("unsupported `{name}`: expected {}, got {value:?}", allowed.join(" or "));
            Err(ServiceError::invalid(name, message))
        }
        _ => Ok(()),
    }
}

fn check_metadata(metadata: Option<&Json>) -> Result<(), ServiceError> {
    let (entries, name, value) = METADATA;
    let is_good = match metadata {
        None | Some(Json(Value::Null)) => true,
        Some(Json(Value::Object(map))) => {
            let fits = |(key, text): (&String, &Value)| {
                key.len() <= name && text.as_str().is_some_and(|text| text.chars().count() <= value)
            };
            map.len() <= entries && map.iter().all(fits)
        }
        Some(_) => false,
    };
    if is_good {
        return Ok(());
    }
    let message = format!(
        "invalid `metadata`: expected at most {entries} names of {name} bytes with texts of {value} characters"
    );
    Err(ServiceError::invalid("metadata", message))
}
