//! The families: each file holds everything that is particular to one.

mod deepseek_v2;
mod deepseek_v3;
mod gpt2_moe;
mod gpt_oss;
mod granitemoe;
mod latent;
mod mixtral;
mod olmoe;
mod phimoe;
mod qwen2_moe;
mod qwen3_moe;

use crate::config::{CommonConfig, ModelConfig};
use crate::error::CheckpointError;
use crate::family::Family;
use crate::fields::Fields;

/// Names of tensors. Layer tensors stand under `model.layers.<id>.`, expert tensors of the separate
/// layout under `<block>.experts.<id>.`.
pub(crate) struct TensorNames {
    /// Names that the MoE block may have, as `save_pretrained` writes it first.
    pub(crate) blocks: &'static [BlockNames],
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// The shared experts' MLP, under the block.
    pub(crate) shared: &'static str,
    /// The gate of the shared experts, under the block.
    pub(crate) shared_gate: &'static str,
}

/// Names of a MoE block and of what stands under it.
pub(crate) struct BlockNames {
    pub(crate) block: &'static str,
    /// The router, which has a `weight` and may have a `bias`.
    pub(crate) router: &'static str,
    /// How gate and up projections lie in one tensor.
    pub(crate) fused: Fused,
    /// Gate and up projections of all experts in one tensor.
    pub(crate) gate_up: &'static str,
    /// Down projections of all experts in one tensor.
    pub(crate) down: &'static str,
}

/// How gate and up projections of an expert lie in one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fused {
    /// Rows of the gate, then rows of the up projection; each tensor [outputs, inputs].
    OneAfterTheOther,
    /// A column of the gate, a column of the up projection; each tensor [inputs, outputs].
    InTurns,
}

/// The block of most families of today.
const USUAL_BLOCK: BlockNames = BlockNames {
    block: "mlp",
    router: "gate",
    fused: Fused::OneAfterTheOther,
    gate_up: "experts.gate_up_proj",
    down: "experts.down_proj",
};

/// The names that most families of today use.
const USUAL_NAMES: TensorNames = TensorNames {
    blocks: &[USUAL_BLOCK],
    gate: "gate_proj",
    up: "up_proj",
    down: "down_proj",
    shared: "shared_expert",
    shared_gate: "shared_expert_gate",
};

impl Family {
    /// Parses the fields of a config of this family.
    pub(crate) fn parse(self, fields: Fields<'_>) -> Result<ModelConfig, CheckpointError> {
        match self {
            Self::Mixtral => mixtral::parse(fields),
            Self::Qwen2Moe => qwen2_moe::parse(fields),
            Self::Olmoe => olmoe::parse(fields),
            Self::DeepseekV2 => deepseek_v2::parse(fields),
            Self::DeepseekV3 => deepseek_v3::parse(fields),
            Self::Qwen3Moe => qwen3_moe::parse(fields),
            Self::GraniteMoe => granitemoe::parse(fields),
            Self::Phimoe => phimoe::parse(fields),
            Self::GptOss => gpt_oss::parse(fields),
            Self::Gpt2Moe => gpt2_moe::parse(fields),
        }
    }

    /// Names of its tensors.
    pub(crate) fn names(self) -> &'static TensorNames {
        match self {
            Self::Mixtral => &mixtral::NAMES,
            Self::Qwen2Moe => &qwen2_moe::NAMES,
            Self::Olmoe => &olmoe::NAMES,
            Self::DeepseekV2 => &deepseek_v2::NAMES,
            Self::DeepseekV3 => &deepseek_v3::NAMES,
            Self::Qwen3Moe => &qwen3_moe::NAMES,
            Self::GraniteMoe => &granitemoe::NAMES,
            Self::Phimoe => &phimoe::NAMES,
            Self::GptOss => &gpt_oss::NAMES,
            Self::Gpt2Moe => &gpt2_moe::NAMES,
        }
    }
}

/// Refuses `layer_types` that say anything else than what the family does in every layer.
fn uniform_layer_types(common: &CommonConfig<'_>, expected: &str) -> Result<(), CheckpointError> {
    let Some(types) = common.fields.list("layer_types")? else { return Ok(()) };
    common.one_for_each_layer(types)?;
    for entry in types {
        if entry.as_str() != Some(expected) {
            return Err(common
                .fields
                .unsupported("layer_types", format!("{entry}; every layer of this model is `{expected}`")));
        }
    }
    Ok(())
}
