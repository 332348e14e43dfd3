//! The families: each file holds everything that is particular to one.

mod deepseek_v2;
mod mixtral;
mod olmoe;
mod qwen2_moe;

use crate::config::{Common, ModelConfig};
use crate::error::CheckpointError;
use crate::fields::Fields;

/// A family of models that share config fields, tensor names and the routing rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Mixtral (Mistral AI).
    Mixtral,
    /// Qwen1.5-MoE and Qwen2-MoE (Alibaba).
    Qwen2Moe,
    /// OLMoE (Ai2).
    Olmoe,
    /// DeepSeek-V2 (DeepSeek).
    DeepseekV2,
}

/// Names of tensors. Layer tensors stand under `model.layers.<id>.`, expert tensors of the separate
/// layout under `<block>.experts.<id>.`, of the fused one under `<block>.experts.`.
pub(crate) struct TensorNames {
    /// Names under which the MoE block may stand, the one that `save_pretrained` writes first.
    pub(crate) blocks: &'static [&'static str],
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// The shared experts' MLP, under the block.
    pub(crate) shared: &'static str,
    /// The gate of the shared experts, under the block.
    pub(crate) shared_gate: &'static str,
}

/// The names that most families of today use.
const USUAL_NAMES: TensorNames = TensorNames {
    blocks: &["mlp"],
    gate: "gate_proj",
    up: "up_proj",
    down: "down_proj",
    shared: "shared_expert",
    shared_gate: "shared_expert_gate",
};

impl Family {
    pub(crate) const ALL: [Self; 4] = [Self::Mixtral, Self::Qwen2Moe, Self::Olmoe, Self::DeepseekV2];

    /// `model_type` of the config, and the family in `remoe inspect`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixtral => "mixtral",
            Self::Qwen2Moe => "qwen2_moe",
            Self::Olmoe => "olmoe",
            Self::DeepseekV2 => "deepseek_v2",
        }
    }

    pub(crate) fn of(fields: &Fields<'_>) -> Result<Self, CheckpointError> {
        let supported = || Self::ALL.map(Self::name).join(", ");
        let Some(name) = fields.text("model_type")? else {
            return Err(fields.error("model_type", format!("is missing, expected one of {}", supported())));
        };
        Self::ALL.into_iter().find(|family| family.name() == name).ok_or_else(|| {
            fields
                .unsupported("model_type", format!("unknown family `{name}`; supported are {}", supported()))
        })
    }

    pub(crate) fn parse(self, fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
        match self {
            Self::Mixtral => mixtral::parse(fields),
            Self::Qwen2Moe => qwen2_moe::parse(fields),
            Self::Olmoe => olmoe::parse(fields),
            Self::DeepseekV2 => deepseek_v2::parse(fields),
        }
    }

    pub(crate) fn names(self) -> &'static TensorNames {
        match self {
            Self::Mixtral => &mixtral::NAMES,
            Self::Qwen2Moe => &qwen2_moe::NAMES,
            Self::Olmoe => &olmoe::NAMES,
            Self::DeepseekV2 => &deepseek_v2::NAMES,
        }
    }
}

/// Refuses `layer_types` that say anything else than what the family does in every layer.
fn uniform_layer_types(common: &Common<'_>, expected: &str) -> Result<(), CheckpointError> {
    for entry in common.fields.list("layer_types")?.unwrap_or_default() {
        if entry.as_str() != Some(expected) {
            return Err(common
                .fields
                .unsupported("layer_types", format!("{entry}; every layer of this model is `{expected}`")));
        }
    }
    Ok(())
}
