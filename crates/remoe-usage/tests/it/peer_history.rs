//! Gateways learn from each other's files: each request once, despite invalid files.

use crate::model;

use remoe_predictor::record::RecordHeader;
use remoe_predictor::{Activations, Embedding, Phase, UsageSample, UsageShares};
use remoe_usage::{
    HistoryStore, HistoryUpdate, PeerGateways, PeerHistoryReader, PredictionService, PredictorOptions,
    PromptReader, RequestArrival, Retention, StoredRequest, Tenant, UsagePredictor,
};
use std::collections::HashSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Duration;

const LAYERS: usize = 2;
const EXPERTS: usize = 4;
const VOCABULARY: usize = 40;
const LIMIT: u64 = 1 << 20;

fn header() -> RecordHeader {
    model::header(LAYERS, EXPERTS)
}

fn gateway(folder: &Path, limit: u64) -> UsagePredictor {
    let rows: Vec<f32> =
        (0..2 * VOCABULARY).map(|at| if at % 4 < 2 { 1.0 } else { at as f32 / 80.0 }).collect();
    let embedding = Embedding::from_rows(2, &rows).unwrap();
    let options = PredictorOptions {
        store: Some((folder.to_owned(), limit)),
        is_history_disabled: false,
        output_tokens: 4.0,
    };
    UsagePredictor::new(header(), embedding, PromptReader::for_ids(VOCABULARY), None, options).unwrap()
}

fn body() -> String {
    serde_json::json!({"prompt": [1, 2, 3, 4, 5, 6, 7, 8], "max_tokens": 5}).to_string()
}

fn used() -> String {
    let mut activations = Activations::new(LAYERS, EXPERTS);
    let experts = [(2, 0.5), (3, 0.5)];
    (0..8).for_each(|_| activations.count(Phase::Prefill, [&experts[..]; LAYERS].into_iter()));
    activations.to_text().unwrap()
}

fn come(gateway: &mut UsagePredictor, id: u64, retention: Retention) {
    gateway.begin_request(RequestArrival {
        id,
        tenant: Tenant::named("a"),
        retention,
        body: body().as_bytes(),
    });
}

fn serve(gateway: &mut UsagePredictor, count: u64) {
    for id in 0..count {
        come(gateway, id, Retention::Records);
        gateway.record_usage(id, &used()).unwrap();
    }
}

/// Reads new requests once and returns the number that `gateway` learned.
fn look(gateway: &mut UsagePredictor, exchange: &mut PeerHistoryReader, files: &[PathBuf]) -> usize {
    let mut learned = 0;
    exchange.read_new(files, |records| {
        learned += gateway.learn_shared(&records);
        true
    });
    learned
}

#[test]
fn gateway_learns_requests_of_another_gateway() {
    let root = tempfile::tempdir().unwrap();
    let folders = ["0", "1"].map(|part| root.path().join(part));
    let [mut one, mut other] = [&folders[0], &folders[1]].map(|folder| gateway(folder, LIMIT));
    let files = [HistoryStore::file_in(&folders[0]), HistoryStore::file_in(&root.path().join("absent"))];
    let mut exchange = other.peer_history_reader().unwrap();
    assert_eq!(look(&mut other, &mut exchange, &files), 0);
    serve(&mut one, 40);
    let expected = |gateway: &mut UsagePredictor| {
        come(gateway, 1000, Retention::Records);
        let mix = gateway.predict_joint_usage().unwrap();
        gateway.end_request(1000);
        mix.map(|mix| mix.shares.values().to_vec())
    };
    assert_eq!(expected(&mut other), None);
    assert_eq!(look(&mut other, &mut exchange, &files), 40);
    let (theirs, own) = (expected(&mut other).unwrap(), expected(&mut one).unwrap());
    // The file stores shares in 65535ths.
    assert!(theirs.iter().zip(&own).all(|(a, b)| (a - b).abs() < 1e-3), "{theirs:?} {own:?}");
    assert_eq!(other.quality().shared, 40);
    assert_eq!(look(&mut other, &mut exchange, &files), 0, "nothing is learned twice");
    serve(&mut one, 3);
    assert_eq!(look(&mut other, &mut exchange, &files), 3, "what came since is");
    // A gateway that restarts, and one that starts after the other has ended.
    drop((one, other));
    let mut other = gateway(&folders[1], LIMIT);
    assert_eq!(other.history_size().requests, 0, "each stores what it has served itself");
    let mut exchange = other.peer_history_reader().unwrap();
    assert_eq!(look(&mut other, &mut exchange, &files), 43);
    // A copy of the same file, as gateways inherit it.
    std::fs::create_dir(root.path().join("2")).unwrap();
    let copy = HistoryStore::file_in(&root.path().join("2"));
    std::fs::copy(&files[0], &copy).unwrap();
    assert_eq!(look(&mut other, &mut exchange, &[files[0].clone(), copy]), 0);
    // An opted-out tenant is not learned from, whichever gateway served it.
    come(&mut other, 1, Retention::Counts);
    assert_eq!(other.history_size().requests, 0);
    let mut reopened = other.peer_history_reader().unwrap();
    assert_eq!(look(&mut other, &mut reopened, &files), 0);
}

#[test]
fn rewritten_file_is_resumed_without_learning_twice() {
    let root = tempfile::tempdir().unwrap();
    let folders = ["0", "1"].map(|part| root.path().join(part));
    let [mut one, mut other] = [&folders[0], &folders[1]].map(|folder| gateway(folder, 4096));
    let files = [HistoryStore::file_in(&folders[0])];
    // Other tenants take most of its memory, so it evicts early.
    for (id, name) in ["b", "c", "d"].into_iter().enumerate() {
        let (id, tenant) = (id as u64, Tenant::named(name));
        other.begin_request(RequestArrival {
            id,
            tenant,
            retention: Retention::Records,
            body: body().as_bytes(),
        });
        other.record_usage(id, &used()).unwrap();
    }
    let mut exchange = other.peer_history_reader().unwrap();
    let mut learned = 0;
    for _ in 0..60 {
        serve(&mut one, 5);
        learned += look(&mut other, &mut exchange, &files);
    }
    assert!(std::fs::metadata(&files[0]).unwrap().len() <= 4096, "it has room for some sixty");
    // Redundant requests were removed when the file was rewritten and cannot be read any more. The other gateway does
    // not learn evicted requests again.
    assert!((150..=300).contains(&learned), "{learned}");
    assert!(other.history_size().requests < 60);
}

#[test]
fn each_pass_over_peer_files_is_bounded() {
    let root = tempfile::tempdir().unwrap();
    let folders = ["0", "1"].map(|part| root.path().join(part));
    let [mut one, mut other] = [&folders[0], &folders[1]].map(|folder| gateway(folder, LIMIT));
    let files = [HistoryStore::file_in(&folders[0])];
    serve(&mut one, 2500);
    let mut exchange = other.peer_history_reader().unwrap();
    let mut pieces = Vec::new();
    let mut looks = Vec::new();
    for _ in 0..4 {
        let mut taken = 0;
        exchange.read_new(&files, |records| {
            pieces.push(records.len());
            taken += other.learn_shared(&records);
            true
        });
        looks.push(taken);
    }
    assert_eq!(looks.iter().sum::<usize>(), 2500);
    assert!(looks.iter().all(|taken| *taken <= 1024 + 64) && looks[3] == 0, "{looks:?}");
    assert!(pieces.iter().all(|piece| *piece <= 64), "{pieces:?}");
    // Reading ends when the callback returns false.
    let (mut told, mut again) = (0, other.peer_history_reader().unwrap());
    again.read_new(&files, |_| {
        told += 1;
        false
    });
    assert_eq!(told, 1);
}

#[test]
fn invalid_history_files_are_skipped() {
    let root = tempfile::tempdir().unwrap();
    let part = |name: &str| {
        let folder = root.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        HistoryStore::file_in(&folder)
    };
    let mut honest = gateway(&root.path().join("honest"), LIMIT);
    serve(&mut honest, 10);
    let its = HistoryStore::file_in(&root.path().join("honest"));
    let whole = std::fs::read(&its).unwrap();
    let [linked, pipe, folder, garbage, zeros, long] =
        ["linked", "pipe", "folder", "garbage", "zeros", "long"].map(part);
    symlink(&its, &linked).unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(&garbage, [0xff; 1000]).unwrap();
    std::fs::write(&zeros, [0; 4000]).unwrap();
    // A sparse file beyond the size limit.
    std::fs::File::create(&long).unwrap().set_len(1 << 40).unwrap();
    let other_model = part("other");
    let header = RecordHeader { model: "cd".repeat(32), ..header() };
    HistoryStore::open(other_model.parent().unwrap(), &header, 2, LIMIT, |_| ()).unwrap();
    // A file with the largest possible number and with impossible requests.
    let hostile = part("hostile");
    let mut store = HistoryStore::open(hostile.parent().unwrap(), &self::header(), 2, LIMIT, |_| ()).unwrap();
    let mut tell = |number: u64, vector: [f32; 2]| {
        let usage = UsageSample {
            vector: vector.to_vec(),
            prefill: UsageShares::uniform(LAYERS, EXPERTS),
            decode: None,
        };
        store.append(&StoredRequest { number, tenant: Tenant::named("a"), usage }, HashSet::new).unwrap();
    };
    tell(u64::MAX, [1.0, 0.0]);
    tell(1, [60_000.0, 0.0]);
    tell(2, [f32::NAN, 1.0]);
    tell(3, [1.0, 0.0]);
    tell(2, [1.0, 0.0]);

    let mut other = gateway(&root.path().join("other gateway"), LIMIT);
    let mut exchange = other.peer_history_reader().unwrap();
    let files = [linked, pipe, folder, garbage, zeros, long, other_model, hostile, its.clone()];
    assert_eq!(look(&mut other, &mut exchange, &files), 11, "ten of the honest one, and one that could be");
    assert_eq!(look(&mut other, &mut exchange, &files), 0);

    // A damaged or incomplete record delays the others by one pass at most.
    let mut damaged = whole.clone();
    damaged[head(&whole) + 20] ^= 1;
    let copy = part("copy");
    std::fs::write(&copy, &damaged[..damaged.len() - 5]).unwrap();
    let mut fresh = gateway(&root.path().join("fresh"), LIMIT);
    let mut exchange = fresh.peer_history_reader().unwrap();
    let learned: Vec<usize> =
        (0..3).map(|_| look(&mut fresh, &mut exchange, std::slice::from_ref(&copy))).collect();
    assert_eq!(learned, [0, 8, 0]);
    std::fs::write(&copy, &damaged).unwrap();
    assert_eq!(look(&mut fresh, &mut exchange, &[copy]), 1);
}

/// Returns the size of the first frame, in bytes.
fn head(file: &[u8]) -> usize {
    8 + u32::from_le_bytes(file[..4].try_into().unwrap()) as usize
}

#[test]
fn opted_out_tenant_is_erased_from_file_of_ended_gateway() {
    let root = tempfile::tempdir().unwrap();
    let [own, ended, linked, elsewhere] = ["0", "1", "2", "3"].map(|part| root.path().join(part));
    let of_tenants = |folder: &Path| -> Vec<Tenant> {
        let mut read = Vec::new();
        HistoryStore::open(folder, &header(), 2, LIMIT, |stored| read.push(stored.tenant)).unwrap();
        read
    };
    let (a, b) = (Tenant::named("a"), Tenant::named("b"));
    {
        let mut gateway = gateway(&ended, LIMIT);
        serve(&mut gateway, 3);
        gateway.begin_request(RequestArrival {
            id: 9,
            tenant: b,
            retention: Retention::Records,
            body: body().as_bytes(),
        });
        gateway.record_usage(9, &used()).unwrap();
    }
    std::fs::create_dir_all(&linked).unwrap();
    symlink(HistoryStore::file_in(&ended), HistoryStore::file_in(&linked)).unwrap();
    let other = RecordHeader { model: "cd".repeat(32), ..header() };
    HistoryStore::open(&elsewhere, &other, 2, LIMIT, |_| ()).unwrap();
    let others = std::fs::read(HistoryStore::file_in(&elsewhere)).unwrap();

    let mut gateway = gateway(&own, LIMIT);
    let mut exchange = gateway.peer_history_reader().unwrap();
    let rid = |exchange: &mut PeerHistoryReader| {
        for folder in [&linked, &elsewhere, &ended, &root.path().join("none")] {
            exchange.erase_opted_out(&HistoryStore::file_in(folder)).unwrap();
        }
    };
    rid(&mut exchange);
    assert_eq!(of_tenants(&ended), [a, a, a, b], "no tenant has opted out");
    come(&mut gateway, 1, Retention::Counts);
    rid(&mut exchange);
    assert_eq!(of_tenants(&ended), [b]);
    // Requests that another gateway has added since are erased as well.
    serve(&mut self::gateway(&ended, LIMIT), 2);
    rid(&mut exchange);
    assert_eq!(of_tenants(&ended), [b]);
    assert!(std::fs::symlink_metadata(HistoryStore::file_in(&linked)).unwrap().is_symlink());
    assert_eq!(std::fs::read(HistoryStore::file_in(&elsewhere)).unwrap(), others);
    assert!(!root.path().join("none").exists());
    // A tenant that opts in again keeps its requests.
    come(&mut gateway, 2, Retention::Records);
    serve(&mut self::gateway(&ended, LIMIT), 2);
    rid(&mut exchange);
    assert_eq!(of_tenants(&ended), [b, a, a]);
}

#[test]
fn service_learns_from_other_gateways() {
    let root = tempfile::tempdir().unwrap();
    let folders = ["0", "1"].map(|part| root.path().join(part));
    let mut one = gateway(&folders[0], LIMIT);
    let file = HistoryStore::file_in(&folders[0]);
    let peers = PeerGateways {
        poll_interval: Duration::from_millis(5),
        files: Box::new(move || vec![file.clone()]),
        for_each_ended: Box::new(|_| ()),
    };
    let (tell, told) = channel();
    let watch = PredictionService::start(gateway(&folders[1], LIMIT), Some(peers), move |predictor, news| {
        tell.send((news, predictor.history_size().requests)).unwrap();
    })
    .unwrap();
    serve(&mut one, 30);
    let long = Duration::from_secs(60);
    while told.recv_timeout(long).unwrap() != (HistoryUpdate::Shared, 30) {}
    assert!(watch.begin_request(1, "a", Retention::Records, body().as_bytes()));
    let mix = watch.predict_joint_usage(long).unwrap();
    assert!(mix.shares.rows().all(|row| row[2] + row[3] > 0.7), "{mix:?}");
    // Both threads end with the service.
    drop(watch);
    assert!(
        told.recv_timeout(long).is_err_and(|error| error == std::sync::mpsc::RecvTimeoutError::Disconnected)
    );
}
