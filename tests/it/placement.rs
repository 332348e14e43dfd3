//! Placement never changes the answer (invariant 1 of ARCHITECTURE.md): hidden states have the same bits and tokens
//! are the same, for every remote set and number of replicas, in both dtypes and with quantised experts.

use remoe_model::Checkpoint;
use remoe_proto::v1::{ExpertCalls, LayerExperts};
use remoe_test_support::control::{Control, greedy, seeded};
use remoe_test_support::fixture::{ModelFixture, served_fixtures};
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::http;
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::{all_experts, calls_of, pairs_per_position, remote_sets};
use remoe_test_support::up::Up;
use std::net::SocketAddr;

const RATIOS: [f64; 3] = [0.25, 0.5, 1.0];
const REPLICAS: usize = 3;
const TOKENS: u32 = 16;

/// Results that must not depend on the placement.
#[derive(Debug, PartialEq)]
struct Answers {
    /// Bits of the hidden states and the logits of each prompt.
    prompts: Vec<(Vec<u8>, Vec<u32>)>,
    greedy: Vec<u32>,
    seeded: Vec<u32>,
}

/// Runs all requests under the routing in force and checks where experts were computed.
async fn ask(
    control: &Control,
    model: &ModelFixture,
    checkpoint: &Checkpoint,
    remote: &[LayerExperts],
) -> (Answers, u64) {
    let name = &model.name;
    let mut all = ExpertCalls::default();
    let mut prompts = Vec::new();
    let hidden_bytes = checkpoint.config().hidden_size;
    for ids in model.prompts() {
        let reply = control.inspect_ids(&ids).await;
        let calls = reply.experts.unwrap();
        assert_eq!(calls, calls_of(&reply, remote), "{name}: calls of a prompt of {} tokens", ids.len());
        let bytes_per_element = reply.hidden.len() / ids.len() / hidden_bytes;
        assert!([2, 4].contains(&bytes_per_element), "{name}: {} bytes", reply.hidden.len());
        assert!(reply.hidden.iter().any(|&byte| byte != 0), "{name}: hidden states are zero");
        prompts
            .push((reply.hidden.to_vec(), reply.last_logits.iter().map(|logit| logit.to_bits()).collect()));
        add(&mut all, &calls);
    }
    let longest = model.prompts().pop().unwrap();
    let mut tokens = Vec::new();
    for request in [greedy(&longest, TOKENS), seeded(&longest, TOKENS, 7)] {
        let finished = control.generate(request).await.finished;
        let calls = finished.experts.unwrap();
        let pairs = finished.forwarded_positions * pairs_per_position(checkpoint);
        assert_eq!(calls.local + calls.remote, pairs, "{name}: {calls:?}");
        assert_eq!((calls.fallback, calls.retries), (0, 0), "{name}: {calls:?}");
        tokens.push(finished.tokens);
        add(&mut all, &calls);
    }
    let experts = |sets: &[LayerExperts]| sets.iter().map(|set| set.experts.len()).sum::<usize>();
    let everything = experts(&remote_sets(checkpoint, 1.0));
    assert_eq!(all.remote > 0, experts(remote) > 0, "{name}: {all:?}");
    assert_eq!(all.local > 0, experts(remote) < everything, "{name}: {all:?}");
    let seeded = tokens.pop().unwrap();
    (Answers { prompts, greedy: tokens.pop().unwrap(), seeded }, all.remote)
}

fn add(sum: &mut ExpertCalls, calls: &ExpertCalls) {
    sum.local += calls.local;
    sum.remote += calls.remote;
}

async fn pairs_at(metrics: &[SocketAddr]) -> Vec<u64> {
    let mut pairs = Vec::new();
    for &address in metrics {
        pairs.push(MetricsPage::read(address).await.value("remoe_function_pairs_total"));
    }
    pairs
}

async fn same_everywhere(model: &ModelFixture, options: &StartOptions) {
    let name = format!("{}, {:?} {:?}", model.name, options.dtype, options.arguments);
    let checkpoint = model.checkpoint();
    let main = MainFunction::start(&model.folder, options.clone()).await;
    let mut functions = Vec::new();
    for _ in 0..REPLICAS {
        let experts = all_experts(&checkpoint);
        functions.push(RemoteFunction::start(&model.folder, &experts, options.clone()).await);
    }
    let addresses: Vec<SocketAddr> = functions.iter().map(RemoteFunction::address).collect();
    let metrics: Vec<SocketAddr> = functions.iter().map(|f| f.announcement.metrics.unwrap()).collect();
    main.control.route(&[], &[]).await;
    let (reference, _) = ask(&main.control, model, &checkpoint, &[]).await;
    for ratio in RATIOS {
        let remote = remote_sets(&checkpoint, ratio);
        for replicas in 1..=REPLICAS {
            let case = format!("{name}, remote ratio {ratio}, {replicas} replicas");
            main.control.route(&addresses[..replicas], &remote).await;
            let before = pairs_at(&metrics).await;
            let (answers, remote_pairs) = ask(&main.control, model, &checkpoint, &remote).await;
            assert!(answers == reference, "{case}: another answer\n{answers:?}\n{reference:?}");
            let after = pairs_at(&metrics).await;
            let computed: Vec<u64> =
                after.iter().zip(&before).map(|(after, before)| after - before).collect();
            assert_eq!(computed.iter().sum::<u64>(), remote_pairs, "{case}: pairs at the functions");
            let used = computed.iter().filter(|&&pairs| pairs > 0).count();
            assert_eq!(used, replicas, "{case}: {computed:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn float32_answers_do_not_depend_on_placement() {
    for model in served_fixtures().iter().chain([&ModelFixture::demo()]) {
        same_everywhere(model, &StartOptions::dtype("float32")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bfloat16_answers_do_not_depend_on_placement() {
    for model in served_fixtures().iter().chain([&ModelFixture::demo()]) {
        same_everywhere(model, &StartOptions::dtype("bfloat16")).await;
    }
}

/// With LibTorch, for one family with latent attention and one without.
#[tokio::test(flavor = "multi_thread")]
async fn answers_by_libtorch_do_not_depend_on_placement() {
    for name in ["olmoe-basic", "dsv2-basic"] {
        for dtype in ["float32", "bfloat16"] {
            same_everywhere(&ModelFixture::fixture(name), &StartOptions::dtype(dtype).torch()).await;
        }
    }
}

/// With LibTorch on GPU code paths. gpt2_moe has biases, gpt-oss sinks and windows, and granite residual multipliers.
#[tokio::test(flavor = "multi_thread")]
async fn answers_on_a_device_do_not_depend_on_placement() {
    for name in
        ["olmoe-basic", "dsv2-group", "dsv3-basic", "gptoss-basic", "gpt2moe-basic", "granitemoe-basic"]
    {
        for dtype in ["float32", "bfloat16"] {
            let options = StartOptions::dtype(dtype).simulated_device(2 << 30);
            same_everywhere(&ModelFixture::fixture(name), &options).await;
        }
    }
}

/// One family with biases and one with latent attention, whose other weights are int8 beside quantised experts. The
/// other families do not differ for the kernels.
#[tokio::test(flavor = "multi_thread")]
async fn answers_of_quantised_experts_do_not_depend_on_placement() {
    let models = served_fixtures();
    let named = |name: &str| models.iter().find(|model| model.name == name).unwrap();
    for model in [named("gptoss-basic"), named("dsv2-basic"), &ModelFixture::demo()] {
        for (dtype, experts) in [("float32", "int8"), ("bfloat16", "int4")] {
            same_everywhere(model, &StartOptions::dtype(dtype).with("--experts-dtype", experts)).await;
        }
    }
    for (name, form) in [("gptoss-mxfp4", "mxfp4"), ("dsv3-fp8", "fp8")] {
        let as_stored = StartOptions::dtype("bfloat16").with("--experts-dtype", form);
        same_everywhere(named(name), &as_stored).await;
    }
}

/// A remote function with another numerics class computes other bits and is not used.
#[tokio::test(flavor = "multi_thread")]
async fn forms_of_experts_do_not_mix() {
    let model = ModelFixture::demo();
    let checkpoint = model.checkpoint();
    let main = MainFunction::start(&model.folder, StartOptions::dtype("float32")).await;
    let experts = all_experts(&checkpoint);
    let options = StartOptions::dtype("float32").with("--experts-dtype", "int8");
    let remote = RemoteFunction::start(&model.folder, &experts, options).await;
    let ack = main.control.try_route(&[remote.address()], &remote_sets(&checkpoint, 0.5)).await;
    assert_eq!(ack.problems.len(), 1, "{ack:?}");
    assert!(ack.problems[0].message.contains("numerics class"), "{ack:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_all_functions_are_found_and_well_named() {
    let up = Up::start(&ModelFixture::demo().folder, 2).await;
    let endpoint = up.ready.http();
    let body = serde_json::json!({"prompt": "Once upon a time", "max_tokens": 4});
    let answer = http::post(endpoint, "/v1/completions", &body).await.unwrap().finish().await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(up.ready.functions.len(), 3);
    // The gateway's page includes that of the main function, except process and build metrics, which are its own.
    let gateway = MetricsPage::read(endpoint).await;
    assert_eq!(gateway.problems(), Vec::<String>::new(), "gateway");
    let build = format!("remoe_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
    let prompt_tokens = format!("remoe_prompt_tokens_total{{model=\"{}\"}}", up.ready.model);
    for own in [build.as_str(), "process_start_time_seconds", &prompt_tokens] {
        assert!(gateway.value(own) > 0, "{own}");
    }
    for function in &up.ready.functions {
        let metrics = MetricsPage::read(function.metrics.unwrap()).await;
        assert_eq!(metrics.problems(), Vec::<String>::new(), "{}", function.role);
        let own = match function.role.as_str() {
            "main" => format!("remoe_prompt_tokens_total{{model=\"{}\"}}", up.ready.model),
            _ => "remoe_function_experts".to_owned(),
        };
        for own in [&own, "process_start_time_seconds"] {
            assert!(metrics.value(own) > 0, "{own}");
        }
    }
}
