//! The tests that need a real cluster. The tests of a module share one release of the chart. Modules run in a process each
//! (`make e2e-run`), because they would see each other's deployments.
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
