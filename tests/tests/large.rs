//! A model of hundreds of elements and two dozen experts answers as transformers does: prompts of more rows than an iteration has,
//! layers whose rows are more than a message may carry. Its weights follow from a rule (tests/fixtures/large.py).

#![allow(clippy::unwrap_used)]

use remoe_model::Checkpoint;
use remoe_tests::binaries::workspace;
use remoe_tests::checkpoint::{Sizes, generate};
use remoe_tests::control::greedy;
use remoe_tests::fixture::ExpectedToken;
use remoe_tests::function::{MainFunction, Options, RemoteFunction};
use remoe_tests::metrics::Metrics;
use remoe_tests::placement::{all_experts, remote_sets};
use remoe_wire::MAX_PAYLOAD;
use serde::Deserialize;

/// max|difference| / max|reference| of the logits.
const LOGITS: f32 = 2e-4;
/// |difference| of a routing weight.
const WEIGHTS: f32 = 1e-4;
/// Rows of an iteration, as they are by default.
const ITERATION: usize = 512;

#[derive(Deserialize)]
struct Expected {
    sizes: ExpectedSizes,
    prompts: Vec<ExpectedPrompt>,
}

#[derive(Deserialize)]
struct ExpectedSizes {
    layers: usize,
    hidden: usize,
    width: usize,
    experts: usize,
    top_k: usize,
    vocabulary: usize,
    context: usize,
}

#[derive(Deserialize)]
struct ExpectedPrompt {
    prompt: Rule,
    last_logits: Vec<f32>,
    /// How often each expert of each layer is used.
    counts: Vec<Vec<u32>>,
    /// Of the last token.
    last_routing: Vec<ExpectedToken>,
    greedy: Vec<u32>,
}

/// Token `at` is `(start + step x at) mod vocabulary`.
#[derive(Deserialize)]
struct Rule {
    start: u32,
    step: u32,
    length: u32,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_model_answers_as_transformers_does() {
    let text = std::fs::read_to_string(workspace().join("tests/fixtures/large.json")).unwrap();
    let Expected { sizes, prompts } = serde_json::from_str(&text).unwrap();
    let ExpectedSizes { layers, hidden, width, experts, top_k, vocabulary, context } = sizes;
    let folder = generate(Sizes { layers, hidden, width, experts, top_k, vocabulary, context });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let options = Options::dtype("float32");
    let main = MainFunction::start(folder.path(), options.clone()).await;
    let all = all_experts(&checkpoint);
    let remotes = [
        RemoteFunction::start(folder.path(), &all, options.clone()).await,
        RemoteFunction::start(folder.path(), &all, options).await,
    ];
    let addresses = remotes.each_ref().map(RemoteFunction::address);
    main.control.route(&addresses, &remote_sets(&checkpoint, 1.0)).await;
    let mut alone = None;
    for ExpectedPrompt { prompt, last_logits, counts, last_routing, greedy: tokens } in prompts {
        let token = |at| (prompt.start + prompt.step * at) % vocabulary as u32;
        let ids: Vec<u32> = (0..prompt.length).map(token).collect();
        let before = Metrics::read(main.http()).await;
        let answer = main.control.generate(greedy(&ids, tokens.len() as u32)).await.finished;
        assert_eq!(answer.tokens, tokens, "after {} tokens", ids.len());
        let after = Metrics::read(main.http()).await;
        let grown = |name: &str| after.value(name) - before.value(name);
        // The prompt's rows, as many as an iteration takes, and a row for each further token.
        let iterations = ids.len().div_ceil(ITERATION) + tokens.len() - 1;
        assert_eq!(grown("remoe_iterations_total"), iterations as u64);
        // What the answers of the prompt's first iteration carry, in messages that are full.
        let row_bytes = top_k * hidden * 4;
        let first = (ids.len().min(ITERATION) * row_bytes).div_ceil(MAX_PAYLOAD) * layers;
        let least = first as u64 + (iterations - 1) as u64 * layers as u64;
        assert!(
            grown("remoe_expert_messages_total") >= least,
            "{} messages",
            grown("remoe_expert_messages_total")
        );

        let reply = main.control.inspect_ids(&ids).await;
        let largest = last_logits.iter().fold(0.0_f32, |largest, logit| largest.max(logit.abs()));
        assert_eq!(reply.last_logits.len(), last_logits.len());
        let pairs = reply.last_logits.iter().zip(&last_logits);
        let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max) / largest;
        assert!(difference <= LOGITS, "logits differ by {difference}");
        println!("{} tokens: logits within {difference:.1e}", ids.len());
        assert_eq!(reply.routing.len(), counts.len());
        for ((found, counts), last) in reply.routing.iter().zip(&counts).zip(&last_routing) {
            let mut used = vec![0; experts];
            for expert in found.tokens.iter().flat_map(|token| &token.experts) {
                used[*expert as usize] += 1;
            }
            assert_eq!(&used, counts, "uses of the experts of layer {}", found.layer);
            let token = found.tokens.last().unwrap();
            assert_eq!(token.experts, last.experts);
            let weights = token.weights.iter().zip(&last.weights);
            assert!(weights.into_iter().all(|(a, b)| (a - b).abs() <= WEIGHTS));
        }
        alone = Some((ids, reply));
    }
    // The same bits where nothing is remote.
    let (ids, apart) = alone.unwrap();
    main.control.route(&[], &[]).await;
    let here = main.control.inspect_ids(&ids).await;
    assert_eq!((here.last_logits, here.hidden), (apart.last_logits, apart.hidden));
}
