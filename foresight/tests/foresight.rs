//! Requests come, are predicted, turn out, and are learned from.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use prometheus::{Registry, TextEncoder};
use remoe_foresight::{
    Arrival, Foresight, ForesightMetrics, ForesightOptions, LAYER_GROUPS, PARTS, Prompts, Tenant,
};
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{Activations, Embedding, Phase, Shares};
use std::path::Path;

const LAYERS: usize = 2;
const EXPERTS: usize = 4;
const VOCABULARY: u32 = 40;

fn header() -> RecordHeader {
    RecordHeader {
        model: "ab".repeat(32),
        layers: (0..LAYERS as u32).collect(),
        experts: EXPERTS as u32,
        top_k: 2,
        dtype: "float32".to_owned(),
        tokens: false,
    }
}

/// Even tokens point one way, odd ones another, each a little its own.
fn embedding() -> Embedding {
    let rows = (0..VOCABULARY).flat_map(|id| {
        let own = id as f32 / 400.0;
        if id.is_multiple_of(2) { [1.0, own, 0.1] } else { [own, 1.0, -0.1] }
    });
    Embedding::from_rows(3, &rows.collect::<Vec<_>>()).unwrap()
}

fn foresight(store: Option<(&Path, u64)>) -> Foresight {
    let options = ForesightOptions {
        store: store.map(|(folder, limit)| (folder.to_owned(), limit)),
        forgets: false,
        output_tokens: 4.0,
    };
    let prompts = Prompts::of_ids(VOCABULARY as usize);
    Foresight::new(header(), embedding(), prompts, None, options).unwrap()
}

/// A prompt of a topic, 0 or 1.
fn prompt(topic: u32, number: u32) -> Vec<u32> {
    (0..8).map(|at| (number * 3 + at * 2) % 20 * 2 + topic).collect()
}

/// Topic 0 uses experts 0 and 1, topic 1 experts 2 and 3.
fn used(topic: u32, tokens: usize, steps: usize) -> String {
    let experts = [(2 * topic, 0.5), (2 * topic + 1, 0.5)];
    let mut activations = Activations::new(LAYERS, EXPERTS);
    (0..tokens).for_each(|_| activations.count(Phase::Prefill, [&experts[..]; LAYERS].into_iter()));
    (0..steps).for_each(|_| activations.count(Phase::Decode, [&experts[..]; LAYERS].into_iter()));
    activations.to_text().unwrap()
}

fn come(foresight: &mut Foresight, id: u64, tenant: &str, prompt: &[u32]) {
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 5}).to_string();
    foresight.came(Arrival { id, tenant: Tenant::named(tenant), body: body.as_bytes() });
}

fn serve(foresight: &mut Foresight, tenant: &str, topic: u32, true_topic: u32, number: u32) {
    let prompt = prompt(topic, number);
    come(foresight, u64::from(number), tenant, &prompt);
    foresight.told(u64::from(number), &used(true_topic, prompt.len(), 4)).unwrap();
    foresight.left(u64::from(number));
}

/// What a waiting request of `tenant` about `topic` is expected to use.
fn expected(foresight: &mut Foresight, tenant: &str, topic: u32) -> Option<Shares> {
    come(foresight, u64::MAX, tenant, &prompt(topic, 77));
    let mix = foresight.mix().unwrap();
    foresight.left(u64::MAX);
    mix.map(|mix| mix.shares)
}

fn work(shares: &Shares, experts: [usize; 2]) -> f32 {
    let rows = shares.rows().map(|row| row[experts[0]] + row[experts[1]]);
    rows.sum::<f32>() / LAYERS as f32
}

#[test]
fn those_who_wait_are_expected_to_use_what_their_like_have_used() {
    let mut foresight = foresight(None);
    assert_eq!(expected(&mut foresight, "a", 0), None, "nothing is known yet");
    (0..40).for_each(|number| serve(&mut foresight, "a", number % 2, number % 2, number));
    let of = |foresight: &mut Foresight, topic| expected(foresight, "a", topic).unwrap();
    assert!(work(&of(&mut foresight, 0), [0, 1]) > 0.7);
    assert!(work(&of(&mut foresight, 1), [2, 3]) > 0.7);
    // One of each: by their tokens, which are alike.
    come(&mut foresight, 900, "a", &prompt(0, 5));
    come(&mut foresight, 901, "a", &prompt(1, 5));
    let mix = foresight.mix().unwrap().unwrap();
    assert_eq!((mix.requests, mix.tokens), (2.0, 2.0 * (8.0 + 4.0)));
    assert!((work(&mix.shares, [0, 1]) - 0.5).abs() < 0.02);
    foresight.left(900);
    foresight.left(901);
    assert_eq!(foresight.mix().unwrap(), None, "nobody is here");
    let quality = foresight.quality();
    assert_eq!(quality.compared, 39, "of the first one nothing was said");
    assert!(quality.phases.prefill.hot_recall > 0.9, "{quality:?}");
}

#[test]
fn what_was_used_of_late_follows_within_some_requests() {
    let mut foresight = foresight(None);
    (0..100).for_each(|number| serve(&mut foresight, "a", 0, 0, number));
    let mut after = 0;
    while work(&foresight.observed().mix().unwrap().unwrap().shares, [2, 3]) < 0.5 {
        serve(&mut foresight, "a", 1, 1, 1000 + after);
        after += 1;
    }
    assert!((20..=28).contains(&after), "{after} requests");
}

#[test]
fn a_poisoned_record_changes_no_other_tenants_plan() {
    let mut foresight = foresight(None);
    (0..20).for_each(|number| serve(&mut foresight, "good", number % 2, number % 2, number));
    let before = expected(&mut foresight, "good", 0);
    // The other tenant's prompts are the same, and all that is told of them is wrong.
    (0..200).for_each(|number| serve(&mut foresight, "bad", number % 2, 1 - number % 2, 1000 + number));
    assert_eq!(expected(&mut foresight, "good", 0), before);
    assert!(work(&expected(&mut foresight, "bad", 0).unwrap(), [2, 3]) > 0.7, "it has only itself to blame");
    // Counts that claim more than their tokens are refused as they come.
    assert!(foresight.told(1, "2.AQIEAQH/////DwAAAA").is_err());
    assert_eq!(expected(&mut foresight, "good", 0), before);
}

#[test]
fn what_was_learned_survives_and_stays_within_its_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let limit = 16 << 10;
    let mut first = foresight(Some((folder.path(), limit)));
    for number in 0..2000 {
        serve(&mut first, ["a", "b", "c"][number as usize % 3], number % 2, number % 2, number);
    }
    let (remembered, bytes) = first.remembered();
    assert!(remembered > 20 && bytes < limit, "{remembered} requests in {bytes} bytes");
    assert!(std::fs::metadata(folder.path().join("experience")).unwrap().len() <= limit);
    let before = expected(&mut first, "b", 1).unwrap();
    drop(first);
    let mut second = foresight(Some((folder.path(), limit)));
    assert!(second.remembered().0 > 20);
    let after = expected(&mut second, "b", 1).unwrap();
    assert!((work(&before, [2, 3]) - work(&after, [2, 3])).abs() < 0.05);
}

#[test]
fn nothing_of_a_prompts_text_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut foresight = foresight(Some((folder.path(), 1 << 20)));
    let secret: Vec<u32> = vec![2, 4, 6, 8, 10, 12, 14, 16];
    come(&mut foresight, 1, "a", &secret);
    foresight.told(1, &used(0, secret.len(), 0)).unwrap();
    let file = std::fs::read(folder.path().join("experience")).unwrap();
    let ids: Vec<u8> = secret.iter().flat_map(|id| id.to_le_bytes()).collect();
    assert!(!file.windows(8).any(|bytes| ids.windows(8).any(|ids| ids == bytes)));
    // The same tokens in another order leave the same record but for its number.
    let size = file.len();
    come(&mut foresight, 2, "a", &secret.iter().rev().copied().collect::<Vec<_>>());
    foresight.told(2, &used(0, secret.len(), 0)).unwrap();
    let file = std::fs::read(folder.path().join("experience")).unwrap();
    let record = file.len() - size;
    assert_eq!(file[size + 16..], file[size - record + 16..size]);
}

#[test]
fn of_a_prompt_whose_beginning_was_kept_the_rest_is_learned_from() {
    let mut foresight = foresight(None);
    // Half of the prompt, about topic 0, was kept from others; what was computed is about topic 1.
    for number in 0..40 {
        let prompt = [prompt(0, number), prompt(1, number)].concat();
        come(&mut foresight, 1, "a", &prompt);
        foresight.told(1, &used(1, prompt.len() / 2, 4)).unwrap();
    }
    assert_eq!(foresight.remembered().0, 40);
    assert_eq!(foresight.quality().compared, 0, "the whole prompt was predicted, and not the rest");
    assert!(work(&expected(&mut foresight, "a", 1).unwrap(), [2, 3]) > 0.7);
    // A few tokens say nothing.
    come(&mut foresight, 1, "a", &prompt(0, 1));
    foresight.told(1, &used(0, 3, 4)).unwrap();
    assert_eq!(foresight.remembered().0, 40);
}

/// What docs/cost.md says of the largest models: neither layers nor experts are series.
#[test]
fn series_do_not_grow_with_the_model() {
    let header = RecordHeader { layers: (3..61).collect(), experts: 256, ..header() };
    let options = ForesightOptions { output_tokens: 4.0, ..ForesightOptions::default() };
    let prompts = Prompts::of_ids(VOCABULARY as usize);
    let mut foresight = Foresight::new(header, embedding(), prompts, None, options).unwrap();
    let layers = [&[(7, 0.5), (200, 0.5)][..]; 58];
    let mut activations = Activations::new(58, 256);
    (0..8).for_each(|_| activations.count(Phase::Prefill, layers.into_iter()));
    (0..4).for_each(|_| activations.count(Phase::Decode, layers.into_iter()));
    for id in 0..6 {
        come(&mut foresight, id, "t", &prompt(0, id as u32));
        foresight.told(id, &activations.to_text().unwrap()).unwrap();
    }
    let registry = Registry::new();
    let metrics = ForesightMetrics::register(&registry).unwrap().of_model("m");
    metrics.show(&foresight);
    ["wake", "drift", "failed"].into_iter().for_each(|cause| metrics.replanned(cause));
    let page = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    let series: Vec<&str> = page.lines().filter(|line| !line.starts_with('#')).collect();
    let activation: Vec<&&str> =
        series.iter().filter(|line| line.starts_with("remoe_prediction_activation_ratio")).collect();
    assert_eq!(activation.len(), 2 * 2 * LAYER_GROUPS * PARTS, "{page}");
    assert!(series.len() <= 142, "{} series", series.len());
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
                // It is known from the past which two experts are used.
                let first = activation.iter().find(|line| {
                    line.contains("eighth=\"1\"") && labels.iter().all(|label| line.contains(label.as_str()))
                });
                assert!(first.unwrap().rsplit(" ").next().unwrap().parse::<f64>().unwrap() > 0.999, "{page}");
            }
        }
    }
}
