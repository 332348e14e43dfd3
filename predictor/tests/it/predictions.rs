//! Properties of all predictors for any history.

use crate::support;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use remoe_predictor::record::ActivationRecord;
use remoe_predictor::{
    ByPhase, Clustering, Embedding, ErrorBars, Fate, GateWeights, History, Method, Mixture, Phase,
    Popularity, PredictError, Predictor, PromptIndex, SimilarPrompts, TokenTable, TrainedPredictor,
    TrainingOptions, Tree, TreeOptions, Uniform, UsageShares, divergence, informed_sps,
};
use std::sync::Arc;
use support::{EXPERTS, HIDDEN, LAYERS, NumberStream, VOCABULARY};

fn history(records: &[ActivationRecord]) -> Arc<History> {
    Arc::new(History::from_records(&support::embedding(), LAYERS, EXPERTS, records).unwrap())
}

/// Phase of tests that do not depend on the phase.
const PHASE: Phase = Phase::Prefill;
const TREE: TreeOptions = TreeOptions { beta: 12, breadth: 0, rerank: 0, forks: 4, seed: 1 };

fn similar(records: &[ActivationRecord], clustering: Clustering) -> SimilarPrompts {
    let name = match clustering {
        Clustering::Centred => "sps",
        Clustering::Similarity => "sps-plain",
        Clustering::Pam => "var-pam",
        Clustering::Activations => "var-ed",
    };
    SimilarPrompts::with_tree(name, support::embedding(), &history(records), clustering, TREE, 5).unwrap()
}

fn exhaustive_search(records: &[ActivationRecord], alpha: usize) -> SimilarPrompts {
    SimilarPrompts::new("bf", support::embedding(), history(records), PromptIndex::Exhaustive, alpha).unwrap()
}

fn fate() -> Fate {
    let mut stream = NumberStream(3);
    let layer = |_| GateWeights {
        norm: (0..HIDDEN).map(|_| 1.0 + 0.1 * stream.float()).collect(),
        gate: (0..EXPERTS * HIDDEN).map(|_| stream.float()).collect(),
    };
    Fate::new(support::embedding(), (0..LAYERS).map(layer).collect(), EXPERTS, 2, 1e-6).unwrap()
}

/// Creates all predictors from one history.
fn all(records: &[ActivationRecord]) -> Vec<Box<dyn Predictor>> {
    let (embedding, past) = (support::embedding(), history(records));
    let popularity = Popularity::from_history(&past).unwrap();
    let table = TokenTable::fit(&embedding, &past, PHASE, 10).unwrap();
    let options = TrainingOptions { alpha: 5, tree: TREE };
    let informed = informed_sps(&embedding, &table, &popularity, records, options).unwrap();
    vec![
        Box::new(similar(records, Clustering::Centred)),
        Box::new(similar(records, Clustering::Similarity)),
        Box::new(similar(records, Clustering::Pam)),
        Box::new(similar(records, Clustering::Activations)),
        Box::new(exhaustive_search(records, 5)),
        Box::new(informed),
        Box::new(popularity),
        Box::new(Uniform::new(LAYERS, EXPERTS)),
        Box::new(fate()),
        Box::new(ByPhase::both(table)),
    ]
}

fn assert_distribution(name: &str, shares: &UsageShares) {
    assert_eq!((shares.layers(), shares.experts()), (LAYERS, EXPERTS), "{name}");
    for row in shares.rows() {
        assert!(row.iter().all(|share| (0.0..=1.0).contains(share)), "{name}: {row:?}");
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{name}: {row:?}");
    }
}

fn permuted(record: &ActivationRecord, order: &[usize]) -> ActivationRecord {
    let rows = record.prefill.chunks(EXPERTS);
    let prefill = rows.flat_map(|row| order.iter().map(|&expert| row[expert]).collect::<Vec<_>>()).collect();
    ActivationRecord { prefill, ..record.clone() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn predictions_are_distributions(
        count in select(vec![1_usize, 2, 5, 40, 90]), seed: u64,
        prompt in vec(0..VOCABULARY as u32, 1..60),
    ) {
        for predictor in all(&support::records(count, seed)) {
            assert_distribution(predictor.name(), &predictor.predict(&prompt, Phase::Prefill).unwrap());
        }
    }

    #[test]
    fn permuting_experts_permutes_the_prediction(
        seed: u64, order in Just((0..EXPERTS).collect::<Vec<_>>()).prop_shuffle(),
        prompt in vec(0..VOCABULARY as u32, 1..40),
    ) {
        let records = support::records(70, seed);
        let moved: Vec<_> = records.iter().map(|record| permuted(record, &order)).collect();
        // Fate keeps the expert ids of its gates. Two other methods sum over experts before they choose neighbours:
        // another order may change the last bit and thus a near-tie.
        let moves = |name| !matches!(name, "fate" | "var-ed" | "sps-informed");
        let pairs = all(&records).into_iter().zip(all(&moved)).filter(|(one, _)| moves(one.name()));
        for (before, after) in pairs {
            let (before, after) = (before.predict(&prompt, PHASE).unwrap(), after.predict(&prompt, PHASE).unwrap());
            for (before, after) in before.rows().zip(after.rows()) {
                for (place, &expert) in order.iter().enumerate() {
                    prop_assert!((after[place] - before[expert]).abs() < 2e-4);
                }
            }
        }
    }
}

#[test]
fn prediction_is_deterministic_for_any_number_of_threads() {
    let records = support::records(200, 5);
    let options = TrainingOptions { alpha: 5, tree: TREE };
    let fit = || TrainedPredictor::fit(support::header(), &records, &support::embedding(), options).unwrap();
    let single = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let several = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    assert_eq!(single.install(|| fit().to_bytes().unwrap()), several.install(|| fit().to_bytes().unwrap()));
}

#[test]
fn empty_prompts_and_unknown_tokens_are_errors_everywhere() {
    for predictor in all(&support::records(20, 1)) {
        assert_eq!(
            predictor.predict(&[], PHASE).unwrap_err(),
            PredictError::EmptyPrompt,
            "{}",
            predictor.name()
        );
    }
    for predictor in [&similar(&support::records(20, 1), Clustering::Similarity) as &dyn Predictor, &fate()] {
        assert!(matches!(predictor.predict(&[500], PHASE), Err(PredictError::Token { id: 500, .. })));
    }
    assert!(
        History::from_records(&support::embedding(), LAYERS, EXPERTS, &[ActivationRecord::default()])
            .is_err()
    );
}

#[test]
fn history_of_one_prompt_predicts_its_shares() {
    let records = support::records(1, 9);
    let truth = UsageShares::from_counts(EXPERTS, &records[0].prefill).unwrap();
    for predictor in all(&records) {
        let shares = predictor.predict(&[3, 5], PHASE).unwrap();
        if !matches!(predictor.name(), "fate" | "ef") {
            assert!(divergence::mean(&shares, &truth) < 1e-6, "{}", predictor.name());
        }
    }
    let options = TrainingOptions::default();
    let trained = TrainedPredictor::fit(support::header(), &records, &support::embedding(), options).unwrap();
    assert_eq!(trained.predict_with_errors(&[3], PHASE).unwrap().errors, None);
}

#[test]
fn identical_prompts_terminate_and_agree() {
    let one = support::records(1, 4).remove(0);
    let records = vec![one.clone(); 500];
    for clustering in [Clustering::Centred, Clustering::Similarity, Clustering::Pam, Clustering::Activations]
    {
        let tree = Tree::build(&history(&records), clustering, TREE, 5).unwrap();
        assert!(tree.leaf_sizes().iter().all(|size| *size <= TREE.beta));
        assert_eq!(tree.leaf_sizes().iter().sum::<usize>(), 500);
    }
    let truth = UsageShares::from_counts(EXPERTS, &one.prefill).unwrap();
    for predictor in all(&records) {
        if !matches!(predictor.name(), "fate" | "ef") {
            let shares = predictor.predict(&one.prompt, PHASE).unwrap();
            assert!(divergence::mean(&shares, &truth) < 1e-5, "{}", predictor.name());
        }
    }
}

#[test]
fn alpha_beyond_the_history_takes_all_prompts() {
    let records = support::records(30, 8);
    let options = TreeOptions { beta: 101, breadth: 0, rerank: 0, forks: 4, seed: 0 };
    let few = SimilarPrompts::with_tree(
        "sps",
        support::embedding(),
        &history(&records),
        Clustering::Similarity,
        options,
        100,
    );
    assert_eq!(few.unwrap().neighbours(&[1, 2, 3]).unwrap().len(), 30);
    // The same across leaves.
    let (all, some) = (exhaustive_search(&records, 29), similar(&records, Clustering::Similarity));
    assert_eq!(some.neighbours(&[1]).unwrap().len(), 5);
    assert_eq!(all.neighbours(&[1]).unwrap().len(), 29);
    let beta = TreeOptions { beta: 15, ..TREE };
    for (alpha, options) in [(15, beta), (0, TREE), (5, TreeOptions { forks: 1, ..TREE })] {
        let refused = Tree::build(&history(&records), Clustering::Similarity, options, alpha);
        assert!(matches!(refused, Err(PredictError::Option { .. })));
    }
    assert!(
        TrainedPredictor::fit(support::header(), &[], &support::embedding(), TrainingOptions::default())
            .is_err()
    );
}

#[test]
fn token_tables_beat_popularity_and_know_unseen_tokens() {
    let (embedding, train, test) = (support::embedding(), support::records(600, 1), support::records(100, 2));
    let past = history(&train);
    let mean = |predictor: &dyn Predictor| -> f64 {
        let errors = test.iter().map(|record| {
            let truth = UsageShares::from_counts(EXPERTS, &record.prefill).unwrap();
            divergence::mean(&predictor.predict(&record.prompt, PHASE).unwrap(), &truth)
        });
        errors.sum::<f64>() / test.len() as f64
    };
    let (popularity, table) =
        (Popularity::from_history(&past).unwrap(), TokenTable::fit(&embedding, &past, PHASE, 20).unwrap());
    let (known, popular) = (mean(&ByPhase::both(table)), mean(&popularity));
    assert!(known < 0.3 * popular, "{known} {popular}");
    // Without a round, the table predicts popularity.
    let blank = TokenTable::fit(&embedding, &past, PHASE, 0).unwrap();
    assert!((mean(&ByPhase::both(blank)) - popular).abs() < 1e-6);
    // An unseen token is predicted from its embedding.
    let without: Vec<_> = train.iter().filter(|record| !record.prompt.contains(&8)).cloned().collect();
    assert!(without.len() > 100);
    let past = history(&without);
    let (popularity, table) =
        (Popularity::from_history(&past).unwrap(), TokenTable::fit(&embedding, &past, PHASE, 20).unwrap());
    let truth = UsageShares::from_counts(EXPERTS, &support::of_prompt(vec![8], 0).prefill).unwrap();
    let (known, popular) = (table.predict(&[8]).unwrap(), popularity.predict(&[8], PHASE).unwrap());
    assert!(divergence::mean(&known, &truth) < divergence::mean(&popular, &truth));
    // The information of every token is between 0 and 1.
    let information = table.information(&popularity).unwrap();
    assert!(information.iter().all(|share| (0.0..=1.0).contains(share)));
}

#[test]
fn fitted_temperature_is_no_worse_than_none() {
    let (train, held_out) = (support::records(500, 11), support::records(80, 12));
    let error = |predictor: &SimilarPrompts| -> f64 {
        let each = held_out.iter().map(|record| {
            let truth = UsageShares::from_counts(EXPERTS, &record.prefill).unwrap();
            divergence::mean(&predictor.predict(&record.prompt, PHASE).unwrap(), &truth)
        });
        each.sum()
    };
    let mut fitted = exhaustive_search(&train, 15);
    let untempered = error(&fitted);
    fitted.fit_temperature(&held_out, PHASE).unwrap();
    let temperature = fitted.temperature().prefill;
    assert!(temperature != 1.0 && error(&fitted) < untempered);
    for factor in [0.5, 2.0] {
        assert!(error(&fitted) <= error(&fitted.with_temperature("bf", ByPhase::both(temperature * factor))));
    }
    let neighbours = fitted.neighbours(&held_out[0].prompt).unwrap();
    let weights = fitted.weights(&neighbours, PHASE);
    assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    assert!(weights.is_sorted_by(|a, b| a >= b));
}

#[test]
fn mixture_prefers_the_accurate_part() {
    let truths: Vec<UsageShares> = support::records(60, 3)
        .iter()
        .map(|record| UsageShares::from_counts(EXPERTS, &record.prefill).unwrap())
        .collect();
    let uniform = UsageShares::uniform(LAYERS, EXPERTS);
    let cases: Vec<_> =
        truths.iter().map(|truth| ([uniform.clone(), truth.clone()], truth.clone())).collect();
    let mixture = Mixture::fit(LAYERS, &cases);
    for weights in mixture.weights() {
        assert!(weights[1] > 0.99 && (weights.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{weights:?}");
    }
    let combined = Mixture::equal(LAYERS, 2).combine(&[uniform.clone(), truths[0].clone()]).unwrap();
    let expected = (1.0 / EXPERTS as f32 + truths[0].values()[0]) / 2.0;
    assert!((combined.values()[0] - expected).abs() < 1e-6);
    assert!(mixture.combine(&[uniform]).is_err());
}

#[test]
fn default_method_is_the_best_on_held_out_prompts() {
    let options = TrainingOptions { alpha: 5, tree: TREE };
    let trained =
        TrainedPredictor::fit(support::header(), &support::records(600, 21), &support::embedding(), options)
            .unwrap();
    let tuning = trained.tuning(PHASE);
    let best = tuning.errors.iter().min_by(|a, b| a.1.js_mean.total_cmp(&b.1.js_mean)).unwrap();
    assert_eq!(tuning.default, best.0);
    let of = |method| tuning.errors.iter().find(|(other, _)| *other == method).unwrap().1.js_mean;
    assert!(of(Method::Blend) < of(Method::Sps) && of(Method::Sps) < of(Method::Dop));
    let prediction = trained.predict_with_errors(&[1, 2, 3], PHASE).unwrap();
    assert_distribution("default", &prediction.shares);
    assert_eq!(prediction.errors, Some(&best.1), "too few for classes");
    let weights: f64 = trained.part_weights(PHASE).iter().map(|(_, weight)| weight).sum();
    assert!((weights - 1.0).abs() < 1e-5);
}

#[test]
fn error_bars_say_what_happened() {
    let uniform = UsageShares::uniform(1, 4);
    // Two in twenty prompts use expert 0 more than predicted: 30 of 69 instead of a quarter.
    let first = |n| if n < 18 { 1 } else { 30 };
    let truths: Vec<UsageShares> =
        (0..20).map(|n| UsageShares::from_counts(4, &[first(n), 9, 10, 20]).unwrap()).collect();
    let bars = ErrorBars::measure(&vec![uniform.clone(); 20], &truths);
    assert_eq!(bars.prompts, 20);
    // Ties go to the lower id.
    assert_eq!(bars.least_used_p95[0].len(), 5);
    assert!((bars.least_used_p95[0][0] - 1.0).abs() < 1e-12);
    assert!((bars.least_used_p95[0][1] - 4.0 * 30.0 / 69.0).abs() < 1e-6);
    assert!((bars.least_used_p95[0][4] - 1.0).abs() < 1e-6);
    let rare = ErrorBars::measure(&vec![uniform.clone(); 18], &truths[..18]);
    assert!((rare.least_used_p95[0][1] - 1.0).abs() < 1e-12, "never below 1");
    let turned: Vec<UsageShares> =
        (0..20).map(|_| UsageShares::from_counts(4, &[2, 1, 1, 0]).unwrap()).collect();
    let bars = ErrorBars::measure(&vec![uniform.clone(); 20], &turned);
    assert!((bars.least_used_p95[0][1] - 2.0).abs() < 1e-6);
    let js = divergence::mean(&uniform, &turned[0]);
    assert!(bars.js_quantiles[0].iter().all(|quantile| (quantile - js).abs() < 1e-12));
    assert!((bars.js_mean - js).abs() < 1e-12);
}

#[test]
fn divergence_is_bounded_by_ln_2_and_symmetric() {
    let (p, q) = ([1.0_f32, 0.0], [0.0_f32, 1.0]);
    assert!((divergence::jensen_shannon(&p, &q) - std::f64::consts::LN_2).abs() < 1e-12);
    assert_eq!(divergence::jensen_shannon(&p, &p), 0.0);
    let (p, q) = ([0.25_f32, 0.75], [0.5_f32, 0.5]);
    // Computed by hand: m = (0.375, 0.625).
    let expected: f64 = 0.5 * (0.25 * (0.25_f64 / 0.375).ln() + 0.75 * (0.75_f64 / 0.625).ln())
        + 0.5 * (0.5 * (0.5_f64 / 0.375).ln() + 0.5 * (0.5_f64 / 0.625).ln());
    assert!((divergence::jensen_shannon(&p, &q) - expected).abs() < 1e-12);
    assert_eq!(divergence::jensen_shannon(&p, &q), divergence::jensen_shannon(&q, &p));
}

#[test]
fn weights_that_cannot_be_are_refused() {
    let gate = |norm, gate| vec![GateWeights { norm: vec![1.0; norm], gate: vec![0.0; gate] }];
    let embedding: Embedding = support::embedding();
    assert!(Fate::new(embedding.clone(), gate(HIDDEN - 1, EXPERTS * HIDDEN), EXPERTS, 2, 1e-6).is_err());
    assert!(Fate::new(embedding, gate(HIDDEN, EXPERTS), EXPERTS, 2, 1e-6).is_err());
    assert!(UsageShares::from_counts(3, &[1, 2]).is_err());
    // A layer without counts is uniform.
    assert_eq!(UsageShares::from_counts(2, &[0, 0, 3, 1]).unwrap().values(), [0.5, 0.5, 0.75, 0.25]);
}
