//! Planner: places every expert of a Mixture-of-Experts model in a function, and sizes all functions, at the lowest cost
//! that keeps the latency limits.
//!
//! [`preallocate`] sizes the main function before the use of experts is predicted, [`evaluate`] computes the cost of a
//! plan, [`solve`] finds the cheapest plan. Pure: a [`Problem`] goes in, a [`PlanningResult`] comes out; no clock, no files,
//! no threads, and the same result on every run. The README beside this crate states the cost model, the algorithms and
//! where they differ from the Remoe paper.

// Tests here and in tests/ share a generator of problems.
#[cfg(test)]
extern crate self as remoe_planner;
#[cfg(test)]
#[path = "../tests/it/generate/mod.rs"]
mod generate;

mod answer;
mod best_plans;
mod comparison;
mod flip_search;
mod infeasible;
mod nodes;
mod plan_error;
mod preallocation;
mod remote;
mod search;
mod slicing;
mod strategies;
mod words;

pub use answer::explain::{Alternative, Binding, Explanation, Saving};
pub use answer::hysteresis::{Bytes, ChangeCost, LayerChange, PlanChange, ReplacementReason};
pub use answer::preallocated::preallocate_for;
pub use answer::{
    Options, PlanningResult, Preallocation, compare, compare_within, evaluate, preallocate, replan, solve,
    solve_within,
};
pub use comparison::{ComparisonFlip, FlipFigure, PlacementComparison, StrategyEvaluation};
pub use infeasible::remedy::Remedy;
pub use infeasible::{Infeasible, RatioAndSize};
pub use nodes::{
    Arrangement, ArrangementEvaluation, BrokenLimit, ExpectedTimes, GpuGroup, GpuTimes, LoadedTimes,
    NodeShape, NodesAnswer, NodesComparison, NodesFlip, NodesFlipFigure, NodesLayout, Rental, RentedNodes,
    Reserve, ResidentModel, SpotPolicy, cheapest_nodes, rent,
};
pub use plan_error::PlanError;
pub use preallocation::WalkStep;
pub use preallocation::hoeffding::{assignments_bound, paper_bound};
pub use remoe_plan::{
    AccountError, Affine, Alive, Arrivals, Baseline, Baselines, BatchStep, Billing, Budget, Comparison,
    Contention, CpuProfile, Device, ErrorDirection, ErrorFactor, Evaluation, FieldError, GpuProfile, Group,
    GroupEvaluation, GroupLife, Latency, Layer, LayerEvaluation, LayerPlan, Life, Limits, MainSize, Measured,
    MisestimatedInput, Outcome, PAGE_POSITIONS, Plan, PlanAccount, PlanDraft, Pricing, Problem, Proceed,
    Quantile, Quantiles, Replica, Request, ScalingGroup, ScalingGroupTime, Service, ServingStrategy,
    SizeRange, Slo, Specs, Start, Starts, Transport, VcpuRange, Violation, WindowedCache, alive, baselines,
    latency, load_bound, longest_first, longest_first_beside, of_any_version, plan_file_schema, useful_vcpus,
};
pub use remote::Remote;
pub use search::Counters;
pub use search::continuous::{Continuous, Fit, Refusal};
pub use search::selection::Selection;
pub use slicing::{MisestimatedCase, SensitivityAnalysis};
pub use words::{amount, dollars, limit_name, rounded_up, seconds};
