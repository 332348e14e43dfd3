//! Cluster in memory, example deployments and hostile tenants, for the tests and the fuzz target `tenant`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, unreachable_pub)]

pub(crate) mod corrupted;
pub(crate) mod example;
pub(crate) mod solutions;
pub mod tenant;
pub(crate) mod world;
