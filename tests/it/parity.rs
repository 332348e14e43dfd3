//! Every reference model answers as transformers does.

use remoe_proto::v1::{GenerateRequest, InspectReply, generate_request};
use remoe_test_support::control::greedy;
use remoe_test_support::fixture::{ExpectedPrompt, ModelFixture, REFUSED, served_fixtures};
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::placement::{all_experts, remote_sets};

/// Tolerance of the logits: max|difference| / max|reference|.
const LOGITS: f32 = 2e-4;
const GIB: u64 = 1 << 30;
/// Tolerance of a routing weight: |difference|.
const WEIGHTS: f32 = 1e-4;

/// Runs a model in float32 with half of its experts in a remote function.
async fn half_remote(model: &ModelFixture, options: StartOptions) -> (MainFunction, RemoteFunction) {
    let checkpoint = model.checkpoint();
    let main = MainFunction::start(&model.folder, options).await;
    let experts = all_experts(&checkpoint);
    let remote = RemoteFunction::start(&model.folder, &experts, StartOptions::dtype("float32")).await;
    main.control.route(&[remote.address()], &remote_sets(&checkpoint, 0.5)).await;
    (main, remote)
}

#[tokio::test(flavor = "multi_thread")]
async fn reference_models_answer_as_transformers_does() {
    answer_as_transformers_does(&StartOptions::dtype("float32")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reference_models_answer_as_transformers_does_by_libtorch() {
    answer_as_transformers_does(&StartOptions::dtype("float32").torch()).await;
}

/// GPU code paths: products, gated networks, up-projections, norms and attention by LibTorch.
#[tokio::test(flavor = "multi_thread")]
async fn reference_models_answer_as_transformers_does_on_a_device() {
    answer_as_transformers_does(&StartOptions::dtype("float32").simulated_device(GIB)).await;
}

async fn answer_as_transformers_does(options: &StartOptions) {
    for model in served_fixtures() {
        let name = &model.name;
        let expected = model.expected().unwrap();
        let (main, _remote) = half_remote(&model, options.clone()).await;
        let (mut logits, mut weights) = (0.0_f32, 0.0_f32);
        for prompt in &expected.prompts {
            let reply = main.control.inspect_ids(&prompt.ids).await;
            let layers: Vec<u32> = reply.routing.iter().map(|layer| layer.layer).collect();
            assert_eq!(layers, expected.moe_layers, "{name}");
            logits = logits.max(compare_logits(name, prompt, &reply));
            weights = weights.max(compare_routing(name, prompt, &reply));
            let tokens = prompt.greedy.len();
            let answer = main.control.generate(greedy(&prompt.ids, tokens as u32)).await.finished;
            assert_eq!(answer.tokens, prompt.greedy, "{name}: greedy tokens after {:?}", prompt.ids);
            assert_eq!(answer.reason, "length", "{name}");
            let positions = prompt.ids.len() + tokens - 1;
            assert_eq!(answer.forwarded_positions, positions as u64, "{name}: positions forwarded");
        }
        println!("{name}: logits within {logits:.1e}, routing weights within {weights:.1e}");
    }
}

fn compare_logits(name: &str, prompt: &ExpectedPrompt, reply: &InspectReply) -> f32 {
    let (found, reference) = (&reply.last_logits, &prompt.last_logits);
    assert_eq!(found.len(), reference.len(), "{name}: vocabulary");
    let largest = reference.iter().fold(0.0_f32, |largest, logit| largest.max(logit.abs()));
    let pairs = found.iter().zip(reference);
    let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max) / largest;
    // Written without `<`, so that NaN fails.
    assert!(difference <= LOGITS, "{name}: logits of {:?} differ by {difference}", prompt.ids);
    assert!(found.iter().all(|logit| logit.is_finite()), "{name}: logits of {:?}", prompt.ids);
    let best = (0..found.len()).rev().max_by(|&a, &b| found[a].total_cmp(&found[b]));
    assert_eq!(best, Some(prompt.argmax), "{name}: likeliest token after {:?}", prompt.ids);
    difference
}

fn compare_routing(name: &str, prompt: &ExpectedPrompt, reply: &InspectReply) -> f32 {
    let mut largest = 0.0_f32;
    assert_eq!(reply.routing.len(), prompt.routing.len(), "{name}: layers with experts");
    for (found, reference) in reply.routing.iter().zip(&prompt.routing) {
        let layer = found.layer;
        assert_eq!(found.tokens.len(), prompt.ids.len(), "{name}: tokens in layer {layer}");
        assert_eq!(found.tokens.len(), reference.len(), "{name}: tokens in layer {layer}");
        for (position, (found, reference)) in found.tokens.iter().zip(reference).enumerate() {
            assert_eq!(found.experts, reference.experts, "{name}: layer {layer}, position {position}");
            assert_eq!(found.weights.len(), reference.weights.len(), "{name}: layer {layer}");
            for (a, b) in found.weights.iter().zip(&reference.weights) {
                let difference = (a - b).abs();
                assert!(difference <= WEIGHTS, "{name}: layer {layer}, position {position}: {a} for {b}");
                largest = largest.max(difference);
            }
        }
    }
    largest
}

#[tokio::test(flavor = "multi_thread")]
async fn text_and_chat_become_text() {
    let model = ModelFixture::fixture("mixtral-text");
    let texts = model.expected().unwrap().texts;
    assert!(texts.iter().any(|text| text.chat) && texts.iter().any(|text| !text.chat));
    let (main, _remote) = half_remote(&model, StartOptions::dtype("float32")).await;
    for text in texts {
        let prompt = match text.chat {
            true => generate_request::Prompt::Chat(text.prompt.clone()),
            false => generate_request::Prompt::Text(text.prompt.clone()),
        };
        let request = GenerateRequest {
            prompt: Some(prompt),
            ..greedy(&[], u32::try_from(text.greedy.len()).unwrap())
        };
        let answer = main.control.generate(request).await;
        assert_eq!(answer.prompt_ids, text.ids, "{:?} as tokens", text.prompt);
        assert_eq!(answer.finished.tokens, text.greedy, "the answer to {:?}", text.prompt);
        assert_eq!(answer.finished.text.as_ref(), Some(&text.text), "the answer to {:?}", text.prompt);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_computed_is_refused_by_name() {
    for (name, field) in REFUSED {
        let model = ModelFixture::fixture(name);
        for (status, log) in [
            MainFunction::refuse(&model.folder, StartOptions::default()).await,
            RemoteFunction::refuse(&model.folder, "1:0", StartOptions::default()).await,
        ] {
            assert_eq!(status.code(), Some(4), "{name}: {log:?}");
            let last = log.last().unwrap();
            assert!(last.contains(&format!("`{field}`")) && last.contains("config.json"), "{name}: {last}");
        }
    }
}
