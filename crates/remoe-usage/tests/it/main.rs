//! Tests of foresight, in one program.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod bounded;
mod exchange;
mod foresight;
mod model;
mod primer;
mod prior;
mod store;
mod watch;
