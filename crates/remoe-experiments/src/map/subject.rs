//! Models of the map, from 14 GB to more than a single modest node can hold.

use crate::outlines;
use remoe_hardware::ResidentWeights;
use remoe_model::{Inspection, Outline};
use serde::Serialize;

/// A published model without its weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Subject {
    /// Name of the model.
    pub name: String,
    /// Bytes of all weights.
    pub total_bytes: u64,
    /// Bytes of the weights that one token uses.
    pub active_bytes: u64,
    /// Sizes of the model.
    #[serde(skip)]
    pub facts: Inspection,
    /// Weights as functions hold them.
    #[serde(skip)]
    pub weights: ResidentWeights,
}

impl Subject {
    /// Creates a model from its outline.
    #[must_use]
    pub fn new(name: &str, outline: &Outline) -> Self {
        let facts = outline.inspection(name);
        let weights = ResidentWeights::of_outline(outline);
        let used = (facts.top_k * facts.moe_layers.len()) as f64 * weights.expert_bytes;
        Self {
            name: name.to_owned(),
            total_bytes: facts.total_bytes,
            active_bytes: (weights.rest_bytes + used) as u64,
            facts,
            weights,
        }
    }

    /// Returns the models of the map, the smallest first.
    #[must_use]
    pub fn all() -> Vec<Self> {
        vec![
            Self::new("OLMoE-1B-7B", &outlines::olmoe()),
            Self::new("DeepSeek-V2-Lite", &outlines::deepseek_v2_lite()),
            Self::new("Mixtral-8x7B", &outlines::mixtral_8x7b()),
            Self::new("Mixtral-8x22B", &outlines::mixtral_8x22b()),
            Self::new("Qwen3-235B-A22B", &outlines::qwen3_235b()),
            Self::new("DeepSeek-V3", &outlines::deepseek_v3()),
        ]
    }

    /// Returns the bytes of the non-expert part in the checkpoint.
    pub(crate) fn rest_bytes(&self) -> f64 {
        (self.facts.non_expert_layer_bytes.iter().sum::<u64>() + self.facts.outside_bytes) as f64
    }

    /// Returns the memory for the local fallback: the experts of two tokens in a layer.
    pub(crate) fn fallback_bytes(&self) -> f64 {
        2.0 * self.facts.top_k as f64 * self.facts.expert_bytes as f64
    }
}
