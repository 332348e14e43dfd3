//! The HTTP front, compatible with OpenAI's APIs and Anthropic's.
//!
//! ```text
//! body -> request_body (types) -> unsupported, sampling, structured, messages (rules) -> chat | completions
//!         responses, anthropic (a chat of the same meaning) -> chat
//!      -> generate: the grammar compiled, engine requests, one per prompt -> running: their events, merged
//!      -> pieces: what each choice gains, calls of tools told apart -> collect (one answer) | stream (SSE)
//!      -> answer_shape: shapes | responses | anthropic (JSON)
//! ```
//!
//! Reading and tokenising happen on blocking threads, a bounded number at a time, small bodies apart
//! from large ones (`lanes`). An answer that is
//! dropped drops its events, which ends the work in the engine; `connections` drops the answers of
//! clients that do not take them.

mod answer_shape;
mod anthropic;
mod auth;
mod body;
mod chat;
mod collect;
mod completions;
mod embeddings;
mod fields;
mod fill_in;
pub mod fuzzing;
mod generate;
mod logprobs;
mod messages;
mod metrics;
mod models;
mod pieces;
mod placement;
mod plan_metrics;
mod primer;
mod reasoning;
mod request_body;
mod responses;
mod router;
mod running;
mod sampling;
mod service;
mod shapes;
mod state;
mod stream;
mod structured;
#[cfg(test)]
mod tests;
mod text_frontend;
mod timing;
mod tokenize;
mod tools;
mod transcript;
mod translated;
mod unsupported;
mod urgency;
mod usage;
mod warning;

pub(crate) use placement::{ActiveGeneration, ModelCard, PlacementView};
pub(crate) use primer::SummarySource;
pub(crate) use reasoning::check_variables;
pub(crate) use router::serve;
pub(crate) use state::{HttpOptions, HttpState};
pub(crate) use text_frontend::TextFrontend;
