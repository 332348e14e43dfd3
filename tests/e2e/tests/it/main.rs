//! Tests that need a real cluster. The tests of a module share one release of the chart. Each module runs in its own
//! process (`make e2e-run`), because modules would see each other's deployments.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod chain;
mod demo;
mod deployments;
mod drawn_keys;
mod election;
mod follows;
mod gateway;
mod guides;
mod identity;
mod images;
mod ledger;
mod mission;
mod namespaces;
mod operator;
mod partition;
mod permissions;
mod profile;
mod scales;
mod sources;
mod tenants;
mod upgrade;
mod wakes;
