//! Sizes of models, with the memory sizes of their functions.

use crate::outlines::{self, layers};
use remoe_model::{AttentionOutline, ExpertsOutline, Inspection, Outline, Weights};
use remoe_planner::{SizeRange, Specs};
use serde::Serialize;

const MB: f64 = 1e6;

/// Sizes of a model, without weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Shape {
    /// Name in tables and file names.
    pub name: String,
    /// Source of its sizes.
    pub source: String,
    /// Sizes of the model.
    pub facts: Inspection,
    /// Memory sizes of its functions.
    pub specs: Specs,
}

/// Returns memory sizes in steps of 100 MB (Remoe paper, section V-A). `main`, `remote`: least and largest MB.
fn specs(main: (f64, f64), remote: (f64, f64)) -> Specs {
    let range = |(least, most): (f64, f64)| SizeRange {
        min_bytes: least * MB,
        max_bytes: most * MB,
        step_bytes: 100.0 * MB,
    };
    Specs::new(range(main), range(remote))
}

impl Shape {
    /// GPT2-moe of the Remoe paper: GPT-2 (124 million parameters) whose feed-forward networks became
    /// 8 experts of the same width each, 2 of them per token.
    ///
    /// From `openai-community/gpt2`, `config.json`: `n_layer` 12, `n_embd` 768, `n_head` 12,
    /// `n_positions` 1024, `vocab_size` 50257; stored in float32. Sizes of functions from the paper.
    #[must_use]
    pub fn gpt2_moe() -> Self {
        let outline = Outline {
            family: "gpt2-moe".to_owned(),
            dtype: "float32".to_owned(),
            weights: Weights::Plain,
            hidden: 768,
            vocabulary: 50_257,
            context: 1024,
            served_context: 1024,
            learned_positions: 1024,
            tied: true,
            norm_biases: true,
            head_bias: false,
            layers: layers(
                12,
                0,
                3072,
                &AttentionOutline::Grouped { heads: 12, groups: 12, width: 64, besides: 3 * 768 + 768 },
                &ExpertsOutline {
                    matrices: 2,
                    width: 3072,
                    biases: 3072 + 768,
                    experts: 8,
                    top_k: 2,
                    router_biases: 0,
                    output_biases: 0,
                    corrections: 0,
                    shared: 0,
                    shared_width: 0,
                    shared_gate: false,
                },
            ),
        };
        Self::published(
            "gpt2-moe",
            "openai-community/gpt2 config.json, each feed-forward network as 8 experts (Remoe paper, V-A)",
            &outline,
            specs((200.0, 5_000.0), (200.0, 2_000.0)),
        )
    }

    /// DeepSeek-V2-Lite.
    ///
    /// From `deepseek-ai/DeepSeek-V2-Lite`, `config.json`: `num_hidden_layers` 27,
    /// `first_k_dense_replace` 1, `hidden_size` 2048, `intermediate_size` 10944,
    /// `moe_intermediate_size` 1408, `n_routed_experts` 64, `n_shared_experts` 2,
    /// `num_experts_per_tok` 6, `num_attention_heads` 16, `kv_lora_rank` 512, `qk_nope_head_dim` 128,
    /// `qk_rope_head_dim` 64, `v_head_dim` 128, `vocab_size` 102400, bfloat16. Sizes of functions from
    /// the paper.
    #[must_use]
    pub fn deepseek_v2_lite() -> Self {
        Self::published(
            "deepseek-v2-lite",
            "deepseek-ai/DeepSeek-V2-Lite config.json",
            &outlines::deepseek_v2_lite(),
            specs((1_000.0, 40_000.0), (1_000.0, 5_000.0)),
        )
    }

    /// Mixtral-8x7B.
    ///
    /// From `mistralai/Mixtral-8x7B-v0.1`, `config.json`: `num_hidden_layers` 32, `hidden_size` 4096,
    /// `intermediate_size` 14336, `num_local_experts` 8, `num_experts_per_tok` 2,
    /// `num_attention_heads` 32, `num_key_value_heads` 8, `vocab_size` 32000, bfloat16. The paper has no
    /// sizes of functions for it: the remote ones of DeepSeek-V2-Lite hold a layer's experts (2.8 GB),
    /// and 120 GB hold all experts with everything else, which the strategy CPU needs.
    #[must_use]
    pub fn mixtral_8x7b() -> Self {
        Self::published(
            "mixtral-8x7b",
            "mistralai/Mixtral-8x7B-v0.1 config.json",
            &outlines::mixtral_8x7b(),
            specs((1_000.0, 120_000.0), (1_000.0, 5_000.0)),
        )
    }

    /// Returns the three published models, the smallest first.
    #[must_use]
    pub fn published_models() -> Vec<Self> {
        vec![Self::gpt2_moe(), Self::deepseek_v2_lite(), Self::mixtral_8x7b()]
    }

    /// Returns the sizes of a checkpoint, with the function sizes that the paper uses for its smaller model.
    #[must_use]
    pub fn of_checkpoint(name: &str, facts: Inspection) -> Self {
        Self {
            name: name.to_owned(),
            source: "the checkpoint; sizes of functions as for gpt2-moe".to_owned(),
            facts,
            specs: specs((200.0, 5_000.0), (200.0, 2_000.0)),
        }
    }

    /// Returns a model with the layers, experts and routing of `facts`, and the widths of OLMoE-1B-7B
    /// (`allenai/OLMoE-1B-7B-0924`, `config.json`: `hidden_size` 2048, `intermediate_size` 1024,
    /// `num_attention_heads` 16, `vocab_size` 50304, bfloat16): real routing where memory matters.
    #[must_use]
    pub fn enlarged(name: &str, facts: &Inspection) -> Self {
        let first_moe_layer = facts.moe_layers.first().copied().unwrap_or(0);
        let outline = Outline {
            family: "enlarged".to_owned(),
            dtype: "bfloat16".to_owned(),
            weights: Weights::Plain,
            hidden: 2048,
            vocabulary: 50_304,
            context: 4096,
            served_context: 4096,
            learned_positions: 0,
            tied: false,
            norm_biases: false,
            head_bias: false,
            layers: layers(
                facts.layers,
                first_moe_layer,
                1024,
                &AttentionOutline::Grouped { heads: 16, groups: 16, width: 128, besides: 0 },
                &ExpertsOutline {
                    matrices: 3,
                    width: 1024,
                    biases: 0,
                    experts: facts.experts,
                    top_k: facts.top_k,
                    router_biases: 0,
                    output_biases: 0,
                    corrections: 0,
                    shared: 0,
                    shared_width: 0,
                    shared_gate: false,
                },
            ),
        };
        Self::published(
            name,
            "layers, experts and routing of the checkpoint, widths of allenai/OLMoE-1B-7B-0924",
            &outline,
            specs((200.0, 5_000.0), (200.0, 2_000.0)),
        )
    }

    fn published(name: &str, source: &str, outline: &Outline, specs: Specs) -> Self {
        let facts = outline.inspection(name);
        Self { name: name.to_owned(), source: source.to_owned(), facts, specs }
    }

    /// Returns the number of MoE layers.
    #[must_use]
    pub fn moe_layers(&self) -> usize {
        self.facts.moe_layers.len()
    }

    /// Returns the bytes of all routed experts.
    #[must_use]
    pub fn expert_bytes(&self) -> f64 {
        (self.moe_layers() * self.facts.experts) as f64 * self.facts.expert_bytes as f64
    }

    /// Returns the bytes of the non-expert part.
    #[must_use]
    pub fn other_bytes(&self) -> f64 {
        self.facts.total_bytes as f64 - self.expert_bytes()
    }

    /// Returns the bytes of one weight.
    pub(crate) fn element_bytes(&self) -> f64 {
        if self.facts.dtype == "float32" { 4.0 } else { 2.0 }
    }
}
