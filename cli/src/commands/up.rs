//! `remoe up`: models as a service, until it is asked to end.

mod args;
mod event;
mod front;
mod keys;
mod manifest;
mod measuring;
mod report;
mod start;
mod statement;
mod summary;

pub(crate) use args::UpArgs;
pub(crate) use manifest::{fill, fill_from_file};

use crate::deployment::DesiredDeployment;
use crate::device::MainDevice;
use crate::exit::CliError;
use crate::output::progress::{Progress, print_warning};
use crate::predictors;
use crate::programs;
use crate::running;
use crate::signals::{EndSignals, Ended};
use axum::http::HeaderValue;
use front::{DRAIN, END, LocalGateway, listen};
use keys::keys;
use measuring::Measuring;
use remoe_gateway_core::{CostAccounting, Model};
use remoe_local::{
    CostRecorder, ModelFiles, ModelSupervisor, ModelUsage, PlacementFollower, Report, ShutdownSignal,
    UsageHistory,
};
use remoe_otel::{Traces, TracesError};
use remoe_planner::Pricing;
use remoe_predictor::ByPhase;
use report::Printer;
use start::{ModelSettings, Started};
use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Starts everything, reports what changes, and drains at the end.
pub(crate) async fn run(args: &UpArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    let (keys, key_file) = keys(args)?;
    let secret = secret()?;
    let asked = ask(args, &secret)?;
    // Models that are fetched until here end with this process, as nothing runs yet.
    let mut signals = EndSignals::catch()?;
    // What will be missing is said before a profile is measured.
    let device = MainDevice::resolve(args.deployment.device.as_deref(), args.deployment.backend);
    programs::find(args.deployment.backend, &device.name)?;
    let listener = listen(SocketAddr::new(args.host, args.port), "--port")?;
    let prices = args.planning.prices(&device)?;
    let pricing = args.planning.pricing_of(&prices)?;
    let traces = traces()?;
    let front =
        LocalGateway::open(args, &asked, (keys, key_file), &prices, listener, (traces.clone(), progress))?;
    let names = front.models.iter().map(|model| model.name().to_owned()).collect();
    let _registered =
        running::register("up", names, Some(format!("http://{}", front.address))).inspect_err(|error| {
            print_warning(&format!("`remoe ps` cannot list this process: {}", error.message));
        });
    let (mut kept, end) = (JoinSet::new(), watch::Sender::new(None));
    let started = tokio::select! {
        started = start(args, asked, &front, (&secret, &pricing), (&mut kept, end.subscribe()), as_json, progress) => Some(started),
        ended = signals.next_kind() => match ended {
            Ended::Interrupted if kept.is_empty() => return Err(CliError::interrupted()),
            _ => None,
        },
    };
    let served = match started {
        // No request has been served yet, so there is nothing to drain.
        None if kept.is_empty() => return Ok(()),
        Some(Err(error)) if kept.is_empty() => return Err(error),
        None => Ok(()),
        Some(Err(error)) => Err(error),
        Some(Ok(_measuring)) => tokio::select! {
            Some(ended) = kept.join_next() => ended.unwrap_or_else(|error| Err(CliError::runtime(error.to_string()))),
            () = signals.next() => Ok(()),
        },
    };
    let drained = async {
        let begun = Instant::now();
        front.drain(progress).await;
        end.send_replace(Some((DRAIN + END).saturating_sub(begun.elapsed())));
        while kept.join_next().await.is_some() {}
        front.end().await;
        traces.shut_down().await;
    };
    tokio::select! {
        () = drained => served,
        // Asked twice: dropping the supervisors ends the functions.
        () = signals.next() => Err(CliError::interrupted()),
    }
}

/// Where spans of requests go, as the environment says. Functions have it as well, and look for themselves.
fn traces() -> Result<Traces, CliError> {
    Traces::from_environment("remoe-gateway").map_err(|error| match &error {
        TracesError::Variable { variable, .. } => CliError::arguments(variable, error.to_string()),
        _ => CliError::runtime(error.to_string()),
    })
}

/// Draws the secret by which main functions let in the gateway, and no other process on this machine.
fn secret() -> Result<String, CliError> {
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut bytes))
        .map_err(|error| CliError::runtime(format!("cannot read random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Reads the facts of all models.
fn ask(args: &UpArgs, secret: &str) -> Result<Vec<ModelSettings>, CliError> {
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
    let mut asked: Vec<ModelSettings> = Vec::new();
    for (number, location) in locations.into_iter().enumerate() {
        let one = start::ask(args, location, args.served_model_name.get(number).cloned(), secret)?;
        let name = one.wanted.name();
        if asked.iter().any(|other| other.wanted.name() == name) {
            let message = format!(
                "invalid --served-model-name: two models are named {name}; give the flag once per model, in \
                 order"
            );
            return Err(CliError::arguments("--served-model-name", message));
        }
        asked.push(one);
    }
    Ok(asked)
}

/// Starts the models, one after the other: profiles are measured on a quiet machine. Each is kept by a task
/// of its own from then on, until `end`. What is not measured yet is measured beside them while the result is kept.
async fn start(
    args: &UpArgs,
    asked: Vec<ModelSettings>,
    front: &LocalGateway,
    (secret, pricing): (&str, &Pricing),
    (kept, end): (&mut JoinSet<Result<(), CliError>>, ShutdownSignal),
    as_json: bool,
    progress: &Arc<Progress>,
) -> Result<Option<Measuring>, CliError> {
    let mut authorization = HeaderValue::from_str(&format!("Bearer {secret}"))
        .map_err(|error| CliError::runtime(format!("cannot create the internal API key: {error}")))?;
    authorization.set_sensitive(true);
    // No two runs begin in the same millisecond and write the same ledger.
    let run: Arc<str> = format!("{:x}", CostAccounting::now() / 1_000_000).into();
    let mut unmeasured = Vec::new();
    for (asked, model) in asked.into_iter().zip(&front.models) {
        let (cost_accounting, name) = (front.cost_accounting.clone(), model.name().to_owned());
        let costs = CostRecorder { cost_accounting, model: name, run: run.clone() };
        let usage = usage(args, &asked.wanted, front, model)?;
        let remembered = usage.as_ref().and_then(|(usage, _)| usage.remembered.as_ref());
        let Started {
            wanted,
            supervisor,
            status,
            times,
            function_prices,
            accounted,
            tell,
            basis,
            choice,
            measurement,
        } = start::start(args, asked, (&costs, pricing), remembered, as_json, progress).await?;
        let following = usage.map(|(usage, pause)| PlacementFollower {
            usage,
            pause,
            metrics: front.prediction_metrics.of_model(model.name()),
        });
        let (subject, measured) = measurement.unzip();
        let printer = Printer {
            times,
            address: front.address,
            has_key: front.has_key,
            choice,
            hourly: function_prices.hourly(),
            is_one_of_several: front.models.len() > 1,
            is_measured_later: measured.is_some(),
            as_json,
            progress: progress.clone(),
        };
        let report = Report { wanted, reporter: Box::new(printer) };
        unmeasured.extend(subject);
        let model_supervisor = ModelSupervisor {
            model: model.clone(),
            report,
            supervisor,
            authorization: authorization.clone(),
            idle: args.idle,
            remote_idle: args.planning.remote_idle(args.remote_idle)?,
            costs,
            function_prices,
            accounted,
            basis,
            pricing: *pricing,
            tell,
            following,
            measured,
            next: None,
        };
        let kept_until = model_supervisor.run(status, end.clone());
        kept.spawn(async { Ok(kept_until.await?) });
    }
    if unmeasured.is_empty() {
        return Ok(None);
    }
    Ok(Some(Measuring::start(unmeasured, front.models.clone(), progress.clone())))
}

/// Opens the learner of a model's usage, with the time between two revisions; `None` if its placement stays.
fn usage(
    args: &UpArgs,
    wanted: &DesiredDeployment,
    front: &LocalGateway,
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
    let known = predictors::PredictorModel::of(wanted.checkpoint.clone())?;
    let trained = known.predictor(predictor)?;
    let files = ModelFiles { fingerprint: known.fingerprint, embedding: known.embedding, trained };
    let usage = ModelUsage::open(wanted, history, files, tokens, &front.prediction_metrics)?;
    model.set_usage_observer(usage.observer());
    Ok(Some((usage, pause)))
}
