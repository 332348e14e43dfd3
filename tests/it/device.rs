//! The branches that a GPU takes, on a device that is simulated on the CPU: what it is asked for, and what becomes of
//! requests that it has no memory for.

use remoe_model::{AttentionFacts, Checkpoint};
use remoe_proto::v1::GenerateRequest;
use remoe_test_support::control::greedy;
use remoe_test_support::deadline::{SOON, until};
use remoe_test_support::fixture::{ModelFixture, served_fixtures};
use remoe_test_support::function::{MainFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use serde::Deserialize;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

const GIB: u64 = 1 << 30;

/// Calls of a device; see `library::DeviceCounts` of main-model-torch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
struct DeviceCounts {
    calls: u64,
    copies_down: u64,
    copies_up: u64,
    synchronisations: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct DeviceRecording {
    layers: Vec<DeviceCounts>,
    held_bytes: u64,
    peak_bytes: u64,
}

/// A main function on a simulated device, with what is recorded of it.
struct Recorded {
    main: MainFunction,
    folder: TempDir,
}

impl Recorded {
    async fn start(model: &ModelFixture, dtype: &'static str, bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut options = StartOptions::dtype(dtype).simulated_device(bytes);
        let file = |name: &str| folder.path().join(name).display().to_string();
        options.environment.push(("REMOE_TEST_RECORDING", file("recording.json")));
        options.environment.push(("REMOE_TEST_DEVICE_LOST", file("lost")));
        Self { main: MainFunction::start(&model.folder, options).await, folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("recording.json")
    }

    /// The counters, once they have come to rest.
    async fn recording(&self) -> DeviceRecording {
        let read = || {
            fs::read(self.file()).ok().and_then(|text| serde_json::from_slice::<DeviceRecording>(&text).ok())
        };
        until(SOON, "a recording at rest", async || {
            let first = read();
            tokio::time::sleep(Duration::from_millis(100)).await;
            read().filter(|second| first.as_ref() == Some(second))
        })
        .await
    }

    async fn iterations(&self) -> u64 {
        MetricsPage::read(self.main.http()).await.value("remoe_iterations_total")
    }

    /// Counts of each layer for `requests`, which begin together, and in how many iterations they were made.
    async fn counts(&self, requests: &[GenerateRequest]) -> (Vec<DeviceCounts>, u64) {
        let (before, iterations) = (self.recording().await, self.iterations().await);
        let mut begun = Vec::new();
        for request in requests {
            begun.push(self.main.control.begin(request.clone()).await.unwrap());
        }
        // Those that come before the first placement wait for it.
        if before.layers.is_empty() {
            self.main.control.route(&[], &[]).await;
        }
        for generation in begun {
            generation.finish().await.unwrap();
        }
        let after = self.recording().await;
        let nothing = DeviceCounts { calls: 0, copies_down: 0, copies_up: 0, synchronisations: 0 };
        let earlier = before.layers.iter().copied().chain(std::iter::repeat(nothing));
        let layers = after.layers.iter().zip(earlier).map(|(after, before)| DeviceCounts {
            calls: after.calls - before.calls,
            copies_down: after.copies_down - before.copies_down,
            copies_up: after.copies_up - before.copies_up,
            synchronisations: after.synchronisations - before.synchronisations,
        });
        (layers.collect(), self.iterations().await - iterations)
    }
}

/// Families by what a layer of theirs may ask a device for. Counts depend on what a layer consists of, not on its sizes.
const SHAPES: [(&str, u64); 4] =
    [("olmoe-basic", 25), ("dsv2-basic", 45), ("dsv2-group", 45), ("gptoss-basic", 45)];

/// Requests that decode from their first token on.
fn decoding(count: u32, tokens: u32) -> Vec<GenerateRequest> {
    (0..count).map(|at| GenerateRequest { ignore_eos: true, ..greedy(&[7 + at], tokens) }).collect()
}

/// A layer of a decode iteration: few calls, as many for eight sequences as for two, and one copy each way.
#[tokio::test(flavor = "multi_thread")]
async fn layer_decodes_in_few_calls_whatever_the_spans() {
    for dtype in ["float32", "bfloat16"] {
        for (name, most) in SHAPES {
            let model = ModelFixture::fixture(name);
            let mut counted = Vec::new();
            for spans in [1, 2, 8] {
                let device = Recorded::start(&model, dtype, 8 * GIB).await;
                let (layers, iterations) = device.counts(&decoding(spans, 12)).await;
                assert_eq!(iterations, 12, "{name}: all requests in one batch");
                for (id, layer) in layers.iter().enumerate() {
                    let case = format!("{name} {dtype}, layer {id}, {spans} spans: {layer:?}");
                    assert!(layer.calls.is_multiple_of(iterations), "{case}: iterations differ");
                    assert!(layer.calls <= most * iterations, "{case} in {iterations} iterations");
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
            // What lies together because there is one row is not copied: one call less here and there.
            assert_eq!(counted[1], counted[2], "{name}: calls depend on the spans");
            assert!(counted[0].iter().zip(&counted[1]).all(|(one, more)| one <= more), "{name}: {counted:?}");
        }
    }
}

/// A layer of a prefill: the same for one prompt and for several that go together.
#[tokio::test(flavor = "multi_thread")]
async fn layer_prefills_in_few_calls_whatever_the_spans() {
    for (name, most) in SHAPES {
        let model = ModelFixture::fixture(name);
        let prompt = |first: u32, length: u32| (first..first + length).collect::<Vec<u32>>();
        let device = Recorded::start(&model, "float32", 8 * GIB).await;
        let one = [greedy(&prompt(1, 20), 1)];
        let (warm, _) = device.counts(&one).await;
        assert!(warm.iter().any(|layer| layer.calls > 0));
        for prompts in [vec![prompt(2, 20)], vec![prompt(3, 9), prompt(30, 20), prompt(60, 14)]] {
            let requests: Vec<_> = prompts.iter().map(|prompt| greedy(prompt, 1)).collect();
            let (layers, passes) = device.counts(&requests).await;
            for (id, layer) in layers.iter().enumerate() {
                let case = format!("{name}, layer {id}, {} prompts: {layer:?}", prompts.len());
                assert!(layer.calls <= most * passes, "{case} in {passes} passes");
                let is_moe = model.checkpoint().config().moe(id).is_some();
                assert_eq!(layer.synchronisations, if is_moe { passes } else { 0 }, "{case}");
            }
            println!("{name}, {} prompts in {passes} passes: {layers:?}", prompts.len());
        }
    }
}

/// Memory for keys and values of so many positions, in float32.
fn memory(checkpoint: &Checkpoint, positions: usize) -> usize {
    let layers = checkpoint.config().layers.iter().map(|layer| layer.attention.cache_elements());
    layers.sum::<usize>() * positions * 4
}

#[tokio::test(flavor = "multi_thread")]
async fn device_memory_does_not_grow_after_the_first_requests() {
    for name in ["olmoe-basic", "dsv2-basic", "gptoss-basic"] {
        let device = Recorded::start(&ModelFixture::fixture(name), "float32", 8 * GIB).await;
        device.counts(&decoding(8, 24)).await;
        let warm = device.recording().await;
        for _ in 0..3 {
            device.counts(&decoding(8, 24)).await;
        }
        let after = device.recording().await;
        assert_eq!(after.held_bytes, warm.held_bytes, "{name}");
        assert_eq!(after.peak_bytes, warm.peak_bytes, "{name}");
    }
}

/// Prompts that begin like earlier ones, and requests that give their pages back and go on, get the tokens that they get
/// alone.
#[tokio::test(flavor = "multi_thread")]
async fn prefix_reuse_and_preemption_keep_tokens_on_a_device() {
    for model in served_fixtures() {
        let (name, checkpoint) = (&model.name, model.checkpoint());
        let vocabulary = checkpoint.config().vocab_size as u32;
        let prompt = |seed: u32, length: u32| -> Vec<u32> {
            (0..length).map(|at| (7 * at + 11 * seed + at * at) % vocabulary).collect()
        };
        let options = StartOptions::dtype("float32").simulated_device(8 * GIB);
        let options = options.with("--kv-cache-bytes", memory(&checkpoint, 6 * 32));
        let main = MainFunction::start(&model.folder, options).await;
        main.control.route(&[], &[]).await;
        let mut longer = prompt(1, 40);
        longer.extend([5, 3, 9]);
        let requests = [greedy(&prompt(1, 40), 60), greedy(&prompt(2, 40), 60), greedy(&longer, 40)];
        let requests = requests.map(|request| GenerateRequest { ignore_eos: true, ..request });
        let mut alone = Vec::new();
        for request in &requests {
            alone.push(main.control.generate(request.clone()).await.finished.tokens);
        }
        let metrics = MetricsPage::read(main.http()).await;
        assert!(metrics.value("remoe_prefix_cache_hits_total") > 0, "{name}: no prefix was found");
        let mut together = Vec::new();
        for request in &requests {
            together.push(main.control.begin(request.clone()).await.unwrap());
        }
        for (generation, alone) in together.into_iter().zip(alone) {
            assert_eq!(generation.finish().await.unwrap().finished.tokens, alone, "{name}");
        }
        let has_window = |attention: &AttentionFacts| match attention {
            AttentionFacts::Gqa(facts) => facts.window.is_some(),
            AttentionFacts::Mla(_) => false,
        };
        let has_windows = checkpoint.config().layers.iter().any(|layer| has_window(&layer.attention));
        let preempted = MetricsPage::read(main.http()).await.value("remoe_preemptions_total");
        assert!(has_windows || preempted > 0, "{name}: nothing had to give way");
    }
}

/// A router in float32 beside biases in bfloat16, on a device.
#[tokio::test(flavor = "multi_thread")]
async fn router_in_float32_takes_its_bias_beside_bfloat16() {
    for model in served_fixtures() {
        let device = Recorded::start(&model, "bfloat16", GIB).await;
        device.main.control.route(&[], &[]).await;
        let prompt = &model.prompts()[3];
        let answer = device.main.control.generate(greedy(prompt, 4)).await;
        assert_eq!(answer.finished.reason, "length", "{}", model.name);
    }
}
