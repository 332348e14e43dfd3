//! Settings and messages beyond their limits.

use remoe_proto::MAX_MESSAGE;
use remoe_proto::v1::{Code, ForwardRequest, Work, forward_request::Body};
use remoe_test_support::deadline::{SOON, within};
use remoe_test_support::expert_stream::{ExpertStream, client, describe};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::all_experts;
use tokio_stream::StreamExt;

#[tokio::test(flavor = "multi_thread")]
async fn settings_without_sense_are_refused_by_name() {
    let model = ModelFixture::fixture("mixtral-basic");
    for (flag, value) in [
        ("--max-batch", "0"),
        ("--max-requests", "0"),
        ("--max-requests", "18446744073709551615"),
        ("--iteration-rows", "0"),
        ("--kv-cache-bytes", "0"),
        ("--body-limit", "0"),
        ("--threads", "0"),
        ("--threads", "257"),
        ("--drain-seconds", "1000000"),
    ] {
        let (status, log) =
            MainFunction::refuse(&model.folder, StartOptions::default().with(flag, value)).await;
        assert_eq!(status.code(), Some(2), "{flag} {value}: {log:?}");
        assert!(
            log.iter().any(|line| line.contains(flag) && line.contains(value)),
            "{flag} {value}: {log:?}"
        );
    }
    for (flag, value) in [
        ("--max-in-flight", "0"),
        ("--max-in-flight", "99999999999"),
        ("--max-in-flight-bytes", "0"),
        ("--memory-bytes", "0"),
        ("--threads", "0"),
    ] {
        let options = StartOptions::default().with(flag, value);
        let (status, log) = RemoteFunction::refuse(&model.folder, "0:0", options).await;
        assert_eq!(status.code(), Some(2), "{flag} {value}: {log:?}");
        assert!(
            log.iter().any(|line| line.contains(flag) && line.contains(value)),
            "{flag} {value}: {log:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_in_flight_are_what_memory_leaves() {
    const LEAST: u64 = 2 * MAX_MESSAGE as u64;
    let model = ModelFixture::fixture("mixtral-basic");
    let experts = all_experts(&model.checkpoint());
    let bound = async |options: StartOptions| {
        let function = RemoteFunction::start(&model.folder, &experts, options).await;
        let metrics = MetricsPage::read(function.announcement.metrics.unwrap()).await;
        let description = describe(function.address()).await;
        (metrics.value("remoe_function_bytes_in_flight_limit"), description.memory_bytes)
    };
    let (unlimited, needed) = bound(StartOptions::default()).await;
    assert_eq!(unlimited, 256 << 20);
    let limit = |bytes: u64| StartOptions::default().with("--memory-bytes", bytes);
    assert_eq!(bound(limit(needed)).await, (LEAST, needed));
    assert_eq!(bound(limit(needed + 12_345)).await, (LEAST + 12_345, needed));
    assert_eq!(bound(limit(needed + 12_345).with("--max-in-flight-bytes", 4096)).await, (4096, needed));
    assert_eq!(bound(limit(needed + (1 << 30))).await, (256 << 20, needed));
}

#[tokio::test(flavor = "multi_thread")]
async fn oversized_message_ends_only_its_own_stream() {
    let model = ModelFixture::fixture("mixtral-basic");
    let hidden = model.checkpoint().config().hidden_size;
    let function = RemoteFunction::start(&model.folder, "0:1", StartOptions::default()).await;
    let mut other = ExpertStream::open(function.address()).await;
    let good = |id| Work {
        id,
        rows: vec![0; hidden * 4].into(),
        counts: vec![1],
        experts: vec![1],
        ..Work::default()
    };
    let before = other.ask(good(1)).await.unwrap();

    let large = Work { rows: vec![0; MAX_MESSAGE + 1].into(), ..good(2) };
    let request = ForwardRequest { body: Some(Body::Work(large)) };
    let requests = tokio_stream::once(request).chain(tokio_stream::pending());
    let mut client = client(function.address()).max_encoding_message_size(usize::MAX);
    let mut replies = within(SOON, "Forward", client.forward(requests)).await.unwrap().into_inner();
    let status = within(SOON, "a status", replies.message()).await.err().unwrap();
    assert_eq!(status.code(), tonic::Code::OutOfRange, "{status:?}");

    assert_eq!(other.ask(good(2)).await, Ok(before.clone()));
    // A message of the largest size is read and rejected for its content.
    let whole = Work { rows: vec![0; MAX_MESSAGE - 64].into(), ..good(3) };
    assert_eq!(other.ask(whole).await, Err(Code::InvalidArgument));
    assert_eq!(other.ask(good(4)).await, Ok(before));
}
