//! Late replicas, and layers whose experts are unreachable for a while: slow replicas stay connected, and no servable
//! request fails (invariant 7 of ARCHITECTURE.md).

use remoe_proto::v1::{GenerateRequest, LayerExperts};
use remoe_test_support::control::{Control, GenerationResult, greedy, seeded};
use remoe_test_support::deadline::{LONG, SOON, until, within};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::{all_experts, remote_sets};
use remoe_test_support::recorder::{MessageFault, Recorder};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tonic::Status;

/// Runs all `requests` concurrently and returns their outcomes.
async fn together(
    control: &Arc<Control>,
    requests: &[GenerateRequest],
) -> Vec<tokio::task::JoinHandle<Result<GenerationResult, Status>>> {
    let mut running = Vec::new();
    for request in requests {
        let (control, request) = (control.clone(), request.clone());
        let mut generation = control.begin(request).await.unwrap();
        running.push(tokio::spawn(async move {
            generation.tokens(1).await?;
            generation.finish().await
        }));
    }
    running
}

/// Asserts that all `running` requests are answered with the tokens in `expected`.
async fn all_as(
    running: Vec<tokio::task::JoinHandle<Result<GenerationResult, Status>>>,
    expected: &[Vec<u32>],
) {
    for (running, expected) in running.into_iter().zip(expected) {
        let answer = within(LONG, "an answer", running).await.unwrap();
        assert_eq!(&answer.unwrap().finished.tokens, expected);
    }
}

/// Returns sixteen requests of different lengths, some with sampled tokens.
fn sixteen(model: &ModelFixture) -> Vec<GenerateRequest> {
    let prompts = model.prompts();
    (0..16)
        .map(|index| {
            let prompt: Vec<u32> =
                prompts[index % prompts.len()].iter().map(|id| id + index as u32).collect();
            let tokens = 100 + 10 * index as u32;
            if index % 4 == 3 { seeded(&prompt, tokens, index as u64) } else { greedy(&prompt, tokens) }
        })
        .collect()
}

/// Sixteen requests run when the first of `replicas` functions pauses: all get the tokens that they get in
/// peace, and those that begin while it stands still get them meanwhile.
async fn survive_a_pause(replicas: usize) {
    let model = ModelFixture::demo();
    let checkpoint = model.checkpoint();
    let mut functions = Vec::new();
    for _ in 0..replicas {
        let options = StartOptions::dtype("float32");
        functions.push(RemoteFunction::start(&model.folder, &all_experts(&checkpoint), options).await);
    }
    let main = MainFunction::start(&model.folder, StartOptions::dtype("float32")).await;
    let control = Arc::new(Control::new(main.announcement.grpc));
    let addresses: Vec<_> = functions.iter().map(RemoteFunction::address).collect();
    control.route(&addresses, &remote_sets(&checkpoint, 0.5)).await;
    let requests = sixteen(&model);
    let mut peace = Vec::new();
    for running in together(&control, &requests).await {
        peace.push(running.await.unwrap().unwrap().finished.tokens);
    }

    // A pause closes no connection.
    let running = together(&control, &requests).await;
    functions[0].process.signal(Signal::STOP);
    tokio::time::sleep(Duration::from_secs(3)).await;
    functions[0].process.signal(Signal::CONT);
    all_as(running, &peace).await;
    let closed =
        main.process.log().iter().filter(|line| line.contains("remote function unavailable")).count();
    assert_eq!(closed, 0, "a function that was only slow has lost its connection");

    // The requests start and end during the pause.
    functions[0].process.signal(Signal::STOP);
    let running = together(&control, &requests).await;
    all_as(running, &peace).await;
    functions[0].process.signal(Signal::CONT);
    let metrics = MetricsPage::read(main.http()).await;
    let loads = metrics.value("remoe_expert_fallback_loads_total");
    if replicas == 1 {
        assert!(loads > 0, "the function was not missed");
    } else {
        assert_eq!(loads, 0, "experts were loaded although there was a replica");
        assert!(metrics.value("remoe_expert_retries_total") > 0, "the replica was not missed");
    }
    // The function serves again as before.
    let again = until(SOON, "a generation without local loads", async || {
        let again = control.generate(requests[0].clone()).await.finished;
        Some(again).filter(|again| again.experts.is_some_and(|calls| calls.remote > 0 && calls.fallback == 0))
    })
    .await;
    assert_eq!(again.tokens, peace[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_replica_causes_no_load_and_no_delay() {
    survive_a_pause(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_single_replica_delays_no_request() {
    survive_a_pause(1).await;
}

/// Returns two requests: one that never uses the only expert of the set, and one that does.
async fn with_and_without(
    control: &Control,
    model: &ModelFixture,
) -> ([GenerateRequest; 2], Vec<LayerExperts>) {
    let mut used = Vec::new();
    for prompt in model.prompts() {
        let request = greedy(&prompt, 40);
        let tokens = control.generate(request.clone()).await.finished.tokens;
        let routing = control.inspect_ids(&[&prompt[..], &tokens[..39]].concat()).await.routing;
        let experts = |layer: &remoe_proto::v1::LayerRouting| -> BTreeSet<(u32, u32)> {
            layer
                .tokens
                .iter()
                .flat_map(|token| &token.experts)
                .map(|&expert| (layer.layer, expert))
                .collect()
        };
        used.push((request, routing.iter().flat_map(experts).collect::<BTreeSet<_>>()));
    }
    for (without, theirs) in &used {
        for (with, others) in &used {
            if let Some(&(layer, expert)) = others.difference(theirs).next() {
                let remote = vec![LayerExperts { layer, experts: vec![expert] }];
                return ([without.clone(), with.clone()], remote);
            }
        }
    }
    panic!("every prompt uses every expert");
}

/// No function serves an expert, and it cannot be loaded. Requests without it are not affected; a request with it
/// waits and is served once a function is ready.
#[tokio::test(flavor = "multi_thread")]
async fn unreachable_expert_delays_only_requests_that_need_it() {
    let model = ModelFixture::fixture("mixtral-top1");
    let folder = model.copy();
    let function =
        RemoteFunction::start(folder.path(), &all_experts(&model.checkpoint()), StartOptions::default())
            .await;
    let main = MainFunction::start(folder.path(), StartOptions::default()).await;
    main.control.route(&[], &[]).await;
    let ([without, with], remote) = with_and_without(&main.control, &model).await;
    let expected = [
        main.control.generate(without.clone()).await.finished.tokens,
        main.control.generate(with.clone()).await.finished.tokens,
    ];
    main.control.route(&[], &remote).await;
    main.take_weights_away(folder.path()).await;

    let mut waiting = main.control.begin(with).await.unwrap();
    let served = main.control.begin(without).await.unwrap().finish().await.unwrap().finished;
    assert_eq!(served.tokens, expected[0]);
    let repeated = async || MetricsPage::read(main.http()).await.value("remoe_iterations_repeated_total");
    until(SOON, "repeated iterations", async || (repeated().await > 1).then_some(())).await;
    main.control.route(&[function.address()], &remote).await;
    waiting.tokens(1).await.unwrap();
    let served = waiting.finish().await.unwrap().finished;
    assert_eq!(served.tokens, expected[1]);
    let calls = served.experts.unwrap();
    assert!(calls.remote > 0 && calls.fallback == 0, "{calls:?}");
}

/// A replica drops a message, and the experts cannot be loaded: the layer's deadline passes, and the replica's next
/// answer serves all requests of the iteration.
#[tokio::test(flavor = "multi_thread")]
async fn layer_past_its_deadline_fails_no_servable_request() {
    let model = ModelFixture::fixture("mixtral-basic");
    let checkpoint = model.checkpoint();
    let folder = model.copy();
    let function =
        RemoteFunction::start(folder.path(), &all_experts(&checkpoint), StartOptions::default()).await;
    let main = MainFunction::start(folder.path(), StartOptions::default()).await;
    let requests: Vec<_> = model.prompts().iter().map(|prompt| greedy(prompt, 12)).collect();
    let control = Arc::new(Control::new(main.announcement.grpc));
    control.route(&[], &[]).await;
    let mut expected = Vec::new();
    for request in &requests {
        expected.push(control.generate(request.clone()).await.finished.tokens);
    }
    let silent = Recorder::once(function.address(), MessageFault::Delay(LONG)).await;
    control.route(&[silent.address()], &remote_sets(&checkpoint, 0.5)).await;
    main.take_weights_away(folder.path()).await;
    all_as(together(&control, &requests).await, &expected).await;
    let metrics = MetricsPage::read(main.http()).await;
    assert!(metrics.value("remoe_iterations_repeated_total") > 0, "no layer has missed its deadline");
}

/// Each layer's messages go to both replicas, for any number of layers.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_take_turns_in_every_layer() {
    let model = ModelFixture::fixture("mixtral-basic");
    let checkpoint = model.checkpoint();
    let function =
        RemoteFunction::start(&model.folder, &all_experts(&checkpoint), StartOptions::default()).await;
    let recorders = [Recorder::honest(function.address()).await, Recorder::honest(function.address()).await];
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    // Uses an even number of layers with all experts, so that every layer has a message.
    let remote = remote_sets(&checkpoint, 1.0)[..2].to_vec();
    main.control.route(&recorders.each_ref().map(Recorder::address), &remote).await;
    main.control.generate(greedy(&model.prompts()[0], 20)).await;
    for recorder in &recorders {
        let layers: Vec<u32> = recorder.take().iter().map(|arrival| arrival.work.layer).collect();
        for layer in remote.iter().map(|set| set.layer) {
            let messages = layers.iter().filter(|&&it| it == layer).count();
            assert!(messages >= 5, "a replica got {messages} of layer {layer}'s 20 messages: {layers:?}");
        }
    }
}
