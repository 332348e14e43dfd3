//! Measures the main function in use: its time without experts, and the time of experts beside the rest, over prompts
//! and vCPUs.

use crate::ProfiledModel;
use crate::error::ProfileError;
use crate::line_fit::{Points, lines};
use crate::measured_main::{
    Column, MEAN_BATCH_CONTEXT, ProfiledMain, RemoteCall, StepSeconds, cache_bytes, fill_batched,
};
use remoe_hardware::{DeviceTimes, Start};
use remoe_planner::{Affine, CpuProfile};
use remoe_process::Role;
use std::collections::BTreeMap;

const ZERO: Affine = Affine { base: 0.0, per_token: 0.0 };

/// Measured figures of the main function.
pub(crate) struct MainFigures {
    pub(crate) expert_seconds: CpuProfile,
    pub(crate) nonexpert_seconds: CpuProfile,
    pub(crate) context_seconds: CpuProfile,
    pub(crate) device: Option<DeviceTimes>,
    pub(crate) start: Start,
    pub(crate) main_bytes: f64,
    pub(crate) call: RemoteCall,
}

/// Times of a main function with one number of threads.
struct ThreadFigures {
    columns: Vec<Column>,
    loads: Option<Vec<BTreeMap<u32, u32>>>,
    /// Only measured with all threads.
    call: Option<RemoteCall>,
    main_bytes: f64,
    start: Start,
}

/// Setup of the measurement of the main function.
pub(crate) struct MainSetup<'a> {
    pub(crate) subject: &'a ProfiledModel<'a>,
    /// Device of the non-expert part: `cpu` or another one.
    pub(crate) device: &'a str,
    /// Seconds of one expert alone on all cores, over the grid's tokens.
    pub(crate) alone: Vec<f64>,
}

impl MainSetup<'_> {
    /// Measures everything on CPUs, then the non-expert part on the device, if there is one.
    pub(crate) fn measure(&self, step: &dyn Fn(String)) -> Result<MainFigures, ProfileError> {
        let mut columns: Vec<Column> = Vec::new();
        let mut last = None;
        let mut main_bytes = 0.0;
        let mut loads = None;
        let mut call = RemoteCall { send: 0.0, wait: 0.0 };
        let below_one = self.subject.below_one(Role::Main);
        for (threads, vcpus) in self.subject.grid.by_threads(below_one) {
            let known = loads.is_some();
            let figures =
                self.subject.gate().retry_if_disturbed(|| self.with_threads(threads, &vcpus, known, step))?;
            loads = loads.or(figures.loads);
            columns.extend(figures.columns);
            call = figures.call.unwrap_or(call);
            main_bytes = f64::max(main_bytes, figures.main_bytes);
            last = Some(figures.start);
        }
        let (Some(loads), Some(start)) = (loads, last) else {
            return Err(ProfileError::NoVcpus { function: "main function" });
        };
        fill_batched(&mut columns);
        let tokens = self.expert_tokens(&loads);
        let expert_columns: Vec<Vec<f64>> =
            columns.iter().map(|column| self.experts(column, &loads, &tokens)).collect();
        let device = match self.device {
            "cpu" => None,
            device => Some(self.subject.gate().retry_if_disturbed(|| self.on_device(device, step))?),
        };
        let rest = |parts: &[StepSeconds]| parts.iter().map(|parts| parts.rest).collect::<Vec<f64>>();
        let rests: Vec<(Vec<f64>, Vec<f64>)> =
            columns.iter().map(|column| (rest(&column.batched), rest(&column.prompts))).collect();
        let steps = lines(&columns.into_iter().map(|column| column.steps).collect::<Vec<_>>());
        let rest_columns: Vec<Vec<f64>> = steps
            .iter()
            .zip(rests)
            .map(|(step, (batched, prompts))| {
                let context = |rows: usize| rows as f64 * step.per_token * MEAN_BATCH_CONTEXT;
                let batched = batched.iter().zip(&self.subject.grid.rows);
                let batched = batched.map(|(seconds, rows)| (seconds - context(*rows)).max(step.base));
                std::iter::once(step.base).chain(batched).chain(prompts).collect()
            })
            .collect();
        let longest = self.subject.grid.long_prompt as f64;
        let context_columns: Vec<Vec<f64>> =
            steps.iter().map(|step| vec![step.per_token * longest]).collect();
        let points = std::iter::once(1.0).chain(self.counts().map(|tokens| tokens as f64));
        Ok(MainFigures {
            expert_seconds: self.subject.grid.table(tokens, &expert_columns, below_one),
            nonexpert_seconds: self.subject.grid.table(points.collect(), &rest_columns, below_one),
            context_seconds: self.subject.grid.table(vec![longest], &context_columns, below_one),
            device,
            start,
            main_bytes: main_bytes.max(0.0),
            call,
        })
    }

    /// Measures a main function with this number of threads and each of `vcpus`. Unless `known` is set, also counts
    /// how many experts receive how many tokens.
    fn with_threads(
        &self,
        threads: usize,
        vcpus: &[f64],
        known: bool,
        step: &dyn Fn(String),
    ) -> Result<ThreadFigures, ProfileError> {
        let main = ProfiledMain::start(self.subject, threads, "cpu", step)?;
        let loads = if known { None } else { Some(self.loads(&main)?) };
        let mut columns = Vec::new();
        for &vcpus in vcpus {
            main.function.limit(vcpus)?;
            step(format!("main function: vCPUs {vcpus}, threads {threads}"));
            columns.push(main.column(vcpus, &self.subject.grid.rows)?);
        }
        main.function.limit(f64::from(self.subject.grid.cores))?;
        let call = (threads == self.subject.grid.threads()).then(|| {
            step("remote calls of the main function".to_owned());
            main.remote_call()
        });
        let call = call.transpose()?;
        let counted = self.subject.weight_bytes() + cache_bytes(self.subject) as f64;
        let main_bytes = main.function.peak_bytes().unwrap_or(0.0) - counted;
        Ok(ThreadFigures { columns, loads, call, main_bytes, start: main.start_times() })
    }

    /// Returns the token counts that are measured besides a single decode step: batch sizes, then prompts.
    fn counts(&self) -> impl Iterator<Item = usize> {
        self.subject.grid.rows.iter().chain(&self.subject.grid.prompts).copied()
    }

    /// Returns how many experts receive how many tokens at each of [`Self::counts`], summed over layers. A batch of
    /// decoding requests spreads like a prompt of as many tokens.
    fn loads(&self, main: &ProfiledMain<'_>) -> Result<Vec<BTreeMap<u32, u32>>, ProfileError> {
        self.counts().map(|tokens| main.loads(tokens)).collect()
    }

    /// Returns the tokens per expert: those of the grid, and the mean loads of the batch sizes.
    fn expert_tokens(&self, loads: &[BTreeMap<u32, u32>]) -> Vec<f64> {
        let several = loads.iter().take(self.subject.grid.rows.len());
        // Two digits exceed the precision.
        let means =
            several.map(|loads| (100.0 * mean_load(loads)).round() / 100.0).filter(|mean| *mean > 1.0);
        let mut tokens: Vec<f64> = self.subject.grid.tokens.iter().copied().chain(means).collect();
        tokens.sort_by(f64::total_cmp);
        tokens.dedup();
        tokens
    }

    /// Returns the seconds of one expert in use over `tokens`: its time alone, times the slowdown of experts in use.
    /// The slowdown is measured at one token and at the mean loads of batches and prompts, and interpolated.
    fn experts(&self, column: &Column, loads: &[BTreeMap<u32, u32>], tokens: &[f64]) -> Vec<f64> {
        let per_step = (self.subject.inspection.moe_layers.len() * self.subject.inspection.top_k) as f64;
        let mut factors = vec![(1.0, column.experts / (per_step * self.seconds_alone(1.0)))];
        for (parts, loads) in column.batched.iter().chain(&column.prompts).zip(loads) {
            let alone: f64 = loads
                .iter()
                .map(|(tokens, experts)| f64::from(*experts) * self.seconds_alone(f64::from(*tokens)))
                .sum();
            let mean = mean_load(loads);
            if alone > 0.0 && mean > factors.last().map_or(0.0, |(tokens, _)| *tokens) {
                factors.push((mean, parts.experts / alone));
            }
        }
        tokens.iter().map(|&tokens| self.seconds_alone(tokens) * interpolate(&factors, tokens)).collect()
    }

    fn seconds_alone(&self, tokens: f64) -> f64 {
        let points: Vec<(f64, f64)> =
            self.subject.grid.tokens.iter().copied().zip(self.alone.iter().copied()).collect();
        interpolate(&points, tokens)
    }

    fn on_device(&self, device: &str, step: &dyn Fn(String)) -> Result<DeviceTimes, ProfileError> {
        let main = ProfiledMain::start(self.subject, self.subject.grid.threads(), device, step)?;
        step(format!("main function on {device}"));
        let column = main.column(f64::from(self.subject.grid.cores), &[])?;
        let prompts = self.subject.grid.prompts.iter().zip(&column.prompts);
        let prompts = prompts.map(|(tokens, parts)| (*tokens as f64, parts.rest)).collect();
        let vcpus = column.steps.vcpus;
        let line = |points: Points| lines(&[points]).first().copied();
        let decode = line(column.steps).unwrap_or(ZERO);
        Ok(DeviceTimes {
            prefill_seconds: line(Points { vcpus, points: prompts }).unwrap_or(ZERO),
            decode_seconds: decode.base,
            context_seconds_per_token: decode.per_token,
            // Transfers to the host and back are part of the measured times.
            swap_seconds: ZERO,
            assumed: false,
        })
    }
}

/// Returns the mean tokens per expert over experts with any; `loads` maps tokens to numbers of experts. NaN if there
/// are none.
fn mean_load(loads: &BTreeMap<u32, u32>) -> f64 {
    let rows: f64 = loads.iter().map(|(tokens, experts)| f64::from(*tokens) * f64::from(*experts)).sum();
    rows / loads.values().copied().map(f64::from).sum::<f64>()
}

/// Interpolates linearly at `x` between points ascending in x; outside, returns the nearest value.
fn interpolate(points: &[(f64, f64)], x: f64) -> f64 {
    let above = points.partition_point(|(known, _)| *known <= x);
    match (above.checked_sub(1).and_then(|below| points.get(below)), points.get(above)) {
        (Some((from, low)), Some((to, high))) => low + (high - low) * (x - from) / (to - from),
        (Some((_, only)), None) | (None, Some((_, only))) => *only,
        (None, None) => 0.0,
    }
}
