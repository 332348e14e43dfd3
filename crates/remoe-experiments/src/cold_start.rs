//! Stages of a cold start (figure 11 of the Remoe paper).

use crate::costs::{ClassPlans, Strategy};
use crate::scenario::Scenario;
use remoe_hardware::Start;
use remoe_planner::Plan;
use serde::Serialize;

/// Seconds of prediction and planning, measured by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Decisions {
    /// Predicting one prompt; absent without a predictor.
    pub predict_seconds: Option<f64>,
    /// Sizing the main function before the prediction (MMP).
    pub preallocate_seconds: f64,
    /// Making the plan.
    pub solve_seconds: f64,
}

/// Kind of work in a cold start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ColdStartStage {
    /// Prediction, pre-allocation and planning.
    Calculate,
    /// Start of the container and its process.
    Container,
    /// Weights from storage to memory.
    Load,
    /// Weights from memory to the accelerator.
    Move,
}

impl ColdStartStage {
    /// All stages.
    pub const ALL: [Self; 4] = [Self::Calculate, Self::Container, Self::Load, Self::Move];

    /// Returns the name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Calculate => "calculate",
            Self::Container => "container",
            Self::Load => "load",
            Self::Move => "to the GPU",
        }
    }
}

/// Time span of one stage, in seconds since the arrival of the request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StageSpan {
    /// Kind of work.
    pub part: ColdStartStage,
    /// When it begins.
    pub from: f64,
    /// When it ends.
    pub to: f64,
}

/// Spans of one function, or of the planner, until it is ready.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ColdStartLane {
    /// Name: a function, or the planner.
    pub who: String,
    /// Consecutive spans.
    pub spans: Vec<StageSpan>,
}

/// The cold start of a strategy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ColdStart {
    /// Strategy.
    pub strategy: Strategy,
    /// Concurrent lanes: the planner and the functions.
    pub lanes: Vec<ColdStartLane>,
    /// When the last lane ends.
    pub ready_seconds: f64,
    /// `ready_seconds` if all functions share the storage throughput of one.
    pub ready_on_shared_storage_seconds: f64,
    /// `ready_seconds` if all stages ran one after another.
    pub ready_one_after_another_seconds: f64,
}

/// Builder of a lane.
struct Sequence(ColdStartLane);

impl Sequence {
    fn from(who: &str) -> Self {
        Self(ColdStartLane { who: who.to_owned(), spans: Vec::new() })
    }

    fn end(&self) -> f64 {
        self.0.spans.last().map_or(0.0, |span| span.to)
    }

    /// Adds a span that begins after the previous one, but not before `earliest`.
    fn then(mut self, part: ColdStartStage, earliest: f64, seconds: f64) -> Self {
        let from = self.end().max(earliest);
        self.0.spans.push(StageSpan { part, from, to: from + seconds });
        self
    }
}

impl ColdStart {
    fn of(strategy: Strategy, lanes: Vec<Sequence>, shared: f64) -> Self {
        let ready = lanes.iter().map(Sequence::end).fold(0.0, f64::max);
        let spans = lanes.iter().flat_map(|lane| &lane.0.spans);
        Self {
            strategy,
            ready_seconds: ready,
            ready_on_shared_storage_seconds: shared,
            ready_one_after_another_seconds: spans.map(|span| span.to - span.from).sum(),
            lanes: lanes.into_iter().map(|lane| lane.0).collect(),
        }
    }
}

/// Computes figure 11: the cold start of every strategy.
///
/// With a plan, the main function starts at its pre-allocated size and loads the non-expert part while prediction and
/// planning run. Experts are loaded, and remote functions started, once the plan is known. Of the remote functions, the lane
/// shows the slowest.
#[must_use]
pub fn cold_starts(scenario: &Scenario, plans: &ClassPlans, decisions: Decisions) -> Vec<ColdStart> {
    let (start, shape) = (scenario.profile.starts.main, &scenario.shape);
    let (experts, rest) = (shape.expert_bytes(), shape.other_bytes());
    let loaded = |start: Start, bytes: f64| bytes / start.load_bytes_per_second;
    let moved = |bytes: f64| bytes / scenario.host_bytes_per_second;
    let alone = |strategy, on_gpu: f64| {
        let sequence = Sequence::from("main")
            .then(ColdStartStage::Container, 0.0, start.process_seconds)
            .then(ColdStartStage::Load, 0.0, loaded(start, experts + rest))
            .then(ColdStartStage::Move, 0.0, moved(on_gpu));
        let ready = sequence.end();
        ColdStart::of(strategy, vec![sequence], ready)
    };
    let mut starts = vec![
        alone(Strategy::Cpu, 0.0),
        alone(Strategy::Gpu, experts + rest),
        alone(Strategy::Fetch, rest),
        alone(Strategy::Mix, rest),
    ];
    let planned = |strategy, plan: &Plan| with_plan(scenario, strategy, plan, decisions);
    starts.push(planned(Strategy::Remoe, &plans.remoe));
    starts.extend(plans.always.as_ref().map(|plan| planned(Strategy::RemoeAlways, plan)));
    starts
}

fn with_plan(scenario: &Scenario, strategy: Strategy, plan: &Plan, decisions: Decisions) -> ColdStart {
    let (starts, shape) = (scenario.profile.starts, &scenario.shape);
    let expert = shape.facts.expert_bytes as f64;
    let remote = |layer: &remoe_planner::LayerPlan| layer.remote.len() as f64 * expert;
    let layer_bytes = plan.layers.iter().map(remote);
    let (remote_bytes, largest) = (layer_bytes.clone().sum::<f64>(), layer_bytes.fold(0.0, f64::max));
    let (local, rest) = (shape.expert_bytes() - remote_bytes, shape.other_bytes());
    let calculation = decisions.predict_seconds.unwrap_or(0.0) + decisions.solve_seconds;
    let planner = Sequence::from("planner")
        .then(ColdStartStage::Calculate, 0.0, decisions.preallocate_seconds)
        .then(ColdStartStage::Calculate, 0.0, calculation);
    let planned = planner.end();
    let main = Sequence::from("main")
        .then(ColdStartStage::Container, decisions.preallocate_seconds, starts.main.process_seconds)
        .then(ColdStartStage::Load, 0.0, rest / starts.main.load_bytes_per_second)
        .then(ColdStartStage::Move, 0.0, rest / scenario.host_bytes_per_second)
        .then(ColdStartStage::Load, planned, local / starts.main.load_bytes_per_second);
    let mut lanes = vec![planner, main];
    let mut shared = planned.max(starts.main.process_seconds)
        + shape.facts.total_bytes as f64 / starts.main.load_bytes_per_second;
    if remote_bytes > 0.0 {
        let remote = Sequence::from("slowest remote")
            .then(ColdStartStage::Container, planned, starts.remote.process_seconds)
            .then(ColdStartStage::Load, 0.0, largest / starts.remote.load_bytes_per_second);
        lanes.push(remote);
    }
    shared = lanes.iter().map(Sequence::end).fold(shared, f64::max);
    ColdStart::of(strategy, lanes, shared)
}
