//! Cost and latency of a request from times and rates: of a request that runs alone, or under load from arrivals.

use crate::alive::{
    Alive, Latency, Service, alive_beside, latency_unless, mean_per_second, simplified_arrivals,
};
use crate::cost::sleepers::{GroupLife, SleepingGroup, SleepingGroups};
use crate::cost::{LimitViolations, TPOT_SLACK, TTFT_SLACK};
use crate::model::Model;
use crate::problem::{Arrivals, Quantile};
use serde::Serialize;

/// Largest batch of a decode step for which times are computed. Beyond it steps grow linearly.
const MOST_ROWS: u32 = 64;
/// Work of simulating one request, in summed terms.
const TERMS_PER_SIMULATED_REQUEST: usize = 5;
/// Slack of shares and utilisations.
const SHARE_SLACK: f64 = 1e-9;
/// Largest factors by which estimated waits are too low and too high.
const MAX_UNDERESTIMATION: f64 = 3.0;
const MAX_OVERESTIMATION: f64 = 4.0;
/// Wait below which latencies are not simulated, as a share of the latency of a request that runs alone.
const NEGLIGIBLE_WAIT: f64 = 1e-3;

/// Seconds of the phases of a request: of a prefill, and of one decode step at each of [`Model::batches`].
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseTimes {
    /// Seconds of a prefill.
    pub prefill: f64,
    /// Seconds of a decode step at each of [`Model::batches`].
    pub steps: Vec<f64>,
}

impl PhaseTimes {
    /// Returns times of 0. `batches`: number of [`Model::batches`].
    pub fn none(batches: usize) -> Self {
        Self { prefill: 0.0, steps: vec![0.0; batches] }
    }

    /// Adds seconds of a prefill and of decode steps.
    pub fn add(&mut self, prefill: f64, steps: impl Iterator<Item = f64>) {
        self.prefill += prefill;
        self.steps.iter_mut().zip(steps).for_each(|(sum, step)| *sum += step);
    }

    /// Returns these times plus `prefill`, and plus `step` of each of `batches`.
    pub fn plus(&self, prefill: f64, step: impl Fn(f64) -> f64, batches: &[f64]) -> Self {
        let steps = self.steps.iter().zip(batches).map(|(sum, rows)| sum + step(*rows));
        Self { prefill: self.prefill + prefill, steps: steps.collect() }
    }

    /// Lengthens each time to at least `throttle_factor` times that of `work`.
    pub fn at_least(&mut self, work: &Self, throttle_factor: f64) {
        self.prefill = self.prefill.max(throttle_factor * work.prefill);
        self.steps
            .iter_mut()
            .zip(&work.steps)
            .for_each(|(step, work)| *step = step.max(throttle_factor * work));
    }
}

/// Times and rates of the functions of a plan: everything that their cost follows from.
#[derive(Debug, Clone, PartialEq)]
pub struct ServingFunctions {
    /// Seconds of the phases of a request.
    pub times: PhaseTimes,
    /// Dollars per second of one main function.
    pub main_rate: f64,
    /// Dollars per second of all remote functions under reserved billing, without those of `sleepers`.
    pub remote_rate: f64,
    /// Dollars per request of all remote functions under invocation billing.
    pub remote_bill: f64,
    /// Seconds of a cold start of the slowest function.
    pub start_seconds: f64,
    /// Groups that scale to zero, in the order of the plan.
    pub sleepers: Vec<SleepingGroup>,
}

impl ServingFunctions {
    /// Returns a main function without remote functions or cold starts.
    pub fn of_main(times: PhaseTimes, main_rate: f64) -> Self {
        Self {
            times,
            main_rate,
            remote_rate: 0.0,
            remote_bill: 0.0,
            start_seconds: 0.0,
            sleepers: Vec::new(),
        }
    }
}

/// Cost and latency of requests.
#[derive(Debug, Clone, PartialEq)]
pub struct Bill {
    /// Mean time to first token, in seconds.
    pub ttft_seconds: f64,
    /// Mean time per output token, in seconds.
    pub tpot_seconds: f64,
    /// Latencies at the quantile of the limits, which are compared with the limits.
    pub at_quantile: LatencyPair,
    /// Dollars per request of the main function.
    pub main_cost: f64,
    /// Dollars per request of all remote functions.
    pub remote_cost: f64,
    /// Time alive and load, if the problem has [`Arrivals`].
    pub life: Option<Life>,
    /// Time alive of the groups that scale to zero, in the order of the plan.
    pub sleepers: Vec<GroupLife>,
}

/// Time to first token and time per output token, in the mean or at a quantile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatencyPair {
    /// Time to first token, in seconds.
    pub ttft: f64,
    /// Time per output token, in seconds.
    pub tpot: f64,
}

/// Accuracy of the latencies of a bill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Estimated latencies: enough for costs.
    Cost,
    /// Estimated latencies. If the estimate is too near to a limit, latencies of slower or faster functions decide.
    Bound,
    /// Estimated latencies. If the estimate is too near to a limit, they are simulated.
    Search,
    /// Simulated latencies.
    Full,
}

impl Bill {
    /// Returns the dollars of a request.
    pub fn total(&self) -> f64 {
        self.main_cost + self.remote_cost
    }
}

/// Time alive, cold starts and load of functions under arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Life {
    /// Share of the time in which functions are alive, including starts and idle windows.
    pub alive_share: f64,
    /// Cold starts in an hour.
    pub wakes_per_hour: f64,
    /// Seconds of a cold start.
    pub start_seconds: f64,
    /// Share of the requests that wait for a cold start.
    pub cold_share: f64,
    /// Time to first token of a cold request; that of a warm request if functions never scale to zero.
    pub cold_ttft_seconds: f64,
    /// Mean number of requests that a main function serves at once.
    pub in_flight: f64,
    /// Seconds from the admission of a request to its end, at that load.
    pub service_seconds: f64,
    /// Seconds that a request waits for admission in a warm function; 0 if the utilisation is 1 or more.
    pub wait_seconds: f64,
    /// Arrival rate divided by the largest rate that the main functions can serve.
    pub utilisation: f64,
    /// Dollars in an hour.
    pub dollars_per_hour: f64,
    /// Number of groups that scale to zero. A request that uses one before it is ready is cold as well: the
    /// local fallback loads and computes its experts, which lengthens the prefill.
    #[serde(skip_serializing_if = "is_none")]
    pub sleeping_groups: usize,
    /// Time per output token of such a request, whose first steps use the local fallback; absent without such groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_tpot_seconds: Option<f64>,
    /// Latencies with their quantiles. None where more requests come than can be served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
}

fn is_none(count: &usize) -> bool {
    *count == 0
}

impl Model<'_> {
    /// Returns the batch sizes of decode steps for which times are computed: powers of 2 up to the concurrency.
    ///
    /// Without arrivals a request runs alone: the only batch size is 1.
    pub fn batches(&self) -> Vec<f64> {
        let most = match self.problem.arrivals {
            Some(_) => self.problem.request.concurrency.clamp(1, MOST_ROWS),
            None => 1,
        };
        let mut batches: Vec<f64> =
            (0..).map(|power| 1_u32 << power).take_while(|rows| *rows < most).map(f64::from).collect();
        batches.push(f64::from(most));
        batches
    }

    /// Returns the seconds of a cold start of functions with these weights; 0 if the problem does not state starts.
    pub fn start_seconds(&self, main_bytes: f64, remote_bytes: f64) -> f64 {
        self.problem.starts.map_or(0.0, |starts| starts.seconds(main_bytes, remote_bytes))
    }

    /// Computes cost and latency of a request on `running`.
    pub fn bill(&self, running: &ServingFunctions, detail: Detail) -> Bill {
        match &self.problem.arrivals {
            None => self.bill_alone(running),
            Some(arrivals) => self.bill_under_load(running, arrivals, detail),
        }
    }

    /// Computes a fast lower bound of [`Self::bill`], for a search over many sizes.
    pub fn quick_bill(&self, running: &ServingFunctions) -> Bill {
        match &self.problem.arrivals {
            None => self.bill_alone(running),
            Some(arrivals) => self.bill_under_load(running, &simplified_arrivals(arrivals), Detail::Bound),
        }
    }

    /// Computes cost and latency of a single request without arrivals.
    fn bill_alone(&self, running: &ServingFunctions) -> Bill {
        let step = running.times.steps.first().copied().unwrap_or(0.0);
        let seconds = running.times.prefill + self.output * step;
        let mains = f64::from(self.problem.pricing.main_replicas);
        let ttft = running.times.prefill + self.problem.cold_start_seconds;
        let tpot = if self.output > 0.0 { step } else { 0.0 };
        Bill {
            ttft_seconds: ttft,
            tpot_seconds: tpot,
            at_quantile: LatencyPair { ttft, tpot },
            main_cost: seconds * running.main_rate,
            remote_cost: seconds * running.remote_rate / mains + running.remote_bill,
            life: None,
            sleepers: Vec::new(),
        }
    }

    fn bill_under_load(&self, running: &ServingFunctions, arrivals: &Arrivals, detail: Detail) -> Bill {
        let mains = self.problem.pricing.main_replicas;
        let service = Service {
            prefill_seconds: running.times.prefill,
            step_seconds: self.steps_of_all_batches(&running.times.steps),
            steps: self.output,
            concurrency: self.problem.request.concurrency.min(MOST_ROWS),
            mains,
        };
        // Work of replaying the recorded arrivals.
        self.meter.count(arrivals.recorded_seconds.as_ref().map_or(0, Vec::len));
        let target = self.problem.slo.target_itl_seconds;
        let load: Alive = alive_beside(arrivals, &service, running.start_seconds, target);
        let per_second = mean_per_second(arrivals);
        let rate = f64::from(mains) * running.main_rate + running.remote_rate;
        // Without requests there is no cost per request.
        let per_request = |rate: f64| if per_second > 0.0 { load.share * rate / per_second } else { 0.0 };
        let wait_seconds = if load.saturated { 0.0 } else { load.wait_seconds };
        let mean = LatencyPair { ttft: load.first_token_seconds + wait_seconds, tpot: load.tpot_seconds };
        let alone = self.least_latency(arrivals, &service);
        let estimate = self.estimated_quantile(alone, mean, load.utilisation);
        let is_doubtful = self.needs_simulation(arrivals, alone, estimate, running.start_seconds);
        let simulates = detail != Detail::Cost && (is_doubtful || detail == Detail::Full);
        let simulated = match simulates && !load.saturated {
            true => self.latency(arrivals, &service, running.start_seconds, detail),
            false => None,
        };
        let cold_start = self.problem.cold_start_seconds;
        let (mean, at_quantile) = match simulated {
            None => (mean, estimate),
            Some(latency) => {
                let at = |quantile: Option<Quantile>| LatencyPair {
                    ttft: latency.ttft.at(quantile),
                    tpot: latency.tpot.at(quantile),
                };
                // Whether limits hold must not depend on `detail`.
                let at_quantile = if is_doubtful { at(self.problem.slo.quantile) } else { estimate };
                (at(None), at_quantile)
            }
        };
        let at_quantile = LatencyPair { ttft: at_quantile.ttft + cold_start, ..at_quantile };
        let sleeps = arrivals.idle_seconds.is_some();
        let sleeping = SleepingGroups::new(&running.sleepers, arrivals, &load, self.output);
        let sleeping_cost = if per_second > 0.0 { sleeping.rate / per_second } else { 0.0 };
        Bill {
            ttft_seconds: mean.ttft + cold_start,
            tpot_seconds: mean.tpot,
            at_quantile,
            main_cost: per_request(f64::from(mains) * running.main_rate),
            remote_cost: per_request(running.remote_rate) + sleeping_cost + running.remote_bill,
            life: Some(Life {
                alive_share: load.share,
                wakes_per_hour: load.wakes_per_second * 3600.0,
                start_seconds: running.start_seconds,
                cold_share: load.cold_share.max(sleeping.cold_share),
                cold_ttft_seconds: if sleeps {
                    at_quantile.ttft + running.start_seconds
                } else {
                    at_quantile.ttft + sleeping.cold_prefill_seconds
                },
                in_flight: load.in_flight,
                service_seconds: load.service_seconds,
                wait_seconds,
                utilisation: load.utilisation,
                dollars_per_hour: 3600.0
                    * (load.share * rate + sleeping.rate + per_second * running.remote_bill),
                sleeping_groups: sleeping.lives.len(),
                cold_tpot_seconds: (!sleeping.lives.is_empty())
                    .then_some(at_quantile.tpot + sleeping.cold_step_seconds),
                latency: simulated.map(|latency| latency.after(cold_start)),
            }),
            sleepers: sleeping.lives,
        }
    }

    /// Returns the least latencies of any request: those of a typical request that runs alone.
    ///
    /// If lengths vary and limits name a quantile, shorter requests have less: returns 0.
    fn least_latency(&self, arrivals: &Arrivals, service: &Service) -> LatencyPair {
        let varies = arrivals.input_variation > 0.0 || arrivals.output_variation > 0.0;
        if varies && self.problem.slo.quantile.is_some() {
            return LatencyPair { ttft: 0.0, tpot: 0.0 };
        }
        let step = service.step_seconds.first().copied().unwrap_or(0.0);
        LatencyPair { ttft: service.prefill_seconds, tpot: if self.output > 0.0 { step } else { 0.0 } }
    }

    /// Estimates latencies at the quantile of the limits from the mean latencies.
    ///
    /// Assumes that the share `utilisation` of the requests waits, for an exponentially distributed time.
    fn estimated_quantile(&self, alone: LatencyPair, mean: LatencyPair, utilisation: f64) -> LatencyPair {
        let Some(quantile) = self.problem.slo.quantile else { return mean };
        let share = utilisation.clamp(f64::MIN_POSITIVE, 1.0);
        let factor = (share / (1.0 - quantile.share())).ln().max(0.0) / share;
        let estimate = |alone: f64, mean: f64| alone + (mean - alone).max(0.0) * factor.max(1.0);
        LatencyPair { ttft: estimate(alone.ttft, mean.ttft), tpot: estimate(alone.tpot, mean.tpot) }
    }

    /// Reports if a limit is so near to `estimate` that only a simulation tells whether it holds.
    fn needs_simulation(
        &self,
        arrivals: &Arrivals,
        alone: LatencyPair,
        estimate: LatencyPair,
        start_seconds: f64,
    ) -> bool {
        let is_doubtful = |least: f64, estimate: f64, limit: f64| {
            let wait = (estimate - least).max(0.0);
            if wait <= NEGLIGIBLE_WAIT * least {
                return false;
            }
            let (low, high) = (wait / MAX_OVERESTIMATION, wait * MAX_UNDERESTIMATION);
            (least + low..=least + high).contains(&limit)
        };
        let ttft =
            |limit: f64| is_doubtful(alone.ttft, estimate.ttft, limit - self.problem.cold_start_seconds);
        let cold = self.problem.slo.cold_ttft_seconds.filter(|_| arrivals.idle_seconds.is_some());
        ttft(self.ttft_limit)
            || cold.is_some_and(|limit| ttft(limit - start_seconds))
            || is_doubtful(alone.tpot, estimate.tpot, self.tpot_limit)
    }

    /// Simulates the latencies of `service`, or returns those of an earlier simulation.
    fn latency(
        &self,
        arrivals: &Arrivals,
        service: &Service,
        start_seconds: f64,
        detail: Detail,
    ) -> Option<Latency> {
        // A quick search simulates random arrivals in place of recorded ones: part of the key.
        let recorded = if arrivals.recorded_seconds.is_some() { 1.0 } else { 0.0 };
        let mut times = vec![recorded, start_seconds, service.prefill_seconds];
        times.extend(&service.step_seconds);
        let mut simulated = self.latencies.borrow_mut();
        if let Some(latency) = simulated.get(&times) {
            return latency;
        }
        if let Some(latency) = simulated.bound(&times).filter(|_| detail == Detail::Bound) {
            return Some(latency);
        }
        let slo = &self.problem.slo;
        let ends = |requests: usize| {
            self.meter.count(requests * TERMS_PER_SIMULATED_REQUEST);
            self.meter.ends()
        };
        let found = latency_unless(arrivals, service, start_seconds, slo.target_itl_seconds, &ends);
        if found.is_none() && self.meter.ends() {
            return None;
        }
        let is_late = found.is_none_or(|latency| {
            let (ttft, tpot) = (latency.ttft.at(slo.quantile), latency.tpot.at(slo.quantile));
            ttft + self.problem.cold_start_seconds > self.ttft_limit || tpot > self.tpot_limit
        });
        simulated.insert(times, found, is_late);
        found
    }

    /// Interpolates the seconds of a step with 1, 2, .. requests from those at [`Self::batches`].
    fn steps_of_all_batches(&self, steps: &[f64]) -> Vec<f64> {
        let batches = self.batches();
        let mut every = Vec::new();
        let mut largest = 0.0_f64;
        for (pair, ends) in batches.windows(2).zip(steps.windows(2)) {
            let mut rows = pair[0];
            while rows < pair[1] {
                let fraction = (rows - pair[0]) / (pair[1] - pair[0]);
                largest = largest.max(ends[0] + (ends[1] - ends[0]) * fraction);
                every.push(largest);
                rows += 1.0;
            }
        }
        every.push(largest.max(steps.last().copied().unwrap_or(0.0)));
        every
    }

    /// Adds the limits of latency and load that `bill` breaks to `violations`.
    pub fn check_latency(&self, bill: &Bill, violations: &mut LimitViolations) {
        let slo = &self.problem.slo;
        // While the main function is alive, its limits hold for all requests, also if remote groups are at zero.
        let sleeping = bill.life.filter(|life| life.sleeping_groups > 0);
        let cold_ttft =
            sleeping.filter(|_| slo.cold_ttft_seconds.is_none()).map(|life| life.cold_ttft_seconds);
        let cold_tpot = sleeping.and_then(|life| life.cold_tpot_seconds);
        let LatencyPair { ttft, tpot } = bill.at_quantile;
        violations.unless_at_most(
            "ttft",
            cold_ttft.map_or(ttft, |cold| cold.max(ttft)),
            self.ttft_limit,
            TTFT_SLACK,
        );
        violations.unless_at_most(
            "tpot",
            cold_tpot.map_or(tpot, |cold| cold.max(tpot)),
            self.tpot_limit,
            TPOT_SLACK,
        );
        let Some(life) = &bill.life else { return };
        violations.unless_at_most("load", life.utilisation, 1.0, -SHARE_SLACK);
        let all_sleep =
            self.problem.arrivals.as_ref().is_some_and(|arrivals| arrivals.idle_seconds.is_some());
        let sleeps = all_sleep || life.sleeping_groups > 0;
        if let Some(allowed) = slo.cold_ttft_seconds.filter(|_| sleeps) {
            violations.unless_at_most("cold_ttft", life.cold_ttft_seconds, allowed, TTFT_SLACK);
        }
        if let Some(allowed) = slo.cold_share {
            violations.unless_at_most("cold_share", life.cold_share, allowed, SHARE_SLACK);
        }
    }
}
