//! Accuracy of predicting a later layer's experts from those of an earlier one.
//!
//! ```console
//! remoe record --model demo/model --prompts train.jsonl --out train.npy --max-tokens 1 --tokens
//! cargo run --release -p predictor --example layer_affinity -- train.npy test.npy
//! ```
//!
//! Both files have the experts of every token. The popularity baseline always predicts the most used experts.

#![allow(clippy::print_stdout)]

use remoe_predictor::layerwise::{Affinity, HitRates, TokenRoutes};
use remoe_predictor::record::{ActivationRecord, RecordHeader, RecordReader};
use std::error::Error;
use std::fs::File;
use std::io::BufReader;

fn read(path: &str) -> Result<(RecordHeader, Vec<ActivationRecord>), Box<dyn Error>> {
    let mut reader = RecordReader::new(BufReader::new(File::open(path)?))?;
    let records = reader.by_ref().collect::<Result<Vec<_>, _>>()?;
    Ok((reader.header().clone(), records))
}

/// Returns the `count` most popular experts, ascending.
fn most_popular(popularity: &[f32], count: usize) -> Vec<u16> {
    let mut order: Vec<u16> = (0..).take(popularity.len()).collect();
    order.sort_by(|&a, &b| popularity[usize::from(b)].total_cmp(&popularity[usize::from(a)]));
    order.truncate(count);
    order.sort_unstable();
    order
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [train, test] = &arguments[..] else {
        return Err("name two record files: train.npy test.npy".into());
    };
    let ((header, train), (test_header, test)) = (read(train)?, read(test)?);
    header.require_same(&test_header)?;
    let top_k = header.top_k as usize;
    println!("distance  layer  affinity: mean  all    any    popularity: mean");
    for distance in 1..header.layers.len().min(4) {
        let affinity = Affinity::fit(&header, &train, distance)?;
        for layer in 0..header.layers.len() - distance {
            let popular = most_popular(affinity.popularity(layer + distance), top_k);
            let (mut foreseen, mut always, mut actual) = (Vec::new(), Vec::new(), Vec::new());
            for record in &test {
                let routes = TokenRoutes::from_record(&header, record)?;
                foreseen.extend(affinity.predict(layer, routes.layer(layer)));
                always.extend(routes.tokens(layer).flat_map(|_| popular.iter().copied()));
                actual.extend_from_slice(routes.layer(layer + distance));
            }
            let rates = HitRates::measure(&foreseen, &actual, top_k)?;
            let baseline = HitRates::measure(&always, &actual, top_k)?;
            println!(
                "{distance:>8}  {:>5}  {:>14.3}  {:.3}  {:.3}  {:>16.3}",
                header.layers[layer + distance],
                rates.mean,
                rates.all,
                rates.any,
                baseline.mean
            );
        }
    }
    Ok(())
}
