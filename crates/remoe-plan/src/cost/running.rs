//! From times and rates to dollars: for one request that runs alone, or for functions that are alive while
//! requests come.

use crate::alive::{Alive, Latency, Service, alive_beside, latency_unless, mean_per_second, quick};
use crate::cost::sleepers::{GroupLife, Sleeper, Sleeping};
use crate::cost::{LimitViolations, TPOT_SLACK, TTFT_SLACK};
use crate::model::Model;
use crate::problem::{Arrivals, Quantile};
use serde::Serialize;

/// Requests in one decode step for which times are worked out, at most: beyond, steps grow as at the end.
const MOST_ROWS: u32 = 64;
/// Terms that take as long as a simulated request.
const TERMS_OF_A_REQUEST: usize = 5;
/// Slack of shares and utilisations.
const SHARE_SLACK: f64 = 1e-9;
/// Factors by which estimates of waits may be too low and too high.
const MOST_UNDERESTIMATED: f64 = 3.0;
const MOST_OVERESTIMATED: f64 = 4.0;
/// Waits, as a part of what a request takes alone, that are not worth a simulation.
const NEGLIGIBLE_WAIT: f64 = 1e-3;

/// Seconds of a prefill, and of one decode step at each of [`Model::batches`].
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// Seconds of a prefill.
    pub prefill: f64,
    /// Seconds of a decode step at each of [`Model::batches`].
    pub steps: Vec<f64>,
}

impl Times {
    /// No seconds, at so many batches.
    pub fn none(batches: usize) -> Self {
        Self { prefill: 0.0, steps: vec![0.0; batches] }
    }

    /// Adds seconds of a prefill and of decode steps.
    pub fn add(&mut self, prefill: f64, steps: impl Iterator<Item = f64>) {
        self.prefill += prefill;
        self.steps.iter_mut().zip(steps).for_each(|(sum, step)| *sum += step);
    }

    /// These and `prefill`, and what `step` takes with so many requests.
    pub fn plus(&self, prefill: f64, step: impl Fn(f64) -> f64, batches: &[f64]) -> Self {
        let steps = self.steps.iter().zip(batches).map(|(sum, rows)| sum + step(*rows));
        Self { prefill: self.prefill + prefill, steps: steps.collect() }
    }

    /// The longer of these and `stretch` times `work`, time by time.
    pub fn at_least(&mut self, work: &Self, stretch: f64) {
        self.prefill = self.prefill.max(stretch * work.prefill);
        self.steps.iter_mut().zip(&work.steps).for_each(|(step, work)| *step = step.max(stretch * work));
    }
}

/// Functions that serve, by what their cost follows from.
#[derive(Debug, Clone, PartialEq)]
pub struct ServingFunctions {
    /// How long a request's parts take.
    pub times: Times,
    /// Dollars per second of one main function.
    pub main_rate: f64,
    /// Dollars per second of all remote functions, where they are paid for as long as they exist.
    pub remote_rate: f64,
    /// Dollars per request of remote functions that are paid for what they work.
    pub remote_bill: f64,
    /// Seconds from nothing to ready of the slowest function.
    pub start_seconds: f64,
    /// Remote functions that end by themselves, in the order of the plan.
    pub sleepers: Vec<Sleeper>,
}

impl ServingFunctions {
    /// A main function with nothing remote that need not start.
    pub fn of_main(times: Times, main_rate: f64) -> Self {
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
    /// In the mean over requests.
    pub ttft_seconds: f64,
    /// Seconds per output token.
    pub tpot_seconds: f64,
    /// Figures that the limits are compared with: the quantile that they name.
    pub limited: Limited,
    /// Dollars per request.
    pub main_cost: f64,
    /// Dollars per request of all remote functions.
    pub remote_cost: f64,
    /// Where requests come as [`Arrivals`] say.
    pub life: Option<Life>,
    /// How groups that end by themselves live, in the order of the plan.
    pub sleepers: Vec<GroupLife>,
}

/// Times at the quantile that limits name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limited {
    /// Time to first token, in seconds.
    pub ttft: f64,
    /// Time per output token, in seconds.
    pub tpot: f64,
}

/// Figures that a bill has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Estimated latencies.
    Cost,
    /// Estimated latencies, or where these do not tell whether limits hold, those of slower or faster functions.
    Bound,
    /// Estimated latencies, or where these do not tell whether limits hold, simulated ones.
    Search,
    /// Simulated latencies.
    Full,
}

impl Bill {
    /// Dollars of all parts.
    pub fn total(&self) -> f64 {
        self.main_cost + self.remote_cost
    }
}

/// How functions live while requests come.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Life {
    /// Share of the time in which functions are alive, starts and idle windows included.
    pub alive_share: f64,
    /// Starts from nothing in an hour.
    pub wakes_per_hour: f64,
    /// Seconds of such a start.
    pub start_seconds: f64,
    /// Share of the requests that wait for a start.
    pub cold_share: f64,
    /// Time to first token of a request that finds everything asleep; that of a warm one where nothing
    /// ever sleeps.
    pub cold_ttft_seconds: f64,
    /// Requests that a main function serves at once, in the mean over all time.
    pub in_flight: f64,
    /// Seconds that a request is served, at that load.
    pub service_seconds: f64,
    /// Seconds that a request waits for its turn in a warm function; 0 where there are more requests than
    /// can ever be served.
    pub wait_seconds: f64,
    /// Arrivals over what the main functions can serve at most.
    pub utilisation: f64,
    /// Dollars in an hour.
    pub dollars_per_hour: f64,
    /// Groups that end by themselves. A request that uses one while it is not ready is cold as well: its prefill takes as
    /// much longer as the fallback needs for what they host.
    #[serde(skip_serializing_if = "is_none")]
    pub sleeping_groups: usize,
    /// Time per output token of such a request, whose first steps have the fallback; that of others where there is none.
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
    /// Requests in one decode step for which times are worked out: 1, and powers of 2 up to as many as run
    /// at once where requests come.
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

    /// Seconds from nothing to ready of functions with these weights; 0 where the problem does not say.
    pub fn start_seconds(&self, main_bytes: f64, remote_bytes: f64) -> f64 {
        self.problem.starts.map_or(0.0, |starts| starts.seconds(main_bytes, remote_bytes))
    }

    /// Bills a request of `running` functions.
    pub fn bill(&self, running: &ServingFunctions, detail: Detail) -> Bill {
        match &self.problem.arrivals {
            None => self.bill_alone(running),
            Some(arrivals) => self.bill_alive(running, arrivals, detail),
        }
    }

    /// [`Self::bill`] for a search over many sizes.
    pub fn quick_bill(&self, running: &ServingFunctions) -> Bill {
        match &self.problem.arrivals {
            None => self.bill_alone(running),
            Some(arrivals) => self.bill_alive(running, &quick(arrivals), Detail::Bound),
        }
    }

    /// One request on functions that nothing else uses.
    fn bill_alone(&self, running: &ServingFunctions) -> Bill {
        let step = running.times.steps.first().copied().unwrap_or(0.0);
        let seconds = running.times.prefill + self.output * step;
        let mains = f64::from(self.problem.pricing.main_replicas);
        let ttft = running.times.prefill + self.problem.cold_start_seconds;
        let tpot = if self.output > 0.0 { step } else { 0.0 };
        Bill {
            ttft_seconds: ttft,
            tpot_seconds: tpot,
            limited: Limited { ttft, tpot },
            main_cost: seconds * running.main_rate,
            remote_cost: seconds * running.remote_rate / mains + running.remote_bill,
            life: None,
            sleepers: Vec::new(),
        }
    }

    fn bill_alive(&self, running: &ServingFunctions, arrivals: &Arrivals, detail: Detail) -> Bill {
        let mains = self.problem.pricing.main_replicas;
        let service = Service {
            prefill_seconds: running.times.prefill,
            step_seconds: self.every_batch(&running.times.steps),
            steps: self.output,
            concurrency: self.problem.request.concurrency.min(MOST_ROWS),
            mains,
        };
        // A record is replayed.
        self.meter.count(arrivals.recorded_seconds.as_ref().map_or(0, Vec::len));
        let target = self.problem.slo.target_itl_seconds;
        let found: Alive = alive_beside(arrivals, &service, running.start_seconds, target);
        let per_second = mean_per_second(arrivals);
        let rate = f64::from(mains) * running.main_rate + running.remote_rate;
        // Without any request there is nothing to share the cost.
        let each = |rate: f64| if per_second > 0.0 { found.share * rate / per_second } else { 0.0 };
        let wait_seconds = if found.saturated { 0.0 } else { found.wait_seconds };
        let mean = Limited { ttft: found.first_token_seconds + wait_seconds, tpot: found.tpot_seconds };
        let alone = self.alone(arrivals, &service);
        let estimate = self.at_quantile(alone, mean, found.utilisation);
        let is_doubtful = self.is_in_doubt(arrivals, alone, estimate, running.start_seconds);
        let simulates = detail != Detail::Cost && (is_doubtful || detail == Detail::Full);
        let simulated = match simulates && !found.saturated {
            true => self.latency(arrivals, &service, running.start_seconds, detail),
            false => None,
        };
        let cold_start = self.problem.cold_start_seconds;
        let (mean, limited) = match simulated {
            None => (mean, estimate),
            Some(latency) => {
                let at = |quantile: Option<Quantile>| Limited {
                    ttft: latency.ttft.at(quantile),
                    tpot: latency.tpot.at(quantile),
                };
                // Limits hold or not by the same figures, whatever else is asked for.
                let limited = if is_doubtful { at(self.problem.slo.quantile) } else { estimate };
                (at(None), limited)
            }
        };
        let limited = Limited { ttft: limited.ttft + cold_start, ..limited };
        let sleeps = arrivals.idle_seconds.is_some();
        let sleeping = Sleeping::new(&running.sleepers, arrivals, &found, self.output);
        let of_sleepers = if per_second > 0.0 { sleeping.rate / per_second } else { 0.0 };
        Bill {
            ttft_seconds: mean.ttft + cold_start,
            tpot_seconds: mean.tpot,
            limited,
            main_cost: each(f64::from(mains) * running.main_rate),
            remote_cost: each(running.remote_rate) + of_sleepers + running.remote_bill,
            life: Some(Life {
                alive_share: found.share,
                wakes_per_hour: found.wakes_per_second * 3600.0,
                start_seconds: running.start_seconds,
                cold_share: found.cold_share.max(sleeping.cold_share),
                cold_ttft_seconds: if sleeps {
                    limited.ttft + running.start_seconds
                } else {
                    limited.ttft + sleeping.cold_prefill_seconds
                },
                in_flight: found.in_flight,
                service_seconds: found.service_seconds,
                wait_seconds,
                utilisation: found.utilisation,
                dollars_per_hour: 3600.0
                    * (found.share * rate + sleeping.rate + per_second * running.remote_bill),
                sleeping_groups: sleeping.lives.len(),
                cold_tpot_seconds: (!sleeping.lives.is_empty())
                    .then_some(limited.tpot + sleeping.cold_step_seconds),
                latency: simulated.map(|latency| latency.after(cold_start)),
            }),
            sleepers: sleeping.lives,
        }
    }

    /// The least latencies of any request: those of a typical one that runs alone, 0 where others are shorter.
    fn alone(&self, arrivals: &Arrivals, service: &Service) -> Limited {
        let varies = arrivals.input_variation > 0.0 || arrivals.output_variation > 0.0;
        if varies && self.problem.slo.quantile.is_some() {
            return Limited { ttft: 0.0, tpot: 0.0 };
        }
        let step = service.step_seconds.first().copied().unwrap_or(0.0);
        Limited { ttft: service.prefill_seconds, tpot: if self.output > 0.0 { step } else { 0.0 } }
    }

    /// An estimate of the quantile that limits name from the mean: of the requests, `utilisation` wait for an
    /// exponential time.
    fn at_quantile(&self, alone: Limited, mean: Limited, utilisation: f64) -> Limited {
        let Some(quantile) = self.problem.slo.quantile else { return mean };
        let share = utilisation.clamp(f64::MIN_POSITIVE, 1.0);
        let factor = (share / (1.0 - quantile.share())).ln().max(0.0) / share;
        let estimate = |alone: f64, mean: f64| alone + (mean - alone).max(0.0) * factor.max(1.0);
        Limited { ttft: estimate(alone.ttft, mean.ttft), tpot: estimate(alone.tpot, mean.tpot) }
    }

    /// Returns true if a limit is so near to `estimate` that only a simulation tells whether it holds.
    fn is_in_doubt(
        &self,
        arrivals: &Arrivals,
        alone: Limited,
        estimate: Limited,
        start_seconds: f64,
    ) -> bool {
        let doubtful = |least: f64, estimate: f64, limit: f64| {
            let wait = (estimate - least).max(0.0);
            if wait <= NEGLIGIBLE_WAIT * least {
                return false;
            }
            let (low, high) = (wait / MOST_OVERESTIMATED, wait * MOST_UNDERESTIMATED);
            (least + low..=least + high).contains(&limit)
        };
        let ttft = |limit: f64| doubtful(alone.ttft, estimate.ttft, limit - self.problem.cold_start_seconds);
        let cold = self.problem.slo.cold_ttft_seconds.filter(|_| arrivals.idle_seconds.is_some());
        ttft(self.ttft_limit)
            || cold.is_some_and(|limit| ttft(limit - start_seconds))
            || doubtful(alone.tpot, estimate.tpot, self.tpot_limit)
    }

    /// Latencies of `service`, those of before where they are known.
    fn latency(
        &self,
        arrivals: &Arrivals,
        service: &Service,
        start_seconds: f64,
        detail: Detail,
    ) -> Option<Latency> {
        // A search may take random arrivals for recorded ones.
        let recorded = if arrivals.recorded_seconds.is_some() { 1.0 } else { 0.0 };
        let mut times = vec![recorded, start_seconds, service.prefill_seconds];
        times.extend(&service.step_seconds);
        let mut known = self.latencies.borrow_mut();
        if let Some(latency) = known.get(&times) {
            return latency;
        }
        if let Some(latency) = known.standing_for(&times).filter(|_| detail == Detail::Bound) {
            return Some(latency);
        }
        let slo = &self.problem.slo;
        let ends = |requests: usize| {
            self.meter.count(requests * TERMS_OF_A_REQUEST);
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
        known.keep(times, found, is_late);
        found
    }

    /// Seconds of a step with 1, 2, .. requests, from those at [`Self::batches`].
    fn every_batch(&self, steps: &[f64]) -> Vec<f64> {
        let batches = self.batches();
        let mut every = Vec::new();
        let mut largest = 0.0_f64;
        for (pair, ends) in batches.windows(2).zip(steps.windows(2)) {
            let mut rows = pair[0];
            while rows < pair[1] {
                let beside = (rows - pair[0]) / (pair[1] - pair[0]);
                largest = largest.max(ends[0] + (ends[1] - ends[0]) * beside);
                every.push(largest);
                rows += 1.0;
            }
        }
        every.push(largest.max(steps.last().copied().unwrap_or(0.0)));
        every
    }

    /// The limits of times and load that `bill` does not keep.
    pub fn late(&self, bill: &Bill, found: &mut LimitViolations) {
        let slo = &self.problem.slo;
        // A main function that is there promises its limits to everyone, whatever sleeps behind it.
        let behind = bill.life.filter(|life| life.sleeping_groups > 0);
        let first = behind.filter(|_| slo.cold_ttft_seconds.is_none()).map(|life| life.cold_ttft_seconds);
        let step = behind.and_then(|life| life.cold_tpot_seconds);
        let Limited { ttft, tpot } = bill.limited;
        found.unless_at_most("ttft", first.map_or(ttft, |cold| cold.max(ttft)), self.ttft_limit, TTFT_SLACK);
        found.unless_at_most("tpot", step.map_or(tpot, |cold| cold.max(tpot)), self.tpot_limit, TPOT_SLACK);
        let Some(life) = &bill.life else { return };
        found.unless_at_most("load", life.utilisation, 1.0, -SHARE_SLACK);
        let all_sleep =
            self.problem.arrivals.as_ref().is_some_and(|arrivals| arrivals.idle_seconds.is_some());
        let sleeps = all_sleep || life.sleeping_groups > 0;
        if let Some(allowed) = slo.cold_ttft_seconds.filter(|_| sleeps) {
            found.unless_at_most("cold_ttft", life.cold_ttft_seconds, allowed, TTFT_SLACK);
        }
        if let Some(allowed) = slo.cold_share {
            found.unless_at_most("cold_share", life.cold_share, allowed, SHARE_SLACK);
        }
    }
}
