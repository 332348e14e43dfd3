//! Supported model families.

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
    /// DeepSeek-V3 and R1 (DeepSeek), Kimi-K2 (Moonshot AI).
    DeepseekV3,
    /// Qwen3-MoE (Alibaba).
    Qwen3Moe,
    /// GraniteMoE (IBM).
    GraniteMoe,
    /// PhiMoE (Microsoft).
    Phimoe,
    /// gpt-oss (OpenAI).
    GptOss,
    /// GPT-2 (OpenAI) with its feed-forward networks cut into experts.
    Gpt2Moe,
}

/// Values of `model_type` that are treated like those of a supported family.
const ALIASES: [(&str, &str); 1] = [("kimi_k2", "deepseek_v3")];

impl Family {
    pub(crate) const ALL: [Self; 10] = [
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::Olmoe,
        Self::DeepseekV2,
        Self::DeepseekV3,
        Self::GraniteMoe,
        Self::Phimoe,
        Self::GptOss,
        Self::Gpt2Moe,
    ];

    /// Returns the family's name: `model_type` of the config, and the family in `remoe inspect`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixtral => "mixtral",
            Self::Qwen2Moe => "qwen2_moe",
            Self::Olmoe => "olmoe",
            Self::DeepseekV2 => "deepseek_v2",
            Self::DeepseekV3 => "deepseek_v3",
            Self::Qwen3Moe => "qwen3_moe",
            Self::GraniteMoe => "granitemoe",
            Self::Phimoe => "phimoe",
            Self::GptOss => "gpt_oss",
            Self::Gpt2Moe => "gpt2_moe",
        }
    }

    /// Determines the family from `model_type`.
    pub(crate) fn from_fields(fields: &Fields<'_>) -> Result<Self, CheckpointError> {
        let supported = || Self::ALL.map(Self::name).join(", ");
        let Some(name) = fields.text("model_type")? else {
            return Err(fields.error("model_type", format!("is missing, expected one of {}", supported())));
        };
        let canonical = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, family)| *family);
        Self::ALL.into_iter().find(|family| family.name() == canonical).ok_or_else(|| {
            fields
                .unsupported("model_type", format!("unknown family `{name}`; supported are {}", supported()))
        })
    }
}
