//! Arrangements without remote functions: on one node, or with the layers divided over several.

use super::batches::{BATCHES, Times, by_batch, position};
use super::compiled::{Compiled, Device, GpuReplica};
use super::found::{Arrangement, BestNodes, FoundNodes, Miss};
use super::load::{MOST_UNITS, Unit};
use super::remote::MOST_SLOTS;

/// Nodes that divide the layers of a model, at most: what engines are run with.
const MOST_STAGES: u32 = 4;
/// The most that prefetching reads ahead: experts of the layer that computes, and of the next.
const LAYERS_IN_MOTION: f64 = 2.0;

/// A model on the nodes of one unit.
struct Fitted {
    device: Device,
    /// GPUs of each copy, on each node.
    gpus: u32,
    copies: u32,
    stages: u32,
    slots: u32,
    on_gpu: f64,
    /// Without the non-expert part.
    on_host: f64,
    /// Bytes of weights on each node.
    loaded: f64,
    hosted_layers: usize,
    times: Times,
}

/// Memory that something needs, and that there is.
struct Need {
    what: &'static str,
    bytes: f64,
    usable: f64,
}

impl Compiled<'_> {
    /// The cheapest nodes for `arrangement`, which has no remote functions.
    pub(super) fn without_remote(&self, arrangement: Arrangement) -> BestNodes {
        let mut best = BestNodes::none(match arrangement {
            Arrangement::Cpu | Arrangement::Pipeline => {
                "no shape may host a main function: all of them are spot nodes"
            }
            _ => "no shape that may host a main function has a GPU",
        });
        let stages = if matches!(arrangement, Arrangement::Gpus | Arrangement::Pipeline) {
            2..=MOST_STAGES.min(self.model().layers as u32)
        } else {
            1..=1
        };
        for shape in (0..self.shapes.len()).filter(|shape| self.may_host_main(*shape)) {
            let mut all: Vec<Fitted> = Vec::new();
            match arrangement {
                Arrangement::Cpu => all.extend(self.on_cpus(shape, 1, &mut best)),
                Arrangement::Pipeline => {
                    all.extend(stages.clone().filter_map(|stages| self.on_cpus(shape, stages, &mut best)));
                }
                Arrangement::Mix => all.extend(self.mixed(shape, &mut best)),
                _ => {
                    for (group, stages) in self.shapes[shape]
                        .groups
                        .iter()
                        .flat_map(|group| stages.clone().map(move |n| (group, n)))
                    {
                        all.extend(self.on_gpus(shape, group, stages, arrangement, &mut best));
                    }
                }
            }
            for fitted in &all {
                self.offer(shape, fitted, &mut best);
            }
        }
        best
    }

    /// Offers as many of `fitted` as the load needs.
    fn offer(&self, shape: usize, fitted: &Fitted, best: &mut BestNodes) {
        let most =
            self.shapes[shape].node.max.map_or(MOST_UNITS, |max| (max / fitted.stages).min(MOST_UNITS));
        if most == 0 {
            best.missed(Miss::Count);
            return;
        }
        let unit = Unit { times: fitted.times, slots: fitted.slots, copies: fitted.copies };
        let (unit, units) = match self.fewest(unit, most) {
            Ok(fewest) => fewest,
            Err(excess) => return best.missed(Miss::slow(shape, excess)),
        };
        let found = FoundNodes {
            per_hour: f64::from(units) * f64::from(fitted.stages) * self.per_hour(shape),
            dollars: 0.0,
            unit,
            units,
            main: shape,
            stages: fitted.stages,
            device: fitted.device,
            gpus: fitted.gpus,
            on_gpu: fitted.on_gpu,
            on_host: fitted.on_host,
            loaded: fitted.loaded,
            local: self.model().experts,
            hosted_layers: fitted.hosted_layers,
            functions: 0,
            experts_each: 0,
            function_bytes: 0.0,
            hosts: Vec::new(),
        };
        self.confirm(found, most, best);
    }

    /// The largest batch for which all of `needs` fit; nothing where none does.
    fn largest_batch(
        &self,
        (shape, most): (usize, u32),
        best: &mut BestNodes,
        needs: impl Fn(u32) -> [Need; 2],
    ) -> Option<u32> {
        for index in (0..=position(self.most_slots().min(most))).rev() {
            let short = needs(BATCHES[index]).into_iter().find(|need| need.bytes > need.usable);
            match short {
                None => return Some(BATCHES[index]),
                Some(Need { what, bytes, usable }) if index == 0 => {
                    best.missed(Miss::Memory { shape, what, needed: bytes, usable });
                }
                Some(_) => {}
            }
        }
        None
    }

    /// Everything on the CPUs of `stages` nodes.
    ///
    /// A pipeline has as many batches as stages, each in another stage: the nodes compute for all of them in turn, as
    /// if every batch had nodes of its own for its part of the time.
    fn on_cpus(&self, shape: usize, stages: u32, best: &mut BestNodes) -> Option<Fitted> {
        let node = &self.shapes[shape];
        let (parts, experts) = (f64::from(stages), self.expert_bytes(self.model().experts));
        let rest = |slots: u32| match stages {
            1 => self.main_rest_bytes(Device::Cpu, slots),
            _ => self.rest_bytes(slots * stages),
        };
        let host = |slots: u32| experts / parts + self.host_bytes(slots);
        // A pipeline is no way of this project.
        let most = if stages == 1 { MOST_SLOTS } else { u32::MAX };
        let slots = self.largest_batch((shape, most), best, |slots| {
            let bytes = rest(slots) / parts + host(slots);
            [Need { what: "memory", bytes, usable: node.memory }, Need::nothing()]
        })?;
        Some(Fitted {
            device: Device::Cpu,
            gpus: 0,
            copies: stages,
            stages,
            slots,
            on_gpu: 0.0,
            on_host: host(slots),
            loaded: (self.main_weights(Device::Cpu) + experts) / parts,
            hosted_layers: 0,
            times: self.staged(self.all_local(shape, Device::Cpu), stages),
        })
    }

    /// `times` with the way from stage to stage.
    fn staged(&self, times: Times, stages: u32) -> Times {
        if stages == 1 {
            return times;
        }
        let hops = f64::from(stages);
        Times {
            prefill: times.prefill + hops * self.hop_seconds(self.rental.request.input_tokens),
            steps: by_batch(|index| match times.steps[index] {
                0.0 => 0.0,
                step => step + hops * self.hop_seconds(f64::from(BATCHES[index])),
            }),
        }
    }

    /// All experts on the CPUs of a node, the rest on one of its GPUs.
    fn mixed(&self, shape: usize, best: &mut BestNodes) -> Option<Fitted> {
        let node = &self.shapes[shape];
        if node.node.gpus == 0 {
            return None;
        }
        let host = |slots: u32| self.expert_bytes(self.model().experts) + self.host_bytes(slots);
        let slots = self.largest_batch((shape, MOST_SLOTS), best, |slots| {
            [
                Need {
                    what: "GPU memory",
                    bytes: self.main_rest_bytes(Device::Gpu, slots),
                    usable: node.gpu_memory,
                },
                Need { what: "memory", bytes: host(slots), usable: node.memory },
            ]
        })?;
        Some(Fitted {
            device: Device::Gpu,
            gpus: 1,
            copies: 1,
            stages: 1,
            slots,
            on_gpu: self.main_rest_bytes(Device::Gpu, slots),
            on_host: host(slots),
            loaded: self.main_weights(Device::Gpu) + self.expert_bytes(self.model().experts),
            hosted_layers: self.model().layers,
            times: self.all_local(shape, Device::Gpu),
        })
    }

    /// `arrangement` on groups of GPUs of `stages` nodes.
    fn on_gpus(
        &self,
        shape: usize,
        group: &GpuReplica<'_>,
        stages: u32,
        arrangement: Arrangement,
        best: &mut BestNodes,
    ) -> Vec<Fitted> {
        let node = &self.shapes[shape];
        let whole_node = group.form.gpus == node.node.gpus;
        let copies = node.node.gpus / group.form.gpus.max(1);
        let usable = f64::from(group.form.gpus) * node.gpu_memory;
        // Experts on the host are for all GPUs of a node.
        match arrangement {
            Arrangement::Gpu => {}
            _ if !whole_node => return Vec::new(),
            Arrangement::Offload => return self.offloaded(shape, group, usable, best),
            Arrangement::Fetch => return self.fetched(shape, group, usable, best),
            _ => {}
        }
        let parts = f64::from(stages);
        let experts = self.expert_bytes(self.model().experts);
        let on_gpu = |slots: u32| (self.rest_bytes(slots * stages) + experts) / parts;
        let host = |slots: u32| f64::from(copies) * self.host_bytes(slots);
        let slots = self.largest_batch((shape, u32::MAX), best, |slots| {
            [
                Need { what: "GPU memory", bytes: on_gpu(slots), usable },
                Need { what: "memory", bytes: host(slots), usable: node.memory },
            ]
        });
        let fitted = |slots: u32| Fitted {
            device: Device::Gpu,
            gpus: group.form.gpus,
            copies: copies * stages,
            stages,
            slots,
            on_gpu: on_gpu(slots),
            on_host: host(slots),
            loaded: (self.rest_weights() + experts) / parts,
            hosted_layers: 0,
            times: self.staged(self.on_group(shape, group, 0), stages),
        };
        slots.map(fitted).into_iter().collect()
    }

    /// The experts of as many layers on the GPUs as fit beside the rest and the requests, those of the others on the
    /// CPUs. Fewer requests at once leave room for more layers.
    fn offloaded(
        &self,
        shape: usize,
        group: &GpuReplica<'_>,
        usable: f64,
        best: &mut BestNodes,
    ) -> Vec<Fitted> {
        let (node, model) = (&self.shapes[shape], self.model());
        let layer = self.expert_bytes(model.experts) / model.layers as f64;
        // With the experts of all layers it is the arrangement with everything on GPUs.
        let on_gpus = |slots: u32| {
            let room = ((usable - self.rest_bytes(slots)) / layer).floor().max(0.0);
            (room as usize).min(model.layers - 1)
        };
        let host = |slots: u32| (model.layers - on_gpus(slots)) as f64 * layer + self.host_bytes(slots);
        let largest = self.largest_batch((shape, u32::MAX), best, |slots| {
            [
                Need { what: "GPU memory", bytes: self.rest_bytes(slots), usable },
                Need { what: "memory", bytes: host(slots), usable: node.memory },
            ]
        });
        let Some(largest) = largest else { return Vec::new() };
        let mut all: Vec<Fitted> = Vec::new();
        for &slots in BATCHES[..=position(largest)].iter().rev() {
            let hosted_layers = model.layers - on_gpus(slots);
            if all.last().is_some_and(|larger| larger.hosted_layers == hosted_layers) {
                continue;
            }
            all.push(Fitted {
                device: Device::Gpu,
                gpus: group.form.gpus,
                copies: 1,
                stages: 1,
                slots,
                on_gpu: self.rest_bytes(slots) + (model.layers - hosted_layers) as f64 * layer,
                on_host: host(slots),
                loaded: self.rest_weights() + self.expert_bytes(model.experts),
                hosted_layers,
                times: self.on_group(shape, group, hosted_layers),
            });
        }
        all
    }

    /// Experts in main memory, moved to the GPUs when they are used; as many of the most used ones as fit stay there
    /// (a cache that never misses what it could hold). Those of one layer compute while those of the next arrive, so
    /// that moves hide behind computation as far as they can.
    fn fetched(
        &self,
        shape: usize,
        group: &GpuReplica<'_>,
        usable: f64,
        best: &mut BestNodes,
    ) -> Vec<Fitted> {
        let (node, model) = (&self.shapes[shape], self.model());
        let used = (self.rental.request.input_tokens * model.top_k as f64).min(model.experts as f64);
        let in_motion = LAYERS_IN_MOTION * used * self.one_expert_bytes();
        let experts = self.expert_bytes(model.experts);
        let largest = self.largest_batch((shape, u32::MAX), best, |slots| {
            [
                Need { what: "GPU memory", bytes: self.rest_bytes(slots) + in_motion, usable },
                Need { what: "memory", bytes: experts + self.host_bytes(slots), usable: node.memory },
            ]
        });
        let Some(largest) = largest else { return Vec::new() };
        let (computed, gpu) = (self.on_group(shape, group, 0), &group.form.times);
        let mut all: Vec<Fitted> = Vec::new();
        let mut last = usize::MAX;
        // Fewer requests at once leave room for a larger cache.
        for &slots in BATCHES[..=position(largest)].iter().rev() {
            let room = (usable - self.rest_bytes(slots) - in_motion) / self.expert_bytes(1);
            let cached = (room.max(0.0) as usize).min(model.experts);
            if cached == last {
                continue;
            }
            last = cached;
            let beside = self.used_beside(cached);
            let missed = used * (1.0 - cached as f64 / model.experts as f64);
            all.push(Fitted {
                device: Device::Gpu,
                gpus: group.form.gpus,
                copies: 1,
                stages: 1,
                slots,
                on_gpu: self.rest_bytes(slots) + in_motion + self.expert_bytes(cached),
                on_host: experts + self.host_bytes(slots),
                loaded: self.rest_weights() + experts,
                hosted_layers: 0,
                times: Times {
                    prefill: computed.prefill.max(self.moving(missed, gpu)),
                    steps: by_batch(|index| match computed.steps[index] {
                        0.0 => 0.0,
                        step => step.max(self.moving(beside[index], gpu)),
                    }),
                },
            });
        }
        all
    }
}

impl Need {
    fn nothing() -> Self {
        Self { what: "memory", bytes: 0.0, usable: 0.0 }
    }
}
