//! The engine with continuous batching: one thread that owns the model, its KV cache and the connections to remote
//! experts.
//!
//! Callers hand in requests through [`EngineHandle`] and hear events back. The thread repeats: admit what fits; one
//! forward for all sequences that decode, a token drawn for each; then prompts go on through the layers for as long
//! as the target inter-token latency allows (layered prefill). Which prompt goes on is decided in [`scheduler`], how
//! long in [`pace`].

mod choice;
mod draw;
mod failure_backoff;
mod handle;
mod pace;
mod page_reservation;
mod random;
pub mod request;
mod sampling;
mod scheduler;
mod sequence;
mod softmax;
mod spans;
mod switch;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
mod text_stream;
mod thought;
mod thread;

pub use handle::{EngineHandle, Events, RequestLimits};
pub(crate) use sequence::Vocabulary;
pub(crate) use switch::Switch;
pub(crate) use thread::{EngineParts, EngineSettings, EngineStop, start};
