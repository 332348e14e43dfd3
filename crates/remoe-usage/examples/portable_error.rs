//! Errors of the portable predictor by dimensions of its sketch, compared with the full one.
//!
//! ```console
//! cargo run --release -p remoe-usage --example portable_error -- demo/model train.npy test-*.npy
//! ```
//!
//! Prints the mean Jensen-Shannon divergence in nats: of the prefill for each file of held-out records, and of both
//! phases over all files.

#![allow(clippy::print_stdout)]

use remoe_model::{Checkpoint, StoredDtype};
use remoe_predictor::record::{ActivationRecord, RecordHeader, RecordReader};
use remoe_predictor::{
    ByPhase, Embedding, EmbeddingType, Method, Phase, PortablePredictor, PredictError, Predictor,
    TrainedPredictor, TrainingOptions, TunedPredictor, Uniform, UsageShares, divergence,
};
use std::error::Error;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Measured dimensions.
const DIMENSIONS: [usize; 4] = [16, 32, 64, 128];

/// Held-out requests of one file.
type KindRecords = (String, Vec<ActivationRecord>);
/// Function that predicts a phase of a request from its prompt.
type Predict<'a> = &'a dyn Fn(&[u32], Phase) -> Result<UsageShares, PredictError>;

fn records(path: &str) -> Result<(RecordHeader, Vec<ActivationRecord>), Box<dyn Error>> {
    let mut reader = RecordReader::new(BufReader::new(File::open(path)?))?;
    let header = reader.header().clone();
    Ok((header, reader.by_ref().collect::<Result<_, _>>()?))
}

/// Returns the sum of the divergences in a phase and the number of requests.
fn error(
    kind: &[ActivationRecord],
    experts: usize,
    phase: Phase,
    predict: Predict<'_>,
) -> Result<(f64, f64), PredictError> {
    let (mut sum, mut count) = (0.0, 0.0);
    for record in kind {
        if let Some(counts) = record.counts(phase) {
            let truth = UsageShares::from_counts(experts, counts)?;
            sum += divergence::mean(&predict(&record.prompt, phase)?, &truth);
            count += 1.0;
        }
    }
    Ok((sum, count))
}

fn row(name: &str, kinds: &[KindRecords], experts: usize, predict: Predict<'_>) -> Result<(), PredictError> {
    let mut cells = vec![name.to_owned()];
    let mut all = ByPhase::both((0.0, 0.0));
    for (_, kind) in kinds {
        for phase in Phase::ALL {
            let (sum, count) = error(kind, experts, phase, predict)?;
            let of = all.get_mut(phase);
            *of = (of.0 + sum, of.1 + count);
            if phase == Phase::Prefill {
                cells.push(format!("{:.4}", sum / count));
            }
        }
    }
    cells.extend(Phase::ALL.map(|phase| format!("{:.4}", all.get(phase).0 / all.get(phase).1)));
    println!("| {} |", cells.join(" | "));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, train, tests @ ..] = arguments.as_slice() else {
        return Err("expected MODEL TRAIN.npy TEST.npy..".into());
    };
    let checkpoint = Checkpoint::open(Path::new(model))?;
    let tensor = checkpoint.embedding();
    let kind = match tensor.dtype {
        StoredDtype::F32 => EmbeddingType::F32,
        StoredDtype::Bf16 => EmbeddingType::Bf16,
        StoredDtype::F16 => EmbeddingType::F16,
    };
    let table = checkpoint.read(tensor)?;
    let embedding = Embedding::new(checkpoint.config().hidden_size, kind, table.into())?;
    let (header, train) = records(train)?;
    let named = tests.iter().map(|path| {
        let name = Path::new(path).file_stem().map_or(String::new(), |name| name.to_string_lossy().into());
        Ok((name, records(path)?.1))
    });
    let kinds = named.collect::<Result<Vec<KindRecords>, Box<dyn Error>>>()?;
    let (layers, experts) = (header.layers.len(), header.experts as usize);
    let names: Vec<&str> = kinds.iter().map(|(name, _)| name.as_str()).collect();
    println!("| predictor | {} | prefill | decode |", names.join(" | "));
    println!("|{}", " --- |".repeat(names.len() + 3));
    let options = TrainingOptions::default();
    for dimensions in DIMENSIONS {
        let sketch = embedding.sketched(dimensions)?;
        let pair = (&embedding, &sketch);
        let (trained, portable) =
            TrainedPredictor::fit_with_portable(header.clone(), &train, pair, options, &mut |_| ())?;
        if dimensions == DIMENSIONS[0] {
            let predict = |prompt: &[u32], phase| Ok(trained.predict_with_errors(prompt, phase)?.shares);
            row("whole", &kinds, experts, &predict)?;
            let mean = trained.method(Method::Dop);
            row("mean of the history", &kinds, experts, &|prompt, phase| mean.predict(prompt, phase))?;
        }
        let bytes = portable.to_bytes()?.len();
        let predict = |prompt: &[u32], phase| Ok(portable.predict_with_errors(prompt, phase)?.shares);
        row(&format!("sketch {dimensions} ({bytes} bytes)"), &kinds, experts, &predict)?;
        if dimensions == 64 {
            let old = PortablePredictor::from_trained(&trained, &embedding, &sketch)?;
            let predict = |prompt: &[u32], phase| Ok(old.predict_with_errors(prompt, phase)?.shares);
            row("sketch 64, converted", &kinds, experts, &predict)?;
        }
    }
    let uniform = Uniform::new(layers, experts);
    row("uniform", &kinds, experts, &|prompt, phase| uniform.predict(prompt, phase))?;
    Ok(())
}
