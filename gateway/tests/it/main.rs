//! The program `remoe-gateway` before an API server and main functions that the tests play.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod api;
mod budgets;
mod gateway;
mod hostile;
mod keys;
mod names;
