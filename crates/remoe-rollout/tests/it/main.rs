//! Tests of the launcher, in one program.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr, clippy::unwrap_used, unreachable_pub)]

mod alike;
mod cgroup;
mod decide;
mod decide_over_time;
mod hostile;
mod placement;
mod process;
mod remote_groups;
mod scene;
mod supervise;

remoe_test_support::fake_function!();
