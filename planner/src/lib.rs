//! Where every expert of a Mixture-of-Experts model lives, with how much memory and how many
//! replicas, at the lowest cost that keeps the latency promises.
//!
//! Pure: a [`Problem`] goes in, an [`Answer`] with all its figures comes out; no clock, no files, no
//! threads, and the same answer on every run. [`preallocate`] sizes the main function before
//! anything is predicted, [`evaluate`] states what any plan costs, [`solve`] finds the cheapest one.
//! The README beside this crate states the cost model, the algorithms and where they differ from the
//! Remoe paper.

// Tests here and in tests/ share a generator of problems.
#[cfg(test)]
extern crate self as remoe_planner;
#[cfg(test)]
#[path = "../tests/generate/mod.rs"]
mod generate;

mod account;
mod baselines;
mod check;
mod choose;
mod continuous;
mod cost;
mod curve;
mod decode;
mod dual;
mod error;
mod explain;
mod hoeffding;
mod hysteresis;
mod improve;
mod infeasible;
mod lpt;
mod main_size;
mod model;
mod options;
mod placement;
mod plan;
mod preallocate;
mod problem;
mod rates;
mod remote_set;
mod search;
mod selection;
mod sizes;
mod stress;
mod tables;
mod words;

pub use account::{Account, Comparison, Measured, Outcome};
pub use baselines::{Baseline, Baselines};
pub use choose::{Answer, Options, Preallocation, Remote, baselines, evaluate, preallocate, solve};
pub use continuous::{Continuous, Fit, Refusal};
pub use cost::{Evaluation, LayerEvaluation, Violation};
pub use error::{FieldError, PlanError};
pub use explain::{Alternative, Binding, Explanation, Saving};
pub use hoeffding::{assignments_bound, paper_bound};
pub use hysteresis::{Bytes, Change, LayerChange, Reason};
pub use infeasible::{Infeasible, Pair, Remedy};
pub use lpt::{Replica, load_bound, longest_first};
pub use main_size::{MainSize, useful_vcpus};
pub use plan::{LayerPlan, Plan, PlanDraft};
pub use preallocate::WalkStep;
pub use problem::{
    Affine, Billing, CpuProfile, Device, ErrorFactor, GpuProfile, Layer, Limits, Pricing, Problem, Request,
    SizeRange, Slo, Specs, Transport,
};
pub use search::Counters;
pub use selection::Selection;
pub use words::{amount, limit_name, rounded_up, seconds};
