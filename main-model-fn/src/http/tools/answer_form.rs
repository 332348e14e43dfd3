//! Form of a chat's answer: the thoughts, calls and structure that it may have, as grammar and as reader.

use super::callable_tools::{CallableTools, Mode, ToolFunction};
use super::format::Format;
use super::grammar::{Rules, Schema, argument_schema};
use super::reader::ChoiceReader;
use super::thoughts::{Opening, Thinking};
use crate::grammar::{Inlined, Source, Whitespace, inline_schema, inline_value_schema};
use crate::http::structured::Structure;
use remoe_proto::ServiceError;
use serde_json::json;
use std::fmt::Write;

/// Callable tools and thoughts of an answer, and the format of both.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::http) struct AnswerForm {
    pub(in crate::http) format: &'static Format,
    pub(in crate::http) tools: CallableTools,
    pub(in crate::http) thinking: Thinking,
}

impl AnswerForm {
    /// Creates one reader per choice.
    pub(in crate::http) fn readers(&self, choices: usize) -> impl Iterator<Item = ChoiceReader> {
        (0..choices).map(|_| ChoiceReader::new(self.format, self.tools.clone(), self.thinking))
    }

    /// Reports if an answer may begin with a thought, in a format where thoughts are not messages.
    fn may_think(&self) -> bool {
        self.thinking.is_some_and(|(_, opening)| opening != Opening::Closed)
    }

    /// Reports if an answer may have no content.
    pub(in crate::http) fn may_lack_content(&self) -> bool {
        !self.tools.is_empty() || self.may_think() || self.format.is_harmony()
    }

    /// Returns the markers, which the text must contain although they may be special tokens.
    pub(in crate::http) fn markers(&self) -> impl Iterator<Item = &'static str> {
        let calls =
            if self.tools.is_empty() && !self.format.is_harmony() { &[] } else { self.format.markers };
        let thoughts = self.thinking.map(|(thoughts, _)| thoughts.markers());
        calls.iter().copied().chain(thoughts.into_iter().flatten())
    }

    /// Returns the structure behind the thoughts of an answer.
    ///
    /// Required calls must come. If the model decides, the answer matches `answer` or has calls: valid ones of strict
    /// functions, and a single one unless calls may be parallel. `whitespace` applies to arguments. `special` returns the
    /// id of a text that is a special token.
    ///
    /// # Errors
    /// Fails with the function whose parameters are unsupported, or if `answer` cannot be combined with calls.
    pub(in crate::http) fn structure(
        &self,
        answer: Option<Structure>,
        whitespace: &Whitespace,
        special: impl Fn(&str) -> Option<u32>,
    ) -> Result<Option<Structure>, ServiceError> {
        let CallableTools { functions, mode, parallel, .. } = &self.tools;
        let is_free = *mode == Mode::Auto;
        if let Some(answer) = answer.as_ref().filter(|_| !is_free) {
            let message = format!("cannot combine `{}` with these `tools`", answer.field);
            return Err(ServiceError::invalid(&answer.field, message));
        }
        let is_bound =
            !functions.is_empty() && (!parallel || functions.iter().any(|function| function.strict));
        let has_thoughts = self.may_think() || self.format.is_harmony();
        if functions.is_empty() && !has_thoughts {
            return Ok(answer);
        }
        if is_free && answer.is_none() && !is_bound {
            return Ok(None);
        }
        let rule = answer.as_ref().map(|answer| answer.source.rule());
        let rules = Rules::new(self.format, &self.tools, self.thinking, is_free, &special);
        let (mut text, schemas) = rules.write(rule.as_deref());
        let mut fields = Vec::new();
        let mut warnings = answer.as_ref().map(|answer| answer.warnings.clone()).unwrap_or_default();
        for Schema { rule, function, argument } in schemas {
            let Some(function) = functions.get(function) else { continue };
            fields.push((text.lines().count() + 1, parameters(function)));
            let inlined = match &argument {
                None => arguments(function, whitespace, is_free)?,
                Some(key) => argument_of(function, whitespace, key)?,
            };
            // Writing to a String cannot fail.
            let _written = writeln!(text, "{rule}: %json {}", inlined.schema);
            warnings.extend(inlined.warnings.sentences(&parameters(function)));
        }
        let has_client_rules = answer.as_ref().is_some_and(|answer| answer.source.has_client_rules());
        let source = Source::form(text, fields, has_client_rules)
            .map_err(|message| ServiceError::invalid("tools", format!("`tools`: {message}")))?;
        let field = answer.map(|answer| answer.field).filter(|_| functions.is_empty());
        Ok(Some(Structure { source, field: field.unwrap_or_else(|| "tools".to_owned()), warnings }))
    }
}

/// Returns the request field of a function's schema.
fn parameters(function: &ToolFunction) -> String {
    format!("tools[{}].function.parameters", function.place)
}

/// Returns the rules of a function's arguments.
fn arguments(
    function: &ToolFunction,
    whitespace: &Whitespace,
    is_free: bool,
) -> Result<Inlined, ServiceError> {
    // A function that is not strict accepts any arguments.
    let parameters = function.parameters.clone().filter(|_| !is_free || function.strict);
    inline_schema(parameters, whitespace).map_err(|message| unsupported(function, &message))
}

/// Returns the rules of the argument `key` alone.
fn argument_of(function: &ToolFunction, whitespace: &Whitespace, key: &str) -> Result<Inlined, ServiceError> {
    let schema = function.parameters.as_ref().map(|parameters| argument_schema(parameters, key));
    inline_value_schema(schema.unwrap_or_else(|| json!({})), whitespace)
        .map_err(|message| unsupported(function, &message))
}

fn unsupported(function: &ToolFunction, message: &str) -> ServiceError {
    let field = parameters(function);
    ServiceError::invalid(&field, format!("`{field}`: {message}"))
}
