//! Tests of the operator in a cluster in memory, and, where `REMOE_E2E_KUBECONFIG` names a cluster, of its dealings with a
//! real API server.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

mod account;
mod altered;
mod api_server;
mod billed_pods;
mod build;
mod change_cost;
mod crds;
mod deployment_policy;
mod extras;
mod group_sleep;
mod groups;
mod hostile;
mod inspection;
mod load;
mod main_pollers;
mod planning;
mod pods;
mod profiling;
mod replanning;
mod rollout;
mod rotation;
mod scaling;
mod scene;
mod shared_scenarios;
mod sleeping;
mod source_policy;
mod specs;
mod status;
mod tenants;
mod upgrades;
mod whole_reconcile;
