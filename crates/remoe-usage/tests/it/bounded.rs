//! The training history is bounded on disk and in memory for any number of requests.
//!
//! `REMOE_STORE_RECORDS` is the number of requests; `make nightly` uses ten million.

use crate::model;

use remoe_predictor::{Activations, Embedding, Phase};
use remoe_usage::{
    HistorySize, PredictorOptions, PromptReader, RequestArrival, Retention, Tenant, UsagePredictor,
};
use std::path::Path;

const LAYERS: usize = 2;
const EXPERTS: usize = 4;
const VOCABULARY: u64 = 1000;
const LIMIT: u64 = 64 << 10;
/// Allowed growth of the process's memory once the training history is at its limit: allocators keep some.
const SLACK: u64 = 16 << 20;

fn predictor(folder: &Path) -> UsagePredictor {
    let header = model::header(LAYERS, EXPERTS);
    let rows: Vec<f32> =
        (0..4 * VOCABULARY).map(|at| (at * 2_654_435_761 % 1009) as f32 / 1009.0 - 0.5).collect();
    let options = PredictorOptions {
        store: Some((folder.to_owned(), LIMIT)),
        is_history_disabled: false,
        output_tokens: 4.0,
    };
    let embedding = Embedding::from_rows(4, &rows).unwrap();
    UsagePredictor::new(header, embedding, PromptReader::for_ids(VOCABULARY as usize), None, options).unwrap()
}

/// Returns the resident memory of this process, in bytes.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    4096 * pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
}

#[test]
fn history_is_bounded_for_any_number_of_requests() {
    let records: u64 = std::env::var("REMOE_STORE_RECORDS").map_or(30_000, |number| number.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut predictor = predictor(folder.path());
    // The number of a request decides its experts and its tenant.
    let told: Vec<String> = (0..EXPERTS as u32)
        .map(|expert| {
            let experts = [(expert, 0.5), ((expert + 1) % EXPERTS as u32, 0.5)];
            let mut activations = Activations::new(LAYERS, EXPERTS);
            (0..8).for_each(|_| activations.count(Phase::Prefill, [&experts[..]; LAYERS].into_iter()));
            activations.count(Phase::Decode, [&experts[..]; LAYERS].into_iter());
            activations.to_text().unwrap()
        })
        .collect();
    let tenants: Vec<Tenant> = (0..40).map(|number| Tenant::named(&format!("tenant {number}"))).collect();
    let (mut settled, mut most) = (0, (0, 0));
    for number in 0..records {
        let ids: Vec<u64> = (0..8).map(|at| (number * 7919 + at * 104_729) % VOCABULARY).collect();
        let body = format!("{{\"prompt\": {ids:?}}}");
        let tenant = tenants[(number % 40) as usize];
        predictor.begin_request(RequestArrival {
            id: number,
            tenant,
            retention: Retention::Records,
            body: body.as_bytes(),
        });
        predictor.record_usage(number, &told[(number % 4) as usize]).unwrap();
        let HistorySize { requests, bytes } = predictor.history_size();
        most = (most.0.max(requests), most.1.max(bytes));
        if number == records / 10 {
            settled = resident();
        }
        if number % 1024 == 0 {
            let files = std::fs::read_dir(folder.path()).unwrap();
            let on_disk: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
            assert!(on_disk <= LIMIT, "{on_disk} bytes after {number} requests");
        }
    }
    assert!(most.0 > 100 && most.1 <= LIMIT, "{most:?}");
    let grown = resident().saturating_sub(settled);
    assert!(grown < SLACK, "{grown} bytes more than after {} requests", records / 10);
    eprintln!("{records} requests: at most {} remembered in {} bytes, {grown} bytes more", most.0, most.1);
    // The history is restored.
    let before = predictor.history_size().requests;
    drop(predictor);
    assert!(self::predictor(folder.path()).history_size().requests >= before / 2);
}
