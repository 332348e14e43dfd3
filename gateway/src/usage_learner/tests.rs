use super::*;
use crate::history_folder::HistoryFolder;
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

/// Expert usage of the test's requests: experts with their shares.
const USED_EXPERTS: [(u32, f32); 2] = [(3, 0.5), (5, 0.5)];
const UID: &str = "the-demand";

struct TestMainFunction {
    header: RecordHeader,
    address: String,
    /// Number of requests for the summary.
    fetches: Arc<AtomicUsize>,
}

/// Starts a main function of the demo model that only serves its model summary.
fn start_main_function() -> TestMainFunction {
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
    let (address, fetches) = (listener.local_addr().unwrap().to_string(), Arc::new(AtomicUsize::new(0)));
    let counted = fetches.clone();
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
    TestMainFunction { header, address, fetches }
}

fn demand(main: &TestMainFunction, phase: DemandPhase, model: &str) -> MoEDemandSpec {
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

/// Makes the learner of a gateway that has the part `0` of `folder`.
fn learner(folder: &Path, mebibytes: u64) -> Arc<UsageFollower> {
    learner_of(&folder.join("0").join(UID), mebibytes)
}

/// Makes a learner whose deployment folder is `folder`.
fn learner_of(folder: &Path, mebibytes: u64) -> Arc<UsageFollower> {
    let metrics = PredictionMetrics::register(&Registry::new()).unwrap();
    let resources = SharedResources::new((mebibytes << 20, 1 << 20), Duration::from_millis(5), metrics, None);
    UsageFollower::new("ns/demo", Some(folder.to_owned()), resources)
}

fn start_request(learner: &UsageFollower, id: u64, tenant: &str, privacy: Privacy) -> bool {
    UsageObserver::request_started(&*learner.learner, id, tenant, privacy, &Bytes::from_static(BODY))
}

/// Returns what a main function reports of a request that used these experts.
fn activations(main: &TestMainFunction) -> String {
    let mut activations = Activations::new(main.header.layers.len(), main.header.experts as usize);
    let layers = vec![&USED_EXPERTS[..]; main.header.layers.len()];
    (0..100).for_each(|_| activations.count(Phase::Prefill, layers.iter().copied()));
    activations.to_text().unwrap()
}

/// Returns the share of the used experts in `mix`, averaged over layers.
fn used_share(main: &TestMainFunction, mix: &RequestMix) -> f64 {
    let shares = UsageShares::from_text(&mix.shares, main.header.layers.len(), main.header.experts as usize);
    let rows = shares.unwrap().to_rows();
    rows.iter().map(|row| row[3] + row[5]).sum::<f64>() / rows.len() as f64
}

/// Waits until `is` returns true.
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
async fn usage_is_reported_and_survives_a_restart() {
    let (main, folder) = (start_main_function(), tempfile::tempdir().unwrap());
    let first = learner(folder.path(), 128);
    assert!(!start_request(&first, 1, "", Privacy::None), "there is no model summary yet");
    let (sender, demands) = watch::channel(demand(&main, DemandPhase::Active, &main.header.model));
    let task = tokio::spawn(first.clone().follow_orders(demands));
    until("a model summary", || first.order().is_some()).await;
    assert_eq!(first.mix(DemandPhase::Active, 0).await, None);
    let mut answered = first.learner.answered_usage();
    for id in 1..=6 {
        assert!(start_request(&first, id, "", Privacy::None));
        first.learner.record_usage(id, &activations(&main));
        first.learner.end_request(id);
    }
    let used_share = |mix: &RequestMix| used_share(&main, mix);
    answered
        .wait_for(|report| report.as_ref().is_some_and(|report| report.usage.requests > 5.5))
        .await
        .unwrap();
    let mix = first.mix(DemandPhase::Active, 0).await.unwrap();
    assert_eq!((mix.of, mix.requests, &mix.model), (MixOf::Answered, 6, &main.header.model));
    assert!(
        (540..=600).contains(&mix.tokens) && used_share(&mix) > 0.95,
        "{} {}",
        mix.tokens,
        used_share(&mix)
    );
    // A running request counts with its predicted usage.
    assert!(start_request(&first, 20, "", Privacy::None));
    let more = first.mix(DemandPhase::Active, 1).await.unwrap();
    assert_eq!((more.of, more.requests), (MixOf::Answered, 7));
    assert!(more.tokens > mix.tokens && used_share(&more) > 0.9, "{} {}", more.tokens, used_share(&more));
    first.learner.end_request(20);
    assert_eq!(report_interval(&sender.borrow()), Some(Duration::from_secs(15)));
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    drop(first);

    // The next gateway uses the cached summary without asking a main function, and predicts the usage of waiting
    // requests.
    let second = learner(folder.path(), 128);
    let (_sender, demands) = watch::channel(demand(&main, DemandPhase::Asleep, &main.header.model));
    let _task = tokio::spawn(second.clone().follow_orders(demands));
    until("the cached summary", || second.order().is_some()).await;
    assert_eq!(main.fetches.load(Ordering::SeqCst), 1);
    assert!(start_request(&second, 7, "", Privacy::None));
    let mix = second.mix(DemandPhase::Asleep, 1).await.unwrap();
    assert_eq!((mix.of, mix.requests), (MixOf::Waiting, 1));
    assert!(used_share(&mix) > 0.5, "{}", used_share(&mix));
}

#[tokio::test]
async fn wrong_model_or_lack_of_memory_disables_prediction() {
    let (main, folder) = (start_main_function(), tempfile::tempdir().unwrap());
    let learner_of = |mebibytes| learner(folder.path(), mebibytes);
    let order = demand(&main, DemandPhase::Active, "another");
    let other = learner_of(128);
    let refused = other.start(order.prediction.as_ref().unwrap(), &order, 0).await;
    assert!(matches!(refused, Err(SummaryError::OtherModel { .. })), "{refused:?}");
    let order = demand(&main, DemandPhase::Active, &main.header.model);
    let cramped = learner_of(1);
    let refused = cramped.start(order.prediction.as_ref().unwrap(), &order, 0).await;
    assert!(matches!(refused, Err(SummaryError::Memory { left: 1, .. })), "{refused:?}");
    assert!(!start_request(&cramped, 1, "", Privacy::None));
    // With a folder, the summary is not fetched again.
    let refused = cramped.start(order.prediction.as_ref().unwrap(), &order, 1).await;
    assert!(matches!(refused, Err(SummaryError::Memory { .. })), "{refused:?}");
    assert_eq!(main.fetches.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn model_without_requests_takes_no_memory() {
    let (main, folder) = (start_main_function(), tempfile::tempdir().unwrap());
    let learner = learner(folder.path(), 128);
    let free_memory = || learner.resources.memory.available_permits();
    let (_sender, demands) = watch::channel(demand(&main, DemandPhase::Active, &main.header.model));
    let _task = tokio::spawn(learner.clone().follow_orders(demands));
    until("a model summary", || learner.order().is_some()).await;
    assert_eq!((free_memory(), learner.learner.service().unwrap().is_loaded()), (128, false));
    assert!(start_request(&learner, 1, "t", Privacy::None));
    until("the predictor", || learner.learner.service().unwrap().is_loaded()).await;
    assert!(free_memory() < 128);
    learner.learner.record_usage(1, &activations(&main));
    learner.learner.end_request(1);
    assert!(start_request(&learner, 2, "t", Privacy::None));
    assert!(learner.mix(DemandPhase::Asleep, 1).await.is_some_and(|mix| mix.of == MixOf::Waiting));
}

#[tokio::test]
async fn new_tenant_is_predicted_by_tenants_that_share() {
    let (main, folder) = (start_main_function(), tempfile::tempdir().unwrap());
    let learner = learner(folder.path(), 128);
    let (_sender, demands) = watch::channel(demand(&main, DemandPhase::Active, &main.header.model));
    let _task = tokio::spawn(learner.clone().follow_orders(demands));
    until("a model summary", || learner.order().is_some()).await;
    for (privacy, is_known) in [(Privacy::None, false), (Privacy::Shared, true), (Privacy::None, false)] {
        for id in 1..=6 {
            assert!(start_request(&learner, id, "t", privacy));
            learner.learner.record_usage(id, &activations(&main));
            learner.learner.end_request(id);
        }
        assert!(start_request(&learner, 7, "new", Privacy::None));
        let mix = learner.mix(DemandPhase::Asleep, 1).await.unwrap();
        assert_eq!(mix.of == MixOf::Waiting, is_known, "{privacy:?}");
        learner.learner.end_request(7);
    }
}

#[tokio::test]
async fn order_to_keep_counts_only_deletes_the_history() {
    let (main, folder) = (start_main_function(), tempfile::tempdir().unwrap());
    let learner = learner(folder.path(), 128);
    let (sender, demands) = watch::channel(demand(&main, DemandPhase::Active, &main.header.model));
    let _task = tokio::spawn(learner.clone().follow_orders(demands));
    until("a model summary", || learner.order().is_some()).await;
    let history = folder.path().join("0").join(UID).join(&main.header.model);
    assert!(history.exists());
    sender.send_modify(|demand| demand.prediction.as_mut().unwrap().counts_only = true);
    until("the other order", || learner.order().is_some_and(|order| order.counts_only)).await;
    assert!(!history.exists());
}

#[tokio::test]
async fn gateway_predicts_by_usage_that_another_one_served() {
    let (main, folder) = (start_main_function(), tempfile::tempdir().unwrap());
    let [one, other] = ["0", "1"].map(|part| learner_of(&folder.path().join(part).join(UID), 128));
    let (_sender, demands) = watch::channel(demand(&main, DemandPhase::Active, &main.header.model));
    let _task = [&one, &other].map(|learner| tokio::spawn(learner.clone().follow_orders(demands.clone())));
    until("a model summary", || one.order().is_some() && other.order().is_some()).await;
    assert!(start_request(&other, 1, "t", Privacy::None));
    assert_eq!(other.mix(DemandPhase::Asleep, 1).await, None, "it has no history");
    other.learner.end_request(1);
    for id in 1..=6 {
        assert!(start_request(&one, id, "t", Privacy::None));
        one.learner.record_usage(id, &activations(&main));
    }
    let metrics = other.resources.metrics.of_model("ns/demo");
    until("the usage that the other gateway learned", || metrics.shared_requests() == 6).await;
    assert!(start_request(&other, 2, "t", Privacy::None));
    let mix = other.mix(DemandPhase::Asleep, 1).await.unwrap();
    assert_eq!((mix.of, mix.requests), (MixOf::Waiting, 1));
    assert!(used_share(&main, &mix) > 0.5, "{}", used_share(&main, &mix));
    other.learner.end_request(2);
    // This gateway has answered no request itself: the operator adds up the reports of all gateways.
    assert_eq!(other.mix(DemandPhase::Active, 0).await, None);
    // There is no history of another tenant.
    assert!(start_request(&other, 3, "u", Privacy::None));
    assert_eq!(other.mix(DemandPhase::Asleep, 1).await, None);
}

#[tokio::test]
async fn opted_out_tenant_is_erased_from_ended_gateway_records() {
    let (main, folder) = (start_main_function(), tempfile::tempdir().unwrap());
    let file = {
        let ended = HistoryFolder::take(folder.path()).unwrap();
        let learner = learner_of(&ended.of_deployment(UID), 128);
        let (_sender, demands) = watch::channel(demand(&main, DemandPhase::Active, &main.header.model));
        let task = tokio::spawn(learner.clone().follow_orders(demands));
        until("a model summary", || learner.order().is_some()).await;
        for (id, tenant) in [(1, "t"), (2, "u"), (3, "t")] {
            assert!(start_request(&learner, id, tenant, Privacy::None));
            learner.learner.record_usage(id, &activations(&main));
        }
        let file = HistoryStore::file_in(&ended.of_deployment(UID).join(&main.header.model));
        let mut answered = learner.learner.answered_usage();
        answered
            .wait_for(|report| report.as_ref().is_some_and(|report| report.usage.requests > 2.5))
            .await
            .unwrap();
        task.abort();
        let _aborted = task.await;
        file
    };
    let bytes = || std::fs::metadata(&file).unwrap().len();
    let before = bytes();
    // Another gateway has taken over the part, and a third one learns that the tenant opts out.
    let parts = [(); 2].map(|()| HistoryFolder::take(folder.path()).unwrap());
    let [inherited, other] = parts;
    assert!(file.starts_with(inherited.of_deployment(UID)));
    let learner = learner_of(&other.of_deployment(UID), 128);
    let (_sender, demands) = watch::channel(demand(&main, DemandPhase::Active, &main.header.model));
    let _task = tokio::spawn(learner.clone().follow_orders(demands));
    until("a model summary", || learner.order().is_some()).await;
    assert!(start_request(&learner, 1, "t", Privacy::CountsOnly));
    assert_eq!(learner.mix(DemandPhase::Asleep, 1).await, None, "its history is not read again");
    // A gateway removes the tenant from its own part. From parts that no gateway has, the others remove it.
    assert_eq!(bytes(), before);
    drop(inherited);
    until("the file without the tenant", || bytes() < before).await;
    let own_file = HistoryStore::file_in(&other.of_deployment(UID).join(&main.header.model));
    assert_eq!(
        bytes(),
        std::fs::metadata(own_file).unwrap().len(),
        "as in its own part, with the other tenant's history"
    );
    learner.learner.end_request(1);
    assert!(start_request(&learner, 2, "u", Privacy::None));
    assert!(learner.mix(DemandPhase::Asleep, 1).await.is_some_and(|mix| mix.of == MixOf::Waiting));
}

#[tokio::test]
async fn usage_of_opted_out_tenant_is_not_reported() {
    let (main, folder) = (start_main_function(), tempfile::tempdir().unwrap());
    let learner = learner(folder.path(), 128);
    let (_sender, demands) = watch::channel(demand(&main, DemandPhase::Active, &main.header.model));
    let _task = tokio::spawn(learner.clone().follow_orders(demands));
    until("a model summary", || learner.order().is_some()).await;
    let mut answered = learner.learner.answered_usage();
    assert!(start_request(&learner, 1, "t", Privacy::None));
    learner.learner.record_usage(1, &activations(&main));
    answered.wait_for(Option::is_some).await.unwrap();
    assert!(start_request(&learner, 2, "t", Privacy::None));
    assert!(learner.mix(DemandPhase::Asleep, 1).await.is_some_and(|mix| mix.of == MixOf::Waiting));
    learner.learner.end_request(2);
    // The opted-out request waits, and the report has no prediction for it.
    assert!(!start_request(&learner, 3, "t", Privacy::LeftOut));
    let mix = learner.mix(DemandPhase::Asleep, 1).await.unwrap();
    assert_eq!((mix.of, mix.requests), (MixOf::Answered, 1));
    // The tenant's history is deleted.
    assert!(start_request(&learner, 4, "t", Privacy::CountsOnly));
    let mix = learner.mix(DemandPhase::Asleep, 1).await.unwrap();
    assert_eq!(mix.of, MixOf::Answered, "there is no history to predict from");
}
