//! What a chat does to its answer where that may call, or has more than one voice: the grammar that it must match,
//! and who reads it.

use super::asked::{Asked, Function, Mode};
use super::format::Format;
use super::grammar::Rules;
use super::reader::Reader;
use crate::grammar::{Source, inline_schema};
use crate::http::structured::Structure;
use remoe_wire::ServiceError;
use std::fmt::Write;

/// Functions that may be called, if any, and how the model does that.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::http) struct Calls {
    pub(in crate::http) format: Format,
    pub(in crate::http) asked: Asked,
}

impl Calls {
    /// One for each of `choices`.
    pub(in crate::http) fn readers(&self, choices: usize) -> impl Iterator<Item = Reader> {
        (0..choices).map(|_| Reader::new(self.format, self.asked.clone()))
    }

    /// What an answer must match: calls where they are required; where the model decides, `answer` or calls,
    /// right ones of functions that are strict, and one where they may not be parallel. `special` gives the id of
    /// a text that is a special token.
    ///
    /// # Errors
    /// What of a function's parameters is not supported, or an `answer` beside which there can be no calls,
    /// by name.
    pub(in crate::http) fn structure(
        &self,
        answer: Option<Structure>,
        special: impl Fn(&str) -> Option<u32>,
    ) -> Result<Option<Structure>, ServiceError> {
        let Asked { functions, mode, parallel, .. } = &self.asked;
        let is_free = *mode == Mode::Auto;
        let inline = match &answer {
            None => None,
            Some(answer) => match answer.source.inline().filter(|_| is_free) {
                Some(inline) => Some(inline),
                // It is said without any head.
                None if functions.is_empty() => return Ok(Some(answer.clone())),
                None => {
                    let message = format!("cannot combine `{}` with these `tools`", answer.field);
                    return Err(ServiceError::invalid(&answer.field, message));
                }
            },
        };
        let is_bound =
            !functions.is_empty() && (!parallel || functions.iter().any(|function| function.strict));
        if is_free && inline.is_none() && !is_bound {
            return Ok(None);
        }
        let mut rules = Rules { calls: self, special: &special }.start(is_free, inline.as_deref());
        let first = rules.lines().count() + 1;
        for (index, function) in functions.iter().enumerate() {
            // Cannot fail: it is memory.
            let _written = writeln!(rules, "arguments_{index}: %json {}", arguments(function, is_free)?);
        }
        let source = Source::calls(rules, (first..).zip(functions.iter().map(parameters)).collect())
            .map_err(|message| ServiceError::invalid("tools", format!("`tools`: {message}")))?;
        let field = answer.filter(|_| functions.is_empty()).map_or_else(|| "tools".to_owned(), |it| it.field);
        Ok(Some(Structure { source, field }))
    }
}

/// Where a request has the schema of a function's arguments.
fn parameters(function: &Function) -> String {
    format!("tools[{}].function.parameters", function.place)
}

/// The schema of a function's arguments.
fn arguments(function: &Function, is_free: bool) -> Result<String, ServiceError> {
    let field = parameters(function);
    // The model is free to get it wrong where nobody asked for more.
    let parameters = function.parameters.clone().filter(|_| !is_free || function.strict);
    inline_schema(parameters)
        .map_err(|message| ServiceError::invalid(&field, format!("`{field}`: {message}")))
}
