//! The experiments of the paper "Remoe: Towards Efficient and Low-Cost MoE Inference in Serverless
//! Computing" (sections II to V) as data.
//!
//! A [`Scenario`] joins a [`Shape`] (the sizes of a model), a machine as a profile, and requests with recorded or random
//! routing. Each figure is a function from a scenario to rows of numbers:
//! [`expert_time`] (figure 4), [`phases`] (figure 5), [`costs`] (figure 9), [`ratios`] (figure 10),
//! [`cold_starts`] (figure 11). Further experiments: [`map`] (the cheapest strategy over models, rates, prices and limits),
//! [`replicas()`] (autoscaling of replicas), [`Regret`] (plans with misestimated inputs) and [`WakeCosts`] (plans of cold
//! starts by what they know). Pure: no files, no clock, no network.

mod cold_start;
mod costs;
mod error;
mod expert_time;
mod lengths;
mod machine;
pub mod map;
mod outlines;
mod prediction_worth;
mod regret;
mod replicas;
mod request_outcome;
mod routing;
mod scenario;
mod sensitivity;
mod shape;
mod wakes;

pub use cold_start::{ColdStart, ColdStartLane, ColdStartStage, Decisions, StageSpan, cold_starts};
pub use costs::{ClassPlans, Costs, Strategy, StrategyCost, StrategyCosts, costs};
pub use error::ExperimentError;
pub use expert_time::{CORES, ExpertTime, expert_time};
pub use lengths::{LengthRatio, Phases, phases, ratios};
pub use machine::{Cpu, CpuScaling, Gpu, Machine};
pub use prediction_worth::{ForecastCost, RequestPrice, UsageForecast};
pub use regret::{PlanOutcome, Regret, RegretCase, RegretSubject, RobustPlan, Summary};
pub use replicas::{ReplicaTrial, replicas};
pub use request_outcome::RequestOutcome;
pub use routing::Routing;
pub use scenario::{
    ExpertShares, INPUT_TOKENS, REQUESTS, Scenario, Setting, SimulatedRequest, paper_pricing,
};
pub use sensitivity::{Sensitivity, sensitivity};
pub use shape::Shape;
pub use wakes::{TopicMix, WakeCosts};
