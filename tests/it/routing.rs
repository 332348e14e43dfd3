//! Edge cases of `SetRouting`: callers that do not wait, repeat themselves or send nonsense, and unreadable weights
//! (invariant 5 of ARCHITECTURE.md).

use remoe_proto::largest_generation;
use remoe_proto::placement_digest;
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_proto::v1::{DescribeMainRequest, Endpoint, GenerateRequest, LayerExperts, Routing, RoutingAck};
use remoe_test_support::control::greedy;
use remoe_test_support::deadline::{SOON, until, within};
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, StartOptions};
use remoe_test_support::placement::remote_sets;
use std::path::PathBuf;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint as Address};
use tonic::{Code, Status};

struct Launcher(MainModelClient<Channel>);

impl Launcher {
    fn new(main: &MainFunction) -> Self {
        let address = Address::from_shared(format!("http://{}", main.announcement.grpc)).unwrap();
        Self(MainModelClient::new(address.connect_lazy()))
    }

    async fn route(&self, routing: &Routing) -> Result<RoutingAck, Status> {
        let answer = within(SOON, "SetRouting", self.0.clone().set_routing(routing.clone())).await;
        answer.map(tonic::Response::into_inner)
    }

    async fn generation(&self) -> u64 {
        let answer = within(SOON, "Describe", self.0.clone().describe(DescribeMainRequest::default())).await;
        answer.unwrap().into_inner().generation
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn placement_continues_after_its_caller_disconnects() {
    let model = ModelFixture::fixture("mixtral-basic");
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    let launcher = Launcher::new(&main);
    // The system accepts connections, and no process answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint =
        Endpoint { address: silent.local_addr().unwrap().to_string(), layers: vec![], experts: vec![] };
    let remote = vec![LayerExperts { layer: 0, experts: vec![1] }];
    let routing = Routing { generation: 5, endpoints: vec![endpoint], remote, ..Routing::default() };

    // Connects first, so that only the placement takes time.
    assert_eq!(launcher.generation().await, 0);
    let impatient = tokio::time::timeout(Duration::from_millis(500), launcher.route(&routing)).await;
    assert!(impatient.is_err(), "an endpoint that never answers takes a second");
    until(SOON, "the placement", async || (launcher.generation().await == 5).then_some(())).await;
    let again = launcher.route(&routing).await.unwrap();
    assert_eq!(again.generation, 5);
    assert_eq!(again.problems.len(), 1, "what came of the placement: {again:?}");

    // Concurrent callers with the same generation share one placement.
    let next = Routing { generation: 6, ..routing.clone() };
    let (one, other) = tokio::join!(launcher.route(&next), launcher.route(&next));
    assert_eq!(one.unwrap(), other.unwrap());
    // An older generation is answered with the one in force, by number and digest.
    let other = Routing { remote: vec![LayerExperts { layer: 0, experts: vec![0] }], ..routing.clone() };
    let placement = placement_digest(&next);
    assert_ne!(placement, placement_digest(&other));
    let in_force = RoutingAck { generation: 6, placement: placement.clone(), problems: vec![] };
    assert_eq!(launcher.route(&other).await.unwrap(), in_force);
    let described = launcher.0.clone().describe(DescribeMainRequest::default()).await.unwrap().into_inner();
    assert_eq!((described.generation, described.placement), (6, placement));
    let answer = main.control.generate(greedy(&model.prompts()[0], 4)).await.finished;
    assert_eq!(answer.tokens.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_is_refused() {
    let model = ModelFixture::fixture("mixtral-basic");
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    let launcher = Launcher::new(&main);
    let code = async |routing: Routing| launcher.route(&routing).await.map_err(|status| status.code());
    assert_eq!(code(Routing::default()).await, Err(Code::InvalidArgument), "generation 0");
    let remote = vec![LayerExperts { layer: 0, experts: vec![99] }];
    let unknown = Routing { generation: 1, remote, ..Routing::default() };
    assert_eq!(code(unknown).await, Err(Code::InvalidArgument), "an expert that does not exist");
    assert_eq!(launcher.generation().await, 0);
    code(Routing { generation: 1, ..Routing::default() }).await.unwrap();
    let remote = vec![LayerExperts { layer: 0, experts: vec![1] }];
    let other = Routing { generation: 1, remote, ..Routing::default() };
    assert_eq!(code(other).await, Err(Code::InvalidArgument), "another placement of the same generation");

    // A generation too far above the one in force is refused, and later valid ones work.
    let refused = launcher.route(&Routing { generation: u64::MAX, ..Routing::default() }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("above the generation in force (1)"), "{}", refused.message());
    assert_eq!(launcher.generation().await, 1);
    let last = Routing { generation: largest_generation(1), ..Routing::default() };
    assert_eq!(launcher.route(&last).await.unwrap().generation, last.generation);
    let next = Routing { generation: last.generation + 1, ..Routing::default() };
    assert_eq!(launcher.route(&next).await.unwrap().generation, next.generation);

    type RequestChange = fn(&mut GenerateRequest);
    let changes: [(&str, RequestChange); 7] = [
        ("temperature", |it| it.temperature = Some(f32::NAN)),
        ("temperature", |it| it.temperature = Some(-0.1)),
        ("temperature", |it| it.temperature = Some(2.1)),
        ("top_p", |it| it.top_p = Some(f32::INFINITY)),
        ("top_p", |it| it.top_p = Some(1.1)),
        ("stop", |it| it.stop = vec![String::new()]),
        ("prompt", |it| it.prompt = None),
    ];
    for (field, change) in changes {
        let mut request = greedy(&model.prompts()[0], 4);
        change(&mut request);
        let status = main.control.begin(request.clone()).await.err().unwrap();
        assert_eq!(status.code(), Code::InvalidArgument, "{request:?}");
        // Stop strings need a tokenizer.
        assert!(status.message().contains(field) || field == "stop", "{field}: {}", status.message());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_endpoints_are_refused_and_idle_ones_harmless() {
    let model = ModelFixture::fixture("mixtral-basic");
    let main = MainFunction::start(&model.folder, StartOptions::default()).await;
    let launcher = Launcher::new(&main);
    let remote = remote_sets(&model.checkpoint(), 1.0);
    let hosting = |layer: u32, experts: Vec<u32>, endpoints: usize| {
        let experts = vec![LayerExperts { layer, experts }];
        let endpoint = Endpoint { address: "127.0.0.1:1".to_owned(), layers: vec![], experts };
        let remote = remote.clone();
        Routing { generation: 1, endpoints: vec![endpoint; endpoints], remote, ..Routing::default() }
    };
    for (what, routing) in [
        ("an expert that does not exist", hosting(0, vec![1, 99], 1)),
        ("a layer that does not exist", hosting(99, vec![1], 1)),
        ("more endpoints than can be connected", hosting(0, vec![1], 10_000)),
    ] {
        let status = launcher.route(&routing).await.err();
        assert_eq!(status.map(|status| status.code()), Some(Code::InvalidArgument), "{what}");
    }
    assert_eq!(launcher.generation().await, 0);
    let idle = launcher.route(&hosting(0, vec![], 1)).await.unwrap();
    assert_eq!(idle.problems.len(), 1, "no function listens there: {idle:?}");
    let answer = main.control.generate(greedy(&model.prompts()[0], 4)).await.finished;
    assert!(answer.experts.is_some_and(|calls| calls.fallback > 0 && calls.remote == 0), "{answer:?}");
}

/// Returns a copy of a fixture and its shards.
fn copied(model: &ModelFixture) -> (tempfile::TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(&model.folder).unwrap() {
        let path = entry.unwrap().path();
        let copy = folder.path().join(path.file_name().unwrap());
        std::fs::copy(&path, &copy).unwrap();
        shards.extend(Some(copy).filter(|it| it.extension().is_some_and(|it| it == "safetensors")));
    }
    (folder, shards)
}

/// Truncates files in place, which affects processes that have them open.
fn shrink(shards: &[PathBuf]) {
    for path in shards {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() / 3).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_that_shrink_fail_the_placement_and_nothing_else() {
    let model = ModelFixture::fixture("mixtral-basic");
    let (folder, shards) = copied(&model);
    let mut main = MainFunction::start(folder.path(), StartOptions::default()).await;
    let launcher = Launcher::new(&main);
    let remote = remote_sets(&model.checkpoint(), 1.0);
    launcher.route(&Routing { generation: 1, remote, ..Routing::default() }).await.unwrap();
    let whole: Vec<Vec<u8>> = shards.iter().map(|path| std::fs::read(path).unwrap()).collect();
    main.has_read_all().await;
    shrink(&shards);
    let routing = Routing { generation: 2, ..Routing::default() };
    let status = launcher.route(&routing).await.err().unwrap();
    assert_eq!(status.code(), Code::Internal);
    assert!(status.message().contains(".safetensors"), "{}", status.message());
    assert_eq!(launcher.generation().await, 1);
    assert!(main.process.ended().is_none(), "the function lives on");
    for (path, whole) in shards.iter().zip(whole) {
        std::fs::write(path, whole).unwrap();
    }
    assert_eq!(launcher.route(&routing).await.unwrap().generation, 2, "the same placement, tried again");
}

/// The first placement is in force before its experts are loaded. Without one of them no answer is reliable.
#[tokio::test(flavor = "multi_thread")]
async fn main_function_without_first_experts_exits_with_cause() {
    let (folder, shards) = copied(&ModelFixture::fixture("mixtral-basic"));
    let mut main = MainFunction::start(folder.path(), StartOptions::default()).await;
    let launcher = Launcher::new(&main);
    shrink(&shards);
    // The process may end before the answer arrives.
    let _answer = launcher.route(&Routing { generation: 1, ..Routing::default() }).await;
    let ended = until(SOON, "the end", async || main.process.ended()).await;
    assert_eq!(ended.code(), Some(4), "the checkpoint is at fault");
    let log = main.process.log();
    assert!(log.iter().any(|line| line.contains("ERROR") && line.contains(".safetensors")), "{log:?}");
}
