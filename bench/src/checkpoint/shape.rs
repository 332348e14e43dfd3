//! Shape of a generated model.

use crate::error::{BenchError, Result};
use clap::{Args, ValueEnum};

/// A family of models that Remoe serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Family {
    Olmoe,
    Mixtral,
    Qwen2Moe,
    Qwen3Moe,
    DeepseekV2,
}

/// Element type of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    Bfloat16,
    Float16,
    Float32,
}

impl Dtype {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Bfloat16 | Self::Float16 => 2,
            Self::Float32 => 4,
        }
    }

    /// Name of the dtype in `config.json`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Float32 => "float32",
        }
    }

    /// Name of the dtype in a safetensors header.
    pub(crate) fn tag(self) -> &'static str {
        match self {
            Self::Bfloat16 => "BF16",
            Self::Float16 => "F16",
            Self::Float32 => "F32",
        }
    }
}

/// Sizes of a model. The defaults are OLMoE-1B-7B's, with 4 of its 16 layers.
#[derive(Debug, Clone, Args)]
pub(crate) struct ModelShape {
    /// Family of the model
    #[arg(long, value_enum, default_value = "olmoe")]
    pub(crate) family: Family,
    /// Decoder layers
    #[arg(long, default_value_t = 4)]
    pub(crate) layers: usize,
    /// Elements of a hidden state
    #[arg(long, default_value_t = 2048)]
    pub(crate) hidden: usize,
    /// Routed experts of a layer
    #[arg(long, default_value_t = 64)]
    pub(crate) experts: usize,
    /// Experts per token
    #[arg(long, default_value_t = 8)]
    pub(crate) top_k: usize,
    /// Intermediate size of an expert
    #[arg(long, default_value_t = 1024)]
    pub(crate) width: usize,
    /// Attention heads
    #[arg(long, default_value_t = 16)]
    pub(crate) heads: usize,
    /// Key and value heads [default: as many as heads]
    #[arg(long)]
    pub(crate) kv_heads: Option<usize>,
    /// Elements of a head (qwen3_moe) [default: --hidden by --heads]
    #[arg(long)]
    pub(crate) head_dim: Option<usize>,
    /// Tokens of the vocabulary
    #[arg(long, default_value_t = 50_304)]
    pub(crate) vocab: usize,
    /// Maximum context length, in tokens
    #[arg(long, default_value_t = 4096)]
    pub(crate) context: usize,
    /// Element type of the weights
    #[arg(long, value_enum, default_value = "bfloat16")]
    pub(crate) dtype: Dtype,
    /// Intermediate size of the shared experts together (qwen2_moe, deepseek_v2) [default: twice the
    /// width; deepseek_v2: a multiple of the width]
    #[arg(long)]
    pub(crate) shared_width: Option<usize>,
    /// First layers without experts (deepseek_v2) [default: 1]
    #[arg(long)]
    pub(crate) dense_layers: Option<usize>,
    /// Intermediate size of layers without experts (deepseek_v2) [default: 8 times the width]
    #[arg(long)]
    pub(crate) dense_width: Option<usize>,
    /// Rank of the KV latent (deepseek_v2) [default: a quarter of --hidden]
    #[arg(long)]
    pub(crate) kv_rank: Option<usize>,
    /// Rank of the query latent (deepseek_v2) [default: none]
    #[arg(long)]
    pub(crate) q_rank: Option<usize>,
}

impl ModelShape {
    /// OLMoE-1B-7B's with so many layers.
    pub(crate) fn olmoe(layers: usize) -> Self {
        Self {
            family: Family::Olmoe,
            layers,
            hidden: 2048,
            experts: 64,
            top_k: 8,
            width: 1024,
            heads: 16,
            kv_heads: None,
            head_dim: None,
            vocab: 50_304,
            context: 4096,
            dtype: Dtype::Bfloat16,
            shared_width: None,
            dense_layers: None,
            dense_width: None,
            kv_rank: None,
            q_rank: None,
        }
    }

    /// Qwen3-30B-A3B's with so many layers.
    pub(crate) fn qwen3(layers: usize) -> Self {
        Self {
            family: Family::Qwen3Moe,
            experts: 128,
            width: 768,
            heads: 32,
            kv_heads: Some(4),
            head_dim: Some(128),
            vocab: 151_936,
            context: 40_960,
            ..Self::olmoe(layers)
        }
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden / self.heads)
    }

    /// Latent attention rotates a part of its own, half as wide as a head.
    pub(crate) fn rope_dim(&self) -> usize {
        self.head_dim() / 2
    }

    pub(crate) fn kv_heads(&self) -> usize {
        self.kv_heads.unwrap_or(self.heads)
    }

    pub(crate) fn shared_width(&self) -> usize {
        self.shared_width.unwrap_or(2 * self.width)
    }

    pub(crate) fn dense_layers(&self) -> usize {
        self.dense_layers.unwrap_or(1)
    }

    pub(crate) fn dense_width(&self) -> usize {
        self.dense_width.unwrap_or(8 * self.width)
    }

    pub(crate) fn kv_rank(&self) -> usize {
        self.kv_rank.unwrap_or(self.hidden / 4)
    }

    /// # Errors
    /// The first size that no model can have.
    pub(crate) fn check(&self) -> Result<()> {
        let latent = self.family == Family::DeepseekV2;
        let sizes = [
            ("--layers", self.layers),
            ("--hidden", self.hidden),
            ("--experts", self.experts),
            ("--top-k", self.top_k),
            ("--width", self.width),
            ("--heads", self.heads),
            ("--kv-heads", self.kv_heads()),
            ("--vocab", self.vocab),
            ("--context", self.context),
        ];
        let refused = |flag: &str, why: String| Err(BenchError::new(flag.to_owned(), why));
        if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return refused(flag, "expected 1 or more, got 0".to_owned());
        }
        if self.top_k > self.experts {
            let why = format!("expected at most {} (--experts), got {}", self.experts, self.top_k);
            return refused("--top-k", why);
        }
        if self.head_dim.is_some() && self.family != Family::Qwen3Moe {
            return refused("--head-dim", "expected none: valid for qwen3_moe only".to_owned());
        }
        let heads_divide =
            self.head_dim.is_some_and(|size| size > 0) || self.hidden.is_multiple_of(self.heads);
        // Rotation works on pairs of elements.
        let pairs = if latent { 4 } else { 2 };
        if !heads_divide || !self.head_dim().is_multiple_of(pairs) {
            let (hidden, heads) = (self.hidden, self.heads);
            let why = format!("expected heads that divide {hidden} into multiples of {pairs}, got {heads}");
            return refused("--heads", why);
        }
        if !self.heads.is_multiple_of(self.kv_heads()) {
            let why = format!("expected a divisor of the {} heads, got {}", self.heads, self.kv_heads());
            return refused("--kv-heads", why);
        }
        if latent && self.kv_heads() != self.heads {
            let why = format!("latent attention: expected {} (--heads), got {}", self.heads, self.kv_heads());
            return refused("--kv-heads", why);
        }
        if latent && !self.shared_width().is_multiple_of(self.width) {
            let why = format!("expected a multiple of the width {}, got {}", self.width, self.shared_width());
            return refused("--shared-width", why);
        }
        if latent && self.dense_layers() >= self.layers {
            let why = format!("expected fewer than the {} layers, got {}", self.layers, self.dense_layers());
            return refused("--dense-layers", why);
        }
        Ok(())
    }
}
