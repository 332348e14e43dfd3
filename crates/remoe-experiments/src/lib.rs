//! The experiments of the paper "Remoe: Towards Efficient and Low-Cost MoE Inference in Serverless
//! Computing" (sections II to V) as data.
//!
//! A [`Scenario`] joins a [`Shape`] (the sizes of a model), a machine as a profile and requests whose
//! routing is known, recorded or drawn. Each figure is a function from a scenario to rows of numbers:
//! [`expert_time`] (figure 4), [`phases`] (figure 5), [`costs`] (figure 9), [`ratios`] (figure 10),
//! [`cold_starts`] (figure 11); [`map`] is who is cheapest over models, rates, prices and limits, [`replicas()`] how
//! many functions follow load, [`Regret`] what plans are worth when figures are wrong, [`WakeCosts`] what plans of
//! wakes cost by what they know. Pure: no file, no clock, no network; plans and costs are the planner's.

mod cold_start;
mod costs;
mod error;
mod expert_time;
mod lengths;
mod machine;
pub mod map;
mod outlines;
mod regret;
mod replicas;
mod routing;
mod scenario;
mod sensitivity;
mod shape;
mod truth;
mod wakes;
mod worth;

pub use cold_start::{ColdStart, ColdStartStage, Decisions, Lane, StageSpan, cold_starts};
pub use costs::{ClassPlans, Costs, Strategy, StrategyCost, StrategyCosts, costs};
pub use error::ExperimentError;
pub use expert_time::{CORES, ExpertTime, expert_time};
pub use lengths::{LengthRatio, Phases, phases, ratios};
pub use machine::{Cpu, CpuScaling, Gpu, Machine};
pub use regret::{Met, Regret, RegretCase, RegretSubject, SturdyPlan, Summary};
pub use replicas::{Scaled, replicas};
pub use routing::Routing;
pub use scenario::{
    ExpertShares, INPUT_TOKENS, REQUESTS, Scenario, Setting, SimulatedRequest, paper_pricing,
};
pub use sensitivity::{Sensitivity, sensitivity};
pub use shape::Shape;
pub use truth::RequestOutcome;
pub use wakes::{TopicMix, WakeCosts};
pub use worth::{PredictionWorth, RequestPrice, UsageForecast};
