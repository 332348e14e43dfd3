//! A plan, and the forms in which it is read.

use crate::error::FieldError;
use crate::problem::model::Model;
use crate::problem::sizes::first_at_least;
use serde::{Deserialize, Serialize, Serializer};

/// Where every expert lives, and how large the functions are.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Memory of the main function's experts, in bytes.
    #[serde(serialize_with = "whole_bytes")]
    pub main_bytes: f64,
    /// The Mixture-of-Experts layers by position.
    pub layers: Vec<LayerPlan>,
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
    /// Replicas of all layers.
    #[must_use]
    pub fn replicas(&self) -> u64 {
        self.layers.iter().map(|layer| u64::from(layer.replicas)).sum()
    }

    /// Memory of the main function and of every replica, in bytes.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        let remote = self.layers.iter().map(|layer| layer.memory_bytes * f64::from(layer.replicas));
        self.main_bytes + remote.sum::<f64>()
    }
}

/// Whole numbers of bytes as whole numbers.
pub(crate) fn whole_bytes<S: Serializer>(bytes: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    // Up to 2^53 every whole number is exact.
    if bytes.fract() == 0.0 && (0.0..9e15).contains(bytes) {
        serializer.serialize_u64(*bytes as u64)
    } else {
        serializer.serialize_f64(*bytes)
    }
}

/// A plan as somebody wrote it: sizes may be left out, layers may be named by the model's ids.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct PlanDraft {
    main_bytes: Option<f64>,
    layers: Vec<LayerDraft>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct LayerDraft {
    layer: Option<u32>,
    #[serde(default)]
    remote: Vec<u32>,
    memory_bytes: Option<f64>,
    replicas: Option<u32>,
}

/// The planner's whole answer, which contains the plan.
#[derive(Deserialize)]
struct Wrapped {
    plan: PlanDraft,
}

/// Replicas of a layer that can be evaluated; what a problem allows may be less.
const MAX_REPLICAS: u32 = 65_536;

impl PlanDraft {
    /// Reads `{"main_bytes", "layers": [{"remote", "memory_bytes", "replicas"}]}`, or the planner's
    /// answer, which has that under `plan`.
    ///
    /// # Errors
    /// The first field that is missing or of the wrong type.
    pub fn from_json(text: &str) -> Result<Self, FieldError> {
        let not_json = |error: serde_json::Error| FieldError::new("", format!("is not valid: {error}"));
        let value: serde_json::Value = serde_json::from_str(text).map_err(not_json)?;
        if value.get("plan").is_some() {
            let wrapped: Result<Wrapped, _> = serde_path_to_error::deserialize(value);
            return wrapped.map(|wrapped| wrapped.plan).map_err(FieldError::from_json);
        }
        serde_path_to_error::deserialize(value).map_err(FieldError::from_json)
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
        Self { main_bytes: Some(plan.main_bytes), layers: layers.collect() }
    }
}

impl Model<'_> {
    /// The plan that `draft` means for this problem: what it leaves out becomes one replica and the
    /// smallest size that holds.
    pub(crate) fn plan(&self, draft: &PlanDraft) -> Result<Plan, FieldError> {
        let mut drafts: Vec<(usize, &LayerDraft)> = draft.layers.iter().enumerate().collect();
        let named = drafts.iter().filter(|(_, layer)| layer.layer.is_some()).count();
        if named != 0 && named != drafts.len() {
            let message = "is a mixture: either every entry names its \"layer\", or none does";
            return Err(FieldError::new("layers", message));
        }
        if drafts.len() != self.layers.len() {
            let message =
                format!("has {} layers, the problem {}; list all of them", drafts.len(), self.layers.len());
            return Err(FieldError::new("layers", message));
        }
        drafts.sort_by_key(|(_, layer)| layer.layer);
        if let Some(pair) = drafts.windows(2).find(|pair| named > 0 && pair[0].1.layer == pair[1].1.layer) {
            let message = format!("is {}, listed twice", pair[1].1.layer.unwrap_or_default());
            return Err(FieldError::new(format!("layers[{}].layer", pair[1].0), message));
        }
        let layers: Vec<LayerPlan> = drafts
            .iter()
            .enumerate()
            .map(|(layer, (index, entry))| self.layer_plan(layer, &format!("layers[{index}]"), entry))
            .collect::<Result<_, _>>()?;
        let main_bytes = match draft.main_bytes {
            Some(bytes) => size("main_bytes", bytes)?,
            None => {
                let counts: Vec<usize> = layers.iter().map(|layer| layer.remote.len()).collect();
                let least = first_at_least(&self.main_sizes, self.main_needed(&counts));
                self.main_sizes.get(least).copied().unwrap_or(self.problem.specs.main.largest())
            }
        };
        Ok(Plan { main_bytes, layers })
    }

    fn layer_plan(&self, layer: usize, field: &str, draft: &LayerDraft) -> Result<LayerPlan, FieldError> {
        let experts = self.layers[layer].experts;
        let mut remote = draft.remote.clone();
        remote.sort_unstable();
        for (index, id) in draft.remote.iter().enumerate() {
            if *id as usize >= experts {
                let message = format!("is {id}, the layer has experts 0 to {}", experts - 1);
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

fn size(field: &str, bytes: f64) -> Result<f64, FieldError> {
    if (0.0..=1e15).contains(&bytes) {
        return Ok(bytes);
    }
    Err(FieldError::new(field, format!("is {bytes}, expected a number of bytes from 0 to 1e15")))
}
