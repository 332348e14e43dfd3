//! Time of a prediction with a large training history, as in a gateway: from a request's body to its expert usage.
//!
//! ```console
//! cargo run --release -p remoe-usage --example prediction_speed
//! cargo run --release -p remoe-usage --example prediction_speed -- 100000
//! ```
//!
//! One tenant sends requests to a model of the demo model's shape: prompts of 100 ids of a topic, each with a
//! twentieth of the vocabulary. Times are printed beside one pass over all vectors in the same run. Nothing is
//! tokenised. The history is stored in a temporary folder.

#![allow(clippy::print_stdout)]

#[path = "../tests/it/model/mod.rs"]
mod model;

use remoe_predictor::{Activations, Embedding, Phase};
use remoe_usage::{PredictorOptions, PromptReader, RequestArrival, Retention, Tenant, UsagePredictor};
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

const LAYERS: usize = 6;
const EXPERTS: usize = 16;
const HIDDEN: usize = 128;
const VOCABULARY: u64 = 4096;
const TOPICS: u64 = 20;
const QUERIES: u64 = 1000;
const PASSES: usize = 50;

/// Returns pseudo-random bits, the same on every machine.
fn drawn(seed: u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    state ^= state >> 29;
    state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state ^ state >> 32
}

fn body(number: u64) -> String {
    let (topic, part) = (number % TOPICS, VOCABULARY / TOPICS);
    let ids: Vec<u64> = (0..100).map(|at| topic * part + drawn(number << 8 | at) % part).collect();
    format!("{{\"prompt\": {ids:?}, \"max_tokens\": 16}}")
}

fn activations(number: u64) -> Option<String> {
    let mut activations = Activations::new(LAYERS, EXPERTS);
    for position in 0..100 {
        let experts: Vec<[(u32, f32); 2]> = (0..LAYERS as u64)
            .map(|layer| {
                let seed = ((number % TOPICS) << 16) | (layer << 8) | (position % 4);
                let first = drawn(seed) % EXPERTS as u64;
                let second = (first + 1 + position % 3) % EXPERTS as u64;
                [(first as u32, 0.5), (second as u32, 0.5)]
            })
            .collect();
        activations.count(Phase::Prefill, experts.iter().map(|experts| &experts[..]));
    }
    activations.to_text()
}

/// Measures one pass over the vectors of `records` requests, as a linear search would read them.
fn pass(records: u64) -> Vec<Duration> {
    let values: Vec<f32> =
        (0..records * HIDDEN as u64).map(|at| (drawn(at) % 2001) as f32 / 1000.0).collect();
    let mut took: Vec<Duration> = (0..PASSES)
        .map(|_| {
            let begun = Instant::now();
            let query = black_box(&values[..HIDDEN.min(values.len())]);
            let dot = |row: &[f32]| row.iter().zip(query).map(|(one, other)| one * other).sum::<f32>();
            black_box(black_box(&values).chunks(HIDDEN).map(dot).fold(f32::MIN, f32::max));
            begun.elapsed()
        })
        .collect();
    took.sort();
    took
}

/// Returns the quantile `part` of the sorted `times`, in milliseconds.
fn at(times: &[Duration], part: f64) -> f64 {
    let index = ((times.len().saturating_sub(1)) as f64 * part).round() as usize;
    times.get(index).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}

fn main() -> Result<(), Box<dyn Error>> {
    let records = std::env::args().nth(1).map_or(Ok(100_000), |number| number.parse::<u64>())?;
    let elements = VOCABULARY * HIDDEN as u64;
    let rows: Vec<f32> = (0..elements).map(|at| (drawn(at) % 2001) as f32 / 1000.0 - 1.0).collect();
    let embedding = Embedding::from_rows(HIDDEN, &rows)?;
    // Large enough for all requests.
    let memory = records * 4 * (HIDDEN + 2 * LAYERS * EXPERTS) as u64 * 2;
    let folder = std::env::temp_dir().join(format!("prediction-speed-{}", std::process::id()));
    let options = PredictorOptions {
        store: Some((folder.clone(), 2 * memory)),
        is_history_disabled: false,
        output_tokens: 16.0,
    };
    let prompts = PromptReader::for_ids(VOCABULARY as usize);
    let mut predictor =
        UsagePredictor::new(model::header(LAYERS, EXPERTS), embedding, prompts, None, options)?;
    let tenant = Tenant::named("a");
    let (mut learned, mut growing, mut after) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..records + QUERIES {
        let body = body(number);
        let begun = Instant::now();
        predictor.begin_request(RequestArrival {
            id: number,
            tenant,
            retention: Retention::Records,
            body: body.as_bytes(),
        });
        let took = begun.elapsed();
        if number >= records {
            after.push(took);
            continue;
        }
        growing.push(took);
        let told = activations(number).ok_or("activations that are too long")?;
        let begun = Instant::now();
        predictor.record_usage(number, &told)?;
        learned.push(begun.elapsed());
    }
    println!("{} requests remembered", predictor.history_size().requests);
    // The last learned requests, during two rebuilds of the tree.
    let last = learned.split_off(learned.len() / 4);
    let growing = growing.split_off(growing.len() / 4);
    let unit = at(&pass(records), 0.5);
    println!("one pass over all vectors: median {unit:.3} ms");
    for (what, mut times) in
        [("a prediction", after), ("a prediction while requests are learned", growing), ("to learn", last)]
    {
        times.sort();
        let [half, most, all] = [0.5, 0.99, 1.0].map(|part| at(&times, part));
        println!(
            "{what}: median {half:.3} ms ({:.3} of a pass), 99th percentile {most:.3} ms ({:.3}), longest {all:.1} ms ({:.2})",
            half / unit,
            most / unit,
            all / unit
        );
    }
    std::fs::remove_dir_all(folder)?;
    Ok(())
}
