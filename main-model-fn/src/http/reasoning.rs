//! Request fields about thoughts (reasoning): effort, budget, and variables of the chat template.

use super::fields::{Given, Json, Object};
use super::request_body::RequestBody;
use super::text_frontend::TextFrontend;
use super::tools::{Dialect, Opening, Thinking};
use crate::engine::request::ThoughtBudget;
use remoe_proto::ServiceError;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Efforts that OpenAI's clients send.
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
/// Template variables that switch thoughts on and off.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
/// Template variable of the effort.
const EFFORT: &str = "reasoning_effort";

/// Most variables of a request.
const MAX_VARIABLES: usize = 64;
/// Most bytes of all variables as JSON.
const MAX_VARIABLE_BYTES: usize = 64 << 10;
/// Largest budget in tokens.
const MAX_BUDGET: i64 = 1 << 20;

/// Field `reasoning` of a request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Reasoning {
    effort: Given,
    enabled: Option<bool>,
    max_tokens: Option<i64>,
}

/// Unchecked fields about thoughts.
#[derive(Debug, Default)]
pub(super) struct ReasoningFields {
    pub(super) reasoning_effort: Given,
    pub(super) reasoning: Option<Object<Reasoning>>,
    pub(super) enable_thinking: Option<bool>,
    pub(super) thinking_token_budget: Option<i64>,
    pub(super) chat_template_kwargs: Option<Json>,
}

/// Checked fields about thoughts.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ReasoningOptions {
    /// Variables of the chat template.
    pub(super) variables: Map<String, Value>,
    pub(super) effort: Option<&'static str>,
    /// Most tokens of a thought.
    budget: Option<usize>,
}

impl ReasoningOptions {
    /// Takes the fields of a chat's `body`, and checks them against the template of `text`. `defaults` are the deployment's
    /// variables.
    ///
    /// # Errors
    /// Fails if a field is invalid, or if the template does not read it.
    pub(super) fn take(
        body: &mut RequestBody,
        text: &dyn TextFrontend,
        dialect: &Dialect,
        defaults: &Map<String, Value>,
    ) -> Result<Self, ServiceError> {
        let fields = ReasoningFields {
            reasoning_effort: std::mem::take(&mut body.reasoning_effort),
            reasoning: body.reasoning.take(),
            enable_thinking: body.enable_thinking.take(),
            thinking_token_budget: body.thinking_token_budget.take(),
            chat_template_kwargs: body.chat_template_kwargs.take(),
        };
        Self::new(fields, text, dialect, defaults)
    }

    /// Checks `fields` as [`take`](Self::take) does.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub(super) fn new(
        fields: ReasoningFields,
        text: &dyn TextFrontend,
        dialect: &Dialect,
        defaults: &Map<String, Value>,
    ) -> Result<Self, ServiceError> {
        let Object(reasoning) = fields.reasoning.unwrap_or_else(|| Object(Reasoning::default()));
        let mut options = Self { variables: defaults.clone(), ..Self::default() };
        for (name, value) in variables(fields.chat_template_kwargs)? {
            if !text.reads(&name) {
                let field = format!("chat_template_kwargs.{name}");
                let message = format!(
                    "unsupported `{field}`: the model's chat template does not read `{name}`; omit it"
                );
                return Err(ServiceError::invalid(field, message));
            }
            options.variables.insert(name, value);
        }
        for (field, given) in [(EFFORT, fields.reasoning_effort), ("reasoning.effort", reasoning.effort)] {
            if let Some(effort) = effort(field, &given)? {
                options.set_effort(field, effort, text, dialect)?;
            }
        }
        for (field, is_on) in
            [("enable_thinking", fields.enable_thinking), ("reasoning.enabled", reasoning.enabled)]
        {
            if let Some(is_on) = is_on {
                options.switch(field, is_on, text, dialect)?;
            }
        }
        for (field, budget) in [
            ("thinking_token_budget", fields.thinking_token_budget),
            ("reasoning.max_tokens", reasoning.max_tokens),
        ] {
            if let Some(budget) = budget {
                options.set_budget(field, budget, dialect)?;
            }
        }
        Ok(options)
    }

    /// Returns the thoughts that an answer to `prompt` may begin with.
    pub(super) fn thinking(&self, dialect: &Dialect, prompt: &str) -> Thinking {
        let thoughts = dialect.thoughts?;
        let opening = match thoughts.opening(prompt) {
            Opening::Possible if self.is_off() => Opening::Closed,
            opening => opening,
        };
        Some((thoughts, opening))
    }

    /// Returns the budget of the answer's thought, if the request sets one and the answer may think.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot encode the end of a thought.
    pub(super) fn thought_budget(
        &self,
        dialect: &Dialect,
        thinking: Thinking,
        text: &dyn TextFrontend,
    ) -> Result<Option<ThoughtBudget>, ServiceError> {
        let Some(tokens) = self.budget else { return Ok(None) };
        let (open, close) = match thinking {
            Some((_, Opening::Closed)) => return Ok(None),
            Some((thoughts, Opening::Open)) => (None, thoughts.close),
            Some((thoughts, Opening::Possible)) => (Some(thoughts.open), thoughts.close),
            None if dialect.format.is_harmony() => (Some("<|channel|>analysis<|message|>"), "<|end|>"),
            None => return Ok(None),
        };
        let close_ids = match text.token_id(close) {
            Some(id) => vec![id],
            None => text.encode(close, false)?,
        };
        Ok(Some(ThoughtBudget { tokens, open, close, close_ids: close_ids.into() }))
    }

    /// Reports if the template variables switch thoughts off.
    fn is_off(&self) -> bool {
        SWITCHES.iter().any(|name| self.variables.get(*name) == Some(&Value::Bool(false)))
    }

    /// Sets the effort by the variables that the template reads.
    fn set_effort(
        &mut self,
        field: &str,
        effort: &'static str,
        text: &dyn TextFrontend,
        dialect: &Dialect,
    ) -> Result<(), ServiceError> {
        let has_switch = SWITCHES.iter().any(|name| text.reads(name));
        if text.reads(EFFORT) {
            // The request overrides the deployment's default.
            self.variables.shift_remove(EFFORT);
            self.effort = Some(effort);
            if !has_switch {
                return Ok(());
            }
        } else if effort != "none" && !has_switch {
            // Without a switch, the template has no degrees of effort either.
            return Err(not_read(field));
        }
        self.switch(field, effort != "none", text, dialect)
    }

    /// Switches thoughts on or off by the variables that the template reads.
    fn switch(
        &mut self,
        field: &str,
        is_on: bool,
        text: &dyn TextFrontend,
        dialect: &Dialect,
    ) -> Result<(), ServiceError> {
        // A template may read one variable if the other is absent, so both get the same value.
        let mut has_switch = false;
        for name in SWITCHES.into_iter().filter(|name| text.reads(name)) {
            self.variables.insert(name.to_owned(), is_on.into());
            has_switch = true;
        }
        // Without a switch, a model with thoughts always thinks, and others never do.
        if has_switch || is_on == dialect.may_think() {
            return Ok(());
        }
        Err(not_read(field))
    }

    /// Sets the budget of the thought.
    fn set_budget(&mut self, field: &str, budget: i64, dialect: &Dialect) -> Result<(), ServiceError> {
        if !dialect.may_think() {
            let message =
                format!("unsupported `{field}`: the model's chat template has no thoughts; omit it");
            return Err(ServiceError::invalid(field, message));
        }
        match usize::try_from(budget) {
            Ok(tokens) if (1..=MAX_BUDGET).contains(&budget) => {
                self.budget = Some(tokens);
                Ok(())
            }
            _ => {
                let message = format!("invalid `{field}`: expected 1 to {MAX_BUDGET} tokens, got {budget}");
                Err(ServiceError::invalid(field, message))
            }
        }
    }
}

/// Returns the error for a field that the template does not read.
fn not_read(field: &str) -> ServiceError {
    let [first, second] = SWITCHES;
    let message = format!(
        "unsupported `{field}`: the model's chat template reads none of {EFFORT}, {first} and {second}; omit it"
    );
    ServiceError::invalid(field, message)
}

/// Parses an effort.
fn effort(field: &str, given: &Given) -> Result<Option<&'static str>, ServiceError> {
    let found = match given {
        Given::Nothing => return Ok(None),
        Given::Text(text) => EFFORTS.into_iter().find(|effort| effort == text),
        Given::Something => None,
    };
    found.map(Some).ok_or_else(|| {
        let message = format!("invalid `{field}`: expected one of {}", EFFORTS.join(", "));
        ServiceError::invalid(field, message)
    })
}

/// Checks the field `chat_template_kwargs`.
fn variables(given: Option<Json>) -> Result<Map<String, Value>, ServiceError> {
    const FIELD: &str = "chat_template_kwargs";
    let Some(Json(value)) = given else { return Ok(Map::new()) };
    check_variables(value)
        .map_err(|message| ServiceError::invalid(FIELD, format!("invalid `{FIELD}`: {message}")))
}

/// Checks variables of a chat template.
///
/// # Errors
/// Fails if `value` is no object, is too large, or names a variable that other fields set.
pub(crate) fn check_variables(value: Value) -> Result<Map<String, Value>, String> {
    let variables = match value {
        Value::Null => return Ok(Map::new()),
        Value::Object(variables) => variables,
        _ => return Err("expected an object".to_owned()),
    };
    if variables.len() > MAX_VARIABLES {
        return Err(format!("expected at most {MAX_VARIABLES} variables, got {}", variables.len()));
    }
    for name in ["messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"] {
        if variables.contains_key(name) {
            return Err(format!("`{name}` cannot be set here"));
        }
    }
    let bytes = Value::Object(variables.clone()).to_string().len();
    if bytes > MAX_VARIABLE_BYTES {
        return Err(format!("expected at most {MAX_VARIABLE_BYTES} bytes, got {bytes}"));
    }
    Ok(variables)
}
