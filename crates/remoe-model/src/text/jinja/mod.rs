//! Jinja2 as transformers sets it up for chat templates: `ImmutableSandboxedEnvironment` with `trim_blocks`,
//! `lstrip_blocks`, loop controls and the `generation` tag.
//!
//! The modules follow the files of Jinja2 3.1, with Python's values, operators, filters and methods. Each text and
//! list is charged to the limits of a rendering before it is built (`limits.rs`). As in the sandbox, a template cannot
//! modify a list or a dictionary.

mod access;
mod ast;
mod calls;
mod error;
mod evaluate;
mod expressions;
mod filters;
mod format;
mod free_variables;
mod json;
mod lexer;
mod limits;
mod methods;
mod number_format;
mod objects;
mod operators;
mod parser;
mod predicates;
mod python_text;
mod renderer;
mod value;

use std::collections::HashMap;

use serde_json::Value as Json;

pub(super) use ast::Template;
pub(super) use error::Error;
pub(super) use free_variables::free_variables;
pub(super) use parser::parse;

/// Renders `template` with the variables of `context`; of several with the same name, the last one counts.
///
/// # Errors
/// The template fails, raises an exception, or exceeds the limits of a rendering.
pub(super) fn render(template: &Template, context: &[(&str, Json)]) -> Result<String, Error> {
    let values: HashMap<_, _> =
        context.iter().map(|(name, json)| ((*name).into(), value::Value::from_json(json))).collect();
    renderer::render(template, values)
}
