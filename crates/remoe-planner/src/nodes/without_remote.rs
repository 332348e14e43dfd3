//! Search over arrangements without remote functions: on one node, or with the layers divided over several nodes.

use super::batches::{BATCHES, BatchTimes, by_batch, position};
use super::best_nodes::{Arrangement, BestNodes, FoundNodes, Infeasibility};
use super::compiled::{CompiledRental, Device, GpuReplica};
use super::load::{MAX_UNITS, ServingUnit};
use super::with_remote::MAX_SLOTS;

/// Maximum number of nodes that divide the layers of a model, as common with other engines.
const MAX_STAGES: u32 = 4;
/// Layers whose experts are on the GPU besides the cache: the computing layer, and the next one, which is prefetched.
const PREFETCHED_LAYERS: f64 = 2.0;

/// A model that fits on the nodes of one unit.
struct FittedModel {
    device: Device,
    /// GPUs of each copy, on each node.
    gpus: u32,
    copies: u32,
    stages: u32,
    slots: u32,
    /// Bytes on the GPUs of each node.
    on_gpu: f64,
    /// Bytes on each host, without the non-expert part.
    on_host: f64,
    /// Bytes of weights on each node.
    loaded: f64,
    hosted_layers: usize,
    times: BatchTimes,
}

/// Required and usable bytes of one kind of memory.
struct MemoryNeed {
    what: &'static str,
    bytes: f64,
    usable: f64,
}

impl CompiledRental<'_> {
    /// Searches the cheapest nodes for an `arrangement` without remote functions.
    pub(super) fn without_remote(&self, arrangement: Arrangement) -> BestNodes {
        let mut best = BestNodes::none(match arrangement {
            Arrangement::Cpu | Arrangement::Pipeline => {
                "no shape may host a main function: all of them are spot nodes"
            }
            _ => "no shape that may host a main function has a GPU",
        });
        let stages = if matches!(arrangement, Arrangement::Gpus | Arrangement::Pipeline) {
            2..=MAX_STAGES.min(self.model().layers as u32)
        } else {
            1..=1
        };
        for shape in (0..self.shapes.len()).filter(|shape| self.may_host_main(*shape)) {
            let mut all: Vec<FittedModel> = Vec::new();
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

    /// Offers the fewest units of `fitted` that serve the load.
    fn offer(&self, shape: usize, fitted: &FittedModel, best: &mut BestNodes) {
        let most = self.shapes[shape].node.max.map_or(MAX_UNITS, |max| (max / fitted.stages).min(MAX_UNITS));
        if most == 0 {
            best.record_infeasible(Infeasibility::Count);
            return;
        }
        let unit = ServingUnit { times: fitted.times, slots: fitted.slots, copies: fitted.copies };
        let (unit, units) = match self.fewest(unit, most) {
            Ok(fewest) => fewest,
            Err(excess) => return best.record_infeasible(Infeasibility::too_slow(shape, excess)),
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

    /// Returns the largest batch, up to `most`, for which all of `needs` fit, or `None` if no batch does.
    fn largest_batch(
        &self,
        (shape, most): (usize, u32),
        best: &mut BestNodes,
        needs: impl Fn(u32) -> [MemoryNeed; 2],
    ) -> Option<u32> {
        for index in (0..=position(self.most_slots().min(most))).rev() {
            let short = needs(BATCHES[index]).into_iter().find(|need| need.bytes > need.usable);
            match short {
                None => return Some(BATCHES[index]),
                Some(MemoryNeed { what, bytes, usable }) if index == 0 => {
                    best.record_infeasible(Infeasibility::Memory { shape, what, needed: bytes, usable });
                }
                Some(_) => {}
            }
        }
        None
    }

    /// Fits the whole model on the CPUs of `stages` nodes.
    ///
    /// A pipeline has as many batches as stages, each in another stage. Every node computes for all batches in turn.
    fn on_cpus(&self, shape: usize, stages: u32, best: &mut BestNodes) -> Option<FittedModel> {
        let node = &self.shapes[shape];
        let (parts, experts) = (f64::from(stages), self.expert_bytes(self.model().experts));
        let rest = |slots: u32| match stages {
            1 => self.main_rest_bytes(Device::Cpu, slots),
            _ => self.rest_bytes(slots * stages),
        };
        let host = |slots: u32| experts / parts + self.host_bytes(slots);
        // Remoe does not serve pipelines: its limit applies to one stage only.
        let most = if stages == 1 { MAX_SLOTS } else { u32::MAX };
        let slots = self.largest_batch((shape, most), best, |slots| {
            let bytes = rest(slots) / parts + host(slots);
            [MemoryNeed { what: "memory", bytes, usable: node.memory }, MemoryNeed::none()]
        })?;
        Some(FittedModel {
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

    /// Returns `times` plus the transfers from stage to stage.
    fn staged(&self, times: BatchTimes, stages: u32) -> BatchTimes {
        if stages == 1 {
            return times;
        }
        let hops = f64::from(stages);
        BatchTimes {
            prefill: times.prefill + hops * self.hop_seconds(self.rental.request.input_tokens),
            steps: by_batch(|index| match times.steps[index] {
                0.0 => 0.0,
                step => step + hops * self.hop_seconds(f64::from(BATCHES[index])),
            }),
        }
    }

    /// Fits all experts on the CPUs of a node, and the non-expert part on one of its GPUs.
    fn mixed(&self, shape: usize, best: &mut BestNodes) -> Option<FittedModel> {
        let node = &self.shapes[shape];
        if node.node.gpus == 0 {
            return None;
        }
        let host = |slots: u32| self.expert_bytes(self.model().experts) + self.host_bytes(slots);
        let slots = self.largest_batch((shape, MAX_SLOTS), best, |slots| {
            [
                MemoryNeed {
                    what: "GPU memory",
                    bytes: self.main_rest_bytes(Device::Gpu, slots),
                    usable: node.gpu_memory,
                },
                MemoryNeed { what: "memory", bytes: host(slots), usable: node.memory },
            ]
        })?;
        Some(FittedModel {
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

    /// Fits `arrangement` on groups of GPUs of `stages` nodes.
    fn on_gpus(
        &self,
        shape: usize,
        group: &GpuReplica<'_>,
        stages: u32,
        arrangement: Arrangement,
        best: &mut BestNodes,
    ) -> Vec<FittedModel> {
        let node = &self.shapes[shape];
        let whole_node = group.form.gpus == node.node.gpus;
        let copies = node.node.gpus / group.form.gpus.max(1);
        let usable = f64::from(group.form.gpus) * node.gpu_memory;
        // Experts in host memory are used by all GPUs of a node.
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
                MemoryNeed { what: "GPU memory", bytes: on_gpu(slots), usable },
                MemoryNeed { what: "memory", bytes: host(slots), usable: node.memory },
            ]
        });
        let fitted = |slots: u32| FittedModel {
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

    /// Fits the experts of as many layers as possible on the GPUs, and those of the others on the CPUs.
    ///
    /// Tries every batch: smaller ones leave memory for more layers.
    fn offloaded(
        &self,
        shape: usize,
        group: &GpuReplica<'_>,
        usable: f64,
        best: &mut BestNodes,
    ) -> Vec<FittedModel> {
        let (node, model) = (&self.shapes[shape], self.model());
        let layer = self.expert_bytes(model.experts) / model.layers as f64;
        // At least one layer is on the CPUs: otherwise it is the arrangement with everything on GPUs.
        let on_gpus = |slots: u32| {
            let room = ((usable - self.rest_bytes(slots)) / layer).floor().max(0.0);
            (room as usize).min(model.layers - 1)
        };
        let host = |slots: u32| (model.layers - on_gpus(slots)) as f64 * layer + self.host_bytes(slots);
        let largest = self.largest_batch((shape, u32::MAX), best, |slots| {
            [
                MemoryNeed { what: "GPU memory", bytes: self.rest_bytes(slots), usable },
                MemoryNeed { what: "memory", bytes: host(slots), usable: node.memory },
            ]
        });
        let Some(largest) = largest else { return Vec::new() };
        let mut all: Vec<FittedModel> = Vec::new();
        for &slots in BATCHES[..=position(largest)].iter().rev() {
            let hosted_layers = model.layers - on_gpus(slots);
            if all.last().is_some_and(|larger| larger.hosted_layers == hosted_layers) {
                continue;
            }
            all.push(FittedModel {
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

    /// Fits experts in host memory, from which they are copied to the GPUs when they are used.
    ///
    /// As many of the most used experts as fit stay on the GPUs: an ideal cache. Copies of a layer's experts overlap with the
    /// computation of the layer before.
    fn fetched(
        &self,
        shape: usize,
        group: &GpuReplica<'_>,
        usable: f64,
        best: &mut BestNodes,
    ) -> Vec<FittedModel> {
        let (node, model) = (&self.shapes[shape], self.model());
        let used = (self.rental.request.input_tokens * model.top_k as f64).min(model.experts as f64);
        let prefetch_bytes = PREFETCHED_LAYERS * used * self.one_expert_bytes();
        let experts = self.expert_bytes(model.experts);
        let largest = self.largest_batch((shape, u32::MAX), best, |slots| {
            [
                MemoryNeed { what: "GPU memory", bytes: self.rest_bytes(slots) + prefetch_bytes, usable },
                MemoryNeed { what: "memory", bytes: experts + self.host_bytes(slots), usable: node.memory },
            ]
        });
        let Some(largest) = largest else { return Vec::new() };
        let (computed, gpu) = (self.on_group(shape, group, 0), &group.form.times);
        let mut all: Vec<FittedModel> = Vec::new();
        let mut last = usize::MAX;
        // Smaller batches leave memory for a larger cache.
        for &slots in BATCHES[..=position(largest)].iter().rev() {
            let room = (usable - self.rest_bytes(slots) - prefetch_bytes) / self.expert_bytes(1);
            let cached = (room.max(0.0) as usize).min(model.experts);
            if cached == last {
                continue;
            }
            last = cached;
            let misses_per_step = self.cache_misses(cached);
            let prefill_misses = used * (1.0 - cached as f64 / model.experts as f64);
            all.push(FittedModel {
                device: Device::Gpu,
                gpus: group.form.gpus,
                copies: 1,
                stages: 1,
                slots,
                on_gpu: self.rest_bytes(slots) + prefetch_bytes + self.expert_bytes(cached),
                on_host: experts + self.host_bytes(slots),
                loaded: self.rest_weights() + experts,
                hosted_layers: 0,
                times: BatchTimes {
                    prefill: computed.prefill.max(self.copy_seconds(prefill_misses, gpu)),
                    steps: by_batch(|index| match computed.steps[index] {
                        0.0 => 0.0,
                        step => step.max(self.copy_seconds(misses_per_step[index], gpu)),
                    }),
                },
            });
        }
        all
    }
}

impl MemoryNeed {
    fn none() -> Self {
        Self { what: "memory", bytes: 0.0, usable: 0.0 }
    }
}
