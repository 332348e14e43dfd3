//! Tests of the `remoe` command, in one program.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod check;
mod commands;
mod device;
mod eval;
mod machine;
mod nodes;
mod plan;
mod predictor;
mod schema;

remoe_test_support::fake_function!();
