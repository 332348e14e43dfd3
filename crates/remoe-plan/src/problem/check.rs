//! Validation of problems: each field is finite, within bounds and consistent with the others.
//!
//! The bounds are far beyond any real deployment. They keep products of fields finite and the tables of the search within
//! memory, so that later steps need no checks.

use crate::error::FieldError;
use crate::problem::bounds::{
    CheckResult, LARGEST, MAX_TOKENS, check_above_zero, check_affine, check_between, check_count,
    check_cpu_profile, check_gpu_profile, check_not_negative, check_price,
};
use crate::problem::{
    Arrivals, CpuProfile, Device, ErrorFactor, Layer, Pricing, Problem, Request, SizeRange, Start,
};

/// Most layers of a model.
pub const MAX_LAYERS: usize = 10_000;
/// Most experts of a layer.
pub const MAX_EXPERTS: u32 = 65_536;
/// Largest product of the number of layers and the most experts of one.
const MAX_LAYERS_TIMES_EXPERTS: usize = 16_000_000;
/// Most sizes or numbers of vCPUs of a function.
const MAX_SIZES: f64 = 10_000.0;
/// Most replicas of a function.
pub const MAX_REPLICAS: u32 = 1024;
/// Most groups of remote functions.
pub const MAX_GROUPS: u32 = 256;
/// Fewest vCPUs of a function.
pub const MIN_VCPUS: f64 = 1e-3;
/// Most vCPUs of a function.
pub const MAX_VCPUS: f64 = 1e5;
/// Most requests that run at once.
pub const MAX_CONCURRENCY: u32 = 65_536;
/// Largest mean number of requests of a burst.
pub const MAX_BURST: f64 = 65_536.0;
/// Largest standard deviation of lengths over their mean.
pub const MAX_VARIATION: f64 = 10.0;
/// Most recorded requests.
pub const MAX_RECORDED: usize = 100_000;
/// Largest product of remote sizes and replicas.
const MAX_REMOTE_OPTIONS: f64 = 1_000_000.0;
/// Largest difference between 1 and the sum of a layer's shares.
const SHARE_SLACK: f64 = 1e-6;
/// Largest share of one expert.
pub const MAX_SHARE: f64 = 1.0 + SHARE_SLACK;

impl Problem {
    /// Checks all fields, except for what only some uses need: those are checked where they are used.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn check(&self) -> CheckResult {
        if self.version != 1 {
            let message = format!("is {}, expected 1", self.version);
            return Err(FieldError::new("version", message));
        }
        check_request(&self.request)?;
        self.check_layers()?;
        self.check_platform()?;
        self.check_arrivals()?;
        self.check_prediction()
    }

    fn check_arrivals(&self) -> CheckResult {
        if let Some(starts) = self.starts {
            check_start("starts.main", starts.main)?;
            check_start("starts.remote", starts.remote)?;
        }
        if let Some(idle) = self.remote_idle_seconds {
            check_not_negative("remote_idle_seconds", idle, "seconds")?;
            if self.starts.is_none() {
                let message = "is missing: groups that end after remote_idle_seconds start again; state how long that \
                               takes, or leave remote_idle_seconds out";
                return Err(FieldError::new("starts", message));
            }
        }
        let Some(arrivals) = &self.arrivals else { return Ok(()) };
        check_arrivals(arrivals)?;
        if arrivals.idle_seconds.is_some() && self.starts.is_none() {
            let message = "is missing: functions that end after arrivals.idle_seconds start again; \
                           state how long that takes, or leave idle_seconds out";
            return Err(FieldError::new("starts", message));
        }
        Ok(())
    }

    fn check_layers(&self) -> CheckResult {
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            let message = format!("lists {} layers, expected 1 to {MAX_LAYERS}", self.layers.len());
            return Err(FieldError::new("layers", message));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            check_layer(layer, self.device)
                .map_err(|error| FieldError { field: format!("layers[{index}].{}", error.field), ..error })?;
        }
        let most = self.layers.iter().map(|layer| layer.experts as usize).max().unwrap_or(0);
        if most * self.layers.len() > MAX_LAYERS_TIMES_EXPERTS {
            let message = format!(
                "are {} with up to {most} experts each, expected at most {MAX_LAYERS_TIMES_EXPERTS} in all; plan for fewer",
                self.layers.len()
            );
            return Err(FieldError::new("layers", message));
        }
        Ok(())
    }

    fn check_platform(&self) -> CheckResult {
        check_not_negative("token_bytes", self.token_bytes, "bytes")?;
        check_not_negative("head_bytes", self.head_bytes, "bytes")?;
        check_not_negative("runtime_bytes", self.runtime_bytes, "bytes")?;
        check_not_negative("function_bytes", self.function_bytes, "bytes")?;
        check_not_negative("transport.token_bytes_up", self.transport.token_bytes_up, "bytes")?;
        check_not_negative("transport.token_bytes_down", self.transport.token_bytes_down, "bytes")?;
        check_between(
            "transport.bytes_per_second",
            self.transport.bytes_per_second,
            1.0,
            LARGEST,
            "bytes per second",
        )?;
        check_not_negative("transport.invoke_seconds", self.transport.invoke_seconds, "seconds")?;
        check_not_negative("transport.send_seconds", self.transport.send_seconds, "seconds")?;
        check_not_negative("transport.main_cpu_seconds", self.transport.main_cpu_seconds, "seconds")?;
        check_not_negative("transport.function_cpu_seconds", self.transport.function_cpu_seconds, "seconds")?;
        check_affine("swap_seconds", self.swap_seconds)?;
        check_not_negative("cold_start_seconds", self.cold_start_seconds, "seconds")?;
        check_pricing(&self.pricing)?;
        check_sizes("specs.main", &self.specs.main)?;
        check_sizes("specs.remote", &self.specs.remote)?;
        self.check_vcpus()?;
        self.slo.check()?;
        if let Some(bytes) = self.limits.payload_bytes {
            check_above_zero("limits.payload_bytes", bytes, "bytes")?;
        }
        if let Some(bytes) = self.limits.gpu_bytes {
            check_above_zero("limits.gpu_bytes", bytes, "bytes")?;
        }
        if let Some(groups) = self.limits.max_groups {
            check_count("limits.max_groups", groups, MAX_GROUPS)?;
        }
        let replicas = self.limits.max_replicas;
        check_count("limits.max_replicas", replicas, MAX_REPLICAS)?;
        let options = self.specs.remote.count() * f64::from(replicas);
        if options > MAX_REMOTE_OPTIONS {
            let message = format!(
                "makes {options} options with {replicas} replicas, expected at most {MAX_REMOTE_OPTIONS}; \
                 use larger steps"
            );
            return Err(FieldError::new("specs.remote.step_bytes", message));
        }
        Ok(())
    }

    fn check_vcpus(&self) -> CheckResult {
        let specs =
            [("specs.main_vcpus", self.specs.main_vcpus), ("specs.remote_vcpus", self.specs.remote_vcpus)];
        for (name, range) in specs {
            let Some(range) = range else { continue };
            check_between(format_args!("{name}.min"), range.min, MIN_VCPUS, MAX_VCPUS, "vCPUs")?;
            check_between(format_args!("{name}.max"), range.max, MIN_VCPUS, MAX_VCPUS, "vCPUs")?;
            check_between(format_args!("{name}.step"), range.step, MIN_VCPUS, MAX_VCPUS, "vCPUs")?;
            if range.max < range.min {
                let message = format!("is {}, expected at least min {}", range.max, range.min);
                return Err(FieldError::new(format!("{name}.max"), message));
            }
            if range.count() > MAX_SIZES {
                let message =
                    format!("makes {} sizes, expected at most {MAX_SIZES}; use larger steps", range.count());
                return Err(FieldError::new(format!("{name}.step"), message));
            }
            if self.pricing.cpu_per_core_second.is_none() {
                let message = format!("is missing beside {name}; add the price of a vCPU");
                return Err(FieldError::new("pricing.cpu_per_core_second", message));
            }
        }
        if let Some(cores) = self.shared_cores {
            check_between("shared_cores", cores, 1.0, MAX_VCPUS, "cores")?;
        }
        if let Some(contention) = self.contention {
            for (name, value, least, most, unit) in contention.figures() {
                check_between(format_args!("contention.{name}"), value, least, most, unit)?;
            }
        }
        if self.cpu_quotas
            && let Some((name, _)) = specs.iter().find(|(_, range)| range.is_none())
        {
            return Err(FieldError::new(*name, "is missing beside cpu_quotas; add the range of vCPUs"));
        }
        Ok(())
    }

    fn check_prediction(&self) -> CheckResult {
        if let Some(rows) = &self.prediction {
            check_entries_per_layer("prediction", rows.len(), self.layers.len())?;
            for (index, (row, layer)) in rows.iter().zip(&self.layers).enumerate() {
                check_shares(&format!("prediction[{index}]"), row, layer.experts as usize)?;
            }
        }
        if let Some(factors) = &self.prediction_p95 {
            check_entries_per_layer("prediction_p95", factors.len(), self.layers.len())?;
            for (index, (factor, layer)) in factors.iter().zip(&self.layers).enumerate() {
                check_factor(&format!("prediction_p95[{index}]"), factor, layer.experts as usize)?;
            }
        }
        Ok(())
    }

    /// Checks that the largest remote function holds an expert of some layer; otherwise nothing could be remote.
    ///
    /// # Errors
    /// The largest remote size is too small.
    pub fn check_remote_capacity(&self) -> CheckResult {
        let largest = self.specs.remote.largest();
        let needs = self.layers.iter().map(|layer| layer.expert_bytes + self.function_bytes);
        let least = needs.fold(f64::INFINITY, f64::min);
        if least <= largest {
            return Ok(());
        }
        let message = format!(
            "allows at most {largest} bytes, but one expert with its function needs {least}; \
             raise it, or plan without remote experts"
        );
        Err(FieldError::new("specs.remote.max_bytes", message))
    }
}

/// Checks the token counts and the concurrency of requests.
pub fn check_request(request: &Request) -> CheckResult {
    check_between("request.input_tokens", request.input_tokens, 1.0, MAX_TOKENS, "tokens")?;
    check_between("request.output_tokens", request.output_tokens, 0.0, MAX_TOKENS, "tokens")?;
    for (field, typical, most) in [
        ("request.max_input_tokens", request.input_tokens, request.max_input_tokens),
        ("request.max_output_tokens", request.output_tokens, request.max_output_tokens),
    ] {
        let Some(most) = most else { continue };
        check_between(field, most, 0.0, MAX_TOKENS, "tokens")?;
        if most < typical {
            let message = format!("is {most}, expected at least the typical {typical} tokens; raise it");
            return Err(FieldError::new(field, message));
        }
    }
    check_count("request.concurrency", request.concurrency, MAX_CONCURRENCY)
}

/// Checks the arrivals.
pub fn check_arrivals(arrivals: &Arrivals) -> CheckResult {
    match arrivals.recorded_seconds {
        None => check_above_zero("arrivals.per_second", arrivals.per_second, "requests per second")?,
        Some(_) => check_not_negative("arrivals.per_second", arrivals.per_second, "requests per second")?,
    }
    check_between("arrivals.burst", arrivals.burst, 1.0, MAX_BURST, "requests")?;
    if let Some(times) = &arrivals.recorded_seconds {
        check_recorded("arrivals.recorded_seconds", times)?;
    }
    for (field, variation) in [
        ("arrivals.input_variation", arrivals.input_variation),
        ("arrivals.output_variation", arrivals.output_variation),
    ] {
        check_between(field, variation, 0.0, MAX_VARIATION, "a standard deviation over the mean")?;
    }
    arrivals.idle_seconds.map_or(Ok(()), |idle| check_not_negative("arrivals.idle_seconds", idle, "seconds"))
}

fn check_layer(layer: &Layer, device: Device) -> CheckResult {
    check_count("experts", layer.experts, MAX_EXPERTS)?;
    check_count("top_k", layer.top_k, MAX_EXPERTS)?;
    if layer.top_k > layer.experts {
        let message =
            format!("is {}, expected at most the layer's {} experts; lower it", layer.top_k, layer.experts);
        return Err(FieldError::new("top_k", message));
    }
    check_above_zero("expert_bytes", layer.expert_bytes, "bytes")?;
    check_not_negative("nonexpert_bytes", layer.nonexpert_bytes, "bytes")?;
    check_not_negative("kv_bytes_per_token", layer.kv_bytes_per_token, "bytes per token")?;
    if let Some(windowed) = layer.kv_windowed {
        check_not_negative("kv_windowed.bytes_per_token", windowed.bytes_per_token, "bytes per token")?;
        check_between("kv_windowed.most_tokens", windowed.most_tokens, 0.0, MAX_TOKENS, "tokens")?;
    }
    check_affine("nonexpert_prefill_seconds", layer.nonexpert_prefill_seconds)?;
    check_not_negative("nonexpert_decode_seconds", layer.nonexpert_decode_seconds, "seconds")?;
    check_cpu_profile("expert_seconds", &layer.expert_seconds)?;
    check_first_tokens("expert_seconds", &layer.expert_seconds)?;
    if let Some(profile) = &layer.remote_expert_seconds {
        check_cpu_profile("remote_expert_seconds", profile)?;
        check_first_tokens("remote_expert_seconds", profile)?;
    }
    if let Some(profile) = &layer.gpu_expert_seconds {
        check_gpu_profile("gpu_expert_seconds", profile)?;
    }
    if let Some(profile) = &layer.cpu_nonexpert_seconds {
        check_cpu_profile("cpu_nonexpert_seconds", profile)?;
    } else if device == Device::Cpu {
        let message = "is missing: device cpu takes the times of the non-expert part from it; add it";
        return Err(FieldError::new("cpu_nonexpert_seconds", message));
    }
    if let Some(profile) = &layer.cpu_context_seconds {
        check_cpu_profile("cpu_context_seconds", profile)?;
    }
    check_not_negative("context_seconds_per_token", layer.context_seconds_per_token, "seconds per token")
}

/// Checks the start of a function, called `name` in errors.
pub fn check_start(name: &str, start: Start) -> CheckResult {
    check_not_negative(format_args!("{name}.process_seconds"), start.process_seconds, "seconds")?;
    check_between(
        format_args!("{name}.load_bytes_per_second"),
        start.load_bytes_per_second,
        1.0,
        LARGEST,
        "bytes per second",
    )
}

fn check_recorded(field: &str, times: &[f64]) -> CheckResult {
    if times.len() < 2 || times.len() > MAX_RECORDED {
        let message = format!("has {} times, expected 2 to {MAX_RECORDED}", times.len());
        return Err(FieldError::new(field, message));
    }
    let mut before = 0.0;
    for (index, time) in times.iter().enumerate() {
        check_not_negative(format_args!("{field}[{index}]"), *time, "seconds")?;
        if *time < before {
            let message = format!("is {time} after {before}; list them ascending");
            return Err(FieldError::new(format!("{field}[{index}]"), message));
        }
        before = *time;
    }
    if times.first() == times.last() {
        let message = format!("has only the time {before}, expected at least 2 different times");
        return Err(FieldError::new(field, message));
    }
    Ok(())
}

fn check_first_tokens(name: &str, profile: &CpuProfile) -> CheckResult {
    match profile.tokens.first() {
        Some(first) if *first != 1.0 => {
            let message = format!("is {first}, expected 1: decoding is one token; measure it");
            Err(FieldError::new(format!("{name}.tokens[0]"), message))
        }
        _ => Ok(()),
    }
}

fn check_pricing(pricing: &Pricing) -> CheckResult {
    match pricing.cpu_per_core_second {
        None => check_price("pricing.cpu_per_gb_second", pricing.cpu_per_gb_second, "dollars per GB-second")?,
        Some(value) => {
            // It is unused here, and a negative price is an error nevertheless.
            check_not_negative(
                "pricing.cpu_per_gb_second",
                pricing.cpu_per_gb_second,
                "dollars per GB-second",
            )?;
            check_price("pricing.cpu_per_core_second", value, "dollars per vCPU-second")?;
            if pricing.memory_per_gb_second.is_none() {
                let message = "is missing beside cpu_per_core_second; add the price of memory";
                return Err(FieldError::new("pricing.memory_per_gb_second", message));
            }
        }
    }
    if let Some(bytes) = pricing.memory_per_vcpu_bytes {
        check_between("pricing.memory_per_vcpu_bytes", bytes, 1.0, LARGEST, "bytes")?;
    }
    if let Some(value) = pricing.memory_per_gb_second {
        check_price("pricing.memory_per_gb_second", value, "dollars per GB-second")?;
    }
    if let Some(value) = pricing.gpu_per_gb_second {
        check_price("pricing.gpu_per_gb_second", value, "dollars per GB-second")?;
    }
    match (pricing.gpu_bytes_each, pricing.gpu_per_second_each) {
        (None, None) => {}
        (Some(bytes), Some(value)) => {
            check_between("pricing.gpu_bytes_each", bytes, 1.0, LARGEST, "bytes")?;
            check_price("pricing.gpu_per_second_each", value, "dollars per GPU-second")?;
        }
        (Some(_), None) => {
            let message = "is missing beside gpu_bytes_each; add the price of one GPU";
            return Err(FieldError::new("pricing.gpu_per_second_each", message));
        }
        (None, Some(_)) => {
            let message = "is missing beside gpu_per_second_each; add the bytes of one GPU";
            return Err(FieldError::new("pricing.gpu_bytes_each", message));
        }
    }
    check_count("pricing.main_replicas", pricing.main_replicas, MAX_EXPERTS)
}

fn check_sizes(name: &str, sizes: &SizeRange) -> CheckResult {
    check_between(format_args!("{name}.min_bytes"), sizes.min_bytes, 1.0, LARGEST, "bytes")?;
    check_between(format_args!("{name}.max_bytes"), sizes.max_bytes, 1.0, LARGEST, "bytes")?;
    check_between(format_args!("{name}.step_bytes"), sizes.step_bytes, 1.0, LARGEST, "bytes")?;
    if sizes.max_bytes < sizes.min_bytes {
        let message = format!("is {}, expected at least min_bytes {}", sizes.max_bytes, sizes.min_bytes);
        return Err(FieldError::new(format!("{name}.max_bytes"), message));
    }
    if sizes.count() > MAX_SIZES {
        let message =
            format!("makes {} sizes, expected at most {MAX_SIZES}; use larger steps", sizes.count());
        return Err(FieldError::new(format!("{name}.step_bytes"), message));
    }
    Ok(())
}

fn check_shares(field: &str, shares: &[f64], experts: usize) -> CheckResult {
    if shares.len() != experts {
        let message = format!("has {} shares, expected {experts}: one per expert", shares.len());
        return Err(FieldError::new(field, message));
    }
    for (expert, share) in shares.iter().enumerate() {
        check_between(format_args!("{field}[{expert}]"), *share, 0.0, MAX_SHARE, "a share")?;
    }
    let sum: f64 = shares.iter().sum();
    if (sum - 1.0).abs() > SHARE_SLACK {
        let message = format!("sums to {sum}, expected 1 within {SHARE_SLACK}; normalise it");
        return Err(FieldError::new(field, message));
    }
    Ok(())
}

fn check_factor(field: &str, factor: &ErrorFactor, experts: usize) -> CheckResult {
    match factor {
        ErrorFactor::Any(factor) => check_not_negative(field, *factor, "a factor"),
        ErrorFactor::ByCount(factors) if factors.len() != experts + 1 => {
            let (have, want) = (factors.len(), experts + 1);
            let message = format!("has {have} factors, expected {want}: for 0 to {experts} remote experts");
            Err(FieldError::new(field, message))
        }
        ErrorFactor::ByCount(factors) => factors.iter().enumerate().try_for_each(|(count, factor)| {
            check_not_negative(format_args!("{field}[{count}]"), *factor, "a factor")
        }),
    }
}

fn check_entries_per_layer(field: &str, rows: usize, layers: usize) -> CheckResult {
    if rows == layers {
        return Ok(());
    }
    Err(FieldError::new(field, format!("has {rows} entries, expected {layers}: one per layer")))
}
