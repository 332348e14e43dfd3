//! Tests of the operator in a cluster in memory, and, where `REMOE_E2E_KUBECONFIG` names a cluster, of its dealings with a
//! real API server.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

mod account;
mod alike;
mod altered;
mod api_server;
mod billed_pods;
mod build;
mod change_cost;
mod crds;
mod deployment_policy;
mod extras;
mod following;
mod groups;
mod hostile;
mod inspection;
mod line;
mod load;
mod main_pollers;
mod planning;
mod pods;
mod profiling;
mod resting;
mod rollout;
mod rotation;
mod scaling;
mod scene;
mod sleeping;
mod source_policy;
mod specs;
mod status;
mod stored;
mod tenants;
