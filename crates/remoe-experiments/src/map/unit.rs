//! Cells for unit prices: per core, GB and whole GPU.

use super::{
    Cell, DAY, IDLE_SECONDS, PATIENT_SECONDS, Regime, SLOW_SECONDS, STRATEGIES, StrategyOffer, Subject,
    cheaper, request, slo,
};
use crate::error::ExperimentError;
use remoe_hardware::{
    Commitment, DeploymentRequirements, DeviceTimes, ListedNode, NodeTiming, Profile, node_shape, problem,
};
use remoe_planner::{
    Affine, Arrivals, Device, Limits, PlanError, Pricing, Problem, ServingStrategy, SizeRange, Slo, Specs,
    Start, Starts, VcpuRange, compare,
};

const GB: f64 = 1e9;
/// Limit of the TTFT of cold requests, in seconds.
const COLD_SECONDS: f64 = 60.0;
/// Maximum number of groups of remote functions.
const MAX_GROUPS: u32 = 16;
/// Cold start of a function whose image is on the node, as in [`crate::Machine::reference`].
const START: Start = Start { process_seconds: 3.0, load_bytes_per_second: 1e9 };
/// Share of GPU memory that weights and KV cache cannot use.
const GPU_RESERVE: f64 = 0.08;

/// Platform: largest function sizes, and the machine that determines times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Platform {
    /// Memory of the largest function in GB.
    largest_gb: f64,
    /// Step between memory sizes in GB.
    step_gb: f64,
    /// vCPUs of the largest function.
    vcpus: f64,
    /// Step between numbers of vCPUs.
    vcpu_step: f64,
    /// GPUs that one main function may have.
    gpus: &'static [u32],
    /// vCPUs of a machine, and its specified memory bandwidth in GB per second.
    machine: (f64, f64),
}

impl Platform {
    /// Functions as large as the largest cloud machines: 784 GB and 96 vCPUs of a machine with 128 vCPUs and 410 GB/s
    /// (Google's n2-highmem-128), up to 8 GPUs.
    pub const LARGE: Self = Self {
        largest_gb: 784.0,
        step_gb: 4.0,
        vcpus: 96.0,
        vcpu_step: 4.0,
        gpus: &[1, 2, 4, 8],
        machine: (128.0, 410.0),
    };

    /// A cluster of modest nodes: 60 GB, 16 vCPUs and 40 GB/s (n2-standard-16 without its reserve), one GPU.
    pub const MODEST: Self = Self {
        largest_gb: 60.0,
        step_gb: 2.0,
        vcpus: 16.0,
        vcpu_step: 2.0,
        gpus: &[1],
        machine: (16.0, 40.0),
    };

    /// Returns the sizes of functions of up to `most_gb`.
    fn specs(&self, most_gb: f64) -> Specs {
        let step = self.step_gb * GB;
        let most = self.largest_gb.min(most_gb).max(self.step_gb) * GB;
        let sizes = SizeRange { min_bytes: step, max_bytes: most, step_bytes: step };
        let vcpus = Some(VcpuRange { min: self.vcpu_step, max: self.vcpus, step: self.vcpu_step });
        Specs { main_vcpus: vcpus, remote_vcpus: vcpus, ..Specs::new(sizes, sizes) }
    }

    /// Returns the profile of `subject` on a machine with `gpus` GPUs of `gpu_bytes` each.
    fn profile(&self, subject: &Subject, gpus: u32, gpu_bytes: f64, starts: Starts) -> Profile {
        let node = ListedNode {
            name: String::new(),
            vcpus: self.machine.0,
            memory_gb: self.largest_gb,
            gpus,
            gpu_memory_gb: (gpus > 0).then_some(gpu_bytes / GB),
            per_hour: Some(1.0),
            memory_bandwidth_gbs: Some(self.machine.1),
            ..ListedNode::default()
        };
        let (timing, commitment) = (NodeTiming::default(), Commitment::OnDemand);
        let shape = node_shape(&node, &timing, commitment, &subject.weights, None);
        let device = shape.gpu.as_ref().map(|gpu| DeviceTimes {
            prefill_seconds: gpu.rest_prefill_seconds,
            decode_seconds: gpu.rest_decode_seconds,
            context_seconds_per_token: gpu.context_seconds_per_token,
            // Experts are copied to all GPUs of the machine at once.
            swap_seconds: Affine {
                per_token: subject.weights.token_bytes / gpu.host_bytes_per_second,
                ..gpu.swap_seconds
            },
            assumed: false,
        });
        Profile {
            expert_seconds: shape.expert_seconds,
            nonexpert_seconds: shape.rest_seconds,
            context_seconds: shape.context_seconds,
            device,
            gpu_expert_seconds: shape.gpu.as_ref().map(|gpu| gpu.expert_seconds.clone()),
            starts,
            ..Profile::prior(&subject.facts, &subject.facts.dtype)
        }
    }
}

/// A regime of unit prices: platform, prices and limits.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitRegime {
    /// Name in file names.
    pub name: &'static str,
    /// Title.
    pub title: &'static str,
    /// Platform.
    pub place: Platform,
    /// Prices; of whole GPUs, if any.
    pub pricing: Pricing,
    /// Latency limits.
    pub slo: Slo,
    /// Idle windows in seconds that are tried for each strategy; `None`: functions are always alive.
    pub windows: &'static [Option<f64>],
    /// Cold starts.
    pub starts: Starts,
}

impl UnitRegime {
    /// Returns the regimes at `pricing`: large functions and modest nodes, always alive or scaling to zero, and large
    /// functions that scale to zero with main functions that load four times as fast.
    #[must_use]
    pub fn all(pricing: Pricing) -> Vec<Self> {
        let always = Self {
            name: "unit-large",
            title: "Unit prices, functions of any size",
            place: Platform::LARGE,
            pricing,
            slo: slo(),
            windows: &[None],
            starts: Starts { main: START, remote: START },
        };
        let rare = Self {
            name: "unit-rare",
            title: "Unit prices, functions of any size, may sleep",
            slo: Slo { tpot_seconds: PATIENT_SECONDS, cold_ttft_seconds: Some(COLD_SECONDS), ..slo() },
            windows: &[None, Some(IDLE_SECONDS)],
            ..always.clone()
        };
        let quick = Start { load_bytes_per_second: 4.0 * START.load_bytes_per_second, ..START };
        vec![
            always.clone(),
            rare.clone(),
            Self {
                name: "unit-rare-quick-mains",
                title: "Unit prices, may sleep, main functions load 4 GB/s",
                starts: Starts { main: quick, ..rare.starts },
                ..rare.clone()
            },
            Self {
                name: "unit-modest",
                title: "Unit prices, modest nodes",
                place: Platform::MODEST,
                slo: Slo { tpot_seconds: SLOW_SECONDS, ..always.slo },
                ..always
            },
            Self {
                name: "unit-modest-rare",
                title: "Unit prices, modest nodes, may sleep",
                place: Platform::MODEST,
                slo: Slo { tpot_seconds: SLOW_SECONDS, ..rare.slo },
                ..rare
            },
        ]
    }

    /// Finds the cheapest strategy for every model at every rate.
    ///
    /// # Errors
    /// An invalid problem.
    pub fn regime(&self, subjects: &[Subject]) -> Result<Regime, ExperimentError> {
        Regime::of(self.name, self.title, self.limits(), subjects, |subject, per_day| {
            self.cell(subject, per_day)
        })
    }

    /// Finds the cheapest strategy for `subject` at `per_day` requests a day.
    ///
    /// # Errors
    /// An invalid problem.
    pub fn cell(&self, subject: &Subject, per_day: f64) -> Result<Cell, ExperimentError> {
        let mut offers: Vec<StrategyOffer> =
            STRATEGIES.map(|way| absent(way, "no GPU in the price list")).into();
        for gpus in self.gpus() {
            for window in self.windows {
                let problem = self.problem(subject, per_day, gpus, *window)?;
                let rivals = match compare(&problem) {
                    Ok(verdict) => verdict.rivals,
                    // The GPUs cannot hold the non-expert part: no strategy uses them.
                    Err(PlanError::Infeasible(why)) => {
                        let why = why.to_string();
                        for offer in offers.iter_mut().filter(|offer| offer.dollars_per_hour.is_none()) {
                            offer.why.clone_from(&why);
                        }
                        continue;
                    }
                    Err(error) => {
                        return Err(ExperimentError::Plan { scenario: subject.name.clone(), error });
                    }
                };
                for rival in rivals {
                    let way = match rival.name {
                        // With a main function on CPUs, MIX is the same as everything on CPUs.
                        ServingStrategy::Mix if problem.device == Device::Cpu => ServingStrategy::Cpu,
                        way => way,
                    };
                    let offer = StrategyOffer {
                        way,
                        dollars_per_hour: rival.dollars_per_hour.filter(|_| rival.feasible),
                        on: if way == ServingStrategy::Cpu {
                            describe_processors(0)
                        } else {
                            describe_processors(gpus)
                        },
                        sleeps: window.is_some(),
                        ttft_seconds: rival.ttft_seconds,
                        tpot_seconds: rival.tpot_seconds,
                        why: if rival.feasible { String::new() } else { rival.why },
                    };
                    for known in offers.iter_mut().filter(|known| known.way == way) {
                        *known = cheaper(known.clone(), offer.clone());
                    }
                }
            }
        }
        Ok(Cell::new(subject, per_day, offers))
    }

    /// Returns the numbers of GPUs of a main function that are tried, including 0.
    pub fn gpus(&self) -> impl Iterator<Item = u32> {
        let gpus = if self.pricing.gpu_bytes_each.is_some() { self.place.gpus } else { &[] };
        std::iter::once(0).chain(gpus.iter().copied())
    }

    /// Returns the planner's problem for a cell, with `gpus` of the main function and an idle `window` in seconds.
    ///
    /// # Errors
    /// An invalid problem.
    pub fn problem(
        &self,
        subject: &Subject,
        per_day: f64,
        gpus: u32,
        window: Option<f64>,
    ) -> Result<Problem, ExperimentError> {
        let each = self.pricing.gpu_bytes_each.unwrap_or(0.0);
        let together = f64::from(gpus);
        // Several GPUs of a main function count as one with their total memory, speed and price.
        let pricing = match gpus {
            0 => Pricing { gpu_bytes_each: None, gpu_per_second_each: None, ..self.pricing },
            _ => Pricing {
                gpu_bytes_each: Some(each * together),
                gpu_per_second_each: self.pricing.gpu_per_second_each.map(|price| price * together),
                ..self.pricing
            },
        };
        // Functions that take longer to load than the cold TTFT limit cannot scale to zero: larger sizes are left out.
        let loaded =
            self.slo.cold_ttft_seconds.map(|cold| cold * self.starts.main.load_bytes_per_second / GB);
        let most_gb = loaded.filter(|_| window.is_some()).unwrap_or(f64::INFINITY);
        let wishes = DeploymentRequirements {
            request: request(),
            slo: self.slo,
            pricing,
            specs: self.place.specs(most_gb),
            remote_idle_seconds: None,
            arrivals: Some(Arrivals {
                per_second: per_day / DAY,
                burst: 1.0,
                recorded_seconds: None,
                idle_seconds: window,
                input_variation: 0.0,
                output_variation: 0.0,
            }),
            limits: Limits {
                payload_bytes: None,
                max_replicas: 1,
                max_groups: Some(MAX_GROUPS),
                gpu_bytes: (gpus > 0).then_some(each * together * (1.0 - GPU_RESERVE)),
            },
            prediction: None,
            prediction_p95: None,
            fallback_bytes: subject.fallback_bytes(),
            cold_start_seconds: 0.0,
        };
        let profile = self.place.profile(subject, gpus, each, self.starts);
        problem(&subject.facts, &profile, &wishes)
            .map_err(|error| ExperimentError::Problem { scenario: subject.name.clone(), error })
    }

    fn limits(&self) -> String {
        let mut text = format!(
            "TTFT {:.0} s, TPOT {:.0} ms; functions up to {:.0} GB and {:.0} vCPUs",
            self.slo.ttft_seconds,
            self.slo.tpot_seconds * 1e3,
            self.place.largest_gb,
            self.place.vcpus,
        );
        if let Some(most) = self.gpus().last().filter(|most| *most > 0) {
            text += &format!(", up to {most} whole GPU{}", if most > 1 { "s" } else { "" });
        }
        let cold = self.slo.cold_ttft_seconds;
        match (cold, self.windows.iter().flatten().next()) {
            (Some(cold), Some(window)) => {
                text += &format!(
                    "; each placement stays or scales to zero after {window:.0} s without requests, whichever is \
                     cheaper, with a cold TTFT of at most {cold:.0} s; a main function loads {:.0} GB/s, a remote \
                     one {:.0} GB/s",
                    self.starts.main.load_bytes_per_second / GB,
                    self.starts.remote.load_bytes_per_second / GB,
                );
            }
            _ => text += "; functions always run",
        }
        text
    }
}

fn describe_processors(gpus: u32) -> String {
    match gpus {
        0 => "CPUs".to_owned(),
        1 => "CPUs and 1 GPU".to_owned(),
        many => format!("CPUs and {many} GPUs"),
    }
}

fn absent(way: ServingStrategy, why: &str) -> StrategyOffer {
    StrategyOffer {
        way,
        dollars_per_hour: None,
        on: String::new(),
        sleeps: false,
        ttft_seconds: None,
        tpot_seconds: None,
        why: why.to_owned(),
    }
}
