//! Cold starts from zero: cost of the Remoe paper's chain (predict, pre-allocate, plan, partition), compared with plans that
//! know more or less about the waiting requests.

use crate::error::ExperimentError;
use crate::routing::Routing;
use crate::scenario::{ExpertShares, Scenario};
use fastrand::Rng;
use remoe_planner::{
    Arrivals, Budget, Options, Plan, PlanDraft, Problem, evaluate, preallocate_for, replan, solve,
};
use serde::Serialize;

/// Topics of requests in the mixed and changing loads.
const TOPICS: usize = 8;
/// Requests that wait at a wake.
const WAITING: usize = 4;
/// Consecutive wakes with one topic in [`TopicMix::Changing`].
const WAKES_PER_TOPIC: usize = 4;
/// Spread of requests around their topic.
const SPREAD: f64 = 2.0;
/// Spread of predictions around the true usage.
const ERROR: f64 = 1.5;

/// Topics of the requests that wake functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopicMix {
    /// All requests have the same topic.
    OneTopic,
    /// Each request has one of eight topics at random.
    Mixed,
    /// The topic changes after every few wakes.
    Changing,
}

/// Dollars of 1,000 requests that wake a deployment, for plans with different knowledge.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WakeCosts {
    /// Topics of the requests.
    pub load: TopicMix,
    /// The full search with the requests' true usage.
    pub oracle: f64,
    /// The chain: pre-allocation and incremental plan with the predicted usage.
    pub chain: f64,
    /// The full search with the true usage of the wake before.
    pub last: f64,
    /// The full search with uniform usage.
    pub uniform: f64,
    /// Share of wakes in which the chain's main function has the size of the oracle's.
    pub same_main: f64,
    /// Number of wakes that break a limit: of oracle, chain, last plan and uniform.
    pub missed: [usize; 4],
}

impl Scenario {
    /// Plans `wakes` wakes of each load. Functions scale to zero between them, as in `arrivals`.
    ///
    /// # Errors
    /// The scenario is invalid, or no plan keeps its limits.
    pub fn wakes(
        &self,
        arrivals: &Arrivals,
        wakes: usize,
        seed: u64,
    ) -> Result<Vec<WakeCosts>, ExperimentError> {
        let loads = [TopicMix::OneTopic, TopicMix::Mixed, TopicMix::Changing];
        loads.into_iter().map(|load| self.wakes_of(load, arrivals, wakes, seed)).collect()
    }

    fn wakes_of(
        &self,
        load: TopicMix,
        arrivals: &Arrivals,
        wakes: usize,
        seed: u64,
    ) -> Result<WakeCosts, ExperimentError> {
        let (layers, experts) = (self.shape.moe_layers(), self.shape.facts.experts);
        let (mut random, usage) = (Rng::with_seed(seed), Routing::default());
        let topics: Vec<ExpertShares> =
            (0..TOPICS).map(|_| (0..layers).map(|_| usage.mean(experts, &mut random)).collect()).collect();
        let uniform =
            self.solved(&self.wake_problem(arrivals, vec![vec![1.0 / experts as f64; experts]; layers])?)?;
        let (mut before, mut last) = (uniform.clone(), uniform.clone());
        let mut sums = [0.0; 4];
        let (mut missed, mut same_main) = ([0; 4], 0_usize);
        for wake in 0..wakes {
            let mut truth = vec![vec![0.0; experts]; layers];
            for _ in 0..WAITING {
                let topic = match load {
                    TopicMix::OneTopic => 0,
                    TopicMix::Mixed => random.usize(..TOPICS),
                    TopicMix::Changing => wake / WAKES_PER_TOPIC % TOPICS,
                };
                add(&mut truth, &draw_around(&topics[topic], SPREAD, &mut random), 1.0 / WAITING as f64);
            }
            let predicted = draw_around(&truth, ERROR, &mut random);
            let truth = self.wake_problem(arrivals, truth)?;
            let oracle = self.solved(&truth)?;
            let chain = self.next_chained_plan(&self.wake_problem(arrivals, predicted)?, &before)?;
            for (index, plan) in [&oracle, &chain, &last, &uniform].into_iter().enumerate() {
                let evaluation = evaluate(&truth, &PlanDraft::from(plan), false)
                    .map_err(|error| self.plan_error(error))?;
                sums[index] += evaluation.total_cost;
                missed[index] += usize::from(!evaluation.violations.is_empty());
            }
            same_main += usize::from(oracle.main_bytes == chain.main_bytes);
            (before, last) = (chain, oracle);
        }
        let count = wakes.max(1) as f64;
        let [oracle, chain, last, uniform] = sums.map(|sum| sum * 1000.0 / count);
        Ok(WakeCosts { load, oracle, chain, last, uniform, same_main: same_main as f64 / count, missed })
    }

    /// Returns the problem of requests with `shares` that wake a deployment.
    fn wake_problem(&self, arrivals: &Arrivals, shares: ExpertShares) -> Result<Problem, ExperimentError> {
        let tokens = self.class_problem()?.request.input_tokens;
        let problem = self.problem(tokens, self.setting.decode_steps, shares)?;
        Ok(Problem { arrivals: Some(arrivals.clone()), ..problem })
    }

    fn solved(&self, problem: &Problem) -> Result<Plan, ExperimentError> {
        let answer = solve(problem, None, &Options::default()).map_err(|error| self.plan_error(error))?;
        Ok(answer.plan)
    }

    /// Returns the plan of the chain after the plan `before`.
    fn next_chained_plan(&self, predicted: &Problem, before: &Plan) -> Result<Plan, ExperimentError> {
        let main = match preallocate_for(predicted, &PlanDraft::from(before)) {
            Ok(answer) => answer.plan,
            // If no size keeps the limits in the worst case, the size of the last plan is kept.
            Err(_) => before.clone(),
        };
        let problem = predicted.with_main(main.main_bytes, main.main_vcpus);
        let options = Options::default();
        let answer = replan(&problem, &PlanDraft::from(&main), &options, Budget::UNLIMITED)
            .map_err(|error| self.plan_error(error))?;
        Ok(answer.plan)
    }
}

/// Draws usage around `mean`: each share times a random factor from 1/spread to spread.
fn draw_around(mean: &ExpertShares, spread: f64, random: &mut Rng) -> ExpertShares {
    let routing = Routing { spread, ..Routing::default() };
    mean.iter().map(|row| routing.draw(row, random)).collect()
}

fn add(sum: &mut ExpertShares, rows: &ExpertShares, weight: f64) {
    for (sum, row) in sum.iter_mut().zip(rows) {
        sum.iter_mut().zip(row).for_each(|(sum, share)| *sum += share * weight);
    }
}
