//! Kubernetes operator: turns `MoEDeployment` resources into pods, Services and routing generations.
//!
//! One reconcile is a fixed sequence of stages (see [`reconcile`]): [`read`], [`resolve`], [`plan`], [`scale`],
//! [`build`], [`diff`], [`apply`], [`status`]. The stages from resolve to diff are pure ([`decide`]). The operator's
//! own state ([`soft_state`]) may be lost at any time: after an interruption, the next reconcile rebuilds everything
//! from the cluster. Main functions are polled outside of reconciles ([`main_pollers`]).

// Stages in order, and the modules that connect them.
mod reconcile;

mod decide;
mod inputs;
mod observed;
mod soft_state;

mod read;

mod resolve;

mod plan;

mod scale;

mod build;

mod diff;

mod apply;

mod status;

// Modules that the stages use.
mod altered;
mod backoff;
mod billed_pods;
mod conditions;
mod cooldown;
mod deployment_policy;
mod digest;
mod drift;
mod epoch;
mod events;
mod exposure;
mod facts;
mod fleet;
mod identity;
mod inspection;
mod legacy_records;
mod main_client;
mod manifests;
mod missing_inputs;
mod names;
mod one_shot;
mod ownership;
mod planning;
mod pod_comparison;
mod pods;
mod ports;
mod profiling;
mod quantity;
mod records;
mod replacement;
mod rollout;
mod rollout_turn;
mod routing;
mod source;
mod source_policy;
mod status_issue;
mod trace_collector;
mod usage;
mod write;

// Process: API client, controller, background tasks and settings.
mod api;
mod controller;
mod gateways;
mod lease;
mod main_pollers;
mod metrics;
mod planning_pool;
mod run;
mod serve;
mod settings;
mod start_probes;
mod term;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod testing;
#[cfg(test)]
mod tests;

pub use identity::SignerName;
pub use run::{RunError, run};
pub use settings::{Command, RunSettings, Settings};
