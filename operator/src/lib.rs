//! The Kubernetes operator: `MoEDeployment` resources as pods, Services and routing generations.
//!
//! One look at a deployment is one straight line ([`reconcile`] draws it): what is [`observed`], what is
//! [`known`] of model and hardware, what is [`planned`], the revision that is to run ([`build`]), whether it is to run
//! at all ([`demanded`]), the [`steps`] that lead there, the writes that are [`applied`], and the [`status`]. All but the first and the
//! writes are pure. Nothing that decides is remembered: a look that was interrupted anywhere is made again from what is
//! there. What main functions say is learned beside it ([`conversations`]).

// The line.
mod applied;
mod build;
mod demanded;
mod known;
mod load;
mod observed;
mod planned;
mod reconcile;
mod resting;
mod status;
mod steps;

// What its stages are made of.
mod allowed;
mod altered;
pub mod api;
mod collector;
mod conditions;
mod digest;
mod drift;
mod earlier;
mod epoch;
mod errand;
mod events;
mod exposure;
mod facts;
mod following;
mod identity;
mod inspection;
mod mains;
mod names;
mod paid;
mod planning;
mod pods;
mod profiling;
mod quantity;
mod replacement;
mod rewritten;
mod rollout;
mod routing;
mod source;
mod sources;

// What runs it.
mod calls;
mod controller;
mod conversations;
mod fleet;
mod gateways;
mod lease;
mod metrics;
mod per_deployment;
mod planner;
mod planning_pool;
mod rest;
mod run;
mod serve;
mod settings;
mod starting;
mod term;
mod turn;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod testing;
#[cfg(test)]
mod tests;

pub use run::{RunError, run};
pub use settings::{Command, RunSettings, Settings, SignerName};
