//! Cells at prices by the core, the GB and the whole GPU.

use super::{
    Cell, DAY, IDLE_SECONDS, Offer, PATIENT_SECONDS, Regime, SLOW_SECONDS, Subject, WAYS, cheaper, request,
    slo,
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
/// Where functions may sleep, the first token from nothing is promised within so many seconds.
const COLD_SECONDS: f64 = 60.0;
/// Groups of remote functions, at most.
const MOST_GROUPS: u32 = 16;
/// A container from an image that is on the node, and weights that a function loads: those of
/// [`crate::Machine::reference`].
const START: Start = Start { process_seconds: 3.0, load_bytes_per_second: 1e9 };
/// Share of GPU memory that is not there for weights and caches.
const GPU_RESERVE: f64 = 0.08;

/// Where functions live: what the largest has, and the machine that times follow from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Platform {
    /// Memory of the largest function in GB.
    largest_gb: f64,
    /// From one memory size to the next in GB.
    step_gb: f64,
    /// vCPUs of the largest function.
    vcpus: f64,
    /// From one number of vCPUs to the next.
    vcpu_step: f64,
    /// GPUs that one main function may have.
    gpus: &'static [u32],
    /// vCPUs of a machine, and GB per second that its memory is specified for.
    machine: (f64, f64),
}

impl Platform {
    /// Functions as large as the largest machines of clouds: 784 GB and 96 vCPUs of a machine with 128 that
    /// share 410 GB/s (Google's n2-highmem-128), up to 8 GPUs.
    pub const LARGE: Self = Self {
        largest_gb: 784.0,
        step_gb: 4.0,
        vcpus: 96.0,
        vcpu_step: 4.0,
        gpus: &[1, 2, 4, 8],
        machine: (128.0, 410.0),
    };

    /// A cluster of modest nodes: 60 GB and 16 vCPUs that share 40 GB/s (n2-standard-16 without its reserve),
    /// one GPU.
    pub const MODEST: Self = Self {
        largest_gb: 60.0,
        step_gb: 2.0,
        vcpus: 16.0,
        vcpu_step: 2.0,
        gpus: &[1],
        machine: (16.0, 40.0),
    };

    /// Functions of up to `most_gb`.
    fn specs(&self, most_gb: f64) -> Specs {
        let step = self.step_gb * GB;
        let most = self.largest_gb.min(most_gb).max(self.step_gb) * GB;
        let sizes = SizeRange { min_bytes: step, max_bytes: most, step_bytes: step };
        let vcpus = Some(VcpuRange { min: self.vcpu_step, max: self.vcpus, step: self.vcpu_step });
        Specs { main_vcpus: vcpus, remote_vcpus: vcpus, ..Specs::new(sizes, sizes) }
    }

    /// Times of `subject` on a machine with so many GPUs of `gpu_bytes` each, none where 0.
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
            // Experts that are moved come as fast as all GPUs of the machine take them.
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

/// Prices, limits and a place, for any model at any rate.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitRegime {
    /// For files.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    /// Where functions live.
    pub place: Platform,
    /// Prices; GPUs by the whole one, if any.
    pub pricing: Pricing,
    /// Promised limits.
    pub slo: Slo,
    /// Idle windows in seconds that a way may choose from; none: functions never end.
    pub windows: &'static [Option<f64>],
    /// How functions start.
    pub starts: Starts,
}

impl UnitRegime {
    /// The regimes at `pricing`: large functions, large functions that may sleep, modest nodes, modest nodes
    /// that may sleep, and the second one for mains that load four times as fast.
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

    /// Finds the cheapest way for every model at every rate.
    ///
    /// # Errors
    /// No problem can be made of a model.
    pub fn regime(&self, subjects: &[Subject]) -> Result<Regime, ExperimentError> {
        Regime::of(self.name, self.title, self.limits(), subjects, |subject, per_day| {
            self.cell(subject, per_day)
        })
    }

    /// Finds the cheapest way for `subject` at `per_day` requests a day.
    ///
    /// # Errors
    /// No problem can be made of the model.
    pub fn cell(&self, subject: &Subject, per_day: f64) -> Result<Cell, ExperimentError> {
        let mut offers: Vec<Offer> = WAYS.map(|way| absent(way, "no GPU in the price list")).into();
        for gpus in self.gpus() {
            for window in self.windows {
                let problem = self.problem(subject, per_day, gpus, *window)?;
                let rivals = match compare(&problem) {
                    Ok(verdict) => verdict.rivals,
                    // Nothing is on GPUs that do not even hold what is no expert.
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
                        // Beside a main function on CPUs, experts are where everything else is.
                        ServingStrategy::Mix if problem.device == Device::Cpu => ServingStrategy::Cpu,
                        way => way,
                    };
                    let offer = Offer {
                        way,
                        dollars_per_hour: rival.dollars_per_hour.filter(|_| rival.feasible),
                        on: if way == ServingStrategy::Cpu { place(0) } else { place(gpus) },
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

    /// Numbers of GPUs of a main function, 0 for none.
    pub fn gpus(&self) -> impl Iterator<Item = u32> {
        let gpus = if self.pricing.gpu_bytes_each.is_some() { self.place.gpus } else { &[] };
        std::iter::once(0).chain(gpus.iter().copied())
    }

    /// The planner's problem behind a part of a cell: a main function with `gpus`, functions that end after
    /// `window` seconds without requests.
    ///
    /// # Errors
    /// No problem can be made of the model.
    pub fn problem(
        &self,
        subject: &Subject,
        per_day: f64,
        gpus: u32,
        window: Option<f64>,
    ) -> Result<Problem, ExperimentError> {
        let each = self.pricing.gpu_bytes_each.unwrap_or(0.0);
        let together = f64::from(gpus);
        // Several GPUs of a main function work as one that is as large, as quick and as dear as all.
        let pricing = match gpus {
            0 => Pricing { gpu_bytes_each: None, gpu_per_second_each: None, ..self.pricing },
            _ => Pricing {
                gpu_bytes_each: Some(each * together),
                gpu_per_second_each: self.pricing.gpu_per_second_each.map(|price| price * together),
                ..self.pricing
            },
        };
        // What loads for longer than is promised never sleeps: the search need not look at it.
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
                max_groups: Some(MOST_GROUPS),
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

fn place(gpus: u32) -> String {
    match gpus {
        0 => "CPUs".to_owned(),
        1 => "CPUs and 1 GPU".to_owned(),
        many => format!("CPUs and {many} GPUs"),
    }
}

fn absent(way: ServingStrategy, why: &str) -> Offer {
    Offer {
        way,
        dollars_per_hour: None,
        on: String::new(),
        sleeps: false,
        ttft_seconds: None,
        tpot_seconds: None,
        why: why.to_owned(),
    }
}
