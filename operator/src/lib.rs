//! The Kubernetes operator: `MoEDeployment` resources as pods, Services and routing generations.
//!
//! One run reads everything that belongs to a deployment, decides in pure modules
//! ([`inspection`], [`profiling`], [`planning`], [`build`], [`rollout`], [`status`]) and writes what differs. It
//! remembers nothing: a run that was interrupted anywhere is made again from what is there.

pub mod api;
pub mod build;
pub mod conditions;
pub mod digest;
pub mod drift;
pub mod errand;
pub mod facts;
pub mod inspection;
pub mod names;
pub mod planning;
pub mod pods;
pub mod profiling;
pub mod quantity;
pub mod rollout;
pub mod routing;
pub mod source;
pub mod status;

mod apply;
mod calls;
mod controller;
mod events;
mod lease;
mod mains;
mod metrics;
mod observe;
mod reconcile;
mod replacement;
mod run;
mod serve;
mod settings;
mod term;

pub use run::{RunError, run};
pub use settings::{Command, RunSettings, Settings};
