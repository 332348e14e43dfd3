//! Functions of a command: started, used, stopped.

use crate::device::Device;
use crate::exit::CliError;
use crate::files::read;
use crate::flags::{Backend, DeploymentArgs, check_experts_dtype, default_dtype};
use crate::loading::Loading;
use crate::machine;
use crate::output::progress::Progress;
use crate::programs;
use crate::remote_set::{Foresight, usage};
use crate::signals::EndSignals;
use remoe_hub::{ModelArgs, ModelLocation, Silence};
use remoe_model::{Checkpoint, DenseDtype, ExpertsDtype, Inspection};
use remoe_planner::{Account, Answer, MainSize, PlanDraft, PlanError, Problem};
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_rollout::decide::{Desired, Patience};
use remoe_rollout::functions::{DEFAULT_MAX_BATCH, deployment};
use remoe_rollout::{
    Activity, Cgroups, Event, LogLine, ModelOptions, MoeLayer, Placement, ProcessLauncher, ResourceLimits,
    Status, Supervisor, control,
};
use serde::Serialize;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;

/// A deployment as its command wants it.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) options: ModelOptions,
    /// The device of the main function: it also decides what is measured and planned.
    pub(crate) device: Device,
    /// The model as every function is told: with the commit, where it comes from the hub.
    pub(crate) source: ModelArgs,
    /// The part of the cache that the model is fetched into; none where it is in a folder.
    cache: Option<PathBuf>,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) inspection: Inspection,
    pub(crate) moe_layers: Vec<MoeLayer>,
    pub(crate) placement: Placement,
    /// Expected times of requests under the placement; absent if it was not planned.
    pub(crate) account: Option<Account>,
    /// Grace period in which the functions may end by themselves after the work of a one-shot command.
    pub(crate) drain: Duration,
    /// Set if its main function serves HTTP, to a gateway on this machine.
    pub(crate) serves_http: bool,
    ready_timeout: Duration,
    /// Planned size of the main function; absent if it was not planned.
    main_size: Option<MainSize>,
    /// Operations of the main function, where they were asked for.
    backend: Option<Backend>,
}

/// Share of experts that are remote, without a plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RatioArgs {
    ratio: f64,
    replicas: u32,
    groups: Option<u32>,
}

impl RatioArgs {
    /// As `args` say, else `default_ratio` of each layer's.
    pub(crate) fn of(args: &DeploymentArgs, default_ratio: f64) -> Self {
        Self {
            ratio: args.remote_ratio.unwrap_or(default_ratio),
            replicas: args.replicas.unwrap_or(1),
            groups: args.groups,
        }
    }

    /// The experts that are used least by `usage`, [layers][experts]; the last ones where that is not known.
    pub(crate) fn place(self, model: &[MoeLayer], usage: Option<&[Vec<f64>]>) -> Result<Placement, CliError> {
        let placement = match usage {
            Some(usage) => Placement::least_used(model, usage, self.ratio, self.replicas),
            None => Placement::from_ratio(model, self.ratio, self.replicas),
        };
        let grouped = |placement: Placement| match self.groups {
            Some(groups) => placement.in_groups(groups),
            None => Ok(placement),
        };
        placement.and_then(grouped).map_err(|error| CliError::placement(error, None))
    }
}

/// Size of a planned main function.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct MainReport {
    /// Typical requests that it has room for at the same time.
    pub(crate) concurrency: u32,
    pub(crate) threads: usize,
    pub(crate) vcpus: f64,
    /// Memory of its container.
    pub(crate) memory_bytes: u64,
    pub(crate) kv_cache_bytes: u64,
    /// Positions that these hold.
    pub(crate) kv_cache_tokens: u64,
}

impl Wanted {
    /// Reads the checkpoint's facts and decides what is remote: as a plan file says, else the share that
    /// the arguments name, else `default_ratio`.
    pub(crate) fn of(
        source: &ModelArgs,
        args: &DeploymentArgs,
        default_ratio: f64,
        foresight: Foresight<'_>,
    ) -> Result<Self, CliError> {
        let mut wanted = Self::unplaced(source, args)?;
        match &args.plan {
            Some(path) => wanted.place_as_in(path)?,
            None => {
                let usage = usage(args, foresight, &wanted.checkpoint)?;
                let ratio = RatioArgs::of(args, default_ratio);
                wanted.placement = ratio.place(&wanted.moe_layers, usage.as_deref())?;
            }
        }
        Ok(wanted)
    }

    /// Reads the checkpoint's facts; everything is local until something else is decided.
    pub(crate) fn unplaced(source: &ModelArgs, args: &DeploymentArgs) -> Result<Self, CliError> {
        let source = ModelArgs { model: absolute(&source.model), ..source.clone() };
        let silence = Silence { after: args.ready_timeout, flag: "--ready-timeout" };
        let mut opened = source.open_within(silence)?;
        if let Some(positions) = args.max_model_len {
            opened.checkpoint.set_positions(positions)?;
        }
        let source = source.pinned(&opened);
        let device = Device::resolve(args.device.as_deref(), args.backend);
        let experts_dtype = args.experts_dtype;
        check_experts_dtype(&opened.checkpoint, experts_dtype, args.dtype)?;
        let inspection = opened.checkpoint.inspect()?.kept_as(experts_dtype, args.dense_dtype, &device.name);
        let moe_layers = moe_layers(&inspection);
        Ok(Self {
            options: ModelOptions {
                model: source.model.to_os_string().into(),
                dtype: args.dtype.map(|dtype| dtype.name().to_owned()),
                experts_dtype: experts_dtype.map(ExpertsDtype::name),
                dense_dtype: args.dense_dtype.map(DenseDtype::name),
                max_model_len: args.max_model_len,
                device: Some(device.name.clone()),
                threads: args.threads,
                remote_memory_bytes: args.remote_memory,
                kv_cache_bytes: args.kv_cache_bytes,
                max_batch: args.max_batch,
                starts_at_once: args.starts_at_once,
                shared_cores: std::thread::available_parallelism().ok().map(usize::from),
                ..ModelOptions::default()
            },
            device,
            source,
            cache: opened.cache,
            checkpoint: Arc::new(opened.checkpoint),
            inspection,
            moe_layers,
            placement: Placement::default(),
            account: None,
            // Nothing is left to drain once the answer is there.
            drain: Duration::ZERO,
            serves_http: false,
            ready_timeout: args.ready_timeout,
            main_size: None,
            backend: args.backend,
        })
    }

    /// Returns the model's name in the HTTP interface.
    pub(crate) fn name(&self) -> String {
        self.options.served_model_name.clone().unwrap_or_else(|| self.source.model.name())
    }

    /// Takes the placement from a plan file, and the problem where the file states it.
    fn place_as_in(&mut self, path: &Path) -> Result<(), CliError> {
        let text = read("--plan", path)?;
        // Strictly, for what the placement does not read as well.
        let account = Account::from_plan_file(&text).map_err(|error| in_plan_file(error.into(), path))?;
        self.placement = Placement::from_plan(&self.moe_layers, &text)
            .map_err(|error| CliError::placement(error, Some(path.to_owned())))?;
        let sized = self.placement.processes().iter().any(|process| process.memory_bytes.is_some());
        if sized && self.options.remote_memory_bytes.is_some() {
            let message = format!(
                "cannot apply --remote-memory: {} already sets the memory of each remote function; omit the flag",
                path.display()
            );
            return Err(CliError::arguments("--remote-memory", message));
        }
        account.map_or(Ok(()), |account| self.adopt(account))
    }

    /// Compares requests with `account`, and sizes the main function as it says.
    fn adopt(&mut self, account: Account) -> Result<(), CliError> {
        let account = account.on_one_machine(machine::cores());
        let json = serde_json::to_string(&account);
        self.options.account =
            json.map_err(|error| CliError::runtime(format!("cannot write the plan: {error}")))?;
        self.size_main(account.main_size());
        self.options.bytes_per_vcpu = account.pricing().memory_per_vcpu_bytes.map(|bytes| bytes as u64);
        self.account = Some(account);
        Ok(())
    }

    /// Limits the main function, and gives it what its requests take together.
    pub(crate) fn size_main(&mut self, size: MainSize) {
        let planned = size.kv_cache_bytes as u64;
        let cache = self.options.kv_cache_bytes.unwrap_or(planned).max(1);
        self.options.kv_cache_bytes = Some(cache);
        self.options.main_limits = Some(ResourceLimits {
            memory_bytes: (size.memory_bytes as u64).saturating_add(cache.saturating_sub(planned)),
            // A millionth is rounding.
            cpu_millis: ((size.vcpus * 1e3 - 1e-6).ceil() as u64).max(1),
        });
        self.options.main_threads = Some(self.options.threads.unwrap_or(size.threads));
        self.run_at_once(size.concurrency);
        self.main_size = Some(size);
        let dtype = self.options.dtype.as_deref().unwrap_or_else(|| default_dtype(&self.inspection));
        self.options.fallback_bytes = Some(fallback_bytes(&self.inspection, dtype));
    }

    /// Keeps the main function as it is in `other`, whatever a plan says of it.
    pub(crate) fn keep_main_of(&mut self, other: &Self) {
        let (options, kept) = (&mut self.options, &other.options);
        options.main_limits = kept.main_limits;
        options.main_threads = kept.main_threads;
        options.kv_cache_bytes = kept.kv_cache_bytes;
        options.max_batch = kept.max_batch;
        options.fallback_bytes = kept.fallback_bytes;
        self.main_size = other.main_size;
    }

    /// Lets `requests` run at the same time, unless a flag sets the largest batch.
    pub(crate) fn run_at_once(&mut self, requests: u32) {
        let sequences = requests as usize;
        if self.options.max_batch.is_none() && sequences > DEFAULT_MAX_BATCH {
            self.options.max_batch = Some(sequences);
        }
    }

    /// Returns the size of the main function, if it was planned.
    pub(crate) fn main_report(&self) -> Option<MainReport> {
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

    /// Places the experts as `answer` to `problem` says.
    pub(crate) fn place_as_planned(&mut self, problem: &Problem, answer: &Answer) -> Result<(), CliError> {
        let json = serde_json::to_string(&answer.plan)
            .map_err(|error| CliError::runtime(format!("cannot write the plan: {error}")))?;
        self.placement = Placement::from_plan(&self.moe_layers, &json)
            .map_err(|error| CliError::placement(error, None))?;
        let account = Account::new(problem.clone(), &PlanDraft::from(&answer.plan));
        self.adopt(account.map_err(|error| CliError::runtime(error.to_string()))?)
    }

    /// Returns the desired state: the functions that are to run.
    pub(crate) fn desired(&self) -> Desired {
        let http = self.serves_http.then(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let patience = Patience::with_ready(self.ready_timeout);
        let mut desired = deployment(&self.options, &self.placement, http, Duration::ZERO, patience);
        for function in &mut desired.functions {
            function.arguments.extend(self.source.options());
        }
        desired
    }

    /// Starts to keep `desired`.
    pub(crate) fn launch(&self, desired: Desired, progress: &Arc<Progress>) -> Result<Supervisor, CliError> {
        progress.doing(starting(&desired));
        let log_progress = progress.clone();
        let launcher = ProcessLauncher::new(
            programs::find(self.backend, &self.device.name)?,
            self.ready_timeout,
            Arc::new(move |line: LogLine<'_>| log_progress.log(line)),
        )
        .map_err(|error| CliError::runtime(error.to_string()))?;
        let limited = desired.functions.iter().any(|function| function.limits.is_some());
        let launcher = match limited.then(Cgroups::find) {
            Some(Ok(cgroups)) => launcher.with_limits(cgroups),
            Some(Err(error)) => {
                let why = if progress.is_verbose() { format!(": {error}") } else { String::new() };
                progress.line(&format!("memory and CPU limits of functions are not enforced{why}"));
                launcher
            }
            None => launcher,
        };
        let activity = Activity::default();
        let launcher = launcher.with_activity(activity.clone());
        let event_progress = progress.clone();
        let events = Arc::new(move |event: &Event| event_progress.event(event));
        let supervisor = Supervisor::spawn_with(launcher, desired, events, activity.clone());
        let (facts, place) = (self.inspection.clone(), self.source.model.to_string());
        let loading = Loading { facts, place, cache: self.cache.clone(), activity };
        tokio::spawn(loading.watch(supervisor.status(), progress.clone()));
        Ok(supervisor)
    }

    /// Waits until everything answers.
    pub(crate) async fn ready(
        &self,
        supervisor: &Supervisor,
        progress: &Progress,
    ) -> Result<Status, CliError> {
        let status = supervisor.ready(self.ready_timeout).await?;
        progress.clear();
        Ok(status)
    }

    /// Starts the functions and waits until they answer.
    pub(crate) async fn start(&self, progress: &Arc<Progress>) -> Result<(Supervisor, Status), CliError> {
        let supervisor = self.launch(self.desired(), progress)?;
        let status = self.ready(&supervisor, progress).await?;
        Ok((supervisor, status))
    }

    /// Starts the functions for `work`, and ends them when it is done or the user interrupts it.
    pub(crate) async fn run_once<T>(
        &self,
        progress: &Arc<Progress>,
        work: impl AsyncFnOnce(MainModelClient<Channel>) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let mut signals = EndSignals::catch()?;
        let with_functions = async {
            let (supervisor, status) = self.start(progress).await?;
            let main = status.functions.iter().find_map(|function| function.grpc);
            let main = main.ok_or_else(|| CliError::runtime("cannot reach the main function: it ended"))?;
            let result = work(control::main_client(main)?).await;
            supervisor.shutdown(self.drain).await;
            result
        };
        tokio::select! {
            result = with_functions => result,
            // Dropping the supervisor ends the functions.
            () = signals.next() => Err(CliError::interrupted()),
        }
    }
}

/// The Mixture-of-Experts layers of a model.
fn moe_layers(inspection: &Inspection) -> Vec<MoeLayer> {
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let ids = inspection.moe_layers.iter();
    ids.map(|&id| MoeLayer { layer: number(id), experts: number(inspection.experts) }).collect()
}

/// Returns the memory of the main function for experts that no remote function answers for, in bytes: two tokens' experts
/// of a layer may be lost at the same time.
pub(crate) fn fallback_bytes(model: &Inspection, dtype: &str) -> u64 {
    2 * model.top_k as u64 * model.resident_expert_bytes(dtype)
}

/// Returns the error about the plan file at `path`.
fn in_plan_file(error: PlanError, path: &Path) -> CliError {
    let message = format!("{}: {error}", path.display());
    CliError { message, path: Some(path.to_owned()), ..CliError::from(error) }
}

fn starting(desired: &Desired) -> String {
    match desired.functions.len().saturating_sub(1) {
        0 => "starting the main function".to_owned(),
        1 => "starting the main function and 1 remote function".to_owned(),
        count => format!("starting the main function and {count} remote functions"),
    }
}

/// A folder by a path that ends in its name: the model is called after it.
fn absolute(model: &ModelLocation) -> ModelLocation {
    match model {
        ModelLocation::Folder(path) => ModelLocation::Folder(absolute_path(path)),
        location => location.clone(),
    }
}

fn absolute_path(model: &Path) -> PathBuf {
    let path = std::path::absolute(model).unwrap_or_else(|_| model.to_owned());
    if path.file_name().is_some() {
        return path;
    }
    // `..` at the end.
    path.canonicalize().unwrap_or(path)
}
