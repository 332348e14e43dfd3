//! Model families, one in each file: its config fields, defaults and tensor names.

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

/// Names of a family's tensors. Names of layer tensors begin with `model.layers.<id>.`, those of an expert's own tensors
/// with `<block>.experts.<id>.`.
pub(crate) struct TensorNames {
    /// Possible names of the MoE block. The first is the one that `save_pretrained` writes.
    pub(crate) blocks: &'static [BlockNames],
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// MLP of the shared experts, relative to the block.
    pub(crate) shared: &'static str,
    /// Gate of the shared experts, relative to the block.
    pub(crate) shared_gate: &'static str,
}

/// Names of a MoE block and of its parts.
pub(crate) struct BlockNames {
    pub(crate) block: &'static str,
    /// Router, which has a `weight` and may have a `bias`.
    pub(crate) router: &'static str,
    /// Layout of `gate_up`.
    pub(crate) fused: FusedLayout,
    /// Tensor of the gate and up projections of all experts.
    pub(crate) gate_up: &'static str,
    /// Tensor of the down projections of all experts.
    pub(crate) down: &'static str,
}

/// Layout of an expert's gate and up projections in one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FusedLayout {
    /// Rows of the gate, then rows of the up projection: `[outputs, inputs]`.
    Stacked,
    /// Columns of the gate and of the up projection alternate: `[inputs, outputs]`.
    Interleaved,
}

/// Block of most current families.
const USUAL_BLOCK: BlockNames = BlockNames {
    block: "mlp",
    router: "gate",
    fused: FusedLayout::Stacked,
    gate_up: "experts.gate_up_proj",
    down: "experts.down_proj",
};

/// Names of most current families.
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

    /// Returns the names of the family's tensors.
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

/// Refuses `layer_types` with any other entry than `expected`.
fn uniform_layer_types(common: &CommonConfig<'_>, expected: &str) -> Result<(), CheckpointError> {
    let Some(types) = common.fields.list("layer_types")? else { return Ok(()) };
    common.check_layer_types(types)?;
    for entry in types {
        if entry.as_str() != Some(expected) {
            return Err(common
                .fields
                .unsupported("layer_types", format!("{entry}; every layer of this model is `{expected}`")));
        }
    }
    Ok(())
}
