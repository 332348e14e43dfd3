//! Decode times of large models' shapes by part, for several numbers of sequences and positions.

use super::function::{FunctionSettings, MainProcess, RemoteProcess, last_half_of_experts};
use super::{CheckOutcome, DeviceArgs};
use crate::checkpoint::{self, ModelShape};
use crate::error::{ErrorContext, Result};
use remoe_proto::v1::{ExpertTime, Finished};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// Layers of the generated checkpoints.
const LAYERS: usize = 4;
/// Layers of Qwen3-30B-A3B.
const QWEN3_LAYERS: f64 = 48.0;
/// Tokens of background requests for each token of the measured one, so that they outlast it.
const BACKGROUND_FACTOR: u32 = 8;
const SHARD_BYTES: u64 = 2_000_000_000;
/// Numbers of sequences, and the limit of a decode step of Qwen3-30B-A3B outside of experts, in ms.
const NON_EXPERT_LIMITS: [(usize, f64); 2] = [(1, 8.0), (16, 15.0)];

/// Sizes of a measurement.
struct Grid {
    sequences: &'static [usize],
    positions: &'static [usize],
    /// Decode steps of a measurement.
    steps: u32,
}

impl Grid {
    /// Tokens of each background request.
    fn background_tokens(&self) -> u32 {
        BACKGROUND_FACTOR * self.steps
    }
}

const GRID: Grid = Grid { sequences: &[1, 16, 64], positions: &[0, 4096, 32_768], steps: 24 };
const SMALL: Grid = Grid { sequences: &[1, 4], positions: &[0, 64], steps: 6 };

/// OLMoE-1B-7B's shape, with a longer context.
pub(super) async fn olmoe(args: &DeviceArgs) -> Result<CheckOutcome> {
    let shape = ModelShape { context: 40_960, ..ModelShape::olmoe(LAYERS) };
    measure(args, "olmoe", shape).await
}

/// Qwen3-30B-A3B's shape.
pub(super) async fn qwen3(args: &DeviceArgs) -> Result<CheckOutcome> {
    let mut outcome = measure(args, "qwen3", ModelShape::qwen3(LAYERS)).await?;
    if args.small {
        return Ok(outcome);
    }
    for (sequences, most) in NON_EXPERT_LIMITS {
        let name = format!("{sequences} sequences, 0 positions");
        let rest = outcome.figures.get(&name).and_then(|figures| figures.get("rest_ms")?.as_f64());
        // This also multiplies the head's time, so that it is an upper bound.
        let whole = rest.map(|rest| rest * QWEN3_LAYERS / LAYERS as f64);
        outcome.require(whole.is_some_and(|whole| whole <= most), || {
            format!("{sequences} sequences: {whole:.2?} ms outside of experts in {QWEN3_LAYERS} layers, at most {most}")
        });
        if let Some(whole) = whole {
            outcome.set_figure(&format!("rest_ms_of_{QWEN3_LAYERS}_layers_at_{sequences}"), whole);
        }
    }
    Ok(outcome)
}

/// Measures decode steps of `shape` over the grid, and with half of the experts remote.
async fn measure(args: &DeviceArgs, name: &str, shape: ModelShape) -> Result<CheckOutcome> {
    let (shape, grid) = if args.small { (small(&shape), SMALL) } else { (shape, GRID) };
    let model = ensure_checkpoint(args, name, &shape)?;
    let longest = grid.positions.iter().max().copied().unwrap_or(0)
        + (grid.steps + grid.background_tokens()) as usize
        + 64;
    let most = grid.sequences.iter().max().copied().unwrap_or(1);
    // Sequences share the pages of the prompt, and each has pages of its own behind them.
    let positions = longest + most * (grid.background_tokens() as usize + 64);
    let position_bytes = 2 * shape.layers * shape.kv_heads() * shape.head_dim() * shape.dtype.bytes();
    let settings = FunctionSettings {
        dtype: "bfloat16",
        cache_bytes: (2 * positions * position_bytes) as u64,
        max_batch: most.max(32),
        threads: None,
    };
    let mut main = MainProcess::start(args, &model, &settings).await?;
    main.route(&[], &[]).await?;
    let mut outcome = CheckOutcome::default();
    outcome.set_figure("layers", shape.layers);
    // Warms up: the first use loads kernels and allocates memory.
    main.generate(&prompt(&shape, 96, 0), 8).await?;
    for &positions in grid.positions {
        let shared = prompt(&shape, positions, 1);
        if positions > 0 {
            let begun = main.generate(&shared, 1).await?;
            outcome.set_figure(&format!("prefill of {positions}, ms"), 1e3 * begun.prefill_s);
        }
        for &sequences in grid.sequences {
            let figures = measure_steps(&main, &shape, &shared, sequences, &grid).await?;
            outcome
                .set_figure(&format!("{sequences} sequences, {positions} positions"), Value::Object(figures));
        }
    }
    if let Some(recording) = main.recording().await? {
        outcome.set_figure("held_bytes", recording.held_bytes);
    }
    drop(main);
    let figures = half_remote(args, &model, (&shape, grid.steps), &settings).await?;
    outcome.set_figure("half of the experts remote", Value::Object(figures));
    Ok(outcome)
}

/// Measures decode steps of `sequences` requests with the prefix `shared`.
async fn measure_steps(
    main: &MainProcess,
    shape: &ModelShape,
    shared: &[u32],
    sequences: usize,
    grid: &Grid,
) -> Result<Map<String, Value>> {
    let prompt_of = |number: usize| [shared, &prompt(shape, 2, 100 + number)].concat();
    let mut background = Vec::new();
    for number in 1..sequences {
        background.push(main.begin(&prompt_of(number), grid.background_tokens()).await?);
    }
    for request in &mut background {
        request.next_event().await?;
    }
    let mut figures = step_parts(&main.generate(&prompt_of(0), grid.steps + 1).await?, grid.steps);
    for request in background {
        request.finish().await?;
    }
    // Counts come from a second run, as the recording is some milliseconds old.
    let Some(before) = main.recording().await? else { return Ok(figures) };
    let iterations = main.metric("remoe_iterations_total")?;
    let mut counted = Vec::new();
    for number in 0..sequences {
        counted.push(main.begin(&prompt_of(number), grid.steps + 1).await?);
    }
    for answer in counted {
        answer.finish().await?;
    }
    let iterations = main.metric("remoe_iterations_total")? - iterations;
    if let Some(after) = main.recording().await? {
        let each = after.per_layer(&before, iterations);
        figures.insert("per_layer".to_owned(), serde_json::to_value(each).doing(|| "writing counts")?);
    }
    Ok(figures)
}

/// Returns the milliseconds of a decode step by part.
fn step_parts(finished: &Finished, steps: u32) -> Map<String, Value> {
    let ExpertTime { local_s, waited_s, .. } = finished.decode_experts.unwrap_or_default();
    let each = |seconds: f64| json!(1e3 * seconds / f64::from(steps));
    Map::from_iter([
        ("step_ms".to_owned(), each(finished.decode_s)),
        ("rest_ms".to_owned(), each(finished.decode_s - local_s - waited_s)),
        ("experts_ms".to_owned(), each(local_s)),
        ("waited_ms".to_owned(), each(waited_s)),
    ])
}

/// Measures one sequence with half of the experts remote, and the share of remote computation that local work hides.
async fn half_remote(
    args: &DeviceArgs,
    model: &std::path::Path,
    (shape, steps): (&ModelShape, u32),
    settings: &FunctionSettings,
) -> Result<Map<String, Value>> {
    let experts = last_half_of_experts(model)?;
    let mut main = MainProcess::start(args, model, settings).await?;
    let remote = RemoteProcess::start(args, model, &experts, settings)?;
    main.route(&[&remote], &experts).await?;
    main.generate(&prompt(shape, 96, 0), 8).await?;
    let finished = main.generate(&prompt(shape, 64, 2), steps + 1).await?;
    let time = finished.decode_experts.unwrap_or_default();
    let mut figures = step_parts(&finished, steps);
    let hidden = (time.remote_s > 0.0).then(|| (1.0 - time.waited_s / time.remote_s).max(0.0));
    figures.insert("overlap".to_owned(), json!(hidden));
    Ok(figures)
}

/// Returns the shape with sizes for tests.
fn small(shape: &ModelShape) -> ModelShape {
    ModelShape {
        layers: 2,
        hidden: 128,
        experts: 16,
        top_k: 4,
        width: 64,
        heads: 4,
        kv_heads: shape.kv_heads.map(|_| 2),
        head_dim: shape.head_dim.map(|_| 48),
        vocab: 512,
        context: 1024,
        ..shape.clone()
    }
}

/// Returns pseudo-random tokens. Prompts of different `number` have no common prefix.
fn prompt(shape: &ModelShape, tokens: usize, number: usize) -> Vec<u32> {
    let ids = (0..tokens as u64).map(|index| {
        let mixed = (index + 1).wrapping_add((number as u64) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed >> 33) % shape.vocab as u64) as u32
    });
    ids.collect()
}

/// Returns the folder of a checkpoint of `shape`, which is written if there is none.
fn ensure_checkpoint(args: &DeviceArgs, name: &str, shape: &ModelShape) -> Result<PathBuf> {
    let folder = args.models.join(if args.small { format!("{name}-small") } else { name.to_owned() });
    if !checkpoint::is_of(shape, &folder) {
        checkpoint::write(shape, 0, SHARD_BYTES, &folder)?;
    }
    Ok(folder)
}
