//! Messages on the wire and their order in time, as a recording proxy sees them, and the main function's reaction to
//! faulty remote functions.

use remoe_model::Checkpoint;
use remoe_proto::v1::{Code, ExpertCalls, LayerExperts};
use remoe_test_support::checkpoint::{Sizes, generate};
use remoe_test_support::control::greedy;
use remoe_test_support::deadline::{SOON, until};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::{all_experts, pairs_per_position, remote_sets};
use remoe_test_support::recorder::{Disguise, MessageFault, Recorder};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Returns the times at which the main function logged `message`, the oldest first.
fn logged(main: &MainFunction, message: &str) -> Vec<SystemTime> {
    let records = main.process.log().into_iter().filter_map(|line| serde_json::from_str(&line).ok());
    records
        .filter(|record: &serde_json::Value| record["message"] == message)
        .map(|record| record["timestamp"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap().into())
        .collect()
}

/// Model with enough local work per layer that an early message arrives long before the end.
#[tokio::test(flavor = "multi_thread")]
async fn messages_leave_before_local_kernels_start() {
    const CALLS: usize = 5;
    let sizes =
        Sizes { layers: 1, hidden: 256, width: 2048, experts: 8, top_k: 7, vocabulary: 512, context: 512 };
    let model = generate(sizes);
    let remote = vec![LayerExperts { layer: 0, experts: vec![7] }];
    let function = RemoteFunction::start(model.path(), "0:7", StartOptions::default()).await;
    let recorder = Recorder::honest(function.address()).await;
    let options = StartOptions { log: Some("main_model_fn=trace"), ..StartOptions::default() };
    let main = MainFunction::start(model.path(), options).await;
    main.control.route(&[recorder.address()], &remote).await;
    // There is local work from the first call on.
    main.control.all_experts_read().await;
    for call in 0..CALLS as u32 {
        let ids: Vec<u32> = (0..500).map(|i| (i * 7 + call * 31) % 512).collect();
        let calls = main.control.inspect_ids(&ids).await.experts.unwrap();
        assert!(calls.remote > 0 && calls.local > calls.remote, "{calls:?}");
    }
    let done = until(SOON, "the log of all layer calls", async || {
        Some(logged(&main, "local kernels done")).filter(|done| done.len() == CALLS)
    })
    .await;
    let started = logged(&main, "local kernels start");
    assert_eq!(started.len(), CALLS);
    let arrivals = recorder.take();
    assert_eq!(arrivals.len(), CALLS, "one message per layer call");
    for ((arrival, start), done) in arrivals.iter().zip(&started).zip(&done) {
        println!(
            "local kernels: {:?}; message before their end: {:?}",
            done.duration_since(*start),
            done.duration_since(arrival.arrived_at)
        );
        assert!(
            arrival.arrived_at < *done,
            "the message arrived {:?} after the local kernels",
            arrival.arrived_at.duration_since(*done)
        );
    }
}

/// Without a replica, a layer's experts are loaded while the local ones are computed, as many at a time as fit into
/// memory.
#[tokio::test(flavor = "multi_thread")]
async fn layer_without_replicas_loads_experts_before_local_work() {
    let sizes =
        Sizes { layers: 1, hidden: 256, width: 2048, experts: 8, top_k: 7, vocabulary: 512, context: 512 };
    let model = generate(sizes);
    let remote = vec![LayerExperts { layer: 0, experts: vec![5, 6, 7] }];
    let ids: Vec<u32> = (0..500).map(|i| i * 7 % 512).collect();
    let options = StartOptions { log: Some("main_model_fn=trace"), ..StartOptions::default() };
    // Without memory, the experts are loaded one by one and none is kept.
    let main = MainFunction::start(model.path(), options.with("--fallback-bytes", 1)).await;
    main.control.route(&[], &[]).await;
    let expected = main.control.inspect_ids(&ids).await;
    main.control.route(&[], &remote).await;
    let found = main.control.inspect_ids(&ids).await;
    assert_eq!(found.hidden, expected.hidden);
    let calls = found.experts.unwrap();
    assert!(calls.fallback > 0 && calls.local > 0 && calls.remote == 0, "{calls:?}");
    let done = until(SOON, "the log of both layer calls", async || {
        Some(logged(&main, "local kernels done")).filter(|done| done.len() == 2)
    })
    .await;
    let loads = logged(&main, "load starts");
    assert_eq!(loads.len(), 3, "each expert is loaded once");
    assert!(
        loads[0] < done[1],
        "the first load began {:?} after the local work",
        loads[0].duration_since(done[1])
    );
    let held = MetricsPage::read(main.http()).await.value("remoe_expert_fallback_bytes");
    assert_eq!(held, 0, "bytes held, where one is allowed");
}

/// Weights that give infinities and NaN do so in every placement.
#[tokio::test(flavor = "multi_thread")]
async fn non_finite_rows_do_not_open_the_circuit_breaker() {
    let sizes = Sizes { layers: 1, hidden: 64, width: 64, experts: 4, top_k: 2, vocabulary: 64, context: 64 };
    let model = generate(sizes);
    spoil_weights(model.path(), "model.layers.0.block_sparse_moe.experts.3.w2.weight");
    let function = RemoteFunction::start(model.path(), "0:0-3", StartOptions::default()).await;
    let main = MainFunction::start(model.path(), StartOptions::default()).await;
    let ids: Vec<u32> = (0..40).map(|i| i * 7 % 64).collect();
    main.control.route(&[], &[]).await;
    let expected = main.control.inspect_ids(&ids).await;
    let values = expected.hidden.chunks_exact(4).map(|it| f32::from_le_bytes(it.try_into().unwrap()));
    assert!(values.clone().any(f32::is_nan) && values.clone().any(f32::is_finite), "too many or no NaNs");
    let remote = remote_sets(&Checkpoint::open(model.path()).unwrap(), 0.5);
    for _ in 0..3 {
        main.control.route(&[function.address()], &remote).await;
        let found = main.control.inspect_ids(&ids).await;
        assert_eq!(found.hidden, expected.hidden);
        let calls = found.experts.unwrap();
        assert!(calls.fallback > 0, "{calls:?}");
    }
    let out =
        main.process.log().into_iter().filter(|line| line.contains("remote function unavailable")).count();
    assert_eq!(out, 0, "the function was taken out for what its weights say");
}

/// Sets the first element of the float32 tensor `name` to NaN.
fn spoil_weights(folder: &Path, name: &str) {
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let start = usize::try_from(tensors[name]["data_offsets"][0].as_u64().unwrap()).unwrap();
    bytes[8 + header + start..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_travel_once_and_decoding_takes_one_message_per_layer() {
    const TOKENS: u32 = 16;
    let model = ModelFixture::fixture("olmoe-basic");
    let checkpoint = model.checkpoint();
    let experts = all_experts(&checkpoint);
    let function = RemoteFunction::start(&model.folder, &experts, StartOptions::default()).await;
    let mut recorders = Vec::new();
    for _ in 0..3 {
        recorders.push(Recorder::honest(function.address()).await);
    }
    let addresses: Vec<_> = recorders.iter().map(Recorder::address).collect();
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    let remote = remote_sets(&checkpoint, 0.5);
    main.control.route(&addresses, &remote).await;
    main.control.all_experts_read().await;
    let prompt = model.prompts().pop().unwrap();
    let answer = main.control.generate(greedy(&prompt, TOKENS)).await.finished;
    let by_replica: Vec<_> = recorders.iter().map(Recorder::take).collect();

    let works: Vec<_> = by_replica.iter().flatten().map(|arrival| &arrival.work).collect();
    let ids: BTreeSet<u64> = works.iter().map(|work| work.id).collect();
    assert_eq!(ids.len(), works.len(), "ids are never used twice");
    assert!(works.iter().all(|work| work.generation == 1 && work.budget_us > 0));
    let pairs: usize = works.iter().map(|work| work.experts.len()).sum();
    assert_eq!(pairs as u64, answer.experts.unwrap().remote, "pairs on the wire and in the answer");
    let row_bytes = checkpoint.config().hidden_size * 4;
    for work in &works {
        let rows: BTreeSet<&[u8]> = work.rows.chunks(row_bytes).collect();
        assert_eq!(rows.len(), work.counts.len(), "a row travels once in a message");
        assert_eq!(work.rows.len(), work.counts.len() * row_bytes);
        assert_eq!(work.counts.iter().sum::<u32>() as usize, work.experts.len());
    }

    // The routing of the prompt and of every decoded token.
    let sequence = [&prompt[..], &answer.tokens[..TOKENS as usize - 1]].concat();
    let routing = main.control.inspect_ids(&sequence).await.routing;
    let mut decoding = 0;
    for layer in &routing {
        let set = &remote.iter().find(|set| set.layer == layer.layer).unwrap().experts;
        let has_remote = layer.tokens.iter().map(|token| token.experts.iter().any(|id| set.contains(id)));
        decoding += has_remote.skip(prompt.len()).filter(|&is_remote| is_remote).count();
    }
    let is_prompt = |work: &remoe_proto::v1::Work| work.counts.len() > 1;
    assert_eq!(works.iter().filter(|work| !is_prompt(work)).count(), decoding, "messages while decoding");
    assert!(
        by_replica.iter().all(|arrivals| arrivals.iter().any(|a| !is_prompt(&a.work))),
        "replicas take turns"
    );
    for layer in checkpoint.config().moe_layers() {
        // All rows of an expert go to one replica.
        let mut seen = BTreeMap::new();
        for (replica, arrivals) in by_replica.iter().enumerate() {
            let of_layer: Vec<_> = arrivals
                .iter()
                .map(|arrival| &arrival.work)
                .filter(|work| work.layer as usize == layer && is_prompt(work))
                .collect();
            assert_eq!(of_layer.len(), 1, "messages of the prompt to replica {replica} in layer {layer}");
            for expert in &of_layer[0].experts {
                assert_eq!(
                    *seen.entry(*expert).or_insert(replica),
                    replica,
                    "expert {expert} of layer {layer}"
                );
            }
        }
    }
}

/// Cost of a failing replica.
#[derive(Debug, Clone, Copy, PartialEq)]
enum FailurePrice {
    /// A message to another replica.
    Retry,
    /// Another message, to the same replica if there is no other.
    Again,
    /// A local load, even if there is another replica.
    Fallback,
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_misbehave_do_not_change_the_answer() {
    let model = ModelFixture::fixture("mixtral-odd");
    let checkpoint = model.checkpoint();
    let experts = all_experts(&checkpoint);
    let function = RemoteFunction::start(&model.folder, &experts, StartOptions::default()).await;
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    let request = greedy(&model.prompts().pop().unwrap(), 16);
    main.control.route(&[], &[]).await;
    let expected = main.control.generate(request.clone()).await.finished;
    let pairs = expected.experts.unwrap().local;
    let remote = remote_sets(&checkpoint, 0.5);
    let cases = [
        (MessageFault::Repeat, FailurePrice::Retry),
        // Longer than the timeout of a replica with unknown speed.
        (MessageFault::Delay(Duration::from_secs(4)), FailurePrice::Retry),
        (MessageFault::Shorten, FailurePrice::Retry),
        (MessageFault::Spoil, FailurePrice::Retry),
        (MessageFault::Empty, FailurePrice::Retry),
        (MessageFault::Close, FailurePrice::Retry),
        (MessageFault::Fail(Code::Draining), FailurePrice::Retry),
        (MessageFault::Fail(Code::ResourceExhausted), FailurePrice::Again),
        (MessageFault::Fail(Code::DeadlineExceeded), FailurePrice::Retry),
        (MessageFault::Fail(Code::Internal), FailurePrice::Retry),
        (MessageFault::Fail(Code::NotFound), FailurePrice::Fallback),
        (MessageFault::Fail(Code::InvalidArgument), FailurePrice::Fallback),
    ];
    for (act, cost) in cases {
        for replicas in 1..=2 {
            let recorder = Recorder::once(function.address(), act.clone()).await;
            let honest = Recorder::honest(function.address()).await;
            let addresses = [recorder.address(), honest.address()];
            main.control.route(&addresses[..replicas], &remote).await;
            let answer = main.control.generate(request.clone()).await.finished;
            let case = format!("{act:?} with {replicas} replicas");
            assert_eq!(answer.tokens, expected.tokens, "{case}");
            let calls = answer.experts.unwrap();
            assert_eq!(calls.local + calls.remote + calls.fallback, pairs, "{case}: {calls:?}");
            let retried = cost == FailurePrice::Again || (cost == FailurePrice::Retry && replicas == 2);
            let fell_back = cost == FailurePrice::Fallback || (cost == FailurePrice::Retry && replicas == 1);
            assert_eq!((calls.retries > 0, calls.fallback > 0), (retried, fell_back), "{case}: {calls:?}");
            assert!(calls.remote > 0 || act_ends_the_only_replica(&act, replicas), "{case}: {calls:?}");
        }
    }
}

/// A replica behind an open circuit breaker stays out longer than this generation may take.
fn act_ends_the_only_replica(act: &MessageFault, replicas: usize) -> bool {
    let out = matches!(
        act,
        MessageFault::Repeat
            | MessageFault::Delay(_)
            | MessageFault::Shorten
            | MessageFault::Spoil
            | MessageFault::Empty
            | MessageFault::Close
            | MessageFault::Fail(Code::Draining)
    );
    out && replicas == 1
}

#[tokio::test(flavor = "multi_thread")]
async fn mismatched_functions_are_refused_and_experts_run_locally() {
    let model = ModelFixture::fixture("mixtral-odd-heads");
    let checkpoint = model.checkpoint();
    let experts = all_experts(&checkpoint);
    let function = RemoteFunction::start(&model.folder, &experts, StartOptions::default()).await;
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    let request = greedy(&model.prompts().pop().unwrap(), 8);
    let remote = remote_sets(&checkpoint, 0.5);
    main.control.route(&[function.address()], &remote).await;
    main.control.all_experts_read().await;
    let expected = main.control.generate(request.clone()).await.finished;
    let calls = expected.experts.unwrap();
    assert_eq!(calls.local + calls.remote, expected.forwarded_positions * pairs_per_position(&checkpoint));
    let disguises: [(&str, Disguise); 7] = [
        ("wire version", Arc::new(|it| it.wire_version += 1)),
        ("checkpoint", Arc::new(|it| it.checkpoint.replace_range(0..1, "x"))),
        ("dtype", Arc::new(|it| it.dtype = "bfloat16".to_owned())),
        ("numerics class", Arc::new(|it| it.numerics_class.push_str("-other"))),
        ("hidden size", Arc::new(|it| it.hidden_size += 1)),
        ("is not hosted", Arc::new(|it| it.hosted.last_mut().unwrap().experts.truncate(1))),
        ("draining", Arc::new(|it| it.draining = true)),
    ];
    for (word, disguise) in disguises {
        let stranger =
            Recorder::start(function.address(), Arc::new(|_, _| MessageFault::Pass), disguise).await;
        for (endpoints, computed_there) in
            [(vec![stranger.address()], false), (vec![stranger.address(), function.address()], true)]
        {
            let problems = main.control.try_route(&endpoints, &remote).await.problems;
            assert_eq!(problems.len(), 1, "{word}: {problems:?}");
            assert_eq!(problems[0].address, stranger.address().to_string());
            assert!(problems[0].message.contains(word), "{word}: {problems:?}");
            let answer = main.control.generate(request.clone()).await.finished;
            assert_eq!(answer.tokens, expected.tokens, "{word}");
            let (remote, fallback) = if computed_there { (calls.remote, 0) } else { (0, calls.remote) };
            let wanted = ExpertCalls { local: calls.local, remote, fallback, retries: 0 };
            assert_eq!(answer.experts, Some(wanted), "{word}");
        }
        assert!(stranger.take().is_empty(), "{word}: work was sent to a function that was refused");
    }
}
