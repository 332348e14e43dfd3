//! Deployment of a model on this machine.

use crate::error::LocalError;
use remoe_hub::ModelArgs;
use remoe_model::{Checkpoint, Inspection};
use remoe_planner::{MainSize, PlanAccount, PlanDraft, PlanningResult, Problem};
use remoe_rollout::decide::{Desired, RolloutTimeouts};
use remoe_rollout::functions::{DEFAULT_MAX_BATCH, deployment};
use remoe_rollout::{ModelOptions, MoeLayer, Placement, PlacementError, ResourceLimits};
use serde::Serialize;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Backend of a main function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MainBackend {
    /// Remoe's own kernels, on CPUs.
    Native,
    /// LibTorch.
    Torch,
}

/// Deployment of one model on this machine.
#[derive(Debug, Clone)]
pub struct DesiredDeployment {
    /// Options of all functions.
    pub options: ModelOptions,
    /// Model arguments of every function, with the commit if the model is from the hub.
    pub source: ModelArgs,
    /// Cache folder that the model is fetched into; absent if it is in a local folder.
    pub cache: Option<PathBuf>,
    /// Checkpoint.
    pub checkpoint: Arc<Checkpoint>,
    /// Facts of the checkpoint, with the in-memory dtypes of experts and dense weights.
    pub inspection: Inspection,
    /// Layers with routed experts.
    pub moe_layers: Vec<MoeLayer>,
    /// Placement of experts.
    pub placement: Placement,
    /// Expected times of requests under the plan; absent if nothing was planned.
    pub account: Option<PlanAccount>,
    /// Grace period of the functions after a one-shot command.
    pub drain: Duration,
    /// Set if the main function serves HTTP to a local gateway.
    pub serves_http: bool,
    /// Timeout for all functions to become ready.
    pub ready_timeout: Duration,
    /// Planned size of the main function; absent if nothing was planned.
    pub main_size: Option<MainSize>,
    /// Backend of the main function, if it was requested.
    pub backend: Option<MainBackend>,
}

/// Placement without a plan: a share of the experts is remote.
#[derive(Debug, Clone, Copy)]
pub struct Ratio {
    /// Share of each layer's experts, from 0 to 1.
    pub ratio: f64,
    /// Replicas of each remote function.
    pub replicas: u32,
    /// Number of groups that each host a slice of every layer; one function per layer if absent.
    pub groups: Option<u32>,
}

impl Ratio {
    /// Makes the least used experts by `usage` ([layers][experts]) remote; without usage, the last ones.
    ///
    /// # Errors
    /// A share or number is out of range.
    pub fn place(self, model: &[MoeLayer], usage: Option<&[Vec<f64>]>) -> Result<Placement, PlacementError> {
        let placement = match usage {
            Some(usage) => Placement::least_used(model, usage, self.ratio, self.replicas),
            None => Placement::from_ratio(model, self.ratio, self.replicas),
        };
        let grouped = |placement: Placement| match self.groups {
            Some(groups) => placement.in_groups(groups),
            None => Ok(placement),
        };
        placement.and_then(grouped)
    }
}

/// Size of a planned main function.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MainReport {
    /// Number of concurrent typical requests.
    pub concurrency: u32,
    /// Compute threads.
    pub threads: usize,
    /// vCPUs of its container.
    pub vcpus: f64,
    /// Memory of its container.
    pub memory_bytes: u64,
    /// Memory of the KV cache.
    pub kv_cache_bytes: u64,
    /// Token positions of the KV cache.
    pub kv_cache_tokens: u64,
}

impl DesiredDeployment {
    /// Returns the model's name in the HTTP API.
    pub fn name(&self) -> String {
        self.options.served_model_name.clone().unwrap_or_else(|| self.source.model.name())
    }

    /// Sets the `account` of the plan, and sizes the main function by it.
    ///
    /// # Errors
    /// The account cannot be serialised.
    pub fn adopt(&mut self, account: PlanAccount) -> Result<(), LocalError> {
        let cores = u32::try_from(self.options.shared_cores.unwrap_or(1)).unwrap_or(u32::MAX);
        let account = account.on_one_machine(cores);
        self.options.account = serde_json::to_string(&account)?;
        self.size_main(account.main_size());
        self.options.bytes_per_vcpu = account.pricing().memory_per_vcpu_bytes.map(|bytes| bytes as u64);
        self.account = Some(account);
        Ok(())
    }

    /// Sets the limits and memory of the main function.
    pub fn size_main(&mut self, size: MainSize) {
        let planned = size.kv_cache_bytes as u64;
        let cache = self.options.kv_cache_bytes.unwrap_or(planned).max(1);
        self.options.kv_cache_bytes = Some(cache);
        self.options.main_limits = Some(ResourceLimits {
            memory_bytes: (size.memory_bytes as u64).saturating_add(cache.saturating_sub(planned)),
            // The millionth absorbs rounding errors.
            cpu_millis: ((size.vcpus * 1e3 - 1e-6).ceil() as u64).max(1),
        });
        self.options.main_threads = Some(self.options.threads.unwrap_or(size.threads));
        self.run_at_once(size.concurrency);
        self.main_size = Some(size);
        self.options.fallback_bytes = Some(fallback_bytes(&self.inspection, self.dtype()));
    }

    /// Copies the settings of the main function from `other`.
    pub fn keep_main_of(&mut self, other: &Self) {
        let (options, kept) = (&mut self.options, &other.options);
        options.main_limits = kept.main_limits;
        options.main_threads = kept.main_threads;
        options.kv_cache_bytes = kept.kv_cache_bytes;
        options.max_batch = kept.max_batch;
        options.fallback_bytes = kept.fallback_bytes;
        self.main_size = other.main_size;
    }

    /// Raises the batch size to `requests`, unless a flag sets it.
    pub fn run_at_once(&mut self, requests: u32) {
        let sequences = requests as usize;
        if self.options.max_batch.is_none() && sequences > DEFAULT_MAX_BATCH {
            self.options.max_batch = Some(sequences);
        }
    }

    /// Returns the size of the main function, if it was planned.
    pub fn main_report(&self) -> Option<MainReport> {
        let size = self.main_size?;
        let limits = self.options.main_limits?;
        let cache = self.options.kv_cache_bytes?;
        let tokens = size.kv_cache_tokens * (cache as f64 / size.kv_cache_bytes.max(1.0));
        Some(MainReport {
            concurrency: size.concurrency,
            threads: self.options.main_threads?,
            vcpus: limits.cpu_millis as f64 / 1000.0,
            memory_bytes: limits.memory_bytes,
            kv_cache_bytes: cache,
            kv_cache_tokens: tokens as u64,
        })
    }

    /// Places the experts by `answer`, the solution of `problem`.
    ///
    /// # Errors
    /// The plan is for another model.
    pub fn place_as_planned(&mut self, problem: &Problem, answer: &PlanningResult) -> Result<(), LocalError> {
        let json = serde_json::to_string(&answer.plan)?;
        self.placement = Placement::from_plan(&self.moe_layers, &json)?;
        self.adopt(PlanAccount::new(problem.clone(), &PlanDraft::from(&answer.plan))?)
    }

    /// Returns the compute dtype: that of the options, else the checkpoint's.
    pub fn dtype(&self) -> &str {
        self.options.dtype.as_deref().unwrap_or_else(|| default_dtype(&self.inspection))
    }

    /// Returns the desired state of the functions.
    pub fn desired(&self) -> Desired {
        let http = self.serves_http.then(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let timeouts = RolloutTimeouts::with_ready(self.ready_timeout);
        let mut desired = deployment(&self.options, &self.placement, http, Duration::ZERO, timeouts);
        for function in &mut desired.functions {
            function.arguments.extend(self.source.options());
        }
        desired
    }
}

/// Returns the bytes of the main function's fallback cache, for experts whose remote function does not answer: one
/// layer's experts of two tokens.
pub fn fallback_bytes(model: &Inspection, dtype: &str) -> u64 {
    2 * model.top_k as u64 * model.resident_expert_bytes(dtype)
}

/// Returns the default compute dtype: the checkpoint's, but float32 for float16.
pub fn default_dtype(inspection: &Inspection) -> &'static str {
    if inspection.dtype == "bfloat16" { "bfloat16" } else { "float32" }
}
