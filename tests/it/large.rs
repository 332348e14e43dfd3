//! Large models of each family answer as transformers does: hundreds of elements, dozens of experts, prompts longer
//! than an iteration, and layers larger than a message. Their weights follow a rule (tests/fixtures/large.py).

use remoe_model::Checkpoint;
use remoe_proto::MAX_PAYLOAD;
use remoe_proto::v1::InspectReply;
use remoe_test_support::binaries::workspace;
use remoe_test_support::checkpoint::{TensorRule, by_rule};
use remoe_test_support::control::greedy;
use remoe_test_support::fixture::ExpectedToken;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::{all_experts, remote_sets};
use serde::Deserialize;
use serde_json::Value;

/// Tolerance of the logits: max|difference| / max|reference|.
const LOGITS: f32 = 2e-4;
/// Tolerance of a routing weight: |difference|.
const WEIGHTS: f32 = 1e-4;
/// Default number of rows per iteration.
const ITERATION: usize = 512;

#[derive(Deserialize)]
struct LargeReference {
    config: Value,
    tensors: Vec<TensorRule>,
    prompts: Vec<ExpectedPrompt>,
}

#[derive(Deserialize)]
struct ExpectedPrompt {
    prompt: Rule,
    last_logits: Vec<f32>,
    /// Number of uses of each expert of each layer with experts.
    counts: Vec<Vec<u32>>,
    /// Routing of the last token.
    last_routing: Vec<ExpectedToken>,
    greedy: Vec<u32>,
}

/// Rule of the prompt: token `at` is `(start + step x at) mod vocabulary`.
#[derive(Deserialize)]
struct Rule {
    start: u32,
    step: u32,
    length: u32,
}

#[tokio::test(flavor = "multi_thread")]
async fn large_models_answer_as_transformers_does() {
    let mut families = 0;
    for entry in std::fs::read_dir(workspace().join("tests/fixtures/large")).unwrap() {
        let path = entry.unwrap().path();
        let family = path.file_stem().unwrap().to_string_lossy().into_owned();
        answers_as_transformers_does(&family, serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap())
            .await;
        families += 1;
    }
    assert!(families >= 10, "{families} families");
}

async fn answers_as_transformers_does(family: &str, expected: LargeReference) {
    let folder = by_rule(&expected.config, &expected.tensors);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let facts = checkpoint.inspect().unwrap();
    assert!(facts.hidden_size >= 512 && facts.experts >= 16, "{family}: {facts:?}");
    let options = StartOptions::dtype("float32");
    let main = MainFunction::start(folder.path(), options.clone().with("--iteration-rows", ITERATION)).await;
    let all = all_experts(&checkpoint);
    let remotes = [
        RemoteFunction::start(folder.path(), &all, options.clone()).await,
        RemoteFunction::start(folder.path(), &all, options).await,
    ];
    let addresses = remotes.each_ref().map(RemoteFunction::address);
    main.control.route(&addresses, &remote_sets(&checkpoint, 1.0)).await;
    // The answers of a full iteration in a layer exceed one message.
    let row_bytes = facts.top_k * facts.hidden_size * 4;
    assert!(ITERATION * row_bytes > MAX_PAYLOAD, "{family}: {row_bytes} bytes a row");
    let mut alone = None;
    for prompt in expected.prompts {
        let ids: Vec<u32> = (0..prompt.prompt.length)
            .map(|at| (prompt.prompt.start + prompt.prompt.step * at) % facts.vocab_size as u32)
            .collect();
        let before = MetricsPage::read(main.http()).await;
        let answer = main.control.generate(greedy(&ids, prompt.greedy.len() as u32)).await.finished;
        assert_eq!(answer.tokens, prompt.greedy, "{family}: after {} tokens", ids.len());
        let after = MetricsPage::read(main.http()).await;
        let grown = |name: &str| after.value(name) - before.value(name);
        // The rows of the prompt's iteration, and one row per further token.
        let iterations = ids.len().div_ceil(ITERATION) + prompt.greedy.len() - 1;
        assert_eq!(grown("remoe_iterations_total"), iterations as u64, "{family}");
        // Number of full messages for the answers of the prompt's first iteration.
        let layers = facts.moe_layers.len();
        let first = (ids.len().min(ITERATION) * row_bytes).div_ceil(MAX_PAYLOAD) * layers;
        let least = first as u64 + (iterations - 1) as u64 * layers as u64;
        let messages = grown("remoe_expert_messages_total");
        assert!(messages >= least, "{family}: {messages} messages, {least} at least");
        let reply = main.control.inspect_ids(&ids).await;
        compare(family, facts.experts, &prompt, &reply);
        alone = Some((ids, reply));
    }
    // The same bits with all experts local.
    let (ids, apart) = alone.unwrap();
    assert!(ids.len() > ITERATION, "{family}: {} tokens", ids.len());
    main.control.route(&[], &[]).await;
    let here = main.control.inspect_ids(&ids).await;
    assert_eq!((here.last_logits, here.hidden), (apart.last_logits, apart.hidden), "{family}");
}

fn compare(family: &str, experts: usize, expected: &ExpectedPrompt, reply: &InspectReply) {
    let logits = &expected.last_logits;
    let largest = logits.iter().fold(0.0_f32, |largest, logit| largest.max(logit.abs()));
    assert_eq!(reply.last_logits.len(), logits.len(), "{family}");
    let pairs = reply.last_logits.iter().zip(logits);
    let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max) / largest;
    assert!(difference <= LOGITS, "{family}: logits differ by {difference}");
    assert!(reply.last_logits.iter().all(|logit| logit.is_finite()), "{family}");
    println!("{family}, {} tokens: logits within {difference:.1e}", expected.prompt.length);
    assert_eq!(reply.routing.len(), expected.counts.len(), "{family}: layers with experts");
    for ((found, counts), last) in reply.routing.iter().zip(&expected.counts).zip(&expected.last_routing) {
        let mut used = vec![0; experts];
        for expert in found.tokens.iter().flat_map(|token| &token.experts) {
            used[*expert as usize] += 1;
        }
        assert_eq!(&used, counts, "{family}: uses of the experts of layer {}", found.layer);
        let token = found.tokens.last().unwrap();
        assert_eq!(token.experts, last.experts, "{family}: layer {}", found.layer);
        let weights = token.weights.iter().zip(&last.weights);
        assert!(
            weights.into_iter().all(|(a, b)| (a - b).abs() <= WEIGHTS),
            "{family}: layer {}",
            found.layer
        );
    }
}
