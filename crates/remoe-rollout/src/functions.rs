//! Command lines of the functions of a deployment.

use crate::cgroup::ResourceLimits;
use crate::decide::{Desired, RolloutTimeouts};
use crate::launcher::FunctionSpec;
use crate::placement::{Placement, RemoteProcess};
use remoe_process::{Role, format_duration};
use remoe_proto::format_listing;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Default batch size of main functions.
pub const DEFAULT_MAX_BATCH: usize = 32;
/// Default memory per vCPU in bytes (Remoe paper, section III-A).
const BYTES_PER_VCPU: u64 = 1_000_000_000;

/// Options of the functions about model and machine. Absent options leave the decision to the functions.
#[derive(Debug, Clone, Default)]
pub struct ModelOptions {
    /// Folder of the checkpoint.
    pub model: PathBuf,
    /// Compute dtype.
    pub dtype: Option<String>,
    /// Dtype of experts in memory, if it differs from the compute dtype.
    pub experts_dtype: Option<&'static str>,
    /// Dtype of dense weights of the main function, if set.
    pub dense_dtype: Option<&'static str>,
    /// Device of the main function.
    pub device: Option<String>,
    /// Maximum positions of a sequence, if below the model's.
    pub max_model_len: Option<usize>,
    /// Threads of each function without a planned size.
    pub threads: Option<usize>,
    /// Resource limits of the main function.
    pub main_limits: Option<ResourceLimits>,
    /// Threads of the main function, if its size does not determine them.
    pub main_threads: Option<usize>,
    /// Bytes of the main function's fallback cache, for experts whose remote function does not answer.
    pub fallback_bytes: Option<u64>,
    /// Memory limit of each remote function.
    pub remote_memory_bytes: Option<u64>,
    /// Memory per vCPU of a remote function in bytes. Defaults to 1 GB.
    pub bytes_per_vcpu: Option<u64>,
    /// Bytes of the KV cache.
    pub kv_cache_bytes: Option<u64>,
    /// Dtype of the KV cache, if it differs from the compute dtype.
    pub kv_cache_dtype: Option<&'static str>,
    /// Maximum number of sequences in a batch.
    pub max_batch: Option<usize>,
    /// Target inter-token latency of running sequences while prompts are prefilled.
    pub target_itl: Option<Duration>,
    /// Variables of the chat template for requests that do not set them, as a JSON object.
    pub chat_template_kwargs: Option<String>,
    /// Longest queueing time of a request before its first prefill.
    pub queue_deadline: Option<Duration>,
    /// File to which the main function appends activation records.
    pub record_activations: Option<PathBuf>,
    /// Record the experts of every token, not only counts.
    pub record_tokens: bool,
    /// Account of the plan with its problem, as JSON. Empty if the placement was not planned.
    pub account: String,
    /// Model name in the HTTP API.
    pub served_model_name: Option<String>,
    /// API key that the gateway presents.
    pub gateway_key: Option<String>,
    /// Maximum bytes of an HTTP request body.
    pub body_limit: Option<u64>,
    /// Maximum number of running and queued requests.
    pub max_requests: Option<u32>,
    /// Maximum number of remote functions that start at the same time; absent for no limit.
    pub starts_at_once: Option<usize>,
    /// Cores that all functions without a planned size share; absent if unknown.
    pub shared_cores: Option<usize>,
}

/// Cores per sharing function above which remote functions busy-poll for their next request. Polling occupies a core,
/// which main functions on few cores need between two layers' experts.
const CORES_TO_POLL: usize = 4;

/// Returns the desired state: one main function with HTTP at `http`, and the remote functions of `placement`.
pub fn deployment(
    options: &ModelOptions,
    placement: &Placement,
    http: Option<SocketAddr>,
    drain: Duration,
    timeouts: RolloutTimeouts,
) -> Desired {
    let processes = placement.processes();
    let crowded = options.shared_cores.is_some_and(|cores| cores < CORES_TO_POLL * (processes.len() + 1));
    let mut functions = vec![main(options, http)];
    functions.extend(processes.into_iter().map(|process| remote(options, process, crowded)));
    Desired {
        functions,
        asleep: false,
        resting: BTreeSet::new(),
        placed: true,
        revision: placement.revision(),
        remote: placement.remote(),
        account: options.account.clone(),
        starts_at_once: options.starts_at_once,
        drain,
        timeouts,
    }
}

fn main(options: &ModelOptions, http: Option<SocketAddr>) -> FunctionSpec {
    let threads = options.main_threads.or(options.main_limits.map(ResourceLimits::threads));
    let mut arguments = common(options, threads);
    if options.main_limits.is_some_and(has_less_than_a_vcpu) {
        flag(&mut arguments, "--poll-us", Some(&0));
    }
    flag(&mut arguments, "--fallback-bytes", options.fallback_bytes.as_ref());
    flag(&mut arguments, "--dense-dtype", options.dense_dtype.as_ref());
    flag(&mut arguments, "--max-model-len", options.max_model_len.as_ref());
    flag(&mut arguments, "--device", options.device.as_ref());
    flag(&mut arguments, "--kv-cache-dtype", options.kv_cache_dtype.as_ref());
    flag(&mut arguments, "--kv-cache-bytes", options.kv_cache_bytes.as_ref());
    flag(&mut arguments, "--max-batch", options.max_batch.as_ref());
    for (name, time) in [("--target-itl", options.target_itl), ("--queue-deadline", options.queue_deadline)] {
        flag(&mut arguments, name, time.map(format_duration).as_ref());
    }
    flag(&mut arguments, "--chat-template-kwargs", options.chat_template_kwargs.as_ref());
    if let Some(path) = &options.record_activations {
        arguments.extend(["--record-activations".into(), path.into()]);
        arguments.extend(options.record_tokens.then(|| "--record-tokens".into()));
    }
    flag(&mut arguments, "--served-model-name", options.served_model_name.as_ref());
    flag(&mut arguments, "--body-limit", options.body_limit.as_ref());
    flag(&mut arguments, "--max-requests", options.max_requests.as_ref());
    let gateway_key = options.gateway_key.iter();
    FunctionSpec {
        name: "main".to_owned(),
        role: Role::Main,
        arguments,
        // The key is not on the command line, which every user of the machine can read. `REMOE_API_KEY` of this
        // process belongs to its clients, so the function does not inherit it.
        environment: gateway_key
            .flat_map(|key| {
                [("REMOE_GATEWAY_KEY".to_owned(), key.clone()), ("REMOE_API_KEY".to_owned(), String::new())]
            })
            .collect(),
        http,
        hosted: Vec::new(),
        limits: options.main_limits,
    }
}

fn remote(options: &ModelOptions, process: RemoteProcess, crowded: bool) -> FunctionSpec {
    let RemoteProcess { name, hosted, memory_bytes, cpu_millis, .. } = process;
    let bytes_per_vcpu = options.bytes_per_vcpu.unwrap_or(BYTES_PER_VCPU);
    let limits = memory_bytes
        .map(|bytes| ResourceLimits::of_memory(bytes, bytes_per_vcpu))
        .map(|limits| ResourceLimits { cpu_millis: cpu_millis.unwrap_or(limits.cpu_millis), ..limits });
    let most = options.threads.unwrap_or(usize::MAX);
    let mut arguments = common(options, limits.map(|limits| limits.threads().min(most)));
    flag(&mut arguments, "--experts", Some(&format_listing(&hosted)));
    // Busy polling helps only functions of several layers, which the next layer calls soon. With less than one vCPU
    // it would use up the quota.
    if hosted.len() < 2 || limits.map_or(crowded, has_less_than_a_vcpu) {
        flag(&mut arguments, "--poll-us", Some(&0));
    }
    flag(&mut arguments, "--memory-bytes", memory_bytes.or(options.remote_memory_bytes).as_ref());
    FunctionSpec { name, role: Role::Remote, arguments, environment: Vec::new(), http: None, hosted, limits }
}

fn has_less_than_a_vcpu(limits: ResourceLimits) -> bool {
    limits.cpu_millis < 1000
}

fn common(options: &ModelOptions, threads: Option<usize>) -> Vec<OsString> {
    let mut arguments = vec![OsString::from("--model"), options.model.clone().into()];
    flag(&mut arguments, "--dtype", options.dtype.as_ref());
    flag(&mut arguments, "--experts-dtype", options.experts_dtype.as_ref());
    flag(&mut arguments, "--threads", threads.or(options.threads).as_ref());
    arguments
}

fn flag(arguments: &mut Vec<OsString>, name: &str, value: Option<&impl ToString>) {
    if let Some(value) = value {
        arguments.push(name.into());
        arguments.push(value.to_string().into());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::placement::MoeLayer;

    /// Returns whether a remote function of two layers without a planned size busy-polls.
    fn polls(shared_cores: Option<usize>) -> bool {
        let layers = [0, 1].map(|layer| MoeLayer { layer, experts: 4 });
        let placement =
            Placement::from_ratio(&layers, 0.5, 1).and_then(|placement| placement.in_groups(1)).unwrap();
        let options = ModelOptions { shared_cores, ..ModelOptions::default() };
        let timeouts = RolloutTimeouts::with_ready(Duration::from_secs(1));
        let desired = deployment(&options, &placement, None, Duration::ZERO, timeouts);
        let remote = desired.functions.iter().find(|function| function.role == Role::Remote).unwrap();
        !remote.arguments.contains(&OsString::from("--poll-us"))
    }

    #[test]
    fn remote_functions_poll_only_where_there_are_cores_for_it() {
        assert!(polls(None));
        assert!(polls(Some(8)));
        assert!(!polls(Some(7)));
    }
}
