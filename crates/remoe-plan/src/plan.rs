//! Plans, and the plan files that state them.

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

/// A placement of all experts, with the sizes and replicas of the functions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Bytes of memory of the main function's experts.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
    /// vCPUs of the main function; `None` if they follow from its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub main_vcpus: Option<f64>,
    /// Remote experts of each MoE layer, in order. Without `groups`, each layer also states the function that hosts them.
    pub layers: Vec<LayerPlan>,
    /// Functions that host experts of several layers; no expert is in two of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
}

/// Replicas of a remote function that host the same experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Ids of the experts of each layer, ascending.
    pub experts: Vec<Vec<u32>>,
    /// Bytes of memory of each replica.
    pub memory_bytes: f64,
    /// vCPUs of each replica; `None` if they follow from its memory.
    pub vcpus: Option<f64>,
    /// Number of replicas.
    pub replicas: u32,
    /// Seconds without a request for any of its experts after which the group scales to zero; the next such request starts
    /// it again. If `None`, it runs whenever the main function runs.
    pub idle_seconds: Option<f64>,
}

impl Serialize for Group {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct SerializedGroup<'a> {
            #[serde(serialize_with = "listing::serialize")]
            experts: &'a [Vec<u32>],
            #[serde(serialize_with = "whole_bytes")]
            memory_bytes: f64,
            #[serde(skip_serializing_if = "Option::is_none")]
            vcpus: Option<f64>,
            replicas: u32,
            /// True if `idle_seconds` is present.
            #[serde(skip_serializing_if = "std::ops::Not::not")]
            sleeps: bool,
            #[serde(skip_serializing_if = "Option::is_none")]
            idle_seconds: Option<f64>,
        }
        let Self { experts, memory_bytes, vcpus, replicas, idle_seconds } = self;
        let serialized = SerializedGroup {
            experts,
            memory_bytes: *memory_bytes,
            vcpus: *vcpus,
            replicas: *replicas,
            sleeps: idle_seconds.is_some(),
            idle_seconds: *idle_seconds,
        };
        serialized.serialize(serializer)
    }
}

/// Remote experts of one layer, and the function that hosts them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LayerPlan {
    /// Ids of the remote experts, ascending.
    pub remote: Vec<u32>,
    /// Bytes of memory of each replica; 0 if no expert is remote, or if groups host them.
    #[serde(serialize_with = "whole_bytes")]
    pub memory_bytes: f64,
    /// Number of replicas, each with all remote experts of the layer; 0 if no expert is remote, or if groups host them.
    pub replicas: u32,
}

impl Plan {
    /// Builds a plan in which each layer has its own remote function or none, as in the Remoe paper.
    #[must_use]
    pub fn of_layers(main_bytes: f64, layers: Vec<LayerPlan>) -> Self {
        Self { main_bytes, main_vcpus: None, layers, groups: Vec::new() }
    }

    /// Returns the number of remote experts of each layer.
    pub fn remote_counts(&self) -> Vec<usize> {
        self.layers.iter().map(|layer| layer.remote.len()).collect()
    }

    /// Returns true if a group hosts experts of several layers, or several groups host experts of one layer.
    pub fn is_sliced(&self) -> bool {
        let hosts = |layer: usize| self.groups.iter().filter(move |group| !group.experts[layer].is_empty());
        let several = |group: &Group| group.experts.iter().filter(|experts| !experts.is_empty()).count() > 1;
        self.groups.iter().any(several) || (0..self.layers.len()).any(|layer| hosts(layer).count() > 1)
    }

    /// Returns the number of remote functions: the replicas of all layers and groups.
    #[must_use]
    pub fn replicas(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| layer.replicas);
        layers.chain(self.groups.iter().map(|group| group.replicas)).map(u64::from).sum()
    }

    /// Returns the bytes of memory of the main function's experts and of all replicas.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        let layers = self.layers.iter().map(|layer| layer.memory_bytes * f64::from(layer.replicas));
        let groups = self.groups.iter().map(|group| group.memory_bytes * f64::from(group.replicas));
        self.main_bytes + layers.chain(groups).sum::<f64>()
    }
}

/// Serializes `bytes` as an integer if it is one.
pub fn whole_bytes<S: Serializer>(bytes: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    // Up to 2^53 every whole number is exact.
    if bytes.fract() == 0.0 && (0.0..9e15).contains(bytes) {
        serializer.serialize_u64(*bytes as u64)
    } else {
        serializer.serialize_f64(*bytes)
    }
}

/// Most replicas of a layer or group in a plan file; the problem may allow fewer.
const MAX_REPLICAS: u32 = 65_536;
/// Largest memory in a plan file, in bytes.
const MAX_BYTES: f64 = 1e15;
/// Smallest number of vCPUs in a plan file.
const MIN_VCPUS: f64 = 1e-3;
/// Largest number of vCPUs in a plan file.
const MAX_VCPUS: f64 = 1e6;
/// Longest idle window in a plan file, in seconds.
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
    #[schemars(range(min = MIN_VCPUS, max = MAX_VCPUS))]
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
    #[schemars(range(min = MIN_VCPUS, max = MAX_VCPUS))]
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

/// Reads a plan file: a plan, or the output of `remoe plan --json`, which may contain its problem.
pub fn read_file<P: DeserializeOwned>(text: &str) -> Result<(PlanDraft, Option<P>), FieldError> {
    #[derive(Deserialize)]
    struct OutputProbe {
        plan: Option<IgnoredAny>,
    }
    let is_answer = serde_json::from_str(text).is_ok_and(|probe: OutputProbe| probe.plan.is_some());
    if !is_answer {
        return from_json(text).map(|plan| (plan, None));
    }
    from_json(text).map(|AnswerFile { plan, problem, .. }| (plan, problem))
}

impl PlanDraft {
    /// Reads a plan, or the output of `remoe plan --json`, which contains one under `plan`.
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
    /// Completes `draft` to a plan for this problem: omitted replicas become 1, omitted sizes the smallest ones that hold the
    /// experts.
    pub fn plan(&self, draft: &PlanDraft) -> Result<Plan, FieldError> {
        let groups = self.groups(&draft.groups, &stated_layer_ids(&draft.layers))?;
        let layers = match groups.is_empty() {
            true => self.layer_plans(draft)?,
            false => self.hosted_layers(draft, &groups)?,
        };
        let main_bytes = match draft.main_bytes {
            Some(bytes) => checked_size("main_bytes", bytes)?,
            None => {
                let counts: Vec<usize> = layers.iter().map(|layer| layer.remote.len()).collect();
                let least = first_at_least(&self.main_sizes, self.main_needed(&counts));
                self.main_sizes.get(least).copied().unwrap_or(self.problem.specs.main.largest())
            }
        };
        let main_vcpus = vcpus("main_vcpus", draft.main_vcpus, self.problem.specs.main_vcpus)?;
        Ok(Plan { main_bytes, main_vcpus, layers, groups })
    }

    /// Completes the layers of `draft`.
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

    /// Completes the groups `drafts`, whose layers are named by `ids` if there are as many as layers.
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
                Some(bytes) => checked_size(&field("memory_bytes"), bytes)?,
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

    /// Returns the seconds after which the group of `draft` scales to zero; `None` if it does not.
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

    /// Returns the remote experts of each layer if `groups` host them. Layers in `draft` must list the same experts.
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

    /// Completes one layer; `field` is its path in error messages.
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
            Some(bytes) => checked_size(&format!("{field}.memory_bytes"), bytes)?,
            None => {
                let needed = self.remote_needed(layer, remote.len(), self.share_of(layer, &remote));
                let least = first_at_least(&self.remote_sizes, needed);
                self.remote_sizes.get(least).copied().unwrap_or(self.problem.specs.remote.largest())
            }
        };
        Ok(LayerPlan { remote, memory_bytes, replicas })
    }
}

/// Returns the vCPUs of a function: the stated ones or the fewest of `range`; `None` if they follow from its memory.
fn vcpus(field: &str, stated: Option<f64>, range: Option<VcpuRange>) -> Result<Option<f64>, FieldError> {
    match (stated, range) {
        (None, range) => Ok(range.map(|range| range.min)),
        (Some(_), None) => {
            let message = "is set, but in this problem vCPUs follow from memory; leave it out, or add \
                           specs.main_vcpus and specs.remote_vcpus";
            Err(FieldError::new(field, message))
        }
        (Some(vcpus), Some(_)) if (MIN_VCPUS..=MAX_VCPUS).contains(&vcpus) => Ok(Some(vcpus)),
        (Some(vcpus), Some(_)) => {
            Err(FieldError::new(field, format!("is {vcpus}, expected a number of vCPUs from 0.001 to 1e6")))
        }
    }
}

/// Returns the ids of all layers, ascending, if each of `layers` states its own; otherwise nothing.
fn stated_layer_ids(layers: &[LayerDraft]) -> Vec<u32> {
    let mut ids: Vec<u32> = layers.iter().filter_map(|layer| layer.layer).collect();
    ids.sort_unstable();
    if ids.len() == layers.len() { ids } else { Vec::new() }
}

/// Checks that `bytes` is a valid size.
fn checked_size(field: &str, bytes: f64) -> Result<f64, FieldError> {
    if (0.0..=MAX_BYTES).contains(&bytes) {
        return Ok(bytes);
    }
    Err(FieldError::new(field, format!("is {bytes}, expected a number of bytes from 0 to 1e15")))
}
