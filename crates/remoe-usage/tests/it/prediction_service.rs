//! Memory of a prediction service: the predictor is loaded while requests arrive.

use crate::model;

use remoe_predictor::{Activations, Embedding, Phase};
use remoe_usage::{
    LoadedPredictor, PredictionService, PredictorLoader, PredictorOptions, PromptReader, Retention,
    UsagePredictor,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const LAYERS: usize = 2;
const EXPERTS: usize = 4;
const LONG: Duration = Duration::from_secs(3600);
const ANSWERS: Duration = Duration::from_secs(30);
const BODY: &[u8] = br#"{"prompt": [1, 2, 3, 4, 5, 6, 7, 0]}"#;

fn predictor(folder: &Path) -> UsagePredictor {
    let embedding = Embedding::from_rows(2, &[1.0, 0.5].repeat(8)).unwrap();
    let options =
        PredictorOptions { store: Some((folder.to_owned(), 1 << 20)), ..PredictorOptions::default() };
    let header = model::header(LAYERS, EXPERTS);
    UsagePredictor::new(header, embedding, PromptReader::for_ids(8), None, options).unwrap()
}

fn activations() -> String {
    let mut activations = Activations::new(LAYERS, EXPERTS);
    let used = [(0, 0.5), (1, 0.5)];
    (0..8).for_each(|_| activations.count(Phase::Prefill, [&used[..]; LAYERS].into_iter()));
    activations.to_text().unwrap()
}

/// Returns a loader for `folder` and its number of loads. The guard is a reference to that count.
fn opening(folder: &Path) -> (PredictorLoader, Arc<AtomicUsize>) {
    let (folder, opened) = (folder.to_owned(), Arc::new(AtomicUsize::new(0)));
    let counted = opened.clone();
    let open = move || {
        counted.fetch_add(1, Ordering::SeqCst);
        Some(LoadedPredictor { predictor: predictor(&folder), guard: Box::new(counted.clone()) })
    };
    (Box::new(open), opened)
}

fn until(mut is: impl FnMut() -> bool) {
    while !is() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn unloaded_service_loads_at_the_first_request() {
    let folder = tempfile::tempdir().unwrap();
    let (open, opened) = opening(folder.path());
    let service = PredictionService::start_unloaded(open, LONG, None, |_, _| ()).unwrap();
    assert_eq!(service.predict_joint_usage(ANSWERS), None);
    service.record_usage(1, &activations());
    service.end_request(1);
    assert_eq!(
        (service.predict_joint_usage(ANSWERS), service.is_loaded(), opened.load(Ordering::SeqCst)),
        (None, false, 0)
    );
    for id in 1..=3 {
        assert!(service.begin_request(id, "t", Retention::Records, BODY));
        service.record_usage(id, &activations());
        service.end_request(id);
    }
    assert!(service.begin_request(4, "t", Retention::Records, BODY));
    assert_eq!(
        service.predict_joint_usage(ANSWERS).map(|mix| mix.requests),
        Some(1.0),
        "the first ones were learned from"
    );
    assert!(service.is_loaded() && opened.load(Ordering::SeqCst) == 1);
}

#[test]
fn idle_service_unloads_and_loads_again() {
    let folder = tempfile::tempdir().unwrap();
    let (open, opened) = opening(folder.path());
    let service =
        PredictionService::start_unloaded(open, Duration::from_millis(20), None, |_, _| ()).unwrap();
    assert!(service.begin_request(1, "t", Retention::Records, BODY));
    // A running request keeps the predictor loaded.
    until(|| service.is_loaded());
    std::thread::sleep(Duration::from_millis(100));
    assert!(service.is_loaded());
    service.record_usage(1, &activations());
    service.end_request(1);
    until(|| !service.is_loaded());
    // The loader's reference, and this one.
    until(|| Arc::strong_count(&opened) == 2);
    assert!(service.begin_request(2, "t", Retention::Records, BODY));
    assert!(service.predict_joint_usage(ANSWERS).is_some(), "what was stored is known again");
    assert_eq!(opened.load(Ordering::SeqCst), 2);
}

#[test]
fn service_that_cannot_load_predicts_nothing() {
    let service = PredictionService::start_unloaded(Box::new(|| None), LONG, None, |_, _| ()).unwrap();
    assert!(service.begin_request(1, "t", Retention::Records, BODY));
    assert_eq!((service.predict_joint_usage(ANSWERS), service.is_loaded()), (None, false));
    // The queue does not fill up while the predictor cannot be loaded.
    for id in 2..2000 {
        until(|| service.begin_request(id, "t", Retention::Records, BODY));
        service.end_request(id);
    }
}
