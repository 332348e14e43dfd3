//! Start, use and shutdown of the functions of a command.

pub(crate) use remoe_local::{DesiredDeployment, MainReport, fallback_bytes};

use crate::device::MainDevice;
use crate::exit::CliError;
use crate::files::read;
use crate::flags::{CPU, DeploymentArgs, check_experts_dtype};
use crate::loading_progress::LoadingProgress;
use crate::output::progress::Progress;
use crate::programs;
use crate::remote_set::{PredictionSource, expert_usage};
use crate::signals::TerminationSignals;
use remoe_hub::{ModelArgs, ModelLocation, StallLimit};
use remoe_local::{LocalError, Ratio};
use remoe_model::{DenseDtype, ExpertsDtype, Inspection, KvCacheDtype};
use remoe_planner::{PlanAccount, PlanError};
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_rollout::decide::Desired;
use remoe_rollout::{
    Activity, Cgroups, LogLine, ModelOptions, MoeLayer, Placement, ProcessLauncher, RolloutEvent, Status,
    Supervisor, control,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;

/// Returns the remote ratio, replicas and groups from `args`. Without a flag, the ratio is `default_ratio`.
pub(crate) fn ratio_of(args: &DeploymentArgs, default_ratio: f64) -> Ratio {
    Ratio {
        ratio: args.remote_ratio.unwrap_or(default_ratio),
        replicas: args.replicas.unwrap_or(1),
        groups: args.groups,
    }
}

/// Opens the checkpoint, and places its experts: from a plan file, else by `--remote-ratio`, else by `default_ratio`.
pub(crate) fn desired_deployment(
    source: &ModelArgs,
    args: &DeploymentArgs,
    default_ratio: f64,
    prediction: PredictionSource<'_>,
) -> Result<DesiredDeployment, CliError> {
    let mut desired = unplaced_deployment(source, args)?;
    match &args.plan {
        Some(path) => apply_plan_file(&mut desired, path)?,
        None => {
            let usage = expert_usage(args, prediction, &desired.checkpoint)?;
            let ratio = ratio_of(args, default_ratio);
            desired.placement =
                ratio.place(&desired.moe_layers, usage.as_deref()).map_err(LocalError::from)?;
        }
    }
    Ok(desired)
}

/// Opens the checkpoint, and returns a deployment with all experts local.
pub(crate) fn unplaced_deployment(
    source: &ModelArgs,
    args: &DeploymentArgs,
) -> Result<DesiredDeployment, CliError> {
    let source = ModelArgs { model: absolute(&source.model), ..source.clone() };
    let stall_limit = StallLimit { after: args.ready_timeout, flag: "--ready-timeout" };
    let mut opened = source.open_within(stall_limit)?;
    if let Some(positions) = args.max_model_len {
        opened.checkpoint.set_positions(positions)?;
    }
    let source = source.pinned(&opened);
    let device = MainDevice::resolve(args.device.as_deref(), args.backend);
    let experts_dtype = args.experts_dtype;
    check_experts_dtype(&opened.checkpoint, experts_dtype, args.dtype)?;
    let inspection = opened.checkpoint.inspect()?.kept_as(experts_dtype, args.dense_dtype, &device.name);
    let inspection = Inspection { kv_cache_dtype: args.kv_cache_dtype, ..inspection };
    let moe_layers = moe_layers(&inspection);
    Ok(DesiredDeployment {
        options: ModelOptions {
            model: source.model.to_os_string().into(),
            dtype: args.dtype.map(|dtype| dtype.name().to_owned()),
            experts_dtype: experts_dtype.map(ExpertsDtype::name),
            dense_dtype: args.dense_dtype.map(DenseDtype::name),
            kv_cache_dtype: args.kv_cache_dtype.map(KvCacheDtype::name),
            max_model_len: args.max_model_len,
            device: Some(device.name),
            threads: args.threads,
            remote_memory_bytes: args.remote_memory,
            kv_cache_bytes: args.kv_cache_bytes,
            max_batch: args.max_batch,
            starts_at_once: args.starts_at_once,
            shared_cores: std::thread::available_parallelism().ok().map(usize::from),
            ..ModelOptions::default()
        },
        source,
        cache: opened.cache,
        checkpoint: Arc::new(opened.checkpoint),
        inspection,
        moe_layers,
        placement: Placement::default(),
        account: None,
        // After the answer, no requests remain to drain.
        drain: Duration::ZERO,
        serves_http: false,
        ready_timeout: args.ready_timeout,
        main_size: None,
        backend: args.backend.map(Into::into),
    })
}

/// Applies the placement of a plan file, and the cost accounting of its problem if the file contains one.
fn apply_plan_file(desired: &mut DesiredDeployment, path: &Path) -> Result<(), CliError> {
    let text = read("--plan", path)?;
    // Parsed first, because it also checks fields that the placement ignores.
    let account = PlanAccount::from_plan_file(&text).map_err(|error| plan_file_error(error.into(), path))?;
    desired.placement = Placement::from_plan(&desired.moe_layers, &text)
        .map_err(|error| CliError::placement(error, Some(path.to_owned())))?;
    let has_sizes = desired.placement.processes().iter().any(|process| process.memory_bytes.is_some());
    if has_sizes && desired.options.remote_memory_bytes.is_some() {
        let message = format!(
            "cannot apply --remote-memory: {} already sets the memory of each remote function; omit the flag",
            path.display()
        );
        return Err(CliError::arguments("--remote-memory", message));
    }
    Ok(account.map_or(Ok(()), |account| desired.adopt(account))?)
}

/// Start of a deployment's functions, with progress on the terminal.
pub(crate) trait Launch {
    /// Starts a supervisor that maintains `desired`.
    fn launch(&self, desired: Desired, progress: &Arc<Progress>) -> Result<Supervisor, CliError>;

    /// Waits until all functions are ready.
    async fn ready(&self, supervisor: &Supervisor, progress: &Progress) -> Result<Status, CliError>;

    /// Starts the functions, and waits until they are ready.
    async fn start(&self, progress: &Arc<Progress>) -> Result<(Supervisor, Status), CliError>;

    /// Starts the functions for `work`, and stops them when it ends or the user interrupts it.
    async fn run_once<T>(
        &self,
        progress: &Arc<Progress>,
        work: impl AsyncFnOnce(MainModelClient<Channel>) -> Result<T, CliError>,
    ) -> Result<T, CliError>;
}

impl Launch for DesiredDeployment {
    fn launch(&self, desired: Desired, progress: &Arc<Progress>) -> Result<Supervisor, CliError> {
        progress.doing(starting_message(&desired));
        let log_progress = progress.clone();
        let launcher = ProcessLauncher::new(
            programs::find(self.backend, self.options.device.as_deref().unwrap_or(CPU))?,
            self.ready_timeout,
            Arc::new(move |line: LogLine<'_>| log_progress.log(line)),
        )
        .map_err(|error| CliError::runtime(error.to_string()))?;
        let has_limits = desired.functions.iter().any(|function| function.limits.is_some());
        let launcher = match has_limits.then(Cgroups::find) {
            Some(Ok(cgroups)) => launcher.with_limits(cgroups),
            Some(Err(error)) => {
                let cause = if progress.is_verbose() { format!(": {error}") } else { String::new() };
                progress.line(&format!("memory and CPU limits of functions are not enforced{cause}"));
                launcher
            }
            None => launcher,
        };
        let activity = Activity::default();
        let launcher = launcher.with_activity(activity.clone());
        let event_progress = progress.clone();
        let events = Arc::new(move |event: &RolloutEvent| event_progress.event(event));
        let supervisor = Supervisor::spawn_with(launcher, desired, events, activity.clone());
        let (inspection, location) = (self.inspection.clone(), self.source.model.to_string());
        let loading = LoadingProgress { inspection, location, cache: self.cache.clone(), activity };
        tokio::spawn(loading.watch(supervisor.status(), progress.clone()));
        Ok(supervisor)
    }

    async fn ready(&self, supervisor: &Supervisor, progress: &Progress) -> Result<Status, CliError> {
        let status = supervisor.ready(self.ready_timeout).await?;
        progress.clear();
        Ok(status)
    }

    async fn start(&self, progress: &Arc<Progress>) -> Result<(Supervisor, Status), CliError> {
        let supervisor = self.launch(self.desired(), progress)?;
        let status = self.ready(&supervisor, progress).await?;
        Ok((supervisor, status))
    }

    async fn run_once<T>(
        &self,
        progress: &Arc<Progress>,
        work: impl AsyncFnOnce(MainModelClient<Channel>) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let mut signals = TerminationSignals::listen()?;
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
            // Dropping the supervisor stops the functions.
            () = signals.next() => Err(CliError::interrupted()),
        }
    }
}

/// Returns the Mixture-of-Experts layers of a model.
fn moe_layers(inspection: &Inspection) -> Vec<MoeLayer> {
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let ids = inspection.moe_layers.iter();
    ids.map(|&id| MoeLayer { layer: number(id), experts: number(inspection.experts) }).collect()
}

/// Adds the path of the plan file to an error about it.
fn plan_file_error(error: PlanError, path: &Path) -> CliError {
    let message = format!("{}: {error}", path.display());
    CliError { message, path: Some(path.to_owned()), ..CliError::from(error) }
}

fn starting_message(desired: &Desired) -> String {
    match desired.functions.len().saturating_sub(1) {
        0 => "starting the main function".to_owned(),
        1 => "starting the main function and 1 remote function".to_owned(),
        count => format!("starting the main function and {count} remote functions"),
    }
}

/// Makes a folder's path absolute, so that it ends in a name, after which the model is named.
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
    // A path that ends in `..` has no file name.
    path.canonicalize().unwrap_or(path)
}
