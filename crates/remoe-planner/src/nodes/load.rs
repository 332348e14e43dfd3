//! How many copies of an arrangement the load needs.
//!
//! A **unit** is the nodes that are rented together: a main function with its remote functions, a node with one or
//! more copies of the model on its GPUs, or the nodes that divide a model's layers. Times of a unit do not depend on
//! how many of them there are, so the fewest that keep the limits are the cheapest.
//!
//! The load is one of two kinds. With an arrival rate it is open: the number of requests at once follows from the rate
//! and the times (Little's law). Without one, [`crate::Request::concurrency`] requests are in flight all the time, each
//! followed by the next.

use super::batches::{BATCHES, Times, position};
use super::compiled::Compiled;
use super::found::{BestNodes, FoundNodes, Miss};
use remoe_plan::alive::{Alive, Latency, Service, alive, latency, mean_per_second};

/// Units of an arrangement, at most.
pub(super) const MOST_UNITS: u32 = 4096;

/// Work of one unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Unit {
    pub(super) times: Times,
    /// Requests that each copy runs at once.
    pub(super) slots: u32,
    /// Copies of the model that work beside each other: groups of GPUs, or batches that are in different stages of a
    /// pipeline.
    pub(super) copies: u32,
}

/// Latencies of requests under load, in seconds and in the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Met {
    pub(super) ttft: f64,
    pub(super) tpot: f64,
    /// Load over the most that can be served.
    pub(super) utilisation: f64,
    /// Requests in flight, all units together.
    pub(super) in_flight: f64,
}

/// A limit that no number of units keeps, with its value at the most of them and the most that is allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Excess {
    pub(super) limit: &'static str,
    pub(super) value: f64,
    pub(super) allowed: f64,
}

impl Unit {
    /// Requests in a second when every slot always has one: each prefill holds up the other requests of its copy.
    pub(super) fn most_per_second(&self, steps: f64) -> f64 {
        let slots = f64::from(self.slots);
        let seconds = slots * self.times.prefill + steps * self.times.step(self.slots);
        f64::from(self.copies) * slots / seconds.max(f64::MIN_POSITIVE)
    }

    /// Seconds per output token of a request when every slot always has one, with what the prefills of the others add.
    pub(super) fn busy_tpot(&self, steps: f64) -> f64 {
        let others = f64::from(self.slots - 1) * self.times.prefill;
        self.times.step(self.slots) + if steps > 0.0 { others / steps } else { 0.0 }
    }
}

impl Compiled<'_> {
    fn steps(&self) -> f64 {
        self.rental.request.output_tokens
    }

    /// Service of `units` of `unit`.
    fn service(&self, unit: &Unit, units: u32) -> Service {
        Service {
            prefill_seconds: unit.times.prefill,
            step_seconds: (1..=unit.slots).map(|batch| unit.times.step(batch)).collect(),
            steps: self.steps(),
            concurrency: unit.slots,
            mains: units.saturating_mul(unit.copies),
        }
    }

    /// Load that the arrivals put on `units` of `unit`, as a search asks for it; nothing without arrivals.
    fn under_load(&self, unit: &Unit, units: u32) -> Option<Alive> {
        self.arrivals.as_ref().map(|arrivals| alive(arrivals, &self.service(unit, units), 0.0))
    }

    /// Load that the arrivals as they were stated put on `units` of `unit` that take `start_seconds` to start.
    pub(super) fn stated_load(&self, unit: &Unit, units: u32, start_seconds: f64) -> Option<Alive> {
        self.stated.as_ref().map(|arrivals| alive(arrivals, &self.service(unit, units), start_seconds))
    }

    /// Share of time in which units are there that serve in no time.
    pub(super) fn share_of_nothing(&self) -> f64 {
        let unit = Unit { times: Times::NOTHING, slots: 1, copies: 1 };
        self.under_load(&unit, 1).map_or(1.0, |load| load.share)
    }

    /// Latencies at `units` of `unit`.
    pub(super) fn met(&self, unit: &Unit, units: u32) -> Met {
        let Some(load) = self.under_load(unit, units) else { return self.met_in_turn(unit, units) };
        let met = Met {
            ttft: unit.times.prefill,
            tpot: unit.times.alone(),
            utilisation: load.utilisation,
            in_flight: load.in_flight * f64::from(units.saturating_mul(unit.copies)),
        };
        if load.saturated {
            return met;
        }
        Met {
            ttft: met.ttft.max(load.first_token_seconds + load.wait_seconds),
            tpot: met.tpot.max(load.tpot_seconds),
            ..met
        }
    }

    /// Latencies of requests that are in flight all the time: each copy has an equal part of them.
    ///
    /// Prompts queue for the prefill and then decode together, a closed queueing network of one server and a delay;
    /// mean value analysis (Reiser and Lavenberg 1980) gives the time to the first token. What other requests'
    /// prefills add is spread over the decode steps.
    fn met_in_turn(&self, unit: &Unit, units: u32) -> Met {
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
        Met {
            ttft,
            tpot: if self.steps() > 0.0 { step + others / self.steps() } else { 0.0 },
            utilisation: f64::from(batch) / f64::from(unit.slots),
            in_flight: f64::from(present),
        }
    }

    /// Latencies of the requests that arrive at `units` of `unit`, simulated; nothing without arrivals, or where more
    /// come than are served.
    pub(super) fn latency(&self, unit: &Unit, units: u32) -> Option<Latency> {
        let arrivals = self.stated.as_ref()?;
        latency(arrivals, &self.service(unit, units), 0.0, self.rental.slo.target_itl_seconds)
    }

    /// Offers `found` with the fewest of its units, up to `most`, that keep the limits: the search goes by estimates of
    /// means, this by a simulation, and by the quantile that the limits name.
    pub(super) fn confirm(&self, found: FoundNodes, most: u32, best: &mut BestNodes) {
        let mut found = self.with_fewer(found, best);
        loop {
            let priced = self.priced(found);
            if !best.is_worse_than(&priced) {
                return;
            }
            found = priced;
            if self.arrivals.is_none() {
                break;
            }
            let (ttft, tpot) = self.simulated(&found.unit, found.units);
            if self.within(ttft, tpot) {
                break;
            }
            // Fewer requests at once make steps quicker, as long as they serve the load.
            let fewer = Unit { slots: found.unit.slots / 2, ..found.unit };
            let serves = fewer.slots > 0 && self.least_units(&fewer) <= f64::from(found.units);
            if tpot > self.setting.tpot && serves {
                found.unit = fewer;
                continue;
            }
            let units = found.units.saturating_add((found.units / 8).max(1));
            if units > most {
                return best.missed(Miss::slow(found.main, self.excess(ttft, tpot, 0.0)));
            }
            found = found.with(units);
        }
        best.offer(found);
    }

    /// Returns `found` with the fewest units that a simulation keeps within the limits, if that makes it better than
    /// `best`: estimates err on the slow side.
    fn with_fewer(&self, found: FoundNodes, best: &BestNodes) -> FoundNodes {
        let least = self.least_units(&found.unit) as u32;
        let pays = |units| best.is_worse_than(&self.priced(found.with(units)));
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

    /// Returns true if a simulation keeps `units` of `unit` within the limits.
    pub(super) fn keeps_simulated(&self, unit: &Unit, units: u32) -> bool {
        let (ttft, tpot) = self.simulated(unit, units);
        self.within(ttft, tpot)
    }

    /// Simulated TTFT and TPOT at `units` of `unit`, in seconds and at the quantile of the limits; infinite where more
    /// requests come than are served.
    fn simulated(&self, unit: &Unit, units: u32) -> (f64, f64) {
        let quantile = self.rental.slo.quantile;
        self.latency(unit, units).map_or((f64::INFINITY, f64::INFINITY), |latency| {
            (latency.ttft.at(quantile), latency.tpot.at(quantile))
        })
    }

    /// Returns `unit` with the largest batch whose requests keep the limit of TPOT while every slot always has one.
    pub(super) fn at_full_load(&self, unit: &Unit) -> Unit {
        let (steps, allowed) = (self.steps(), self.setting.tpot + 1e-12);
        let of = |slots: u32| Unit { slots, ..*unit };
        // Larger batches have no shorter steps.
        let (mut keeps, mut breaks) = (1, unit.slots + 1);
        while breaks - keeps > 1 {
            let middle = u32::midpoint(keeps, breaks);
            if of(middle).busy_tpot(steps) <= allowed { keeps = middle } else { breaks = middle }
        }
        of(keeps)
    }

    fn holds(&self, met: &Met) -> bool {
        let open = self.arrivals.is_some();
        self.within(met.ttft, met.tpot) && if open { met.utilisation < 1.0 } else { met.utilisation <= 1.0 }
    }

    /// Returns true if `times` keep the limits for a request that runs alone.
    pub(super) fn holds_alone(&self, times: &Times) -> bool {
        self.within(times.prefill, times.alone())
    }

    /// Returns true if both times keep their limits.
    fn within(&self, ttft: f64, tpot: f64) -> bool {
        ttft <= self.rental.slo.ttft_seconds + 1e-9 && tpot <= self.setting.tpot + 1e-12
    }

    /// The limit that `times` break furthest for a request alone.
    pub(super) fn excess_alone(&self, times: &Times) -> Excess {
        self.excess(times.prefill, times.alone(), 0.0)
    }

    /// The fewest units that serve the load within the limits, at most `most`, with the slots of each copy that make it
    /// so; slots are at most those of `unit`.
    ///
    /// # Errors
    /// The limit that fails with the most units.
    pub(super) fn fewest(&self, unit: Unit, most: u32) -> Result<(Unit, u32), Excess> {
        if !self.holds_alone(&unit.times) {
            return Err(self.excess_alone(&unit.times));
        }
        // Smaller batches serve less, so that they only help where larger ones break a limit of time.
        let mut worst = None;
        for unit in self.batches_of(unit) {
            match self.fewest_of(&unit, most) {
                Ok(units) => return Ok((unit, units)),
                Err(excess) => worst = worst.or(Some(excess)),
            }
        }
        Err(worst.unwrap_or_else(|| self.excess_alone(&unit.times)))
    }

    /// Returns true if `units` of `unit` serve the load within the limits.
    pub(super) fn serves(&self, unit: Unit, units: u32) -> bool {
        self.holds_alone(&unit.times)
            && self.batches_of(unit).any(|unit| {
                self.least_units(&unit) <= f64::from(units) && self.holds(&self.met(&unit, units))
            })
    }

    /// `unit` with every batch that it has room for and whose steps keep the limit, the largest first: in larger ones
    /// further requests only make steps too slow.
    fn batches_of(&self, unit: Unit) -> impl Iterator<Item = Unit> {
        let tpot = self.setting.tpot + 1e-12;
        let batches = BATCHES[..=position(unit.slots)].iter().rev();
        batches
            .filter(move |batch| **batch == 1 || unit.times.step(**batch) <= tpot)
            .map(move |batch| Unit { slots: *batch, ..unit })
    }

    fn fewest_of(&self, unit: &Unit, most: u32) -> Result<u32, Excess> {
        let least = self.least_units(unit);
        if least > f64::from(most) {
            return Err(Excess { limit: "load", value: least / f64::from(most), allowed: 1.0 });
        }
        let mut below = least as u32 - 1;
        let mut units = least as u32;
        let mut step = 1;
        while !self.holds(&self.met(unit, units)) {
            if units == most {
                let met = self.met(unit, units);
                return Err(self.excess(met.ttft, met.tpot, met.utilisation));
            }
            below = units;
            units = units.saturating_add(step).min(most);
            step *= 2;
        }
        while units - below > 1 {
            let middle = below.midpoint(units);
            if self.holds(&self.met(unit, middle)) { units = middle } else { below = middle }
        }
        Ok(units)
    }

    /// Units that serve the load if they do nothing else: a whole number, at least 1.
    pub(super) fn least_units(&self, unit: &Unit) -> f64 {
        match self.arrivals.as_ref() {
            Some(arrivals) => (mean_per_second(arrivals) / unit.most_per_second(self.steps())).floor() + 1.0,
            None => {
                let at_once = unit.slots.saturating_mul(unit.copies).max(1);
                f64::from(self.rental.request.concurrency.max(1).div_ceil(at_once))
            }
        }
    }

    /// The limit that is broken furthest.
    fn excess(&self, ttft: f64, tpot: f64, utilisation: f64) -> Excess {
        let of = |limit, value, allowed| Excess { limit, value, allowed };
        let others = [of("tpot", tpot, self.setting.tpot), of("load", utilisation, 1.0)];
        others.into_iter().fold(of("ttft", ttft, self.rental.slo.ttft_seconds), |worst, one| {
            if one.value / one.allowed > worst.value / worst.allowed { one } else { worst }
        })
    }
}
