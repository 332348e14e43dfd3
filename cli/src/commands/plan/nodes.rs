//! `remoe plan --nodes`: which nodes to rent for a model.

use super::manifest::{self, Subject};
use super::nodes_report;
use crate::args::Dtype;
use crate::commands::predictor::source::Model;
use crate::commands::profile::default_dtype;
use crate::exit::{CliError, Code};
use crate::output::json;
use crate::output::progress::print_error;
use crate::planning::{self, PlanningArgs};
use crate::workload::ConcurrencyArgs;
use clap::{Args, ValueEnum};
use remoe_fetch::{Known, ModelArgs, Opened};
use remoe_model::{Checkpoint, CheckpointError, ExpertsDtype, Inspection, Outline};
use remoe_planner::{
    BrokenLimit, NodesAnswer, NodesVerdict, Rental, Reserve, ResidentModel, Slo, Spot, rent,
};
use remoe_predictor::Phase;
use remoe_profile::{NodeList, Profile, ResidentWeights, node_shape};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

#[derive(Debug, Args)]
pub(crate) struct NodesArgs {
    /// Recommend nodes from this list (examples/nodes); needs only config.json of the model
    #[arg(long, value_name = "FILE", requires = "model_source", help_heading = "Nodes", conflicts_with_all = [
        "problem", "prompt", "preallocate", "evaluate", "previous", "robust", "remote", "pricing",
        "main_memory_mb", "remote_memory_mb", "max_replicas", "max_groups", "main_cpu", "remote_cpu", "sturdy",
        "explain", "hysteresis", "stands", "measured",
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
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum SpotArg {
    /// None
    Never,
    /// Remote functions
    #[default]
    Remote,
    /// All functions. If the node of a main function is taken back, its streams may break off; other requests are
    /// sent again
    Everything,
}

/// What `plan --nodes` plans for.
pub(super) struct Question<'a> {
    pub(super) args: &'a NodesArgs,
    pub(super) list: &'a Path,
    pub(super) source: Option<&'a ModelArgs>,
    pub(super) dtype: Option<Dtype>,
    pub(super) experts_dtype: Option<ExpertsDtype>,
    pub(super) planning: &'a PlanningArgs,
    pub(super) concurrency: ConcurrencyArgs,
}

/// A model as far as nodes depend on it.
#[derive(Debug, Serialize)]
pub(super) struct KnownModel {
    pub(super) family: String,
    pub(super) parameters: u64,
    /// Those that one token is multiplied with.
    pub(super) active_parameters: u64,
    pub(super) dtype: String,
    /// How weights are counted, for people.
    pub(super) counted: String,
    /// Whether headers of weights were read.
    pub(super) weights_seen: bool,
    /// Whether the engine runs it today.
    pub(super) runs: bool,
    /// Why weights were not seen or it does not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) because: Option<String>,
    pub(super) layers: usize,
    pub(super) moe_layers: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) expert_bytes: u64,
    pub(super) rest_bytes: u64,
    pub(super) total_bytes: u64,
    #[serde(skip)]
    inspection: Inspection,
    #[serde(skip)]
    weights: ResidentWeights,
    #[serde(skip)]
    checkpoint: Option<Arc<Checkpoint>>,
}

/// The answer with what it was made from.
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
    assumptions: &'a [String],
}

/// That nothing keeps the limits, and what comes closest.
#[derive(Serialize)]
struct Infeasible<'a> {
    infeasible: Option<&'a BrokenLimit>,
    model: &'a KnownModel,
    verdict: &'a NodesVerdict,
}

/// Plans nodes and prints the answer. That nothing fits is an answer too, with an exit code of its own.
pub(super) fn run(question: &Question<'_>, as_json: bool) -> Result<ExitCode, CliError> {
    let Some(source) = question.source else {
        return Err(CliError::arguments("--model", "missing --model: --nodes plans nodes for a model"));
    };
    if question.args.manifest && as_json {
        let message = "cannot combine --manifest with --json: one prints YAML, the other JSON; omit one";
        return Err(CliError::arguments("--manifest", message));
    }
    let cold = [
        ("--cold-ttft", question.planning.cold_ttft.is_some()),
        ("--cold-share", question.planning.cold_share.is_some()),
    ];
    if let Some((flag, _)) = cold.into_iter().find(|(_, is_given)| *is_given) {
        let message = format!(
            "cannot combine {flag} with --nodes: the time that a cloud takes to provide a node is unknown; omit the \
             flag: the answer states the share of cold requests and their time to first token on a provisioned node"
        );
        return Err(CliError::arguments(flag, message));
    }
    let list = read_list(question.list)?;
    let model = KnownModel::open(source, question.dtype, question.experts_dtype)?;
    let profile = question.profile(&model)?;
    let rental = question.rental(&list, &model, profile.as_ref())?;
    let answer = rent(&rental).map_err(|error| CliError {
        field: Some(error.field.clone()),
        ..CliError::arguments("", error.to_string())
    })?;
    let assumptions = assumptions(&list, &rental, profile.as_ref());
    let mut out = anstream::stdout().lock();
    if answer.verdict.best.is_none() {
        if as_json {
            let verdict = &answer.verdict;
            json::print(&Infeasible { infeasible: closest(verdict), model: &model, verdict })?;
        } else {
            writeln!(out, "{}", nodes_report::infeasible(&model, &rental, &answer, &assumptions))?;
        }
        print_error(&answer.verdict.sentence);
        return Ok(ExitCode::from(Code::Infeasible as u8));
    }
    if question.args.manifest {
        let subject = Subject {
            source,
            dtype: question.dtype,
            experts_dtype: question.experts_dtype,
            rental: &rental,
            answer: &answer,
            model: &model,
        };
        let Some(manifest) = manifest::of(&subject) else {
            let message = "cannot print a MoEDeployment: no placement that Remoe serves meets the limits; omit \
                           --manifest to see what does";
            print_error(message);
            return Ok(ExitCode::from(Code::Infeasible as u8));
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
            assumptions: &assumptions,
        })?;
    } else {
        writeln!(out, "{}", nodes_report::answer(&model, &rental, &answer, &assumptions))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn read_list(path: &Path) -> Result<NodeList, CliError> {
    NodeList::from_yaml(&planning::read("--nodes", path)?).map_err(|error| {
        let field = Some(error.field.clone()).filter(|field| !field.is_empty());
        let of_file = planning::in_file("--nodes", path, &error);
        CliError { field: field.or(of_file.field.clone()), ..of_file }
    })
}

/// The broken limit that is missed by the smallest factor.
fn closest(verdict: &NodesVerdict) -> Option<&BrokenLimit> {
    let missed = |broken: &BrokenLimit| broken.value / broken.allowed.max(f64::MIN_POSITIVE);
    let broken = verdict.rivals.iter().filter_map(|rival| rival.broken.as_ref());
    broken.min_by(|a, b| missed(a).total_cmp(&missed(b)))
}

impl KnownModel {
    fn open(
        source: &ModelArgs,
        dtype: Option<Dtype>,
        experts_dtype: Option<ExpertsDtype>,
    ) -> Result<Self, CliError> {
        let dtype = dtype.map(Dtype::name);
        Ok(match source.open_or_outline(dtype)? {
            Known::Checkpoint(opened) => {
                let inspection = Inspection { experts_dtype, ..opened.checkpoint.inspect()? };
                let dtype = dtype.unwrap_or_else(|| default_dtype(&inspection));
                Self::seen(&inspection, dtype, *opened)
            }
            Known::Outline { outline, why } => Self::outlined(source, outline, experts_dtype, &why),
        })
    }

    fn seen(inspection: &Inspection, dtype: &str, opened: Opened) -> Self {
        // As weights are held, whatever they are stored as.
        let inspection = inspection.decoded();
        let element = if inspection.dtype == "float32" { 4 } else { 2 };
        let idle = inspection.experts.saturating_sub(inspection.top_k) * inspection.moe_layers.len();
        let looked_up = inspection.vocab_size as u64 * inspection.token_bytes;
        let tied = inspection.outside_bytes < 2 * looked_up;
        let unused = idle as u64 * inspection.expert_bytes + if tied { 0 } else { looked_up };
        Self {
            parameters: inspection.total_bytes / element,
            active_parameters: inspection.total_bytes.saturating_sub(unused) / element,
            counted: counted(format!("all weights in {dtype}"), inspection.experts_dtype),
            weights_seen: true,
            runs: true,
            because: None,
            expert_bytes: inspection.resident_expert_bytes(dtype),
            rest_bytes: inspection.resident_bytes(rest_bytes(&inspection), dtype),
            total_bytes: inspection.resident_total_bytes(dtype),
            weights: ResidentWeights::of(&inspection, dtype),
            checkpoint: Some(Arc::new(opened.checkpoint)),
            ..Self::of(inspection, dtype)
        }
    }

    fn outlined(
        source: &ModelArgs,
        outline: Outline,
        experts_dtype: Option<ExpertsDtype>,
        why: &CheckpointError,
    ) -> Self {
        // A config that the engine takes is refused for its files, never as unsupported. Its weights would be held in
        // the dtype, in whatever form they are stored.
        let runs = !matches!(why, CheckpointError::Unsupported { .. });
        let outline = if runs { outline.in_dtype(&outline.dtype) } else { outline };
        let mut inspection = outline.inspection(&source.model.to_string());
        let mut weights = ResidentWeights::of_outline(&outline);
        if let Some(experts) = experts_dtype {
            let routed = (inspection.moe_layers.len() * inspection.experts) as u64;
            let bytes = experts.bytes(outline.expert_parameters());
            let rest = inspection.total_bytes.saturating_sub(routed.saturating_mul(inspection.expert_bytes));
            inspection.total_bytes = rest.saturating_add(routed.saturating_mul(bytes));
            inspection.expert_bytes = bytes;
            weights.expert_bytes = bytes as f64;
        }
        let dtype = inspection.dtype.clone();
        Self {
            parameters: outline.parameters(),
            active_parameters: outline.active_parameters(),
            counted: counted(outline.weights.meaning(&outline.dtype), experts_dtype),
            weights_seen: false,
            runs,
            because: Some(why.to_string()),
            weights,
            expert_bytes: inspection.expert_bytes,
            rest_bytes: rest_bytes(&inspection),
            total_bytes: inspection.total_bytes,
            ..Self::of(inspection, &dtype)
        }
    }

    /// What both have in common.
    fn of(inspection: Inspection, dtype: &str) -> Self {
        Self {
            family: inspection.family.clone(),
            parameters: 0,
            active_parameters: 0,
            dtype: dtype.to_owned(),
            counted: String::new(),
            weights_seen: false,
            runs: false,
            because: None,
            layers: inspection.layers,
            moe_layers: inspection.moe_layers.len(),
            experts: inspection.experts,
            top_k: inspection.top_k,
            expert_bytes: 0,
            rest_bytes: 0,
            total_bytes: 0,
            weights: ResidentWeights::of(&inspection, dtype),
            inspection,
            checkpoint: None,
        }
    }
}

/// What weights are counted as, for people.
fn counted(weights: String, experts: Option<ExpertsDtype>) -> String {
    match experts {
        None => weights,
        Some(experts) => format!("{weights}, routed experts in {}", experts.name()),
    }
}

/// Everything but routed experts, at rest.
fn rest_bytes(inspection: &Inspection) -> u64 {
    inspection.non_expert_layer_bytes.iter().sum::<u64>() + inspection.outside_bytes
}

impl Question<'_> {
    fn profile(&self, model: &KnownModel) -> Result<Option<Profile>, CliError> {
        let Some(path) = &self.planning.profile else { return Ok(None) };
        if !model.weights_seen {
            let message = "cannot apply --profile: it belongs to weights, and only config.json of this model was read; \
                           omit it, or fetch the weights";
            return Err(CliError::arguments("--profile", message));
        }
        let text = planning::read("--profile", path)?;
        let profile =
            Profile::from_json(&text).map_err(|error| planning::in_file("--profile", path, &error))?;
        // What is quantised beside experts is counted in full here, whatever the profile's main function does.
        let measured = Inspection { dense_dtype: profile.model.dense_dtype, ..model.inspection.clone() };
        let checked = profile.check_model(&measured, &model.dtype);
        checked.map_err(|error| CliError::arguments("--profile", error.to_string()))?;
        Ok(Some(profile))
    }

    /// Mean over layers of the shares of the most used experts, of the second most, ..
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
        let Some(trained) = Model::predictor_of(checkpoint, self.planning.predictor.as_deref())? else {
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
        let resident = |bytes: u64| inspection.resident_bytes(bytes, &model.dtype) as f64;
        let token_bytes = resident(inspection.token_bytes);
        let shapes = list.nodes.iter().map(|node| node_shape(node, &model.weights, profile)).collect();
        Ok(Rental {
            model: ResidentModel {
                layers: model.moe_layers,
                experts: model.experts,
                top_k: model.top_k,
                expert_bytes: model.expert_bytes as f64,
                rest_bytes: model.rest_bytes as f64,
                kv_bytes_per_token: resident(inspection.kv_bytes_per_token),
                token_bytes,
            },
            request: self.planning.workload.request(inspection, self.concurrency.concurrency)?,
            slo: Slo::new(self.planning.ttft.as_secs_f64(), self.planning.tpot.as_secs_f64()),
            arrivals: self.planning.workload.arrivals(None)?,
            starts: Some(known.starts),
            shapes,
            reserve: Reserve::default(),
            spot: match self.args.spot {
                SpotArg::Never => Spot::Never,
                SpotArg::Remote => Spot::Remote,
                SpotArg::Everything => Spot::Everything,
            },
            transport: known.transport.of_rows(token_bytes),
            runtime_bytes: known.memory.main_bytes,
            fallback_bytes: 2.0 * model.top_k as f64 * model.expert_bytes as f64,
            function_bytes: known.memory.function_bytes,
            usage: self.usage(model)?,
        })
    }
}

/// What the figures stand on, for people.
fn assumptions(list: &NodeList, rental: &Rental, profile: Option<&Profile>) -> Vec<String> {
    let request = &rental.request;
    let mut lines = vec![format!(
        "times: requests of {} tokens in and {} out, {}; memory: {} concurrent ones, or one of {} tokens in",
        request.input_tokens,
        request.output_tokens + 1.0,
        if rental.arrivals.is_some() { "at the stated rate" } else { "one at a time" },
        request.concurrency,
        request.max_input_tokens.unwrap_or(request.input_tokens),
    )];
    lines.push(match profile {
        Some(_) => "CPU times come from the profile for every shape; vCPUs beyond its range have no effect"
            .to_owned(),
        None => {
            "no measurements of these nodes: times are conservative estimates from bandwidth, vCPUs and GPU \
                 figures"
                .to_owned()
        }
    });
    if rental.shapes.iter().any(|shape| shape.gpus > 1) {
        lines.push(
            "Remoe uses one GPU per node; other engines use all GPUs as one, without tensor-parallel overhead"
                .to_owned(),
        );
    }
    if rental.usage.is_none() {
        lines.push("expert usage is uniform (no predictor)".to_owned());
    }
    let sleeps = rental.arrivals.as_ref().is_some_and(|arrivals| arrivals.idle_seconds.is_some());
    if let Some(starts) = rental.starts.filter(|_| sleeps) {
        lines.push(format!(
            "functions load {:.1} GB/s at start; node provisioning time is excluded",
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
    let named = [list.source.as_deref(), list.date.as_deref()];
    let named: Vec<&str> = named.into_iter().flatten().collect();
    if !named.is_empty() {
        lines.push(format!("prices: {}; verify them before you rent", named.join(", ")));
    }
    lines
}
