//! Structured output: what an answer must match, as a mask over the vocabulary at every draw.
//!
//! ```text
//! a request's schema, regex, choices or Lark grammar -> source (checked, keywords refused by name)
//!   -> compiler (its own threads, bounded in time, cached) -> Grammar -> Progress, one per choice:
//!      mask before a draw, step after it
//! ```
//!
//! Grammars are llguidance's; nothing outside of this folder names it.

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
