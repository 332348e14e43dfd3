//! Tests of the launcher, in one program.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr, clippy::unwrap_used, unreachable_pub)]

mod cgroup;
mod decide;
mod decide_over_time;
mod fixtures;
mod hostile;
mod placement;
mod process;
mod remote_groups;
mod shared_scenarios;
mod supervise;

remoe_test_support::fake_function!();
