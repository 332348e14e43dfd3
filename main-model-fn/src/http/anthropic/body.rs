//! Body of `/v1/messages`, and refusal of unsupported fields.

use super::block::{Content, Messages};
use crate::http::fields::{Given, Json, Object, Seed};
use crate::http::tools::Tools;
use crate::http::unsupported::unsupported;
use remoe_proto::ServiceError;
use serde::Deserialize;
use serde_json::Value;

/// Fields of a request; unknown fields are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(in crate::http) struct MessagesBody {
    pub(super) model: Option<String>,
    pub(super) messages: Option<Messages>,
    pub(super) system: Option<Content>,
    pub(super) max_tokens: Option<i64>,
    pub(super) stop_sequences: Option<Vec<String>>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) top_k: Option<i64>,
    pub(super) tools: Option<Tools>,
    pub(super) tool_choice: Option<Object<ToolChoice>>,
    pub(super) thinking: Option<Object<Thinking>>,
    pub(super) output_config: Option<Object<OutputConfig>>,
    pub(super) stream: Option<bool>,

    // Remoe's own fields, as in chats.
    pub(super) priority: Option<String>,
    pub(super) queue_deadline: Option<String>,
    pub(super) seed: Option<Seed>,

    // Fields that are refused if they demand anything.
    container: Given,
    mcp_servers: Given,
    context_management: Option<Json>,
}

/// Field `tool_choice`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ToolChoice {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) name: Option<String>,
    pub(super) disable_parallel_tool_use: Option<bool>,
}

/// Field `thinking`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Thinking {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) budget_tokens: Option<i64>,
    display: Option<String>,
}

/// Field `output_config`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct OutputConfig {
    pub(super) effort: Option<String>,
    pub(super) format: Option<Object<OutputFormat>>,
}

/// Field `output_config.format`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct OutputFormat {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) schema: Option<Json>,
}

impl MessagesBody {
    /// Refuses fields that would change the answer and are unsupported.
    ///
    /// # Errors
    /// Fails with the first such field.
    pub(super) fn refuse(&self) -> Result<(), ServiceError> {
        for (name, given) in [("container", &self.container), ("mcp_servers", &self.mcp_servers)] {
            if *given != Given::Nothing {
                return Err(unsupported(name));
            }
        }
        if self.context_management.as_ref().is_some_and(|Json(edits)| changes_context(edits)) {
            return Err(unsupported("context_management"));
        }
        match &self.thinking {
            Some(Object(thinking)) => thinking.check(),
            None => Ok(()),
        }
    }
}

/// Reports if `edits` remove anything from the context. Clients also send edits that keep everything.
fn changes_context(edits: &Value) -> bool {
    let keeps_all = |edit: &Value| edit.get("keep").is_some_and(|keep| keep == "all");
    match edits.get("edits") {
        None | Some(Value::Null) => false,
        Some(Value::Array(edits)) => !edits.iter().all(keeps_all),
        Some(_) => true,
    }
}

impl Thinking {
    fn check(&self) -> Result<(), ServiceError> {
        if !matches!(self.kind.as_deref(), Some("enabled" | "disabled" | "adaptive")) {
            let message = format!(
                "invalid `thinking.type`: expected enabled, disabled or adaptive, got {:?}",
                self.kind.as_deref().unwrap_or_default()
            );
            return Err(ServiceError::invalid("thinking.type", message));
        }
        if let Some(tokens) = self.budget_tokens.filter(|tokens| *tokens < 1) {
            let message = format!("invalid `thinking.budget_tokens`: expected at least 1, got {tokens}");
            return Err(ServiceError::invalid("thinking.budget_tokens", message));
        }
        match self.display.as_deref() {
            None | Some("summarized") => Ok(()),
            Some(_) => Err(unsupported("thinking.display")),
        }
    }
}
