//! Planning problems, plans and the cost model, for programs that read plans but do not search for them.
//!
//! A [`Problem`] states a model, a machine, prices and limits. A [`Plan`] places each expert in a function. The compiled
//! form of a problem ([`model::Model`]) evaluates plans: latencies and dollars of a request ([`Evaluation`]), with functions
//! that scale to zero ([`mod@alive`]). A [`PlanAccount`] compares the expected cost of requests under a running plan with
//! their actual cost.
//!
//! Pure: no clock, no files, no threads. The crate `remoe-planner` searches for the cheapest plan; its README states the
//! cost model.

pub mod alive;
pub mod budget;
pub mod cost;
pub mod error;
pub mod model;
pub mod plan;
pub mod problem;
pub mod read;
pub mod serving_strategy;

pub use alive::{Alive, Latency, Quantiles, ScalingGroup, ScalingGroupTime, Service, alive, latency};
pub use budget::{Budget, Proceed};
pub use cost::account::{AccountError, Comparison, Measured, Outcome, PlanAccount};
pub use cost::baselines::baselines;
pub use cost::baselines::{Baseline, Baselines};
pub use cost::groups::GroupEvaluation;
pub use cost::lpt::{Replica, load_bound, longest_first, longest_first_beside};
pub use cost::main_size::{MainSize, PAGE_POSITIONS, useful_vcpus};
pub use cost::running::Life;
pub use cost::sleepers::GroupLife;
pub use cost::{BatchStep, Evaluation, LayerEvaluation, Violation};
pub use error::FieldError;
pub use plan::{Group, LayerPlan, Plan, PlanDraft, plan_file_schema};
pub use problem::misestimated::{ErrorDirection, MisestimatedInput};
pub use problem::{
    Affine, Arrivals, Billing, Contention, CpuProfile, Device, ErrorFactor, GpuProfile, Layer, Limits,
    Pricing, Problem, Quantile, Request, SizeRange, Slo, Specs, Start, Starts, Transport, VcpuRange,
    WindowedCache,
};
pub use read::of_any_version;
pub use serving_strategy::ServingStrategy;
