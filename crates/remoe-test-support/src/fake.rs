//! Fake function programs: the test program itself, started again by a script. A test program that uses them has the
//! line `remoe_test_support::fake_function!();` in its root.

use remoe_process::{Announcement, Role, announce, end_with_launcher, shutdown_on_signal};
use remoe_proto::v1::main_model_server::{MainModel, MainModelServer};
use remoe_proto::v1::{
    DescribeMainRequest, ExpertCalls, Finished, GenerateEvent, GenerateRequest, InspectReply, InspectRequest,
    LayerRouting, MainDescription, Piece, Routing, RoutingAck, Started, TokenRouting, generate_event,
    generate_request,
};
use remoe_rollout::process::Programs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;

/// Writes fake `main-model-fn` and `remote-expert-fn` programs into `folder`. Main functions append the routings that
/// they receive to the file `routings` there. Files in the folder control them: `refuse` makes main functions fail to
/// start; `lose` makes the main function that finds it unready, then end with an error; `linger` makes all functions
/// drain while it exists.
pub fn programs(folder: &Path) -> Programs {
    let program = |role: &str, name: &str| {
        let own = std::env::current_exe().unwrap();
        let lines = format!(
            "#!/bin/sh\nFAKE_ROLE={role} FAKE_FOLDER='{}' FAKE_ARGUMENTS=\"$*\" exec '{}' --exact fake_function --ignored --nocapture\n",
            folder.display(),
            own.display(),
        );
        script(folder, name, &lines)
    };
    Programs { main: program("main", "main-model-fn"), remote: program("remote", "remote-expert-fn") }
}

/// Writes an executable file through another process. If this process wrote it, a child that another test starts at
/// the same time would inherit the open file, and it could not be executed.
pub fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    let mut writer = Command::new("sh")
        .args(["-c", "cat >\"$0\" && chmod 755 \"$0\""])
        .arg(&path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(writer.wait().unwrap().success());
    path
}

/// Returns the role and command line of each fake function so far.
pub fn commands(folder: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("commands")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Returns the generation, endpoints and remote listing of each routing that fake main functions received.
pub fn routings(folder: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("routings")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Declares the test that runs as the fake function.
#[macro_export]
macro_rules! fake_function {
    () => {
        #[test]
        #[ignore = "the fake function itself, started by other tests"]
        fn fake_function() {
            $crate::fake::function();
        }
    };
}

/// Runs the fake function with the environment of its script until it is terminated.
#[expect(
    clippy::disallowed_methods,
    reason = "a function that ends as a real one does, inside of a test program"
)]
pub fn function() {
    let Ok(role) = std::env::var("FAKE_ROLE") else { return };
    let folder = PathBuf::from(std::env::var("FAKE_FOLDER").unwrap());
    let arguments = std::env::var("FAKE_ARGUMENTS").unwrap();
    let value = |flag: &str| {
        let mut words = arguments.split(' ').skip_while(|word| *word != flag);
        words.nth(1).map(str::to_owned)
    };
    log(&folder, "commands", &format!("{role} {arguments}\n")).unwrap();
    end_with_launcher(value("--launcher-pid").unwrap().parse().unwrap()).unwrap();
    if role == "main" && folder.join("refuse").exists() {
        eprintln!(r#"{{"level":"ERROR","message":"no such tensor","path":"/m/x","field":"gate"}}"#);
        std::process::exit(4);
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let shutdown = shutdown_on_signal().unwrap();
        let grpc = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let http = match value("--http-listen") {
            Some(address) => Some(TcpListener::bind(address).await.unwrap()),
            None => None,
        };
        announce(&Announcement {
            role: if role == "main" { Role::Main } else { Role::Remote },
            grpc: grpc.local_addr().unwrap(),
            http: http.as_ref().map(|listener| listener.local_addr().unwrap()),
            metrics: None,
            health: None,
            start_us: 1,
        })
        .unwrap();
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_service_status("readiness", ServingStatus::Serving).await;
        let generation = AtomicU64::new(0);
        let server = tonic::transport::Server::builder().add_service(health_service).add_optional_service(
            (role == "main").then(|| MainModelServer::new(FakeMain { folder: folder.clone(), generation })),
        );
        let incoming = TcpListenerStream::new(grpc);
        let lost = async {
            while role != "main" || std::fs::remove_file(folder.join("lose")).is_err() {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            health.set_service_status("readiness", ServingStatus::NotServing).await;
            log(&folder, "unready", "lost\n").unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        };
        tokio::select! {
            () = lost => {
                eprintln!(r#"{{"level":"ERROR","message":"CUDA error: the context is lost"}}"#);
                std::process::exit(1)
            }
            served = server.serve_with_incoming(incoming) => served.unwrap(),
            () = shutdown.cancelled() => {
                while folder.join("linger").exists() {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                std::process::exit(0)
            }
        }
    });
}

/// Appends a line in a single write to a log that is read meanwhile.
fn log(folder: &Path, name: &str, line: &str) -> std::io::Result<()> {
    let mut log = std::fs::OpenOptions::new().create(true).append(true).open(folder.join(name))?;
    log.write_all(line.as_bytes())
}

struct FakeMain {
    folder: PathBuf,
    /// Routing generation in force.
    generation: AtomicU64,
}

#[tonic::async_trait]
impl MainModel for FakeMain {
    type GenerateStream = tokio_stream::Iter<std::vec::IntoIter<Result<GenerateEvent, Status>>>;

    async fn set_routing(&self, request: Request<Routing>) -> Result<Response<RoutingAck>, Status> {
        let routing = request.into_inner();
        let before = self.generation.fetch_max(routing.generation, Ordering::Relaxed);
        if routing.generation <= before {
            return Ok(Response::new(RoutingAck { generation: before, ..RoutingAck::default() }));
        }
        if routing.generation > remoe_proto::largest_generation(before) {
            self.generation.store(before, Ordering::Relaxed);
            return Err(Status::invalid_argument("generation: too far above the generation in force"));
        }
        let mut endpoints: Vec<String> = routing
            .endpoints
            .iter()
            .map(|endpoint| match endpoint.experts.as_slice() {
                [] => format!("{}={:?}", endpoint.address, endpoint.layers),
                experts => format!("{}={}", endpoint.address, remoe_proto::format_listing(experts)),
            })
            .collect();
        endpoints.sort();
        let line = format!(
            "{} [{}] {}\n",
            routing.generation,
            endpoints.join(" "),
            remoe_proto::format_listing(&routing.remote)
        );
        log(&self.folder, "routings", &line)?;
        for endpoint in &routing.endpoints {
            let address: SocketAddr = endpoint.address.parse().unwrap();
            drop(tokio::net::TcpStream::connect(address).await);
        }
        Ok(Response::new(RoutingAck { generation: routing.generation, ..RoutingAck::default() }))
    }

    async fn describe(
        &self,
        _request: Request<DescribeMainRequest>,
    ) -> Result<Response<MainDescription>, Status> {
        let generation = self.generation.load(Ordering::Relaxed);
        Ok(Response::new(MainDescription { generation, in_flight: 3, ..MainDescription::default() }))
    }

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        if self.folder.join("hang").exists() {
            std::future::pending::<()>().await;
        }
        let (prompt_ids, text) = match request.prompt {
            Some(generate_request::Prompt::Ids(ids)) => (ids.ids, None),
            Some(generate_request::Prompt::Text(text)) => (vec![7, 8], Some(text)),
            Some(generate_request::Prompt::Chat(text)) => (vec![1, 7, 8], Some(format!("<{text}>"))),
            None => return Err(Status::invalid_argument("prompt: is missing")),
        };
        let tokens: Vec<u32> = (0..request.max_tokens).collect();
        let events = [
            generate_event::Event::Started(Started { prompt_ids }),
            generate_event::Event::Piece(Piece {
                ids: tokens.clone(),
                text: text.clone().unwrap_or_default(),
            }),
            generate_event::Event::Finished(Finished {
                reason: "length".to_owned(),
                text,
                completion_tokens: request.max_tokens,
                tokens,
                ttft_s: 0.25,
                prefill_s: 0.125,
                decode_s: 0.5,
                load_s: 1.5,
                forwarded_positions: 9,
                experts: Some(ExpertCalls { local: 10, remote: 20, fallback: 1, retries: 2 }),
                ..Finished::default()
            }),
        ];
        let events: Vec<_> =
            events.into_iter().map(|event| Ok(GenerateEvent { event: Some(event) })).collect();
        Ok(Response::new(tokio_stream::iter(events)))
    }

    async fn inspect(&self, _request: Request<InspectRequest>) -> Result<Response<InspectReply>, Status> {
        let token = TokenRouting { experts: vec![0, 3], weights: vec![0.1, 0.9] };
        Ok(Response::new(InspectReply {
            prompt_ids: vec![1],
            last_logits: vec![0.5, 2.5, 0.1],
            routing: vec![LayerRouting { layer: 0, tokens: vec![token] }],
            ..InspectReply::default()
        }))
    }
}
