//! The command lines of the functions of one deployment.

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

/// Sequences in one forward of a main function that is not told otherwise.
pub const DEFAULT_MAX_BATCH: usize = 32;
/// Memory that comes with one vCPU where prices say nothing else (Remoe paper, section III-A).
const BYTES_PER_VCPU: u64 = 1_000_000_000;

/// Options of the functions about model and machine. If an option is absent, the functions decide themselves.
#[derive(Debug, Clone, Default)]
pub struct ModelOptions {
    /// The checkpoint's folder.
    pub model: PathBuf,
    /// The compute dtype.
    pub dtype: Option<String>,
    /// The form in which experts are kept, where that is another one.
    pub experts_dtype: Option<&'static str>,
    /// The form in which the main function keeps what is multiplied with outside of experts, where that was said.
    pub dense_dtype: Option<&'static str>,
    /// The device of the main function.
    pub device: Option<String>,
    /// Positions of a text at most, where they are not those that the model serves.
    pub max_model_len: Option<usize>,
    /// Threads of each function whose size does not say.
    pub threads: Option<usize>,
    /// Resource limits of the main function.
    pub main_limits: Option<ResourceLimits>,
    /// Threads of the main function, where its size alone does not say.
    pub main_threads: Option<usize>,
    /// Memory of the main function for experts that no remote function answers for.
    pub fallback_bytes: Option<u64>,
    /// Memory limit of each remote function.
    pub remote_memory_bytes: Option<u64>,
    /// Memory that comes with one vCPU of a remote function. Defaults to 1 GB.
    pub bytes_per_vcpu: Option<u64>,
    /// Memory for keys and values in the main function.
    pub kv_cache_bytes: Option<u64>,
    /// Form of the KV cache, where it is not the compute dtype.
    pub kv_cache_dtype: Option<&'static str>,
    /// Largest number of sequences in one forward.
    pub max_batch: Option<usize>,
    /// The inter-token latency that running streams keep beside prompts.
    pub target_itl: Option<Duration>,
    /// Variables of the chat template for requests that do not set them, as a JSON object.
    pub chat_template_kwargs: Option<String>,
    /// How long a request may wait for its first row.
    pub queue_deadline: Option<Duration>,
    /// File to which the main function appends what its requests' experts were.
    pub record_activations: Option<PathBuf>,
    /// Record the experts of every token, not only counts.
    pub record_tokens: bool,
    /// The plan behind the placement with its problem, as JSON. Empty if the placement was not planned.
    pub account: String,
    /// The model's name in the HTTP interface.
    pub served_model_name: Option<String>,
    /// The key that the gateway presents.
    pub gateway_key: Option<String>,
    /// Largest body of an HTTP request in bytes.
    pub body_limit: Option<u64>,
    /// Requests that run or wait, at most.
    pub max_requests: Option<u32>,
    /// Remote functions that start at the same time, at most; none: all of them.
    pub starts_at_once: Option<usize>,
    /// Cores that all functions without a size of their own share; none: nothing is known of that.
    pub shared_cores: Option<usize>,
}

/// Cores for each function that shares them, from which on a remote function polls for its next request: a function
/// that polls keeps a core busy, which main functions with few cores want for what lies between two layers' experts.
const CORES_TO_POLL: usize = 4;

/// One main function and the remote functions of `placement`, with HTTP at `http`.
pub fn deployment(
    options: &ModelOptions,
    placement: &Placement,
    http: Option<SocketAddr>,
    drain: Duration,
    patience: RolloutTimeouts,
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
        patience,
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
        // Every user of the machine can read a command line. A key that this process was given is its clients', not the
        // function's.
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
    // Only a function of several layers is called again at once, by the next layer. And polling would use
    // up what a share of a vCPU is allowed.
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

    /// Reports if a remote function of two layers polls that is told nothing of its size.
    fn polls(shared_cores: Option<usize>) -> bool {
        let layers = [0, 1].map(|layer| MoeLayer { layer, experts: 4 });
        let placement =
            Placement::from_ratio(&layers, 0.5, 1).and_then(|placement| placement.in_groups(1)).unwrap();
        let options = ModelOptions { shared_cores, ..ModelOptions::default() };
        let patience = RolloutTimeouts::with_ready(Duration::from_secs(1));
        let desired = deployment(&options, &placement, None, Duration::ZERO, patience);
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
