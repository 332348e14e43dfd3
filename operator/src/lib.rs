//! The Kubernetes operator: `MoEDeployment` resources as pods, Services and routing generations.
//!
//! One reconcile is one straight line of stages, which [`reconcile`] draws: [`read`], [`resolve`], [`plan`], [`scale`],
//! [`build`], [`diff`], [`apply`], [`status`]. Those from resolve to diff are pure ([`decide`]). What the operator remembers
//! ([`memory`]) may be lost at any time: a reconcile that was interrupted is repeated from what is in the cluster. Main
//! functions are asked beside it ([`main_pollers`]).

// The stages, in their order, and what joins them.
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

// Parts of the stages.
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
mod pods;
mod ports;
mod profiling;
mod quantity;
mod records;
mod replacement;
mod rewritten;
mod rollout;
mod rollout_turn;
mod routing;
mod source;
mod sources;
mod status_issue;
mod trace_collector;
mod usage;
mod write;

// The process around them.
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
