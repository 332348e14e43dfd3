//! Checks of the workspace's structure: modules and crates have no circular dependencies, folders are named as their
//! packages, and the picture of the crates in ARCHITECTURE.md is current.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod crates;
mod graph;
mod modules;
