//! Jinja2 as transformers sets it up for chat templates: `ImmutableSandboxedEnvironment` with `trim_blocks`,
//! `lstrip_blocks`, loop controls and the `generation` tag.
//!
//! It follows Jinja2 3.1 file by file, with Python's values, operators, filters and methods below it. All that a
//! rendering builds is counted before it is there (`limits.rs`). Nothing that a template can write changes a list
//! or an object, as in the sandbox.

mod access;
mod ast;
mod calls;
mod error;
mod evaluate;
mod expressions;
mod filters;
mod format;
mod json;
mod lexer;
mod limits;
mod machine;
mod methods;
mod number_format;
mod objects;
mod operators;
mod parser;
mod print;
mod reads;
mod tests;
mod value;

use std::collections::HashMap;

use serde_json::Value as Json;

pub(super) use ast::Template;
pub(super) use error::Error;
pub(super) use parser::parse;
pub(super) use reads::variables;

/// Renders `template` with the variables of `context`, a later one of a name in place of an earlier one.
///
/// # Errors
/// The template fails or raises, or takes more than a rendering may.
pub(super) fn render(template: &Template, context: &[(&str, Json)]) -> Result<String, Error> {
    let values: HashMap<_, _> =
        context.iter().map(|(name, json)| ((*name).into(), value::Value::from_json(json))).collect();
    machine::render(template, values)
}
