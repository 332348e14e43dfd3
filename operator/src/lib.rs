//! The Kubernetes operator: `MoEDeployment` resources as pods, Services and routing generations.
//!
//! One look at a deployment is one straight line ([`reconcile`] draws it): what is [`observed`], what is
//! [`known`] of model and hardware, what is [`planned`], the revision that is to run ([`build`]), whether it is to run
//! at all ([`demanded`]), the [`steps`] that lead there, the writes that are [`applied`], and the [`status`]. All but the first and the
//! writes are pure. Nothing that decides is remembered: a look that was interrupted anywhere is made again from what is
//! there. What main functions say is learned beside it ([`conversations`]).

// The line.
mod applied;
pub mod build;
pub mod demanded;
pub mod known;
pub mod load;
pub mod observed;
pub mod planned;
mod reconcile;
pub mod resting;
pub mod status;
pub mod steps;

// What its stages are made of.
pub mod api;
pub mod collector;
pub mod conditions;
pub mod digest;
pub mod drift;
mod earlier;
mod epoch;
pub mod errand;
pub mod events;
pub mod facts;
pub mod following;
pub mod identity;
pub mod inspection;
pub mod mains;
pub mod names;
pub mod paid;
pub mod planning;
pub mod pods;
pub mod profiling;
pub mod quantity;
mod replacement;
pub mod rollout;
pub mod routing;
pub mod source;

// What runs it.
mod calls;
mod controller;
pub mod conversations;
pub mod fleet;
mod gateways;
mod lease;
mod metrics;
mod per_deployment;
pub mod rest;
mod run;
mod serve;
mod settings;
pub mod starting;
mod term;
pub mod turn;

pub use run::{RunError, run};
pub use settings::{Command, RunSettings, Settings, SignerName};
