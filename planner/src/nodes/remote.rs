//! Arrangements with remote functions: which node for the main function, how many experts beside it, how many
//! remote functions on which nodes.
//!
//! Candidates go in the order of what the main function's node costs, and end where that alone costs what is
//! known already. Functions of a candidate are equal, so that a shape is fit for all of them or for none: how
//! many it may hold follows from its memory and, since more of them have fewer vCPUs each, from the limits. A
//! mixture of shapes is never slower than its slowest shape alone, so the cheapest nodes within these numbers
//! keep the limits too.

use super::compiled::{Compiled, Device, MOST_PER_NODE, Split, Times};
use super::cover::{Offer, cheapest};
use super::found::{Arrangement, Best, Found, Miss};

/// Groups of a sliced arrangement, at most.
const MOST_GROUPS: usize = 16;
/// Numbers of experts beside the main function that are tried, besides none.
const LOCAL_STEPS: usize = 8;

/// Equal functions, and how many of them hosts have room for.
struct Packing {
    functions: usize,
    experts_each: usize,
    /// Bytes of one.
    each: f64,
    offers: Vec<Offer>,
}

impl Compiled<'_> {
    /// The cheapest nodes for `arrangement`, which has remote functions, below `bound` dollars per hour in the mean;
    /// with `any` the first ones that are found.
    pub(super) fn with_remote(&self, arrangement: Arrangement, bound: f64, any: bool) -> Best {
        let mut best = Best::none("no shape without GPUs may host remote functions");
        let hosts = self.useful_hosts();
        let rate = self.least_price_per_byte(&hosts);
        if hosts.is_empty() {
            return best;
        }
        let mut mains: Vec<usize> = (0..self.shapes.len()).filter(|main| self.may_host_main(*main)).collect();
        mains.sort_by(|a, b| self.per_hour(*a).total_cmp(&self.per_hour(*b)));
        for main in mains {
            if self.least_dollars(self.per_hour(main)) >= bound.min(best.bound()) {
                break;
            }
            let device = if self.shapes[main].node.gpus > 0 { Device::Gpu } else { Device::Cpu };
            for local in self.local_counts(main, device, &mut best) {
                let remote = self.model().experts - local;
                let least = self.per_hour(main) + rate * self.expert_bytes(remote);
                if self.least_dollars(least) >= bound.min(best.bound()) {
                    continue;
                }
                let most = match arrangement {
                    Arrangement::Layers => 1,
                    _ => MOST_GROUPS.min(remote),
                };
                let at = Split { main, device, local, groups: most, host: 0, per_node: 1 };
                let mut quick: Option<Vec<usize>> = None;
                for groups in 1..=most {
                    let at = Split { groups, ..at };
                    let packing = self.packing(arrangement, at, &hosts, &mut best);
                    if !self.may_be_cheaper(at, &packing, bound, &mut best) {
                        continue;
                    }
                    let quick = quick.get_or_insert_with(|| {
                        self.quick_enough(Split { groups: most, ..at }, &hosts, &mut best)
                    });
                    if quick.is_empty() {
                        break;
                    }
                    let packing = self.packing(arrangement, at, quick, &mut best);
                    if self.may_be_cheaper(at, &packing, bound, &mut best) {
                        self.try_hosts(at, quick, packing, &mut best);
                    }
                    if any && best.bound() < bound {
                        return best;
                    }
                }
            }
        }
        best
    }

    /// Numbers of experts of every layer that may be beside a main function on `main`, the most first: the
    /// fewer are remote, the cheaper.
    fn local_counts(&self, main: usize, device: Device, best: &mut Best) -> Vec<usize> {
        let shape = &self.shapes[main];
        let rest = self.rest_bytes();
        let (on_gpu, mut on_host) = match device {
            Device::Gpu => (rest, 0.0),
            Device::Cpu => (0.0, rest),
        };
        on_host += self.host_bytes() + self.fallback_bytes();
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

    /// The hosts that keep the limits with the most groups, each alone on its node: with fewer, or with more on
    /// a node, none is quicker.
    fn quick_enough(&self, at: Split, hosts: &[usize], best: &mut Best) -> Vec<usize> {
        let mut quick = Vec::with_capacity(hosts.len());
        for &host in hosts {
            let at = Split { host, ..at };
            let least = self.least_split(&at);
            if self.holds(least) && self.holds(self.split(&at)) {
                quick.push(host);
            } else if self.holds(least) || self.slow(host, least).is_closer_than(&best.miss) {
                best.missed(self.slow(host, self.split(&at)));
            }
        }
        quick
    }

    /// The remote functions of `at`, and how many of them each host has memory for.
    fn packing(&self, arrangement: Arrangement, at: Split, hosts: &[usize], best: &mut Best) -> Packing {
        let model = self.model();
        let experts_each = (model.experts - at.local).div_ceil(at.groups);
        let (functions, weights) = match arrangement {
            Arrangement::Layers => (model.layers, experts_each as f64 * self.one_expert_bytes()),
            _ => (at.groups, self.expert_bytes(experts_each)),
        };
        let each = weights + self.working_bytes(experts_each);
        let offer = |host: usize| Offer {
            capacity: ((self.shapes[host].memory / each) as usize).min(functions).min(MOST_PER_NODE),
            per_hour: self.per_hour(host),
            max: self.left(host, at.main),
        };
        let offers: Vec<Offer> = hosts.iter().map(|host| offer(*host)).collect();
        for (host, _) in hosts.iter().zip(&offers).filter(|(_, offer)| offer.capacity == 0) {
            let usable = self.shapes[*host].memory;
            best.missed(Miss::Memory { shape: *host, what: "memory for a slice", needed: each, usable });
        }
        Packing { functions, experts_each, each, offers }
    }

    /// Whether nodes that hold the functions, however slowly, cost less than what is known.
    fn may_be_cheaper(&self, at: Split, packing: &Packing, bound: f64, best: &mut Best) -> bool {
        let Some((price, _)) = cheapest(packing.functions, &packing.offers) else {
            if packing.offers.iter().any(|offer| offer.capacity > 0) {
                best.missed(Miss::Count);
            }
            return false;
        };
        let least = self.least_dollars(self.per_hour(at.main) + price);
        least < bound && least <= best.bound()
    }

    /// Tries `at` with the cheapest mixture of those hosts that keep the limits.
    fn try_hosts(&self, at: Split, hosts: &[usize], mut packing: Packing, best: &mut Best) {
        let mut times: Vec<Option<Times>> = Vec::with_capacity(hosts.len());
        for (host, offer) in hosts.iter().zip(&mut packing.offers) {
            let fit = self.most_per_node(Split { host: *host, ..at }, offer.capacity);
            offer.capacity = fit.map_or(0, |(per_node, _)| per_node);
            times.push(fit.map(|(_, times)| times));
        }
        let Some((price, counts)) = cheapest(packing.functions, &packing.offers) else {
            if packing.offers.iter().any(|offer| offer.capacity > 0) {
                best.missed(Miss::Count);
            }
            return;
        };
        let taken = counts.iter().zip(&times).filter(|(count, _)| **count > 0);
        let slowest = taken
            .filter_map(|(_, times)| *times)
            .fold(Times { ttft: 0.0, tpot: 0.0, busy: 0.0 }, Times::slower);
        let nodes = counts.iter().zip(hosts).zip(&packing.offers).filter(|((count, _), _)| **count > 0);
        best.offer(self.priced(Found {
            per_hour: self.per_hour(at.main) + price,
            dollars: 0.0,
            times: slowest,
            mains: self.mains,
            main: at.main,
            device: at.device,
            gpus: 1,
            on_gpu: if at.device == Device::Gpu { self.rest_bytes() } else { 0.0 },
            on_host: self.expert_bytes(at.local) + self.host_bytes() + self.fallback_bytes(),
            local: at.local,
            functions: packing.functions,
            experts_each: packing.experts_each,
            function_bytes: packing.each,
            hosts: nodes.map(|((count, host), offer)| (*host, *count, offer.capacity)).collect(),
        }));
    }

    /// Most functions that one node may hold with all limits kept, at most `room`, and what the times are
    /// then.
    fn most_per_node(&self, at: Split, room: usize) -> Option<(usize, Times)> {
        if room == 0 {
            return None;
        }
        let at_density = |per_node: usize| {
            if !self.holds(self.least_split(&Split { per_node, ..at })) {
                return None;
            }
            let times = self.split(&Split { per_node, ..at });
            self.holds(times).then_some((per_node, times))
        };
        let mut fit = at_density(1)?;
        // More functions on a node are never quicker.
        let (mut low, mut high) = (1, room + 1);
        while high - low > 1 {
            let middle = usize::midpoint(low, high);
            match at_density(middle) {
                Some(known) => (low, fit) = (middle, known),
                None => high = middle,
            }
        }
        Some(fit)
    }

    /// Nodes of `host` that each main function has left beside its own.
    fn left(&self, host: usize, main: usize) -> Option<u32> {
        let max = self.most_nodes(host)?;
        Some(max.saturating_sub(u32::from(host == main)))
    }

    /// What a remote function needs besides the weights of its experts, of which it has so many of a layer.
    fn working_bytes(&self, experts: usize) -> f64 {
        let model = self.model();
        let rows = self.rental.request.largest_input() * experts.min(model.top_k) as f64;
        self.rental.function_bytes + rows * model.token_bytes
    }

    /// Shapes for remote functions, without those that another one replaces: no dearer per node, at least as
    /// much memory, no slower, and as many of them as one likes.
    fn useful_hosts(&self) -> Vec<usize> {
        let hosts: Vec<usize> = (0..self.shapes.len()).filter(|host| self.may_host_remote(*host)).collect();
        let replaces = |other: usize, host: usize| {
            let (a, b) = (&self.shapes[other], &self.shapes[host]);
            let no_worse = a.node.max.is_none()
                && self.per_hour(other) <= self.per_hour(host)
                && a.memory >= b.memory
                && self.no_slower(other, host);
            let same = self.per_hour(other) == self.per_hour(host) && a.memory == b.memory;
            no_worse && (!same || other < host)
        };
        let useful = |host: &usize| !hosts.iter().any(|other| other != host && replaces(*other, *host));
        hosts.iter().copied().filter(useful).collect()
    }

    fn least_price_per_byte(&self, hosts: &[usize]) -> f64 {
        let rates = hosts.iter().map(|host| self.per_hour(*host) / self.shapes[*host].memory.max(1.0));
        rates.fold(f64::INFINITY, f64::min)
    }
}
