//! Synthetic prompts whose experts depend on their tokens and their topic.

#![allow(dead_code)]

use remoe_predictor::Embedding;
use remoe_predictor::record::{ActivationRecord, RecordHeader};

pub(crate) const LAYERS: usize = 3;
pub(crate) const EXPERTS: usize = 8;
pub(crate) const TOP_K: usize = 2;
pub(crate) const HIDDEN: usize = 24;
pub(crate) const VOCABULARY: usize = 120;
pub(crate) const TOPICS: usize = 4;

/// Pseudo-random numbers, reproducible from a seed.
pub(crate) struct NumberStream(pub(crate) u64);

impl NumberStream {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) ^ (self.0 >> 11)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Returns a number from about -1 to 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() % 20_001) as f32 / 10_000.0 - 1.0
    }
}

pub(crate) fn header() -> RecordHeader {
    RecordHeader {
        model: "ab".repeat(32),
        layers: (0..LAYERS as u32).collect(),
        experts: EXPERTS as u32,
        top_k: TOP_K as u32,
        dtype: "float32".to_owned(),
        tokens: false,
    }
}

/// Creates an embedding in which tokens of a topic are near each other.
pub(crate) fn embedding() -> Embedding {
    let mut stream = NumberStream(7);
    let centres: Vec<f32> = (0..TOPICS * HIDDEN).map(|_| stream.float()).collect();
    let rows: Vec<f32> = (0..VOCABULARY)
        .flat_map(|id| {
            let topic = id % TOPICS;
            (0..HIDDEN).map(|h| centres[topic * HIDDEN + h] + 0.7 * stream.float()).collect::<Vec<_>>()
        })
        .collect();
    Embedding::from_rows(HIDDEN, &rows).unwrap()
}

/// Returns the experts of a token: its own, and that of its topic.
fn experts_of(layer: usize, id: u32, topic: usize) -> [usize; 2] {
    let own = (id as usize * 7 + layer * 3) % EXPERTS;
    let of_topic = (topic * 2 + layer) % EXPERTS;
    [own, if of_topic == own { (own + 1) % EXPERTS } else { of_topic }]
}

/// Creates a record of a prompt about one topic with a few other tokens.
pub(crate) fn record(stream: &mut NumberStream) -> ActivationRecord {
    let topic = stream.below(TOPICS);
    let length = 5 + stream.below(30);
    let token = |stream: &mut NumberStream| {
        let id = stream.below(VOCABULARY);
        if stream.below(4) == 0 { id } else { id - id % TOPICS + topic }
    };
    let prompt: Vec<u32> = (0..length).map(|_| token(stream) as u32).collect();
    of_prompt(prompt, topic)
}

pub(crate) fn of_prompt(prompt: Vec<u32>, topic: usize) -> ActivationRecord {
    let mut prefill = vec![0; LAYERS * EXPERTS];
    let mut experts = vec![0_u16; LAYERS * prompt.len() * TOP_K];
    for layer in 0..LAYERS {
        for (position, &id) in prompt.iter().enumerate() {
            let mut chosen = experts_of(layer, id, topic);
            chosen.sort_unstable();
            for (rank, expert) in chosen.into_iter().enumerate() {
                prefill[layer * EXPERTS + expert] += 1;
                experts[(layer * prompt.len() + position) * TOP_K + rank] = expert as u16;
            }
        }
    }
    ActivationRecord { prompt, prefill, decode: vec![0; LAYERS * EXPERTS], steps: 0, experts: Some(experts) }
}

pub(crate) fn records(count: usize, seed: u64) -> Vec<ActivationRecord> {
    let mut stream = NumberStream(seed);
    (0..count).map(|_| record(&mut stream)).collect()
}

/// Creates records of which two in three have decode steps, with shifted experts.
pub(crate) fn decoded(count: usize, seed: u64) -> Vec<ActivationRecord> {
    let mut records = records(count, seed);
    for record in records.iter_mut().enumerate().filter(|(n, _)| n % 3 != 0).map(|(_, record)| record) {
        record.decode = decode_of(&record.prefill);
        record.steps = record.prompt.len() as u32;
        record.experts = None;
    }
    records
}

/// Returns the counts of the decode steps in [`decoded`] for the counts of a prefill.
pub(crate) fn decode_of(prefill: &[u32]) -> Vec<u32> {
    let source = |index: usize| index - index % EXPERTS + (index + EXPERTS - 3) % EXPERTS;
    (0..prefill.len()).map(|index| prefill[source(index)]).collect()
}
