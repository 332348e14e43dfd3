//! Arrangements that one node holds by itself.

use super::compiled::{Compiled, Device, Times};
use super::form::GpuTimes;
use super::found::{Arrangement, Best, Found, Miss};

/// A whole model on one node.
struct Fitted {
    device: Device,
    gpus: u32,
    on_gpu: f64,
    /// Without the non-expert part.
    on_host: f64,
    times: Times,
}

impl Compiled<'_> {
    /// The cheapest node for `arrangement`, which has no remote functions.
    pub(super) fn on_one_node(&self, arrangement: Arrangement) -> Best {
        let mut best = Best::none(match arrangement {
            Arrangement::Cpu => "no shape may host a main function: all of them are spot nodes",
            _ => "no shape that may host a main function has a GPU",
        });
        for shape in (0..self.shapes.len()).filter(|shape| self.may_host_main(*shape)) {
            let Some(fitted) = self.fitted(shape, arrangement, &mut best) else { continue };
            let times = fitted.times;
            if !self.holds(times) {
                best.missed(self.slow(shape, times));
                continue;
            }
            best.offer(self.priced(Found {
                per_hour: self.per_hour(shape),
                dollars: 0.0,
                times,
                mains: self.mains,
                main: shape,
                device: fitted.device,
                gpus: fitted.gpus,
                on_gpu: fitted.on_gpu,
                on_host: fitted.on_host,
                local: self.model().experts,
                functions: 0,
                experts_each: 0,
                function_bytes: 0.0,
                hosts: Vec::new(),
            }));
        }
        best
    }

    /// It on a node of `shape`, where it fits.
    fn fitted(&self, shape: usize, arrangement: Arrangement, best: &mut Best) -> Option<Fitted> {
        let experts = self.expert_bytes(self.model().experts);
        let (rest, host) = (self.rest_bytes(), self.host_bytes());
        if arrangement == Arrangement::Cpu {
            self.fits("memory", shape, (rest + experts + host, self.shapes[shape].memory), best)?;
            let times = self.all_local(shape, Device::Cpu);
            return Some(Fitted {
                device: Device::Cpu,
                gpus: 0,
                on_gpu: 0.0,
                on_host: experts + host,
                times,
            });
        }
        let node = self.shapes[shape].node;
        let gpu: &GpuTimes = node.all_gpus.as_ref()?;
        let (on_gpu, on_host, times) = match arrangement {
            Arrangement::Gpu => (rest + experts, host, self.all_on_gpu(shape, gpu)),
            Arrangement::Mix => (rest, experts + host, self.all_local(shape, Device::Gpu)),
            _ => self.fetched(shape, gpu),
        };
        // Main functions of this project use one.
        let gpus = if arrangement.is_served_by_remoe() { 1 } else { node.gpus };
        self.fits("GPU memory", shape, (on_gpu, f64::from(gpus) * self.shapes[shape].gpu_memory), best)?;
        self.fits("memory", shape, (on_host, self.shapes[shape].memory), best)?;
        Some(Fitted { device: Device::Gpu, gpus, on_gpu, on_host, times })
    }

    /// GPU memory, main memory and times where experts are moved: the used ones of one layer compute, those of
    /// the next arrive. Moves take as long as they take, and hide behind computation as far as they can.
    fn fetched(&self, shape: usize, gpu: &GpuTimes) -> (f64, f64, Times) {
        let model = self.model();
        let used = (self.rental.request.input_tokens * model.top_k as f64).min(model.experts as f64);
        let computed = self.all_on_gpu(shape, gpu);
        let step = if computed.tpot > 0.0 { self.moving(model.top_k as f64, gpu) } else { 0.0 };
        let busy = if step > 0.0 { self.moving(self.used_at_once(), gpu) } else { 0.0 };
        let times = Times {
            ttft: computed.ttft.max(self.moving(used, gpu)),
            tpot: computed.tpot.max(step),
            busy: computed.busy.max(busy),
        };
        let two_layers = 2.0 * used * self.one_expert_bytes();
        (self.rest_bytes() + two_layers, self.expert_bytes(model.experts) + self.host_bytes(), times)
    }

    fn fits(
        &self,
        what: &'static str,
        shape: usize,
        (needed, usable): (f64, f64),
        best: &mut Best,
    ) -> Option<()> {
        if needed <= usable {
            return Some(());
        }
        best.missed(Miss::Memory { shape, what, needed, usable });
        None
    }
}
