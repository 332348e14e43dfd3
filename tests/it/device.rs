//! GPU code paths on a device that is simulated on the CPU: counts of device requests, and requests that exceed
//! device memory.

use remoe_model::{AttentionFacts, Checkpoint};
use remoe_proto::v1::GenerateRequest;
use remoe_test_support::binaries;
use remoe_test_support::control::greedy;
use remoe_test_support::deadline::{LONG, SOON, until};
use remoe_test_support::fixture::{ModelFixture, served_fixtures};
use remoe_test_support::function::{MainFunction, StartOptions};
use remoe_test_support::http;
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::up::{Up, all_gone};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

const GIB: u64 = 1 << 30;

/// Requests to a device, as in `library::DeviceCounts` of main-model-torch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
struct DeviceCounts {
    calls: u64,
    copies_down: u64,
    bytes_down: u64,
    copies_up: u64,
    synchronisations: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct DeviceRecording {
    /// Number of writes of this record so far.
    writes: u64,
    layers: Vec<DeviceCounts>,
    outside: DeviceCounts,
    held_bytes: u64,
    peak_bytes: u64,
    limit_bytes: u64,
}

/// Main function on a simulated device, with the recorded counts.
struct RecordedFunction {
    main: MainFunction,
    folder: TempDir,
}

impl RecordedFunction {
    async fn start(model: &ModelFixture, dtype: &'static str, bytes: u64) -> Self {
        Self::start_with(model, StartOptions::dtype(dtype).simulated_device(bytes)).await
    }

    async fn start_with(model: &ModelFixture, mut options: StartOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name).display().to_string();
        options.environment.push(("REMOE_TEST_RECORDING", file("recording.json")));
        options.environment.push(("REMOE_TEST_DEVICE_LIMIT", file("limit")));
        options.environment.push(("REMOE_TEST_DEVICE_LOST", file("lost")));
        Self { main: MainFunction::start(&model.folder, options).await, folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("recording.json")
    }

    /// Waits until the counters are stable and returns them.
    async fn recording(&self) -> DeviceRecording {
        let read = || {
            fs::read(self.file()).ok().and_then(|text| serde_json::from_slice::<DeviceRecording>(&text).ok())
        };
        let mut latest = read();
        until(SOON, "a recording at rest", async || {
            tokio::time::sleep(Duration::from_millis(50)).await;
            // Takes a write that started after the previous read, so that nothing is missing.
            let before = latest.as_ref().map_or(0, |before| before.writes);
            let now = read().filter(|now| now.writes >= before + 2)?;
            let last = latest.replace(now.clone()).map(|last| DeviceRecording { writes: now.writes, ..last });
            (last.as_ref() == Some(&now)).then_some(now)
        })
        .await
    }

    async fn iterations(&self) -> u64 {
        MetricsPage::read(self.main.http()).await.value("remoe_iterations_total")
    }

    /// Limits the device memory such that `free` bytes are available besides the `held` ones.
    async fn set_free_memory(&self, held: u64, free: u64) {
        let new_file = self.folder.path().join("limit.new");
        fs::write(&new_file, (held + free).to_string()).unwrap();
        fs::rename(new_file, self.folder.path().join("limit")).unwrap();
        let limit = held + free;
        until(SOON, "a new limit", async || (self.recording().await.limit_bytes == limit).then_some(()))
            .await;
    }

    /// Returns the counts of each layer for `requests`, which start together, and the number of iterations.
    async fn counts(&self, requests: &[GenerateRequest]) -> (Vec<DeviceCounts>, u64) {
        let (before, iterations) = (self.recording().await, self.iterations().await);
        let mut generations = Vec::new();
        for request in requests {
            generations.push(self.main.control.begin(request.clone()).await.unwrap());
        }
        // Requests before the first placement wait for it.
        if before.layers.is_empty() {
            self.main.control.route(&[], &[]).await;
        }
        for generation in generations {
            generation.finish().await.unwrap();
        }
        let after = self.recording().await;
        let earlier = before.layers.iter().copied().chain(std::iter::repeat(DeviceCounts::default()));
        let layers = after.layers.iter().zip(earlier).map(|(after, before)| DeviceCounts {
            calls: after.calls - before.calls,
            copies_down: after.copies_down - before.copies_down,
            bytes_down: after.bytes_down - before.bytes_down,
            copies_up: after.copies_up - before.copies_up,
            synchronisations: after.synchronisations - before.synchronisations,
        });
        (layers.collect(), self.iterations().await - iterations)
    }
}

/// Model families with the limits of device requests per layer. The counts depend on the structure of a layer, not on
/// its sizes.
const SHAPES: [(&str, u64); 4] =
    [("olmoe-basic", 25), ("dsv2-basic", 45), ("dsv2-group", 45), ("gptoss-basic", 45)];

/// Returns requests that decode from the first token on.
fn decode_requests(count: u32, tokens: u32) -> Vec<GenerateRequest> {
    (0..count).map(|at| GenerateRequest { ignore_eos: true, ..greedy(&[7 + at], tokens) }).collect()
}

/// A layer of a decode iteration takes few calls, the same number for eight sequences as for two, and one copy in
/// each direction.
#[tokio::test(flavor = "multi_thread")]
async fn layer_decodes_in_few_calls_whatever_the_spans() {
    for dtype in ["float32", "bfloat16"] {
        for (name, max_calls) in SHAPES {
            let model = ModelFixture::fixture(name);
            let mut counted = Vec::new();
            for spans in [1, 2, 8] {
                let device = RecordedFunction::start(&model, dtype, 8 * GIB).await;
                let (layers, iterations) = device.counts(&decode_requests(spans, 12)).await;
                assert_eq!(iterations, 12, "{name}: all requests in one batch");
                for (id, layer) in layers.iter().enumerate() {
                    let case = format!("{name} {dtype}, layer {id}, {spans} spans: {layer:?}");
                    assert!(layer.calls.is_multiple_of(iterations), "{case}: iterations differ");
                    assert!(layer.calls <= max_calls * iterations, "{case} in {iterations} iterations");
                    let is_moe = model.checkpoint().config().moe(id).is_some();
                    let once = if is_moe { iterations } else { 0 };
                    assert_eq!(layer.copies_down, once, "{case}");
                    assert_eq!(layer.copies_up, once, "{case}");
                    assert_eq!(layer.synchronisations, once, "{case}");
                }
                let calls: Vec<u64> = layers.iter().map(|layer| layer.calls / iterations).collect();
                println!("{name} {dtype}, {spans} spans: {calls:?} calls a layer");
                counted.push(calls);
            }
            // A single row is contiguous and needs no copy, so some calls are saved.
            assert_eq!(counted[1], counted[2], "{name}: calls depend on the spans");
            assert!(counted[0].iter().zip(&counted[1]).all(|(one, more)| one <= more), "{name}: {counted:?}");
        }
    }
}

/// A layer of a prefill takes the same calls for one prompt and for several together.
#[tokio::test(flavor = "multi_thread")]
async fn layer_prefills_in_few_calls_whatever_the_spans() {
    for (name, max_calls) in SHAPES {
        let model = ModelFixture::fixture(name);
        let rising = |first: u32, length: u32| (first..first + length).collect::<Vec<u32>>();
        let device = RecordedFunction::start(&model, "float32", 8 * GIB).await;
        let one = [greedy(&rising(1, 20), 1)];
        let (warm, _) = device.counts(&one).await;
        assert!(warm.iter().any(|layer| layer.calls > 0));
        for lengths in [&[20][..], &[9, 20, 14]] {
            // The time budget may split the rows of a layer into blocks with separate attention calls. One of several
            // tries is not split.
            let mut min_calls = u64::MAX;
            for attempt in 0..10 {
                let begin = |at: usize| 2 + attempt + 30 * at as u32;
                let prompts = lengths.iter().enumerate().map(|(at, &length)| rising(begin(at), length));
                let requests: Vec<_> = prompts.map(|prompt| greedy(&prompt, 1)).collect();
                let (layers, passes) = device.counts(&requests).await;
                for (id, layer) in layers.iter().enumerate() {
                    let is_moe = model.checkpoint().config().moe(id).is_some();
                    let expected = if is_moe { passes } else { 0 };
                    assert_eq!(layer.synchronisations, expected, "{name}, layer {id}: {layer:?}");
                }
                let calls_per_pass = layers.iter().map(|layer| layer.calls.div_ceil(passes)).max().unwrap();
                min_calls = min_calls.min(calls_per_pass);
                if min_calls <= max_calls {
                    break;
                }
            }
            assert!(min_calls <= max_calls, "{name}: {min_calls} calls of a layer for {lengths:?} rows");
        }
    }
}

/// Returns the size of a KV cache for this many positions in float32, in bytes.
fn kv_cache_bytes(checkpoint: &Checkpoint, positions: usize) -> usize {
    let layers = checkpoint.config().layers.iter().map(|layer| layer.attention.cache_elements());
    layers.sum::<usize>() * positions * 4
}

#[tokio::test(flavor = "multi_thread")]
async fn device_memory_does_not_grow_after_the_first_requests() {
    for name in ["olmoe-basic", "dsv2-basic", "gptoss-basic"] {
        let device = RecordedFunction::start(&ModelFixture::fixture(name), "float32", 8 * GIB).await;
        device.counts(&decode_requests(8, 24)).await;
        let warm = device.recording().await;
        for _ in 0..3 {
            device.counts(&decode_requests(8, 24)).await;
        }
        let after = device.recording().await;
        assert_eq!(after.held_bytes, warm.held_bytes, "{name}");
        assert_eq!(after.peak_bytes, warm.peak_bytes, "{name}");
    }
}

/// Returns the token ids of a completion stream.
fn stream_token_ids(body: &str) -> Vec<u64> {
    let events = body.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let ids = |event: Value| event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
    events.flat_map(ids).map(|id| id.as_u64().unwrap()).collect()
}

/// Requests with a cached prefix and preempted requests get the tokens that they get alone.
#[tokio::test(flavor = "multi_thread")]
async fn prefix_reuse_and_preemption_keep_tokens_on_a_device() {
    for model in served_fixtures() {
        let (name, checkpoint) = (&model.name, model.checkpoint());
        if checkpoint.config().served_context() < 100 {
            continue;
        }
        let options = StartOptions::dtype("float32").simulated_device(8 * GIB);
        let options = options.with("--kv-cache-bytes", kv_cache_bytes(&checkpoint, 6 * 32));
        let main = MainFunction::start(&model.folder, options).await;
        main.control.route(&[], &[]).await;
        let mut body = completion(1, 40, 60);
        body["stream"] = true.into();
        let ask = async |body: &Value| http::post(main.http(), "/v1/completions", body).await.unwrap();
        let first = stream_token_ids(&ask(&body).await.finish().await.unwrap().body);
        assert_eq!(first.len(), 60, "{name}");
        let again = stream_token_ids(&ask(&body).await.finish().await.unwrap().body);
        assert_eq!(again, first, "{name}: behind a prefix that was kept");
        assert!(MetricsPage::read(main.http()).await.value("remoe_prefix_cache_hits_total") > 0, "{name}");

        let interactive = GenerateRequest { ignore_eos: true, ..greedy(&prompt(2, 40), 60) };
        let alone = main.control.generate(interactive.clone()).await.finished.tokens;
        body["priority"] = "batch".into();
        let mut batch = ask(&body).await;
        let begins = batch.chunk().await.unwrap().unwrap();
        let answer = main.control.generate(interactive).await.finished.tokens;
        assert_eq!(answer, alone, "{name}: an interactive request beside a batch request");
        let answered = stream_token_ids(&(begins + &batch.finish().await.unwrap().body));
        assert_eq!(answered, first, "{name}: a preempted request");
        // Layers with sliding windows need fewer pages, so both requests may fit.
        let has_window = |attention: &AttentionFacts| match attention {
            AttentionFacts::Gqa(facts) => facts.window.is_some(),
            AttentionFacts::Mla(_) => false,
        };
        let has_windows = checkpoint.config().layers.iter().any(|layer| has_window(&layer.attention));
        let preempted = MetricsPage::read(main.http()).await.value("remoe_preemptions_total");
        assert!(has_windows || preempted > 0, "{name}: nothing had to give way");
    }
}

/// A float32 router works beside bfloat16 biases on a device.
#[tokio::test(flavor = "multi_thread")]
async fn router_in_float32_takes_its_bias_beside_bfloat16() {
    for model in served_fixtures() {
        let device = RecordedFunction::start(&model, "bfloat16", GIB).await;
        device.main.control.route(&[], &[]).await;
        let prompt = &model.prompts()[3];
        let answer = device.main.control.generate(greedy(prompt, 4)).await;
        assert_eq!(answer.finished.reason, "length", "{}", model.name);
    }
}

/// Returns a prompt without a common prefix.
fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|at| (7 * at + 11 * seed + at * at) % 96).collect()
}

fn completion(seed: u32, length: u32, tokens: u32) -> Value {
    json!({
        "prompt": prompt(seed, length), "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
    })
}

/// Running streams never fail for lack of device memory: new requests are refused and can be retried.
#[tokio::test(flavor = "multi_thread")]
async fn device_without_memory_refuses_only_new_requests() {
    let model = ModelFixture::fixture("olmoe-basic");
    let options = StartOptions::dtype("float32").simulated_device(2 * GIB).with("--kv-cache-bytes", 64 * GIB);
    let device = RecordedFunction::start_with(&model, options.with("--max-batch", 64)).await;
    device.main.control.route(&[], &[]).await;
    let http = device.main.http();
    let metrics = MetricsPage::read(http).await;
    let memory = |purpose: &str| metrics.value(&format!("remoe_device_memory_bytes{{use=\"{purpose}\"}}"));
    let planned = memory("weights") + memory("kv_cache") + memory("workspace");
    assert!(planned <= 2 * GIB && planned > 2 * GIB - (16 << 20), "{planned} bytes are planned of 2 GiB");
    assert_eq!(memory("kv_cache"), metrics.value("remoe_kv_cache_limit_bytes"));

    // Memory that one long prompt needs; with less it is refused.
    let held = device.recording().await.held_bytes;
    // Tokens 64 to 95, which the requests below do not use.
    let (mut free, mut seed, mut refused) = (32 << 10, 64, 0);
    loop {
        device.set_free_memory(held, free).await;
        let body = completion(seed, 100, 8);
        let answer = http::post(http, "/v1/completions", &body).await.unwrap().finish().await.unwrap();
        match answer.status {
            200 => break,
            503 => refused += 1,
            other => panic!("{other}: {}", answer.body),
        }
        (free, seed) = (free * 5 / 4, seed + 1);
    }
    assert!(refused > 0, "the device is never too small");

    device.set_free_memory(held, GIB / 4).await;
    let mut alone = Vec::new();
    for stream in 0..8 {
        alone
            .push(device.main.control.generate(decode_requests(8, 60)[stream].clone()).await.finished.tokens);
    }
    let mut streams = Vec::new();
    for stream in 0..8 {
        let mut running = device.main.control.begin(decode_requests(8, 60)[stream].clone()).await.unwrap();
        running.tokens(1).await.unwrap();
        streams.push(running);
    }
    // Too small for long prompts, enough for short ones, possibly one at a time.
    device.set_free_memory(held, free * 6 / 10).await;
    let mut requests = tokio::task::JoinSet::new();
    for request in 0..64 {
        let length = if request % 2 == 0 { 12 } else { 100 };
        requests.spawn(async move {
            let body = completion(request, length, 8);
            let answer = http::post(http, "/v1/completions", &body).await.unwrap();
            (request, length, answer.finish().await.unwrap())
        });
    }
    // Admission depends on concurrent requests and on the split of rows.
    let (mut answered, mut refused) = (Vec::new(), Vec::new());
    while let Some(answer) = requests.join_next().await {
        let (request, length, answer) = answer.unwrap();
        match answer.status {
            200 => answered.push(length),
            503 => {
                refused.push((request, length));
                assert!(answer.retry_after.is_some(), "{answer:?}");
                assert!(answer.body.contains("out of device memory"), "{}", answer.body);
            }
            other => panic!("{other}: {}", answer.body),
        }
    }
    assert!(!answered.is_empty() && !refused.is_empty(), "answered {answered:?}, refused {refused:?}");
    for (stream, alone) in streams.into_iter().zip(alone) {
        assert_eq!(stream.finish().await.expect("a stream that runs is not failed").finished.tokens, alone);
    }
    assert!(MetricsPage::read(http).await.value("remoe_device_out_of_memory_total") > 0);
    for (request, length) in refused.into_iter().filter(|(_, length)| *length == 12) {
        let again = http::post(http, "/v1/completions", &completion(request, length, 8)).await.unwrap();
        assert_eq!(again.finish().await.unwrap().status, 200, "alone it has room");
    }
}

/// Sequences that do not fit together run one after another; once there is memory again, as many run together as before.
#[tokio::test(flavor = "multi_thread")]
async fn shortage_lowers_the_batch_until_memory_is_free_again() {
    let model = ModelFixture::fixture("olmoe-basic");
    let options = StartOptions::dtype("float32").simulated_device(2 * GIB).with("--max-batch", 16);
    let device = RecordedFunction::start_with(&model, options).await;
    device.main.control.route(&[], &[]).await;
    let http = device.main.http();
    let batch_limit = async || MetricsPage::read(http).await.value("remoe_batch_limit_sequences");
    assert_eq!(batch_limit().await, 16);
    let mut alone = Vec::new();
    for request in decode_requests(16, 60) {
        alone.push(device.main.control.generate(request).await.finished.tokens);
    }
    let held = device.recording().await.held_bytes;
    let mut free = 1 << 20;
    let lowered = loop {
        device.set_free_memory(held, free).await;
        let mut streams = Vec::new();
        for request in decode_requests(16, 60) {
            streams.push(device.main.control.begin(request).await.unwrap());
        }
        for (stream, alone) in streams.into_iter().zip(&alone) {
            assert_eq!(&stream.finish().await.expect("each has room alone").finished.tokens, alone);
        }
        match batch_limit().await {
            16 => free = free * 7 / 8,
            lowered => break lowered,
        }
    };
    assert!((1..16).contains(&lowered), "{lowered}");
    device.set_free_memory(held, GIB).await;
    until(LONG, "the batch of the settings", async || {
        device.main.control.generate(decode_requests(1, 120)[0].clone()).await;
        (batch_limit().await == 16).then_some(())
    })
    .await;
}

/// After the device is lost, the function becomes unready and exits with a code that requests a restart.
#[tokio::test(flavor = "multi_thread")]
async fn lost_device_ends_the_process_after_its_readiness() {
    let model = ModelFixture::fixture("olmoe-basic");
    let options =
        StartOptions::dtype("float32").simulated_device(2 * GIB).with("--health-listen", "127.0.0.1:0");
    let mut device = RecordedFunction::start_with(&model, options).await;
    device.main.control.route(&[], &[]).await;
    let health = device.main.announcement.health.unwrap();
    assert_eq!(http::get(health, "/readyz").await.status, 200);
    let mut running = device.main.control.begin(decode_requests(1, 120)[0].clone()).await.unwrap();
    running.tokens(1).await.unwrap();
    fs::write(device.folder.path().join("lost"), "").unwrap();
    // A fast request may still succeed; the next one fails on the lost device.
    let _ended = running.finish().await;
    let next = device.main.control.begin(decode_requests(1, 120)[0].clone()).await;
    if let Ok(next) = next {
        let failed = next.finish().await.expect_err("a lost device answers nothing");
        assert_eq!(failed.code(), tonic::Code::Unavailable, "{failed:?}");
    }
    until(SOON, "a function that is not ready", async || {
        (http::get(health, "/readyz").await.status == 503).then_some(())
    })
    .await;
    assert!(device.main.process.ended().is_none(), "it was not ready before it ended");
    let status = device.main.process.end(SOON).await;
    assert_eq!(status.code(), Some(1), "a failure that another start may mend");
    assert!(device.main.process.log().iter().any(|line| line.contains("the device is lost")));
}

/// Makes a folder of programs whose main function with LibTorch has a recorded device.
fn recorded_programs() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, program) in
        [("main-model-fn-torch", "examples/recorded_device"), ("remote-expert-fn", "remote-expert-fn")]
    {
        symlink(binaries::program(program), folder.path().join(name)).unwrap();
    }
    folder
}

/// A main function that loses its device while `remoe up` serves it.
#[tokio::test(flavor = "multi_thread")]
async fn up_restarts_a_main_function_whose_device_is_lost() {
    let model = ModelFixture::fixture("olmoe-basic");
    let folder = recorded_programs();
    let lost = folder.path().join("lost");
    let variables = [
        ("REMOE_BIN_DIR", folder.path().display().to_string()),
        ("REMOE_TEST_DEVICE_BYTES", (2 * GIB).to_string()),
        ("REMOE_TEST_DEVICE_LOST", lost.display().to_string()),
    ];
    let arguments = ["--backend", "torch", "--dtype", "float32", "--remote-ratio", "0.5"];
    let model = model.folder.to_str().unwrap();
    let mut up = Up::start_in(&[model], &arguments, &variables).await;
    let (http, main) = (up.ready.http(), up.ready.main().pid.unwrap());
    let ask = async || {
        let answer = http::post(http, "/v1/completions", &completion(1, 20, 8)).await.unwrap();
        answer.finish().await.unwrap()
    };
    let first = ask().await;
    assert_eq!(first.status, 200, "{}", first.body);
    fs::write(&lost, "").unwrap();
    // The gateway repeats a request that got no token, so it may be answered by the next main function.
    let next = tokio::spawn(async move {
        let answer = http::post(http, "/v1/completions", &completion(2, 20, 8)).await.unwrap();
        answer.finish().await.unwrap()
    });
    all_gone(&[main], LONG).await;
    fs::remove_file(&lost).unwrap();
    let whole = up.whole_without(&[main]).await;
    assert_ne!(whole.main().pid, Some(main));
    let next = next.await.unwrap();
    assert!(next.status == 200 || next.status == 503, "{}: {}", next.status, next.body);
    let again = ask().await;
    assert_eq!(again.status, 200, "{}", again.body);
    let tokens = |body: &str| serde_json::from_str::<Value>(body).unwrap()["choices"][0]["token_ids"].clone();
    assert_eq!(tokens(&again.body), tokens(&first.body));
}

/// If a request needs only the most likely tokens, only those are copied to the host. Otherwise all logits are
/// copied.
#[tokio::test(flavor = "multi_thread")]
async fn likeliest_tokens_come_from_the_device_and_are_those_of_all() {
    let model = ModelFixture::fixture("mixtral-text");
    let device = RecordedFunction::start(&model, "float32", GIB).await;
    device.main.control.route(&[], &[]).await;
    let vocabulary = model.checkpoint().config().vocab_size as u64;
    let http = device.main.http();
    for top_k in [0, 5] {
        let mut answers = Vec::new();
        for logprobs in [false, true] {
            let mut body = completion(3, 1, 20);
            if top_k > 0 {
                body["top_k"] = top_k.into();
                body["temperature"] = 1.into();
                body["seed"] = 7.into();
            }
            if logprobs {
                body["logprobs"] = 1.into();
            }
            let before = device.recording().await;
            let answer = http::post(http, "/v1/completions", &body).await.unwrap().finish().await.unwrap();
            let after = device.recording().await;
            let answer: Value = serde_json::from_str(&answer.body).unwrap();
            answers.push(answer["choices"][0]["token_ids"].clone());
            // 20 rows of logits in float32.
            let bytes = (after.outside.bytes_down - before.outside.bytes_down) / 20;
            assert_eq!(bytes >= 4 * vocabulary, logprobs, "{bytes} bytes an iteration, {vocabulary} tokens");
        }
        assert_eq!(answers[0].as_array().unwrap().len(), 20);
        assert_eq!(answers[0], answers[1], "top_k {top_k}");
    }
}
