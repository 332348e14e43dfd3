//! Number of units that serve the load within the limits.
//!
//! A **unit** is a set of nodes that are rented together: a main function with its remote functions, a node with one or
//! more copies of the model on its GPUs, or the nodes that divide a model's layers. Times of a unit do not depend on the
//! number of units, so the fewest that keep the limits are the cheapest.
//!
//! With arrivals the load is open: the number of requests in flight follows from their rate and the times (Little's law).
//! Without arrivals it is closed: [`crate::Request::concurrency`] requests are always in flight.

use super::batches::{BATCHES, BatchTimes, position};
use super::best_nodes::{BestNodes, FoundNodes, Infeasibility};
use super::compiled::CompiledRental;
use remoe_plan::alive::{Alive, Latency, Service, alive, latency, mean_per_second};

/// Maximum number of units.
pub(super) const MAX_UNITS: u32 = 4096;

/// Times and capacity of one unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ServingUnit {
    pub(super) times: BatchTimes,
    /// Requests that each copy runs at once.
    pub(super) slots: u32,
    /// Copies of the model that compute at the same time: groups of GPUs, or batches in different stages of a pipeline.
    pub(super) copies: u32,
}

/// Mean latencies of requests under the load, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LoadedLatency {
    pub(super) ttft: f64,
    pub(super) tpot: f64,
    /// Load divided by the largest load that can be served.
    pub(super) utilisation: f64,
    /// Requests in flight at all units.
    pub(super) in_flight: f64,
}

/// A limit that even the largest number of units breaks, with its value there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Excess {
    pub(super) limit: &'static str,
    pub(super) value: f64,
    pub(super) allowed: f64,
}

impl ServingUnit {
    /// Returns the requests per second if every slot always has one. A prefill delays the other requests of its copy.
    pub(super) fn most_per_second(&self, steps: f64) -> f64 {
        let slots = f64::from(self.slots);
        let seconds = slots * self.times.prefill + steps * self.times.step(self.slots);
        f64::from(self.copies) * slots / seconds.max(f64::MIN_POSITIVE)
    }

    /// Returns the time per output token if every slot always has a request, including the prefills of other requests.
    pub(super) fn busy_tpot(&self, steps: f64) -> f64 {
        let others = f64::from(self.slots - 1) * self.times.prefill;
        self.times.step(self.slots) + if steps > 0.0 { others / steps } else { 0.0 }
    }
}

impl CompiledRental<'_> {
    fn steps(&self) -> f64 {
        self.rental.request.output_tokens
    }

    /// Returns the service of `units` of `unit` for the queueing model.
    fn service(&self, unit: &ServingUnit, units: u32) -> Service {
        Service {
            prefill_seconds: unit.times.prefill,
            step_seconds: (1..=unit.slots).map(|batch| unit.times.step(batch)).collect(),
            steps: self.steps(),
            concurrency: unit.slots,
            mains: units.saturating_mul(unit.copies),
        }
    }

    /// Estimates the load of the arrivals on `units` of `unit`, or returns `None` without arrivals.
    fn estimated_load(&self, unit: &ServingUnit, units: u32) -> Option<Alive> {
        self.arrivals.as_ref().map(|arrivals| alive(arrivals, &self.service(unit, units), 0.0))
    }

    /// Computes the load of the stated arrivals on `units` of `unit` with cold starts of `start_seconds`.
    pub(super) fn stated_load(&self, unit: &ServingUnit, units: u32, start_seconds: f64) -> Option<Alive> {
        self.stated.as_ref().map(|arrivals| alive(arrivals, &self.service(unit, units), start_seconds))
    }

    /// Returns the share of time in which units with times of 0 are rented.
    pub(super) fn least_alive_share(&self) -> f64 {
        let unit = ServingUnit { times: BatchTimes::ZERO, slots: 1, copies: 1 };
        self.estimated_load(&unit, 1).map_or(1.0, |load| load.share)
    }

    /// Returns the mean latencies of the load on `units` of `unit`.
    pub(super) fn mean_latency(&self, unit: &ServingUnit, units: u32) -> LoadedLatency {
        let Some(load) = self.estimated_load(unit, units) else {
            return self.closed_loop_latency(unit, units);
        };
        let latency = LoadedLatency {
            ttft: unit.times.prefill,
            tpot: unit.times.alone(),
            utilisation: load.utilisation,
            in_flight: load.in_flight * f64::from(units.saturating_mul(unit.copies)),
        };
        if load.saturated {
            return latency;
        }
        LoadedLatency {
            ttft: latency.ttft.max(load.first_token_seconds + load.wait_seconds),
            tpot: latency.tpot.max(load.tpot_seconds),
            ..latency
        }
    }

    /// Returns the mean latencies of the closed load, which is divided evenly among the copies.
    ///
    /// Prompts queue for the prefill and then decode together: a closed queueing network of one server and a delay. Mean
    /// value analysis (Reiser and Lavenberg 1980) gives the time to first token. The prefills of other requests are spread
    /// over the decode steps.
    fn closed_loop_latency(&self, unit: &ServingUnit, units: u32) -> LoadedLatency {
        let present = self.rental.request.concurrency.max(1);
        let copies = units.saturating_mul(unit.copies).max(1);
        let batch = present.div_ceil(copies);
        let (prefill, step) = (unit.times.prefill, unit.times.step(batch.min(unit.slots)));
        let decoding = self.steps() * step;
        let (mut ttft, mut queued) = (prefill, 0.0);
        for number in 1..=batch {
            ttft = prefill * (1.0 + queued);
            queued = f64::from(number) * ttft / (ttft + decoding).max(f64::MIN_POSITIVE);
        }
        let others = (f64::from(batch) * prefill - ttft).max(0.0);
        LoadedLatency {
            ttft,
            tpot: if self.steps() > 0.0 { step + others / self.steps() } else { 0.0 },
            utilisation: f64::from(batch) / f64::from(unit.slots),
            in_flight: f64::from(present),
        }
    }

    /// Simulates the latencies of the stated arrivals at `units` of `unit`.
    ///
    /// Returns `None` without arrivals, or if more requests arrive than can be served.
    pub(super) fn latency(&self, unit: &ServingUnit, units: u32) -> Option<Latency> {
        let arrivals = self.stated.as_ref()?;
        latency(arrivals, &self.service(unit, units), 0.0, self.rental.slo.target_itl_seconds)
    }

    /// Offers `found` with the fewest units, up to `max_units`, that keep the limits in a simulation.
    ///
    /// The search before uses estimated means; the simulation gives the quantile of the limits.
    pub(super) fn confirm(&self, found: FoundNodes, max_units: u32, best: &mut BestNodes) {
        let mut found = self.with_fewest_simulated(found, best);
        loop {
            let priced = self.priced(found);
            if !best.is_beaten_by(&priced) {
                return;
            }
            found = priced;
            if self.arrivals.is_none() {
                break;
            }
            let (ttft, tpot) = self.simulated(&found.unit, found.units);
            if self.times_keep_limits(ttft, tpot) {
                break;
            }
            // A smaller batch has faster steps, and is enough if it serves the load.
            let fewer = ServingUnit { slots: found.unit.slots / 2, ..found.unit };
            let serves = fewer.slots > 0 && self.least_units(&fewer) <= f64::from(found.units);
            if tpot > self.variation.tpot && serves {
                found.unit = fewer;
                continue;
            }
            let units = found.units.saturating_add((found.units / 8).max(1));
            if units > max_units {
                return best
                    .record_infeasible(Infeasibility::too_slow(found.main, self.excess(ttft, tpot, 0.0)));
            }
            found = found.with(units);
        }
        best.offer(found);
    }

    /// Returns `found` with the fewest units that keep the limits in a simulation, if that makes it better than `best`.
    ///
    /// Estimates overestimate latencies, so that fewer units may be enough.
    fn with_fewest_simulated(&self, found: FoundNodes, best: &BestNodes) -> FoundNodes {
        let least = self.least_units(&found.unit) as u32;
        let pays = |units| best.is_beaten_by(&self.priced(found.with(units)));
        if self.arrivals.is_none() || least >= found.units || !pays(least) {
            return found;
        }
        let (mut below, mut units) = (least - 1, found.units);
        while units - below > 1 {
            let middle = below.midpoint(units);
            if self.keeps_simulated(&found.unit, middle) { units = middle } else { below = middle }
        }
        found.with(units)
    }

    /// Reports if `units` of `unit` keep the limits in a simulation.
    pub(super) fn keeps_simulated(&self, unit: &ServingUnit, units: u32) -> bool {
        let (ttft, tpot) = self.simulated(unit, units);
        self.times_keep_limits(ttft, tpot)
    }

    /// Simulates TTFT and TPOT of `units` of `unit` at the quantile of the limits, in seconds.
    ///
    /// Both are infinite if more requests arrive than can be served.
    fn simulated(&self, unit: &ServingUnit, units: u32) -> (f64, f64) {
        let quantile = self.rental.slo.quantile;
        self.latency(unit, units).map_or((f64::INFINITY, f64::INFINITY), |latency| {
            (latency.ttft.at(quantile), latency.tpot.at(quantile))
        })
    }

    /// Returns `unit` with the largest batch that keeps the TPOT limit if every slot always has a request.
    pub(super) fn at_full_load(&self, unit: &ServingUnit) -> ServingUnit {
        let (steps, allowed) = (self.steps(), self.variation.tpot + 1e-12);
        let with_slots = |slots: u32| ServingUnit { slots, ..*unit };
        // Larger batches never have shorter steps.
        let (mut keeps, mut breaks) = (1, unit.slots + 1);
        while breaks - keeps > 1 {
            let middle = u32::midpoint(keeps, breaks);
            if with_slots(middle).busy_tpot(steps) <= allowed { keeps = middle } else { breaks = middle }
        }
        with_slots(keeps)
    }

    /// Reports if `latency` keeps all limits.
    fn keeps_limits(&self, latency: &LoadedLatency) -> bool {
        let open = self.arrivals.is_some();
        self.times_keep_limits(latency.ttft, latency.tpot)
            && if open { latency.utilisation < 1.0 } else { latency.utilisation <= 1.0 }
    }

    /// Reports if `times` keep the limits for a request that runs alone.
    pub(super) fn holds_alone(&self, times: &BatchTimes) -> bool {
        self.times_keep_limits(times.prefill, times.alone())
    }

    /// Reports if both times keep their limits.
    fn times_keep_limits(&self, ttft: f64, tpot: f64) -> bool {
        ttft <= self.rental.slo.ttft_seconds + 1e-9 && tpot <= self.variation.tpot + 1e-12
    }

    /// Returns the latency limit with the largest ratio of value to limit, for a request that runs alone.
    pub(super) fn excess_alone(&self, times: &BatchTimes) -> Excess {
        self.excess(times.prefill, times.alone(), 0.0)
    }

    /// Returns the fewest units, up to `max_units`, that serve the load within the limits, and the unit with its batch.
    ///
    /// The batch is at most that of `unit`.
    ///
    /// # Errors
    /// The limit that `max_units` break.
    pub(super) fn fewest(&self, unit: ServingUnit, max_units: u32) -> Result<(ServingUnit, u32), Excess> {
        if !self.holds_alone(&unit.times) {
            return Err(self.excess_alone(&unit.times));
        }
        // Smaller batches serve fewer requests: they help only if larger ones break a latency limit.
        let mut worst = None;
        for unit in self.batches_of(unit) {
            match self.fewest_with_batch(&unit, max_units) {
                Ok(units) => return Ok((unit, units)),
                Err(excess) => worst = worst.or(Some(excess)),
            }
        }
        Err(worst.unwrap_or_else(|| self.excess_alone(&unit.times)))
    }

    /// Reports if `units` of `unit` serve the load within the limits.
    pub(super) fn serves(&self, unit: ServingUnit, units: u32) -> bool {
        self.holds_alone(&unit.times)
            && self.batches_of(unit).any(|unit| {
                self.least_units(&unit) <= f64::from(units)
                    && self.keeps_limits(&self.mean_latency(&unit, units))
            })
    }

    /// Returns `unit` with every batch that fits and whose steps keep the TPOT limit, the largest first.
    fn batches_of(&self, unit: ServingUnit) -> impl Iterator<Item = ServingUnit> {
        let tpot = self.variation.tpot + 1e-12;
        let batches = BATCHES[..=position(unit.slots)].iter().rev();
        batches
            .filter(move |batch| **batch == 1 || unit.times.step(**batch) <= tpot)
            .map(move |batch| ServingUnit { slots: *batch, ..unit })
    }

    /// Returns the fewest units, up to `max_units`, that keep the limits with the batch of `unit`.
    fn fewest_with_batch(&self, unit: &ServingUnit, max_units: u32) -> Result<u32, Excess> {
        let least = self.least_units(unit);
        if least > f64::from(max_units) {
            return Err(Excess { limit: "load", value: least / f64::from(max_units), allowed: 1.0 });
        }
        let mut below = least as u32 - 1;
        let mut units = least as u32;
        let mut step = 1;
        while !self.keeps_limits(&self.mean_latency(unit, units)) {
            if units == max_units {
                let latency = self.mean_latency(unit, units);
                return Err(self.excess(latency.ttft, latency.tpot, latency.utilisation));
            }
            below = units;
            units = units.saturating_add(step).min(max_units);
            step *= 2;
        }
        while units - below > 1 {
            let middle = below.midpoint(units);
            if self.keeps_limits(&self.mean_latency(unit, middle)) { units = middle } else { below = middle }
        }
        Ok(units)
    }

    /// Returns the least number of units whose capacity serves the load: a whole number, at least 1.
    pub(super) fn least_units(&self, unit: &ServingUnit) -> f64 {
        match self.arrivals.as_ref() {
            Some(arrivals) => (mean_per_second(arrivals) / unit.most_per_second(self.steps())).floor() + 1.0,
            None => {
                let at_once = unit.slots.saturating_mul(unit.copies).max(1);
                f64::from(self.rental.request.concurrency.max(1).div_ceil(at_once))
            }
        }
    }

    /// Returns the limit with the largest ratio of value to limit.
    fn excess(&self, ttft: f64, tpot: f64, utilisation: f64) -> Excess {
        let excess = |limit, value, allowed| Excess { limit, value, allowed };
        let others = [excess("tpot", tpot, self.variation.tpot), excess("load", utilisation, 1.0)];
        others.into_iter().fold(excess("ttft", ttft, self.rental.slo.ttft_seconds), |worst, one| {
            if one.value / one.allowed > worst.value / worst.allowed { one } else { worst }
        })
    }
}
