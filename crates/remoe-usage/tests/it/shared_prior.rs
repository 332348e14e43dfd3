//! Dependence of predictions on tenants: only on the tenant's own requests and those of contributors.

use crate::model;

use remoe_predictor::record::ActivationRecord;
use remoe_predictor::{
    Activations, Embedding, Phase, TrainedPredictor, TrainingOptions, TunedPredictor, UsageSample,
    UsageShares,
};
use remoe_usage::{
    PredictorOptions, PromptReader, RequestArrival, Retention, StoredRequest, Tenant, UsagePredictor,
};

const LAYERS: usize = 2;
const EXPERTS: usize = 4;
const VOCABULARY: u32 = 40;

fn embedding() -> Embedding {
    let rows = (0..VOCABULARY).flat_map(|id| {
        let own = id as f32 / 400.0;
        if id.is_multiple_of(2) { [1.0, own, 0.1] } else { [own, 1.0, -0.1] }
    });
    Embedding::from_rows(3, &rows.collect::<Vec<_>>()).unwrap()
}

/// Returns the tokens of topic 0 or 1: the even or the odd ones.
fn prompt(topic: u32, number: u32) -> Vec<u32> {
    (0..8).map(|at| (number * 3 + at * 2) % 20 * 2 + topic).collect()
}

/// Trains a predictor on a history in which all requests used expert 3, which no request here uses.
fn trained() -> Box<dyn TunedPredictor> {
    let record = |number: u32| ActivationRecord {
        prompt: prompt(number % 2, number),
        prefill: [0, 0, 0, 8].repeat(LAYERS),
        decode: [0, 0, 0, 8].repeat(LAYERS),
        steps: 4,
        experts: None,
    };
    let records: Vec<ActivationRecord> = (0..20).map(record).collect();
    let header = model::header(LAYERS, EXPERTS);
    Box::new(TrainedPredictor::fit(header, &records, &embedding(), TrainingOptions::default()).unwrap())
}

fn predictor(trained: Option<Box<dyn TunedPredictor>>) -> UsagePredictor {
    let options = PredictorOptions { output_tokens: 4.0, ..PredictorOptions::default() };
    let prompts = PromptReader::for_ids(VOCABULARY as usize);
    UsagePredictor::new(model::header(LAYERS, EXPERTS), embedding(), prompts, trained, options).unwrap()
}

fn come(predictor: &mut UsagePredictor, id: u64, tenant: &str, retention: Retention, prompt: &[u32]) {
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 5}).to_string();
    predictor.begin_request(RequestArrival {
        id,
        tenant: Tenant::named(tenant),
        retention,
        body: body.as_bytes(),
    });
}

/// Serves a request of `tenant` about `topic` that used `expert` alone.
fn serve(
    predictor: &mut UsagePredictor,
    tenant: &str,
    retention: Retention,
    (topic, number): (u32, u32),
    expert: u32,
) {
    let prompt = prompt(topic, number);
    let used = [(expert, 0.5), ((expert + 1) % 2, 0.5)];
    let mut activations = Activations::new(LAYERS, EXPERTS);
    (0..8).for_each(|_| activations.count(Phase::Prefill, [&used[..]; LAYERS].into_iter()));
    (0..4).for_each(|_| activations.count(Phase::Decode, [&used[..]; LAYERS].into_iter()));
    come(predictor, 1, tenant, retention, &prompt);
    predictor.record_usage(1, &activations.to_text().unwrap()).unwrap();
    predictor.end_request(1);
}

fn expected(predictor: &mut UsagePredictor, tenant: &str, topic: u32) -> Option<UsageShares> {
    come(predictor, u64::MAX, tenant, Retention::Records, &prompt(topic, 77));
    let mix = predictor.predict_joint_usage().unwrap();
    predictor.end_request(u64::MAX);
    mix.map(|mix| mix.shares)
}

/// Returns pseudo-random numbers below `bound`, reproducible from a seed.
struct NumberStream(u64);

impl NumberStream {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[test]
fn predictions_depend_on_no_tenant_that_does_not_share() {
    for seed in 0..60 {
        for with_trained in [false, true] {
            let mut stream = NumberStream(seed);
            let [mut with, mut without] = [(); 2].map(|()| predictor(with_trained.then(trained)));
            // The other tenants change their retention from request to request; `x` starts to share at some request.
            for number in 0..40 {
                let of_others = ["b", "c", "d"][stream.below(3) as usize];
                let retention =
                    [Retention::Records, Retention::Counts, Retention::Nothing][stream.below(3) as usize];
                let about = (stream.below(2) as u32, number);
                let expert = stream.below(4) as u32;
                serve(&mut with, of_others, retention, about, expert);
                let own = (stream.below(2) as u32, number);
                let retention = if number > 20 { Retention::Shared } else { Retention::Records };
                for predictor in [&mut with, &mut without] {
                    serve(predictor, "a", Retention::Records, own, 0);
                    serve(predictor, "x", retention, own, 1);
                }
            }
            // A tenant with its own records, a new one, and the one that has shared its records until now.
            for (tenant, topic) in [("a", 0), ("a", 1), ("new", 0), ("new", 1), ("x", 0)] {
                let [one, other] = [&mut with, &mut without].map(|one| expected(one, tenant, topic));
                assert_eq!(one, other, "seed {seed}, {tenant}");
                assert!(one.is_some());
            }
        }
    }
}

#[test]
fn new_tenant_without_sharing_tenants_is_unpredicted() {
    let mut predictor = predictor(None);
    (0..20).for_each(|number| serve(&mut predictor, "a", Retention::Records, (0, number), 0));
    assert_eq!(expected(&mut predictor, "new", 0), None);
}

#[test]
fn new_tenant_is_predicted_by_what_others_share() {
    let mut predictor = predictor(None);
    (0..20).for_each(|number| serve(&mut predictor, "a", Retention::Shared, (0, number), 0));
    let work = |shares: &UsageShares| shares.rows().map(|row| row[0] + row[1]).sum::<f32>() / LAYERS as f32;
    // Half way from equal shares, because the prior's error is unknown.
    let first = expected(&mut predictor, "new", 0).unwrap();
    assert!((work(&first) - 0.75).abs() < 0.01, "{first:?}");
    // Once it has records, the prediction uses them alone.
    (0..4).for_each(|number| serve(&mut predictor, "new", Retention::Records, (0, number), 3));
    let own = expected(&mut predictor, "new", 0).unwrap();
    serve(&mut predictor, "a", Retention::Shared, (1, 50), 1);
    assert_eq!(expected(&mut predictor, "new", 0).unwrap(), own);
}

#[test]
fn tenant_that_shares_no_more_leaves_no_prior() {
    for retention in [Retention::Records, Retention::Counts, Retention::Nothing] {
        let mut predictor = predictor(None);
        (0..20).for_each(|number| serve(&mut predictor, "a", Retention::Shared, (0, number), 0));
        assert!(expected(&mut predictor, "new", 0).is_some());
        // An active request contributes nothing either.
        come(&mut predictor, 500, "a", Retention::Shared, &prompt(0, 5));
        come(&mut predictor, 501, "a", retention, &prompt(0, 5));
        predictor.end_request(501);
        let is_predicted = |predictor: &mut UsagePredictor| {
            let requests = |predictor: &UsagePredictor| {
                predictor.predict_joint_usage().unwrap().map_or(0.0, |mix| mix.requests)
            };
            let before = requests(predictor);
            come(predictor, 502, "new", Retention::Records, &prompt(0, 77));
            let after = requests(predictor);
            predictor.end_request(502);
            after > before
        };
        assert!(!is_predicted(&mut predictor), "{retention:?}");
        let mut activations = Activations::new(LAYERS, EXPERTS);
        let used = [(0, 0.5), (1, 0.5)];
        (0..8).for_each(|_| activations.count(Phase::Prefill, [&used[..]; LAYERS].into_iter()));
        predictor.record_usage(500, &activations.to_text().unwrap()).unwrap();
        assert!(!is_predicted(&mut predictor), "{retention:?}");
        assert_eq!(expected(&mut predictor, "new", 0), None, "{retention:?}");
    }
}

#[test]
fn shared_tenant_records_of_other_gateways_join_the_prior() {
    let record = |number: u64| {
        let prefill = UsageShares::from_weights(EXPERTS, [1.0, 0.0, 0.0, 0.0].repeat(LAYERS)).unwrap();
        let usage = UsageSample { vector: vec![1.0, 0.0, 0.0], prefill, decode: None };
        StoredRequest { number, tenant: Tenant::named("a"), usage }
    };
    let told: Vec<StoredRequest> = (1..=8).map(record).collect();
    let mut predictor = predictor(None);
    assert_eq!(predictor.learn_shared(&told), 8);
    assert_eq!(expected(&mut predictor, "new", 0), None, "it has not said that it shares");
    // Its earlier records count from its first shared request on.
    come(&mut predictor, 500, "a", Retention::Shared, &prompt(0, 5));
    predictor.end_request(500);
    let before = expected(&mut predictor, "new", 0).unwrap();
    assert_eq!(predictor.learn_shared(&told), 0, "known already");
    assert_eq!(expected(&mut predictor, "new", 0).unwrap(), before);
    let more: Vec<StoredRequest> = (11..=18).map(record).collect();
    assert_eq!(predictor.learn_shared(&more), 8);
    assert!(expected(&mut predictor, "new", 0).is_some());
}

#[test]
fn shared_usage_outweighs_a_trained_predictor_that_is_wrong() {
    let mut predictor = predictor(Some(trained()));
    let last = |shares: &UsageShares| shares.rows().map(|row| row[3]).sum::<f32>() / LAYERS as f32;
    let by_trained = expected(&mut predictor, "new", 0).unwrap();
    assert!(last(&by_trained) > 0.95, "{by_trained:?}");
    // The distance of a tenant's requests from its own mean says nothing about a new tenant.
    (0..40).for_each(|number| serve(&mut predictor, "a", Retention::Shared, (0, number), 0));
    assert_eq!(expected(&mut predictor, "new", 0).unwrap(), by_trained, "nothing to go by yet");
    (0..40).for_each(|number| serve(&mut predictor, "b", Retention::Shared, (0, number), 0));
    let by_both = expected(&mut predictor, "new", 0).unwrap();
    assert!(last(&by_both) < 0.6, "{by_both:?}");
}
