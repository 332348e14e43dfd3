//! `remoe eval`: the experiments of the Remoe paper on published models and on a model of one's own, and the map
//! of who is cheapest where.

mod files;
mod inputs;
mod map;
pub(crate) mod perplexity;
mod regret;
mod replicas;
mod report;
mod tables;
mod workloads;
mod worth;

use crate::exit::{CliError, CliExitCode};
use crate::output::progress::bar;
use crate::output::{folders, json};
use clap::{Args, ValueEnum};
use inputs::Inputs;
use map::MapReport;
use remoe_experiments::{
    CpuScaling, ExperimentError, Machine, REQUESTS, Regret, ReplicaTrial, Routing, Scenario, Shape,
    sensitivity,
};
use remoe_hub::ModelArgs;
use remoe_planner::PlanError;
use report::{Assumptions, Report, ScenarioReport, SensitivityReport};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use worth::WorthReport;

/// Arguments of `remoe eval`.
#[derive(Debug, Args)]
#[command(mut_arg("model_positional", |model| model.help(
    "Model to evaluate beside the published ones, optional, here or as --model: a Hugging Face folder, \
     hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX or https://HOST/PATH"
)))]
pub(crate) struct EvalArgs {
    /// Folder for the tables, and for every figure as CSV and SVG
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Price list (examples/pricing), in YAML or JSON [default: AWS Lambda's $0.0000166667 per GB second; GPU memory
    /// costs 3 times that, as in the Remoe paper]
    #[arg(long, value_name = "FILE")]
    pricing: Option<PathBuf>,
    /// Model to evaluate beside the published ones
    #[command(flatten)]
    source: Option<ModelArgs>,
    /// Profile of the model from `remoe profile` [default: an assumed server like that of the Remoe paper, with two
    /// Xeon Gold 6348 and an A100]
    #[arg(long, value_name = "FILE", requires = "model_source")]
    profile: Option<PathBuf>,
    /// Activation records of the model; 50 requests are sampled from them [default: synthetic]. With several files,
    /// `--only prediction` evaluates each file, all of them mixed, and all in sequence, as if the topic changed hourly
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "model_source")]
    records: Vec<PathBuf>,
    /// Folder of a predictor from `remoe predictor build` [default: MODEL/predictor]
    #[arg(long, value_name = "DIR", requires = "records")]
    predictor: Option<PathBuf>,
    /// Node list (examples/nodes), for the map of the cheapest placement over models and request rates
    #[arg(long, value_name = "FILE")]
    nodes: Option<PathBuf>,
    /// Run no experiments, but measure the model's perplexity on this text, with experts in the compute dtype and
    /// quantised to int8, int4 and MXFP4
    #[arg(long, value_name = "FILE", requires = "model_source", conflicts_with_all = ["out", "pricing", "profile", "records", "nodes", "only"])]
    pub(crate) perplexity: Option<PathBuf>,
    /// Problem files (`remoe plan --problem`) for --only regret, beside the published models
    #[arg(long = "problem", value_name = "FILE", num_args = 1..)]
    problems: Vec<PathBuf>,
    /// Part to run [default: figures, and map with --nodes]
    #[arg(long, value_enum, value_name = "WHAT")]
    only: Option<EvalPart>,
}

/// Seed of the trace that replicas follow.
const TRACE: u64 = 1;

/// A part of the evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EvalPart {
    /// The figures of the Remoe paper
    Figures,
    /// The map, at the prices of --pricing and on the nodes of --nodes
    Map,
    /// Cost of requests from --records, planned with each predictor
    Prediction,
    /// Autoscaling of replicas under bursts and topic changes, against fixed replicas and concurrency scaling
    Replicas,
    /// Regret of plans that were made from wrong figures: broken limits, and extra cost over the plan for the true
    /// figures
    Regret,
}

/// Results of the parts that were asked for.
#[derive(Debug, Serialize)]
struct EvalResults {
    #[serde(flatten)]
    figures: Option<Report>,
    #[serde(skip_serializing_if = "Option::is_none")]
    map: Option<MapReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prediction: Option<Vec<WorthReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    replicas: Option<Vec<ReplicaTrial>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    regret: Option<Regret>,
}

/// Runs every experiment, prints tables, writes files.
pub(crate) fn run(args: &EvalArgs, as_json: bool) -> Result<(), CliError> {
    if args.only == Some(EvalPart::Map) && args.nodes.is_none() && args.pricing.is_none() {
        let message = "missing --pricing or --nodes: --only map needs prices";
        return Err(CliError::arguments("--only", message));
    }
    if args.only == Some(EvalPart::Prediction) && args.records.is_empty() {
        let message = "missing --records: --only prediction needs files of `remoe record`";
        return Err(CliError::arguments("--records", message));
    }
    if args.only != Some(EvalPart::Regret) && !args.problems.is_empty() {
        let message = "cannot apply --problem: requires --only regret";
        return Err(CliError::arguments("--problem", message));
    }
    let inputs = Inputs::read(args)?;
    args.out.iter().try_for_each(|folder| folders::make("--out", folder))?;
    let EvalResults { figures, map, prediction, replicas, regret } = EvalResults::of(args, &inputs)?;
    let figures = figures.map(|report| (tables::text(&report), report));
    if let Some(folder) = &args.out {
        figures.iter().try_for_each(|(tables, report)| files::write(folder, report, tables))?;
        map.iter().try_for_each(|map| map.write(folder))?;
        prediction.iter().try_for_each(|worths| worth::write(folder, worths))?;
        replicas.iter().try_for_each(|ways| replicas::write(folder, ways))?;
        regret.iter().try_for_each(|regret| regret::write(folder, regret))?;
    }
    if as_json {
        let figures = figures.map(|(_, report)| report);
        json::print(&EvalResults { figures, map, prediction, replicas, regret })?;
        return Ok(());
    }
    let map = map.map(|map| map.text());
    let prediction = prediction.map(|worths| worth::text(&worths));
    let replicas = replicas.map(|ways| replicas::text(&ways));
    let regret = regret.map(|regret| regret::text(&regret));
    let figures = figures.map(|(tables, _)| tables);
    let texts: Vec<String> = [figures, map, prediction, replicas, regret].into_iter().flatten().collect();
    writeln!(anstream::stdout().lock(), "{}", texts.join("\n\n"))?;
    Ok(())
}

impl EvalResults {
    fn of(args: &EvalArgs, inputs: &Inputs) -> Result<Self, CliError> {
        let has_figures = matches!(args.only, None | Some(EvalPart::Figures));
        let has_map = match args.only {
            Some(only) => only == EvalPart::Map,
            None => args.nodes.is_some(),
        };
        Ok(Self {
            figures: has_figures.then(|| evaluate(inputs)).transpose()?,
            map: has_map.then(|| MapReport::of(args, inputs)).transpose()?,
            prediction: (args.only == Some(EvalPart::Prediction))
                .then(|| worth::worths(inputs))
                .transpose()?,
            replicas: (args.only == Some(EvalPart::Replicas)).then(|| remoe_experiments::replicas(TRACE)),
            regret: (args.only == Some(EvalPart::Regret))
                .then(|| regret::measured(args, inputs))
                .transpose()?,
        })
    }
}

fn evaluate(inputs: &Inputs) -> Result<Report, CliError> {
    let routing = Routing::default();
    let mut scenarios = Vec::new();
    for shape in Shape::published_models() {
        let requests = routing.requests(&shape, REQUESTS, remoe_experiments::INPUT_TOKENS);
        for scaling in CpuScaling::ALL {
            let machine = Machine::reference(scaling);
            let scenario = Scenario::assumed(shape.clone(), &machine, inputs.setting, requests.clone());
            scenarios.push((scenario, None));
        }
    }
    let own = inputs.own_scenarios(routing).into_iter();
    scenarios.extend(own.map(|scenario| (scenario, inputs.predict_seconds())));
    let shapes = Shape::published_models();
    let bar = bar(scenarios.len() + shapes.len(), "experiments");
    let reports = scenarios.iter().map(|(scenario, predict_seconds)| {
        bar.set_message(scenario.name.clone());
        let report = ScenarioReport::of(scenario, *predict_seconds);
        bar.inc(1);
        report
    });
    let scenarios = reports.collect::<Result<Vec<_>, _>>()?;
    let mut sensitivities = Vec::new();
    for shape in shapes {
        bar.set_message(format!("varying the assumptions of {}", shape.name));
        let rows = sensitivity(&shape, inputs.setting, routing, remoe_experiments::INPUT_TOKENS)?;
        sensitivities.push(SensitivityReport { model: shape.name, rows });
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Report { assumptions: Assumptions::of(inputs, routing), scenarios, sensitivities })
}

impl From<ExperimentError> for CliError {
    fn from(error: ExperimentError) -> Self {
        let message = error.to_string();
        match error {
            ExperimentError::Plan { error: PlanError::Infeasible(_), .. } => {
                Self { code: CliExitCode::Infeasible, ..Self::runtime(message) }
            }
            ExperimentError::Problem { .. } => Self::arguments("--profile", message),
            ExperimentError::NoRequests { .. } | ExperimentError::Shares { .. } => {
                Self::arguments("--records", message)
            }
            ExperimentError::Plan { .. } => Self::runtime(message),
        }
    }
}
