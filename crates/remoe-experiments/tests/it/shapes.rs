//! Sizes of published models against what their publishers count.

use remoe_experiments::Shape;

fn parameters(shape: &Shape) -> u64 {
    let element = if shape.facts.dtype == "float32" { 4 } else { 2 };
    shape.facts.total_bytes / element
}

#[test]
fn mixtral_has_the_parameters_of_its_checkpoint() {
    // `total_size` of model.safetensors.index.json of mistralai/Mixtral-8x7B-v0.1 is twice this.
    assert_eq!(parameters(&Shape::mixtral_8x7b()), 46_702_792_704);
}

#[test]
fn deepseek_v2_lite_has_the_parameters_of_its_checkpoint() {
    // `total_size` of model.safetensors.index.json of deepseek-ai/DeepSeek-V2-Lite is twice this.
    assert_eq!(parameters(&Shape::deepseek_v2_lite()), 15_706_484_224);
}

#[test]
fn gpt2_moe_has_eight_feed_forward_networks_per_layer() {
    let shape = Shape::gpt2_moe();
    let gpt2 = 124_439_808;
    let feed_forward = shape.facts.expert_bytes / 4;
    assert_eq!(feed_forward, 2 * 768 * 3072 + 3072 + 768);
    let gates = 12 * 768 * 8;
    assert_eq!(parameters(&shape), gpt2 + 12 * 7 * feed_forward + gates);
}

#[test]
fn parts_make_up_the_whole() {
    for shape in Shape::published_models() {
        let facts = &shape.facts;
        let layers: u64 = facts.non_expert_layer_bytes.iter().sum();
        assert_eq!(shape.other_bytes(), (layers + facts.outside_bytes) as f64, "{}", shape.name);
        assert!(shape.expert_bytes() > shape.other_bytes(), "{}", shape.name);
        assert_eq!(facts.non_expert_layer_bytes.len(), facts.layers, "{}", shape.name);
    }
}

#[test]
fn caches_are_as_published() {
    // DeepSeek-V2: a latent of 512 and 64 rotary elements per token and layer, two bytes each.
    assert_eq!(Shape::deepseek_v2_lite().facts.kv_bytes_per_token, 27 * (512 + 64) * 2);
    assert_eq!(Shape::mixtral_8x7b().facts.kv_bytes_per_token, 32 * 2 * 8 * 128 * 2);
    assert_eq!(Shape::gpt2_moe().facts.kv_bytes_per_token, 12 * 2 * 768 * 4);
}
