//! The tests that need a real cluster. They run in one process, because they share one release of the chart; a name like
//! `demo::` chooses the tests of a module.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod demo;
mod deployments;
mod election;
mod follows;
mod gateway;
mod identity;
mod images;
mod ledger;
mod mission;
mod namespaces;
mod operator;
mod partition;
mod profile;
mod scales;
mod sources;
mod upgrade;
mod wakes;
