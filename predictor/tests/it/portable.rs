//! Portable predictor: bounded, over a sketch, and nearly as accurate.

use crate::support;

use bytes::Bytes;
use proptest::prelude::*;
use remoe_predictor::record::{ActivationRecord, RecordHeader};
use remoe_predictor::{
    Embedding, MAX_PORTABLE_BYTES, MAX_SKETCH_BYTES, Phase, PortablePredictor, PredictError, Predictor,
    TrainedPredictor, TrainingOptions, TreeOptions, TunedPredictor, Uniform, UsageShares, divergence,
    sketch_dimensions,
};
use support::{EXPERTS, HIDDEN, LAYERS, NumberStream, VOCABULARY};

const DIMENSIONS: usize = 16;

fn options() -> TrainingOptions {
    TrainingOptions { alpha: 5, tree: TreeOptions { beta: 12, ..TreeOptions::default() } }
}

fn fitted(records: &[ActivationRecord]) -> (Embedding, Embedding, TrainedPredictor, PortablePredictor) {
    let embedding = support::embedding();
    let sketch = embedding.sketched(DIMENSIONS).unwrap();
    let pair = (&embedding, &sketch);
    let (trained, portable) =
        TrainedPredictor::fit_with_portable(support::header(), records, pair, options(), &mut |_| ())
            .unwrap();
    (embedding, sketch, trained, portable)
}

/// Returns the mean divergence of a phase over held-out records.
fn error(predictor: &dyn TunedPredictor, phase: Phase) -> f64 {
    mean(phase, |prompt| predictor.predict_with_errors(prompt, phase).unwrap().shares)
}

fn mean(phase: Phase, predict: impl Fn(&[u32]) -> UsageShares) -> f64 {
    let records = support::decoded(200, 99);
    let of = |record: &ActivationRecord| {
        let truth = UsageShares::from_counts(EXPERTS, record.counts(phase)?).unwrap();
        Some(divergence::mean(&predict(&record.prompt), &truth))
    };
    let errors: Vec<f64> = records.iter().filter_map(of).collect();
    errors.iter().sum::<f64>() / errors.len() as f64
}

#[test]
fn portable_over_a_sketch_is_nearly_as_good() {
    let (embedding, sketch, trained, portable) = fitted(&support::decoded(600, 1));
    let old = PortablePredictor::from_trained(&trained, &embedding, &sketch).unwrap();
    let uniform = Uniform::new(LAYERS, EXPERTS);
    for phase in Phase::ALL {
        let uniform = mean(phase, |prompt| uniform.predict(prompt, phase).unwrap());
        let [whole, portable, old] =
            [&trained as &dyn TunedPredictor, &portable, &old].map(|one| error(one, phase));
        assert!(portable < 1.15 * whole && old < 1.2 * whole, "{phase:?}: {portable} {old} {whole}");
        assert!(portable < 0.5 * uniform, "{phase:?}: {portable} {uniform}");
    }
}

#[test]
fn whole_predictor_is_the_same_with_a_portable_one() {
    let records = support::decoded(300, 1);
    let (embedding, _, trained, _) = fitted(&records);
    let alone = TrainedPredictor::fit(support::header(), &records, &embedding, options()).unwrap();
    assert_eq!(trained.to_bytes().unwrap(), alone.to_bytes().unwrap());
}

#[test]
fn saved_portable_predicts_the_same_bits() {
    for records in [1, 30, 300] {
        let (_, sketch, _, portable) = fitted(&support::decoded(records, 1));
        let bytes = Bytes::from(portable.to_bytes().unwrap());
        assert_eq!(PortablePredictor::dimensions(&bytes).unwrap(), DIMENSIONS);
        let read = PortablePredictor::from_bytes(&bytes, &support::header().model, &sketch).unwrap();
        assert_eq!(read.header(), portable.header());
        for record in support::records(20, 5) {
            for phase in Phase::ALL {
                let [one, other] = [&portable, &read].map(|one| one.parts(&record.prompt, phase).unwrap());
                assert_eq!(one, other);
                let [one, other] =
                    [&portable, &read].map(|one| one.predict_with_errors(&record.prompt, phase).unwrap());
                assert_eq!((one.shares, one.disagreement), (other.shares, other.disagreement));
                let means = [one.errors, other.errors].map(|errors| errors.map(|bars| bars.js_mean));
                assert_eq!(means[0], means[1]);
            }
        }
    }
}

#[test]
fn portable_of_something_else_is_refused() {
    let (embedding, sketch, trained, portable) = fitted(&support::records(30, 1));
    let bytes = Bytes::from(portable.to_bytes().unwrap());
    let model = support::header().model;
    let refused = |bytes: &Bytes, model: &str, sketch: &Embedding| {
        PortablePredictor::from_bytes(bytes, model, sketch).unwrap_err().to_string()
    };
    assert!(refused(&bytes, "cd", &sketch).contains("another model"));
    assert!(refused(&bytes, &model, &embedding).contains("row of the sketch"));
    let fewer = Embedding::from_rows(DIMENSIONS, &[1.0; DIMENSIONS * 7]).unwrap();
    assert!(refused(&bytes, &model, &fewer).contains("tokens.steps"));
    let whole = Bytes::from(trained.to_bytes().unwrap());
    assert!(matches!(PortablePredictor::from_bytes(&whole, &model, &sketch), Err(PredictError::Saved(_))));
    assert!(matches!(TrainedPredictor::from_bytes(&bytes, &model, &embedding), Err(PredictError::Saved(_))));
    for end in [0, 7, 100, bytes.len() - 1] {
        assert!(PortablePredictor::from_bytes(&bytes.slice(..end), &model, &sketch).is_err(), "{end}");
    }
}

#[test]
fn portable_prompts_beyond_the_vocabulary_are_refused() {
    let (.., portable) = fitted(&support::records(30, 1));
    let refused = |prompt: &[u32]| portable.parts(prompt, Phase::Prefill).unwrap_err();
    assert_eq!(refused(&[]), PredictError::EmptyPrompt);
    assert!(matches!(refused(&[VOCABULARY as u32]), PredictError::Token { .. }));
}

/// The sizes hold by construction: every part is cut to its budget.
#[test]
fn portable_of_150000_tokens_stays_within_its_bound() {
    const TOKENS: usize = 150_000;
    let (layers, experts) = (12, 64);
    let rows: Vec<f32> = (0..TOKENS * HIDDEN).map(|at| (at * 7919 % 1013) as f32 - 506.0).collect();
    let embedding = Embedding::from_rows(HIDDEN, &rows).unwrap();
    let sketch = embedding.sketched(sketch_dimensions(TOKENS, 64).unwrap()).unwrap();
    let mut stream = NumberStream(1);
    let record = |_| ActivationRecord {
        prompt: (0..20).map(|_| stream.below(TOKENS) as u32).collect(),
        prefill: (0..layers * experts).map(|_| stream.below(9) as u32).collect(),
        decode: (0..layers * experts).map(|_| stream.below(9) as u32).collect(),
        steps: 10,
        experts: None,
    };
    let records: Vec<ActivationRecord> = (0..150).map(record).collect();
    let header = RecordHeader { layers: (0..12).collect(), experts: 64, ..support::header() };
    let pair = (&embedding, &sketch);
    let (_, portable) =
        TrainedPredictor::fit_with_portable(header, &records, pair, options(), &mut |_| ()).unwrap();
    let bytes = portable.to_bytes().unwrap().len();
    assert!(bytes <= MAX_PORTABLE_BYTES && portable.bytes() <= MAX_PORTABLE_BYTES as u64, "{bytes}");
    // Each token takes a byte per direction and its step.
    let of_tokens = TOKENS * 100..TOKENS * 126 + (2 << 20);
    assert!(of_tokens.contains(&bytes), "{bytes}");
    assert!(sketch.bytes() <= (MAX_SKETCH_BYTES + 4 * TOKENS) as u64);
}

proptest! {
    /// A sketch is within its limit or refused, for any vocabulary and dimensions.
    #[test]
    fn sketches_of_any_vocabulary_are_bounded(vocabulary in 1_usize..4_000_000, wanted in 0_usize..10_000) {
        match sketch_dimensions(vocabulary, wanted) {
            Ok(dimensions) => {
                prop_assert!(dimensions >= 16 && vocabulary * dimensions * 2 <= MAX_SKETCH_BYTES);
            }
            Err(error) => prop_assert!(vocabulary * 16 * 2 > MAX_SKETCH_BYTES, "{}", error),
        }
    }
}
