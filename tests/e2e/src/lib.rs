//! Foundation of tests on a cluster: the cluster, a namespace per test, the installed chart or an operator beside the
//! cluster, and deployments.
//!
//! The tests run if `REMOE_E2E_KUBECONFIG` names a cluster (`make e2e`, docs/cluster.md); otherwise each reports that
//! it was skipped. Helpers panic instead of returning errors: a failed step ends the test with a message that names
//! it. Every wait has a deadline.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

pub mod audit;
pub mod claim;
pub mod cluster;
pub mod demo;
pub mod deployment;
pub mod figures;
pub mod forward;
pub mod gateway_access;
pub mod gateways;
pub mod host_operator;
mod namespace;
pub mod pod_lives;
pub mod pods;
pub mod policy;
pub mod prometheus;
pub mod release;
pub mod report;
pub mod scene;
pub mod tenant;
pub mod tool;
