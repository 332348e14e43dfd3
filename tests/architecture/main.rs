//! Checks of the workspace's structure: modules and crates depend on each other in one direction, folders are named as
//! their packages, and the picture of the crates in ARCHITECTURE.md is the present one.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod crates;
mod graph;
mod modules;
