//! Tests of the planner, in one program.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr, clippy::unwrap_used)]

mod alive;
mod bad_input;
mod concurrency;
mod context;
mod cost_of_alive;
mod engine;
mod exhaustive;
mod flips;
mod generate;
mod latency;
mod misestimated;
mod one_machine;
mod properties;
mod quota;
mod replan;
mod scaling_group;
mod sleepers;
mod unknown_fields;
mod worked;
