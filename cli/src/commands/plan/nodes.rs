//! `remoe plan --nodes`: recommends nodes to rent for a model.

use super::manifest::{self, ManifestInputs};
use super::nodes_model::{KnownModel, WeightDtypes};
use super::nodes_prices::{ApiCost, ApiPrice, Today, price_warnings};
use super::nodes_report::{self, ReportContext};
use crate::exit::{CliError, CliExitCode};
use crate::files;
use crate::output::json;
use crate::output::progress::{print_error, print_warning};
use crate::planning::PlanningArgs;
use crate::predictors::PredictorModel;
use crate::workload::ConcurrencyArgs;
use clap::{Args, ValueEnum};
use remoe_hardware::{Commitment, NodeList, Profile, node_shapes};
use remoe_hub::ModelArgs;
use remoe_model::{ExpertsDtype, Inspection};
use remoe_planner::{
    ArrangementEvaluation, BrokenLimit, FieldError, NodesAnswer, NodesComparison, Rental, Reserve, Slo,
    SpotPolicy, cheapest_nodes, rent,
};
use remoe_predictor::Phase;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(crate) struct NodesArgs {
    /// Recommend nodes from this list (examples/nodes); needs only config.json of the model
    #[arg(long, value_name = "FILE", requires = "model_source", help_heading = "Nodes", conflicts_with_all = [
        "problem", "prompt", "preallocate", "evaluate", "previous", "robust", "remote", "pricing",
        "main_memory_mb", "remote_memory_mb", "max_replicas", "max_groups", "main_cpu", "remote_cpu", "sturdy",
        "explain", "hysteresis", "stands", "deadline", "measured", "kv_cache_dtype",
    ])]
    pub(crate) nodes: Option<PathBuf>,
    /// Print the recommendation as a MoEDeployment manifest (YAML), for `remoe up --file` or a cluster
    #[arg(long, requires = "nodes", help_heading = "Nodes")]
    manifest: bool,
    /// Functions allowed on spot nodes
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "WHAT",
        requires = "nodes",
        help_heading = "Nodes"
    )]
    spot: SpotArg,
    /// Price of nodes; shapes without a price for the commitment stay on demand
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "TERM",
        requires = "nodes",
        help_heading = "Nodes"
    )]
    commitment: CommitmentArg,
    /// Prices of an API provider in dollars per million input and output tokens, such as 0.22/0.88: prints what the
    /// same requests cost there
    #[arg(long, value_name = "IN/OUT", requires = "nodes", help_heading = "Nodes")]
    api_price: Option<ApiPrice>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum CommitmentArg {
    /// Prices on demand
    #[default]
    OnDemand,
    /// One year
    OneYear,
    /// Three years
    ThreeYears,
}

impl From<CommitmentArg> for Commitment {
    fn from(argument: CommitmentArg) -> Self {
        match argument {
            CommitmentArg::OnDemand => Self::OnDemand,
            CommitmentArg::OneYear => Self::OneYear,
            CommitmentArg::ThreeYears => Self::ThreeYears,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum SpotArg {
    /// No function
    #[default]
    Never,
    /// Remote functions
    Remote,
    /// All functions. If the node of a main function is taken back, its streams may break off; other requests are
    /// sent again
    Everything,
}

/// Inputs of `plan --nodes`.
pub(super) struct NodesInputs<'a> {
    pub(super) args: &'a NodesArgs,
    pub(super) list: &'a Path,
    pub(super) source: Option<&'a ModelArgs>,
    pub(super) forms: WeightDtypes,
    pub(super) planning: &'a PlanningArgs,
    pub(super) concurrency: ConcurrencyArgs,
}

/// Result of the command as JSON, with its inputs.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a KnownModel,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    date: Option<&'a str>,
    slo: Slo,
    #[serde(flatten)]
    answer: &'a NodesAnswer,
    #[serde(skip_serializing_if = "Option::is_none")]
    api: Option<ApiCost>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    quantised: &'a [QuantisedNodes],
    assumptions: &'a [String],
}

/// Cheapest nodes with quantised experts, whose answers differ slightly.
#[derive(Debug, Serialize)]
pub(super) struct QuantisedNodes {
    pub(super) experts_dtype: ExpertsDtype,
    /// Cheapest arrangement. `None` if none meets the limits.
    pub(super) cheapest: Option<ArrangementEvaluation>,
}

/// Result as JSON if no arrangement meets the limits, with the one that comes closest.
#[derive(Serialize)]
struct InfeasibleReport<'a> {
    infeasible: Option<&'a BrokenLimit>,
    model: &'a KnownModel,
    verdict: &'a NodesComparison,
}

/// Plans nodes, and prints the recommendation. An infeasible problem has its own exit code.
pub(super) fn run(inputs: &NodesInputs<'_>, as_json: bool) -> Result<ExitCode, CliError> {
    let Some(source) = inputs.source else {
        return Err(CliError::arguments("--model", "missing --model: --nodes plans nodes for a model"));
    };
    if inputs.args.manifest && as_json {
        let message = "cannot combine --manifest with --json: one prints YAML, the other JSON; omit one";
        return Err(CliError::arguments("--manifest", message));
    }
    let cold_limits = [
        ("--cold-ttft", inputs.planning.cold_ttft.is_some()),
        ("--cold-share", inputs.planning.cold_share.is_some()),
    ];
    if let Some((flag, _)) = cold_limits.into_iter().find(|(_, is_given)| *is_given) {
        let message = format!(
            "cannot combine {flag} with --nodes: the time that a cloud takes to provide a node is unknown; omit the \
             flag: the answer states the share of cold requests and their time to first token on a provisioned node"
        );
        return Err(CliError::arguments(flag, message));
    }
    if inputs.planning.quantile.is_some() && inputs.planning.workload.arrivals(None)?.is_none() {
        let message =
            "cannot apply --quantile: without arrivals times are means; state arrivals in --workload";
        return Err(CliError::arguments("--quantile", message));
    }
    let has_idle_window =
        inputs.planning.workload.arrivals(None)?.is_some_and(|arrivals| arrivals.idle_seconds.is_some());
    if has_idle_window && inputs.args.commitment != CommitmentArg::OnDemand {
        let message = "cannot combine --commitment with an idle window: committed nodes cost the same while they are \
                       idle; omit idleSeconds, or the flag";
        return Err(CliError::arguments("--commitment", message));
    }
    let list = read_list(inputs.list)?;
    let model = KnownModel::open(source, inputs.forms)?;
    let profile = inputs.profile(&model)?;
    let rental = inputs.rental(&list, &model, profile.as_ref())?;
    let answer = rent(&rental).map_err(rental_error)?;
    let assumptions = assumptions(&list, inputs.args, &rental, profile.as_ref());
    let quantised = inputs.quantised(&list, &model, profile.as_ref())?;
    let api = inputs.args.api_price.map(|price| price.cost(&rental, &answer));
    for warning in price_warnings(&list, inputs.args.commitment.into(), &answer, Today::now()) {
        print_warning(&warning);
    }
    let mut out = anstream::stdout().lock();
    if answer.verdict.best.is_none() {
        if as_json {
            let verdict = &answer.verdict;
            json::print(&InfeasibleReport {
                infeasible: closest_violation(verdict),
                model: &model,
                verdict,
            })?;
        } else {
            writeln!(
                out,
                "{}",
                nodes_report::infeasible(&model, &rental, &answer, &quantised, &assumptions)
            )?;
        }
        print_error(&answer.verdict.sentence);
        return Ok(ExitCode::from(CliExitCode::Infeasible as u8));
    }
    if inputs.args.manifest {
        let manifest_inputs =
            ManifestInputs { source, forms: inputs.forms, rental: &rental, answer: &answer, model: &model };
        let Some(manifest) = manifest::format_manifest(&manifest_inputs) else {
            let message = "cannot print a MoEDeployment: no placement that Remoe serves meets the limits; omit \
                           --manifest to see what does";
            print_error(message);
            return Ok(ExitCode::from(CliExitCode::Infeasible as u8));
        };
        write!(out, "{manifest}")?;
        return Ok(ExitCode::SUCCESS);
    }
    if as_json {
        json::print(&Report {
            model: &model,
            source: list.source.as_deref(),
            date: list.date.as_deref(),
            slo: rental.slo,
            answer: &answer,
            api,
            quantised: &quantised,
            assumptions: &assumptions,
        })?;
    } else {
        let context = ReportContext { api, quantised: &quantised, assumptions: &assumptions };
        writeln!(out, "{}", nodes_report::answer(&model, &rental, &answer, &context))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn rental_error(error: FieldError) -> CliError {
    CliError { field: Some(error.field.clone()), ..CliError::arguments("", error.to_string()) }
}

fn read_list(path: &Path) -> Result<NodeList, CliError> {
    NodeList::from_yaml(&files::read("--nodes", path)?).map_err(|error| {
        let field = Some(error.field.clone()).filter(|field| !field.is_empty());
        let file_error = files::file_error("--nodes", path, &error);
        CliError { field: field.or(file_error.field.clone()), ..file_error }
    })
}

/// Returns the violated limit that is exceeded by the smallest factor.
fn closest_violation(verdict: &NodesComparison) -> Option<&BrokenLimit> {
    let excess = |broken: &BrokenLimit| broken.value / broken.allowed.max(f64::MIN_POSITIVE);
    let broken = verdict.rivals.iter().filter_map(|rival| rival.broken.as_ref());
    broken.min_by(|a, b| excess(a).total_cmp(&excess(b)))
}

impl NodesInputs<'_> {
    /// Finds the cheapest nodes with quantised experts. Returns an empty list if flags state the dtype of experts.
    fn quantised(
        &self,
        list: &NodeList,
        model: &KnownModel,
        profile: Option<&Profile>,
    ) -> Result<Vec<QuantisedNodes>, CliError> {
        // A profile is valid only for the dtype of experts with which it was measured.
        let smaller = model.quantised().filter(|_| profile.is_none() && !self.args.manifest);
        let cheapest = smaller.map(|(experts_dtype, model)| {
            let rental = self.rental(list, &model, None)?;
            let cheapest = cheapest_nodes(&rental).map_err(rental_error)?;
            Ok(QuantisedNodes { experts_dtype, cheapest })
        });
        cheapest.collect()
    }

    fn profile(&self, model: &KnownModel) -> Result<Option<Profile>, CliError> {
        let Some(path) = &self.planning.profile else { return Ok(None) };
        if !model.weights_seen {
            let message = "cannot apply --profile: it belongs to weights, and only config.json of this model was read; \
                           omit it, or fetch the weights";
            return Err(CliError::arguments("--profile", message));
        }
        let text = files::read("--profile", path)?;
        let profile =
            Profile::from_json(&text).map_err(|error| files::file_error("--profile", path, &error))?;
        // Ignores the profile's dtype of other weights, because nodes are planned with these weights in full.
        let measured = Inspection { dense_dtype: profile.model.dense_dtype, ..model.inspection.clone() };
        let checked = profile.check_model(&measured, &model.dtype);
        checked.map_err(|error| CliError::arguments("--profile", error.to_string()))?;
        Ok(Some(profile))
    }

    /// Returns the expert usage by rank: the mean over layers of the most used expert's share, then the second's, and so on.
    fn usage(&self, model: &KnownModel) -> Result<Option<Vec<f64>>, CliError> {
        let Some(checkpoint) = &model.checkpoint else {
            return match &self.planning.predictor {
                None => Ok(None),
                Some(_) => {
                    let message = "cannot apply --predictor: it belongs to weights, and only config.json of this model \
                                   was read; omit it, or fetch the weights";
                    Err(CliError::arguments("--predictor", message))
                }
            };
        };
        let Some(trained) = PredictorModel::predictor_of(checkpoint, self.planning.predictor.as_deref())?
        else {
            return Ok(None);
        };
        let mut rows = trained.popularity().shares(Phase::Prefill).to_rows();
        let mut usage = vec![0.0; model.experts];
        for row in &mut rows {
            row.sort_by(|a, b| b.total_cmp(a));
            usage.iter_mut().zip(row.iter()).for_each(|(sum, share)| *sum += share);
        }
        let count = rows.len().max(1) as f64;
        Ok(Some(usage.into_iter().map(|sum| sum / count).collect()))
    }

    fn rental(
        &self,
        list: &NodeList,
        model: &KnownModel,
        profile: Option<&Profile>,
    ) -> Result<Rental, CliError> {
        let inspection = &model.inspection;
        let assumed = Profile::prior(inspection, &model.dtype);
        let known = profile.unwrap_or(&assumed);
        let request = self.planning.workload.request(inspection, self.concurrency.concurrency)?;
        let (request_tokens, context) =
            (request.input_tokens + request.output_tokens + 1.0, inspection.served_context());
        if request_tokens > context as f64 {
            let message = format!(
                "cannot plan requests of {request_tokens} tokens: the context of this model has {context}; lower \
                 typicalInputTokens or typicalOutputTokens"
            );
            return Err(CliError::arguments("--workload", message));
        }
        let resident = model.resident();
        let token_bytes = resident.token_bytes;
        Ok(Rental {
            model: resident,
            request,
            slo: Slo {
                quantile: self.planning.quantile,
                ..Slo::new(self.planning.ttft.as_secs_f64(), self.planning.tpot.as_secs_f64())
            },
            arrivals: self.planning.workload.arrivals(None)?,
            starts: Some(known.starts),
            shapes: node_shapes(list, self.args.commitment.into(), &model.weights, profile),
            reserve: Reserve::default(),
            spot: match self.args.spot {
                SpotArg::Never => SpotPolicy::Never,
                SpotArg::Remote => SpotPolicy::Remote,
                SpotArg::Everything => SpotPolicy::Everything,
            },
            transport: known.transport.of_rows(token_bytes),
            runtime_bytes: known.memory.main_bytes,
            fallback_bytes: 2.0 * model.top_k as f64 * model.expert_bytes as f64,
            function_bytes: known.function_bytes(inspection),
            usage: self.usage(model)?,
        })
    }
}

/// Lists the assumptions of the recommendation.
fn assumptions(list: &NodeList, args: &NodesArgs, rental: &Rental, profile: Option<&Profile>) -> Vec<String> {
    let request = &rental.request;
    let load = match rental.arrivals {
        Some(_) => "at the stated rate".to_owned(),
        None => format!("{} in flight all the time (--concurrency)", request.concurrency),
    };
    let mut lines = vec![format!(
        "requests of {} tokens in and {} out, {load}; memory also holds one of {} tokens in",
        request.input_tokens,
        request.output_tokens + 1.0,
        request.max_input_tokens.unwrap_or(request.input_tokens),
    )];
    lines.push(match profile {
        Some(_) => "CPU times come from the profile for every shape; vCPUs beyond its range have no effect"
            .to_owned(),
        None => "no measurements of these nodes: times come from a model of bandwidth, operations and launches, whose \
                 decode speeds are within a factor of 2 of published measurements (docs/planning.md)"
            .to_owned(),
    });
    if rental.shapes.iter().any(|shape| shape.gpus > 1) {
        lines.push("Remoe uses one GPU per node; other engines divide every layer over several".to_owned());
    }
    if rental.usage.is_none() {
        lines.push("expert usage is uniform (no predictor)".to_owned());
    }
    let has_idle_window = rental.arrivals.as_ref().is_some_and(|arrivals| arrivals.idle_seconds.is_some());
    if let Some(starts) = rental.starts.filter(|_| has_idle_window) {
        lines.push(format!(
            "functions load {:.3} GB/s at start; node provisioning time is excluded",
            starts.main.load_bytes_per_second / 1e9,
        ));
    }
    let reserve = &rental.reserve;
    lines.push(format!(
        "reserved per node: {:.0} GB and {:.0} % of memory, {:.0} % of GPU memory, {} and {:.0} % of vCPUs",
        reserve.memory_bytes / 1e9,
        100.0 * reserve.memory_share,
        100.0 * reserve.gpu_memory_share,
        reserve.vcpus,
        100.0 * reserve.vcpu_share,
    ));
    let price_source = [list.source.as_deref(), list.date.as_deref()];
    let price_source: Vec<&str> = price_source.into_iter().flatten().collect();
    if !price_source.is_empty() {
        let kind = match args.commitment {
            CommitmentArg::OnDemand => "on demand",
            CommitmentArg::OneYear => "one year, on demand where a shape has no such price",
            CommitmentArg::ThreeYears => "three years, on demand where a shape has no such price",
        };
        lines.push(format!("prices: {}, {kind}; verify them before you rent", price_source.join(", ")));
    }
    lines
}
