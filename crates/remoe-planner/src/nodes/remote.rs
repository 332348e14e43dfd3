//! Arrangements with remote functions: which node for the main function, how many experts beside it, how many
//! remote functions on which nodes.
//!
//! Candidates go in the order of a lower bound of their price and end where it is above what is known. Functions of a
//! candidate are equal, so that a shape is fit for all of them or for none: how many it may hold follows from its
//! memory and, since more of them have fewer vCPUs each, from the limits. A mixture of shapes is never slower than its
//! slowest shape alone, so the cheapest nodes within these numbers keep the limits too.

use super::batches::{BATCHES, Times, position};
use super::compiled::{Compiled, Device, MOST_PER_NODE, Split};
use super::cover::{Offer, cheapest};
use super::found::{Arrangement, BestNodes, FoundNodes, Miss};
use super::load::{MOST_UNITS, Unit};

/// Numbers of groups of a sliced arrangement that are tried.
const GROUPS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
/// Numbers of experts beside the main function that are tried, besides none.
const LOCAL_STEPS: usize = 4;
/// Requests that a main function of this project runs at once, at most.
pub(super) const MOST_SLOTS: u32 = 256;

/// A main function before anything is known of its remote functions.
struct Candidate {
    main: usize,
    device: Device,
    local: usize,
    /// Requests that its memory has room for.
    slots: u32,
    /// Dollars per hour that no plan with it is below.
    least: f64,
}

/// Equal functions of one unit, and how many of them each host has room for.
struct Packing {
    functions: usize,
    /// Bytes of one.
    each: f64,
    offers: Vec<Offer>,
}

/// The largest number up to `largest` for which `holds`, which holds up to some number and not beyond.
fn most(largest: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, largest + 1);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        if holds(middle) { low = middle } else { high = middle }
    }
    low
}

impl Compiled<'_> {
    /// The cheapest nodes for `arrangement`, which has remote functions, below `bound` dollars per hour in the mean;
    /// with `any` the first ones that are found.
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
                let quick =
                    self.try_groups(arrangement, candidate, groups, &hosts, lowest / share, &mut best);
                if any && best.bound() < bound {
                    return best;
                }
                // With fewer groups none is quicker.
                if !quick {
                    break;
                }
            }
        }
        if let Some(found) = best.found.clone() {
            self.offer_denser(arrangement, &found, &mut best);
        }
        best
    }

    /// Offers `found` with as many functions on each of its hosts as a simulation keeps within the limits: the search
    /// goes by estimates, which err on the slow side.
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
                self.split(&Split { main, device, local, groups, host: *host, per_node: (*capacity).max(1) })
            });
            Unit { times: times.fold(Times::NOTHING, Times::slower), ..found.unit }
        };
        for (index, (host, _, known)) in found.hosts.iter().enumerate() {
            let fit = (self.shapes[*host].memory / found.function_bytes) as usize;
            capacities[index] = most(fit.min(functions).min(MOST_PER_NODE), |capacity| {
                let mut denser = capacities.clone();
                denser[index] = capacity;
                capacity <= *known || self.keeps_simulated(&unit(&denser), found.units)
            });
        }
        let offers = found.hosts.iter().zip(&capacities).map(|((host, _, _), capacity)| Offer {
            capacity: *capacity,
            per_hour: self.per_hour(*host),
            max: self.left(*host, main, found.units),
        });
        let offers: Vec<Offer> = offers.collect();
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

    /// Main functions that fit and are quick enough beside some host.
    fn candidates(&self, arrangement: Arrangement, hosts: &[usize], best: &mut BestNodes) -> Vec<Candidate> {
        let mut all = Vec::new();
        for main in self.useful_mains() {
            let device = if self.shapes[main].node.gpus > 0 { Device::Gpu } else { Device::Cpu };
            for local in self.local_counts(main, device, best) {
                let Some(slots) = self.slots_beside(main, device, local) else { continue };
                let candidate = Candidate { main, device, local, slots, least: 0.0 };
                if let Some(least) = self.least_per_hour(arrangement, &candidate, hosts, best) {
                    all.push(Candidate { least, ..candidate });
                }
            }
        }
        all
    }

    /// Dollars per hour that no plan with `candidate` is below, whatever its groups and hosts: as few units as with the
    /// quickest host, and memory at the least price per byte. Nothing where no host is quick enough.
    fn least_per_hour(
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
            let times = self.least_split(&Split { main, device, local, groups, host, per_node: 1 });
            if self.holds_alone(&times) {
                let needed = self.least_units(&Unit { times, slots, copies: 1 });
                units = Some(units.map_or(needed, |known| known.min(needed)));
            } else {
                best.missed(Miss::slow(host, self.excess_alone(&times)));
            }
        }
        units.map(|units| units * each)
    }

    /// Dollars per hour that no plan with `functions` remote functions in `groups` groups is below; infinite where no
    /// host is quick enough.
    ///
    /// A mixture of hosts is as slow as each of them. So it needs as many units as the one of them that holds functions
    /// for the least, and none of them holds functions for less.
    fn least_with(&self, candidate: &Candidate, groups: usize, hosts: &[usize], packing: &Packing) -> f64 {
        let &Candidate { main, device, local, slots, .. } = candidate;
        let mut least = f64::INFINITY;
        for (&host, offer) in hosts.iter().zip(&packing.offers) {
            let mut per_node = 1;
            while per_node <= offer.capacity {
                let times = self.least_split(&Split { main, device, local, groups, host, per_node });
                if !self.holds_alone(&times) {
                    break;
                }
                // Up to twice as many on a node are no quicker.
                let densest = (2 * per_node - 1).min(offer.capacity);
                let nodes = packing.functions as f64 / densest as f64;
                let units = self.least_units(&Unit { times, slots, copies: 1 });
                least = least.min(units * (self.per_hour(main) + nodes * self.per_hour(host)));
                per_node *= 2;
            }
        }
        least
    }

    /// Numbers of experts of every layer that may be beside a main function on `main`, the most first: the fewer are
    /// remote, the cheaper.
    fn local_counts(&self, main: usize, device: Device, best: &mut BestNodes) -> Vec<usize> {
        let shape = &self.shapes[main];
        let (on_gpu, on_host) = self.main_bytes(device, 0, 1);
        for (what, needed, usable) in
            [("GPU memory", on_gpu, shape.gpu_memory), ("memory", on_host, shape.memory)]
        {
            if needed > usable {
                best.missed(Miss::Memory { shape: main, what, needed, usable });
                return Vec::new();
            }
        }
        let room = ((shape.memory - on_host) / self.expert_bytes(1)).floor();
        let most = (room.max(0.0) as usize).min(self.model().experts - 1);
        let mut counts: Vec<usize> = (0..=LOCAL_STEPS).rev().map(|step| most * step / LOCAL_STEPS).collect();
        counts.dedup();
        counts
    }

    /// Bytes of a main function on its GPU and on its host, with `local` experts of every layer and `slots` requests.
    fn main_bytes(&self, device: Device, local: usize, slots: u32) -> (f64, f64) {
        let rest = self.main_rest_bytes(device, slots);
        let beside = self.expert_bytes(local) + self.host_bytes(slots) + self.fallback_bytes();
        match device {
            Device::Gpu => (rest, beside),
            Device::Cpu => (0.0, rest + beside),
        }
    }

    /// The largest batch that a main function has memory for.
    fn slots_beside(&self, main: usize, device: Device, local: usize) -> Option<u32> {
        let shape = &self.shapes[main];
        let largest = position(self.most_slots().min(MOST_SLOTS));
        BATCHES[..=largest].iter().rev().copied().find(|slots| {
            let (on_gpu, on_host) = self.main_bytes(device, local, *slots);
            on_gpu <= shape.gpu_memory && on_host <= shape.memory
        })
    }

    /// Tries `groups` remote functions on the cheapest mixture of `hosts`, below `lowest` dollars per hour of use.
    /// Returns whether they may be quick enough.
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
                best.missed(Miss::Count);
            }
            return true;
        }
        let fits = packing.offers.iter().any(|offer| offer.capacity > 0);
        if self.least_with(candidate, groups, hosts, &packing) > lowest {
            return true;
        }
        let at = |host: usize, per_node: usize| Split { main, device, local, groups, host, per_node };
        // First with times that none is below, which are quick to compute.
        let mut quickest: Option<Times> = None;
        for (&host, offer) in hosts.iter().zip(&mut packing.offers) {
            let least = |per_node: usize| self.least_alone(&at(host, per_node));
            offer.capacity = most(offer.capacity, |per_node| self.holds_alone(&least(per_node)));
            match offer.capacity {
                0 if fits => best.missed(Miss::slow(host, self.excess_alone(&least(1)))),
                0 => {}
                _ => {
                    let times = self.least_split(&at(host, 1));
                    quickest = Some(quickest.map_or(times, |known| known.quicker(times)));
                }
            }
        }
        // Larger functions may fit nowhere and yet be quick.
        let Some(quickest) = quickest else { return !fits };
        let Some((price, _)) = cheapest(packing.functions, &packing.offers) else { return true };
        let most_units = self.shapes[main].node.max.unwrap_or(MOST_UNITS).min(MOST_UNITS);
        let least_units = self.least_units(&Unit { times: quickest, slots, copies: 1 });
        if least_units > f64::from(most_units) {
            best.missed(Miss::Slow {
                shape: main,
                limit: "load",
                value: least_units / f64::from(most_units),
                allowed: 1.0,
            });
            return true;
        }
        // Further units may be cheaper where nodes then hold more functions. Steps leave numbers out, so that each step
        // also stands for those after the last one.
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

    /// Tries `fewest` to `units` units with as many functions on each host as keep the limits with the most of them.
    ///
    /// Only hosts of a cheapest cover are asked how many they may hold: others are not needed, however many they hold.
    fn try_units(
        &self,
        candidate: &Candidate,
        groups: usize,
        hosts: &[usize],
        (packing, fewest, units): (&Packing, u32, u32),
        best: &mut BestNodes,
    ) {
        let &Candidate { main, device, local, slots, .. } = candidate;
        let unit = |times: Times| Unit { times, slots, copies: 1 };
        let at =
            |host: usize, per_node: usize| self.split(&Split { main, device, local, groups, host, per_node });
        let mut offers = packing.offers.clone();
        for (host, offer) in hosts.iter().zip(&mut offers) {
            offer.max = self.left(*host, main, units);
        }
        let mut known = vec![false; hosts.len()];
        let (price, counts) = loop {
            let Some((price, counts)) = cheapest(packing.functions, &offers) else { return };
            if self.least_share * f64::from(fewest) * (self.per_hour(main) + price) > best.bound() {
                return;
            }
            let open = (0..hosts.len()).find(|index| counts[*index] > 0 && !known[*index]);
            let Some(index) = open else { break (price, counts) };
            known[index] = true;
            let keeps = |per_node: usize| self.serves(unit(at(hosts[index], per_node)), units);
            offers[index].capacity = most(offers[index].capacity, keeps);
            if offers[index].capacity == 0 {
                best.missed(self.why_slow(hosts[index], unit(at(hosts[index], 1)), units));
            }
        };
        let taken = counts.iter().zip(hosts).zip(&offers).filter(|((count, _), _)| **count > 0);
        let taken: Vec<(usize, u32, usize)> =
            taken.map(|((count, host), offer)| (*host, *count, offer.capacity)).collect();
        let times = taken.iter().map(|(host, _, capacity)| at(*host, (*capacity).max(1)));
        let slowest = times.fold(Times::NOTHING, Times::slower);
        // More units need more nodes of every shape.
        let room = taken.iter().filter_map(|(host, count, _)| {
            let max = self.shapes[*host].node.max?;
            Some(max / (count + u32::from(*host == main)))
        });
        let room = room.chain(self.shapes[main].node.max).min().unwrap_or(MOST_UNITS);
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
            function_bytes: packing.each,
            hosts: taken,
        };
        self.confirm(found, room, best);
    }

    /// The limit that `units` of `unit` break.
    fn why_slow(&self, shape: usize, unit: Unit, units: u32) -> Miss {
        let excess = self.fewest(unit, units).err();
        Miss::slow(shape, excess.unwrap_or_else(|| self.excess_alone(&unit.times)))
    }

    /// The remote functions of a unit, and how many of them each host has memory for.
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
        let offer = |host: usize| Offer {
            capacity: ((self.shapes[host].memory / each) as usize).min(functions).min(MOST_PER_NODE),
            per_hour: self.per_hour(host),
            max: self.left(host, candidate.main, 1),
        };
        let offers: Vec<Offer> = hosts.iter().map(|host| offer(*host)).collect();
        for (host, _) in hosts.iter().zip(&offers).filter(|(_, offer)| offer.capacity == 0) {
            let usable = self.shapes[*host].memory;
            best.missed(Miss::Memory { shape: *host, what: "memory for a slice", needed: each, usable });
        }
        Packing { functions, each, offers }
    }

    /// Nodes of `host` that each of `units` units has beside those of main functions on `main`.
    fn left(&self, host: usize, main: usize, units: u32) -> Option<u32> {
        let max = self.shapes[host].node.max?;
        Some((max / units).saturating_sub(u32::from(host == main)))
    }

    /// Memory of a remote function besides the weights of its experts, of which it has so many of a layer.
    fn working_bytes(&self, experts: usize) -> f64 {
        let model = self.model();
        let rows = self.rental.request.largest_input() * experts.min(model.top_k) as f64;
        self.rental.function_bytes + rows * model.token_bytes
    }

    /// Shapes for main functions, without those that another one replaces.
    fn useful_mains(&self) -> Vec<usize> {
        let mains: Vec<usize> = (0..self.shapes.len()).filter(|main| self.may_host_main(*main)).collect();
        let device = |shape: usize| if self.shapes[shape].node.gpus > 0 { Device::Gpu } else { Device::Cpu };
        let no_slower = |a: usize, b: usize| {
            let (a, b) = (self.rest(a, device(a)), self.rest(b, device(b)));
            a.prefill <= b.prefill && a.steps.iter().zip(&b.steps).all(|(a, b)| a <= b)
        };
        self.useful(&mains, |other, one| {
            device(other) == device(one)
                && self.shapes[other].gpu_memory >= self.shapes[one].gpu_memory
                && self.no_slower(other, one)
                && no_slower(other, one)
        })
    }

    /// Shapes for remote functions, without those that another one replaces.
    fn useful_hosts(&self) -> Vec<usize> {
        let hosts: Vec<usize> = (0..self.shapes.len()).filter(|host| self.may_host_remote(*host)).collect();
        self.useful(&hosts, |other, one| self.no_slower(other, one))
    }

    /// `shapes` without those that another one replaces: no dearer per node, at least as much memory, no slower, and as
    /// many of them as one likes.
    fn useful(&self, shapes: &[usize], no_slower: impl Fn(usize, usize) -> bool) -> Vec<usize> {
        let replaces = |other: usize, one: usize| {
            let (a, b) = (&self.shapes[other], &self.shapes[one]);
            let same = self.per_hour(other) == self.per_hour(one) && a.memory == b.memory;
            a.node.max.is_none()
                && self.per_hour(other) <= self.per_hour(one)
                && a.memory >= b.memory
                && (!same || other < one)
                && no_slower(other, one)
        };
        let useful = |one: &usize| !shapes.iter().any(|other| other != one && replaces(*other, *one));
        shapes.iter().copied().filter(useful).collect()
    }

    fn least_price_per_byte(&self, hosts: &[usize]) -> f64 {
        let rates = hosts.iter().map(|host| self.per_hour(*host) / self.shapes[*host].memory.max(1.0));
        rates.fold(f64::INFINITY, f64::min)
    }
}
