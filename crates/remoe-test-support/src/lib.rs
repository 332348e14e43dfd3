//! Support for end-to-end tests with the real binaries: functions as child processes, their control interface, HTTP,
//! metrics, a recording proxy of remote functions, and generated checkpoints.
//!
//! Helpers panic instead of returning errors: a failed step ends the test with a message that names it. Every wait
//! has a deadline.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

pub mod binaries;
pub mod checkpoint;
pub mod collector;
pub mod command;
pub mod control;
pub mod deadline;
pub mod expert_stream;
pub mod fake;
pub mod fixture;
pub mod function;
pub mod guide;
pub mod hostile;
pub mod hostile_answers;
pub mod http;
pub mod load_clients;
pub mod main_http;
pub mod many_experts;
pub mod metrics;
pub mod once;
pub mod placement;
pub mod process;
pub mod raw;
pub mod realm;
pub mod recorder;
pub mod scenes;
pub mod stranger;
pub mod unfinished;
pub mod up;
