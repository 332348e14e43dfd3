//! Speed of building and searching a tree, compared with a linear search, on synthetic clustered vectors.
//!
//! ```console
//! cargo run --release -p predictor --example search_speed
//! cargo run --release -p predictor --example search_speed -- 500000 512
//! ```
//!
//! Without arguments: 5,000 prompts of 2,048 elements and 500,000 of 512. Each vector is the sum of a common part, a
//! position near one of 100 topics in 96 dimensions, and noise. So similarities lie near 1 and neighbourhoods
//! overlap, as for real prompts. Both searches are timed on one thread.

#![allow(clippy::print_stdout)]

use bytes::Bytes;
use rayon::prelude::*;
use remoe_predictor::record::{ActivationRecord, RecordHeader};
use remoe_predictor::{
    Clustering, Embedding, History, Neighbour, PredictError, TrainedPredictor, TrainingOptions, Tree,
    TreeOptions, exhaustive_search, quantile,
};
use std::time::Instant;

const TOPICS: u64 = 100;
/// Intrinsic dimensions of prompts, more than a sketch has.
const LATENT: u64 = 96;
const QUERIES: usize = 200;
const ALPHA: usize = 15;
/// Layers and experts of the shares: 26 layers of 64 experts, as in DeepSeek-V2-Lite; one layer at 500,000 prompts,
/// to leave memory for vectors.
const LAYERS: usize = 26;
const EXPERTS: usize = 64;

/// Returns an approximately normal number from a counter, the same on every machine.
fn noise(counter: u64) -> f32 {
    let mut state = counter.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    let mut sum = -2.0;
    for _ in 0..4 {
        state ^= state >> 29;
        state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        sum += (state >> 40) as f32 / (1_u64 << 24) as f32;
    }
    sum * 1.7
}

/// Returns the vector of prompt `index`: a common part, a position near its topic in few dimensions, and noise.
fn vector(index: u64, hidden: usize) -> Vec<f32> {
    let topic = (1 << 50) + (index.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % TOPICS * LATENT;
    let place: Vec<f32> =
        (0..LATENT).map(|d| noise(topic + d) + 0.5 * noise((1 << 51) + index * LATENT + d)).collect();
    let element = |h: u64| {
        let directions =
            place.iter().zip(0..).map(|(place, d): (&f32, u64)| place * noise((d + 1) << 30 | h));
        6.0 * noise(h) + directions.sum::<f32>() + 0.3 * noise((1 << 52) + index * hidden as u64 + h)
    };
    (0..hidden as u64).map(element).collect()
}

fn milliseconds(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}

/// Returns the median time of `search` in microseconds, and its results.
fn timed(queries: &[Vec<f32>], search: impl Fn(&[f32]) -> Vec<Neighbour>) -> (f64, Vec<Vec<Neighbour>>) {
    queries.iter().take(20).for_each(|query| drop(search(query)));
    let mut times = Vec::new();
    let found = queries
        .iter()
        .map(|query| {
            let started = Instant::now();
            let found = search(query);
            times.push(milliseconds(started) * 1e3);
            found
        })
        .collect();
    (quantile(&mut times, 0.5), found)
}

fn measure(prompts: usize, hidden: usize, layers: usize) -> Result<(), PredictError> {
    println!("\n{prompts} prompts of {hidden} elements");
    let vectors: Vec<f32> =
        (0..prompts as u64).into_par_iter().flat_map_iter(|n| vector(n, hidden)).collect();
    let shares = vec![1.0 / EXPERTS as f32; prompts * layers * EXPERTS];
    let tokens = (0..prompts).map(|_| Box::from([0])).collect();
    let history = History::from_vectors(layers, EXPERTS, vectors, shares, tokens)?;
    let mut built = Vec::new();
    let mut tree = None;
    let mut history = history;
    for _ in 0..if prompts > 50_000 { 1 } else { 5 } {
        let started = Instant::now();
        tree = Some(Tree::build(&history, Clustering::Centred, TreeOptions::default(), ALPHA)?);
        built.push(milliseconds(started));
    }
    let Some(mut tree) = tree else { return Ok(()) };
    history = tree.arrange(&history)?;
    println!("  build      {:.0} ms (fastest {:.0})", quantile(&mut built, 0.5), quantile(&mut built, 0.0));
    let queries: Vec<Vec<f32>> = (0..QUERIES as u64)
        .map(|n| {
            let mut query = vector((1 << 30) + n, hidden);
            let norm = query.iter().map(|value| value * value).sum::<f32>().sqrt();
            query.iter_mut().for_each(|value| *value /= norm);
            query
        })
        .collect();
    let (of_tree, found) = timed(&queries, |query| tree.search(&history, query, ALPHA));
    let (of_all, truth) = timed(&queries, |query| exhaustive_search(&history, query, ALPHA));
    let hits = found.iter().zip(&truth).map(|(found, truth)| {
        truth.iter().filter(|one| found.iter().any(|other| other.slot == one.slot)).count()
    });
    let recall = hits.sum::<usize>() as f64 / (QUERIES * ALPHA) as f64;
    println!("  tree       {of_tree:.1} us a search");
    println!("  all        {of_all:.1} us a search, {:.0} times the tree's", of_all / of_tree);
    println!("  recall     {recall:.2} of the {ALPHA} most similar");
    let bytes = (history.bytes() + tree.bytes()) / prompts as u64;
    println!(
        "  memory     {bytes} bytes a prompt: {} of vector, {} of shares",
        hidden * 4,
        layers * EXPERTS * 4
    );
    Ok(())
}

/// Measures the time to load a saved predictor.
fn measure_loading(prompts: usize, hidden: usize) -> Result<(), PredictError> {
    let rows: Vec<f32> = (0..1000 * hidden as u64).map(noise).collect();
    let embedding = Embedding::from_rows(hidden, &rows)?;
    let header = RecordHeader {
        model: "00".to_owned(),
        layers: (0..8).collect(),
        experts: 16,
        top_k: 1,
        dtype: "float32".to_owned(),
        tokens: false,
    };
    let record = |n: u64| ActivationRecord {
        prompt: (0..20).map(|t| (noise(n * 20 + t).to_bits() >> 3) % 1000).collect(),
        prefill: (0..128).map(|cell| (noise(n * 128 + cell).to_bits() >> 4) % 50).collect(),
        ..ActivationRecord::default()
    };
    let records: Vec<ActivationRecord> = (0..prompts as u64).map(record).collect();
    let trained = TrainedPredictor::fit(header, &records, &embedding, TrainingOptions::default())?;
    let saved = trained.to_bytes()?;
    let path = std::env::temp_dir().join(format!("search_speed-{}", std::process::id()));
    let io = |error: std::io::Error| PredictError::Saved(error.to_string());
    std::fs::write(&path, &saved).map_err(io)?;
    let started = Instant::now();
    let bytes = Bytes::from(std::fs::read(&path).map_err(io)?);
    let read = milliseconds(started);
    let loaded = TrainedPredictor::from_bytes(&bytes, "00", &embedding)?;
    let usable = milliseconds(started);
    std::fs::remove_file(&path).map_err(io)?;
    println!(
        "\nA saved predictor of {} prompts, {:.1} MB: {read:.1} ms to read, usable after {usable:.1} ms",
        loaded.sps().history().len(),
        saved.len() as f64 / 1e6
    );
    Ok(())
}

fn main() -> Result<(), PredictError> {
    let arguments: Vec<usize> =
        std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    if let [prompts, hidden] = arguments[..] {
        return measure(prompts, hidden, 1);
    }
    println!("{} threads build", rayon::current_num_threads());
    measure(5_000, 2048, LAYERS)?;
    measure(500_000, 512, 1)?;
    measure_loading(5_000, 2048)
}
