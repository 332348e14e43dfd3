//! The Kubernetes side: its pure modules, and, where `REMOE_E2E_KUBECONFIG` names a cluster, its dealings
//! with a real API server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

mod account;
mod alike;
mod api;
mod build;
mod conversations;
mod crash;
mod crds;
mod deletion;
mod example;
mod extras;
mod faults;
mod following;
mod groups;
mod hostile;
mod inspection;
mod line;
mod load;
mod neighbours;
mod paid;
mod planning;
mod pods;
mod poison;
mod profiling;
mod proxy;
mod resting;
mod rollout;
mod scaling;
#[path = "../../../launcher/tests/scenes/mod.rs"]
mod scenes;
mod sleeping;
mod specs;
mod spoiled;
mod stage;
mod status;
mod stored;
mod tenants;
mod told;
mod verbs;
mod world;
