//! Figure 9 of the Remoe paper: costs of requests under each strategy.

use crate::error::ExperimentError;
use crate::request_outcome::RequestOutcome;
use crate::scenario::{Scenario, SimulatedRequest};
use remoe_planner::{Baseline, Baselines, Plan, PlanError, Problem, Remote, SizeRange, Slo, baselines};
use serde::Serialize;

/// Strategy to serve a model (Remoe paper, section V-C).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Everything on CPUs.
    Cpu,
    /// Everything on the GPU.
    Gpu,
    /// Experts in host memory, moved to the GPU when they are used.
    Fetch,
    /// [`Self::Fetch`] with instant transfers, as in the paper: a bound that no system reaches, and which is not ranked.
    FetchWithoutMoves,
    /// Experts on CPUs, the non-expert part on the GPU.
    Mix,
    /// The cheapest plan for the class of requests, which may be MIX.
    Remoe,
    /// [`Self::Remoe`] with a plan for each request from its own prediction, as in the paper.
    RemoePerRequest,
    /// The cheapest plan with remote experts in every layer.
    RemoeAlways,
}

impl Strategy {
    /// All strategies; [`Self::FetchWithoutMoves`] comes last.
    pub const ALL: [Self; 8] = [
        Self::Cpu,
        Self::Gpu,
        Self::Fetch,
        Self::Mix,
        Self::Remoe,
        Self::RemoePerRequest,
        Self::RemoeAlways,
        Self::FetchWithoutMoves,
    ];
    /// Strategies of the paper that a system can reach.
    pub const OF_THE_PAPER: [Self; 5] = [Self::Cpu, Self::Gpu, Self::Fetch, Self::Mix, Self::Remoe];

    /// Returns the name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "CPU",
            Self::Gpu => "GPU",
            Self::Fetch => "Fetch",
            Self::FetchWithoutMoves => "Fetch, moves for nothing",
            Self::Mix => "MIX",
            Self::Remoe => "Remoe",
            Self::RemoePerRequest => "Remoe, per request",
            Self::RemoeAlways => "Remoe, always remote",
        }
    }

    /// Returns a short description.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Cpu => "everything on CPUs",
            Self::Gpu => "everything on GPUs",
            Self::Fetch => "experts fetched to the GPU on use",
            Self::FetchWithoutMoves => "bound: transfers take no time",
            Self::Mix => "experts on the main function's CPUs",
            Self::Remoe => "the cheapest plan, MIX included",
            Self::RemoePerRequest => "a plan for each request",
            Self::RemoeAlways => "the cheapest with remote experts",
        }
    }
}

/// Plans of a class of requests.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassPlans {
    /// The class's problem.
    pub problem: Problem,
    /// The cheapest plan.
    pub remoe: Plan,
    /// The cheapest plan with remote experts in every layer; absent if none keeps the limits.
    pub always: Option<Plan>,
    /// Expected cost and times of the class under each strategy.
    pub expected: Vec<(Strategy, RequestOutcome)>,
    baselines: Baselines,
}

/// Expected cost of one request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StrategyCost {
    /// Strategy.
    pub strategy: Strategy,
    /// Dollars.
    pub cost: f64,
}

/// Costs of the requests of a scenario.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Costs {
    /// Costs under each feasible strategy.
    pub strategies: Vec<StrategyCosts>,
    /// Infeasible strategies: no size holds the model, or no plan keeps the limits.
    pub impossible: Vec<Strategy>,
}

/// Costs of the requests under one strategy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StrategyCosts {
    /// Strategy.
    pub strategy: Strategy,
    /// CPU memory of the main function in bytes; absent if each request has its own plan.
    pub main_bytes: Option<f64>,
    /// Remote experts of all layers; absent if each request has its own plan.
    pub remote_experts: Option<usize>,
    /// Expected dollars of a request under the class's plan; absent if each request has its own plan.
    pub expected_cost: Option<f64>,
    /// Dollars of each request with its true routing.
    pub costs: Vec<f64>,
    /// Mean dollars of a request.
    pub mean_cost: f64,
    /// Mean seconds of a prefill, without a cold start.
    pub mean_ttft_seconds: f64,
    /// Mean seconds of a decode step.
    pub mean_tpot_seconds: f64,
    /// Number of requests that broke a latency limit.
    pub late: usize,
}

impl Costs {
    /// Returns the costs under `strategy`.
    #[must_use]
    pub fn of(&self, strategy: Strategy) -> Option<&StrategyCosts> {
        self.strategies.iter().find(|costs| costs.strategy == strategy)
    }
}

impl From<&Baseline> for RequestOutcome {
    fn from(baseline: &Baseline) -> Self {
        Self {
            cost: baseline.total_cost,
            ttft_seconds: baseline.ttft_seconds,
            tpot_seconds: baseline.tpot_seconds,
        }
    }
}

impl ClassPlans {
    /// Plans for the class of `scenario` from its predictions.
    ///
    /// # Errors
    /// The scenario is invalid, or no plan keeps its limits.
    pub fn of(scenario: &Scenario) -> Result<Self, ExperimentError> {
        let problem = scenario.class_problem()?;
        let answer = scenario.solve(&problem, Remote::Auto)?;
        let always = scenario.solve(&problem, Remote::Always).ok();
        let outcome = |evaluation: &remoe_planner::Evaluation| RequestOutcome {
            cost: evaluation.total_cost,
            ttft_seconds: evaluation.ttft_seconds,
            tpot_seconds: evaluation.tpot_seconds,
        };
        let baselines = &answer.baselines;
        let known = [
            (Strategy::Cpu, baselines.cpu.as_ref().map(RequestOutcome::from)),
            (Strategy::Gpu, baselines.gpu.as_ref().map(RequestOutcome::from)),
            (
                Strategy::Fetch,
                baselines.fetch.as_ref().map(|ideal| scenario.fetch_with_transfers(ideal, &problem.request)),
            ),
            (Strategy::FetchWithoutMoves, baselines.fetch.as_ref().map(RequestOutcome::from)),
            (Strategy::Mix, baselines.mix.as_ref().map(RequestOutcome::from)),
            (Strategy::Remoe, Some(outcome(&answer.evaluation))),
            (Strategy::RemoeAlways, always.as_ref().map(|answer| outcome(&answer.evaluation))),
        ];
        let expected = known.into_iter().filter_map(|(strategy, outcome)| Some((strategy, outcome?)));
        Ok(Self {
            expected: expected.collect(),
            remoe: answer.plan,
            always: always.map(|answer| answer.plan),
            baselines: answer.baselines,
            problem,
        })
    }

    /// Returns the expected cost and times of the class under `strategy`.
    #[must_use]
    pub fn expected(&self, strategy: Strategy) -> Option<RequestOutcome> {
        self.expected.iter().find(|(one, _)| *one == strategy).map(|(_, outcome)| *outcome)
    }

    /// Returns the expected cost of the class under each feasible strategy of the paper.
    pub(crate) fn of_the_paper(&self) -> Vec<StrategyCost> {
        let strategies = Strategy::OF_THE_PAPER.into_iter();
        let cost = |strategy| Some(StrategyCost { strategy, cost: self.expected(strategy)?.cost });
        strategies.filter_map(cost).collect()
    }

    /// Returns the baseline of `strategy`, or `None` if it is infeasible or no baseline.
    #[must_use]
    pub fn baseline(&self, strategy: Strategy) -> Option<&Baseline> {
        match strategy {
            Strategy::Cpu => self.baselines.cpu.as_ref(),
            Strategy::Gpu => self.baselines.gpu.as_ref(),
            Strategy::Fetch | Strategy::FetchWithoutMoves => self.baselines.fetch.as_ref(),
            Strategy::Mix => self.baselines.mix.as_ref(),
            Strategy::Remoe | Strategy::RemoePerRequest | Strategy::RemoeAlways => None,
        }
    }
}

/// Computes the cost of each request under each strategy: planned from predictions, billed with the true routing.
///
/// # Errors
/// The scenario is invalid, or no plan keeps its limits.
pub fn costs(scenario: &Scenario, plans: &ClassPlans) -> Result<Costs, ExperimentError> {
    let mut costs = Costs { strategies: Vec::new(), impossible: Vec::new() };
    let same_prediction = scenario.requests.windows(2).all(|pair| pair[0].predicted == pair[1].predicted);
    let strategies =
        Strategy::ALL.into_iter().filter(|one| *one != Strategy::RemoePerRequest || !same_prediction);
    for strategy in strategies {
        let outcomes = match strategy {
            Strategy::Cpu | Strategy::Gpu | Strategy::Fetch | Strategy::FetchWithoutMoves => {
                plans.baseline(strategy).map(|baseline| {
                    outcomes(scenario, |request| baseline_outcome(scenario, strategy, baseline, request))
                })
            }
            Strategy::Mix => plans.baseline(strategy).map(|baseline| {
                let plan = scenario.all_local(baseline.main_bytes);
                outcomes(scenario, |request| scenario.outcome(&plan, request))
            }),
            Strategy::Remoe => Some(outcomes(scenario, |request| scenario.outcome(&plans.remoe, request))),
            Strategy::RemoeAlways => plans
                .always
                .as_ref()
                .map(|plan| outcomes(scenario, |request| scenario.outcome(plan, request))),
            Strategy::RemoePerRequest => Some(outcomes(scenario, |request| {
                let steps = scenario.setting.decode_steps;
                let problem = scenario.problem(request.input_tokens, steps, request.predicted.clone())?;
                scenario.outcome(&scenario.solve(&problem, Remote::Auto)?.plan, request)
            })),
        };
        match outcomes.transpose()? {
            Some(outcomes) => costs.strategies.push(summary(scenario, plans, strategy, &outcomes)),
            None => costs.impossible.push(strategy),
        }
    }
    Ok(costs)
}

impl Scenario {
    /// Returns the outcome of Fetch with the time of transfers, which overlap with computation.
    ///
    /// A decode step moves each expert that its token uses, a prefill each expert that any token uses. `ideal`: the baseline
    /// of Fetch for `request`, with instant transfers.
    fn fetch_with_transfers(&self, ideal: &Baseline, request: &remoe_planner::Request) -> RequestOutcome {
        let facts = &self.shape.facts;
        let moved = |experts: f64| {
            let bytes = experts * facts.expert_bytes as f64 * self.shape.moe_layers() as f64;
            bytes / self.host_bytes_per_second
        };
        let per_token = facts.top_k as f64;
        let prefill =
            ideal.prefill_seconds.max(moved((request.input_tokens * per_token).min(facts.experts as f64)));
        let step = ideal.tpot_seconds.max(moved(per_token));
        let rate = ideal.total_cost / (ideal.prefill_seconds + ideal.decode_seconds);
        RequestOutcome {
            cost: rate * (prefill + request.output_tokens * step),
            ttft_seconds: prefill,
            tpot_seconds: step,
        }
    }
}

fn outcomes(
    scenario: &Scenario,
    outcome: impl Fn(&SimulatedRequest) -> Result<RequestOutcome, ExperimentError>,
) -> Result<Vec<RequestOutcome>, ExperimentError> {
    scenario.requests.iter().map(outcome).collect()
}

/// Returns the outcome of one request under a baseline of the class.
///
/// Decode steps of a baseline do not depend on the routing.
fn baseline_outcome(
    scenario: &Scenario,
    strategy: Strategy,
    of_class: &Baseline,
    request: &SimulatedRequest,
) -> Result<RequestOutcome, ExperimentError> {
    let steps = scenario.setting.decode_steps;
    let mut problem = scenario.problem(request.input_tokens, steps, request.prefill.clone())?;
    // Only the cost is used: limits must not exclude the baseline.
    problem.slo = Slo::new(1e9, 1e9);
    if strategy == Strategy::Cpu {
        // The size is that of the class, as for all strategies.
        let only = of_class.main_bytes;
        problem.specs.main = SizeRange { min_bytes: only, max_bytes: only, ..problem.specs.main };
    }
    let baselines = baselines(&problem).map_err(|error| scenario.plan_error(PlanError::Problem(error)))?;
    let found = match strategy {
        Strategy::Cpu => baselines.cpu,
        Strategy::Gpu => baselines.gpu,
        _ => baselines.fetch,
    };
    // A request of the class needs no more memory than the class.
    let found = found.as_ref().unwrap_or(of_class);
    Ok(match strategy {
        Strategy::Fetch => scenario.fetch_with_transfers(found, &problem.request),
        _ => RequestOutcome::from(found),
    })
}

fn summary(
    scenario: &Scenario,
    plans: &ClassPlans,
    strategy: Strategy,
    outcomes: &[RequestOutcome],
) -> StrategyCosts {
    let mean =
        |of: fn(&RequestOutcome) -> f64| outcomes.iter().map(of).sum::<f64>() / outcomes.len().max(1) as f64;
    let plan = match strategy {
        Strategy::Remoe => Some(&plans.remoe),
        Strategy::RemoeAlways => plans.always.as_ref(),
        _ => None,
    };
    let baseline = plans.baseline(strategy);
    let planned = plan.map(|plan| plan.main_bytes);
    let remote = |plan: &Plan| plan.layers.iter().map(|layer| layer.remote.len()).sum();
    StrategyCosts {
        strategy,
        main_bytes: planned.or(baseline.map(|baseline| baseline.main_bytes)),
        remote_experts: plan.map(remote).or(baseline.map(|_| 0)),
        expected_cost: plans.expected(strategy).map(|outcome| outcome.cost),
        costs: outcomes.iter().map(|outcome| outcome.cost).collect(),
        mean_cost: mean(|outcome| outcome.cost),
        mean_ttft_seconds: mean(|outcome| outcome.ttft_seconds),
        mean_tpot_seconds: mean(|outcome| outcome.tpot_seconds),
        late: outcomes.iter().filter(|outcome| !outcome.is_in_time(scenario)).count(),
    }
}
