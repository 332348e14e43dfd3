//! Separate predictions for prefill and decode, and errors by disagreement.

use crate::support;

use remoe_predictor::{
    ErrorBars, ErrorCase, MIN_CLASS_PROMPTS, Method, Phase, Predictor, TrainedPredictor, TrainingOptions,
    TreeOptions, UsageShares, divergence, error_classes,
};
use support::EXPERTS;

fn trained(count: usize, decoded: bool) -> TrainedPredictor {
    let tree = TreeOptions { beta: 12, breadth: 0, rerank: 0, forks: 4, seed: 1 };
    let records = if decoded { support::decoded(count, 5) } else { support::records(count, 5) };
    let options = TrainingOptions { alpha: 5, tree };
    TrainedPredictor::fit(support::header(), &records, &support::embedding(), options).unwrap()
}

#[test]
fn decode_is_learned_from_decode_steps() {
    let trained = trained(600, true);
    for method in [Method::Sps, Method::Tokens, Method::Blend] {
        let [mut decode_error, mut prefill_error] = [0.0, 0.0];
        for record in support::records(60, 6) {
            let truth = UsageShares::from_counts(EXPERTS, &support::decode_of(&record.prefill)).unwrap();
            let predict = |phase| trained.method(method).predict(&record.prompt, phase).unwrap();
            decode_error += divergence::mean(&predict(Phase::Decode), &truth);
            prefill_error += divergence::mean(&predict(Phase::Prefill), &truth);
        }
        assert!(
            decode_error < 0.7 * prefill_error,
            "{}: {decode_error} against {prefill_error}",
            method.name()
        );
    }
    let [prefill, decode] = Phase::ALL.map(|phase| trained.tuning(phase));
    assert!(prefill.errors.iter().all(|(_, bars)| bars.prompts == 60));
    assert!(decode.errors.iter().all(|(_, bars)| (20..60).contains(&bars.prompts)), "those that decoded");
}

#[test]
fn history_without_decode_uses_prefill_shares_without_errors() {
    let trained = trained(300, false);
    assert!(!trained.sps().history().has_decode());
    let [prefill, decode] = Phase::ALL.map(|phase| trained.predict_with_errors(&[1, 2, 3], phase).unwrap());
    assert_eq!(prefill.shares, decode.shares);
    assert!(prefill.errors.is_some() && decode.errors.is_none());
}

#[test]
fn first_request_with_decode_steps_is_learned() {
    let mut trained = trained(50, false);
    let record = support::decoded(2, 9).remove(1);
    trained.learn(&record, 1000, 0.5).unwrap();
    let truth = UsageShares::from_counts(EXPERTS, &record.decode).unwrap();
    let sps = trained.sps();
    let slot = sps.neighbours(&record.prompt).unwrap()[0].slot;
    assert_eq!(sps.history().share_row(slot, Phase::Decode), truth.values());
    // All others keep the shares of their prefill.
    let other = sps.history().slots().find(|other| *other != slot).unwrap();
    let history = sps.history();
    assert_eq!(history.share_row(other, Phase::Decode), history.share_row(other, Phase::Prefill));
}

#[test]
fn errors_grow_with_the_disagreement_of_the_parts() {
    // Errors grow with the disagreement of the parts.
    let uniform = UsageShares::uniform(1, 4);
    let truth = |n: u32| UsageShares::from_counts(4, &[100 + n, 100, 100, 100]).unwrap();
    let cases: Vec<_> = (0..3 * MIN_CLASS_PROMPTS as u32)
        .map(|n| ErrorCase { disagreement: f64::from(n), prediction: uniform.clone(), truth: truth(n) })
        .collect();
    let mut reversed = cases.clone();
    reversed.reverse();
    let classes = error_classes(reversed, 3);
    assert_eq!(classes, error_classes(cases.clone(), 3), "the order does not matter");
    assert_eq!(classes.len(), 3);
    for (class, part) in classes.iter().zip(cases.chunks(MIN_CLASS_PROMPTS)) {
        let (predictions, truths): (Vec<_>, Vec<_>) =
            part.iter().map(|case| (case.prediction.clone(), case.truth.clone())).unzip();
        assert_eq!(class.disagreement, part.last().unwrap().disagreement);
        assert_eq!(class.errors, ErrorBars::measure(&predictions, &truths));
    }
    assert!(classes.is_sorted_by(|a, b| a.errors.js_mean < b.errors.js_mean));
    assert!(error_classes(cases[1..].to_vec(), 3).is_empty(), "one too few");
}

#[test]
fn prediction_has_the_errors_of_its_class() {
    let trained = trained(1500, false);
    let classes = &trained.tuning(Phase::Prefill).classes;
    assert_eq!(classes.len(), 3);
    let mut class_counts = vec![0; classes.len()];
    for record in support::records(200, 7) {
        let prediction = trained.predict_with_errors(&record.prompt, Phase::Prefill).unwrap();
        let [sps, tokens] = [Method::Sps, Method::Tokens]
            .map(|method| trained.method(method).predict(&record.prompt, Phase::Prefill).unwrap());
        let disagreement = divergence::mean(&sps, &tokens);
        let class = classes.iter().position(|class| disagreement <= class.disagreement).unwrap_or(2);
        assert_eq!(prediction.errors, Some(&classes[class].errors));
        class_counts[class] += 1;
    }
    assert!(class_counts.iter().all(|count| *count > 10), "{class_counts:?}");
}
