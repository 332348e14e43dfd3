//! Where every expert of a Mixture-of-Experts model lives, with how much memory and how many
//! replicas, at the lowest cost that keeps the latency promises.
//!
//! Pure: a [`Problem`] goes in, a [`PlanningResult`] with all its figures comes out; no clock, no files, no
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

mod answer;
mod flip_search;
mod infeasible;
mod nodes;
mod plan_error;
mod plans;
mod preallocation;
mod remote;
mod search;
mod slicing;
mod verdict;
mod ways;
mod words;

pub use answer::explain::{Alternative, Binding, Explanation, Saving};
pub use answer::hysteresis::{Bytes, ChangeCost, LayerChange, PlanChange, Reason};
pub use answer::preallocated::preallocate_for;
pub use answer::{
    Options, PlanningResult, Preallocation, compare, compare_within, evaluate, preallocate, replan, solve,
    solve_within,
};
pub use infeasible::remedy::Remedy;
pub use infeasible::{Infeasible, RatioAndSize};
pub use nodes::{
    Arrangement, BrokenLimit, ExpectedTimes, Flip, FlipCause, GpuGroup, GpuTimes, MetTimes, NodeShape,
    NodesAnswer, NodesLayout, NodesVerdict, Rental, RentedNodes, Reserve, ResidentModel, RivalNodes, Spot,
    cheapest_nodes, rent,
};
pub use plan_error::PlanError;
pub use preallocation::WalkStep;
pub use preallocation::hoeffding::{assignments_bound, paper_bound};
pub use remoe_plan::{
    AccountError, Affine, Alive, Alone, AloneTime, Arrivals, Baseline, Baselines, BatchStep, Billing, Budget,
    Comparison, Contention, CpuProfile, Device, ErrorFactor, Evaluation, FieldError, GpuProfile, Group,
    GroupEvaluation, GroupLife, Latency, Layer, LayerEvaluation, LayerPlan, Life, Limits, MainSize, Measured,
    Outcome, PAGE_POSITIONS, Plan, PlanAccount, PlanDraft, Pricing, Problem, Proceed, Quantile, Quantiles,
    Replica, Request, Service, SizeRange, Slo, Specs, Start, Starts, Transport, Truth, VcpuRange, Violation,
    Way, WindowedCache, WrongFigure, alive, baselines, latency, load_bound, longest_first,
    longest_first_beside, of_any_version, plan_file_schema, useful_vcpus,
};
pub use remote::Remote;
pub use search::Counters;
pub use search::continuous::{Continuous, Fit, Refusal};
pub use search::selection::Selection;
pub use slicing::{Sturdiness, WrongCase};
pub use verdict::{FlipFigure, Rival, Verdict, VerdictFlip};
pub use words::{amount, dollars, limit_name, rounded_up, seconds};
