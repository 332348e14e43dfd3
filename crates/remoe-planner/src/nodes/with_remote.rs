//! Search over arrangements with remote functions: node of the main function, number of local experts, and number and
//! nodes of the remote functions.
//!
//! Branch and bound: candidates are tried in the order of a lower bound of their price, until it exceeds the best price.
//! The remote functions of a candidate are equal. How many of them a node can hold follows from its memory and from the
//! latency limits, since more functions have fewer vCPUs each. A mixture of shapes is never slower than its slowest shape
//! alone, so the cheapest nodes within these numbers keep the limits too.

use super::batches::{BATCHES, BatchTimes, position};
use super::best_nodes::{Arrangement, BestNodes, FoundNodes, Infeasibility};
use super::compiled::{CompiledRental, Device, MAX_FUNCTIONS_PER_NODE, RemoteSplit};
use super::load::{MAX_UNITS, ServingUnit};
use super::node_cover::{NodeOffer, cheapest};

/// Numbers of groups of a sliced arrangement that are tried.
const GROUPS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
/// Number of local expert counts that are tried, besides 0.
const LOCAL_STEPS: usize = 4;
/// Maximum batch of Remoe's main function.
pub(super) const MAX_SLOTS: u32 = 256;

/// A main function whose remote functions are not chosen yet.
struct Candidate {
    main: usize,
    device: Device,
    local: usize,
    /// Largest batch that its memory can hold.
    slots: u32,
    /// Lower bound in dollars per hour of every arrangement with it.
    least: f64,
}

/// Equal remote functions of one unit, and how many of them each host can hold.
struct Packing {
    functions: usize,
    /// Bytes of one function.
    function_bytes: f64,
    offers: Vec<NodeOffer>,
}

/// Returns the largest number up to `largest` for which `holds`, by bisection. `holds` must be monotone.
fn largest_where(largest: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, largest + 1);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        if holds(middle) { low = middle } else { high = middle }
    }
    low
}

impl CompiledRental<'_> {
    /// Searches the cheapest nodes for an `arrangement` with remote functions, below `bound` mean dollars per hour.
    ///
    /// If `any`, returns the first ones that are found.
    pub(super) fn with_remote(&self, arrangement: Arrangement, bound: f64, any: bool) -> BestNodes {
        let mut best = BestNodes::none("no shape without GPUs may host remote functions");
        let hosts = self.useful_hosts();
        if hosts.is_empty() {
            return best;
        }
        let share = self.least_share;
        let least = |candidate: &Candidate| share * candidate.least;
        let mut candidates = self.candidates(arrangement, &hosts, &mut best);
        candidates.sort_by(|a, b| least(a).total_cmp(&least(b)));
        for candidate in &candidates {
            let remote = self.model().experts - candidate.local;
            let numbers = GROUPS.iter().rev().copied();
            let numbers = numbers.filter(|groups| *groups <= remote && arrangement != Arrangement::Layers);
            let one = (arrangement == Arrangement::Layers).then_some(1);
            for groups in numbers.chain(one) {
                let lowest = bound.min(best.bound());
                if least(candidate) >= lowest {
                    break;
                }
                let may_be_fast =
                    self.try_groups(arrangement, candidate, groups, &hosts, lowest / share, &mut best);
                if any && best.bound() < bound {
                    return best;
                }
                // Fewer groups are never faster.
                if !may_be_fast {
                    break;
                }
            }
        }
        if let Some(found) = best.found.clone() {
            self.offer_denser(arrangement, &found, &mut best);
        }
        best
    }

    /// Offers `found` with as many functions on each of its hosts as keep the limits in a simulation.
    ///
    /// The search before uses estimates, which overestimate latencies.
    fn offer_denser(&self, arrangement: Arrangement, found: &FoundNodes, best: &mut BestNodes) {
        if self.arrivals.is_none() {
            return;
        }
        let &FoundNodes { main, device, local, functions, .. } = found;
        let groups = if arrangement == Arrangement::Layers { 1 } else { functions };
        let mut capacities: Vec<usize> = found.hosts.iter().map(|(_, _, capacity)| *capacity).collect();
        let unit = |capacities: &[usize]| {
            let hosts = found.hosts.iter().zip(capacities);
            let times = hosts.map(|((host, _, _), capacity)| {
                self.split(&RemoteSplit {
                    main,
                    device,
                    local,
                    groups,
                    host: *host,
                    per_node: (*capacity).max(1),
                })
            });
            ServingUnit { times: times.fold(BatchTimes::ZERO, BatchTimes::slower), ..found.unit }
        };
        for (index, (host, _, known)) in found.hosts.iter().enumerate() {
            let fit = (self.shapes[*host].memory / found.function_bytes) as usize;
            capacities[index] = largest_where(fit.min(functions).min(MAX_FUNCTIONS_PER_NODE), |capacity| {
                let mut denser = capacities.clone();
                denser[index] = capacity;
                capacity <= *known || self.keeps_simulated(&unit(&denser), found.units)
            });
        }
        let offers = found.hosts.iter().zip(&capacities).map(|((host, _, _), capacity)| NodeOffer {
            capacity: *capacity,
            per_hour: self.per_hour(*host),
            max: self.available(*host, main, found.units),
        });
        let offers: Vec<NodeOffer> = offers.collect();
        let Some((price, counts)) = cheapest(functions, &offers) else { return };
        let hosts = found.hosts.iter().zip(&counts).zip(&capacities);
        let hosts = hosts.filter(|((_, count), _)| **count > 0);
        let denser = FoundNodes {
            per_hour: f64::from(found.units) * (self.per_hour(main) + price),
            unit: unit(&capacities),
            hosts: hosts.map(|(((host, _, _), count), capacity)| (*host, *count, *capacity)).collect(),
            ..found.clone()
        };
        self.confirm(denser, found.units, best);
    }

    /// Returns the main functions that fit and keep the latency limits with some host.
    fn candidates(&self, arrangement: Arrangement, hosts: &[usize], best: &mut BestNodes) -> Vec<Candidate> {
        let mut all = Vec::new();
        for main in self.useful_mains() {
            let device = if self.shapes[main].node.gpus > 0 { Device::Gpu } else { Device::Cpu };
            for local in self.local_counts(main, device, best) {
                let Some(slots) = self.largest_fitting_batch(main, device, local) else { continue };
                let candidate = Candidate { main, device, local, slots, least: 0.0 };
                if let Some(least) = self.price_bound(arrangement, &candidate, hosts, best) {
                    all.push(Candidate { least, ..candidate });
                }
            }
        }
        all
    }

    /// Returns a lower bound in dollars per hour of every arrangement with `candidate`.
    ///
    /// It has as few units as with the fastest host, and remote memory at the least price per byte. Returns `None` if no host
    /// is fast enough.
    fn price_bound(
        &self,
        arrangement: Arrangement,
        candidate: &Candidate,
        hosts: &[usize],
        best: &mut BestNodes,
    ) -> Option<f64> {
        let &Candidate { main, device, local, slots, .. } = candidate;
        let remote = self.model().experts - local;
        let groups = match arrangement {
            Arrangement::Layers => 1,
            _ => GROUPS[GROUPS.len() - 1].min(remote),
        };
        let each = self.per_hour(main) + self.least_price_per_byte(hosts) * self.expert_bytes(remote);
        let mut units: Option<f64> = None;
        for &host in hosts {
            let times = self.least_split(&RemoteSplit { main, device, local, groups, host, per_node: 1 });
            if self.holds_alone(&times) {
                let needed = self.least_units(&ServingUnit { times, slots, copies: 1 });
                units = Some(units.map_or(needed, |known| known.min(needed)));
            } else {
                best.record_infeasible(Infeasibility::too_slow(host, self.excess_alone(&times)));
            }
        }
        units.map(|units| units * each)
    }

    /// Returns a lower bound in dollars per hour of every arrangement with `candidate` and `groups`; infinite if no host is
    /// fast enough.
    ///
    /// A mixture of hosts is at least as slow as each of them. So it needs at least as many units as its host with the
    /// cheapest capacity alone.
    fn price_bound_with_groups(
        &self,
        candidate: &Candidate,
        groups: usize,
        hosts: &[usize],
        packing: &Packing,
    ) -> f64 {
        let &Candidate { main, device, local, slots, .. } = candidate;
        let mut least = f64::INFINITY;
        for (&host, offer) in hosts.iter().zip(&packing.offers) {
            let mut per_node = 1;
            while per_node <= offer.capacity {
                let times = self.least_split(&RemoteSplit { main, device, local, groups, host, per_node });
                if !self.holds_alone(&times) {
                    break;
                }
                // Up to twice as many functions on a node are no faster.
                let densest = (2 * per_node - 1).min(offer.capacity);
                let nodes = packing.functions as f64 / densest as f64;
                let units = self.least_units(&ServingUnit { times, slots, copies: 1 });
                least = least.min(units * (self.per_hour(main) + nodes * self.per_hour(host)));
                per_node *= 2;
            }
        }
        least
    }

    /// Returns the numbers of local experts that are tried for a main function on `main`, the largest first.
    fn local_counts(&self, main: usize, device: Device, best: &mut BestNodes) -> Vec<usize> {
        let shape = &self.shapes[main];
        let (on_gpu, on_host) = self.main_bytes(device, 0, 1);
        for (what, needed, usable) in
            [("GPU memory", on_gpu, shape.gpu_memory), ("memory", on_host, shape.memory)]
        {
            if needed > usable {
                best.record_infeasible(Infeasibility::Memory { shape: main, what, needed, usable });
                return Vec::new();
            }
        }
        let room = ((shape.memory - on_host) / self.expert_bytes(1)).floor();
        let most = (room.max(0.0) as usize).min(self.model().experts - 1);
        let mut counts: Vec<usize> = (0..=LOCAL_STEPS).rev().map(|step| most * step / LOCAL_STEPS).collect();
        counts.dedup();
        counts
    }

    /// Returns the bytes of a main function on its GPU and on its host, with `local` experts of every layer.
    fn main_bytes(&self, device: Device, local: usize, slots: u32) -> (f64, f64) {
        let rest = self.main_rest_bytes(device, slots);
        let beside = self.expert_bytes(local) + self.host_bytes(slots) + self.fallback_bytes();
        match device {
            Device::Gpu => (rest, beside),
            Device::Cpu => (0.0, rest + beside),
        }
    }

    /// Returns the largest batch that a main function with `local` experts of every layer has memory for.
    fn largest_fitting_batch(&self, main: usize, device: Device, local: usize) -> Option<u32> {
        let shape = &self.shapes[main];
        let largest = position(self.most_slots().min(MAX_SLOTS));
        BATCHES[..=largest].iter().rev().copied().find(|slots| {
            let (on_gpu, on_host) = self.main_bytes(device, local, *slots);
            on_gpu <= shape.gpu_memory && on_host <= shape.memory
        })
    }

    /// Tries `groups` remote functions on the cheapest mixture of `hosts`, below `lowest` dollars per rented hour.
    ///
    /// Returns false if they are not fast enough.
    fn try_groups(
        &self,
        arrangement: Arrangement,
        candidate: &Candidate,
        groups: usize,
        hosts: &[usize],
        lowest: f64,
        best: &mut BestNodes,
    ) -> bool {
        let &Candidate { main, device, local, slots, .. } = candidate;
        let mut packing = self.packing(arrangement, candidate, groups, hosts, best);
        if cheapest(packing.functions, &packing.offers).is_none() {
            if packing.offers.iter().any(|offer| offer.capacity > 0) {
                best.record_infeasible(Infeasibility::Count);
            }
            return true;
        }
        let fits = packing.offers.iter().any(|offer| offer.capacity > 0);
        if self.price_bound_with_groups(candidate, groups, hosts, &packing) > lowest {
            return true;
        }
        let at = |host: usize, per_node: usize| RemoteSplit { main, device, local, groups, host, per_node };
        // First uses lower bounds of times, which are fast to compute.
        let mut fastest: Option<BatchTimes> = None;
        for (&host, offer) in hosts.iter().zip(&mut packing.offers) {
            let least = |per_node: usize| self.least_alone(&at(host, per_node));
            offer.capacity = largest_where(offer.capacity, |per_node| self.holds_alone(&least(per_node)));
            match offer.capacity {
                0 if fits => {
                    best.record_infeasible(Infeasibility::too_slow(host, self.excess_alone(&least(1))))
                }
                0 => {}
                _ => {
                    let times = self.least_split(&at(host, 1));
                    fastest = Some(fastest.map_or(times, |known| known.faster(times)));
                }
            }
        }
        // If no node can hold the functions, fewer but larger ones do not help either.
        let Some(fastest) = fastest else { return !fits };
        let Some((price, _)) = cheapest(packing.functions, &packing.offers) else { return true };
        let most_units = self.shapes[main].node.max.unwrap_or(MAX_UNITS).min(MAX_UNITS);
        let least_units = self.least_units(&ServingUnit { times: fastest, slots, copies: 1 });
        if least_units > f64::from(most_units) {
            best.record_infeasible(Infeasibility::Slow {
                shape: main,
                limit: "load",
                value: least_units / f64::from(most_units),
                allowed: 1.0,
            });
            return true;
        }
        // More units may be cheaper, since nodes may then hold more functions. The steps skip numbers, so that each step
        // covers all numbers since the last one.
        let (mut fewest, mut units) = (least_units as u32, least_units as u32);
        while units <= most_units
            && f64::from(fewest) * (self.per_hour(main) + price)
                <= lowest.min(best.bound() / self.least_share)
        {
            self.try_units(candidate, groups, hosts, (&packing, fewest, units), best);
            fewest = units + 1;
            units += units.div_ceil(2);
        }
        true
    }

    /// Tries `fewest` to `units` units, with as many functions on each host as keep the limits with `units` units.
    ///
    /// Computes that capacity only for hosts of a cheapest cover.
    fn try_units(
        &self,
        candidate: &Candidate,
        groups: usize,
        hosts: &[usize],
        (packing, fewest, units): (&Packing, u32, u32),
        best: &mut BestNodes,
    ) {
        let &Candidate { main, device, local, slots, .. } = candidate;
        let unit = |times: BatchTimes| ServingUnit { times, slots, copies: 1 };
        let at = |host: usize, per_node: usize| {
            self.split(&RemoteSplit { main, device, local, groups, host, per_node })
        };
        let mut offers = packing.offers.clone();
        for (host, offer) in hosts.iter().zip(&mut offers) {
            offer.max = self.available(*host, main, units);
        }
        let mut is_exact = vec![false; hosts.len()];
        let (price, counts) = loop {
            let Some((price, counts)) = cheapest(packing.functions, &offers) else { return };
            if self.least_share * f64::from(fewest) * (self.per_hour(main) + price) > best.bound() {
                return;
            }
            let open = (0..hosts.len()).find(|index| counts[*index] > 0 && !is_exact[*index]);
            let Some(index) = open else { break (price, counts) };
            is_exact[index] = true;
            let keeps = |per_node: usize| self.serves(unit(at(hosts[index], per_node)), units);
            offers[index].capacity = largest_where(offers[index].capacity, keeps);
            if offers[index].capacity == 0 {
                best.record_infeasible(self.why_slow(hosts[index], unit(at(hosts[index], 1)), units));
            }
        };
        let taken = counts.iter().zip(hosts).zip(&offers).filter(|((count, _), _)| **count > 0);
        let taken: Vec<(usize, u32, usize)> =
            taken.map(|((count, host), offer)| (*host, *count, offer.capacity)).collect();
        let times = taken.iter().map(|(host, _, capacity)| at(*host, (*capacity).max(1)));
        let slowest = times.fold(BatchTimes::ZERO, BatchTimes::slower);
        // Largest number of units that the limits of nodes allow.
        let max_units = taken.iter().filter_map(|(host, count, _)| {
            let max = self.shapes[*host].node.max?;
            Some(max / (count + u32::from(*host == main)))
        });
        let max_units = max_units.chain(self.shapes[main].node.max).min().unwrap_or(MAX_UNITS);
        let Ok((unit, units)) = self.fewest(unit(slowest), units) else { return };
        let (on_gpu, on_host) = self.main_bytes(device, local, unit.slots);
        let rest = if device == Device::Cpu { self.main_rest_bytes(device, unit.slots) } else { 0.0 };
        let found = FoundNodes {
            per_hour: f64::from(units) * (self.per_hour(main) + price),
            dollars: 0.0,
            unit,
            units,
            main,
            stages: 1,
            device,
            gpus: 1,
            on_gpu,
            on_host: on_host - rest,
            local,
            loaded: self.expert_bytes(local) + self.main_weights(device),
            hosted_layers: self.model().layers,
            functions: packing.functions,
            experts_each: (self.model().experts - local).div_ceil(groups),
            function_bytes: packing.function_bytes,
            hosts: taken,
        };
        self.confirm(found, max_units, best);
    }

    /// Returns the limit that `units` of `unit` break.
    fn why_slow(&self, shape: usize, unit: ServingUnit, units: u32) -> Infeasibility {
        let excess = self.fewest(unit, units).err();
        Infeasibility::too_slow(shape, excess.unwrap_or_else(|| self.excess_alone(&unit.times)))
    }

    /// Returns the remote functions of a unit, and how many of them fit in the memory of each host.
    fn packing(
        &self,
        arrangement: Arrangement,
        candidate: &Candidate,
        groups: usize,
        hosts: &[usize],
        best: &mut BestNodes,
    ) -> Packing {
        let model = self.model();
        let experts_each = (model.experts - candidate.local).div_ceil(groups);
        let (functions, weights) = match arrangement {
            Arrangement::Layers => (model.layers, experts_each as f64 * self.one_expert_bytes()),
            _ => (groups, self.expert_bytes(experts_each)),
        };
        let each = weights + self.working_bytes(experts_each);
        let offer = |host: usize| NodeOffer {
            capacity: ((self.shapes[host].memory / each) as usize).min(functions).min(MAX_FUNCTIONS_PER_NODE),
            per_hour: self.per_hour(host),
            max: self.available(host, candidate.main, 1),
        };
        let offers: Vec<NodeOffer> = hosts.iter().map(|host| offer(*host)).collect();
        for (host, _) in hosts.iter().zip(&offers).filter(|(_, offer)| offer.capacity == 0) {
            let usable = self.shapes[*host].memory;
            best.record_infeasible(Infeasibility::Memory {
                shape: *host,
                what: "memory for a slice",
                needed: each,
                usable,
            });
        }
        Packing { functions, function_bytes: each, offers }
    }

    /// Returns the maximum number of nodes of `host` for each of `units` units, besides the node of its main function.
    fn available(&self, host: usize, main: usize, units: u32) -> Option<u32> {
        let max = self.shapes[host].node.max?;
        Some((max / units).saturating_sub(u32::from(host == main)))
    }

    /// Returns the memory of a remote function besides weights. `experts`: its number of experts of a layer.
    fn working_bytes(&self, experts: usize) -> f64 {
        let model = self.model();
        let rows = self.rental.request.largest_input() * experts.min(model.top_k) as f64;
        self.rental.function_bytes + rows * model.token_bytes
    }

    /// Returns the shapes for main functions, without dominated ones.
    fn useful_mains(&self) -> Vec<usize> {
        let mains: Vec<usize> = (0..self.shapes.len()).filter(|main| self.may_host_main(*main)).collect();
        let device = |shape: usize| if self.shapes[shape].node.gpus > 0 { Device::Gpu } else { Device::Cpu };
        let nonexpert_no_slower = |a: usize, b: usize| {
            let (a, b) = (self.nonexpert(a, device(a)), self.nonexpert(b, device(b)));
            a.prefill <= b.prefill && a.steps.iter().zip(&b.steps).all(|(a, b)| a <= b)
        };
        self.undominated(&mains, |other, one| {
            device(other) == device(one)
                && self.shapes[other].gpu_memory >= self.shapes[one].gpu_memory
                && self.is_no_slower(other, one)
                && nonexpert_no_slower(other, one)
        })
    }

    /// Returns the shapes for remote functions, without dominated ones.
    fn useful_hosts(&self) -> Vec<usize> {
        let hosts: Vec<usize> = (0..self.shapes.len()).filter(|host| self.may_host_remote(*host)).collect();
        self.undominated(&hosts, |other, one| self.is_no_slower(other, one))
    }

    /// Returns `shapes` without dominated ones.
    ///
    /// A shape dominates another if it costs no more, has at least as much memory, is no slower, and is unlimited in number.
    fn undominated(&self, shapes: &[usize], no_slower: impl Fn(usize, usize) -> bool) -> Vec<usize> {
        let dominates = |other: usize, one: usize| {
            let (a, b) = (&self.shapes[other], &self.shapes[one]);
            let same = self.per_hour(other) == self.per_hour(one) && a.memory == b.memory;
            a.node.max.is_none()
                && self.per_hour(other) <= self.per_hour(one)
                && a.memory >= b.memory
                && (!same || other < one)
                && no_slower(other, one)
        };
        let is_undominated =
            |one: &usize| !shapes.iter().any(|other| other != one && dominates(*other, *one));
        shapes.iter().copied().filter(is_undominated).collect()
    }

    fn least_price_per_byte(&self, hosts: &[usize]) -> f64 {
        let rates = hosts.iter().map(|host| self.per_hour(*host) / self.shapes[*host].memory.max(1.0));
        rates.fold(f64::INFINITY, f64::min)
    }
}
