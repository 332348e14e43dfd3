//! Target: a checkpoint folder with `config.json`, `generation_config.json`, the index, and the headers of up to four
//! weight files, opened with `Checkpoint::open`.
//!
//! Input: a byte that describes damage, then the files, separated by zero bytes. Without an index, the only weight file
//! is `model.safetensors`, otherwise they are `0.safetensors` to `3.safetensors`. A file has the length that its header
//! describes, except for the damaged one.

use crate::scratch::ScratchFolder;
use crate::{check_error, config, header, memory, sections};
use remoe_model::{
    AttentionTensors, Checkpoint, CheckpointError, Inspection, QueryTensors, StoredAs, Strides, TensorRef,
};
use serde_json::{Map, Value, json};
use std::cell::OnceCell;

/// Memory limit per byte of input: as in `header` and `config`, plus the kept headers and the table of tensors.
const BYTES_PER_INPUT_BYTE: usize = 512;
const BASE_BYTES: usize = 8 << 20;
/// Length limit of the sparse weight files, in bytes.
const FILE_BYTES_LIMIT: u64 = 1 << 40;

const SHARDS: [&str; 4] = ["0.safetensors", "1.safetensors", "2.safetensors", "3.safetensors"];

thread_local! {
    static SCRATCH: OnceCell<ScratchFolder> = const { OnceCell::new() };
}

pub fn run(data: &[u8]) {
    let Some((&damage, data)) = data.split_first() else {
        return;
    };
    let ([config, generation, index, first, second, third, fourth], _) = sections::split(data);
    let headers = [first, second, third, fourth];
    let mut bodies = Vec::new();
    for (number, json) in headers.into_iter().enumerate() {
        let file = [&(json.len() as u64).to_le_bytes(), json].concat();
        let mut length = (file.len() as u64).saturating_add(header::data_bytes(json));
        if usize::from(damage >> 6) == number {
            // Makes the file up to 32 bytes too short or 31 bytes too long.
            let change_bytes = i64::from(damage & 63) - if damage & 32 == 0 { 0 } else { 64 };
            length = length.saturating_add_signed(change_bytes);
        }
        if length > FILE_BYTES_LIMIT {
            return;
        }
        bodies.push((file, length));
    }
    let mut files = vec![("config.json", config, config.len() as u64)];
    if !generation.is_empty() {
        files.push(("generation_config.json", generation, generation.len() as u64));
    }
    if index.is_empty() {
        let (file, length) = &bodies[0];
        files.push(("model.safetensors", file, *length));
    } else {
        files.push(("model.safetensors.index.json", index, index.len() as u64));
        for (name, (file, length)) in SHARDS.into_iter().zip(&bodies) {
            files.push((name, file, *length));
        }
    }
    SCRATCH.with(|cell| {
        let scratch = cell.get_or_init(ScratchFolder::new);
        scratch.fill(&files);
        match memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || {
            Checkpoint::open(scratch.folder())
        }) {
            Err(error) => {
                // The message contains the path of the scratch folder, which is short.
                check_error(&error.to_string());
                assert!(error.path().starts_with(scratch.folder()));
            }
            Ok(checkpoint) => {
                let lengths: Vec<u64> = files
                    .iter()
                    .filter(|(name, ..)| name.ends_with(".safetensors"))
                    .map(|(_, _, length)| *length)
                    .collect();
                check_checkpoint(&checkpoint, &lengths);
            }
        }
    });
}

fn check_checkpoint(checkpoint: &Checkpoint, lengths: &[u64]) {
    config::check_config(checkpoint.config());
    config::check_defaults(checkpoint.generation(), checkpoint.config());
    let file_count = checkpoint.files().count();
    assert!(file_count <= lengths.len());

    // Every tensor lies within its file.
    let named_tensors: Vec<TensorRef> =
        checkpoint.tensor_names().into_iter().filter_map(|n| checkpoint.tensor(n)).collect();
    let check_tensor = |tensor: &TensorRef| {
        let path = checkpoint.files().nth(tensor.file).expect("a file of the checkpoint");
        let length = std::fs::metadata(path).expect("it is there").len();
        assert!(
            tensor.offset >= 8 && tensor.offset.checked_add(tensor.bytes).is_some_and(|end| end <= length)
        );
        let elements: u128 = tensor.shape.iter().map(|size| *size as u128).product();
        let (stored, scales) = match &tensor.stored {
            StoredAs::Plain => (tensor.bytes / tensor.dtype.bytes(), None),
            StoredAs::Fp8 { scales, .. } => (tensor.bytes, Some(scales)),
            StoredAs::Mxfp4 { scales } => (2 * tensor.bytes, Some(scales)),
        };
        if let Some(scales) = scales {
            let path = checkpoint.files().nth(scales.file).expect("a file of the checkpoint");
            let length = std::fs::metadata(path).expect("it is there").len();
            assert!(scales.offset.checked_add(scales.bytes).is_some_and(|end| end <= length));
        }
        match tensor.strides {
            None => assert_eq!(elements, u128::from(stored), "{tensor:?}"),
            // A strided view: its last element lies within the bytes, which it shares with other tensors.
            Some(Strides { first, row, column }) => {
                let last = |size: Option<&usize>, step: usize| size.map_or(0, |size| (size - 1) * step);
                let last = first + last(tensor.shape.first(), row) + last(tensor.shape.get(1), column);
                assert!(elements <= u128::from(stored), "{tensor:?}");
                assert!((last as u64) < stored, "{tensor:?}");
            }
        }
    };
    named_tensors.iter().for_each(check_tensor);

    checkpoint.positions().into_iter().for_each(check_tensor);
    let sizes = checkpoint.sizes();
    let mut experts = 0;
    for (id, _) in checkpoint.config().layers.iter().enumerate() {
        let norms = checkpoint.norms(id).expect("a layer of the model");
        for norm in [&norms.attention, &norms.mlp] {
            check_tensor(&norm.weight);
            norm.bias.iter().for_each(check_tensor);
        }
        match checkpoint.attention(id).expect("a layer of the model") {
            AttentionTensors::Gqa(gqa) => {
                [&gqa.q, &gqa.k, &gqa.v, &gqa.o].into_iter().for_each(|linear| {
                    check_tensor(&linear.weight);
                    linear.bias.iter().for_each(check_tensor);
                });
                gqa.q_norm.iter().chain(&gqa.k_norm).chain(&gqa.sinks).for_each(check_tensor);
            }
            AttentionTensors::Mla(mla) => {
                match &mla.query {
                    QueryTensors::Direct(weight) => check_tensor(weight),
                    QueryTensors::Latent { a, a_norm, b } => {
                        [&a.weight, a_norm, b].into_iter().chain(&a.bias).for_each(check_tensor);
                    }
                }
                let all = [&mla.kv_a.weight, &mla.kv_a_norm, &mla.kv_b, &mla.o.weight];
                all.into_iter().chain(&mla.kv_a.bias).chain(&mla.o.bias).for_each(check_tensor);
            }
        }
        let Some(moe) = checkpoint.config().moe(id) else {
            assert!(checkpoint.dense(id).expect("a layer of the model").is_some());
            assert!(checkpoint.expert(id, 0).is_err());
            continue;
        };
        experts += moe.experts as u64;
        let router = checkpoint.router(id).expect("a layer of the model").expect("it has a router");
        check_tensor(&router.linear.weight);
        router.linear.bias.iter().chain(&router.correction).for_each(check_tensor);
        checkpoint.experts_bias(id).expect("a layer of the model").into_iter().for_each(check_tensor);
        // Checks only some, because a stacked tensor may describe billions of experts.
        for expert in (0..moe.experts.min(64)).chain(moe.experts.saturating_sub(2)..moe.experts) {
            let tensors = checkpoint.expert(id, expert).expect("an expert of the model");
            assert_eq!(tensors.bytes(), sizes.expert_bytes, "all experts are of one size");
            tensors.tensors().for_each(check_tensor);
            let up = &tensors.up.weight;
            if let Some(gate) = tensors.gate.as_ref().map(|gate| &gate.weight) {
                assert!(
                    gate.strides.is_some()
                        || gate.file != up.file
                        || gate.offset + gate.bytes <= up.offset
                        || up.offset + up.bytes <= gate.offset
                );
            }
        }
        assert!(checkpoint.expert(id, moe.experts).is_err());
    }

    let sum: u64 = sizes.non_expert_layer_bytes.iter().sum();
    assert_eq!(sizes.total_bytes, sizes.outside_bytes + sum + experts * sizes.expert_bytes);
    assert_eq!(sizes.kv_bytes_per_token, sizes.kv_layer_bytes_per_token.iter().sum::<u64>());
    let all: u64 = lengths.iter().sum();
    assert!(
        sizes.total_bytes <= all.saturating_mul(2),
        "the parts are in the files (a tied head twice at most)"
    );
    let inspection = checkpoint.inspect().expect("every page of the files can be read");
    let text = serde_json::to_string(&inspection).expect("it can be written");
    assert_eq!(serde_json::from_str::<Inspection>(&text).expect("and read"), inspection);
    let head = checkpoint.head();
    checkpoint
        .read_into(head, 0..head.bytes.min(4096), &mut vec![0; head.bytes.min(4096) as usize])
        .expect("a tensor can be read");
}

pub fn seeds() -> Vec<Vec<u8>> {
    let gqa = r#""hidden_size":4,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":2,"intermediate_size":1,"vocab_size":3,"num_hidden_layers":1,"num_experts_per_tok":1,"max_position_embeddings":8"#;
    let configs = [
        format!(r#"{{"model_type":"mixtral",{gqa},"num_local_experts":2,"dtype":"bfloat16"}}"#),
        format!(r#"{{"model_type":"mixtral",{gqa},"num_local_experts":2,"tie_word_embeddings":true}}"#),
        format!(r#"{{"model_type":"olmoe",{gqa},"num_experts":2,"attention_bias":true}}"#),
        format!(r#"{{"model_type":"qwen2_moe",{gqa},"num_experts":2,"moe_intermediate_size":1,"shared_expert_intermediate_size":2,"mlp_only_layers":[]}}"#),
        format!(r#"{{"model_type":"qwen2_moe",{gqa},"num_experts":1,"moe_intermediate_size":1,"shared_expert_intermediate_size":2,"decoder_sparse_step":2,"num_hidden_layers":2}}"#)
            .replacen(r#""num_hidden_layers":1,"#, "", 1),
        r#"{"model_type":"deepseek_v2","hidden_size":4,"num_attention_heads":2,"intermediate_size":1,"vocab_size":3,"num_hidden_layers":2,"first_k_dense_replace":1,"num_experts_per_tok":1,"n_routed_experts":2,"moe_intermediate_size":1,"n_shared_experts":1,"q_lora_rank":2,"kv_lora_rank":2,"qk_rope_head_dim":2,"qk_nope_head_dim":2,"v_head_dim":2,"attention_bias":true}"#.to_owned(),
        r#"{"model_type":"deepseek_v2","hidden_size":4,"num_attention_heads":2,"vocab_size":3,"num_hidden_layers":1,"num_experts_per_tok":1,"n_routed_experts":2,"moe_intermediate_size":1,"n_shared_experts":0,"q_lora_rank":null,"kv_lora_rank":2,"qk_rope_head_dim":2,"qk_nope_head_dim":2,"v_head_dim":2,"topk_method":"group_limited_greedy","n_group":2,"topk_group":1}"#.to_owned(),
    ];
    let mut seeds = Vec::new();
    for config in &configs {
        for fused in [false, true] {
            let tensors = required_tensors(config, fused);
            let generation = br#"{"eos_token_id":[1],"do_sample":true}"#;
            let whole = Value::Object(header_map(&tensors)).to_string();
            seeds.push(seed(&[config.as_bytes(), generation, b"", whole.as_bytes()]));
            // Two weight files and their index.
            let (left, right) = tensors.split_at(tensors.len() / 2);
            let mut map = Map::new();
            for (file, part) in SHARDS.iter().zip([left, right]) {
                map.extend(part.iter().map(|(name, ..)| (name.clone(), json!(file))));
            }
            let parts = [left, right].map(|part| Value::Object(header_map(part)).to_string());
            let index = json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string();
            seeds.push(seed(&[
                config.as_bytes(),
                b"",
                index.as_bytes(),
                parts[0].as_bytes(),
                parts[1].as_bytes(),
            ]));
        }
    }
    seeds
}

fn seed(files: &[&[u8]]) -> Vec<u8> {
    [&[0], sections::join(files).as_slice()].concat()
}

/// Name, type and shape of a tensor.
type TensorEntry = (String, &'static str, Vec<u64>);

/// Finds the tensors that a config requires, by adding each one that `Checkpoint::open` reports as missing.
fn required_tensors(config: &str, fused: bool) -> Vec<TensorEntry> {
    let scratch = ScratchFolder::new();
    let dtype = if config.contains("bfloat16") { "BF16" } else { "F32" };
    let mut tensors: Vec<TensorEntry> = Vec::new();
    loop {
        let json = Value::Object(header_map(&tensors)).to_string();
        let file = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        let length = file.len() as u64 + header::data_bytes(json.as_bytes());
        scratch.fill(&[
            ("config.json", config.as_bytes(), config.len() as u64),
            ("model.safetensors", &file, length),
        ]);
        match Checkpoint::open(scratch.folder()) {
            Ok(_) => return tensors,
            Err(CheckpointError::MissingTensor { tensor, message, .. }) => {
                let shape = &message[message.find('[').expect("the message has the shape")..];
                let shape: Vec<u64> = serde_json::from_str(shape).expect("a list of sizes");
                // The first missing expert: if `fused`, adds one stacked tensor for all experts.
                match tensor
                    .split_once(".experts.0.")
                    .filter(|_| fused && tensors.iter().all(|t| t.0 != tensor))
                {
                    Some((block, _)) => {
                        tensors.push((
                            format!("{block}.experts.gate_up_proj"),
                            dtype,
                            vec![2, 2 * shape[0], shape[1]],
                        ));
                        tensors.push((
                            format!("{block}.experts.down_proj"),
                            dtype,
                            vec![2, shape[1], shape[0]],
                        ));
                    }
                    None => tensors.push((tensor, dtype, shape)),
                }
            }
            // The stack of two does not fit a model with one expert: uses separate tensors.
            Err(_) if fused => return required_tensors(config, false),
            Err(error) => panic!("{error}"),
        }
    }
}

fn header_map(tensors: &[TensorEntry]) -> Map<String, Value> {
    let mut offset = 0;
    let mut map = Map::new();
    for (name, dtype, shape) in tensors {
        let bytes = shape.iter().product::<u64>() * if *dtype == "BF16" { 2 } else { 4 };
        map.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bytes]}),
        );
        offset += bytes;
    }
    map
}
