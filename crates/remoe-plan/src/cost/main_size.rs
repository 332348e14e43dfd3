//! How large a main function is that serves as planned: container, keys and values, threads.

use crate::model::Model;
use crate::problem::{CpuProfile, Device, Layer, Problem};

/// Positions that a page of keys and values holds. Each request that runs has a last page that is not full.
pub const PAGE_POSITIONS: u32 = 32;

/// The main function's size under a plan, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MainSize {
    /// The plan's: what its price goes by, and its vCPUs where they come with memory.
    pub main_bytes: f64,
    /// vCPUs of the function.
    pub vcpus: f64,
    /// Bytes that its container needs: on CPUs the non-expert part, keys and values live there too.
    pub memory_bytes: f64,
    /// Keys and values of all requests that run at once, in whole pages ([`PAGE_POSITIONS`]).
    pub kv_cache_bytes: f64,
    /// Tokens that those are of.
    pub kv_cache_tokens: f64,
    /// Requests that run at once.
    pub concurrency: u32,
    /// Threads: as many of its whole vCPUs as the profile found to help.
    pub threads: usize,
}

impl MainSize {
    /// The size of a main function of `main_bytes` for `problem`, with `vcpus` where they are a decision of
    /// their own; where they are and were not decided, as many as there may be.
    #[must_use]
    pub fn of(problem: &Problem, main_bytes: f64, vcpus: Option<f64>) -> Self {
        let model = Model::new(problem);
        let vcpus = vcpus.unwrap_or_else(|| model.main_vcpus(main_bytes));
        let unfilled = f64::from((PAGE_POSITIONS - 1) * problem.request.concurrency.max(1))
            * problem.kv_bytes_per_token();
        let beside = if problem.device == Device::Cpu { model.gpu_bytes + unfilled } else { 0.0 };
        Self {
            main_bytes,
            vcpus,
            memory_bytes: main_bytes + beside,
            kv_cache_bytes: (problem.kv_bytes_in_memory() + unfilled).ceil(),
            kv_cache_tokens: model.memory_tokens,
            concurrency: problem.request.concurrency,
            threads: useful_vcpus(problem, vcpus),
        }
    }
}

/// Picks among the measured numbers of whole vCPUs up to `most` the quickest in a decode step of all requests that
/// run at once: more of them can take longer where there is little to do. `most`, at least 1, where no
/// whole number was measured.
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
        // Linear from nothing on.
        let of_context = |profile: &CpuProfile| {
            let most = profile.tokens.last().copied().unwrap_or(tokens);
            between(profile, most, vcpus) * tokens / most
        };
        rest + rows * context.map_or(0.0, of_context) + experts_step(layer, rows, vcpus)
    };
    let best = whole.min_by(|a, b| step(*a).total_cmp(&step(*b)));
    best.unwrap_or(most) as usize
}

/// Seconds of the experts of one decode step of `rows` tokens that are routed evenly, all of them local.
fn experts_step(layer: &Layer, rows: f64, vcpus: f64) -> f64 {
    let (experts, per_token) = (f64::from(layer.experts), f64::from(layer.top_k));
    // An expert is left out when no token takes it.
    let used = (experts * (1.0 - (1.0 - per_token / experts).powf(rows))).max(per_token);
    used * between(&layer.expert_seconds, rows * per_token / used, vcpus)
}

/// The measured seconds between the points of a grid, as they are: a curve that never rises with the vCPUs
/// would hide which of them help.
fn between(profile: &CpuProfile, tokens: f64, vcpus: f64) -> f64 {
    let (column, beside) = place(&profile.vcpus, vcpus);
    let at = |row: usize| {
        let (low, high) =
            (profile.seconds[row][column], profile.seconds[row][(column + 1).min(profile.vcpus.len() - 1)]);
        low + (high - low) * beside
    };
    let (row, above) = place(&profile.tokens, tokens);
    let (low, high) = (at(row), at((row + 1).min(profile.tokens.len() - 1)));
    low + (high - low) * above
}

/// The last of the ascending `points` that `value` reaches, and how far it is on the way to the next one;
/// the first or last point outside of them.
fn place(points: &[f64], value: f64) -> (usize, f64) {
    let low = points.partition_point(|point| *point <= value).max(1) - 1;
    match points.get(low + 1) {
        Some(next) if value > points[low] => (low, (value - points[low]) / (next - points[low])),
        _ => (low, 0.0),
    }
}
