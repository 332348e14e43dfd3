//! `remoe up`: serves models until a signal stops it.

mod args;
mod background_measurement;
mod event;
mod keys;
mod local_gateway;
mod manifest;
mod problem_statement;
mod report;
mod start;
mod summary;

pub(crate) use args::UpArgs;
pub(crate) use manifest::{fill, fill_from_file};

use crate::deployment::DesiredDeployment;
use crate::device::MainDevice;
use crate::exit::CliError;
use crate::output::progress::{Progress, print_warning};
use crate::predictors;
use crate::programs;
use crate::running_commands;
use crate::signals::{TerminationCause, TerminationSignals};
use axum::http::HeaderValue;
use background_measurement::BackgroundMeasurement;
use keys::keys;
use local_gateway::{DRAIN_TIMEOUT, LocalGateway, SHUTDOWN_TIMEOUT, listen};
use remoe_gateway_core::{CostAccounting, Model};
use remoe_local::{
    CostRecorder, ModelFiles, ModelSupervisor, ModelUsage, PlacementFollower, Report, ShutdownSignal,
    UsageHistory,
};
use remoe_otel::{Traces, TracesError};
use remoe_planner::Pricing;
use remoe_predictor::ByPhase;
use report::Printer;
use start::{ModelSettings, StartedModel};
use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Starts the gateway and all models, reports state changes, and drains requests at the end.
pub(crate) async fn run(args: &UpArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    let (keys, key_file) = keys(args)?;
    let secret = secret()?;
    let settings = prepare_models(args, &secret)?;
    // Before this line no function runs, so a signal may simply end this process.
    let mut signals = TerminationSignals::listen()?;
    // A missing program is reported before the long measurement of a profile.
    let device = MainDevice::resolve(args.deployment.device.as_deref(), args.deployment.backend);
    programs::find(args.deployment.backend, &device.name)?;
    let listener = listen(SocketAddr::new(args.host, args.port), "--port")?;
    let prices = args.planning.prices(&device)?;
    let pricing = args.planning.pricing_of(&prices)?;
    let traces = traces()?;
    let gateway =
        LocalGateway::open(args, &settings, (keys, key_file), &prices, listener, (traces.clone(), progress))?;
    let names = gateway.models.iter().map(|model| model.name().to_owned()).collect();
    let _registration = running_commands::register("up", names, Some(format!("http://{}", gateway.address)))
        .inspect_err(|error| {
            print_warning(&format!("`remoe ps` cannot list this process: {}", error.message));
        });
    let (mut supervisors, shutdown) = (JoinSet::new(), watch::Sender::new(None));
    let started = tokio::select! {
        started = start(args, settings, &gateway, (&secret, &pricing), (&mut supervisors, shutdown.subscribe()), as_json, progress) => Some(started),
        cause = signals.next_cause() => match cause {
            TerminationCause::Interrupted if supervisors.is_empty() => return Err(CliError::interrupted()),
            _ => None,
        },
    };
    let result = match started {
        // No request has been served yet, so there is nothing to drain.
        None if supervisors.is_empty() => return Ok(()),
        Some(Err(error)) if supervisors.is_empty() => return Err(error),
        None => Ok(()),
        Some(Err(error)) => Err(error),
        Some(Ok(_measurement)) => tokio::select! {
            Some(ended) = supervisors.join_next() => ended.unwrap_or_else(|error| Err(CliError::runtime(error.to_string()))),
            () = signals.next() => Ok(()),
        },
    };
    let shut_down = async {
        let start = Instant::now();
        gateway.drain(progress).await;
        shutdown.send_replace(Some((DRAIN_TIMEOUT + SHUTDOWN_TIMEOUT).saturating_sub(start.elapsed())));
        while supervisors.join_next().await.is_some() {}
        gateway.end().await;
        traces.shut_down().await;
    };
    tokio::select! {
        () = shut_down => result,
        // Second signal: dropping the supervisors ends the functions.
        () = signals.next() => Err(CliError::interrupted()),
    }
}

/// Configures the export of request spans from the environment. Functions inherit the same environment and configure
/// their own export.
fn traces() -> Result<Traces, CliError> {
    Traces::from_environment("remoe-gateway").map_err(|error| match &error {
        TracesError::Variable { variable, .. } => CliError::arguments(variable, error.to_string()),
        _ => CliError::runtime(error.to_string()),
    })
}

/// Draws the random secret by which main functions accept requests from the gateway and from no other process on this
/// machine.
fn secret() -> Result<String, CliError> {
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut bytes))
        .map_err(|error| CliError::runtime(format!("cannot read random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Inspects the checkpoints of all models and returns their settings.
fn prepare_models(args: &UpArgs, secret: &str) -> Result<Vec<ModelSettings>, CliError> {
    let locations: Vec<_> = args.source.model.iter().chain(&args.further).collect();
    if args.served_model_name.len() > locations.len() {
        let message = format!(
            "invalid --served-model-name: expected one name per model, at most {}, got {}",
            locations.len(),
            args.served_model_name.len()
        );
        return Err(CliError::arguments("--served-model-name", message));
    }
    if locations.len() > 1 && args.deployment.plan.is_some() {
        let message = format!(
            "invalid --plan: a plan places one model, got {} models; serve them separately, or omit the flag",
            locations.len()
        );
        return Err(CliError::arguments("--plan", message));
    }
    let mut models: Vec<ModelSettings> = Vec::new();
    for (number, location) in locations.into_iter().enumerate() {
        let model =
            start::prepare_model(args, location, args.served_model_name.get(number).cloned(), secret)?;
        let name = model.wanted.name();
        if models.iter().any(|other| other.wanted.name() == name) {
            let message = format!(
                "invalid --served-model-name: two models are named {name}; give the flag once per model, in \
                 order"
            );
            return Err(CliError::arguments("--served-model-name", message));
        }
        models.push(model);
    }
    Ok(models)
}

/// Starts the models one after the other, as a profile is measured while nothing else runs. From then on a task in
/// `supervisors` runs each model until `shutdown`. Returns the measurements of models that started on assumed speeds;
/// they run in the background until the returned value is dropped.
async fn start(
    args: &UpArgs,
    settings: Vec<ModelSettings>,
    gateway: &LocalGateway,
    (secret, pricing): (&str, &Pricing),
    (supervisors, shutdown): (&mut JoinSet<Result<(), CliError>>, ShutdownSignal),
    as_json: bool,
    progress: &Arc<Progress>,
) -> Result<Option<BackgroundMeasurement>, CliError> {
    let mut authorization = HeaderValue::from_str(&format!("Bearer {secret}"))
        .map_err(|error| CliError::runtime(format!("cannot create the internal API key: {error}")))?;
    authorization.set_sensitive(true);
    // The start time in milliseconds identifies this run in the ledger.
    let run: Arc<str> = format!("{:x}", CostAccounting::now() / 1_000_000).into();
    let mut unmeasured = Vec::new();
    for (settings, model) in settings.into_iter().zip(&gateway.models) {
        let (cost_accounting, name) = (gateway.cost_accounting.clone(), model.name().to_owned());
        let costs = CostRecorder { cost_accounting, model: name, run: run.clone() };
        let usage = model_usage(args, &settings.wanted, gateway, model)?;
        let remembered = usage.as_ref().and_then(|(usage, _)| usage.remembered.as_ref());
        let StartedModel {
            wanted,
            supervisor,
            status,
            times,
            function_prices,
            cost_task,
            price_sender,
            basis,
            choice,
            measurement,
        } = start::start(args, settings, (&costs, pricing), remembered, as_json, progress).await?;
        let following = usage.map(|(usage, pause)| PlacementFollower {
            usage,
            pause,
            metrics: gateway.prediction_metrics.of_model(model.name()),
        });
        let (unmeasured_model, measured) = measurement.unzip();
        let printer = Printer {
            times,
            address: gateway.address,
            has_key: gateway.has_key,
            choice,
            hourly: function_prices.hourly(),
            is_one_of_several: gateway.models.len() > 1,
            is_measured_later: measured.is_some(),
            as_json,
            progress: progress.clone(),
        };
        let report = Report { wanted, reporter: Box::new(printer) };
        unmeasured.extend(unmeasured_model);
        let model_supervisor = ModelSupervisor {
            model: model.clone(),
            report,
            supervisor,
            authorization: authorization.clone(),
            idle: args.idle,
            remote_idle: args.planning.remote_idle(args.remote_idle)?,
            costs,
            function_prices,
            accounted: cost_task,
            basis,
            pricing: *pricing,
            tell: price_sender,
            following,
            measured,
            next: None,
        };
        let running = model_supervisor.run(status, shutdown.clone());
        supervisors.spawn(async { Ok(running.await?) });
    }
    if unmeasured.is_empty() {
        return Ok(None);
    }
    Ok(Some(BackgroundMeasurement::start(unmeasured, gateway.models.clone(), progress.clone())))
}

/// Opens the usage history of a model, with the time between two revisions of its placement. `None` if the placement is
/// fixed.
fn model_usage(
    args: &UpArgs,
    wanted: &DesiredDeployment,
    gateway: &LocalGateway,
    model: &Model,
) -> Result<Option<(ModelUsage, Duration)>, CliError> {
    let Some(pause) = args.follow.replan.filter(|_| !wanted.moe_layers.is_empty()) else { return Ok(None) };
    let request = args.planning.workload.request(&wanted.inspection, None)?;
    let tokens = ByPhase { prefill: request.input_tokens, decode: request.output_tokens };
    let predictor = args.planning.predictor.as_deref();
    let follow = &args.follow;
    let history = UsageHistory {
        folder: follow.experience.as_deref(),
        folder_bytes: follow.experience_bytes,
        forgets: follow.forget,
    };
    let predictor_model = predictors::PredictorModel::of(wanted.checkpoint.clone())?;
    let trained = predictor_model.predictor(predictor)?;
    let files = ModelFiles {
        fingerprint: predictor_model.fingerprint,
        embedding: predictor_model.embedding,
        trained,
    };
    let usage = ModelUsage::open(wanted, history, files, tokens, &gateway.prediction_metrics)?;
    model.set_usage_observer(usage.observer());
    Ok(Some((usage, pause)))
}
