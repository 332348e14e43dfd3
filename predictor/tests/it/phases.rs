//! Prefill and decode are predicted apart, and errors are told by what is known of a prompt.

use crate::support;

use remoe_predictor::{
    ErrorBars, LEAST_IN_CLASS, Method, Phase, Predictor, Shares, Trained, TrainingOptions, TreeOptions,
    divergence, error_classes,
};
use support::EXPERTS;

fn trained(count: usize, decoded: bool) -> Trained {
    let tree = TreeOptions { beta: 12, breadth: 0, rerank: 0, forks: 4, seed: 1 };
    let records = if decoded { support::decoded(count, 5) } else { support::records(count, 5) };
    let options = TrainingOptions { alpha: 5, tree };
    Trained::fit(support::header(), &records, &support::embedding(), options).unwrap()
}

#[test]
fn decode_is_learned_from_decode_steps() {
    let trained = trained(600, true);
    for method in [Method::Sps, Method::Tokens, Method::Blend] {
        let [mut own, mut of_prefill] = [0.0, 0.0];
        for record in support::records(60, 6) {
            let truth = Shares::from_counts(EXPERTS, &support::decode_of(&record.prefill)).unwrap();
            let predict = |phase| trained.method(method).predict(&record.prompt, phase).unwrap();
            own += divergence::mean(&predict(Phase::Decode), &truth);
            of_prefill += divergence::mean(&predict(Phase::Prefill), &truth);
        }
        assert!(own < 0.7 * of_prefill, "{}: {own} against {of_prefill}", method.name());
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
fn the_first_request_that_decodes_is_learned() {
    let mut trained = trained(50, false);
    let record = support::decoded(2, 9).remove(1);
    trained.learn(&record, 1000, 0.5).unwrap();
    let truth = Shares::from_counts(EXPERTS, &record.decode).unwrap();
    let sps = trained.sps();
    let slot = sps.neighbours(&record.prompt).unwrap()[0].slot;
    assert_eq!(sps.history().share_row(slot, Phase::Decode), truth.values());
    // All others keep their prefill's.
    let other = sps.history().slots().find(|other| *other != slot).unwrap();
    let history = sps.history();
    assert_eq!(history.share_row(other, Phase::Decode), history.share_row(other, Phase::Prefill));
}

#[test]
fn errors_are_larger_where_the_parts_disagree() {
    // Predictions that are as far off as the parts are apart.
    let uniform = Shares::uniform(1, 4);
    let truth = |n: u32| Shares::from_counts(4, &[100 + n, 100, 100, 100]).unwrap();
    let cases: Vec<_> =
        (0..3 * LEAST_IN_CLASS as u32).map(|n| (f64::from(n), uniform.clone(), truth(n))).collect();
    let mut turned = cases.clone();
    turned.reverse();
    let classes = error_classes(turned, 3);
    assert_eq!(classes, error_classes(cases.clone(), 3), "whatever their order");
    assert_eq!(classes.len(), 3);
    for (class, part) in classes.iter().zip(cases.chunks(LEAST_IN_CLASS)) {
        let (predictions, truths): (Vec<_>, Vec<_>) =
            part.iter().map(|(_, p, t)| (p.clone(), t.clone())).unzip();
        assert_eq!(class.disagreement, part.last().unwrap().0);
        assert_eq!(class.errors, ErrorBars::of(&predictions, &truths));
    }
    assert!(classes.is_sorted_by(|a, b| a.errors.js_mean < b.errors.js_mean));
    assert!(error_classes(cases[1..].to_vec(), 3).is_empty(), "one too few");
}

#[test]
fn a_prediction_has_the_errors_of_its_class() {
    let trained = trained(1500, false);
    let classes = &trained.tuning(Phase::Prefill).classes;
    assert_eq!(classes.len(), 3);
    let mut met = vec![0; classes.len()];
    for record in support::records(200, 7) {
        let prediction = trained.predict_with_errors(&record.prompt, Phase::Prefill).unwrap();
        let [sps, tokens] = [Method::Sps, Method::Tokens]
            .map(|method| trained.method(method).predict(&record.prompt, Phase::Prefill).unwrap());
        let apart = divergence::mean(&sps, &tokens);
        let class = classes.iter().position(|class| apart <= class.disagreement).unwrap_or(2);
        assert_eq!(prediction.errors, Some(&classes[class].errors));
        met[class] += 1;
    }
    assert!(met.iter().all(|count| *count > 10), "{met:?}");
}
