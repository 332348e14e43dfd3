//! Target: saved predictors, both complete ones with the search tree and portable ones.
//!
//! Input: the bytes of a predictor file for a small model.

use crate::{check_error, memory};
use bytes::Bytes;
use remoe_predictor::record::{ActivationRecord, RecordHeader};
use remoe_predictor::{
    ByPhase, Embedding, Method, Phase, PortablePredictor, Predictor, TrainedPredictor, TrainingOptions,
    TreeOptions, TunedPredictor, UsageShares,
};
use std::sync::LazyLock;

const VOCABULARY: u32 = 12;
const HIDDEN: usize = 4;
const LAYERS: u32 = 2;
const EXPERTS: u32 = 3;
const MODEL: &str = "abcd";
/// Fixed part of the memory limit: a prediction, and the parser's first buffers.
const BASE_BYTES: usize = 1 << 20;
/// Memory limit per byte: short JSON values and tensors become entries of maps and lists that double.
const BYTES_PER_INPUT_BYTE: usize = 256;

static EMBEDDING: LazyLock<Embedding> = LazyLock::new(|| {
    let rows: Vec<f32> = (0..VOCABULARY as usize * HIDDEN).map(|n| (n * n % 17) as f32 - 8.0).collect();
    Embedding::from_rows(HIDDEN, &rows).expect("all rows are finite")
});

pub fn run(data: &[u8]) {
    LazyLock::force(&EMBEDDING);
    // The copy may be unaligned, in which case the parser copies the rows.
    let file = Bytes::copy_from_slice(data);
    memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || load(&file));
}

fn load(file: &Bytes) {
    match PortablePredictor::from_bytes(file, MODEL, &EMBEDDING) {
        Ok(portable) => return check_portable(&portable),
        Err(error) => check_error(&error.to_string()),
    }
    let mut trained = match TrainedPredictor::from_bytes(file, MODEL, &EMBEDDING) {
        Ok(trained) => trained,
        Err(error) => return check_error(&error.to_string()),
    };
    check_predictions(&trained);
    let saved = trained.to_bytes().expect("what was loaded can be saved");
    let again =
        TrainedPredictor::from_bytes(&saved.into(), MODEL, &EMBEDDING).expect("what was saved can be loaded");
    assert_eq!(again.sps().history().len(), trained.sps().history().len());
    // A loaded predictor continues to learn, and evicts records above its capacity.
    let capacity = trained.sps().history().len();
    for n in 0..3 {
        trained.learn(&record(n), capacity, 0.5).expect("the record is of this model");
        assert!(trained.sps().history().len() <= capacity);
    }
    check_predictions(&trained);
}

fn check_portable(portable: &PortablePredictor) {
    for prompt in [&[0_u32][..], &[3, 1, 4, 1, 5, 9]] {
        for phase in Phase::ALL {
            let prediction = portable.predict_with_errors(prompt, phase);
            let parts = portable.parts(prompt, phase).expect("the prompt is of this model");
            let shares = prediction.map(|prediction| prediction.shares);
            shares.as_ref().map_or_else(|error| check_error(&error.to_string()), check_shares);
            parts.iter().for_each(check_shares);
        }
    }
    portable.to_bytes().expect("what was loaded can be saved");
}

fn check_shares(shares: &UsageShares) {
    for row in shares.rows() {
        assert!(row.iter().all(|share| (0.0..=1.0).contains(share)), "{row:?}");
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-3, "{row:?}");
    }
}

fn check_predictions(trained: &TrainedPredictor) {
    for prompt in [&[0_u32][..], &[3, 1, 4, 1, 5, 9]] {
        for method in Method::ALL {
            for phase in Phase::ALL {
                match trained.method(method).predict(prompt, phase) {
                    Ok(shares) => check_shares(&shares),
                    Err(error) => check_error(&error.to_string()),
                }
            }
        }
        for phase in Phase::ALL {
            let prediction = trained.predict_with_errors(prompt, phase);
            prediction.map_or_else(|error| check_error(&error.to_string()), drop);
            assert!(trained.part_weights(phase).iter().all(|(_, weight)| weight.is_finite()));
        }
        let tokens = ByPhase { prefill: prompt.len() as f64, decode: 7.0 };
        for prompt in [Some(prompt), None] {
            let expectation = trained.expectation(prompt, tokens);
            expectation.map_or_else(|error| check_error(&error.to_string()), drop);
        }
        let neighbours = trained.sps().neighbours(prompt).expect("the prompt is of this model");
        assert!(neighbours.len() <= trained.sps().alpha());
    }
}

fn record(n: u32) -> ActivationRecord {
    let cells = LAYERS * EXPERTS;
    ActivationRecord {
        prompt: (0..=n % 5).map(|t| (n * 7 + t * 5) % VOCABULARY).collect(),
        prefill: (0..cells).map(|cell| (n + cell * cell) % 4).collect(),
        decode: (0..cells).map(|cell| (n * cell + 1) % 3).collect(),
        // Some records end before their first decode step.
        steps: n % 3,
        ..ActivationRecord::default()
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let header = RecordHeader {
        model: MODEL.to_owned(),
        layers: (0..LAYERS).collect(),
        experts: EXPERTS,
        top_k: 1,
        dtype: "float32".to_owned(),
        tokens: false,
    };
    let tree = |breadth, rerank| TreeOptions { beta: 4, breadth, rerank, forks: 2, seed: 0 };
    let seed = |records: u32, tree| {
        let records: Vec<ActivationRecord> = (0..records).map(record).collect();
        let options = TrainingOptions { alpha: 2, tree };
        let trained =
            TrainedPredictor::fit(header.clone(), &records, &EMBEDDING, options).expect("a history");
        trained.to_bytes().expect("a trained predictor can be saved")
    };
    let portable = |records: u32| {
        let trained = seed(records, tree(0, 0)).into();
        let trained = TrainedPredictor::from_bytes(&trained, MODEL, &EMBEDDING).expect("it was saved");
        // Any embedding with the same tokens can serve as the sketch.
        let portable =
            PortablePredictor::from_trained(&trained, &EMBEDDING, &EMBEDDING).expect("the same tokens");
        portable.to_bytes().expect("a portable predictor can be saved")
    };
    let whole = [seed(1, tree(0, 0)), seed(9, tree(0, 0)), seed(9, tree(8, 3)), seed(24, tree(12, 4))];
    whole.into_iter().chain([portable(1), portable(24)]).collect()
}
