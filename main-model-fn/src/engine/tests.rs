//! Tests of the engine's loop with the native backend, in this process.

use super::request::{
    Delta, Event, Figures, FinishReason, InspectLevel, Priority, Request, Sampling, StopRules, ThoughtBudget,
};
use super::{
    EngineHandle, EngineParts, EngineSettings, EngineStop, Events, RequestLimits, Switch, Vocabulary, start,
};
use crate::backend::{Backend, PAGE_POSITIONS};
use crate::dispatch::{BackgroundLoads, ExpertMetrics, LocalExperts, RemoteRequirements};
use crate::grammar::{Compiler, Grammar, Source, Tokens};
use crate::metrics::EngineMetrics;
use crate::pages::CacheScope;
use crate::transformer::{Model, Transformer};
use crate::{Native, pages};
use prometheus::Registry;
use remoe_kernels::{CacheFormat, Dtype, Pool, PoolConfig};
use remoe_model::Checkpoint;
use remoe_otel::SpanRef;
use remoe_proto::ErrorCode;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Suffix of the name of a fixture that is served with an int8 KV cache.
const INT8_SUFFIX: &str = " with int8 KV cache";

/// Engine with all experts of a fixture.
struct Engine {
    handle: EngineHandle,
    metrics: EngineMetrics,
    thread: JoinHandle<()>,
    switches: mpsc::UnboundedSender<Switch>,
    generation: u64,
    local: LocalExperts,
    vocab: u32,
    norm_eps: f64,
}

impl Engine {
    async fn start(fixture: &str, dtype: Dtype, threads: usize, cache_pages: usize) -> Self {
        let mut engine = Self::unplaced(fixture, dtype, threads, |settings| {
            settings.limits.cache_pages = cache_pages;
        });
        engine.place().await;
        engine
    }

    /// Like [`Self::start`], but without a placement, so requests wait. `change` adapts the settings.
    fn unplaced(
        fixture: &str,
        dtype: Dtype,
        threads: usize,
        change: impl FnOnce(&mut EngineSettings),
    ) -> Self {
        let (engine, loads, checkpoint) = Self::unloaded(fixture, dtype, threads, change);
        loads.load_all(&checkpoint, dtype.into(), 1).unwrap();
        engine
    }

    /// Activates another routing generation, with all experts local.
    async fn place(&mut self) {
        self.generation += 1;
        let (done, is_active) = oneshot::channel();
        let switch = Switch {
            generation: self.generation,
            local: self.local.clone(),
            remote: BTreeMap::new(),
            endpoints: Vec::new(),
            done,
        };
        self.switches.send(switch).ok().unwrap();
        is_active.await.unwrap();
    }

    /// Like [`Self::unplaced`], but before the experts are loaded.
    fn unloaded(
        fixture: &str,
        dtype: Dtype,
        threads: usize,
        change: impl FnOnce(&mut EngineSettings),
    ) -> (Self, Arc<BackgroundLoads>, Arc<Checkpoint>) {
        let (fixture, format) = match fixture.strip_suffix(INT8_SUFFIX) {
            Some(fixture) => (fixture, CacheFormat::Int8),
            None => (fixture, CacheFormat::Plain),
        };
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(fixture);
        let checkpoint = Arc::new(Checkpoint::open(folder).unwrap());
        let pool = Arc::new(Pool::new(PoolConfig { threads, ..PoolConfig::default() }).unwrap());
        let mut ops = Native::open(None, dtype, &pool).unwrap();
        assert!(ops.set_cache_format(format));
        let model = Box::new(Transformer::load(&checkpoint, dtype, ops, 1).unwrap());
        let config = checkpoint.config();
        let registry = Registry::new();
        let metrics = EngineMetrics::new(&registry).unwrap();
        let mut local = LocalExperts::default();
        let experts = |layer| 0..config.moe(layer).unwrap().experts as u32;
        let all_experts = config
            .moe_layers()
            .into_iter()
            .flat_map(|layer| experts(layer).map(move |expert| (layer, expert)));
        let expert_metrics = ExpertMetrics::new(&registry).unwrap();
        let loads = local.add_loading(&Vec::from_iter(all_experts), expert_metrics.loading.clone());
        let mut settings = EngineSettings {
            limits: RequestLimits {
                vocab_size: config.vocab_size,
                context_length: config.context_length,
                cache_pages: 1000,
                page_needs: model.page_needs(),
                prefill_rows: 24,
                max_choices: 4,
                max_requests: 64,
                queue_deadline: None,
            },
            max_batch: 8,
            headroom: 4,
            target_itl: None,
            fallback_bytes: 1 << 20,
            poll: Duration::ZERO,
        };
        change(&mut settings);
        let parts = EngineParts {
            model,
            pool,
            checkpoint: checkpoint.clone(),
            class: dtype.into(),
            vocabulary: Vocabulary { tokenizer: None, end_ids: Vec::new() },
            expected: RemoteRequirements {
                checkpoint: String::new(),
                dtype: dtype.to_string(),
                numerics_class: String::new(),
                hidden_size: config.hidden_size,
                sets: Vec::new(),
                trust: None,
            },
            expert_metrics,
            metrics: metrics.clone(),
            recorder: None,
        };
        let (handle, switches, thread) = start(settings, parts, EngineStop::default()).unwrap();
        let (vocab, norm_eps) = (config.vocab_size as u32, config.norm_eps);
        (Self { handle, metrics, thread, switches, generation: 0, local, vocab, norm_eps }, loads, checkpoint)
    }

    fn end(self) -> EngineMetrics {
        drop((self.handle, self.switches));
        self.thread.join().unwrap();
        self.metrics
    }
}

/// A generated token, and the bits of its log-probability, which differ if the logits do.
type SampledToken = (u32, u32);

fn request(prompt: Vec<u32>, choices: usize, max_tokens: usize) -> Request {
    Request {
        prompt,
        choices,
        max_tokens,
        sampling: Sampling { temperature: 0.9, seed: 7, ..Sampling::default() },
        stop: StopRules { ignore_eos: true, ..StopRules::default() },
        grammar: None,
        shown: Vec::new(),
        special_text: false,
        logprobs: Some(0),
        prompt_logprobs: None,
        inspect: None,
        embeds: false,
        tenant: CacheScope::default(),
        activations: None,
        span: SpanRef::default(),
        priority: Priority::default(),
        queue_deadline: None,
        thought_budget: None,
    }
}

/// Returns the tokens of each choice, and the number of prompt tokens found in the prefix cache.
async fn finish(mut events: Events, choices: usize) -> (Vec<Vec<SampledToken>>, usize) {
    let mut sampled = vec![Vec::new(); choices];
    loop {
        match events.recv().await.unwrap() {
            Event::Delta(Delta { choice, token: Some(token), logprobs: Some(logprobs), .. }) => {
                sampled[choice].push((token, logprobs.logprob.to_bits()));
            }
            Event::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
            Event::Done(figures) => return (sampled, figures.cached_tokens),
            Event::Prompt(_) => (),
            other => panic!("{other:?}"),
        }
    }
}

/// Random number generator SplitMix64.
struct SplitMix64(u64);

impl SplitMix64 {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// Most tokens of a generated answer.
const MAX_ANSWER: usize = 30;

/// Target that no iteration meets.
const TINY_TARGET: Duration = Duration::from_nanos(1);

/// Returns prompts of several lengths; groups of three begin with the same tokens.
fn prompts(vocab: u32) -> Vec<Vec<u32>> {
    let token = |kind: usize, at: usize| 3 + (kind * 37 + at * at * 7 + at * 11) as u32 % (vocab - 3);
    let prompt = |length: usize, kind: usize, own: usize| -> Vec<u32> {
        (0..length).map(|at| token(if at < length * 3 / 4 { kind } else { own }, at)).collect()
    };
    (0..9).map(|index| prompt([5, 40, 70][index % 3] + index, index / 3, 10 + index)).collect()
}

/// Tokenizer whose tokens are single letters.
struct LetterTokenizer;

impl Tokens for LetterTokenizer {
    fn bytes(&self, id: u32) -> Vec<u8> {
        vec![letter(id)]
    }

    fn is_special(&self, _: u32) -> bool {
        false
    }
}

fn letter(id: u32) -> u8 {
    b'a' + (id % 26) as u8
}

/// Returns a grammar that alternates between letters of the alphabet's first and second half, longer than any answer.
async fn alternating_grammar(vocab: u32) -> Grammar {
    let compiler = Compiler::new(Arc::new(LetterTokenizer), vocab as usize, Vec::new());
    compiler.compile(Source::regex("([a-m][n-z]){100}").unwrap(), "regex").await.unwrap()
}

/// Runs random schedules in which requests of both priorities arrive, finish, are abandoned and preempt each other, with
/// few KV pages, a prefix cache and changing placements. Each request must get the same tokens and bits as alone. A
/// third of the requests have a grammar. With [`TINY_TARGET`], prefills advance by parts of a layer between two decode
/// iterations.
async fn check_schedules(fixture: &str, dtype: Dtype, schedules: usize, target: Option<Duration>) {
    let alone = Engine::start(fixture, dtype, 1, 1000).await;
    let prompts = prompts(alone.vocab);
    let grammar = alternating_grammar(alone.vocab).await;
    let bound = |index: usize, choices: usize, tokens: usize| Request {
        grammar: (index % 3 == 1).then(|| grammar.clone()),
        ..request(prompts[index].clone(), choices, tokens)
    };
    let mut expected = HashMap::new();
    for index in 0..prompts.len() {
        // Prompts with log-probabilities do not use the prefix cache.
        let uncached = Request { prompt_logprobs: Some(0), ..bound(index, 3, MAX_ANSWER) };
        let is_bound = uncached.grammar.is_some();
        let (sampled, cached) = finish(alone.handle.submit(uncached).unwrap(), 3).await;
        assert_eq!(cached, 0);
        let obeys = |sampled: &Vec<SampledToken>| {
            sampled.iter().enumerate().all(|(at, &(token, _))| (letter(token) <= b'm') == (at % 2 == 0))
        };
        assert_eq!(sampled.iter().all(obeys), is_bound);
        expected.insert(index, sampled);
    }
    alone.end();
    let mut engine = Engine::unplaced(fixture, dtype, 2, |settings| {
        let limits = &mut settings.limits;
        limits.prefill_rows = if target.is_some() { 50 } else { 24 };
        // Little more than the largest request needs alone.
        let longest = prompts.iter().map(Vec::len).max().unwrap() + MAX_ANSWER;
        limits.cache_pages = 3 * limits.page_needs.pages(longest, limits.prefill_rows) + 2;
        settings.target_itl = target;
    });
    engine.place().await;
    let mut random = SplitMix64(3);
    let mut cached = 0;
    for schedule in 0..schedules {
        let mut running = Vec::new();
        for _ in 0..=random.below(4) {
            let (index, choices) = (random.below(prompts.len()), 1 + random.below(3));
            let tokens = 1 + random.below(MAX_ANSWER);
            let priority = if random.below(3) == 0 { Priority::Batch } else { Priority::Interactive };
            let request = Request { priority, ..bound(index, choices, tokens) };
            let events = engine.handle.submit(request).unwrap();
            running.push((index, choices, tokens, events));
            for _ in 0..random.below(3) {
                tokio::task::yield_now().await;
            }
        }
        if random.below(4) == 0 {
            engine.place().await;
        }
        for (index, choices, tokens, mut events) in running {
            if random.below(5) == 0 {
                let _first = events.recv().await;
                continue;
            }
            let (sampled, found) = finish(events, choices).await;
            cached += found;
            for (choice, sampled) in sampled.iter().enumerate() {
                assert_eq!(
                    sampled,
                    &expected[&index][choice][..tokens],
                    "schedule {schedule}, prompt {index}"
                );
            }
        }
    }
    let needs = engine.handle.limits().page_needs;
    let metrics = engine.end();
    assert!(cached > schedules && metrics.prefix_tokens_found.get() as usize >= cached);
    // With windows in most layers, sequences need few further pages.
    let grows = needs.windowed <= needs.whole;
    assert!(metrics.preemptions.get() > 0 || !grows, "{fixture}: nothing was preempted");
    let slices = metrics.iteration_seconds.get_sample_count();
    let whole = metrics.iterations.get();
    // The number of parts depends on the load of the machine.
    assert!(target.is_none() || slices > whole, "{slices} parts of {whole} forwards");
}

#[tokio::test]
async fn schedules_keep_bits_of_grouped_attention() {
    check_schedules("mixtral-basic", Dtype::F32, 200, None).await;
    check_schedules("mixtral-basic", Dtype::F32, 300, Some(TINY_TARGET)).await;
    check_schedules("qwen2moe-window", Dtype::Bf16, 200, Some(TINY_TARGET)).await;
}

/// Models with full and windowed layers, which have separate pages.
#[tokio::test]
async fn schedules_keep_bits_of_windowed_attention() {
    check_schedules("gptoss-mxfp4", Dtype::Bf16, 200, Some(TINY_TARGET)).await;
    check_schedules("gptoss-basic", Dtype::F32, 100, None).await;
    check_schedules("mixtral-window", Dtype::F32, 100, Some(TINY_TARGET)).await;
}

#[tokio::test]
async fn schedules_keep_bits_of_int8_kv_cache() {
    for (fixture, dtype) in [("mixtral-basic", Dtype::F32), ("dsv2-basic", Dtype::Bf16)] {
        check_schedules(&format!("{fixture}{INT8_SUFFIX}"), dtype, 200, Some(TINY_TARGET)).await;
    }
}

#[tokio::test]
async fn int8_kv_cache_changes_logits_slightly() {
    let scores = async |fixture: &str| {
        let engine = Engine::start(fixture, Dtype::F32, 2, 1000).await;
        let prompt = prompt_of(80, 1, engine.vocab);
        let (sampled, _) = finish(engine.handle.submit(request(prompt, 1, 1)).unwrap(), 1).await;
        engine.end();
        f32::from_bits(sampled[0][0].1)
    };
    for fixture in ["mixtral-basic", "dsv2-basic"] {
        let (plain, int8) = (scores(fixture).await, scores(&format!("{fixture}{INT8_SUFFIX}")).await);
        assert!(plain != int8 && (plain - int8).abs() < 0.01, "{fixture}: {plain} {int8}");
    }
}

/// Half of the layers have a window of 8 positions. After a prompt of 4,000 tokens they hold one or two pages, and the
/// answer has the same bits as with a large cache. A second request finds the prompt in the prefix cache.
#[tokio::test]
async fn pages_before_the_window_are_released() {
    const POSITIONS: usize = 4000;
    let start = async |pages: usize| {
        let mut engine = Engine::unplaced("gptoss-mxfp4", Dtype::Bf16, 2, |settings| {
            settings.limits.context_length = 100_000;
            settings.limits.cache_pages = pages;
        });
        engine.place().await;
        engine
    };
    let blocks = POSITIONS / PAGE_POSITIONS;
    let engine = start(10 * blocks).await;
    let prompt = prompt_of(POSITIONS - 20, 1, engine.vocab);
    let (expected, _) = finish(engine.handle.submit(request(prompt.clone(), 1, 20)).unwrap(), 1).await;
    engine.end();
    // Both kinds of layers would need twice as many pages as there are blocks.
    let limit = blocks + 8;
    assert!(limit * 100 <= 2 * blocks * 55, "{limit} pages for {blocks} blocks");
    let engine = start(limit).await;
    for cached in [0, prompt.len() / PAGE_POSITIONS * PAGE_POSITIONS] {
        let got = finish(engine.handle.submit(request(prompt.clone(), 1, 20)).unwrap(), 1).await;
        assert_eq!(got, (expected.clone(), cached));
    }
    let too_long = engine.handle.submit(request(prompt.clone(), 1, 300)).unwrap_err();
    assert_eq!(too_long.code, ErrorCode::ContextLengthExceeded, "{too_long}");
    let held = engine.metrics.cache_bytes.get() as usize;
    engine.end();
    assert!(held <= limit * PAGE_POSITIONS * 2 * 2 * 12 * 2, "{held}");
}

#[tokio::test]
async fn schedules_keep_bits_of_latent_attention() {
    check_schedules("dsv2-basic", Dtype::Bf16, 200, None).await;
    check_schedules("dsv2-basic", Dtype::Bf16, 200, Some(TINY_TARGET)).await;
}

/// A request that arrives before the experts are loaded waits for those that it needs, and gets the same answer as
/// afterwards.
#[tokio::test]
async fn answers_wait_for_experts_that_are_being_loaded() {
    let (mut engine, loads, checkpoint) = Engine::unloaded("dsv2-group", Dtype::Bf16, 2, |settings| {
        settings.limits.cache_pages = 64;
    });
    engine.place().await;
    let prompts = prompts(engine.vocab);
    let pending: Vec<_> =
        prompts.iter().map(|prompt| engine.handle.submit(request(prompt.clone(), 1, 5)).unwrap()).collect();
    // Waits until the engine waits for experts.
    while engine.metrics.iterations.get() == 0 && loads.demanded_count() == 0 {
        tokio::task::yield_now().await;
    }
    let loading = tokio::task::spawn_blocking(move || loads.load_all(&checkpoint, Dtype::Bf16.into(), 2));
    let mut early = Vec::new();
    for events in pending {
        early.push(finish(events, 1).await.0);
    }
    loading.await.unwrap().unwrap();
    for (prompt, early) in prompts.iter().zip(early) {
        let events = engine.handle.submit(request(prompt.clone(), 1, 5)).unwrap();
        assert_eq!(finish(events, 1).await.0, early);
    }
    engine.end();
}

/// An embedding is the mean of the hidden states after the final norm, even with other requests and preemptions.
#[tokio::test]
async fn embeddings_are_means_of_normed_states() {
    let alone = Engine::start("mixtral-basic", Dtype::F32, 1, 1000).await;
    let prompts = prompts(alone.vocab);
    let embed = |prompt: &[u32]| Request { embeds: true, ..Request::prompt_only(prompt.to_vec()) };
    let mean = async |mut events: Events| loop {
        match events.recv().await.unwrap() {
            Event::Embedding(mean) => return mean,
            Event::Failed(error) => panic!("{error}"),
            _ => (),
        }
    };
    let inspected = |prompt: &[u32]| Request {
        inspect: Some(InspectLevel::Hidden),
        ..Request::prompt_only(prompt.to_vec())
    };
    // Hidden states before the norm, divided by their root mean square.
    let scaled = async |prompt: &[u32]| -> Vec<Vec<f64>> {
        let mut events = alone.handle.submit(inspected(prompt)).unwrap();
        let hidden = loop {
            if let Event::Inspection(inspection) = events.recv().await.unwrap() {
                break inspection.hidden;
            }
        };
        let elements: Vec<f64> = hidden
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()).into())
            .collect();
        let rows = elements.chunks_exact(elements.len() / prompt.len());
        rows.map(|row| {
            let square = row.iter().map(|element| element * element).sum::<f64>() / row.len() as f64;
            row.iter().map(|element| element / (square + alone.norm_eps).sqrt()).collect()
        })
        .collect()
    };
    // A prompt of one token shows the norm's weights.
    let one = mean(alone.handle.submit(embed(&prompts[0][..1])).unwrap()).await;
    let row = scaled(&prompts[0][..1]).await.remove(0);
    let weights: Vec<f64> = one.iter().zip(&row).map(|(mean, element)| f64::from(*mean) / element).collect();
    let mut expected = Vec::new();
    for prompt in &prompts {
        let got = mean(alone.handle.submit(embed(prompt)).unwrap()).await;
        let rows = scaled(prompt).await;
        for (index, (got, weight)) in got.iter().zip(&weights).enumerate() {
            let mean = weight * rows.iter().map(|row| row[index]).sum::<f64>() / rows.len() as f64;
            assert!((f64::from(*got) - mean).abs() < 1e-4, "{got} {mean}");
        }
        expected.push(got);
    }
    alone.end();
    let crowded = Engine::start("mixtral-basic", Dtype::F32, 2, 14).await;
    let running: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let other = crowded.handle.submit(request(prompt.clone(), 2, MAX_ANSWER)).unwrap();
            (crowded.handle.submit(embed(prompt)).unwrap(), other)
        })
        .collect();
    for ((events, other), expected) in running.into_iter().zip(&expected) {
        assert_eq!(&mean(events).await, expected);
        finish(other, 2).await;
    }
    crowded.end();
}

/// Requests for every row of the prompt do not use the prefix cache.
#[tokio::test]
async fn scored_and_inspected_prompts_skip_the_prefix_cache() {
    let engine = Engine::start("mixtral-basic", Dtype::F32, 1, 100).await;
    let prompt: Vec<u32> = (3..3 + 3 * pages::pages_of(1) as u32 * 32).map(|id| id % engine.vocab).collect();
    let plain = request(prompt.clone(), 1, 1);
    let cached_tokens =
        async |request: Request| figures(engine.handle.submit(request).unwrap()).await.cached_tokens;
    assert_eq!(cached_tokens(plain.clone()).await, 0);
    assert_eq!(cached_tokens(plain.clone()).await, 64, "the last page has the last token");
    assert_eq!(cached_tokens(Request { prompt_logprobs: Some(0), ..plain.clone() }).await, 0);
    let inspected = Request { inspect: Some(InspectLevel::Routing), max_tokens: 0, ..plain.clone() };
    assert_eq!(cached_tokens(inspected).await, 0);
    assert_eq!(cached_tokens(plain).await, 64);
    engine.end();
}

/// Waits for the end of a request and returns its figures.
async fn figures(mut events: Events) -> Figures {
    loop {
        match events.recv().await.unwrap() {
            Event::Done(figures) => return figures,
            Event::Failed(error) => panic!("{error}"),
            _ => (),
        }
    }
}

/// Returns a prompt of `tokens` tokens; each `kind` has different ones.
fn prompt_of(tokens: usize, kind: u32, vocab: u32) -> Vec<u32> {
    (0..tokens as u32).map(|at| 3 + (at * at * 7 + at * 11 + kind * 37) % (vocab - 3)).collect()
}

/// If requests with a common prefix arrive together, one computes the prefix and the others wait for its pages.
#[tokio::test]
async fn a_prefix_of_simultaneous_requests_is_computed_once() {
    let mut engine = Engine::unplaced("mixtral-basic", Dtype::F32, 2, |settings| settings.max_batch = 16);
    let beginning = prompt_of(64, 1, engine.vocab);
    let tail = |kind: u32| prompt_of(6, 100 + kind, engine.vocab);
    let pending: Vec<_> = (0..16)
        .map(|kind| {
            let prompt = [beginning.clone(), tail(kind)].concat();
            engine.handle.submit(request(prompt, 1, 1)).unwrap()
        })
        .collect();
    engine.place().await;
    let mut cached = Vec::new();
    for events in pending {
        cached.push(figures(events).await.cached_tokens);
    }
    cached.sort_unstable();
    assert_eq!((cached[0], &cached[1..]), (0, &[64; 15][..]));
    assert_eq!(engine.end().rows.get(), 64 + 16 * 6);
}

/// If the request that computes a common prefix is abandoned, one of the waiting requests continues.
#[tokio::test]
async fn common_prefix_survives_abandoned_request() {
    let mut engine =
        Engine::unplaced("mixtral-basic", Dtype::F32, 2, |settings| settings.limits.prefill_rows = 32);
    let (vocab, handle) = (engine.vocab, engine.handle.clone());
    let beginning = prompt_of(70, 1, vocab);
    let ask = |kind: u32| {
        let prompt = [beginning.clone(), prompt_of(6, 100 + kind, vocab)].concat();
        handle.submit(request(prompt, 1, 3)).unwrap()
    };
    for abandoned in 0..4 {
        let mut pending: Vec<_> = (0..4).map(|kind| ask(10 * abandoned + kind)).collect();
        engine.place().await;
        drop(pending.remove(0));
        for events in pending {
            assert_eq!(figures(events).await.completion_tokens, 3);
        }
    }
    drop(handle);
    engine.end();
}

/// Among requests that wait for a placement, short prompts precede long ones, and interactive requests precede batch
/// requests.
#[tokio::test]
async fn short_and_interactive_prompts_go_first() {
    let mut engine = Engine::unplaced("mixtral-basic", Dtype::F32, 1, |settings| {
        settings.limits.prefill_rows = 16;
        settings.limits.context_length = 100_000;
    });
    let handle = engine.handle.clone();
    let submit =
        |prompt: Vec<u32>, priority| handle.submit(Request { priority, ..request(prompt, 1, 1) }).unwrap();
    let vocab = engine.vocab;
    let batch = submit(prompt_of(300, 1, vocab), Priority::Batch);
    let long = submit(prompt_of(2000, 2, vocab), Priority::Interactive);
    let short = submit(prompt_of(5, 3, vocab), Priority::Interactive);
    engine.place().await;
    let [batch, long, short] =
        [figures(batch).await.ttft, figures(long).await.ttft, figures(short).await.ttft];
    assert!(short < long && long < batch, "{short:?} {long:?} {batch:?}");
    drop(handle);
    engine.end();
}

#[tokio::test]
async fn thought_is_closed_at_its_budget() {
    let engine = Engine::start("qwen3moe-basic", Dtype::F32, 1, 100).await;
    let budget = ThoughtBudget { tokens: 3, open: None, close: "</think>", close_ids: [5, 6].into() };
    let free = request(vec![3, 4], 2, 8);
    let bound = Request { thought_budget: Some(budget), ..free.clone() };
    let (free, _) = finish(engine.handle.submit(free).unwrap(), 2).await;
    let (bound, _) = finish(engine.handle.submit(bound).unwrap(), 2).await;
    for (free, bound) in free.iter().zip(&bound) {
        assert_eq!(free[..3], bound[..3], "same tokens within the budget");
        assert_eq!((bound.len(), bound[3].0, bound[4].0), (8, 5, 6));
    }
    engine.end();
}

/// A request whose queue deadline passes before its first row fails; one that is being computed does not.
#[tokio::test]
async fn requests_leave_the_queue_at_their_deadline() {
    let mut engine = Engine::unplaced("mixtral-basic", Dtype::F32, 1, |settings| settings.max_batch = 1);
    engine.place().await;
    let prompt = prompt_of(8, 1, engine.vocab);
    let deadline = |limit: Option<Duration>, tokens| Request {
        queue_deadline: limit,
        ..request(prompt.clone(), 1, tokens)
    };
    let mut first = engine.handle.submit(deadline(Some(Duration::from_secs(3600)), 100)).unwrap();
    first.recv().await.unwrap();
    let mut late = engine.handle.submit(deadline(Some(Duration::ZERO), 1)).unwrap();
    let Event::Failed(error) = late.recv().await.unwrap() else { panic!("not refused") };
    assert_eq!((error.code, error.code.http_status()), (ErrorCode::QueueDeadlineExceeded, 503));
    let patient = engine.handle.submit(deadline(None, 1)).unwrap();
    assert_eq!(figures(first).await.completion_tokens, 100);
    figures(patient).await;
    assert_eq!(engine.end().overdue.get(), 1);
}

/// Small requests pass an earlier one that has too many choices for the running batch.
#[tokio::test]
async fn requests_that_do_not_fit_let_others_pass() {
    let mut engine = Engine::unplaced("mixtral-basic", Dtype::F32, 1, |settings| settings.max_batch = 4);
    let vocab = engine.vocab;
    let running = engine.handle.submit(request(prompt_of(5, 1, vocab), 2, 120)).unwrap();
    let large = engine.handle.submit(request(prompt_of(5, 2, vocab), 4, 1)).unwrap();
    let small = engine.handle.submit(request(prompt_of(5, 3, vocab), 1, 1)).unwrap();
    engine.place().await;
    let [running, large, small] = [figures(running).await, figures(large).await, figures(small).await]
        .map(|figures| figures.queued + figures.decode);
    assert!(small < large && small < running, "{small:?} {large:?} {running:?}");
    engine.end();
}

/// An interactive request preempts a batch request, which continues later after its previous tokens.
#[tokio::test]
async fn batch_requests_are_preempted_and_continue() {
    let mut engine = Engine::unplaced("mixtral-basic", Dtype::F32, 1, |settings| {
        settings.max_batch = 1;
        settings.limits.context_length = 100_000;
    });
    engine.place().await;
    let vocab = engine.vocab;
    let batch = || Request { priority: Priority::Batch, ..request(prompt_of(9, 1, vocab), 1, 2000) };
    let (alone, _) = finish(engine.handle.submit(batch()).unwrap(), 1).await;
    let mut running = engine.handle.submit(batch()).unwrap();
    let Some(Event::Delta(first)) = running.recv().await else { panic!("no token") };
    let interactive = figures(engine.handle.submit(request(prompt_of(9, 2, vocab), 1, 3)).unwrap()).await;
    assert_eq!(interactive.completion_tokens, 3);
    let (rest, _) = finish(running, 1).await;
    let first = (first.token.unwrap(), first.logprobs.unwrap().logprob.to_bits());
    assert_eq!([&[first][..], &rest[0]].concat(), alone[0]);
    assert!(engine.end().preemptions.get() > 0);
}
