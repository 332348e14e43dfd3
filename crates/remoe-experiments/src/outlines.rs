//! Outlines of published models, field by field from their configurations.

use remoe_model::{AttentionOutline, ExpertsOutline, LayerOutline, MlpOutline, Outline, Weights};

/// Returns `count` layers. Those before `first_moe_layer` have a dense MLP of `dense_width`.
pub(crate) fn layers(
    count: usize,
    first_moe_layer: usize,
    dense_width: usize,
    attention: &AttentionOutline,
    experts: &ExpertsOutline,
) -> Vec<LayerOutline> {
    let mlp = |layer| match layer < first_moe_layer {
        true => MlpOutline::Dense { matrices: experts.matrices, width: dense_width },
        false => MlpOutline::Experts(experts.clone()),
    };
    (0..count)
        .map(|layer| LayerOutline { attention: attention.clone(), window: None, mlp: mlp(layer) })
        .collect()
}

/// Returns DeepSeek-V2-Lite; its source is at [`crate::Shape::deepseek_v2_lite`].
pub(crate) fn deepseek_v2_lite() -> Outline {
    Outline {
        family: "deepseek_v2".to_owned(),
        dtype: "bfloat16".to_owned(),
        weights: Weights::Plain,
        hidden: 2048,
        vocabulary: 102_400,
        context: 163_840,
        served_context: 163_840,
        learned_positions: 0,
        tied: false,
        norm_biases: false,
        head_bias: false,
        layers: layers(
            27,
            1,
            10_944,
            &AttentionOutline::Latent {
                heads: 16,
                rank: 512,
                plain: 128,
                rotary: 64,
                value: 128,
                query_rank: None,
                biases: 0,
            },
            &ExpertsOutline {
                matrices: 3,
                width: 1408,
                biases: 0,
                experts: 64,
                top_k: 6,
                router_biases: 0,
                output_biases: 0,
                corrections: 0,
                shared: 2,
                shared_width: 2 * 1408,
                shared_gate: false,
            },
        ),
    }
}

/// Returns Mixtral-8x7B; its source is at [`crate::Shape::mixtral_8x7b`].
pub(crate) fn mixtral_8x7b() -> Outline {
    Outline {
        family: "mixtral".to_owned(),
        dtype: "bfloat16".to_owned(),
        weights: Weights::Plain,
        hidden: 4096,
        vocabulary: 32_000,
        context: 32_768,
        served_context: 32_768,
        learned_positions: 0,
        tied: false,
        norm_biases: false,
        head_bias: false,
        layers: layers(
            32,
            0,
            14_336,
            &AttentionOutline::Grouped { heads: 32, groups: 8, width: 128, besides: 0 },
            &ExpertsOutline {
                matrices: 3,
                width: 14_336,
                biases: 0,
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
    }
}

/// Experts with a gate and no biases, `top_k` of them a token.
fn gated(experts: usize, top_k: usize, width: usize) -> ExpertsOutline {
    ExpertsOutline {
        matrices: 3,
        width,
        biases: 0,
        experts,
        top_k,
        router_biases: 0,
        output_biases: 0,
        corrections: 0,
        shared: 0,
        shared_width: 0,
        shared_gate: false,
    }
}

/// A model with untied embeddings in bfloat16.
fn bfloat16_model(
    family: &str,
    hidden: usize,
    vocabulary: usize,
    context: usize,
    layers: Vec<LayerOutline>,
) -> Outline {
    Outline {
        family: family.to_owned(),
        dtype: "bfloat16".to_owned(),
        weights: Weights::Plain,
        hidden,
        vocabulary,
        context,
        served_context: context,
        learned_positions: 0,
        tied: false,
        norm_biases: false,
        head_bias: false,
        layers,
    }
}

/// OLMoE-1B-7B (`allenai/OLMoE-1B-7B-0924`): norms over all queries and all keys.
pub(crate) fn olmoe() -> Outline {
    let attention = AttentionOutline::Grouped { heads: 16, groups: 16, width: 128, besides: 2 * 2048 };
    bfloat16_model("olmoe", 2048, 50_304, 4096, layers(16, 0, 0, &attention, &gated(64, 8, 1024)))
}

/// Mixtral-8x22B (`mistralai/Mixtral-8x22B-v0.1`).
pub(crate) fn mixtral_8x22b() -> Outline {
    let attention = AttentionOutline::Grouped { heads: 48, groups: 8, width: 128, besides: 0 };
    bfloat16_model("mixtral", 6144, 32_000, 65_536, layers(56, 0, 0, &attention, &gated(8, 2, 16_384)))
}

/// Qwen3-235B-A22B (`Qwen/Qwen3-235B-A22B`): norms of each head's queries and keys.
pub(crate) fn qwen3_235b() -> Outline {
    let attention = AttentionOutline::Grouped { heads: 64, groups: 4, width: 128, besides: 2 * 128 };
    bfloat16_model("qwen3_moe", 4096, 151_936, 40_960, layers(94, 0, 0, &attention, &gated(128, 8, 1536)))
}

/// DeepSeek-V3 (`deepseek-ai/DeepSeek-V3`): matrices of layers in one byte an element, a shared expert, a
/// correction of the router per expert.
pub(crate) fn deepseek_v3() -> Outline {
    let attention = AttentionOutline::Latent {
        heads: 128,
        query_rank: Some(1536),
        rank: 512,
        plain: 128,
        rotary: 64,
        value: 128,
        biases: 0,
    };
    let experts = ExpertsOutline { corrections: 256, shared: 1, shared_width: 2048, ..gated(256, 8, 2048) };
    let layers = layers(61, 3, 18_432, &attention, &experts);
    let weights = Weights::Fp8 { block: Some(128 * 128) };
    Outline { weights, ..bfloat16_model("deepseek_v3", 7168, 129_280, 163_840, layers) }
}
