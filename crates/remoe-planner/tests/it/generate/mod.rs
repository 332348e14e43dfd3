//! Generated problems: random small ones, and ones in the shape of real models.

#![allow(dead_code)]

use remoe_planner::{
    Affine, Arrivals, Billing, CpuProfile, Device, ErrorFactor, GpuProfile, Layer, Limits, PlanError,
    Pricing, Problem, Request, SizeRange, Slo, Specs, Start, Starts, Transport, VcpuRange, preallocate,
};

/// Stride over random problems in every change, for tests that would take more than a minute. `make nightly` tries all
/// of them (`REMOE_ALL_PROBLEMS`). A prime, so that the sample has every property that a seed's remainder decides.
const STRIDE: u64 = 5;

/// A sample of random problems.
pub(crate) struct Sample {
    stride: u64,
}

impl Sample {
    pub(crate) fn new() -> Self {
        Self { stride: if std::env::var_os("REMOE_ALL_PROBLEMS").is_some() { 1 } else { STRIDE } }
    }

    /// One in so many, for problems that take seconds each.
    pub(crate) fn one_in(stride: u64) -> Self {
        let all = Self::new().stride == 1;
        Self { stride: if all { 1 } else { stride } }
    }

    /// The seeds to try of `all`.
    pub(crate) fn of(&self, all: std::ops::Range<u64>) -> impl Iterator<Item = u64> + Clone + use<> {
        all.step_by(self.stride as usize)
    }

    /// Returns whether `found` in the sample are enough where `least` are asked of all: half of their share, as a
    /// small sample has more or fewer by chance.
    pub(crate) fn is_enough(&self, found: usize, least: usize) -> bool {
        let share = if self.stride == 1 { least } else { least / (2 * self.stride as usize) };
        found >= share.max(1)
    }
}

/// A portable random number generator (SplitMix64).
pub(crate) struct SplitMix64(u64);

impl SplitMix64 {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// From `low` to `high`, both included.
    pub(crate) fn whole(&mut self, low: u64, high: u64) -> u64 {
        low + self.bits() % (high - low + 1)
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.whole(1, count) == 1
    }

    /// Shares that sum to 1, from even to very uneven.
    pub(crate) fn shares(&mut self, experts: usize) -> Vec<f64> {
        let skew = self.between(0.3, 3.0);
        let raw: Vec<f64> = (0..experts).map(|_| self.unit().powf(skew) + 1e-3).collect();
        let sum: f64 = raw.iter().sum();
        raw.iter().map(|share| share / sum).collect()
    }
}

const VCPUS: [f64; 6] = [0.2, 0.5, 1.0, 2.0, 4.0, 8.0];
const TOKENS: [f64; 4] = [1.0, 8.0, 64.0, 256.0];

/// Generates times that decrease with vCPUs towards a floor and increase with tokens, with some noise.
fn cpu_profile(random: &mut SplitMix64, scale: f64) -> CpuProfile {
    let (decay, floor) = (random.between(0.4, 1.6), random.between(0.1, 0.4));
    let (fixed, per_token) = (random.between(0.5, 0.9), random.between(0.1, 0.4));
    let seconds = TOKENS.iter().map(|tokens| {
        let work = scale * (fixed + per_token * tokens);
        let at = |vcpus: &f64| work * ((1.0 - floor) * (-decay * vcpus).exp() + floor);
        VCPUS.iter().map(at).collect()
    });
    CpuProfile { vcpus: VCPUS.to_vec(), tokens: TOKENS.to_vec(), seconds: seconds.collect() }
}

fn layer(random: &mut SplitMix64, experts: u32, top_k: u32, expert_bytes: f64, scale: f64) -> Layer {
    let gpu = TOKENS.iter().map(|tokens| scale * 0.05 * (1.0 + 0.02 * tokens)).collect();
    Layer {
        experts,
        top_k,
        expert_bytes,
        nonexpert_bytes: expert_bytes / 2.0,
        kv_bytes_per_token: 2048.0,
        kv_windowed: None,
        nonexpert_prefill_seconds: Affine { base: 8e-4, per_token: 2e-6 },
        nonexpert_decode_seconds: 4e-4,
        expert_seconds: cpu_profile(random, scale),
        remote_expert_seconds: None,
        gpu_expert_seconds: Some(GpuProfile { tokens: TOKENS.to_vec(), seconds: gpu }),
        cpu_nonexpert_seconds: Some(cpu_profile(random, scale / 2.0)),
        cpu_context_seconds: None,
        context_seconds_per_token: 0.0,
    }
}

/// Returns the profile of the same work on machines that are `factor` times slower, measured at other points.
fn elsewhere(profile: &CpuProfile, factor: f64) -> CpuProfile {
    let slower = |row: &Vec<f64>| row[1..].iter().map(|seconds| seconds * factor).collect();
    CpuProfile {
        vcpus: profile.vcpus[1..].to_vec(),
        tokens: profile.tokens.clone(),
        seconds: profile.seconds.iter().map(slower).collect(),
    }
}

/// A small problem: `layers` layers, up to four replicas, limits from loose to infeasible. A third of
/// the seeds have the non-expert part on CPUs, another third remote functions on other machines.
pub(crate) fn small_problem(seed: u64, layers: usize) -> Problem {
    let random = &mut SplitMix64::new(seed);
    let most = if layers == 3 { 5 } else { 8 };
    let shapes: Vec<(u32, u32)> = (0..layers)
        .map(|_| {
            let experts = random.whole(2, most) as u32;
            (experts, random.whole(1, u64::from(experts.min(4))) as u32)
        })
        .collect();
    let bytes = random.between(2e7, 1.5e8).round();
    let problem_layers: Vec<Layer> = shapes
        .iter()
        .map(|(experts, top_k)| {
            let bytes = if random.one_in(3) { (bytes * random.between(0.5, 1.5)).round() } else { bytes };
            let scale = random.between(0.002, 0.02);
            layer(random, *experts, *top_k, bytes, scale)
        })
        .collect();
    let all: f64 = problem_layers.iter().map(|layer| f64::from(layer.experts) * layer.expert_bytes).sum();
    let prediction = shapes.iter().map(|(experts, _)| random.shares(*experts as usize)).collect();
    let output = if random.one_in(6) { 0.0 } else { random.whole(1, 200) as f64 };
    let input = random.whole(1, 400) as f64;
    let whole_gpus = random.one_in(4);
    // Few sizes, so that everything can be tried.
    let (main_step, remote_step) = ((all / 9.0).ceil(), (all / layers as f64 / 5.0).ceil());
    let remote_sizes = random.whole(2, 7) as f64;
    let mut problem = Problem {
        version: 1,
        device: Device::Gpu,
        request: Request {
            input_tokens: input,
            output_tokens: output,
            max_input_tokens: random.one_in(4).then_some(input * 2.0),
            max_output_tokens: random.one_in(4).then_some(output + 100.0),
            concurrency: 1,
        },
        prediction: Some(prediction),
        arrivals: None,
        starts: None,
        cpu_quotas: false,
        shared_cores: None,
        contention: None,
        remote_idle_seconds: None,
        prediction_p95: Some((0..layers).map(|_| ErrorFactor::Any(random.between(1.0, 2.0))).collect()),
        layers: problem_layers,
        token_bytes: 4096.0,
        head_bytes: random.between(1e7, 5e8).round(),
        runtime_bytes: 1.5e8,
        function_bytes: 2e7,
        transport: Transport {
            token_bytes_up: 4096.0,
            token_bytes_down: 4096.0,
            bytes_per_second: 10f64.powf(random.between(7.5, 9.5)),
            invoke_seconds: 10f64.powf(random.between(-4.0, -2.0)),
            send_seconds: if seed % 2 == 1 { 2e-4 } else { 0.0 },
            main_cpu_seconds: if seed % 4 == 1 { 3e-4 } else { 0.0 },
            function_cpu_seconds: if seed % 4 == 2 { 2e-4 } else { 0.0 },
        },
        swap_seconds: Affine { base: 2e-5, per_token: 2e-7 },
        cold_start_seconds: random.between(0.0, 2.0),
        pricing: Pricing {
            cpu_per_gb_second: 1.0,
            memory_per_gb_second: None,
            cpu_per_core_second: None,
            memory_per_vcpu_bytes: None,
            gpu_per_gb_second: (!random.one_in(5)).then_some(3.0),
            gpu_bytes_each: whole_gpus.then_some(2.4e10),
            gpu_per_second_each: whole_gpus.then(|| random.between(0.2, 5.0)),
            billing: Billing::Invocation,
            main_replicas: random.whole(1, 3) as u32,
        },
        specs: Specs::new(
            SizeRange { min_bytes: 2e8, max_bytes: 2e8 + all + 3.0 * main_step, step_bytes: main_step },
            SizeRange {
                min_bytes: 2e8,
                max_bytes: 2e8 + remote_sizes * remote_step,
                step_bytes: remote_step,
            },
        ),
        slo: Slo::new(1e6, 1e6),
        limits: Limits {
            payload_bytes: (!random.one_in(3)).then(|| 4096.0 * random.between(0.3, 1.2) * input),
            max_replicas: random.whole(1, 4) as u32,
            max_groups: None,
            gpu_bytes: None,
        },
    };
    match seed % 3 {
        1 => problem.device = Device::Cpu,
        2 => {
            for layer in &mut problem.layers {
                let factor = random.between(0.5, 1.5);
                layer.remote_expert_seconds = Some(elsewhere(&layer.expert_seconds, factor));
            }
        }
        _ => {}
    }
    let slack = [10.0, 1.0, 0.3, 0.1, 0.02, -0.02][random.whole(0, 5) as usize];
    tighten(&mut problem, slack);
    problem
}

/// Sets the limits to `slack` above the least times that any pair of remote ratio and main size has
/// in the worst case.
pub(crate) fn tighten(problem: &mut Problem, slack: f64) {
    let impossible = Slo::new(1e-9, 1e-9);
    let Err(PlanError::Infeasible(why)) = preallocate(&Problem { slo: impossible, ..problem.clone() }) else {
        return;
    };
    for remedy in why.remedy {
        let limit = match remedy.field.as_str() {
            "slo.ttft_seconds" => &mut problem.slo.ttft_seconds,
            "slo.tpot_seconds" => &mut problem.slo.tpot_seconds,
            _ => continue,
        };
        *limit = remedy.at_least * (1.0 + slack);
    }
}

/// The shape of a real model.
pub(crate) struct Shape {
    pub(crate) layers: usize,
    pub(crate) experts: u32,
    pub(crate) top_k: u32,
    /// How far above the least possible times the limits are.
    pub(crate) slack: f64,
    /// Price of the device's memory.
    pub(crate) gpu_price: f64,
    /// Bytes of one expert: with small ones vCPUs are scarce, with large ones memory.
    pub(crate) expert_bytes: f64,
    pub(crate) seed: u64,
}

/// A problem in the shape of a model, with 391 main and 41 remote sizes and up to four replicas.
pub(crate) fn model_problem(shape: Shape) -> Problem {
    let random = &mut SplitMix64::new(shape.seed);
    let (count, experts) = (shape.layers, shape.experts);
    let bytes = shape.expert_bytes;
    // All experts fit the largest main function, and all of a layer's the largest remote one.
    let largest = count as f64 * f64::from(experts) * bytes * 1.3 + 3e9;
    let main_step = (largest / 390.0 / 1e6).ceil() * 1e6;
    let remote_step = ((f64::from(experts) * bytes + 3e9) / 40.0 / 1e6).ceil() * 1e6;
    let layers = (0..count).map(|_| layer(random, experts, shape.top_k, bytes, 3e-3)).collect();
    let mut problem = Problem {
        version: 1,
        device: Device::Gpu,
        request: Request {
            input_tokens: 128.0,
            output_tokens: 200.0,
            max_input_tokens: None,
            max_output_tokens: None,
            concurrency: 1,
        },
        prediction: Some((0..count).map(|_| random.shares(experts as usize)).collect()),
        arrivals: None,
        starts: None,
        cpu_quotas: false,
        shared_cores: None,
        contention: None,
        remote_idle_seconds: None,
        prediction_p95: None,
        layers,
        token_bytes: 4096.0,
        head_bytes: 8e8,
        runtime_bytes: 2e8,
        function_bytes: 5e7,
        transport: Transport {
            token_bytes_up: 4096.0,
            token_bytes_down: 4096.0,
            bytes_per_second: 1e9,
            invoke_seconds: 5e-4,
            send_seconds: 0.0,
            main_cpu_seconds: 0.0,
            function_cpu_seconds: 0.0,
        },
        swap_seconds: Affine { base: 2e-5, per_token: 2e-7 },
        cold_start_seconds: 1.5,
        pricing: Pricing {
            cpu_per_gb_second: 1.0,
            memory_per_gb_second: None,
            cpu_per_core_second: None,
            memory_per_vcpu_bytes: None,
            gpu_per_gb_second: Some(shape.gpu_price),
            gpu_bytes_each: None,
            gpu_per_second_each: None,
            billing: Billing::Invocation,
            main_replicas: 1,
        },
        specs: Specs::new(
            SizeRange { min_bytes: 8e8, max_bytes: 8e8 + 390.0 * main_step, step_bytes: main_step },
            SizeRange { min_bytes: 2e8, max_bytes: 2e8 + 40.0 * remote_step, step_bytes: remote_step },
        ),
        slo: Slo::new(1e6, 1e6),
        limits: Limits {
            payload_bytes: Some(6_291_456.0),
            max_replicas: 4,
            max_groups: None,
            gpu_bytes: None,
        },
    };
    tighten(&mut problem, shape.slack);
    problem
}

/// Features of plans beyond the Remoe paper.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExtendedDecisions {
    pub(crate) groups: Option<u32>,
    /// vCPUs are a decision of their own.
    pub(crate) vcpus: bool,
    pub(crate) per_second: Option<f64>,
    pub(crate) idle_seconds: Option<f64>,
}

/// Copies `problem` with these features, and with reserved billing if there are groups.
pub(crate) fn beyond(problem: &Problem, beyond: ExtendedDecisions) -> Problem {
    let mut problem = problem.clone();
    problem.limits.max_groups = beyond.groups;
    if beyond.groups.is_some() {
        problem.pricing.billing = Billing::Reserved;
    }
    if beyond.vcpus {
        problem.specs.main_vcpus = Some(VcpuRange { min: 1.0, max: 64.0, step: 1.0 });
        problem.specs.remote_vcpus = Some(VcpuRange { min: 1.0, max: 32.0, step: 1.0 });
        problem.pricing.memory_per_gb_second = Some(0.1);
        problem.pricing.cpu_per_core_second = Some(0.9);
    }
    if let Some(per_second) = beyond.per_second {
        problem.request.concurrency = 8;
        problem.arrivals = Some(Arrivals {
            per_second,
            burst: 1.0,
            recorded_seconds: None,
            idle_seconds: beyond.idle_seconds,
            input_variation: 0.0,
            output_variation: 0.0,
        });
        let start = Start { process_seconds: 2.0, load_bytes_per_second: 1e9 };
        problem.starts = Some(Starts { main: start, remote: start });
    }
    problem
}

/// Features that `remoe plan` enables, in steps.
pub(crate) const BEYOND: [(&str, ExtendedDecisions); 4] = [
    (
        "memory only",
        ExtendedDecisions { groups: Some(16), vcpus: false, per_second: None, idle_seconds: None },
    ),
    ("vCPUs", ExtendedDecisions { groups: Some(16), vcpus: true, per_second: None, idle_seconds: None }),
    (
        "vCPUs, arrivals",
        ExtendedDecisions { groups: Some(16), vcpus: true, per_second: Some(1e-3), idle_seconds: None },
    ),
    (
        "vCPUs, arrivals, idle",
        ExtendedDecisions {
            groups: Some(16),
            vcpus: true,
            per_second: Some(1e-3),
            idle_seconds: Some(300.0),
        },
    ),
];

/// Most terms that may be summed for the flips of a comparison: half a second at 20 to 50 ns each.
pub(crate) const MOST_TURN_WORK: usize = 18_000_000;

/// Returns shares that evolve from `last`: drawn independently, permuted or slightly changed, depending on `index`.
pub(crate) fn next_shares(random: &mut SplitMix64, last: &[Vec<f64>], index: usize) -> Vec<Vec<f64>> {
    let alpha = 10f64.powf(random.between(-1.0, 1.0));
    let next = |random: &mut SplitMix64, shares: &Vec<f64>| match index % 3 {
        0 => random.dirichlet(shares.len(), alpha),
        1 => random.shuffled(shares),
        _ => normalised(shares.iter().map(|share| share * (0.2 * random.normal()).exp()).collect()),
    };
    last.iter().map(|shares| next(random, shares)).collect()
}

fn normalised(values: Vec<f64>) -> Vec<f64> {
    let sum: f64 = values.iter().sum();
    values.iter().map(|value| value / sum).collect()
}

impl SplitMix64 {
    /// Shares of `experts` with concentration `alpha`: the smaller, the more uneven.
    pub(crate) fn dirichlet(&mut self, experts: usize, alpha: f64) -> Vec<f64> {
        normalised((0..experts).map(|_| self.gamma(alpha).max(1e-12)).collect())
    }

    /// `values` in another order.
    pub(crate) fn shuffled(&mut self, values: &[f64]) -> Vec<f64> {
        let mut shuffled = values.to_vec();
        for last in (1..shuffled.len()).rev() {
            shuffled.swap(last, self.whole(0, last as u64) as usize);
        }
        shuffled
    }

    /// Box and Muller.
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Marsaglia and Tsang, A Simple Method for Generating Gamma Variables (2000).
    fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            return self.gamma(shape + 1.0) * (1.0 - self.unit()).powf(1.0 / shape);
        }
        let d = shape - 1.0 / 3.0;
        loop {
            let normal = self.normal();
            let v = (1.0 + normal / (9.0 * d).sqrt()).powi(3);
            if v > 0.0 && (1.0 - self.unit()).ln() < 0.5 * normal * normal + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }
}
