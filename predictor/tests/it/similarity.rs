//! Prompt vectors: equality with the definition, weights, and errors.

use crate::support;

use proptest::collection::vec;
use proptest::prelude::*;
use remoe_predictor::{Embedding, EmbeddingType, PredictError, soft_cosine};

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

proptest! {
    #[test]
    fn one_vector_per_prompt_is_the_soft_cosine_similarity(
        hidden in 1..40_usize, seed: u64,
        one in vec(0..30_u32, 1..25), two in vec(0..30_u32, 1..25), zero in 0..30_u32,
    ) {
        let mut stream = support::NumberStream(seed);
        let mut table: Vec<f32> = (0..30 * hidden).map(|_| stream.float()).collect();
        // A zero row stays zero.
        table[zero as usize * hidden..][..hidden].fill(0.0);
        let embedding = Embedding::from_rows(hidden, &table).unwrap();
        let row = |id: &u32| &table[*id as usize * hidden..][..hidden];
        let (first, second): (Vec<_>, Vec<_>) = (one.iter().map(row).collect(), two.iter().map(row).collect());
        let expected = soft_cosine(&first, &second);
        let found = dot(&embedding.prompt_vector(&one).unwrap(), &embedding.prompt_vector(&two).unwrap());
        // Unit rows can cancel: the rest of their sum has the accuracy of float32 only.
        let left = soft_norm(&first).min(soft_norm(&second));
        if left > 1e-3 {
            prop_assert!((found - expected).abs() < 1e-5 / left.min(1.0), "{} {}", found, expected);
        }
        let own = dot(&embedding.prompt_vector(&one).unwrap(), &embedding.prompt_vector(&one).unwrap());
        prop_assert!((own - 1.0).abs() < 1e-5 || own == 0.0);
    }
}

/// Returns the length of the sum of unit rows over their number.
fn soft_norm(rows: &[&[f32]]) -> f64 {
    let hidden = rows[0].len();
    let mut sum = vec![0.0_f64; hidden];
    for row in rows {
        let norm = dot(row, row).sqrt().max(1e-30);
        sum.iter_mut().zip(*row).for_each(|(sum, value)| *sum += f64::from(*value) / norm);
    }
    sum.iter().map(|value| value * value).sum::<f64>().sqrt() / rows.len() as f64
}

#[test]
fn soft_cosine_equals_a_value_computed_by_hand() {
    // Units (1,0) and (0.6,0.8): C11 = 1, C12 = 0.6, C22 = 1; one = {a}, two = {a, b}.
    let (a, b): (&[f32], &[f32]) = (&[2.0, 0.0], &[3.0, 4.0]);
    let expected = (1.0 + 0.6) / (1.0 * (1.0_f64 + 2.0 * 0.6 + 1.0).sqrt());
    assert!((soft_cosine(&[a], &[a, b]) - expected).abs() < 1e-12);
    let embedding = Embedding::from_rows(2, &[2.0, 0.0, 3.0, 4.0]).unwrap();
    let found = dot(&embedding.prompt_vector(&[0]).unwrap(), &embedding.prompt_vector(&[0, 1]).unwrap());
    assert!((found - expected).abs() < 1e-6);
}

#[test]
fn zero_prompt_is_similar_to_nothing() {
    let embedding = Embedding::from_rows(2, &[0.0, 0.0, 1.0, 0.0]).unwrap();
    assert_eq!(embedding.prompt_vector(&[0, 0]).unwrap(), [0.0, 0.0]);
    assert_eq!(soft_cosine(&[&[0.0, 0.0]], &[&[1.0, 0.0]]), 0.0);
}

#[test]
fn embeddings_that_are_no_numbers_are_refused_by_row() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = Embedding::from_rows(2, &[1.0, 0.0, 0.0, bad]).unwrap_err();
        assert_eq!(error, PredictError::NotFinite { what: "the embedding", row: 1 });
    }
    let half = half::bf16::NAN.to_le_bytes();
    let bytes = [half, half].concat();
    assert!(Embedding::new(1, EmbeddingType::Bf16, bytes.into()).is_err());
    assert!(Embedding::from_rows(2, &[1.0]).is_err());
    assert!(Embedding::from_rows(0, &[]).is_err());
    assert!(Embedding::from_rows(4, &[]).is_err());
}

#[test]
fn prompts_that_cannot_be_are_refused() {
    let embedding = support::embedding();
    assert_eq!(embedding.prompt_vector(&[]).unwrap_err(), PredictError::EmptyPrompt);
    let error = embedding.prompt_vector(&[1, support::VOCABULARY as u32]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "invalid token id 120: the vocabulary has 120 tokens; tokenize the prompt for this model"
    );
}

#[test]
fn half_precision_tables_are_used_as_they_are() {
    let values = [1.5_f32, -2.0, 0.25, 3.0];
    let wide = Embedding::from_rows(2, &values).unwrap();
    let brain = values.map(|value| half::bf16::from_f32(value).to_le_bytes()).concat();
    let half = values.map(|value| half::f16::from_f32(value).to_le_bytes()).concat();
    for (kind, bytes) in [(EmbeddingType::Bf16, brain), (EmbeddingType::F16, half)] {
        assert_eq!(kind.floats(&bytes), values);
        let table = Embedding::new(2, kind, bytes.into()).unwrap();
        assert_eq!(table.prompt_vector(&[0, 1, 1]).unwrap(), wide.prompt_vector(&[0, 1, 1]).unwrap());
        assert!(table.bytes() < wide.bytes());
    }
}

#[test]
fn weights_take_tokens_out_and_the_common_part_off() {
    let embedding = Embedding::from_rows(2, &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]).unwrap();
    let weighted = embedding.weighted(&[1.0, 1.0, 0.0]).unwrap();
    // The centre of the two weighted tokens is (0.5, 0.5); token 2 has no weight.
    let root = 0.5_f32.sqrt();
    let vector = weighted.prompt_vector(&[0, 2, 2]).unwrap();
    assert!((vector[0] - root).abs() < 1e-6 && (vector[1] + root).abs() < 1e-6, "{vector:?}");
    assert_eq!(weighted.prompt_vector(&[2]).unwrap(), [0.0, 0.0]);
    assert!(embedding.weighted(&[1.0]).is_err());
    assert!(embedding.weighted(&[1.0, -1.0, 1.0]).is_err());
    assert!(embedding.weighted(&[1.0, f32::NAN, 1.0]).is_err());
}
