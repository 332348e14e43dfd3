//! Rotary frequencies, compared with values that transformers 5.17 computed.

use crate::support;

use std::path::Path;

use remoe_model::{ModelConfig, RopeScaling};
use serde_json::{Value, json};
use support::{Material, deepseek_v2, mixtral};

fn parse(material: &Material) -> ModelConfig {
    let text = material.config.to_string();
    ModelConfig::from_json(Path::new("config.json"), text.as_bytes()).unwrap()
}

/// Expected values: `MixtralRotaryEmbedding(config).inv_freq` of transformers 5.17 for heads of 16
/// elements and `max_position_embeddings` 4096.
#[test]
fn rope_frequencies_equal_those_of_transformers() {
    let cases: [(Value, f64, [f64; 8]); 5] = [
        (
            json!({"rope_theta": 1e6}),
            1.0,
            [
                1.0,
                0.177_827_939_391_136_17,
                0.031_622_778_624_296_19,
                0.005_623_413_249_850_273,
                0.001_000_000_047_497_451_3,
                0.000_177_827_940_206_043_42,
                3.162_277_425_872_162e-5,
                5.623_413_471_766_98e-6,
            ],
        ),
        (
            json!({"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6}),
            1.0,
            [
                0.333_333_343_267_440_8,
                0.059_275_981_038_808_82,
                0.010_540_925_897_657_871,
                0.001_874_471_083_283_424_4,
                0.000_333_333_358_867_093_9,
                5.927_597_885_602_154e-5,
                1.054_092_444_974_230_6e-5,
                1.874_471_195_151_272_7e-6,
            ],
        ),
        (
            json!({"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}),
            1.0,
            [
                1.0,
                0.193_922_758_102_417,
                0.037_606_030_702_590_94,
                0.001_312_569_482_252_001_8,
                0.000_176_776_680_746_115_74,
                3.428_102_354_519_069e-5,
                6.647_869_668_086_059e-6,
                1.289_173_155_782_919e-6,
            ],
        ),
        (
            json!({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}),
            1.138_629_436_111_989,
            [
                1.0,
                0.316_227_763_891_220_1,
                0.081_250_004_470_348_36,
                0.019_764_237_105_846_405,
                0.004_375_000_018_626_451_5,
                0.000_790_569_465_607_404_7,
                0.000_250_000_011_874_362_8,
                7.905_694_656_074_047e-5,
            ],
        ),
        (
            json!({"rope_type": "yarn", "rope_theta": 10000.0, "factor": null, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2, "truncate": false, "mscale": 0.5, "mscale_all_dim": 0.9}),
            0.929_934_987_178_035_6,
            [
                1.0,
                0.316_227_763_891_220_1,
                0.071_608_461_439_609_53,
                0.007_324_998_266_994_953,
                0.001_249_999_972_060_322_8,
                0.000_395_284_732_803_702_35,
                0.000_125_000_005_937_181_4,
                3.952_847_328_037_023_5e-5,
            ],
        ),
    ];
    for (rope, factor, expected) in cases {
        let mut material = mixtral();
        material
            .set("head_dim", json!(16))
            .set("max_position_embeddings", json!(4096))
            .set("rope_parameters", rope.clone());
        let facts = parse(&material).rope.unwrap();
        assert!((facts.attention_factor - factor).abs() < 1e-15, "{rope}");
        for (have, want) in facts.inverse_frequencies().iter().zip(expected) {
            assert!(((f64::from(*have) - want) / want).abs() < 2e-7, "{rope}: {have} {want}");
        }
    }
}

/// Expected values: `DeepseekV2RotaryEmbedding` and `DeepseekV2Attention.scaling` of transformers 5.17.
#[test]
fn yarn_of_latent_attention_equals_transformers() {
    let mut material = deepseek_v2();
    material.set("qk_rope_head_dim", json!(8)).set(
        "rope_parameters",
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9}),
    );
    let config = parse(&material);
    assert!((config.rope.as_ref().unwrap().attention_factor - 0.975_349_650_432_106_6).abs() < 1e-15);
    let scale = config.layers[0].attention.softmax_scale();
    assert!((scale - 0.338_112_106_983_504_3).abs() < 1e-15);
    let expected = [1.0, 0.025, 0.002_5, 0.000_25];
    for (have, want) in config.rope.as_ref().unwrap().inverse_frequencies().iter().zip(expected) {
        assert!(((f64::from(*have) - want) / want).abs() < 2e-7);
    }
}

/// As in `standardize_rope_params` of transformers.
#[test]
fn top_level_original_context_takes_precedence() {
    let mut material = mixtral();
    material.set("original_max_position_embeddings", json!(8)).set(
        "rope_parameters",
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    );
    let RopeScaling::Yarn { original, .. } = parse(&material).rope.unwrap().scaling else {
        panic!("no yarn");
    };
    assert_eq!(original, 8);
}

/// As `_get_and_verify_max_len` of vLLM, except that type dynamic is only served while its frequencies stay the same.
#[test]
fn context_length_follows_from_the_rope() {
    let yarn = |factor: f64, original: usize| json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original});
    let factors = vec![1.0; 8];
    for (stated, rope, reached) in [
        (40_960, json!({"rope_type": "default"}), 40_960),
        // Qwen3's model card.
        (40_960, yarn(4.0, 32_768), 131_072),
        // DeepSeek-V3 and gpt-oss.
        (163_840, yarn(40.0, 4096), 163_840),
        (131_072, yarn(32.0, 4096), 131_072),
        (65_536, yarn(2.0, 16_384), 32_768),
        (1000, yarn(1.5, 333), 499),
        (4096, json!({"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 512}), 4096),
        (4096, json!({"rope_type": "yarn", "factor": 2.0}), 8192),
        (4096, json!({"type": "linear", "factor": 2.5}), 10_240),
        (4096, json!({"rope_type": "dynamic", "factor": 4.0}), 4096),
        (
            131_072,
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
            131_072,
        ),
        (
            131_072,
            json!({"rope_type": "longrope", "factor": 32.0, "short_factor": factors, "long_factor": factors, "original_max_position_embeddings": 4096}),
            131_072,
        ),
    ] {
        let mut material = mixtral();
        material
            .unset("rope_parameters")
            .set("head_dim", json!(16))
            .set("max_position_embeddings", json!(stated))
            .set("rope_scaling", rope.clone());
        assert_eq!(parse(&material).context_length, reached, "{rope}");
    }
}

#[test]
fn context_length_out_of_bounds_is_refused() {
    for factor in [1e12, 0.01] {
        let mut material = mixtral();
        material.unset("rope_parameters").set("max_position_embeddings", json!(64)).set(
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64}),
        );
        let text = material.config.to_string();
        let error = ModelConfig::from_json(Path::new("config.json"), text.as_bytes()).unwrap_err();
        assert_eq!(error.field(), Some("rope_scaling.factor"), "{error}");
    }
}
