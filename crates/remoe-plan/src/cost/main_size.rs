//! Size of the main function under a plan: container, KV cache, threads.

use crate::model::Model;
use crate::problem::{CpuProfile, Device, Layer, Problem};

/// Positions in a page of the KV cache. The last page of each running request is not full.
pub const PAGE_POSITIONS: u32 = 32;

/// The main function's size under a plan, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MainSize {
    /// Memory of the plan, which determines its price, and its vCPUs if they come with memory.
    pub main_bytes: f64,
    /// vCPUs of the function.
    pub vcpus: f64,
    /// Bytes that its container needs. On CPUs these include the non-expert part and the KV cache.
    pub memory_bytes: f64,
    /// KV cache of all concurrent requests, in whole pages ([`PAGE_POSITIONS`]).
    pub kv_cache_bytes: f64,
    /// Tokens in that KV cache.
    pub kv_cache_tokens: f64,
    /// Requests that run at once.
    pub concurrency: u32,
    /// Threads: the fastest measured number of whole vCPUs, up to those it has.
    pub threads: usize,
}

impl MainSize {
    /// Computes the size of a main function of `main_bytes` for `problem`.
    ///
    /// `vcpus`: if absent, those that come with the memory, or the most allowed if vCPUs are a decision variable.
    #[must_use]
    pub fn of(problem: &Problem, main_bytes: f64, vcpus: Option<f64>) -> Self {
        let model = Model::new(problem);
        let vcpus = vcpus.unwrap_or_else(|| model.main_vcpus(main_bytes));
        let unfilled_bytes = f64::from((PAGE_POSITIONS - 1) * problem.request.concurrency.max(1))
            * problem.kv_bytes_per_token();
        let nonexpert_bytes =
            if problem.device == Device::Cpu { model.gpu_bytes + unfilled_bytes } else { 0.0 };
        Self {
            main_bytes,
            vcpus,
            memory_bytes: main_bytes + nonexpert_bytes,
            kv_cache_bytes: (problem.kv_bytes_in_memory() + unfilled_bytes).ceil(),
            kv_cache_tokens: model.memory_tokens,
            concurrency: problem.request.concurrency,
            threads: useful_vcpus(problem, vcpus),
        }
    }
}

/// Returns the measured number of whole vCPUs, up to `most`, with the fastest decode step of all concurrent requests.
///
/// More vCPUs can be slower if there is little work. If no whole number was measured, returns `most`, at least 1.
#[must_use]
pub fn useful_vcpus(problem: &Problem, most: f64) -> usize {
    let most = most.floor().max(1.0);
    let Some(layer) = problem.layers.first() else { return 1 };
    let rest = layer.cpu_nonexpert_seconds.as_ref().filter(|_| problem.device == Device::Cpu);
    let measured = rest.unwrap_or(&layer.expert_seconds).vcpus.iter().copied();
    let whole = measured.filter(|vcpus| vcpus.fract() == 0.0 && *vcpus <= most);
    let context = layer.cpu_context_seconds.as_ref().filter(|_| rest.is_some());
    let (rows, tokens) = (f64::from(problem.request.concurrency.max(1)), problem.request.mean_context());
    let step = |vcpus: f64| {
        let rest = rest.map_or(0.0, |profile| between(profile, rows, vcpus));
        // Linear in the tokens of the context.
        let of_context = |profile: &CpuProfile| {
            let most = profile.tokens.last().copied().unwrap_or(tokens);
            between(profile, most, vcpus) * tokens / most
        };
        rest + rows * context.map_or(0.0, of_context) + experts_step(layer, rows, vcpus)
    };
    let best = whole.min_by(|a, b| step(*a).total_cmp(&step(*b)));
    best.unwrap_or(most) as usize
}

/// Returns the seconds of the experts of one decode step of `rows` tokens with uniform routing, if all are local.
fn experts_step(layer: &Layer, rows: f64, vcpus: f64) -> f64 {
    let (experts, per_token) = (f64::from(layer.experts), f64::from(layer.top_k));
    // Expected number of experts that any token uses.
    let used = (experts * (1.0 - (1.0 - per_token / experts).powf(rows))).max(per_token);
    used * between(&layer.expert_seconds, rows * per_token / used, vcpus)
}

/// Interpolates measured seconds without making them isotonic, which would hide that more vCPUs can be slower.
fn between(profile: &CpuProfile, tokens: f64, vcpus: f64) -> f64 {
    let (column, right) = grid_position(&profile.vcpus, vcpus);
    let at = |row: usize| {
        let (low, high) =
            (profile.seconds[row][column], profile.seconds[row][(column + 1).min(profile.vcpus.len() - 1)]);
        low + (high - low) * right
    };
    let (row, above) = grid_position(&profile.tokens, tokens);
    let (low, high) = (at(row), at((row + 1).min(profile.tokens.len() - 1)));
    low + (high - low) * above
}

/// Returns the index of the last of the ascending `points` up to `value`, and the fraction of the way to the next point.
///
/// Outside of the points, returns the first or the last one.
fn grid_position(points: &[f64], value: f64) -> (usize, f64) {
    let low = points.partition_point(|point| *point <= value).max(1) - 1;
    match points.get(low + 1) {
        Some(next) if value > points[low] => (low, (value - points[low]) / (next - points[low])),
        _ => (low, 0.0),
    }
}
