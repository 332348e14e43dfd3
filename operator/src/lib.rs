//! The Kubernetes operator: `MoEDeployment` resources as pods, Services and routing generations.
//!
//! One reconcile is one straight line of stages, which [`reconcile`] draws: [`read`], [`resolve`], [`plan`], [`scale`],
//! [`build`], [`diff`], [`apply`], [`status`]. Those from resolve to diff are pure ([`decide`]). What the operator remembers
//! ([`memory`]) may be lost at any time: a reconcile that was interrupted is repeated from what is in the cluster. Main
//! functions are asked beside it ([`conversations`]).

// The stages, in their order, and what joins them.
mod reconcile;

mod decide;
mod inputs;
mod memory;
mod observed;

mod read;

mod resolve;

mod plan;

mod scale;

mod build;

mod diff;

mod apply;

mod status;

// Parts of the stages.
mod allowed;
mod altered;
mod backoff;
mod collector;
mod conditions;
mod cooldown;
mod digest;
mod drift;
mod earlier;
mod epoch;
mod events;
mod exposure;
mod facts;
mod fleet;
mod identity;
mod inspection;
mod mains;
mod manifests;
mod missing_inputs;
mod names;
mod one_shot;
mod ownership;
mod paid;
mod planning;
mod pods;
mod ports;
mod profiling;
mod quantity;
mod records;
mod replacement;
mod rewritten;
mod rollout;
mod routing;
mod source;
mod sources;
mod trouble;
mod turn;
mod usage;
mod write;

// The process around them.
mod calls;
mod controller;
mod conversations;
mod gateways;
mod lease;
mod metrics;
mod planning_pool;
mod run;
mod serve;
mod settings;
mod starting;
mod term;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod testing;
#[cfg(test)]
mod tests;

pub use identity::SignerName;
pub use run::{RunError, run};
pub use settings::{Command, RunSettings, Settings};
