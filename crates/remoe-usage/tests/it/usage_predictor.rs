//! Life of requests in the predictor: arrival, prediction, comparison, learning.

use crate::model;

use prometheus::{Registry, TextEncoder};
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{Activations, ByPhase, Embedding, Phase, UsageSample, UsageShares};
use remoe_usage::{
    EXPERT_SETS, HistorySize, JointUsage, LAYER_GROUPS, LayerThirdQuality, PredictionMetrics,
    PredictorOptions, PromptReader, RequestArrival, Retention, StoredRequest, Tenant, UsagePredictor,
};
use std::path::Path;

const LAYERS: usize = 2;
const EXPERTS: usize = 4;
const VOCABULARY: u32 = 40;

fn header() -> RecordHeader {
    model::header(LAYERS, EXPERTS)
}

/// Creates an embedding in which even and odd tokens have different directions, each with a small variation.
fn embedding() -> Embedding {
    let rows = (0..VOCABULARY).flat_map(|id| {
        let own = id as f32 / 400.0;
        if id.is_multiple_of(2) { [1.0, own, 0.1] } else { [own, 1.0, -0.1] }
    });
    Embedding::from_rows(3, &rows.collect::<Vec<_>>()).unwrap()
}

fn predictor(store: Option<(&Path, u64)>) -> UsagePredictor {
    let options = PredictorOptions {
        store: store.map(|(folder, limit)| (folder.to_owned(), limit)),
        is_history_disabled: false,
        output_tokens: 4.0,
    };
    let prompts = PromptReader::for_ids(VOCABULARY as usize);
    UsagePredictor::new(header(), embedding(), prompts, None, options).unwrap()
}

/// Returns a prompt of topic 0 or 1.
fn prompt(topic: u32, number: u32) -> Vec<u32> {
    (0..8).map(|at| (number * 3 + at * 2) % 20 * 2 + topic).collect()
}

/// Returns the activations of a topic: topic 0 uses experts 0 and 1, topic 1 experts 2 and 3.
fn used(topic: u32, tokens: usize, steps: usize) -> String {
    let experts = [(2 * topic, 0.5), (2 * topic + 1, 0.5)];
    let mut activations = Activations::new(LAYERS, EXPERTS);
    (0..tokens).for_each(|_| activations.count(Phase::Prefill, [&experts[..]; LAYERS].into_iter()));
    (0..steps).for_each(|_| activations.count(Phase::Decode, [&experts[..]; LAYERS].into_iter()));
    activations.to_text().unwrap()
}

fn come(predictor: &mut UsagePredictor, id: u64, tenant: &str, prompt: &[u32]) {
    come_and_keep(predictor, id, tenant, Retention::Records, prompt);
}

fn come_and_keep(
    predictor: &mut UsagePredictor,
    id: u64,
    tenant: &str,
    retention: Retention,
    prompt: &[u32],
) {
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 5}).to_string();
    predictor.begin_request(RequestArrival {
        id,
        tenant: Tenant::named(tenant),
        retention,
        body: body.as_bytes(),
    });
}

fn serve(predictor: &mut UsagePredictor, tenant: &str, topic: u32, true_topic: u32, number: u32) {
    let prompt = prompt(topic, number);
    come(predictor, u64::from(number), tenant, &prompt);
    predictor.record_usage(u64::from(number), &used(true_topic, prompt.len(), 4)).unwrap();
    predictor.end_request(u64::from(number));
}

/// Predicts the usage of a waiting request of `tenant` about `topic`.
fn expected(predictor: &mut UsagePredictor, tenant: &str, topic: u32) -> Option<UsageShares> {
    come(predictor, u64::MAX, tenant, &prompt(topic, 77));
    let mix = predictor.predict_joint_usage().unwrap();
    predictor.end_request(u64::MAX);
    mix.map(|mix| mix.shares)
}

fn work(shares: &UsageShares, experts: [usize; 2]) -> f32 {
    let rows = shares.rows().map(|row| row[experts[0]] + row[experts[1]]);
    rows.sum::<f32>() / LAYERS as f32
}

#[test]
fn waiting_requests_are_predicted_from_similar_ones() {
    let mut predictor = predictor(None);
    assert_eq!(expected(&mut predictor, "a", 0), None, "nothing is known yet");
    (0..40).for_each(|number| serve(&mut predictor, "a", number % 2, number % 2, number));
    let of = |predictor: &mut UsagePredictor, topic| expected(predictor, "a", topic).unwrap();
    assert!(work(&of(&mut predictor, 0), [0, 1]) > 0.7);
    assert!(work(&of(&mut predictor, 1), [2, 3]) > 0.7);
    // One request of each topic, with equal tokens and thus equal weight.
    come(&mut predictor, 900, "a", &prompt(0, 5));
    come(&mut predictor, 901, "a", &prompt(1, 5));
    let mix = predictor.predict_joint_usage().unwrap().unwrap();
    assert_eq!((mix.requests, mix.tokens), (2.0, 2.0 * (8.0 + 4.0)));
    assert!((work(&mix.shares, [0, 1]) - 0.5).abs() < 0.02);
    predictor.end_request(900);
    predictor.end_request(901);
    assert_eq!(predictor.predict_joint_usage().unwrap(), None, "no request is active");
    let quality = predictor.quality();
    assert_eq!(quality.compared, 39, "of the first one nothing was said");
    assert!(quality.phases.prefill.hot_recall > 0.9, "{quality:?}");
}

#[test]
fn observed_usage_follows_a_change_within_28_requests() {
    let mut predictor = predictor(None);
    (0..100).for_each(|number| serve(&mut predictor, "a", 0, 0, number));
    let mut after = 0;
    while work(&predictor.observed().joint_usage().unwrap().unwrap().shares, [2, 3]) < 0.5 {
        serve(&mut predictor, "a", 1, 1, 1000 + after);
        after += 1;
    }
    assert!((20..=28).contains(&after), "{after} requests");
}

#[test]
fn poisoned_record_leaves_other_tenants_unchanged() {
    let mut predictor = predictor(None);
    (0..20).for_each(|number| serve(&mut predictor, "good", number % 2, number % 2, number));
    let before = expected(&mut predictor, "good", 0);
    // The other tenant has the same prompts with wrong activations.
    (0..200).for_each(|number| serve(&mut predictor, "bad", number % 2, 1 - number % 2, 1000 + number));
    assert_eq!(expected(&mut predictor, "good", 0), before);
    assert!(work(&expected(&mut predictor, "bad", 0).unwrap(), [2, 3]) > 0.7, "it has only itself to blame");
    // Counts beyond the number of tokens are refused.
    assert!(predictor.record_usage(1, "2.AQIEAQH/////DwAAAA").is_err());
    assert_eq!(expected(&mut predictor, "good", 0), before);
}

#[test]
fn history_survives_restart_within_its_limit() {
    let folder = tempfile::tempdir().unwrap();
    let limit = 16 << 10;
    let mut first = predictor(Some((folder.path(), limit)));
    for number in 0..2000 {
        serve(&mut first, ["a", "b", "c"][number as usize % 3], number % 2, number % 2, number);
    }
    let HistorySize { requests, bytes } = first.history_size();
    assert!(requests > 20 && bytes < limit, "{requests} requests in {bytes} bytes");
    assert!(std::fs::metadata(folder.path().join("experience")).unwrap().len() <= limit);
    let before = expected(&mut first, "b", 1).unwrap();
    drop(first);
    let mut second = predictor(Some((folder.path(), limit)));
    assert!(second.history_size().requests > 20);
    let after = expected(&mut second, "b", 1).unwrap();
    assert!((work(&before, [2, 3]) - work(&after, [2, 3])).abs() < 0.05);
    // The mean usage is known before the first request.
    let mean = second.mean_usage(ByPhase { prefill: 3.0, decode: 1.0 }).unwrap().unwrap();
    assert!((work(&mean, [0, 1]) - 0.5).abs() < 0.1, "{mean:?}");
    assert_eq!(predictor(None).mean_usage(ByPhase::both(1.0)).unwrap(), None);
}

#[test]
fn stored_history_contains_no_prompt_text() {
    let folder = tempfile::tempdir().unwrap();
    let mut predictor = predictor(Some((folder.path(), 1 << 20)));
    let secret: Vec<u32> = vec![2, 4, 6, 8, 10, 12, 14, 16];
    come(&mut predictor, 1, "a", &secret);
    predictor.record_usage(1, &used(0, secret.len(), 0)).unwrap();
    let file = std::fs::read(folder.path().join("experience")).unwrap();
    let ids: Vec<u8> = secret.iter().flat_map(|id| id.to_le_bytes()).collect();
    assert!(!file.windows(8).any(|bytes| ids.windows(8).any(|ids| ids == bytes)));
    // The same tokens in another order give the same record but for its number.
    let size = file.len();
    come(&mut predictor, 2, "a", &secret.iter().rev().copied().collect::<Vec<_>>());
    predictor.record_usage(2, &used(0, secret.len(), 0)).unwrap();
    let file = std::fs::read(folder.path().join("experience")).unwrap();
    let record = file.len() - size;
    assert_eq!(file[size + 16..], file[size - record + 16..size]);
}

#[test]
fn cached_prefix_prompt_teaches_from_its_computed_rest() {
    let mut predictor = predictor(None);
    // The first half of the prompt, about topic 0, was in the prefix cache; the computed rest is about topic 1.
    for number in 0..40 {
        let prompt = [prompt(0, number), prompt(1, number)].concat();
        come(&mut predictor, 1, "a", &prompt);
        predictor.record_usage(1, &used(1, prompt.len() / 2, 4)).unwrap();
    }
    assert_eq!(predictor.history_size().requests, 40);
    assert_eq!(predictor.quality().compared, 0, "the whole prompt was predicted, and not the rest");
    assert!(work(&expected(&mut predictor, "a", 1).unwrap(), [2, 3]) > 0.7);
    // A few tokens are not learned from.
    come(&mut predictor, 1, "a", &prompt(0, 1));
    predictor.record_usage(1, &used(0, 3, 4)).unwrap();
    assert_eq!(predictor.history_size().requests, 40);
}

/// The computed part of a long prompt may lie beyond the tokens that predictions use.
#[test]
fn long_prompt_teaches_only_from_its_computed_part() {
    let mut predictor = predictor(None);
    let long = |topic: u32, tokens: usize| -> Vec<u32> {
        (0..).flat_map(|number| prompt(topic, number)).take(tokens).collect()
    };
    // All retained tokens came from the prefix cache.
    come(&mut predictor, 1, "a", &long(0, 4000));
    predictor.record_usage(1, &used(1, 1000, 4)).unwrap();
    assert_eq!(predictor.history_size().requests, 0);
    // 1,000 tokens about topic 0 were cached, and the rest is about topic 1.
    for _ in 0..40 {
        come(&mut predictor, 1, "a", &[long(0, 1000), long(1, 3000)].concat());
        predictor.record_usage(1, &used(1, 3000, 4)).unwrap();
    }
    assert_eq!(predictor.history_size().requests, 40);
    assert_eq!(predictor.quality().compared, 0, "the whole prompt was predicted, and not the rest");
    assert!(work(&expected(&mut predictor, "a", 1).unwrap(), [2, 3]) > 0.7);
}

/// As docs/cost.md states for the largest models: series grow with neither layers nor experts.
#[test]
fn series_do_not_grow_with_the_model() {
    let header = RecordHeader { layers: (3..61).collect(), experts: 256, ..header() };
    let options = PredictorOptions { output_tokens: 4.0, ..PredictorOptions::default() };
    let prompts = PromptReader::for_ids(VOCABULARY as usize);
    let mut predictor = UsagePredictor::new(header, embedding(), prompts, None, options).unwrap();
    let layers = [&[(7, 0.5), (200, 0.5)][..]; 58];
    let mut activations = Activations::new(58, 256);
    (0..8).for_each(|_| activations.count(Phase::Prefill, layers.into_iter()));
    (0..4).for_each(|_| activations.count(Phase::Decode, layers.into_iter()));
    for id in 0..6 {
        come(&mut predictor, id, "t", &prompt(0, id as u32));
        predictor.record_usage(id, &activations.to_text().unwrap()).unwrap();
    }
    let registry = Registry::new();
    let metrics = PredictionMetrics::register(&registry).unwrap().of_model("m");
    metrics.update(&predictor);
    ["wake", "drift", "failed"].into_iter().for_each(|cause| metrics.count_replan(cause));
    let page = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    let series: Vec<&str> = page.lines().filter(|line| !line.starts_with('#')).collect();
    let activation: Vec<&&str> =
        series.iter().filter(|line| line.starts_with("remoe_prediction_activation_ratio")).collect();
    assert_eq!(activation.len(), 2 * 2 * LAYER_GROUPS * EXPERT_SETS, "{page}");
    assert!(series.len() <= 167, "{} series", series.len());
    for layers in ["3-16", "17-31", "32-45", "46-60"] {
        for of in ["predicted", "observed"] {
            for phase in ["prefill", "decode"] {
                let labels = [("layers", layers), ("of", of), ("phase", phase)];
                let labels = labels.map(|(name, value)| format!("{name}=\"{value}\""));
                let work =
                    activation.iter().filter(|line| labels.iter().all(|label| line.contains(label.as_str())));
                let values: Vec<f64> =
                    work.map(|line| line.split(' ').next_back().unwrap().parse().unwrap()).collect();
                assert!((values.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{labels:?}: {values:?}");
                // The history tells which two experts are used.
                let first = activation.iter().find(|line| {
                    line.contains("eighth=\"1\"") && labels.iter().all(|label| line.contains(label.as_str()))
                });
                assert!(first.unwrap().rsplit(" ").next().unwrap().parse::<f64>().unwrap() > 0.999, "{page}");
            }
        }
    }
}

/// Returns a forged report of a main function: `positions` positions in both phases, all by experts 0 and 1.
fn forged(positions: u32) -> String {
    let weights = [1.0, 1.0, 0.0, 0.0].repeat(LAYERS);
    let shares = UsageShares::from_weights(EXPERTS, weights).unwrap().to_text(1000).unwrap();
    format!("3.{positions}.{shares}.{positions}.{shares}")
}

/// Predicts a request of `tenant` without an output limit.
fn predicted(predictor: &mut UsagePredictor, tenant: &str) -> JointUsage {
    let body = serde_json::json!({"prompt": prompt(1, 77)}).to_string();
    let tenant = Tenant::named(tenant);
    predictor.begin_request(RequestArrival {
        id: u64::MAX,
        tenant,
        retention: Retention::Records,
        body: body.as_bytes(),
    });
    let mix = predictor.predict_joint_usage().unwrap().unwrap();
    predictor.end_request(u64::MAX);
    mix
}

#[test]
fn forged_record_leaves_other_tenants_predictions_unchanged() {
    let mut predictor = predictor(None);
    for number in 0..40 {
        serve(&mut predictor, "a", 0, 0, number);
        serve(&mut predictor, "b", 1, 1, number);
    }
    let before = predicted(&mut predictor, "b");
    let of_a = predicted(&mut predictor, "a");
    let observed = predictor.observed().joint_usage().unwrap().unwrap();
    assert!((work(&observed.shares, [0, 1]) - 0.5).abs() < 0.05);
    // Impossible reports are refused.
    for text in
        ["", "2.", "3.1", "3.-1..0.", "3.NaN..0.", "3.99999999999999999999..0.", "3.1.//.0.", "2.//////////8"]
    {
        come(&mut predictor, 900, "a", &prompt(1, 3));
        assert!(predictor.record_usage(900, text).is_err(), "{text}");
        predictor.end_request(900);
    }
    // A possible but false report: about the other topic, with more tokens than any answer has.
    come(&mut predictor, 901, "a", &prompt(1, 77));
    predictor.record_usage(901, &forged(u32::MAX)).unwrap();
    // Records that another gateway might store.
    let record = |number: u64, vector: Vec<f32>, value: f32| {
        let weights = [value, 0.0, 0.0, 0.0].repeat(LAYERS);
        let prefill = UsageShares::from_weights(EXPERTS, weights).unwrap();
        let usage = UsageSample { vector, prefill: prefill.clone(), decode: Some(prefill) };
        StoredRequest { number, tenant: Tenant::named("a"), usage }
    };
    let shared = [
        record(1, vec![f32::NAN; 3], 1.0),
        record(2, vec![1e30, 0.0, 0.0], 1.0),
        record(3, vec![f32::INFINITY, 0.0, 0.0], 1.0),
        record(4, vec![0.0; 3], 1.0),
        record(5, vec![1.0, 0.0], 1.0),
        record(6, vec![0.0, 1.0, 0.0], f32::NAN),
        record(7, vec![0.0, 1.0, 0.0], f32::INFINITY),
        record(8, vec![0.0, 1.0, 0.0], -1.0),
    ];
    assert_eq!(predictor.learn_shared(&shared), 3, "the last ones have the form of requests");
    assert_eq!(predicted(&mut predictor, "b"), before);
    assert_ne!(predicted(&mut predictor, "a"), of_a);
    // In recent usage it has the weight of eight requests, not of four billion tokens.
    let observed = predictor.observed().joint_usage().unwrap().unwrap();
    assert!(work(&observed.shares, [0, 1]) < 0.62, "{}", work(&observed.shares, [0, 1]));
    (0..48).for_each(|number| serve(&mut predictor, "b", 1, 1, number));
    let observed = predictor.observed().joint_usage().unwrap().unwrap();
    assert!(work(&observed.shares, [2, 3]) > 0.75, "{}", work(&observed.shares, [2, 3]));
}

#[test]
fn forged_first_record_has_bounded_weight() {
    let mut predictor = predictor(None);
    come(&mut predictor, 1, "a", &prompt(0, 1));
    predictor.record_usage(1, &forged(u32::MAX)).unwrap();
    let tokens = predictor.observed().joint_usage().unwrap().unwrap().tokens;
    assert!(tokens <= 8.0 * 512.0 + 1.0, "{tokens}");
}

#[test]
fn opted_out_tenant_leaves_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let stored = || std::fs::metadata(folder.path().join("experience")).unwrap().len();
    let mut predictor = predictor(Some((folder.path(), 1 << 20)));
    let empty = stored();
    (0..10).for_each(|number| serve(&mut predictor, "b", 0, 0, number));
    let (of_b, remembered) = (stored(), predictor.history_size().requests);
    (0..10).for_each(|number| serve(&mut predictor, "a", 1, 1, number));
    assert_eq!((predictor.history_size().requests, stored() - of_b), (2 * remembered, of_b - empty));

    // Its history is erased from memory and from the file, and its active requests leave no record either.
    come(&mut predictor, 500, "a", &prompt(1, 5));
    come_and_keep(&mut predictor, 501, "a", Retention::Counts, &prompt(1, 5));
    assert_eq!((predictor.history_size().requests, stored()), (remembered, of_b));
    let used_before = predictor.observed().joint_usage().unwrap().unwrap();
    for id in [500, 501] {
        predictor.record_usage(id, &used(1, 8, 4)).unwrap();
    }
    assert_eq!((predictor.history_size().requests, stored()), (remembered, of_b));
    let counted = predictor.observed().joint_usage().unwrap().unwrap();
    assert!(work(&counted.shares, [2, 3]) > work(&used_before.shares, [2, 3]), "what it used is counted");
    // Records of other gateways are ignored as well.
    let shares = UsageShares::uniform(LAYERS, EXPERTS);
    let usage = UsageSample { vector: vec![0.0, 1.0, 0.0], prefill: shares, decode: None };
    let told = [StoredRequest { number: 7, tenant: Tenant::named("a"), usage }];
    assert_eq!(predictor.learn_shared(&told), 0);

    // A tenant without retention gets no predictions.
    come_and_keep(&mut predictor, 600, "c", Retention::Nothing, &prompt(1, 5));
    assert_eq!(predictor.predict_joint_usage().unwrap(), None);
    let (counted, compared) = (predictor.observed().clone(), predictor.quality().compared);
    come_and_keep(&mut predictor, 601, "b", Retention::Nothing, &prompt(0, 5));
    assert_eq!(predictor.predict_joint_usage().unwrap(), None);
    assert_eq!((predictor.history_size().requests, stored()), (0, empty), "and its past goes");
    assert_eq!((predictor.observed(), predictor.quality().compared), (&counted, compared));

    // A tenant that opts in again is recorded from then on, also after a restart.
    serve(&mut predictor, "a", 1, 1, 700);
    assert_eq!(predictor.history_size().requests, 1);
    drop(predictor);
    assert_eq!(self::predictor(Some((folder.path(), 1 << 20))).history_size().requests, 1);
}

#[test]
fn prediction_quality_is_shown_by_layer_and_metrics_documented() {
    let mut predictor = predictor(None);
    (0..40).for_each(|number| serve(&mut predictor, "a", number % 2, number % 2, number));
    let prefill = predictor.quality().phases.prefill;
    // With two layers, the last third is empty.
    let [Some(first), Some(middle), None] = prefill.thirds else { panic!("{prefill:?}") };
    let mean = |of: fn(&LayerThirdQuality) -> f64| (of(&first) + of(&middle)) / 2.0;
    assert!(first.divergence > 0.0, "{prefill:?}");
    for (parts, whole) in [
        (mean(|third| third.divergence), prefill.divergence),
        (mean(|third| third.hot_recall), prefill.hot_recall),
        (mean(|third| third.cold_share), prefill.cold_share),
    ] {
        assert!((parts - whole).abs() < 1e-9, "{prefill:?}");
    }
    let registry = Registry::new();
    let metrics = PredictionMetrics::register(&registry).unwrap().of_model("m");
    metrics.update(&predictor);
    metrics.count_replan("wake");
    let families = registry.gather();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/prediction.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    for family in &families {
        let name = family.name();
        let short = format!("`..{}`", name.trim_start_matches("remoe_prediction"));
        assert!(docs.contains(&format!("`{name}`")) || docs.contains(&short), "{name} is in no table");
    }
    let shown = |name: &str| {
        let family = families.iter().find(|family| family.name() == name).unwrap();
        family.get_metric().iter().map(|metric| metric.get_gauge().get_value()).collect::<Vec<_>>()
    };
    assert_eq!(shown("remoe_prediction_compared_requests"), [39.0]);
    for of in ["divergence_nats", "hot_recall_ratio", "cold_share_ratio"] {
        let name = format!("remoe_prediction_layers_{of}");
        assert_eq!(shown(&name).len(), 4, "{name}: two parts, two phases");
    }
    // Without a trained predictor there are no error bars.
    let bars = ["remoe_prediction_coverage_ratio", "remoe_prediction_layers_coverage_ratio"];
    assert!(!families.iter().any(|family| bars.contains(&family.name())));
}
