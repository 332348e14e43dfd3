use super::*;
use crate::experience::Experience;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use prometheus::Registry;
use remoe_gateway_core::{Privacy, UsageObserver};
use remoe_model::Checkpoint;
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{Activations, Phase, UsageShares};
use remoe_usage::{HistoryStore, write_model_summary};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Expert usage of the test's requests in the demo model.
const USED: [(u32, f32); 2] = [(3, 0.5), (5, 0.5)];
const UID: &str = "the-demand";

struct TestMain {
    header: RecordHeader,
    address: String,
    asked: Arc<AtomicUsize>,
}

/// A main function of the demo model, as far as primers go.
fn main() -> TestMain {
    let checkpoint = Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/model")).unwrap();
    let config = checkpoint.config();
    let layers = config.moe_layers();
    let header = RecordHeader {
        model: checkpoint.fingerprint().unwrap().to_string(),
        layers: layers.iter().map(|&layer| layer as u32).collect(),
        experts: config.moe(layers[0]).unwrap().experts as u32,
        top_k: 2,
        dtype: "bfloat16".to_owned(),
        tokens: false,
    };
    let mut summary = Vec::new();
    let take = |part: Vec<u8>| {
        summary.extend(part);
        true
    };
    write_model_summary(&checkpoint, &header, take).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, asked) = (listener.local_addr().unwrap().to_string(), Arc::new(AtomicUsize::new(0)));
    let counted = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 1024];
            let read = stream.read(&mut request).unwrap();
            assert!(request[..read].starts_with(b"GET /v1/primer HTTP/1.1\r\n"));
            counted.fetch_add(1, Ordering::SeqCst);
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", summary.len());
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&summary).unwrap();
        }
    });
    TestMain { header, address, asked }
}

fn told(main: &TestMain, phase: DemandPhase, model: &str) -> MoEDemandSpec {
    let uid = "u".to_owned();
    MoEDemandSpec {
        served_name: "demo".to_owned(),
        context_length: 0,
        phase,
        turn: 1,
        since: MicroTime(Timestamp::UNIX_EPOCH),
        wakes: 0,
        wake_told: 0,
        planning: None,
        sleeps: true,
        follows_load: false,
        mains: vec![MainFunction {
            uid,
            pod: "p".to_owned(),
            address: main.address.clone(),
            identity: None,
            room: 1,
        }],
        functions: Vec::new(),
        groups: Vec::new(),
        prediction: Some(PredictionOrder {
            model: model.to_owned(),
            every_seconds: 60,
            counts_only: false,
            output_tokens: 16,
        }),
    }
}

/// One that has the part `0` of `folder`.
fn learner(folder: &Path, mebibytes: u64) -> Arc<UsageFollower> {
    learner_of(&folder.join("0").join(UID), mebibytes)
}

fn learner_of(folder: &Path, mebibytes: u64) -> Arc<UsageFollower> {
    let metrics = PredictionMetrics::register(&Registry::new()).unwrap();
    let means = SharedResources::new((mebibytes << 20, 1 << 20), Duration::from_millis(5), metrics, None);
    UsageFollower::new("ns/demo", Some(folder.to_owned()), means)
}

fn came(learner: &UsageFollower, id: u64, tenant: &str, privacy: Privacy) -> bool {
    UsageObserver::came(&*learner.learner, id, tenant, privacy, &Bytes::from_static(BODY))
}

/// Returns what a main function reports of a request that used these experts.
fn activations(main: &TestMain) -> String {
    let mut activations = Activations::new(main.header.layers.len(), main.header.experts as usize);
    let layers = vec![&USED[..]; main.header.layers.len()];
    (0..100).for_each(|_| activations.count(Phase::Prefill, layers.iter().copied()));
    activations.to_text().unwrap()
}

/// The share of those experts in what is said.
fn used(main: &TestMain, mix: &RequestMix) -> f64 {
    let shares = UsageShares::from_text(&mix.shares, main.header.layers.len(), main.header.experts as usize);
    let rows = shares.unwrap().to_rows();
    rows.iter().map(|row| row[3] + row[5]).sum::<f64>() / rows.len() as f64
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if is() {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} does not come");
}

const BODY: &[u8] = br#"{"prompt": "And the LORD spake unto Moses", "max_tokens": 8}"#;

#[tokio::test]
async fn what_requests_use_is_said_and_survives_the_gateway() {
    let (main, folder) = (main(), tempfile::tempdir().unwrap());
    let first = learner(folder.path(), 128);
    assert!(!came(&first, 1, "", Privacy::None), "nothing is known of the model");
    let (tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
    let keeping = tokio::spawn(first.clone().keep(telling));
    until("a primer", || first.order().is_some()).await;
    assert_eq!(first.mix(DemandPhase::Active, 0).await, None);
    let mut answered = first.learner.answered_usage();
    for id in 1..=6 {
        assert!(came(&first, id, "", Privacy::None));
        first.learner.record_usage(id, &activations(&main));
        first.learner.end_request(id);
    }
    let used = |mix: &RequestMix| used(&main, mix);
    answered.wait_for(|said| said.as_ref().is_some_and(|said| said.usage.requests > 5.5)).await.unwrap();
    let mix = first.mix(DemandPhase::Active, 0).await.unwrap();
    assert_eq!((mix.of, mix.requests, &mix.model), (MixOf::Answered, 6, &main.header.model));
    assert!((540..=600).contains(&mix.tokens) && used(&mix) > 0.95, "{} {}", mix.tokens, used(&mix));
    // A request that runs counts by what it is predicted to use.
    assert!(came(&first, 20, "", Privacy::None));
    let more = first.mix(DemandPhase::Active, 1).await.unwrap();
    assert_eq!((more.of, more.requests), (MixOf::Answered, 7));
    assert!(more.tokens > mix.tokens && used(&more) > 0.9, "{} {}", more.tokens, used(&more));
    first.learner.end_request(20);
    assert_eq!(pause(&tell.borrow()), Some(Duration::from_secs(15)));
    keeping.abort();
    assert!(keeping.await.unwrap_err().is_cancelled());
    drop(first);

    // The next one knows what it knew, without a main function to ask, and predicts the usage of waiting requests.
    let second = learner(folder.path(), 128);
    let (_tell, telling) = watch::channel(told(&main, DemandPhase::Asleep, &main.header.model));
    let _keeping = tokio::spawn(second.clone().keep(telling));
    until("what was kept", || second.order().is_some()).await;
    assert_eq!(main.asked.load(Ordering::SeqCst), 1);
    assert!(came(&second, 7, "", Privacy::None));
    let mix = second.mix(DemandPhase::Asleep, 1).await.unwrap();
    assert_eq!((mix.of, mix.requests), (MixOf::Waiting, 1));
    assert!(used(&mix) > 0.5, "{}", used(&mix));
}

#[tokio::test]
async fn a_model_that_is_another_or_finds_no_room_is_served_without() {
    let (main, folder) = (main(), tempfile::tempdir().unwrap());
    let learner_of = |mebibytes| learner(folder.path(), mebibytes);
    let order = told(&main, DemandPhase::Active, "another");
    let other = learner_of(128);
    let refused = other.begin(order.prediction.as_ref().unwrap(), &order, 0).await;
    assert!(matches!(refused, Err(SummaryError::OtherModel { .. })), "{refused:?}");
    let order = told(&main, DemandPhase::Active, &main.header.model);
    let cramped = learner_of(1);
    let refused = cramped.begin(order.prediction.as_ref().unwrap(), &order, 0).await;
    assert!(matches!(refused, Err(SummaryError::Memory { left: 1, .. })), "{refused:?}");
    assert!(!came(&cramped, 1, "", Privacy::None));
    // It is not asked for again where there is a folder.
    let refused = cramped.begin(order.prediction.as_ref().unwrap(), &order, 1).await;
    assert!(matches!(refused, Err(SummaryError::Memory { .. })), "{refused:?}");
    assert_eq!(main.asked.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn model_without_requests_takes_no_memory() {
    let (main, folder) = (main(), tempfile::tempdir().unwrap());
    let learner = learner(folder.path(), 128);
    let left = || learner.means.memory.available_permits();
    let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
    let _keeping = tokio::spawn(learner.clone().keep(telling));
    until("a primer", || learner.order().is_some()).await;
    assert_eq!((left(), learner.learner.service().unwrap().is_loaded()), (128, false));
    assert!(came(&learner, 1, "t", Privacy::None));
    until("what is known", || learner.learner.service().unwrap().is_loaded()).await;
    assert!(left() < 128);
    learner.learner.record_usage(1, &activations(&main));
    learner.learner.end_request(1);
    assert!(came(&learner, 2, "t", Privacy::None));
    assert!(learner.mix(DemandPhase::Asleep, 1).await.is_some_and(|mix| mix.of == MixOf::Waiting));
}

#[tokio::test]
async fn new_tenant_is_predicted_by_tenants_that_share() {
    let (main, folder) = (main(), tempfile::tempdir().unwrap());
    let learner = learner(folder.path(), 128);
    let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
    let _keeping = tokio::spawn(learner.clone().keep(telling));
    until("a primer", || learner.order().is_some()).await;
    for (privacy, is_known) in [(Privacy::None, false), (Privacy::Shared, true), (Privacy::None, false)] {
        for id in 1..=6 {
            assert!(came(&learner, id, "t", privacy));
            learner.learner.record_usage(id, &activations(&main));
            learner.learner.end_request(id);
        }
        assert!(came(&learner, 7, "new", Privacy::None));
        let said = learner.mix(DemandPhase::Asleep, 1).await.unwrap();
        assert_eq!(said.of == MixOf::Waiting, is_known, "{privacy:?}");
        learner.learner.end_request(7);
    }
}

#[tokio::test]
async fn who_is_told_to_keep_counts_only_forgets() {
    let (main, folder) = (main(), tempfile::tempdir().unwrap());
    let learner = learner(folder.path(), 128);
    let (tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
    let _keeping = tokio::spawn(learner.clone().keep(telling));
    until("a primer", || learner.order().is_some()).await;
    let past = folder.path().join("0").join(UID).join(&main.header.model);
    assert!(past.exists());
    tell.send_modify(|told| told.prediction.as_mut().unwrap().counts_only = true);
    until("the other order", || learner.order().is_some_and(|order| order.counts_only)).await;
    assert!(!past.exists());
}

#[tokio::test]
async fn what_one_gateway_serves_another_one_predicts_by() {
    let (main, folder) = (main(), tempfile::tempdir().unwrap());
    let [one, other] = ["0", "1"].map(|part| learner_of(&folder.path().join(part).join(UID), 128));
    let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
    let _keeping = [&one, &other].map(|learner| tokio::spawn(learner.clone().keep(telling.clone())));
    until("a primer", || one.order().is_some() && other.order().is_some()).await;
    assert!(came(&other, 1, "t", Privacy::None));
    assert_eq!(other.mix(DemandPhase::Asleep, 1).await, None, "it knows nothing");
    other.learner.end_request(1);
    for id in 1..=6 {
        assert!(came(&one, id, "t", Privacy::None));
        one.learner.record_usage(id, &activations(&main));
    }
    let metrics = other.means.metrics.of_model("ns/demo");
    until("what the other one learned", || metrics.shared_requests() == 6).await;
    assert!(came(&other, 2, "t", Privacy::None));
    let mix = other.mix(DemandPhase::Asleep, 1).await.unwrap();
    assert_eq!((mix.of, mix.requests), (MixOf::Waiting, 1));
    assert!(used(&main, &mix) > 0.5, "{}", used(&main, &mix));
    other.learner.end_request(2);
    // It has answered no request: the operator adds up what all gateways report.
    assert_eq!(other.mix(DemandPhase::Active, 0).await, None);
    // Of another tenant nothing is known.
    assert!(came(&other, 3, "u", Privacy::None));
    assert_eq!(other.mix(DemandPhase::Asleep, 1).await, None);
}

#[tokio::test]
async fn opted_out_tenant_is_erased_from_ended_gateway_records() {
    let (main, folder) = (main(), tempfile::tempdir().unwrap());
    let file = {
        let ended = Experience::take(folder.path()).unwrap();
        let learner = learner_of(&ended.of(UID), 128);
        let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
        let keeping = tokio::spawn(learner.clone().keep(telling));
        until("a primer", || learner.order().is_some()).await;
        for (id, tenant) in [(1, "t"), (2, "u"), (3, "t")] {
            assert!(came(&learner, id, tenant, Privacy::None));
            learner.learner.record_usage(id, &activations(&main));
        }
        let file = HistoryStore::file_in(&ended.of(UID).join(&main.header.model));
        let mut answered = learner.learner.answered_usage();
        answered.wait_for(|said| said.as_ref().is_some_and(|said| said.usage.requests > 2.5)).await.unwrap();
        keeping.abort();
        let _aborted = keeping.await;
        file
    };
    let bytes = || std::fs::metadata(&file).unwrap().len();
    let before = bytes();
    // Another gateway has its part, and a further one hears of the tenant.
    let parts = [(); 2].map(|()| Experience::take(folder.path()).unwrap());
    let [inherited, other] = parts;
    assert!(file.starts_with(inherited.of(UID)));
    let learner = learner_of(&other.of(UID), 128);
    let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
    let _keeping = tokio::spawn(learner.clone().keep(telling));
    until("a primer", || learner.order().is_some()).await;
    assert!(came(&learner, 1, "t", Privacy::CountsOnly));
    assert_eq!(learner.mix(DemandPhase::Asleep, 1).await, None, "and it is not read again");
    // A gateway that has a part removes the tenant from it itself; once no gateway has the part, the others do.
    assert_eq!(bytes(), before);
    drop(inherited);
    until("the file without the tenant", || bytes() < before).await;
    let own = HistoryStore::file_in(&other.of(UID).join(&main.header.model));
    assert_eq!(
        bytes(),
        std::fs::metadata(own).unwrap().len(),
        "as in its own part: the other tenant's is there"
    );
    learner.learner.end_request(1);
    assert!(came(&learner, 2, "u", Privacy::None));
    assert!(learner.mix(DemandPhase::Asleep, 1).await.is_some_and(|mix| mix.of == MixOf::Waiting));
}

#[tokio::test]
async fn of_a_tenant_that_leaves_itself_out_nothing_is_said() {
    let (main, folder) = (main(), tempfile::tempdir().unwrap());
    let learner = learner(folder.path(), 128);
    let (_tell, telling) = watch::channel(told(&main, DemandPhase::Active, &main.header.model));
    let _keeping = tokio::spawn(learner.clone().keep(telling));
    until("a primer", || learner.order().is_some()).await;
    let mut answered = learner.learner.answered_usage();
    assert!(came(&learner, 1, "t", Privacy::None));
    learner.learner.record_usage(1, &activations(&main));
    answered.wait_for(Option::is_some).await.unwrap();
    assert!(came(&learner, 2, "t", Privacy::None));
    assert!(learner.mix(DemandPhase::Asleep, 1).await.is_some_and(|mix| mix.of == MixOf::Waiting));
    learner.learner.end_request(2);
    // It waits, and the report has only what is known without it: nothing of waiting requests.
    assert!(!came(&learner, 3, "t", Privacy::LeftOut));
    let mix = learner.mix(DemandPhase::Asleep, 1).await.unwrap();
    assert_eq!((mix.of, mix.requests), (MixOf::Answered, 1));
    // Its past is gone.
    assert!(came(&learner, 4, "t", Privacy::CountsOnly));
    let mix = learner.mix(DemandPhase::Asleep, 1).await.unwrap();
    assert_eq!(mix.of, MixOf::Answered, "nothing is known of its like");
}
