//! Weights that are stored as fp8 or MXFP4: sizes, byte ranges and refusals.

use crate::support;

use remoe_model::{AttentionTensors, Checkpoint, CheckpointError, Outline, StoredAs, StoredDtype};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::path::PathBuf;
use support::Material;

const FORMS: [&str; 3] = ["dsv3-fp8", "qwen3moe-fp8", "gptoss-mxfp4"];

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// Reads a reference model as material for changes.
fn material(name: &str) -> Material {
    let config = std::fs::read(folder(name).join("config.json")).unwrap();
    let bytes = std::fs::read(folder(name).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = tensors.tensors().into_iter();
    Material {
        config: serde_json::from_slice(&config).unwrap(),
        tensors: tensors
            .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
            .collect(),
    }
}

#[test]
fn sizes_sum_to_those_of_the_files() {
    for name in FORMS {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        let stored: usize = material(name).tensors.values().map(|(_, _, data)| data.len()).sum();
        let seen = checkpoint.inspect().unwrap();
        assert_eq!(seen.total_bytes, stored as u64, "{name}");
        let experts = (seen.moe_layers.len() * seen.experts) as u64;
        let sum = |expert: u64, layers: &[u64], outside: u64| {
            experts * expert + layers.iter().sum::<u64>() + outside
        };
        let parts = sum(seen.expert_bytes, &seen.non_expert_layer_bytes, seen.outside_bytes);
        assert_eq!(parts, seen.total_bytes, "{name}");
        assert_eq!((seen.dtype.as_str(), checkpoint.config().dtype), ("bfloat16", StoredDtype::Bf16));

        // Counted in the dtype, the sizes equal those of an unquantised checkpoint of this config.
        let config = std::fs::read(folder(name).join("config.json")).unwrap();
        let outline = Outline::from_json(&folder(name), &config, Some("bfloat16")).unwrap();
        let (decoded, plain) = (seen.decoded(), outline.inspection(""));
        assert_eq!(decoded.expert_bytes, plain.expert_bytes, "{name}");
        assert_eq!(decoded.non_expert_layer_bytes, plain.non_expert_layer_bytes, "{name}");
        assert_eq!(decoded.outside_bytes, plain.outside_bytes, "{name}");
        assert_eq!(seen.resident_total_bytes("bfloat16"), plain.total_bytes, "{name}");
        assert_eq!(seen.resident_total_bytes("float32"), plain.resident_total_bytes("float32"), "{name}");
        assert_eq!(seen.resident_non_expert_bytes("bfloat16"), plain.resident_non_expert_bytes("bfloat16"));
        let text = serde_json::to_string(&seen).unwrap();
        assert_eq!(serde_json::from_str::<remoe_model::Inspection>(&text).unwrap(), seen);
    }
}

#[test]
fn expert_is_read_by_its_byte_range() {
    let checkpoint = Checkpoint::open(folder("gptoss-mxfp4")).unwrap();
    let stored = material("gptoss-mxfp4").tensors;
    let (_, shape, blocks) = &stored["model.layers.1.mlp.experts.gate_up_proj_blocks"];
    let (_, _, scales) = &stored["model.layers.1.mlp.experts.gate_up_proj_scales"];
    assert_eq!(shape[..], [8, 64, 2, 16]);
    let expert = checkpoint.expert(1, 5).unwrap();
    let mut bytes = vec![0; 64 * 2 * 16];
    let (gate, up) = (&expert.gate.unwrap().weight, &expert.up.weight);
    assert_eq!((gate.bytes, gate.own_bytes()), (64 * 32, 32 * (32 + 2)));
    checkpoint.read_into(gate, 0..gate.bytes, &mut bytes).unwrap();
    assert_eq!(bytes, blocks[5 * 64 * 32..6 * 64 * 32]);
    // Both projections share the range; element [3, 33] of the second is in row 7.
    assert_eq!(gate.offset, up.offset);
    let strides = up.strides.unwrap();
    let decoded = checkpoint.read(up).unwrap();
    let at = 2 * (strides.first + 3 * strides.row + 33 * strides.column);
    let found = f32::from_bits(u32::from(u16::from_le_bytes([decoded[at], decoded[at + 1]])) << 16);
    let row = 5 * 64 + 7;
    let code = blocks[(row * 2 + 1) * 16] >> 4;
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    let value = if code & 8 == 0 { magnitude } else { -magnitude };
    assert_eq!(found, value * 2.0_f32.powi(i32::from(scales[row * 2 + 1]) - 127));

    // Rows from the middle of a block equal those of the whole matrix.
    for (name, rows) in [("dsv3-fp8", 129..133), ("qwen3moe-fp8", 9..14)] {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        let down = checkpoint.expert(1, 3).unwrap().down.weight;
        assert!(matches!(down.stored, StoredAs::Fp8 { .. }));
        let whole = checkpoint.read(&down).unwrap();
        let mut some = Vec::new();
        checkpoint.read_rows(&down, rows.clone(), &mut some).unwrap();
        let row = 2 * down.shape[1];
        assert_eq!(whole.len(), down.shape[0] * row);
        assert_eq!(some, whole[rows.start * row..rows.end * row]);
        assert!(checkpoint.read_rows(&down, 0..down.shape[0] + 1, &mut some).is_err());
    }
}

#[test]
fn unconverted_modules_are_read_unchanged() {
    let checkpoint = Checkpoint::open(folder("qwen3moe-fp8")).unwrap();
    let stored = |layer: usize| match checkpoint.attention(layer).unwrap() {
        AttentionTensors::Gqa(tensors) => [&tensors.q, &tensors.k].map(|linear| linear.weight.stored.clone()),
        AttentionTensors::Mla(_) => unreachable!(),
    };
    assert!(matches!(stored(0), [StoredAs::Fp8 { .. }, StoredAs::Plain]));
    assert!(matches!(stored(1), [StoredAs::Fp8 { .. }, StoredAs::Fp8 { .. }]));
    assert_eq!(checkpoint.head().stored, StoredAs::Plain);
}

/// Opens the material and checks that the error names `field`.
fn refused(material: &Material, field: &str) -> CheckpointError {
    let error = material.write().error();
    assert_eq!(error.field(), Some(field), "{error}");
    error
}

#[test]
fn unsupported_quantisation_is_refused_by_name() {
    let fp8: [(&str, Value); 10] = [
        ("quant_method", json!("compressed-tensors")),
        ("quant_method", json!(null)),
        ("fmt", json!("e5m2")),
        ("activation_scheme", json!("static")),
        ("weight_block_size", json!(null)),
        ("weight_block_size", json!([128])),
        ("weight_block_size", json!([0, 128])),
        ("weight_block_size", json!("128")),
        ("modules_to_not_convert", json!(["lm_head", 3])),
        ("kv_cache_scheme", json!({"num_bits": 8})),
    ];
    for (name, value) in fp8 {
        let mut material = material("dsv3-fp8");
        material.config["quantization_config"][name] = value;
        refused(&material, &format!("quantization_config.{name}"));
    }
    let mut other = material("qwen3moe-fp8");
    other.set("quantization_config", json!({"quant_method": "mxfp4"}));
    refused(&other, "quantization_config");
    let mut material = material("gptoss-mxfp4");
    material.config["quantization_config"]["bits"] = json!(4);
    refused(&material, "quantization_config.bits");
    material.config["quantization_config"].as_object_mut().unwrap().remove("bits");
    material.set("dtype", json!("float16"));
    refused(&material, "quantization_config");
}

#[test]
fn form_that_the_tensors_lack_is_refused_by_name() {
    const DOWN: &str = "model.layers.1.mlp.experts.3.down_proj.weight";
    const BLOCKS: &str = "model.layers.0.mlp.experts.gate_up_proj_blocks";
    let fp8 = material("dsv3-fp8");
    let scales = format!("{DOWN}_scale_inv");
    let changed = |change: &dyn Fn(&mut Material)| {
        let mut material = fp8.clone();
        change(&mut material);
        material
    };
    // The error names the first weight that is looked up.
    let first = "model.layers.0.self_attn.q_a_proj.weight";
    let error = refused(
        &changed(&|m| m.config["quantization_config"]["weight_block_size"] = json!([64, 128])),
        "model.layers.0.self_attn.kv_b_proj.weight_scale_inv",
    );
    assert!(error.to_string().contains("has shape [1, 1], expected [2, 1] by config.json"), "{error}");
    refused(
        &changed(&|m| {
            m.unset("quantization_config");
        }),
        first,
    );
    refused(
        &changed(&|m| {
            m.tensors.remove(&scales);
        }),
        &scales,
    );
    refused(&changed(&|m| m.tensors.get_mut(&scales).unwrap().1 = vec![1, 2]), &scales);
    refused(
        &changed(&|m| {
            m.typed(&scales, Dtype::F16, &[2, 1]);
        }),
        &scales,
    );
    refused(&changed(&|m| m.tensors.get_mut(DOWN).unwrap().0 = Dtype::F8_E5M2), DOWN);
    refused(&changed(&|m| m.tensors.get_mut(DOWN).unwrap().0 = Dtype::U8), DOWN);
    // A plain weight with scales is refused; without scales, its size differs from that of the other experts.
    let plain = changed(&|m| {
        m.typed(DOWN, Dtype::BF16, &[136, 20]);
    });
    refused(&plain, &scales);
    let mut plain = plain;
    plain.tensors.remove(&scales);
    refused(&plain, DOWN);
    let listed = json!(["mlp.experts.3"]);
    let listed = changed(&|m| m.config["quantization_config"]["modules_to_not_convert"] = listed.clone());
    refused(&listed, "model.layers.1.mlp.experts.3.gate_proj.weight");
    let starred = json!(["model.layers.*.self_attn"]);
    refused(
        &changed(&|m| m.config["quantization_config"]["modules_to_not_convert"] = starred.clone()),
        first,
    );

    let mxfp4 = material("gptoss-mxfp4");
    let changed = |change: &dyn Fn(&mut Material)| {
        let mut material = mxfp4.clone();
        change(&mut material);
        material
    };
    let scales = BLOCKS.replace("blocks", "scales");
    refused(
        &changed(&|m| {
            m.unset("quantization_config");
        }),
        BLOCKS,
    );
    refused(
        &changed(&|m| {
            m.tensors.remove(&scales);
        }),
        &scales,
    );
    refused(&changed(&|m| m.tensors.get_mut(&scales).unwrap().1 = vec![8, 32, 4]), &scales);
    refused(&changed(&|m| m.tensors.get_mut(&scales).unwrap().0 = Dtype::I8), &scales);
    refused(&changed(&|m| m.tensors.get_mut(BLOCKS).unwrap().1 = vec![8, 64, 4, 8]), BLOCKS);
    let dequantised = changed(&|m| {
        m.tensors.remove(BLOCKS);
        m.typed("model.layers.0.mlp.experts.gate_up_proj", Dtype::BF16, &[8, 64, 64]);
    });
    refused(&dequantised, BLOCKS);
}

#[test]
fn fp8_config_without_fp8_tensors_is_refused() {
    let said = material("qwen3moe-fp8").config["quantization_config"].clone();
    let mut plain = support::qwen3_moe();
    plain.set("dtype", json!("float32")).set("quantization_config", said);
    refused(&plain, "quantization_config");
    plain.unset("quantization_config");
    plain.write().open();
}

#[test]
fn nan_is_refused_when_it_is_read() {
    const UP: &str = "model.layers.1.mlp.experts.3.up_proj.weight";
    let mut fp8 = material("dsv3-fp8");
    fp8.tensors.get_mut(UP).unwrap().2[7 * 136 + 130] = 0xff;
    let checkpoint = fp8.write().open();
    let error = checkpoint.read(&checkpoint.expert(1, 3).unwrap().up.weight).unwrap_err();
    assert_eq!(error.field(), Some(UP));
    assert!(error.to_string().contains("element [7, 130]: 0xff"), "{error}");
    checkpoint.read(&checkpoint.expert(1, 2).unwrap().up.weight).unwrap();

    const SCALES: &str = "model.layers.1.mlp.experts.down_proj_scales";
    let mut mxfp4 = material("gptoss-mxfp4");
    mxfp4.tensors.get_mut(SCALES).unwrap().2[6 * 64 + 9] = 0xff;
    let checkpoint = mxfp4.write().open();
    let error = checkpoint.read(&checkpoint.expert(1, 6).unwrap().down.weight).unwrap_err();
    assert!(error.to_string().contains("element [9, 0]: the scale 0xff"), "{error}");
    checkpoint.read(&checkpoint.expert(1, 5).unwrap().down.weight).unwrap();
}

#[test]
fn fingerprint_depends_on_the_quantised_form() {
    let print = |material: &Material| material.write().open().fingerprint().unwrap();
    let fp8 = material("qwen3moe-fp8");
    let mut same = fp8.clone();
    same.config["quantization_config"]["activation_scheme"] = json!(null);
    assert_eq!(print(&fp8), print(&same));
    // Blocks of other sides, in the same number.
    let mut other = material("dsv3-fp8");
    let one = print(&other);
    other.config["quantization_config"]["weight_block_size"] = json!([127, 128]);
    assert_ne!(print(&other), one);
}
