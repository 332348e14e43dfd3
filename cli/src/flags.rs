//! Flags that several commands share.

mod dtype;
mod sampling;

pub(crate) use dtype::{Dtype, check_experts_dtype};
pub(crate) use remoe_local::default_dtype;
pub(crate) use sampling::{
    ChatSamplingArgs, SamplingArgs, min_p, probability, repetition_penalty, stop_string, temperature,
};

use clap::{Args, ValueEnum};
use remoe_model::{DenseDtype, ExpertsDtype, KvCacheDtype, ONE_GPU};
use remoe_planner::Remote;
use remoe_process::{parse_duration_or_seconds, sizes};
use std::path::PathBuf;
use std::time::Duration;

/// Functions of a deployment.
#[derive(Debug, Clone, Args)]
pub(crate) struct DeploymentArgs {
    /// Compute dtype [default: that of the checkpoint]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// Quantise routed experts to int8, int4 or mxfp4 at load time, or keep stored fp8 experts
    /// [default: the compute dtype]
    #[arg(long, value_name = "int8|int4|mxfp4|fp8")]
    pub(crate) experts_dtype: Option<ExpertsDtype>,
    /// Dtype of all weights but routed experts (embedding, attention, dense layers, shared experts, head): int8 or int4
    /// on CPUs, or the compute dtype [default: int8 on CPUs if --experts-dtype is int8, int4 or mxfp4, else the compute
    /// dtype]
    #[arg(long, value_name = "int8|int4|bfloat16|float32")]
    pub(crate) dense_dtype: Option<DenseDtype>,
    /// Form of the KV cache: int8 takes about half of bfloat16, on CPUs [default: the compute dtype]
    #[arg(long, value_name = "int8")]
    pub(crate) kv_cache_dtype: Option<KvCacheDtype>,
    /// Maximum context length in tokens, prompt and answer together. For models with longrope, a value above the
    /// trained length applies long-context scaling to short prompts too [default: that of the model; with longrope, the
    /// trained length]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) max_model_len: Option<usize>,
    /// Device of the main function: cpu, cuda or cuda:INDEX [default: cuda if available]
    #[arg(long, value_parser = device)]
    pub(crate) device: Option<String>,
    /// Backend of the main function [default: torch on cuda, native on CPUs]
    #[arg(long, value_enum, env = "REMOE_BACKEND")]
    pub(crate) backend: Option<Backend>,
    /// Share of each layer's experts that are remote [default: 0]
    #[arg(
        long,
        value_name = "B",
        allow_negative_numbers = true,
        help_heading = "Placement",
        conflicts_with = "plan"
    )]
    pub(crate) remote_ratio: Option<f64>,
    /// Selection of the remote experts
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "SET",
        help_heading = "Placement",
        requires = "remote_ratio"
    )]
    pub(crate) remote_set: RemoteSet,
    /// Activation records from `remoe record`, required with --remote-set history
    #[arg(long, value_name = "FILE", help_heading = "Placement", requires = "remote_ratio")]
    pub(crate) history: Option<PathBuf>,
    /// Replicas of each remote group [default: 1]
    #[arg(long, value_name = "Z", help_heading = "Placement", conflicts_with = "plan")]
    pub(crate) replicas: Option<u32>,
    /// Number of remote groups; requires --remote-ratio. Each group holds a slice of every layer's remote experts, and
    /// all groups work in parallel [default: 1]
    #[arg(
        long,
        value_name = "G",
        help_heading = "Placement",
        requires = "remote_ratio",
        conflicts_with = "plan"
    )]
    pub(crate) groups: Option<u32>,
    /// Plan file: the remote experts of each layer or group, as from `remoe plan MODEL --json > plan.json`
    #[arg(long, value_name = "FILE", help_heading = "Placement")]
    pub(crate) plan: Option<PathBuf>,
    /// Threads of each function; a plan may give remote functions fewer [default: all cores, or as planned]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) threads: Option<usize>,
    /// Memory limit of each remote function, such as 500MB or 2GiB. If `up` or `generate` makes a plan, remote
    /// functions get exactly this size [default: no limit, or as planned]
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub(crate) remote_memory: Option<u64>,
    /// Memory of the KV cache [default: 2GiB, or as planned]
    #[arg(long, value_name = "SIZE", value_parser = sizes::<u64>(1..=u64::MAX))]
    pub(crate) kv_cache_bytes: Option<u64>,
    /// Maximum batch size, in sequences [default: 32, or the planned concurrency if that is more]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) max_batch: Option<usize>,
    /// Start at most N remote functions at a time [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) starts_at_once: Option<usize>,
    /// Longest time without progress until all functions are ready (no byte of the weights arrives or is read), such as
    /// 120s or 10m; a number without a unit is in seconds
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = parse_duration_or_seconds)]
    pub(crate) ready_timeout: Duration,
}

impl Default for DeploymentArgs {
    fn default() -> Self {
        Self {
            dtype: None,
            experts_dtype: None,
            dense_dtype: None,
            kv_cache_dtype: None,
            max_model_len: None,
            device: None,
            backend: None,
            remote_ratio: None,
            remote_set: RemoteSet::default(),
            history: None,
            replicas: None,
            groups: None,
            plan: None,
            threads: None,
            remote_memory: None,
            kv_cache_bytes: None,
            max_batch: None,
            starts_at_once: None,
            ready_timeout: READY_TIMEOUT,
        }
    }
}

/// Default of `--ready-timeout`.
pub(crate) const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// Predictor in a folder.
#[derive(Debug, Args)]
pub(crate) struct PredictorFolder {
    /// Folder of a predictor from `remoe predictor build`, for --remote-set prediction [default: MODEL/predictor]
    #[arg(long, value_name = "DIR", help_heading = "Placement")]
    pub(crate) predictor: Option<PathBuf>,
}

/// Selection of the remote experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum RemoteSet {
    /// The experts with the highest ids
    #[default]
    Last,
    /// The least used experts in --history
    History,
    /// The experts that --predictor expects to be used least: for the prompt of `generate` or `logits`, in other
    /// commands for the average past prompt
    Prediction,
}

/// Use of remote experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum RemoteArg {
    /// Use remote experts only if that is cheaper
    #[default]
    Auto,
    /// Use remote experts in every layer, even if that costs more. Layers whose tokens use all experts may stay local
    Always,
    /// Keep all experts in the main function
    Never,
}

impl From<RemoteArg> for Remote {
    fn from(remote: RemoteArg) -> Self {
        match remote {
            RemoteArg::Auto => Self::Auto,
            RemoteArg::Always => Self::Always,
            RemoteArg::Never => Self::Never,
        }
    }
}
/// Backend of the non-expert operations; answers are bit-identical within one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// Remoe's kernels, on CPUs
    Native,
    /// LibTorch
    Torch,
}

impl From<Backend> for remoe_local::MainBackend {
    fn from(backend: Backend) -> Self {
        match backend {
            Backend::Native => Self::Native,
            Backend::Torch => Self::Torch,
        }
    }
}

pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(value @ 1..) => Ok(value),
        _ => Err("expected 1 or more".to_owned()),
    }
}

/// Name of the CPUs in `--device`.
pub(crate) const CPU: &str = "cpu";

pub(crate) fn device(text: &str) -> Result<String, String> {
    let index_is_number = || {
        let index = text.strip_prefix("cuda:");
        index.is_some_and(|index| index.parse::<u16>().is_ok())
    };
    if matches!(text, CPU | "cuda") || index_is_number() {
        Ok(text.to_owned())
    } else if text.contains(',') {
        Err(format!("the number of devices {ONE_GPU}; name one, such as cuda:0"))
    } else {
        Err("expected cpu, cuda or cuda:INDEX".to_owned())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn several_devices_are_refused() {
        let error = device("cuda:0,cuda:1").unwrap_err();
        assert!(error.contains("must be 1: the layers of a model are not divided"), "{error}");
        assert!(error.ends_with("name one, such as cuda:0"), "{error}");
        assert!(device("cuda:1").is_ok() && device("gpu").is_err_and(|error| error.contains("expected cpu")));
    }
}
