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
#[path = "../tests/it/generate/mod.rs"]
mod generate;

mod alive;
mod answer;
mod budget;
mod cost;
mod error;
mod infeasible;
mod model;
mod nodes;
mod plan;
mod plan_error;
mod plans;
mod preallocation;
mod problem;
mod read;
mod remote;
mod search;
mod slicing;
mod turns;
mod verdict;
mod ways;
mod words;

pub use alive::{Alive, Alone, AloneTime, Latency, Quantiles, Service, alive, latency};
pub use answer::explain::{Alternative, Binding, Explanation, Saving};
pub use answer::hysteresis::{Bytes, Change, LayerChange, Reason, Toll};
pub use answer::preallocated::preallocate_for;
pub use answer::{
    Answer, Options, Preallocation, baselines, compare, compare_within, evaluate, preallocate, replan, solve,
    solve_within,
};
pub use budget::{Budget, Proceed};
pub use cost::account::{Account, AccountError, Comparison, Measured, Outcome};
pub use cost::baselines::{Baseline, Baselines};
pub use cost::groups::GroupEvaluation;
pub use cost::lpt::{Replica, load_bound, longest_first, longest_first_beside};
pub use cost::main_size::{MainSize, PAGE_POSITIONS, useful_vcpus};
pub use cost::running::Life;
pub use cost::sleepers::GroupLife;
pub use cost::{BatchStep, Evaluation, LayerEvaluation, Violation};
pub use error::FieldError;
pub use infeasible::remedy::Remedy;
pub use infeasible::{Infeasible, Pair};
pub use nodes::{
    Arrangement, BrokenLimit, ExpectedTimes, Flip, FlipCause, GpuGroup, GpuTimes, MetTimes, NodeShape,
    NodesAnswer, NodesLayout, NodesVerdict, Rental, RentedNodes, Reserve, ResidentModel, RivalNodes, Spot,
    cheapest_nodes, rent,
};
pub use plan::{Group, LayerPlan, Plan, PlanDraft, plan_file_schema};
pub use plan_error::PlanError;
pub use preallocation::WalkStep;
pub use preallocation::hoeffding::{assignments_bound, paper_bound};
pub use problem::wrong::{Truth, WrongFigure};
pub use problem::{
    Affine, Arrivals, Billing, Contention, CpuProfile, Device, ErrorFactor, GpuProfile, Layer, Limits,
    Pricing, Problem, Quantile, Request, SizeRange, Slo, Specs, Start, Starts, Transport, VcpuRange,
};
pub use read::of_any_version;
pub use remote::Remote;
pub use search::Counters;
pub use search::continuous::{Continuous, Fit, Refusal};
pub use search::selection::Selection;
pub use slicing::{Sturdiness, WrongCase};
pub use verdict::{Cause, Rival, Turn, Verdict, Way};
pub use words::{amount, dollars, limit_name, rounded_up, seconds};
