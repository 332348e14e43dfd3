//! The main function: computes the model outside of its experts and the frequently used experts, calls remote-expert
//! functions for the others, and serves an OpenAI-compatible HTTP API and a gRPC control interface.
//!
//! ```text
//! http ───┐                        ┌─ transformer ── backend (native, or LibTorch in its own crate)
//!         ├─ engine (one thread) ──┤
//! control ┘                        └─ dispatch ─┬─ kernels (local experts)
//!                                               └─ links (remote-expert functions)
//! ```
//!
//! HTTP and control submit requests to the engine's bounded queue and receive events. The engine's thread owns the model
//! and the KV cache. Each of its iterations forwards the rows of all decoding requests together (continuous batching). Its
//! own single-threaded runtime drives the connections to remote functions.

pub mod backend;
mod control;
mod device;
mod dispatch;
pub mod engine;
mod error;
mod grammar;
mod http;
mod loaded;
mod memory;
mod metrics;
pub mod model_text;
mod native;
mod pages;
mod placer;
mod program;
mod records;
mod routing;
mod routing_check;
mod serve;
mod settings;
mod transformer;
mod transition;

pub use backend::{Backend, LoadModelError};
pub use device::{DeviceError, DeviceName};
pub use error::Error;
pub use grammar::Grammar;
#[doc(hidden)]
pub use http::fuzzing as http_fuzzing;
pub use native::Native;
pub use pages::{CacheScope, PageNeeds};
pub use program::main;
pub use routing::{Routed, RoutingRule};
#[doc(hidden)]
pub use routing_check::check_routing;
pub use serve::{Listeners, run};
pub use settings::Settings;
