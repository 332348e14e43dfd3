//! A plan, and the forms in which it is read.

pub mod listing;

use crate::error::FieldError;
use crate::model::Model;
use crate::problem::sizes::first_at_least;
use crate::problem::{Problem, VcpuRange};
use crate::read::{IgnoredJson, from_json};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, json_schema};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize, Serializer};

/// Where every expert lives, and how large the functions are.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Memory of the main function's experts, in bytes.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
    /// vCPUs, where they are a decision of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub main_vcpus: Option<f64>,
    /// The Mixture-of-Experts layers by position: with `groups` what is remote of each, without them also
    /// the function that hosts it.
    pub layers: Vec<LayerPlan>,
    /// Functions that host experts of several layers; no expert is in two of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
}

/// Functions that host the same experts and replace each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Experts of each layer by position, ascending.
    pub experts: Vec<Vec<u32>>,
    /// Memory of each replica in bytes.
    pub memory_bytes: f64,
    /// vCPUs of each replica, where they are a decision of their own.
    pub vcpus: Option<f64>,
    /// Functions that are alike.
    pub replicas: u32,
    /// Seconds without a request that uses any of its experts after which it ends by itself, until the next one starts
    /// it again; where absent it lives and dies with the main function.
    pub idle_seconds: Option<f64>,
}

impl Serialize for Group {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Form<'a> {
            #[serde(serialize_with = "listing::serialize")]
            experts: &'a [Vec<u32>],
            #[serde(serialize_with = "whole_bytes")]
            memory_bytes: f64,
            #[serde(skip_serializing_if = "Option::is_none")]
            vcpus: Option<f64>,
            replicas: u32,
            /// For readers who need not know the window.
            #[serde(skip_serializing_if = "std::ops::Not::not")]
            sleeps: bool,
            #[serde(skip_serializing_if = "Option::is_none")]
            idle_seconds: Option<f64>,
        }
        let Self { experts, memory_bytes, vcpus, replicas, idle_seconds } = self;
        let form = Form {
            experts,
            memory_bytes: *memory_bytes,
            vcpus: *vcpus,
            replicas: *replicas,
            sleeps: idle_seconds.is_some(),
            idle_seconds: *idle_seconds,
        };
        form.serialize(serializer)
    }
}

/// The remote part of one layer.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LayerPlan {
    /// Remote experts, ascending.
    pub remote: Vec<u32>,
    /// Memory of each replica in bytes; 0 where nothing is remote.
    #[serde(serialize_with = "whole_bytes")]
    pub memory_bytes: f64,
    /// Replicas, each with all remote experts of the layer; 0 where nothing is remote.
    pub replicas: u32,
}

impl Plan {
    /// Every layer with a remote function of its own, or none (the Remoe paper's form).
    #[must_use]
    pub fn of_layers(main_bytes: f64, layers: Vec<LayerPlan>) -> Self {
        Self { main_bytes, main_vcpus: None, layers, groups: Vec::new() }
    }

    /// Remote experts of each layer.
    pub fn remote_counts(&self) -> Vec<usize> {
        self.layers.iter().map(|layer| layer.remote.len()).collect()
    }

    /// Reports if it has groups that are more than a function for each layer.
    pub fn is_sliced(&self) -> bool {
        let hosts = |layer: usize| self.groups.iter().filter(move |group| !group.experts[layer].is_empty());
        let several = |group: &Group| group.experts.iter().filter(|experts| !experts.is_empty()).count() > 1;
        self.groups.iter().any(several) || (0..self.layers.len()).any(|layer| hosts(layer).count() > 1)
    }

    /// Remote functions: replicas of all layers and groups.
    #[must_use]
    pub fn replicas(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| layer.replicas);
        layers.chain(self.groups.iter().map(|group| group.replicas)).map(u64::from).sum()
    }

    /// Memory of the main function and of every replica, in bytes.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        let layers = self.layers.iter().map(|layer| layer.memory_bytes * f64::from(layer.replicas));
        let groups = self.groups.iter().map(|group| group.memory_bytes * f64::from(group.replicas));
        self.main_bytes + layers.chain(groups).sum::<f64>()
    }
}

/// Whole numbers of bytes as whole numbers.
pub fn whole_bytes<S: Serializer>(bytes: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    // Up to 2^53 every whole number is exact.
    if bytes.fract() == 0.0 && (0.0..9e15).contains(bytes) {
        serializer.serialize_u64(*bytes as u64)
    } else {
        serializer.serialize_f64(*bytes)
    }
}

/// Replicas of a layer that can be evaluated; what a problem allows may be less.
const MAX_REPLICAS: u32 = 65_536;
/// No memory is larger, in bytes.
const MAX_BYTES: f64 = 1e15;
const LEAST_VCPUS: f64 = 1e-3;
const MAX_VCPUS: f64 = 1e6;
/// No idle window is longer, in seconds.
const MAX_IDLE: f64 = 1e9;

/// A plan as a person writes it: sizes may be left out, layers may be named by the model's ids.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Plan")]
pub struct PlanDraft {
    /// Bytes of memory of the main function's experts; the smallest size that holds them where absent.
    #[schemars(range(min = 0.0, max = MAX_BYTES))]
    main_bytes: Option<f64>,
    /// vCPUs of the main function, where the problem chooses them separately; the fewest where absent.
    #[schemars(range(min = LEAST_VCPUS, max = MAX_VCPUS))]
    main_vcpus: Option<f64>,
    /// Remote experts of the Mixture-of-Experts layers: by position, or all of them with `layer`.
    #[serde(default)]
    layers: Vec<LayerDraft>,
    /// Functions that host experts of several layers; no expert is in two of them.
    #[serde(default)]
    groups: Vec<GroupDraft>,
}

/// A group of remote functions that host the same experts.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Group")]
struct GroupDraft {
    /// Experts as `LAYER:FIRST-LAST,ID,LAYER:ID`.
    experts: String,
    /// Bytes of memory of each replica; the smallest size that holds the experts where absent.
    #[schemars(range(min = 0.0, max = MAX_BYTES))]
    memory_bytes: Option<f64>,
    /// vCPUs of each replica, where the problem chooses them separately; the fewest where absent.
    #[schemars(range(min = LEAST_VCPUS, max = MAX_VCPUS))]
    vcpus: Option<f64>,
    /// Number of functions that host these experts; 1 where absent.
    #[schemars(range(min = 1, max = MAX_REPLICAS))]
    replicas: Option<u32>,
    /// True if the group scales to zero by itself.
    sleeps: Option<bool>,
    /// Seconds without a request that uses its experts after which it ends; `remote_idle_seconds` of the problem where
    /// absent.
    #[schemars(range(min = 0.0, max = MAX_IDLE))]
    idle_seconds: Option<f64>,
}

/// The remote part of one layer.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "RemoteLayer")]
struct LayerDraft {
    /// The model's layer id; the position in the list where absent.
    layer: Option<u32>,
    /// Ids of the remote experts.
    #[serde(default)]
    remote: Vec<u32>,
    /// Bytes of memory of each replica; the smallest size that holds the experts where absent.
    #[schemars(range(min = 0.0, max = MAX_BYTES))]
    memory_bytes: Option<f64>,
    /// Number of functions that host these experts; 1 where absent.
    #[schemars(range(min = 0, max = MAX_REPLICAS))]
    replicas: Option<u32>,
}

/// The output of `remoe plan --json`, which contains a plan. Only `plan` is read of it, and `problem` where the plan is
/// put in force.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Answer")]
pub struct AnswerFile<P> {
    /// The plan.
    pub plan: PlanDraft,
    /// The problem that the plan was made for.
    pub problem: Option<P>,
    #[serde(default, rename = "factors")]
    _factors: IgnoredJson,
    #[serde(default, rename = "evaluation")]
    _evaluation: IgnoredJson,
    #[serde(default, rename = "baselines")]
    _baselines: IgnoredJson,
    #[serde(default, rename = "walk")]
    _walk: IgnoredJson,
    #[serde(default, rename = "explanation")]
    _explanation: IgnoredJson,
    #[serde(default, rename = "verdict")]
    _verdict: IgnoredJson,
    #[serde(default, rename = "sturdiness")]
    _sturdiness: IgnoredJson,
    #[serde(default, rename = "change")]
    _change: IgnoredJson,
    #[serde(default, rename = "search")]
    _search: IgnoredJson,
    #[serde(default, rename = "incremental")]
    _incremental: IgnoredJson,
    #[serde(default, rename = "cost_bound")]
    _cost_bound: IgnoredJson,
    #[serde(default, rename = "complete")]
    _complete: IgnoredJson,
    #[serde(default, rename = "elapsed_seconds")]
    _elapsed_seconds: IgnoredJson,
}

/// Returns the JSON schema of plan files: a plan, or the output of `remoe plan --json`.
#[must_use]
pub fn plan_file_schema() -> Schema {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let forms = [generator.subschema_for::<PlanDraft>(), generator.subschema_for::<AnswerFile<Problem>>()];
    json_schema!({
        "$schema": generator.settings().meta_schema,
        "title": "Plan file",
        "description": "Remote experts and the functions that host them.",
        "anyOf": forms,
        "$defs": generator.take_definitions(true),
    })
}

/// Reads a plan file: a plan, or an answer with its problem.
pub fn read_file<P: DeserializeOwned>(text: &str) -> Result<(PlanDraft, Option<P>), FieldError> {
    #[derive(Deserialize)]
    struct Form {
        plan: Option<IgnoredAny>,
    }
    let is_answer = serde_json::from_str(text).is_ok_and(|form: Form| form.plan.is_some());
    if !is_answer {
        return from_json(text).map(|plan| (plan, None));
    }
    from_json(text).map(|AnswerFile { plan, problem, .. }| (plan, problem))
}

impl PlanDraft {
    /// Reads `{"main_bytes", "layers": [{"remote", "memory_bytes", "replicas"}]}`, or the planner's
    /// answer, which has that under `plan`.
    ///
    /// # Errors
    /// The first field that is unknown, stated twice or of the wrong type.
    pub fn from_json(text: &str) -> Result<Self, FieldError> {
        read_file::<IgnoredJson>(text).map(|(plan, _)| plan)
    }
}

impl From<&Plan> for PlanDraft {
    fn from(plan: &Plan) -> Self {
        let layers = plan.layers.iter().map(|layer| LayerDraft {
            layer: None,
            remote: layer.remote.clone(),
            memory_bytes: Some(layer.memory_bytes),
            replicas: Some(layer.replicas),
        });
        let groups = plan.groups.iter().map(|group| GroupDraft {
            experts: listing::format(&group.experts),
            memory_bytes: Some(group.memory_bytes),
            vcpus: group.vcpus,
            replicas: Some(group.replicas),
            sleeps: None,
            idle_seconds: group.idle_seconds,
        });
        Self {
            main_bytes: Some(plan.main_bytes),
            main_vcpus: plan.main_vcpus,
            layers: layers.collect(),
            groups: groups.collect(),
        }
    }
}

impl Model<'_> {
    /// The plan that `draft` means for this problem: what it leaves out becomes one replica and the
    /// smallest size that holds.
    pub fn plan(&self, draft: &PlanDraft) -> Result<Plan, FieldError> {
        let groups = self.groups(&draft.groups, &named_layers(&draft.layers))?;
        let layers = match groups.is_empty() {
            true => self.layer_plans(draft)?,
            false => self.hosted_layers(draft, &groups)?,
        };
        let main_bytes = match draft.main_bytes {
            Some(bytes) => size("main_bytes", bytes)?,
            None => {
                let counts: Vec<usize> = layers.iter().map(|layer| layer.remote.len()).collect();
                let least = first_at_least(&self.main_sizes, self.main_needed(&counts));
                self.main_sizes.get(least).copied().unwrap_or(self.problem.specs.main.largest())
            }
        };
        let main_vcpus = vcpus("main_vcpus", draft.main_vcpus, self.problem.specs.main_vcpus)?;
        Ok(Plan { main_bytes, main_vcpus, layers, groups })
    }

    fn layer_plans(&self, draft: &PlanDraft) -> Result<Vec<LayerPlan>, FieldError> {
        let mut drafts: Vec<(usize, &LayerDraft)> = draft.layers.iter().enumerate().collect();
        let named = drafts.iter().filter(|(_, layer)| layer.layer.is_some()).count();
        if named != 0 && named != drafts.len() {
            let message = "names \"layer\" in some entries only, expected all entries or none";
            return Err(FieldError::new("layers", message));
        }
        if drafts.len() != self.layers.len() {
            let message = format!(
                "has {} layers, expected {}: all layers of the problem",
                drafts.len(),
                self.layers.len()
            );
            return Err(FieldError::new("layers", message));
        }
        drafts.sort_by_key(|(_, layer)| layer.layer);
        if let Some(pair) = drafts.windows(2).find(|pair| named > 0 && pair[0].1.layer == pair[1].1.layer) {
            let message = format!("is {}, which is listed twice", pair[1].1.layer.unwrap_or_default());
            return Err(FieldError::new(format!("layers[{}].layer", pair[1].0), message));
        }
        let plans = drafts
            .iter()
            .enumerate()
            .map(|(layer, (index, entry))| self.layer_plan(layer, &format!("layers[{index}]"), entry));
        plans.collect()
    }

    fn groups(&self, drafts: &[GroupDraft], ids: &[u32]) -> Result<Vec<Group>, FieldError> {
        let experts: Vec<usize> = self.layers.iter().map(|layer| layer.experts).collect();
        let mut groups = Vec::with_capacity(drafts.len());
        for (index, draft) in drafts.iter().enumerate() {
            let field = |name: &str| format!("groups[{index}].{name}");
            let hosted = listing::parse(&draft.experts, &experts, ids)
                .map_err(|error| FieldError::new(field("experts"), error.0))?;
            if hosted.iter().all(Vec::is_empty) {
                return Err(FieldError::new(field("experts"), "is empty, expected at least one expert"));
            }
            let taken = |group: &Group| {
                let layers = group.experts.iter().zip(&hosted);
                layers.enumerate().find_map(|(layer, (theirs, ours))| {
                    ours.iter()
                        .find(|expert| theirs.binary_search(expert).is_ok())
                        .map(|expert| (layer, *expert))
                })
            };
            if let Some((layer, expert)) = groups.iter().find_map(taken) {
                let message = format!("lists expert {expert} of layer {layer}, which another group hosts");
                return Err(FieldError::new(field("experts"), message));
            }
            let replicas = draft.replicas.unwrap_or(1);
            if !(1..=MAX_REPLICAS).contains(&replicas) {
                let message = format!("is {replicas}, expected 1 to {MAX_REPLICAS}");
                return Err(FieldError::new(field("replicas"), message));
            }
            let memory_bytes = match draft.memory_bytes {
                Some(bytes) => size(&field("memory_bytes"), bytes)?,
                None => {
                    let least = first_at_least(&self.remote_sizes, self.group_needed(&hosted));
                    self.remote_sizes.get(least).copied().unwrap_or(self.problem.specs.remote.largest())
                }
            };
            let vcpus = vcpus(&field("vcpus"), draft.vcpus, self.problem.specs.remote_vcpus)?;
            let idle_seconds = self.idle_seconds(&field("idle_seconds"), draft)?;
            groups.push(Group { experts: hosted, memory_bytes, vcpus, replicas, idle_seconds });
        }
        Ok(groups)
    }

    /// After which time a group ends by itself, if it does.
    fn idle_seconds(&self, field: &str, draft: &GroupDraft) -> Result<Option<f64>, FieldError> {
        match (draft.idle_seconds, draft.sleeps) {
            (_, Some(false)) | (None, None) => Ok(None),
            (Some(idle), _) if (0.0..=MAX_IDLE).contains(&idle) => Ok(Some(idle)),
            (Some(idle), _) => {
                Err(FieldError::new(field, format!("is {idle}, expected seconds from 0 to 1e9")))
            }
            (None, Some(true)) => self.problem.remote_idle_seconds.map(Some).ok_or_else(|| {
                let message = "is missing: a sleeping group needs an idle window; state it here, or as \
                               remote_idle_seconds of the problem";
                FieldError::new(field, message)
            }),
        }
    }

    /// Remote experts of each layer when `groups` host it; layers that `draft` lists must say the same.
    fn hosted_layers(&self, draft: &PlanDraft, groups: &[Group]) -> Result<Vec<LayerPlan>, FieldError> {
        let remote = |layer: usize| {
            let mut remote: Vec<u32> = groups.iter().flat_map(|group| group.experts[layer].clone()).collect();
            remote.sort_unstable();
            LayerPlan { remote, ..LayerPlan::default() }
        };
        let hosted: Vec<LayerPlan> = (0..self.layers.len()).map(remote).collect();
        if !draft.layers.is_empty() {
            let listed = self.layer_plans(draft)?;
            let differs = |(listed, hosted): (&LayerPlan, &LayerPlan)| listed.remote != hosted.remote;
            if let Some(layer) = listed.iter().zip(&hosted).position(differs) {
                let message = "differs from the experts of this layer in groups, expected the same experts";
                return Err(FieldError::new(format!("layers[{layer}].remote"), message));
            }
        }
        Ok(hosted)
    }

    fn layer_plan(&self, layer: usize, field: &str, draft: &LayerDraft) -> Result<LayerPlan, FieldError> {
        let experts = self.layers[layer].experts;
        let mut remote = draft.remote.clone();
        remote.sort_unstable();
        for (index, id) in draft.remote.iter().enumerate() {
            if *id as usize >= experts {
                let message = format!("is {id}, expected an expert of the layer: 0 to {}", experts - 1);
                return Err(FieldError::new(format!("{field}.remote[{index}]"), message));
            }
        }
        if let Some(pair) = remote.windows(2).find(|pair| pair[0] == pair[1]) {
            let message = format!("lists expert {} twice", pair[0]);
            return Err(FieldError::new(format!("{field}.remote"), message));
        }
        if remote.is_empty() {
            return Ok(LayerPlan::default());
        }
        let replicas = draft.replicas.unwrap_or(1);
        if replicas > MAX_REPLICAS {
            let message = format!("is {replicas}, expected at most {MAX_REPLICAS}");
            return Err(FieldError::new(format!("{field}.replicas"), message));
        }
        let memory_bytes = match draft.memory_bytes {
            Some(bytes) => size(&format!("{field}.memory_bytes"), bytes)?,
            None => {
                let needed = self.remote_needed(layer, remote.len(), self.share_of(layer, &remote));
                let least = first_at_least(&self.remote_sizes, needed);
                self.remote_sizes.get(least).copied().unwrap_or(self.problem.specs.remote.largest())
            }
        };
        Ok(LayerPlan { remote, memory_bytes, replicas })
    }
}

/// The vCPUs of a function: as stated, or the fewest of `range`; none where its memory brings them.
fn vcpus(field: &str, stated: Option<f64>, range: Option<VcpuRange>) -> Result<Option<f64>, FieldError> {
    match (stated, range) {
        (None, range) => Ok(range.map(|range| range.min)),
        (Some(_), None) => {
            let message = "is set, but in this problem vCPUs follow from memory; leave it out, or add \
                           specs.main_vcpus and specs.remote_vcpus";
            Err(FieldError::new(field, message))
        }
        (Some(vcpus), Some(_)) if (LEAST_VCPUS..=MAX_VCPUS).contains(&vcpus) => Ok(Some(vcpus)),
        (Some(vcpus), Some(_)) => {
            Err(FieldError::new(field, format!("is {vcpus}, expected a number of vCPUs from 0.001 to 1e6")))
        }
    }
}

/// The model's ids of all layers, ascending, where each of `layers` names its own; else nothing.
fn named_layers(layers: &[LayerDraft]) -> Vec<u32> {
    let mut ids: Vec<u32> = layers.iter().filter_map(|layer| layer.layer).collect();
    ids.sort_unstable();
    if ids.len() == layers.len() { ids } else { Vec::new() }
}

fn size(field: &str, bytes: f64) -> Result<f64, FieldError> {
    if (0.0..=MAX_BYTES).contains(&bytes) {
        return Ok(bytes);
    }
    Err(FieldError::new(field, format!("is {bytes}, expected a number of bytes from 0 to 1e15")))
}
