//! Remote functions in groups: answers do not depend on the groups, each message goes only to hosts of all its
//! experts, and lost groups are replaced by local computation.

use remoe_proto::format_listing;
use remoe_proto::v1::{Code, LayerExperts};
use remoe_test_support::binaries::workspace;
use remoe_test_support::command::remoe;
use remoe_test_support::control::{Control, Hosted, greedy, seeded};
use remoe_test_support::deadline::SOON;
use remoe_test_support::fixture::{ModelFixture, served_fixtures};
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::{all_experts, calls_of, dealt, remote_sets};
use remoe_test_support::process::signal;
use remoe_test_support::recorder::{MessageFault, RecordedMessage, Recorder};
use remoe_test_support::up::{Up, all_gone};
use rustix::process::Signal;
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

const GROUPS: usize = 4;
const REPLICAS: usize = 2;
const TOKENS: u32 = 16;

/// Results that must not depend on the groups.
#[derive(Debug, PartialEq)]
struct Answers {
    /// Bits of the hidden states and the logits of each prompt.
    prompts: Vec<(Vec<u8>, Vec<u32>)>,
    tokens: Vec<Vec<u32>>,
}

/// Runs all requests under the routing in force and checks that remote experts were computed remotely.
async fn ask(control: &Control, model: &ModelFixture, remote: &[LayerExperts]) -> Answers {
    let mut prompts = Vec::new();
    for ids in model.prompts() {
        let reply = control.inspect_ids(&ids).await;
        assert_eq!(reply.experts.unwrap(), calls_of(&reply, remote), "{}", model.name);
        let logits = reply.last_logits.iter().map(|logit| logit.to_bits()).collect();
        prompts.push((reply.hidden.to_vec(), logits));
    }
    let longest = model.prompts().pop().unwrap();
    let mut tokens = Vec::new();
    for request in [greedy(&longest, TOKENS), seeded(&longest, TOKENS, 7)] {
        let finished = control.generate(request).await.finished;
        let calls = finished.experts.unwrap();
        assert_eq!((calls.fallback, calls.retries), (0, 0), "{}: {calls:?}", model.name);
        tokens.push(finished.tokens);
    }
    Answers { prompts, tokens }
}

/// Starts `replicas` functions for each of `groups`.
fn hosted(functions: &[RemoteFunction], groups: &[Vec<LayerExperts>], replicas: usize) -> Vec<Hosted> {
    let places = groups.iter().flat_map(|group| std::iter::repeat_n(group, replicas));
    functions.iter().map(RemoteFunction::address).zip(places.cloned()).collect()
}

async fn same_in_every_group(model: &ModelFixture, dtype: &'static str) {
    let checkpoint = model.checkpoint();
    let main = MainFunction::start(&model.folder, StartOptions::dtype(dtype)).await;
    let mut functions = Vec::new();
    for _ in 0..GROUPS * REPLICAS {
        let experts = all_experts(&checkpoint);
        functions.push(RemoteFunction::start(&model.folder, &experts, StartOptions::dtype(dtype)).await);
    }
    main.control.route(&[], &[]).await;
    let reference = ask(&main.control, model, &[]).await;
    for replicas in 1..=REPLICAS {
        // First all experts are remote, then half of them.
        let remote = remote_sets(&checkpoint, 1.0 / replicas as f64);
        for groups in 1..=GROUPS {
            let endpoints = hosted(&functions, &dealt(&remote, groups), replicas);
            main.control.route_parts(&endpoints, &remote).await;
            let answers = ask(&main.control, model, &remote).await;
            let case = format!("{}, {dtype}, {groups} groups of {replicas}", model.name);
            assert!(answers == reference, "{case}: another answer\n{answers:?}\n{reference:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn float32_answers_do_not_depend_on_groups() {
    for model in served_fixtures().iter().chain([&ModelFixture::demo()]) {
        same_in_every_group(model, "float32").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bfloat16_answers_do_not_depend_on_groups() {
    for model in served_fixtures().iter().chain([&ModelFixture::demo()]) {
        same_in_every_group(model, "bfloat16").await;
    }
}

/// Without a group, its results are computed locally with the same bits, however many other groups remain.
#[tokio::test(flavor = "multi_thread")]
async fn killed_group_changes_no_bit() {
    for (name, dtype) in [("olmoe-basic", "float32"), ("mixtral-basic", "bfloat16")] {
        let model = ModelFixture::fixture(name);
        let remote = remote_sets(&model.checkpoint(), 1.0);
        let main = MainFunction::start(&model.folder, StartOptions::dtype(dtype)).await;
        main.control.route(&[], &[]).await;
        let reference = ask(&main.control, &model, &[]).await.prompts;
        for groups in 1..=GROUPS {
            let dealt = dealt(&remote, groups);
            let mut functions = Vec::new();
            for sets in &dealt {
                let experts = format_listing(sets);
                functions
                    .push(RemoteFunction::start(&model.folder, &experts, StartOptions::dtype(dtype)).await);
            }
            main.control.route_parts(&hosted(&functions, &dealt, 1), &remote).await;
            assert!(
                ask(&main.control, &model, &remote).await.prompts == reference,
                "{name}, {groups} groups"
            );
            functions[0].process.signal(Signal::KILL);
            let mut fallback = 0;
            for (ids, expected) in model.prompts().iter().zip(&reference) {
                let reply = main.control.inspect_ids(ids).await;
                let logits = reply.last_logits.iter().map(|logit| logit.to_bits()).collect();
                assert!((reply.hidden.to_vec(), logits) == *expected, "{name}, {groups} groups, one killed");
                fallback += reply.experts.unwrap().fallback;
            }
            assert!(fallback > 0, "{name}, {groups} groups: nothing was made up for");
        }
    }
}

/// Overlapping sets in functions that host nothing else: each message goes to a host of all its experts, every pair
/// is sent once, and the hosted weights give the answer.
#[tokio::test(flavor = "multi_thread")]
async fn messages_go_where_their_experts_are() {
    let model = ModelFixture::fixture("olmoe-basic");
    let checkpoint = model.checkpoint();
    let remote = remote_sets(&checkpoint, 1.0);
    let parts = |keep: fn(usize, u32) -> bool| -> Vec<LayerExperts> {
        let kept = remote.iter().enumerate().map(|(index, set)| LayerExperts {
            layer: set.layer,
            experts: set.experts.iter().copied().filter(|&expert| keep(index, expert)).collect(),
        });
        kept.filter(|set| !set.experts.is_empty()).collect()
    };
    let all: Vec<Vec<LayerExperts>> = vec![
        parts(|_, expert| expert % 2 == 0),
        parts(|_, expert| expert % 2 == 1),
        parts(|_, expert| expert % 3 != 0),
        parts(|layer, expert| layer > 0 && expert < 4),
        parts(|layer, _| layer == 0),
    ];
    let mut functions = Vec::new();
    let mut recorders = Vec::new();
    for sets in &all {
        let function =
            RemoteFunction::start(&model.folder, &format_listing(sets), StartOptions::default()).await;
        recorders.push(Recorder::honest(function.address()).await);
        functions.push(function);
    }
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    main.control.route(&[], &[]).await;
    let reference = ask(&main.control, &model, &[]).await;
    let endpoints: Vec<Hosted> = recorders.iter().map(Recorder::address).zip(all.iter().cloned()).collect();
    main.control.route_parts(&endpoints, &remote).await;
    assert_eq!(ask(&main.control, &model, &remote).await, reference);
    let mut used = BTreeSet::new();
    for (index, (recorder, sets)) in recorders.iter().zip(&all).enumerate() {
        for arrival in recorder.take() {
            let set = sets.iter().find(|set| set.layer == arrival.work.layer).unwrap();
            assert!(arrival.work.experts.iter().all(|expert| set.experts.contains(expert)), "{index}");
            used.insert(index);
        }
    }
    assert_eq!(used, (0..all.len()).collect(), "functions that were asked");

    // A missing expert is reported and computed locally.
    let mut wrong = endpoints.clone();
    wrong[1].1 = parts(|_, expert| expert == 0);
    let ack = main.control.try_route_parts(&wrong[..2], &remote).await;
    assert_eq!(ack.problems.len(), 1, "{ack:?}");
    assert!(ack.problems[0].message.contains("expert 0 of layer"), "{ack:?}");
    let ids = model.prompts().pop().unwrap();
    let reply = main.control.inspect_ids(&ids).await;
    assert_eq!(reply.hidden.to_vec(), reference.prompts.last().unwrap().0);
    let calls = reply.experts.unwrap();
    assert!(calls.remote > 0 && calls.fallback > 0, "{calls:?}");
}

/// A message refused by one replica goes to the other replica of its group and to no other group, although another
/// group's function could answer.
#[tokio::test(flavor = "multi_thread")]
async fn refused_message_stays_in_its_group() {
    let model = ModelFixture::fixture("olmoe-basic");
    let checkpoint = model.checkpoint();
    let function =
        RemoteFunction::start(&model.folder, &all_experts(&checkpoint), StartOptions::default()).await;
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    let request = greedy(&model.prompts()[0], TOKENS);
    main.control.route(&[], &[]).await;
    let expected = main.control.generate(request.clone()).await.finished.tokens;
    let remote = remote_sets(&checkpoint, 1.0);
    let groups = dealt(&remote, 2);
    for code in [Code::Internal, Code::ResourceExhausted] {
        let refusing = Arc::new(move |_: usize, _: &_| MessageFault::Fail(code));
        let recorders = [
            Recorder::start(function.address(), refusing, Arc::new(|_| ())).await,
            Recorder::honest(function.address()).await,
            Recorder::honest(function.address()).await,
        ];
        let sets = [&groups[0], &groups[0], &groups[1]];
        let endpoints: Vec<Hosted> =
            recorders.iter().map(Recorder::address).zip(sets.into_iter().cloned()).collect();
        main.control.route_parts(&endpoints, &remote).await;
        let answer = main.control.generate(request.clone()).await.finished;
        assert_eq!(answer.tokens, expected);
        let calls = answer.experts.unwrap();
        assert!(calls.retries > 0 && calls.fallback == 0 && calls.local == 0, "{code:?}: {calls:?}");
        for (recorder, sets) in recorders.iter().zip(sets) {
            let arrivals = recorder.take();
            assert!(!arrivals.is_empty());
            for RecordedMessage { work, .. } in arrivals {
                let set = sets.iter().find(|set| set.layer == work.layer).unwrap();
                assert!(work.experts.iter().all(|expert| set.experts.contains(expert)), "{code:?}");
            }
        }
    }
}

/// The groups of a layer work concurrently, also while decoding: no group's message waits for another group's answer.
#[tokio::test(flavor = "multi_thread")]
async fn groups_work_at_the_same_time() {
    const ANSWERS_AFTER: Duration = Duration::from_millis(100);
    let model = ModelFixture::fixture("mixtral-basic");
    let checkpoint = model.checkpoint();
    let function =
        RemoteFunction::start(&model.folder, &all_experts(&checkpoint), StartOptions::default()).await;
    let mut recorders = Vec::new();
    for _ in 0..2 {
        let slow = Arc::new(|_: usize, _: &_| MessageFault::Delay(ANSWERS_AFTER));
        recorders.push(Recorder::start(function.address(), slow, Arc::new(|_| ())).await);
    }
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    let remote = remote_sets(&checkpoint, 1.0);
    let endpoints: Vec<Hosted> = recorders.iter().map(Recorder::address).zip(dealt(&remote, 2)).collect();
    main.control.route_parts(&endpoints, &remote).await;
    let calls = main.control.generate(greedy(&model.prompts()[0], 6)).await.finished.experts.unwrap();
    assert_eq!((calls.local, calls.fallback, calls.retries), (0, 0, 0), "{calls:?}");
    let mut arrivals: Vec<_> = recorders
        .iter()
        .enumerate()
        .flat_map(|(group, recorder)| recorder.take().into_iter().map(move |arrival| (group, arrival)))
        .collect();
    arrivals.sort_by_key(|(_, arrival)| arrival.arrived_at);
    // On a busy machine one may be recorded late; if groups waited for each other, all would be late.
    let (mut together, mut apart) = (0, 0);
    for pair in arrivals.windows(2) {
        let [(one, first), (other, second)] = pair else { continue };
        if one != other && first.work.layer == second.work.layer {
            *if second.arrived_at < first.arrived_at + ANSWERS_AFTER { &mut together } else { &mut apart } +=
                1;
        }
    }
    assert!(together > 4 * apart, "{together} together, {apart} one after the other");
}

/// Sends `blow` to the functions at `victims` of a deployment in groups during a generation. The tokens are those of
/// an undisturbed generation, and the functions return.
async fn survives(blow: Signal, replicas: &str, victims: &[usize], fallback: bool) {
    const LONG_ANSWER: u32 = 800;
    let model = ModelFixture::demo();
    let arguments = ["--remote-ratio", "0.5", "--groups", "3", "--replicas", replicas];
    let mut up = Up::start_with(&model.folder, &arguments).await;
    let pids = up.ready.remote_pids();
    assert_eq!(pids.len(), 3 * replicas.parse::<usize>().unwrap());
    let listings: BTreeSet<&str> = up
        .ready
        .functions
        .iter()
        .filter(|function| function.role == "remote")
        .map(|function| function.experts.as_str())
        .collect();
    let dealt: Vec<String> =
        dealt(&remote_sets(&model.checkpoint(), 0.5), 3).iter().map(|sets| format_listing(sets)).collect();
    assert_eq!(listings, dealt.iter().map(String::as_str).collect());
    let control = up.ready.control();
    let request = greedy(&model.prompts().pop().unwrap(), LONG_ANSWER);
    let peace = control.generate_in_peace(&request).await;
    let calls = peace.experts.unwrap();
    assert!(calls.remote > 0, "{calls:?}");

    let mut generation = control.begin(request.clone()).await.unwrap();
    generation.tokens(40).await.unwrap();
    let gone: Vec<u32> = victims.iter().map(|&victim| pids[victim]).collect();
    gone.iter().for_each(|&pid| signal(pid, blow));
    let disturbed = generation.finish().await.unwrap().finished;
    assert_eq!(disturbed.tokens, peace.tokens);
    let after = disturbed.experts.unwrap();
    assert_eq!((after.local, after.remote + after.fallback), (calls.local, calls.remote), "{after:?}");
    assert_eq!(after.fallback > 0, fallback, "{after:?}");
    assert!(after.remote > 0, "{after:?}");

    up.whole_without(&gone).await;
    all_gone(&gone, SOON).await;
    let again = control.generate_in_peace(&request).await;
    assert_eq!((again.tokens, again.experts), (peace.tokens, Some(calls)));
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_group_is_computed_locally_and_replaced() {
    survives(Signal::KILL, "1", &[1], true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_replica_of_a_group_causes_no_load() {
    survives(Signal::KILL, "2", &[2], false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_replica_of_a_group_causes_no_load() {
    survives(Signal::STOP, "2", &[3], false).await;
}

/// `up`, `generate` and `logits` run the groups of a plan file.
#[tokio::test(flavor = "multi_thread")]
async fn plan_file_with_groups_is_applied() {
    let model = workspace().join("demo/model");
    let model = model.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, plan: serde_json::Value| {
        let path = folder.path().join(name);
        std::fs::write(&path, plan.to_string()).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let prompt = ["--model", model, "--prompt", "In the beginning"];
    let run = async |command: &str, more: &[&str]| {
        let (code, answer) = remoe(&[&[command][..], &prompt[..], more].concat()).await;
        assert_eq!(code, Some(0), "{answer}");
        answer
    };
    let sets = remote_sets(&ModelFixture::demo().checkpoint(), 0.5);
    let groups: Vec<serde_json::Value> = dealt(&sets, 2)
        .iter()
        .map(|sets| json!({"experts": format_listing(sets), "replicas": 2, "memory_bytes": 300_000_000}))
        .collect();
    let plan = write("groups.json", json!({ "groups": groups }));
    let local = run("logits", &[]).await;
    let grouped = run("logits", &["--plan", &plan]).await;
    assert_eq!(grouped["last_logits"], local["last_logits"], "{grouped}");
    let local = run("generate", &["--max-tokens", "8"]).await;
    let grouped = run("generate", &["--max-tokens", "8", "--plan", &plan]).await;
    assert_eq!(grouped["tokens"], local["tokens"]);
    let calls = |answer: &serde_json::Value, name: &str| answer["experts"][name].as_u64().unwrap();
    assert!(calls(&grouped, "remote") > 0 && calls(&grouped, "fallback") == 0, "{grouped}");
    let dealt = run("generate", &["--max-tokens", "8", "--remote-ratio", "0.5", "--groups", "2"]).await;
    assert_eq!(
        (calls(&dealt, "local"), calls(&dealt, "remote")),
        (calls(&grouped, "local"), calls(&grouped, "remote"))
    );

    let up = Up::start_with(model.as_ref(), &["--plan", &plan]).await;
    assert_eq!(up.ready.remote_pids().len(), 4, "{:?}", up.ready);
    let ids = ModelFixture::demo().prompts().pop().unwrap();
    let reply = up.ready.control().inspect_ids(&ids).await;
    assert_eq!(reply.experts, Some(calls_of(&reply, &sets)));
    for function in up.ready.functions.iter().filter(|function| function.role == "remote") {
        assert!(MetricsPage::read(function.metrics.unwrap()).await.value("remoe_function_experts") > 0);
    }

    let twice = json!([{"experts": "0:1"}, {"experts": "0:1-2"}]);
    let (code, answer) = remoe(&[
        "generate",
        "--model",
        model,
        "--prompt",
        "a",
        "--plan",
        &write("twice.json", json!({"groups": twice})),
    ])
    .await;
    assert_eq!((code, &answer["error"]["field"]), (Some(2), &json!("groups[1].experts")), "{answer}");
    let arguments =
        ["generate", "--model", model, "--prompt", "a", "--remote-ratio", "0.5", "--groups", "65"];
    let (code, answer) = remoe(&arguments).await;
    assert_eq!((code, &answer["error"]["field"]), (Some(2), &json!("--groups")), "{answer}");
}
