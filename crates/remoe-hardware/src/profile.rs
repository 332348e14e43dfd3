//! Profiles: measured times and memory of a model on a machine, with their checks.

use crate::error::{ProblemError, ProfileError, unreadable};
use remoe_model::{DenseDtype, ExpertsDtype, Inspection};
use remoe_planner::{Affine, Contention, CpuProfile, FieldError, Fit, GpuProfile, Starts};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

/// Version of the file format.
pub(crate) const VERSION: u32 = 1;
/// Version of the measurements. It is raised by each change of kernels, numerics class, transport or measurements after
/// which older profiles should not be used for plans.
pub const MEASUREMENTS: u32 = 3;
/// Number of tokens up to which a row of `nonexpert_seconds` is a decode step of as many requests; above, it is a prefill.
pub const STEP_ROWS: usize = 8;
/// Most rows or columns of a table.
const MAX_POINTS: usize = 1024;
/// Valid token counts and vCPUs of a table, as in a planning problem.
const POINTS: RangeInclusive<f64> = 1e-15..=1e12;
/// Upper bound of times in seconds, and of sizes and rates in bytes.
const LARGEST: f64 = 1e15;

/// Times and memory of one machine for one model in one dtype. Units: seconds and bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Version of this form: 1.
    #[schemars(range(min = VERSION, max = VERSION))]
    pub version: u32,
    /// Origin of the figures.
    pub origin: Origin,
    /// Date and version of the measurements.
    pub made: Made,
    /// Machine that was measured.
    pub machine: Machine,
    /// Model that was measured.
    pub model: ModelId,
    /// Kernels that computed experts.
    pub kernels: Kernels,
    /// Seconds of one routed expert in a main function that computes without a pause; tokens start at 1.
    pub expert_seconds: CpuProfile,
    /// Seconds of one routed expert in a remote function, which rests between calls: a CPU quota is saved up then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_expert_seconds: Option<CpuProfile>,
    /// Seconds of everything but routed experts, all layers, embedding and head, on CPUs; tokens start at 1. Up to 8
    /// tokens are those of a decode step of as many requests, more are a prompt's.
    pub nonexpert_seconds: CpuProfile,
    /// Seconds that attention to the context adds to a decode step for each request in it, all layers, on CPUs, over tokens
    /// of context. Those of `nonexpert_seconds` for one token are without context then; where absent, of whatever context
    /// they were measured with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_seconds: Option<CpuProfile>,
    /// Seconds of everything but routed experts on a device, where the main function has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceTimes>,
    /// Seconds of one routed expert on the device, from one token on. Experts are computed on CPUs, so that nothing measures
    /// it; it may be stated by hand. Where it is absent and there is a device, the prior's figure stands for it, in
    /// baselines only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_expert_seconds: Option<GpuProfile>,
    /// Calls between main and remote functions.
    pub transport: Transport,
    /// Slowdown of remote functions on this machine; absent where it was not measured, as on one core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention: Option<Contention>,
    /// Seconds and rates of starts, from nothing to ready.
    pub starts: Starts,
    /// Resident bytes besides weights.
    pub memory: Memory,
    /// Share of this machine's CPU time that other programs took during the measurements, where that was enough to
    /// distort them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub disturbed: Option<f64>,
    /// One expert for one token over the memory of a remote function in GB: the form of the Remoe
    /// paper, section V-B. Absent where no decay fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<Fit>,
}

/// Where the figures come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Measured.
    Measured,
    /// Assumed, on the slow side: see [`Profile::prior`].
    Prior,
}

/// When and with what a profile was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Made {
    /// Date and time, RFC 3339 in UTC.
    pub date: String,
    /// Version of the programs.
    pub version: String,
}

/// The machine of a profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Model name of its processor.
    pub cpu: String,
    /// CPUs that the functions could use.
    #[schemars(range(min = 0, max = u32::MAX))]
    pub cores: u32,
    /// Main memory in bytes.
    #[schemars(range(min = 0, max = u64::MAX))]
    pub memory_bytes: u64,
    /// Device of the main function: `cpu`, or `cuda` with its index.
    pub device: String,
    /// Model name of its GPU; absent where the main function has none, or where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Limit that stood for fewer vCPUs.
    pub vcpus_by: CpuLimit,
}

/// Mechanism that limits a function to its vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CpuLimit {
    /// A quota of a control group.
    Quota,
    /// The number of threads: where control groups are not permitted. Fractions are rounded up.
    Threads,
    /// Nothing: the figures are assumed.
    Assumed,
}

/// The model of a profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelId {
    /// Fingerprint of the checkpoint.
    pub fingerprint: String,
    /// Compute dtype: `bfloat16` or `float32`.
    pub dtype: String,
    /// Quantisation of routed experts; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("enum" = ["int8", "int4", "mxfp4", "fp8", null]))]
    pub experts_dtype: Option<ExpertsDtype>,
    /// Quantisation of weights outside of routed experts: int8 or int4; absent where there is none.
    #[serde(
        default,
        alias = "dense_int8",
        deserialize_with = "DenseDtype::deserialize_quantised",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<String>", extend("enum" = ["int8", "int4", null]))]
    pub dense_dtype: Option<DenseDtype>,
}

impl ModelId {
    /// Identifies `model` in `dtype`.
    #[must_use]
    pub fn of(model: &Inspection, dtype: &str) -> Self {
        Self {
            fingerprint: model.fingerprint.clone(),
            dtype: dtype.to_owned(),
            experts_dtype: model.experts_dtype,
            dense_dtype: model.dense_dtype,
        }
    }

    /// Returns the names of the dtypes, joined for use in file names.
    #[must_use]
    pub fn precision(&self) -> String {
        let experts = self.experts_dtype.map_or_else(String::new, |experts| format!("-{}", experts.name()));
        let dense = self.dense_dtype.map_or_else(String::new, |dense| format!("-dense-{}", dense.name()));
        format!("{}{experts}{dense}", self.dtype)
    }
}

/// How experts are computed on the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Kernels {
    /// The accumulation order; functions of different classes are never mixed.
    pub numerics_class: String,
    /// The instruction path in use.
    pub instruction_path: String,
}

/// Everything but routed experts on a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceTimes {
    /// Seconds of a prefill, over tokens.
    pub prefill_seconds: Affine,
    /// Seconds of one decode step.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub decode_seconds: f64,
    /// Seconds that every token of context adds to a decode step for each request in it.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub context_seconds_per_token: f64,
    /// Seconds of hidden states of one layer to the host, or back, over tokens.
    pub swap_seconds: Affine,
    /// Set where these are the prior's figures: no device was free when the rest was measured.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub assumed: bool,
}

/// The way between main and remote functions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Transport {
    /// Way that was measured: `loopback`, or an address.
    pub over: String,
    /// Bytes per second on the way.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub bytes_per_second: f64,
    /// Seconds of one invocation besides transfer and computation.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub invoke_seconds: f64,
    /// Seconds of the main function to send one layer's calls, before its own experts.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub send_seconds: f64,
    /// CPU seconds of the main function per call: sending it, and taking its answer.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub main_cpu_seconds: f64,
    /// CPU seconds of the remote function per call besides experts.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub function_cpu_seconds: f64,
}

impl Transport {
    /// Returns the transport of a planning problem whose rows have `token_bytes` in both directions.
    #[must_use]
    pub fn of_rows(&self, token_bytes: f64) -> remoe_planner::Transport {
        remoe_planner::Transport {
            token_bytes_up: token_bytes,
            token_bytes_down: token_bytes,
            bytes_per_second: self.bytes_per_second,
            invoke_seconds: self.invoke_seconds,
            send_seconds: self.send_seconds,
            main_cpu_seconds: self.main_cpu_seconds,
            function_cpu_seconds: self.function_cpu_seconds,
        }
    }
}

/// Resident bytes of functions besides weights, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Resident bytes of the main function, without its cache for fallback experts.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub main_bytes: f64,
    /// Resident bytes of a remote-expert function without experts. Plans give it no less than it asks for.
    #[schemars(range(min = 0.0, max = LARGEST))]
    pub function_bytes: f64,
}

impl Profile {
    /// Reads and checks a profile.
    ///
    /// # Errors
    /// The first field that is missing, unknown, stated twice, of the wrong type or out of range.
    pub fn from_json(text: &str) -> Result<Self, ProfileError> {
        let mut parser = serde_json::Deserializer::from_str(text);
        let profile: Self = serde_path_to_error::deserialize(&mut parser).map_err(unreadable)?;
        parser.end().map_err(|error| FieldError::unreadable("", &error.to_string()))?;
        profile.check()?;
        Ok(profile)
    }

    /// Checks all fields, as [`Self::from_json`] does.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn check(&self) -> Result<(), ProfileError> {
        if self.version != VERSION {
            let message = format!("is {}, expected {VERSION}; measure again", self.version);
            return Err(invalid_field("version", message));
        }
        from_one_token("expert_seconds", &self.expert_seconds)?;
        if let Some(profile) = &self.remote_expert_seconds {
            from_one_token("remote_expert_seconds", profile)?;
        }
        from_one_token("nonexpert_seconds", &self.nonexpert_seconds)?;
        if let Some(profile) = &self.context_seconds {
            table("context_seconds", profile)?;
        }
        if let Some(device) = &self.device {
            for (name, value) in [
                ("device.prefill_seconds.base", device.prefill_seconds.base),
                ("device.prefill_seconds.per_token", device.prefill_seconds.per_token),
                ("device.decode_seconds", device.decode_seconds),
                ("device.context_seconds_per_token", device.context_seconds_per_token),
                ("device.swap_seconds.base", device.swap_seconds.base),
                ("device.swap_seconds.per_token", device.swap_seconds.per_token),
            ] {
                seconds(name, value)?;
            }
        }
        if let Some(GpuProfile { tokens, seconds }) = &self.gpu_expert_seconds {
            let rows = seconds.iter().map(|value| vec![*value]).collect();
            let as_table = CpuProfile { vcpus: vec![1.0], tokens: tokens.clone(), seconds: rows };
            from_one_token("gpu_expert_seconds", &as_table)?;
        }
        if let Some(share) = self.disturbed.filter(|share| !(0.0..=1.0).contains(share)) {
            let message = format!("is {share}, expected a share from 0 to 1; measure again");
            return Err(invalid_field("disturbed", message));
        }
        seconds("transport.invoke_seconds", self.transport.invoke_seconds)?;
        seconds("transport.send_seconds", self.transport.send_seconds)?;
        seconds("transport.main_cpu_seconds", self.transport.main_cpu_seconds)?;
        seconds("transport.function_cpu_seconds", self.transport.function_cpu_seconds)?;
        rate("transport.bytes_per_second", self.transport.bytes_per_second)?;
        for (name, value, least, most, unit) in self.contention.iter().flat_map(Contention::figures) {
            if !(least..=most).contains(&value) {
                let message = format!("is {value}, expected {unit} from {least} to {most}; measure again");
                return Err(invalid_field(format!("contention.{name}"), message));
            }
        }
        for (name, start) in [("main", self.starts.main), ("remote", self.starts.remote)] {
            seconds(&format!("starts.{name}.process_seconds"), start.process_seconds)?;
            rate(&format!("starts.{name}.load_bytes_per_second"), start.load_bytes_per_second)?;
        }
        for (name, bytes) in [
            ("memory.main_bytes", self.memory.main_bytes),
            ("memory.function_bytes", self.memory.function_bytes),
        ] {
            if !(0.0..=LARGEST).contains(&bytes) {
                let message = format!("is {bytes}, expected bytes from 0 to {LARGEST:e}; measure again");
                return Err(invalid_field(name, message));
            }
        }
        Ok(())
    }

    /// Returns [`Origin::Prior`] if any times that plans use are assumed; those of the device may be while others are
    /// measured.
    #[must_use]
    pub fn certainty(&self) -> Origin {
        match self.device {
            Some(device) if device.assumed => Origin::Prior,
            _ => self.origin,
        }
    }

    /// Checks that the profile is of main functions on the kind of `device`: `cpu`, or `cuda` with its index. Even the CPU
    /// times differ between the two, since different code computes the non-expert part.
    ///
    /// # Errors
    /// The profile is of the other kind.
    pub fn check_device(&self, device: &str) -> Result<(), ProblemError> {
        let kind = |on_cpus: bool| if on_cpus { "cpu" } else { "cuda" };
        let (profile, wanted) = (kind(self.device.is_none()), kind(device == "cpu"));
        if profile == wanted {
            return Ok(());
        }
        Err(ProblemError::ForeignDevice { profile: profile.to_owned(), wanted: wanted.to_owned() })
    }

    /// Checks that the profile is of `model` in `dtype`, with the same quantisation. A prior passes for each model.
    ///
    /// # Errors
    /// The profile is of another checkpoint or dtype.
    pub fn check_model(&self, model: &Inspection, dtype: &str) -> Result<(), ProblemError> {
        if self.origin == Origin::Prior {
            return Ok(());
        }
        if self.model.fingerprint != model.fingerprint {
            return Err(ProblemError::ForeignModel {
                profile: self.model.fingerprint.clone(),
                model: model.fingerprint.clone(),
            });
        }
        let wanted = ModelId::of(model, dtype);
        if self.model != wanted {
            return Err(ProblemError::ForeignDtype {
                profile: self.model.precision(),
                wanted: wanted.precision(),
            });
        }
        Ok(())
    }
}

fn invalid_field(field: impl Into<String>, message: impl Into<String>) -> ProfileError {
    ProfileError { field: field.into(), message: message.into() }
}

fn seconds(field: &str, value: f64) -> Result<(), ProfileError> {
    if (0.0..=LARGEST).contains(&value) {
        return Ok(());
    }
    Err(invalid_field(field, format!("is {value}, expected seconds from 0 to {LARGEST:e}; measure again")))
}

fn rate(field: &str, value: f64) -> Result<(), ProfileError> {
    if (1.0..=LARGEST).contains(&value) {
        return Ok(());
    }
    Err(invalid_field(
        field,
        format!("is {value}, expected bytes per second from 1 to {LARGEST:e}; measure again"),
    ))
}

fn from_one_token(name: &str, profile: &CpuProfile) -> Result<(), ProfileError> {
    table(name, profile)?;
    if profile.tokens.first() != Some(&1.0) {
        let first = profile.tokens.first().copied().unwrap_or_default();
        let message = format!("starts at {first}, expected 1: a decode step has one token");
        return Err(invalid_field(format!("{name}.tokens"), message));
    }
    Ok(())
}

fn table(name: &str, table: &CpuProfile) -> Result<(), ProfileError> {
    for (axis, points) in [("vcpus", &table.vcpus), ("tokens", &table.tokens)] {
        let field = format!("{name}.{axis}");
        if points.is_empty() || points.len() > MAX_POINTS {
            return Err(invalid_field(
                field,
                format!("has {} points, expected 1 to {MAX_POINTS}", points.len()),
            ));
        }
        let ascending = points.is_sorted_by(|a, b| a < b);
        if !ascending || points.iter().any(|point| !POINTS.contains(point)) {
            let (least, most) = POINTS.into_inner();
            let message = format!("is {points:?}, expected ascending numbers from {least:e} to {most:e}");
            return Err(invalid_field(field, message));
        }
    }
    if table.seconds.len() != table.tokens.len() {
        let message = format!("has {} rows, expected {} as tokens", table.seconds.len(), table.tokens.len());
        return Err(invalid_field(format!("{name}.seconds"), message));
    }
    for (row, values) in table.seconds.iter().enumerate() {
        if values.len() != table.vcpus.len() {
            let message = format!("has {} columns, expected {} as vcpus", values.len(), table.vcpus.len());
            return Err(invalid_field(format!("{name}.seconds[{row}]"), message));
        }
        for (column, value) in values.iter().enumerate() {
            seconds(&format!("{name}.seconds[{row}][{column}]"), *value)?;
        }
    }
    Ok(())
}
