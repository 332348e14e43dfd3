//! HTTP API, compatible with OpenAI's and Anthropic's.
//!
//! ```text
//! body -> request_body (types) -> unsupported, sampling, structured, messages (checks) -> chat | completions
//!         responses, anthropic (converted to a chat) -> chat
//!      -> generate: compiles the grammar, creates one engine request per prompt -> running: merges their events
//!      -> pieces: additions to each choice, with tool calls parsed -> collect (one answer) | stream (SSE)
//!      -> answer_shape: shapes | responses | anthropic (JSON)
//! ```
//!
//! Bodies are read and tokenised on blocking threads, a bounded number at a time, small bodies apart from large ones
//! (`remoe_http::Lanes`). A dropped answer drops its events, which cancels its requests in the engine. The connection
//! limits drop the answers of clients that do not read them.

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

pub(crate) use placement::{ModelCard, PlacementView, PublishedGeneration};
pub(crate) use primer::SummarySource;
pub(crate) use reasoning::check_variables;
pub(crate) use router::serve;
pub(crate) use state::{HttpOptions, HttpState};
pub(crate) use text_frontend::TextFrontend;
