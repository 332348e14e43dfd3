//! The engine with continuous batching: one thread that owns the model, its KV cache and the connections to remote
//! experts.
//!
//! Callers submit requests through [`EngineHandle`] and receive events. The thread repeats three steps:
//!
//! 1. It admits waiting requests for which there are pages and batch slots.
//! 2. One forward computes all decoding sequences, and a token is sampled for each.
//! 3. Prompts advance through the layers for as long as the target inter-token latency allows (layered prefill).
//!    [`scheduler`] decides which prompt, [`pace`] how long.
mod active_request;
mod choice;
mod draw;
mod failure_backoff;
mod handle;
mod iteration_rows;
mod pace;
mod page_reservation;
mod random;
pub mod request;
mod request_spans;
mod sampling;
mod scheduler;
mod softmax;
mod switch;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
mod text_stream;
mod thought;
mod thread;
mod token_step;

pub(crate) use active_request::Vocabulary;
pub use handle::{EngineHandle, Events, RequestLimits};
pub(crate) use switch::Switch;
pub(crate) use thread::{EngineParts, EngineSettings, EngineStop, start};
