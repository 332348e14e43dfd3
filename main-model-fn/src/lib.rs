//! The main function: the model's non-expert modules, its experts beside them and in remote functions, an
//! OpenAI-compatible HTTP front and a gRPC control interface.
//!
//! ```text
//! http ─┐                  ┌─ transformer ── backend (native, or LibTorch in a crate of its own)
//!       ├─ engine (1 thread)┤
//! control ┘                └─ experts ─┬─ kernels (local)
//!                                      └─ links (remote functions)
//! ```
//!
//! HTTP and control hand requests to the engine's bounded queue and hear events back. The engine's
//! thread owns everything that computes; it forwards the rows of all requests together, token by
//! token, and its own runtime drives the connections to remote functions.

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
