//! KV cache: it is bounded, shared fairly, and preempts requests if it is too small.

use remoe_model::Checkpoint;
use remoe_proto::v1::GenerateRequest;
use remoe_test_support::control::{Control, greedy, seeded};
use remoe_test_support::deadline::{SOON, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Positions per page.
const PAGE: usize = 32;

/// Returns the size of a KV cache with this many pages in float32, in bytes.
fn memory(checkpoint: &Checkpoint, pages: usize) -> usize {
    let layers = checkpoint.config().layers.iter().map(|layer| layer.attention.cache_elements());
    layers.sum::<usize>() * pages * PAGE * 4
}

async fn start(model: &ModelFixture, memory: usize) -> MainFunction {
    let options = StartOptions::dtype("float32").with("--kv-cache-bytes", memory);
    let main = MainFunction::start(&model.folder, options).await;
    main.control.route(&[], &[]).await;
    main
}

async fn tokens(control: &Control, request: &GenerateRequest) -> Vec<u32> {
    control.generate(request.clone()).await.finished.tokens
}

#[tokio::test(flavor = "multi_thread")]
async fn preempted_requests_are_recomputed_with_the_same_tokens() {
    let model = ModelFixture::demo();
    let checkpoint = model.checkpoint();
    let limit = memory(&checkpoint, 11);
    let main = start(&model, limit).await;
    let prompts = model.prompts();
    // Each request reaches at most 254 positions, which are 8 pages. Two can start together with their prompts.
    let requests = [
        greedy(&prompts[2], 250),
        seeded(&prompts[3], 240, 7),
        greedy(&prompts[4], 200),
        greedy(&prompts[1], 9),
    ];
    let mut alone = Vec::new();
    for request in &requests {
        alone.push(tokens(&main.control, request).await);
    }
    assert_eq!(MetricsPage::read(main.http()).await.value("remoe_preemptions_total"), 0);

    let done = Arc::new(AtomicBool::new(false));
    let watch = tokio::spawn({
        let (http, done) = (main.http(), done.clone());
        async move {
            let mut most = 0;
            while !done.load(Ordering::Acquire) {
                most = most.max(MetricsPage::read(http).await.value("remoe_kv_cache_bytes"));
            }
            most
        }
    });
    let mut together = Vec::new();
    for request in &requests {
        together.push(main.control.begin(request.clone()).await.unwrap());
    }
    for (request, (generation, alone)) in requests.iter().zip(together.into_iter().zip(alone)) {
        let finished = generation.finish().await.unwrap().finished;
        assert_eq!(finished.tokens, alone);
        let remoe_proto::v1::generate_request::Prompt::Ids(prompt) = request.prompt.clone().unwrap() else {
            unreachable!("prompts are ids")
        };
        // Recomputed positions do not count.
        let positions = prompt.ids.len() as u64 + u64::from(request.max_tokens) - 1;
        assert_eq!(finished.forwarded_positions, positions);
    }
    done.store(true, Ordering::Release);
    let most = watch.await.unwrap();
    let metrics = MetricsPage::read(main.http()).await;
    assert!(metrics.value("remoe_preemptions_total") > 0, "nothing had to give way");
    assert_eq!(metrics.value("remoe_kv_cache_limit_bytes"), limit as u64);
    assert!(most > 0 && most <= limit as u64, "{most} bytes of {limit}");
    until(SOON, "an empty cache", async || {
        (MetricsPage::read(main.http()).await.value("remoe_kv_cache_bytes") == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_that_outgrow_the_cache_are_computed_again() {
    let model = ModelFixture::demo();
    // Two choices reach 624 positions, which are 20 pages, and so does the other request.
    let main = start(&model, memory(&model.checkpoint(), 22)).await;
    let prompt = &model.prompts()[3];
    let body = serde_json::json!({
        "prompt": prompt, "n": 2, "max_tokens": 300, "temperature": 0.8, "seed": 3, "ignore_eos": true,
        "return_token_ids": true,
    });
    let ask = async || {
        let answer = remoe_test_support::http::post(main.http(), "/v1/completions", &body).await.unwrap();
        let answer = answer.finish().await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        body["choices"].clone()
    };
    let alone = ask().await;
    let first = main.control.begin(greedy(&model.prompts()[4], 600)).await.unwrap();
    let second = ask().await;
    assert_eq!(second, alone);
    first.finish().await.unwrap();
    assert!(
        MetricsPage::read(main.http()).await.value("remoe_preemptions_total") > 0,
        "nothing had to give way"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn long_requests_do_not_block_short_ones() {
    let model = ModelFixture::demo();
    let context = model.checkpoint().config().context_length;
    // Too small for two requests of the full context.
    let main = start(&model, memory(&model.checkpoint(), (context + context / 2) / PAGE)).await;
    let prompt = &model.prompts()[2];
    let long = (context - prompt.len()) as u32;
    let mut first = main.control.begin(greedy(prompt, long)).await.unwrap();
    first.tokens(2).await.unwrap();
    let mut second = main.control.begin(seeded(prompt, long, 1)).await.unwrap();
    second.tokens(2).await.unwrap();
    let metrics = MetricsPage::read(main.http()).await;
    assert_eq!(metrics.value("remoe_requests_running"), 2, "the second waits for the first");
}

#[tokio::test(flavor = "multi_thread")]
async fn request_over_cache_size_is_refused_and_others_queue() {
    let model = ModelFixture::demo();
    let main = start(&model, memory(&model.checkpoint(), 3)).await;
    let prompt = &model.prompts()[2];
    let most = (3 * PAGE - prompt.len()) as u32;
    let refused = main.control.begin(greedy(prompt, most + 1)).await.err().unwrap();
    assert_eq!(refused.code(), tonic::Code::OutOfRange);
    assert!(refused.message().contains("--kv-cache-bytes"), "{}", refused.message());
    let body = serde_json::json!({"prompt": prompt, "max_tokens": most + 1});
    let answer = remoe_test_support::http::post(main.http(), "/v1/completions", &body).await.unwrap();
    assert_eq!(answer.status, 400);
    let request = greedy(prompt, most);
    let first = main.control.begin(request.clone()).await.unwrap();
    let second = main.control.begin(request).await.unwrap();
    let (first, second) = (first.finish().await.unwrap(), second.finish().await.unwrap());
    assert_eq!(first.finished.tokens, second.finished.tokens);
    assert_eq!(MetricsPage::read(main.http()).await.value("remoe_preemptions_total"), 0, "the second waited");
}
