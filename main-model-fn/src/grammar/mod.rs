//! Structured output: computes a mask over the vocabulary before each token is sampled.
//!
//! ```text
//! a request's schema, regex, choices or Lark grammar -> source (checked; keywords refused by name)
//!   -> compiler (separate threads, time limit, cache) -> Grammar -> GrammarProgress, one per choice:
//!      a mask before each token, a step after it
//! ```
//!
//! The grammars are llguidance's; only this module uses that library.

mod compiler;
mod finite;
mod multiple;
mod progress;
mod schema;
mod source;
mod vocabulary;
mod warning;
mod whitespace;

pub(crate) use compiler::Compiler;
pub use progress::Grammar;
pub(crate) use progress::{GrammarError, GrammarProgress};
pub(crate) use source::{Inlined, Source, inline_schema, inline_value_schema, quoted};
pub(crate) use vocabulary::Tokens;
pub(crate) use warning::Warnings;
pub(crate) use whitespace::Whitespace;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod cost;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
pub(crate) mod tests;
