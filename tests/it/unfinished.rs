//! Peers that never complete messages, that keep large ones, or that only connect: the memory they use is bounded,
//! and other peers are served.

use remoe_proto::v1::{Code, LayerExperts, Routing, Work};
use remoe_test_support::binaries;
use remoe_test_support::checkpoint::{Sizes, generate};
use remoe_test_support::deadline::{SOON, until, within};
use remoe_test_support::expert_stream::{ExpertStream, describe};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::process::Process;
use remoe_test_support::unfinished::{FORWARD, SET_ROUTING, UnfinishedRequests, beginning};
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::sleep;

/// Announced size of each message, in bytes.
const ANNOUNCED: u32 = 4_190_000;
const SENT: usize = 4_000_000;

/// Largest number of connections of a function.
const CONNECTIONS: usize = 128;

/// Budgets for incomplete messages of a remote function and of the control interface, in bytes.
const ROOM: u64 = 16 << 20;
/// Allowed further growth in bytes: buffers of connections and streams, and memory that the allocator keeps after
/// dropped messages.
const BESIDE: u64 = 32 << 20;

const HIDDEN: usize = 256;

/// Model with rows of 1 KiB.
fn model() -> TempDir {
    generate(Sizes {
        layers: 1,
        hidden: HIDDEN,
        width: 64,
        experts: 2,
        top_k: 1,
        vocabulary: 64,
        context: 64,
    })
}

/// Returns work of `rows` rows for expert 0 of layer 0.
fn work(id: u64, rows: usize) -> Work {
    let row: Vec<u8> = (0..HIDDEN).flat_map(|i| (i as f32 / 100.0).to_le_bytes()).collect();
    Work {
        id,
        rows: row.repeat(rows).into(),
        counts: vec![1; rows],
        experts: vec![0; rows],
        ..Work::default()
    }
}

/// Returns work of the largest size, with an answer of the same size.
const LARGE: usize = 3400;

/// Sends one row and many rows, and compares the answers with `alone`.
async fn served(stream: &mut ExpertStream, id: u64, alone: &[u8]) {
    assert_eq!(stream.ask(work(id, 1)).await.as_deref(), Ok(alone), "one row");
    assert_eq!(stream.ask(work(id + 1, LARGE)).await, Ok(alone.repeat(LARGE)), "{LARGE} rows");
}

/// Opens `connections` connections with `streams` incomplete messages each, of the largest size.
async fn attack(
    address: SocketAddr,
    path: &str,
    connections: usize,
    streams: usize,
) -> Vec<UnfinishedRequests> {
    let mut all = Vec::new();
    for _ in 0..connections {
        let mut connection = UnfinishedRequests::open(address).await;
        for _ in 0..streams {
            connection.begin(path, beginning(ANNOUNCED, SENT));
        }
        all.push(connection);
    }
    all
}

/// Observes the memory of `process` for a while, because attackers send as fast as they are read.
async fn peak(process: &Process) -> u64 {
    sleep(Duration::from_secs(2)).await;
    process.memory().1
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_remote_messages_are_bounded_and_others_served() {
    let model = model();
    let function = RemoteFunction::start(model.path(), "0:0", StartOptions::default()).await;
    // The figure includes code, whose size depends on the compiler.
    let code = std::fs::metadata(binaries::program("remote-expert-fn")).unwrap().len();
    let limit = describe(function.address()).await.memory_bytes.max(code + 39_000_000);
    drop(function);
    let options = StartOptions::default().with("--memory-bytes", limit);
    let function = RemoteFunction::start(model.path(), "0:0", options).await;
    let address = function.address();
    let mut before = ExpertStream::open(address).await;
    let alone = before.ask(work(1, 1)).await.unwrap();
    served(&mut before, 2, &alone).await;
    let (_, quiet) = function.process.memory();
    for (connections, streams) in [(1, 60), (60, 10)] {
        let held = attack(address, FORWARD, connections, streams).await;
        for id in 0..5 {
            served(&mut before, 10 + 2 * id, &alone).await;
        }
        // Later connections and streams are served as well.
        describe(address).await;
        served(&mut ExpertStream::open(address).await, 4, &alone).await;
        let peak = peak(&function.process).await;
        println!(
            "{connections} x {streams}: {} MB of {}, {} MB before",
            peak / 1_000_000,
            limit / 1_000_000,
            quiet / 1_000_000
        );
        assert!(peak <= quiet + ROOM + BESIDE, "{peak} bytes at the peak, {quiet} before");
        assert!(peak <= limit, "{peak} bytes at the peak, {limit} are allowed");
        served(&mut before, 30, &alone).await;
        drop(held);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_control_messages_are_bounded_and_others_served() {
    let model = ModelFixture::fixture("mixtral-basic");
    let function = MainFunction::start(&model.folder, StartOptions::default()).await;
    function.control.route(&[], &[]).await;
    let alone = function.control.inspect_ids(&[1, 2, 3]).await;
    let (_, quiet) = function.process.memory();
    for (connections, streams) in [(1, 60), (60, 10)] {
        let held = attack(function.announcement.grpc, SET_ROUTING, connections, streams).await;
        assert_eq!(function.control.inspect_ids(&[1, 2, 3]).await.last_logits, alone.last_logits);
        function.control.route(&[], &[]).await;
        let peak = peak(&function.process).await;
        println!("{connections} x {streams}: {} MB, {} MB before", peak / 1_000_000, quiet / 1_000_000);
        assert!(peak <= quiet + ROOM + 2 * BESIDE, "{peak} bytes at the peak, {quiet} before");
        drop(held);
    }
}

/// Refused complete messages leave no memory in use, however many streams stay open.
#[tokio::test(flavor = "multi_thread")]
async fn messages_that_are_answered_keep_no_memory() {
    let model = model();
    let function = RemoteFunction::start(model.path(), "0:0", StartOptions::default()).await;
    let mut streams = vec![ExpertStream::open(function.address()).await];
    assert_eq!(streams[0].ask(Work { layer: 9, ..work(1, LARGE) }).await, Err(Code::NotFound));
    let (_, quiet) = function.process.memory();
    for _ in 0..60 {
        let mut stream = ExpertStream::open(function.address()).await;
        assert_eq!(stream.ask(Work { layer: 9, ..work(1, LARGE) }).await, Err(Code::NotFound));
        streams.push(stream);
    }
    let (_, peak) = function.process.memory();
    println!("60 x 1 whole: {} MB, {} MB before", peak / 1_000_000, quiet / 1_000_000);
    assert!(peak <= quiet + BESIDE, "{peak} bytes at the peak, {quiet} before");
}

/// Connections without a complete message are closed for new ones.
#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_are_bounded_and_block_no_client() {
    let model = ModelFixture::fixture("mixtral-basic");
    let experts = |layer| LayerExperts { layer, experts: vec![0] };
    let remote = RemoteFunction::start(&model.folder, "0:0", StartOptions::default()).await;
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    for (address, process) in [(remote.address(), &remote.process), (main.announcement.grpc, &main.process)] {
        let before = process.descriptors();
        let mut silent: Vec<TcpStream> =
            (0..2 * CONNECTIONS).map(|_| TcpStream::connect(address).unwrap()).collect();
        let first = silent.swap_remove(0);
        // The first connections were closed for the last ones.
        let closed = tokio::task::spawn_blocking(move || {
            first.set_read_timeout(Some(SOON)).unwrap();
            (&first).read_to_end(&mut Vec::new()).is_ok()
        });
        assert!(within(SOON, "the end of the first", closed).await.unwrap());
        until(SOON, "bounded descriptors", async || {
            (process.descriptors() <= before + CONNECTIONS + 8).then_some(())
        })
        .await;
        drop(silent);
    }
    main.control.route(&[remote.address()], &[experts(0)]).await;
    let silent: Vec<TcpStream> =
        (0..2 * CONNECTIONS).map(|_| TcpStream::connect(remote.address()).unwrap()).collect();
    // A connection in use stays, and others are accepted.
    assert!(!main.control.inspect_ids(&[1, 2, 3]).await.last_logits.is_empty());
    assert_eq!(describe(remote.address()).await.hosted, [experts(0)]);
    drop(silent);
}

/// An oversized placement is rejected by its size before it is read.
#[tokio::test(flavor = "multi_thread")]
async fn control_request_over_the_limit_is_refused() {
    let model = ModelFixture::fixture("mixtral-basic");
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    let remote = vec![LayerExperts { layer: 0, experts: vec![0; 9 << 20] }];
    let routing = Routing { generation: 1, remote, ..Routing::default() };
    let mut client = main.control.client();
    let status = within(SOON, "a status", client.set_routing(routing)).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::OutOfRange, "{status:?}");
    main.control.route(&[], &[]).await;
}
