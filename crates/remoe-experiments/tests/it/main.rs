//! Tests of the experiments, in one program.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod golden;
mod map;
mod regret;
mod shapes;
mod strategies;
