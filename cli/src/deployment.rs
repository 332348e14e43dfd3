//! Functions of a command: started, used, stopped.

use crate::args::DeploymentArgs;
use crate::exit::CliError;
use crate::output::progress::Progress;
use crate::programs;
use crate::signals::EndSignals;
use remoe_model::{Checkpoint, Inspection};
use remoe_operator::decide::{Desired, Patience};
use remoe_operator::functions::deployment;
use remoe_operator::{
    LogLine, ModelOptions, MoeLayer, Placement, ProcessLauncher, Status, Supervisor, control,
};
use remoe_wire::v1::main_model_client::MainModelClient;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;

/// A deployment as its command wants it.
pub(crate) struct Wanted {
    pub(crate) options: ModelOptions,
    pub(crate) inspection: Inspection,
    pub(crate) moe_layers: Vec<MoeLayer>,
    pub(crate) placement: Placement,
    /// What the functions may take to end by themselves after the work of a one-shot command.
    pub(crate) drain: Duration,
    ready_timeout: Duration,
}

impl Wanted {
    /// Reads the checkpoint's facts and decides what is remote.
    pub(crate) fn of(args: &DeploymentArgs, default_ratio: f64) -> Result<Self, CliError> {
        let model = absolute(&args.model);
        let inspection = Checkpoint::open(&model)?.inspect();
        let moe_layers = moe_layers(&inspection);
        let placement = placement(args, &moe_layers, default_ratio)?;
        Ok(Self {
            options: ModelOptions {
                model,
                dtype: args.dtype.map(|dtype| dtype.name().to_owned()),
                device: args.device.clone(),
                threads: args.threads,
                remote_memory_bytes: args.remote_memory,
                kv_cache_bytes: args.kv_cache_bytes,
                max_batch: args.max_batch,
                record_activations: None,
                record_tokens: false,
                served_model_name: None,
                api_key: None,
            },
            inspection,
            moe_layers,
            placement,
            // Nothing is left to drain once the answer is there.
            drain: Duration::ZERO,
            ready_timeout: args.ready_timeout,
        })
    }

    /// Starts the functions and waits until they answer.
    pub(crate) async fn start(
        &self,
        http: Option<SocketAddr>,
        progress: &Arc<Progress>,
    ) -> Result<(Supervisor, Status), CliError> {
        let desired = deployment(
            &self.options,
            &self.placement,
            http,
            Duration::ZERO,
            Patience::with_ready(self.ready_timeout),
        );
        progress.doing(starting(&desired));
        let log_progress = progress.clone();
        let launcher = ProcessLauncher::new(
            programs::find()?,
            self.ready_timeout,
            Arc::new(move |line: LogLine<'_>| log_progress.log(line)),
        )
        .map_err(|error| CliError::runtime(error.to_string()))?;
        let event_progress = progress.clone();
        let supervisor =
            Supervisor::spawn(launcher, desired, Arc::new(move |event| event_progress.event(event)));
        let status = supervisor.ready(self.ready_timeout).await?;
        progress.clear();
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
            let (supervisor, status) = self.start(None, progress).await?;
            let main = status.functions.iter().find_map(|function| function.grpc);
            let main = main.ok_or_else(|| CliError::runtime("the main function is gone"))?;
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

fn placement(
    args: &DeploymentArgs,
    moe_layers: &[MoeLayer],
    default_ratio: f64,
) -> Result<Placement, CliError> {
    let Some(path) = &args.plan else {
        let ratio = args.remote_ratio.unwrap_or(default_ratio);
        return Placement::from_ratio(moe_layers, ratio, args.replicas.unwrap_or(1))
            .map_err(|error| CliError::placement(error, None));
    };
    let text = std::fs::read_to_string(path).map_err(|error| CliError {
        path: Some(path.clone()),
        ..CliError::arguments("--plan", format!("cannot read {}: {error}", path.display()))
    })?;
    Placement::from_plan(moe_layers, &text).map_err(|error| CliError::placement(error, Some(path.clone())))
}

fn starting(desired: &Desired) -> String {
    match desired.functions.len().saturating_sub(1) {
        0 => "starting the main function".to_owned(),
        1 => "starting the main function and 1 remote function".to_owned(),
        count => format!("starting the main function and {count} remote functions"),
    }
}

/// The folder by a path that ends in its name: the model is called after it.
fn absolute(model: &Path) -> PathBuf {
    let path = std::path::absolute(model).unwrap_or_else(|_| model.to_owned());
    if path.file_name().is_some() {
        return path;
    }
    // `..` at the end.
    path.canonicalize().unwrap_or(path)
}
