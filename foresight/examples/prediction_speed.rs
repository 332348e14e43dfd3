//! What a prediction takes with many requests remembered, as a gateway makes it: from a request's body to what it will use.
//!
//! ```console
//! cargo run --release -p remoe-foresight --example prediction_speed
//! cargo run --release -p remoe-foresight --example prediction_speed -- 100000
//! ```
//!
//! One tenant's requests to a model of the demo model's shape: prompts of 100 ids of some topic, each of which has a twentieth of the
//! vocabulary. Nothing is tokenised; what is learned is stored in a folder for temporary files, which goes.

#![allow(clippy::print_stdout)]

use remoe_foresight::{Arrival, Foresight, ForesightOptions, Keeps, Prompts, Tenant};
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{Activations, Embedding, Phase};
use std::error::Error;
use std::time::Instant;

const LAYERS: usize = 6;
const EXPERTS: usize = 16;
const HIDDEN: usize = 128;
const VOCABULARY: u64 = 4096;
const TOPICS: u64 = 20;
const QUERIES: u64 = 1000;

/// Some 64 bits, the same on every machine.
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

fn main() -> Result<(), Box<dyn Error>> {
    let records = std::env::args().nth(1).map_or(Ok(100_000), |number| number.parse::<u64>())?;
    let header = RecordHeader {
        model: "ab".repeat(32),
        layers: (0..LAYERS as u32).collect(),
        experts: EXPERTS as u32,
        top_k: 2,
        dtype: "float32".to_owned(),
        tokens: false,
    };
    let elements = VOCABULARY * HIDDEN as u64;
    let rows: Vec<f32> = (0..elements).map(|at| (drawn(at) % 2001) as f32 / 1000.0 - 1.0).collect();
    let embedding = Embedding::from_rows(HIDDEN, &rows)?;
    // Room for all of them.
    let memory = records * 4 * (HIDDEN + 2 * LAYERS * EXPERTS) as u64 * 2;
    let folder = std::env::temp_dir().join(format!("prediction-speed-{}", std::process::id()));
    let options =
        ForesightOptions { store: Some((folder.clone(), 2 * memory)), forgets: false, output_tokens: 16.0 };
    let mut foresight =
        Foresight::new(header, embedding, Prompts::of_ids(VOCABULARY as usize), None, options)?;
    let tenant = Tenant::named("a");
    let mut learned = Vec::with_capacity(usize::try_from(records)?);
    for number in 0..records {
        let body = body(number);
        foresight.came(Arrival { id: number, tenant, keeps: Keeps::Records, body: body.as_bytes() });
        let told = activations(number).ok_or("activations that are too long")?;
        let begun = Instant::now();
        foresight.told(number, &told)?;
        learned.push(begun.elapsed());
    }
    let mut took: Vec<_> = (records..records + QUERIES)
        .map(|id| {
            let body = body(id);
            let begun = Instant::now();
            foresight.came(Arrival { id, tenant, keeps: Keeps::Records, body: body.as_bytes() });
            begun.elapsed()
        })
        .collect();
    took.sort();
    learned.sort();
    let at = |times: &[std::time::Duration], part: f64| {
        let index = ((times.len().saturating_sub(1)) as f64 * part).round() as usize;
        times.get(index).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
    };
    println!("{} requests remembered", foresight.remembered().0);
    for (what, times) in [("a prediction", &took), ("to learn", &learned)] {
        let [half, most, all] = [0.5, 0.99, 1.0].map(|part| at(times, part));
        println!("{what}: median {half:.3} ms, 99th percentile {most:.3} ms, longest {all:.1} ms");
    }
    std::fs::remove_dir_all(folder)?;
    Ok(())
}
