//! Continuous batching: requests in a batch get the tokens that they get alone (float32), and the counters show one
//! forward pass per iteration for all of them.

use remoe_proto::v1::{GenerateRequest, generate_request};
use remoe_test_support::control::{Control, greedy, seeded};
use remoe_test_support::deadline::{SOON, until};
use remoe_test_support::fixture::{ModelFixture, served_fixtures};
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::{all_experts, remote_sets};
use std::net::SocketAddr;

/// Number of forward passes and of forwarded rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counters {
    iterations: u64,
    positions: u64,
    messages: u64,
}

async fn counters(http: SocketAddr) -> Counters {
    let metrics = MetricsPage::read(http).await;
    Counters {
        iterations: metrics.value("remoe_iterations_total"),
        positions: metrics.value("remoe_forwarded_positions_total"),
        messages: metrics.value("remoe_expert_messages_total"),
    }
}

impl Counters {
    fn since(self, before: Self) -> Self {
        Self {
            iterations: self.iterations - before.iterations,
            positions: self.positions - before.positions,
            messages: self.messages - before.messages,
        }
    }
}

/// Returns eight requests with different prompts, lengths and sampling.
fn mixed(model: &ModelFixture) -> Vec<GenerateRequest> {
    let prompts = model.prompts();
    let lengths = [20, 3, 17, 8, 12];
    let mut requests: Vec<_> = prompts.iter().zip(lengths).map(|(ids, tokens)| greedy(ids, tokens)).collect();
    requests.push(seeded(&prompts[2], 9, 1));
    requests.push(GenerateRequest { top_k: Some(5), ..seeded(&prompts[3], 14, 2) });
    requests.push(GenerateRequest { top_p: Some(0.7), temperature: Some(1.3), ..seeded(&prompts[4], 18, 3) });
    requests
}

fn ids(request: &GenerateRequest) -> Vec<u32> {
    match &request.prompt {
        Some(generate_request::Prompt::Ids(prompt)) => prompt.ids.clone(),
        other => panic!("not by ids: {other:?}"),
    }
}

fn positions(requests: &[GenerateRequest]) -> u64 {
    requests.iter().map(|request| ids(request).len() as u64 + u64::from(request.max_tokens) - 1).sum()
}

/// Returns the smallest relative distance between the two largest logits, while greedy decoding of `request` gives
/// `tokens`.
async fn smallest_lead(control: &Control, request: &GenerateRequest, tokens: &[u32]) -> f32 {
    let mut known = ids(request);
    let mut smallest = f32::INFINITY;
    for &token in tokens {
        let mut logits = control.inspect_ids(&known).await.last_logits;
        let best = logits[token as usize];
        let largest = logits.iter().fold(0.0_f32, |largest, logit| largest.max(logit.abs()));
        logits.remove(token as usize);
        let second = logits.into_iter().fold(f32::NEG_INFINITY, f32::max);
        assert!(best >= second, "{known:?}: {token} is not the likeliest token");
        smallest = smallest.min((best - second) / largest);
        known.push(token);
    }
    smallest
}

/// Runs `requests` together, waiting for the first routing so that all start in the same iteration, then each alone.
async fn together_and_alone(
    model: &ModelFixture,
    options: StartOptions,
    requests: &[GenerateRequest],
) -> f32 {
    let name = &model.name;
    let checkpoint = model.checkpoint();
    let main = MainFunction::start(&model.folder, options).await;
    let experts = all_experts(&checkpoint);
    let remote = RemoteFunction::start(&model.folder, &experts, StartOptions::dtype("float32")).await;
    let mut waiting = Vec::new();
    for request in requests {
        waiting.push(main.control.begin(request.clone()).await.unwrap());
    }
    assert_eq!(counters(main.http()).await, Counters { iterations: 0, positions: 0, messages: 0 });
    main.control.route(&[remote.address()], &remote_sets(&checkpoint, 0.5)).await;
    let mut together = Vec::new();
    for generation in waiting {
        together.push(generation.finish().await.unwrap().finished.tokens);
    }
    let counted = counters(main.http()).await;
    // Prompts share iterations, except those of one token, which decode at once, and those with a common prefix,
    // which wait for the first. After that, every request has one row per iteration. The number of iterations before
    // varies, but is far below that of separate runs.
    let longest = requests.iter().map(|request| u64::from(request.max_tokens)).max().unwrap();
    let alone: u64 = requests.iter().map(|request| u64::from(request.max_tokens)).sum();
    let forwards = longest..=alone / 2;
    assert!(forwards.contains(&counted.iterations), "{name}: {counted:?} for all requests together");
    assert_eq!(counted.positions, positions(requests), "{name}: positions forwarded");
    let layers = checkpoint.config().moe_layers().len() as u64;
    // The prompts' rows of a layer are sent in portions of at least 32 tokens.
    let portions = positions(requests).div_ceil(32);
    assert!(
        counted.messages > 0 && counted.messages <= (counted.iterations + portions) * layers,
        "{name}: {counted:?}"
    );

    let mut lead = f32::INFINITY;
    for (request, together) in requests.iter().zip(&together) {
        let before = counters(main.http()).await;
        let alone = main.control.generate(request.clone()).await.finished.tokens;
        let counted = counters(main.http()).await.since(before);
        assert_eq!(counted.iterations, u64::from(request.max_tokens), "{name}: forwards for one request");
        if request.temperature == Some(0.0) {
            lead = lead.min(smallest_lead(&main.control, request, &alone).await);
        }
        assert_eq!(together, &alone, "{name}: a batch changes the tokens of {request:?}; lead {lead:.1e}");
    }
    lead
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_mixed_requests_get_the_tokens_that_they_get_alone() {
    for model in served_fixtures().iter().chain([&ModelFixture::demo()]) {
        let lead = together_and_alone(model, StartOptions::dtype("float32"), &mixed(model)).await;
        println!("{}: smallest lead of the top token {lead:.1e} of the largest logit", model.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn batched_requests_get_their_single_request_tokens_on_libtorch() {
    for name in ["olmoe-basic", "dsv2-basic"] {
        let model = ModelFixture::fixture(name);
        together_and_alone(&model, StartOptions::dtype("float32").torch(), &mixed(&model)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn batched_requests_get_their_single_tokens_on_a_device() {
    for model in served_fixtures() {
        let options = StartOptions::dtype("float32").simulated_device(1 << 30);
        together_and_alone(&model, options, &mixed(&model)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_equal_requests_take_as_many_forwards_as_one() {
    let model = ModelFixture::fixture("olmoe-basic");
    let prompt = &model.prompts()[3];
    let requests: Vec<_> = (0..8).map(|seed| seeded(prompt, 24, seed)).collect();
    together_and_alone(&model, StartOptions::dtype("float32"), &requests).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_join_what_is_running_and_leave_when_they_are_done() {
    const LONG: u32 = 900;
    let model = ModelFixture::demo();
    let main = MainFunction::start(&model.folder, StartOptions::dtype("float32")).await;
    main.control.route(&[], &[]).await;
    let prompts = model.prompts();
    let short: Vec<_> = (0..7).map(|seed| seeded(&prompts[seed as usize % 5], 4, seed)).collect();
    let mut alone = Vec::new();
    for request in &short {
        alone.push(main.control.generate(request.clone()).await.finished.tokens);
    }
    let before = counters(main.http()).await;
    let long = greedy(&prompts[4], LONG);
    let mut running = main.control.begin(long.clone()).await.unwrap();
    running.tokens(3).await.unwrap();
    let mut joined = Vec::new();
    for request in &short {
        joined.push(main.control.begin(request.clone()).await.unwrap());
    }
    for (generation, alone) in joined.into_iter().zip(alone) {
        assert_eq!(generation.finish().await.unwrap().finished.tokens, alone);
    }
    running.finish().await.unwrap();
    let counted = counters(main.http()).await.since(before);
    // The short requests ended during the long one: only their prompts took extra forward passes.
    let forwards = u64::from(LONG)..=u64::from(LONG) + short.len() as u64;
    assert!(forwards.contains(&counted.iterations), "{counted:?}");
    assert_eq!(counted.positions, positions(&[short, vec![long]].concat()));
}

#[tokio::test(flavor = "multi_thread")]
async fn work_of_a_disconnected_client_stops() {
    let model = ModelFixture::demo();
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    main.control.route(&[], &[]).await;
    let request = greedy(&model.prompts()[4], 900);
    let mut running = main.control.begin(request.clone()).await.unwrap();
    running.tokens(3).await.unwrap();
    drop(running);
    until(SOON, "an engine without requests", async || {
        let metrics = MetricsPage::read(main.http()).await;
        (metrics.value("remoe_requests_running") == 0).then_some(())
    })
    .await;
    let counted = counters(main.http()).await;
    assert!(counted.positions < positions(&[request]), "the request was computed to its end: {counted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_over_limit_are_refused_until_capacity_returns() {
    let model = ModelFixture::demo();
    let options = StartOptions::default().with("--max-requests", 2);
    let main = MainFunction::start(&model.folder, options).await;
    // Both wait without a routing.
    let request = greedy(&model.prompts()[1], 8);
    let first = main.control.begin(request.clone()).await.unwrap();
    let second = main.control.begin(request.clone()).await.unwrap();
    let refused = main.control.begin(request.clone()).await.err().map(|status| status.code());
    assert_eq!(refused, Some(tonic::Code::ResourceExhausted));
    main.control.route(&[], &[]).await;
    let answers = [first.finish().await.unwrap(), second.finish().await.unwrap()];
    assert_eq!(answers[0].finished.tokens, answers[1].finished.tokens);
    let third =
        until(SOON, "room for another request", async || main.control.begin(request.clone()).await.ok());
    assert_eq!(third.await.finish().await.unwrap().finished.tokens, answers[0].finished.tokens);
}
