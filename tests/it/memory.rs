//! Change of placement within the memory of one: old and new local experts do not fit together.

use remoe_proto::format_listing;
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_proto::v1::{Endpoint, LayerExperts, Routing, RoutingAck};
use remoe_test_support::checkpoint::{Sizes, generate};
use remoe_test_support::control::{GenerationResult, greedy};
use remoe_test_support::deadline::{SOON, within};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tempfile::TempDir;
use tonic::{Code, Status};

const SIZES: Sizes =
    Sizes { layers: 4, hidden: 256, width: 2048, experts: 8, top_k: 2, vocabulary: 256, context: 512 };
/// Size of the local experts of one layer, half of all, in bytes.
const LAYER_BYTES: u64 = 4 * 3 * 256 * 2048 * 4;

/// Returns the experts 0 to 3 of every layer, or the others.
fn half(upper: bool) -> Vec<LayerExperts> {
    let experts: Vec<u32> = if upper { (4..8).collect() } else { (0..4).collect() };
    (0..SIZES.layers as u32).map(|layer| LayerExperts { layer, experts: experts.clone() }).collect()
}

/// Returns the anonymous memory of the process, in bytes.
fn taken(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

struct HalvesDeployment {
    model: TempDir,
    lower: RemoteFunction,
    upper: RemoteFunction,
}

impl HalvesDeployment {
    async fn start() -> Self {
        let model = generate(SIZES);
        let remote = async |upper| {
            RemoteFunction::start(model.path(), &format_listing(&half(upper)), StartOptions::default()).await
        };
        let (lower, upper) = (remote(false).await, remote(true).await);
        Self { model, lower, upper }
    }

    /// Starts a main function with the lower half of experts local, and runs a request.
    async fn main(&self, options: StartOptions) -> (MainFunction, GenerationResult) {
        let main = MainFunction::start(self.model.path(), options).await;
        main.control.route(&[self.upper.address()], &half(true)).await;
        let answer = main.control.generate(greedy(&[1, 2, 3], 60)).await;
        (main, answer)
    }
}

async fn route(
    main: &MainFunction,
    generation: u64,
    at: SocketAddr,
    upper: bool,
) -> Result<RoutingAck, Status> {
    let endpoints = vec![Endpoint { address: at.to_string(), layers: vec![], experts: vec![] }];
    let routing = Routing { generation, endpoints, remote: half(upper), ..Routing::default() };
    let mut client = MainModelClient::connect(format!("http://{}", main.announcement.grpc)).await.unwrap();
    within(SOON, "SetRouting", client.set_routing(routing)).await.map(tonic::Response::into_inner)
}

#[tokio::test(flavor = "multi_thread")]
async fn placement_switch_stays_below_memory_limit() {
    let deployment = HalvesDeployment::start().await;
    let (main, expected) = deployment.main(StartOptions::default()).await;
    let before = taken(main.process.pid());
    drop(main);

    // With memory for one more layer, the layers change one by one during requests.
    let limit = before + LAYER_BYTES * 8 / 5;
    let (main, _) = deployment.main(StartOptions::default().with("--memory-bytes", limit)).await;
    let (done, pid) = (Arc::new(AtomicBool::new(false)), main.process.pid());
    let watching = std::thread::spawn({
        let done = done.clone();
        move || {
            let mut most = 0;
            while !done.load(Ordering::Relaxed) {
                most = most.max(taken(pid));
                std::thread::sleep(Duration::from_millis(2));
            }
            most
        }
    });
    let requests = async {
        let mut answers = Vec::new();
        while !done.load(Ordering::Relaxed) {
            answers.push(main.control.generate(greedy(&[1, 2, 3], 60)).await.finished.tokens);
        }
        answers
    };
    let switch = async {
        let ack = route(&main, 2, deployment.lower.address(), false).await;
        done.store(true, Ordering::Relaxed);
        ack
    };
    let (answers, ack) = tokio::join!(requests, switch);
    let ack = ack.unwrap();
    assert_eq!((ack.generation, ack.problems), (2, vec![]));
    assert!(!answers.is_empty() && answers.iter().all(|tokens| *tokens == expected.finished.tokens));
    let most = watching.join().unwrap();
    assert!(most < limit + LAYER_BYTES / 2, "{most} bytes at most, the limit is {limit}");
    let parts =
        main.process.log().iter().filter(|line| line.contains("applying the placement in steps")).count();
    assert!(parts > 0, "it fit as a whole");
    let after = main.control.generate(greedy(&[1, 2, 3], 60)).await.finished;
    assert_eq!(after.tokens, expected.finished.tokens);
    assert_eq!(after.experts.unwrap().fallback, 0);
    drop(main);

    // Without memory for one more layer, the placement is rejected with figures, and the present one stays.
    let limit = before + LAYER_BYTES / 2;
    let (main, _) = deployment.main(StartOptions::default().with("--memory-bytes", limit)).await;
    let refused = route(&main, 2, deployment.lower.address(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    for figure in [LAYER_BYTES, limit] {
        assert!(refused.message().contains(&figure.to_string()), "{figure}: {}", refused.message());
    }
    let after = main.control.generate(greedy(&[1, 2, 3], 60)).await.finished;
    assert_eq!(after.tokens, expected.finished.tokens);
}

#[tokio::test(flavor = "multi_thread")]
async fn first_placement_that_does_not_fit_is_refused() {
    let model = ModelFixture::fixture("mixtral-basic");
    let main = refusing(&model.folder).await;
    let mut client = MainModelClient::connect(format!("http://{}", main.announcement.grpc)).await.unwrap();
    let routing = Routing { generation: 1, ..Routing::default() };
    let refused = within(SOON, "SetRouting", client.set_routing(routing)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().starts_with("remote: cannot load the local experts"), "{}", refused.message());
}

async fn refusing(folder: &Path) -> MainFunction {
    MainFunction::start(folder, StartOptions::default().with("--memory-bytes", 1_000_000)).await
}
