//! A collector of traces: OTLP over gRPC on a real socket, which takes them, refuses them, or never answers.

use crate::deadline::{LONG, until};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use serde_json::{Map, Value, json};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Behaviour of a collector towards what it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectorBehaviour {
    /// It takes everything.
    Takes,
    /// It refuses everything.
    Refuses,
    /// It never answers.
    Hangs,
}

/// A span as it was exported.
#[derive(Debug, Clone)]
pub struct ExportedSpan {
    /// Id of the trace, in hexadecimal digits.
    pub trace: String,
    /// Id of the span.
    pub id: String,
    /// Id of the parent span; empty for a root span.
    pub parent: String,
    /// Name of the span.
    pub name: String,
    /// 1: internal, 2: server, 3: client.
    pub kind: i32,
    /// Start in nanoseconds since 1970.
    pub start: u64,
    /// End in nanoseconds since 1970.
    pub end: u64,
    /// Attributes of the span.
    pub attributes: Map<String, Value>,
    /// Set if the span is an error.
    pub failed: bool,
    /// Resource attributes of the process that recorded the span.
    pub resource: Map<String, Value>,
}

impl ExportedSpan {
    /// Returns the service name of the span's process.
    #[must_use]
    pub fn service(&self) -> &str {
        self.resource["service.name"].as_str().expect("a service has a name")
    }
}

/// A collector. It ends with the test's runtime.
#[derive(Clone)]
pub struct Collector {
    /// Where it listens.
    pub address: SocketAddr,
    got: Arc<Mutex<ReceivedSpans>>,
    manner: CollectorBehaviour,
}

#[derive(Default)]
struct ReceivedSpans {
    requests: usize,
    spans: Vec<ExportedSpan>,
}

impl Collector {
    /// Starts one on any free port.
    pub async fn start(manner: CollectorBehaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let collector = Self { address, got: Arc::default(), manner };
        let server =
            tonic::transport::Server::builder().add_service(TraceServiceServer::new(collector.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        collector
    }

    /// The environment that has a process export to it soon.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}", self.address)),
            ("OTEL_BSP_SCHEDULE_DELAY", "50".to_owned()),
        ]
    }

    /// How often something was exported to it.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.got.lock().unwrap_or_else(PoisonError::into_inner).requests
    }

    /// Returns all spans that it has taken.
    #[must_use]
    pub fn spans(&self) -> Vec<ExportedSpan> {
        self.got.lock().unwrap_or_else(PoisonError::into_inner).spans.clone()
    }

    /// The spans of `trace` once `enough` says so.
    pub async fn trace(
        &self,
        trace: &str,
        what: &str,
        enough: impl Fn(&[ExportedSpan]) -> bool,
    ) -> Vec<ExportedSpan> {
        let of_trace = || self.spans().into_iter().filter(|span| span.trace == trace).collect::<Vec<_>>();
        let what = format!("{what} in trace {trace}");
        until(LONG, &what, async || Some(of_trace()).filter(|spans| enough(spans))).await
    }
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.got.lock().unwrap_or_else(PoisonError::into_inner).requests += 1;
        match self.manner {
            CollectorBehaviour::Takes => {}
            CollectorBehaviour::Refuses => return Err(Status::invalid_argument("no")),
            CollectorBehaviour::Hangs => std::future::pending().await,
        }
        let mut spans = Vec::new();
        for of_process in request.into_inner().resource_spans {
            let resource =
                attributes(of_process.resource.map(|resource| resource.attributes).unwrap_or_default());
            for span in of_process.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                spans.push(ExportedSpan {
                    trace: digits(&span.trace_id),
                    id: digits(&span.span_id),
                    parent: digits(&span.parent_span_id),
                    name: span.name,
                    kind: span.kind,
                    start: span.start_time_unix_nano,
                    end: span.end_time_unix_nano,
                    attributes: attributes(span.attributes),
                    failed: span.status.is_some_and(|status| status.code == 2),
                    resource: resource.clone(),
                });
            }
        }
        self.got.lock().unwrap_or_else(PoisonError::into_inner).spans.extend(spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attributes(pairs: Vec<KeyValue>) -> Map<String, Value> {
    let mut attributes = Map::new();
    for pair in pairs {
        let twice = attributes.insert(pair.key.clone(), value(pair.value));
        assert!(twice.is_none(), "{} was set twice", pair.key);
    }
    attributes
}

fn value(value: Option<AnyValue>) -> Value {
    match value.and_then(|value| value.value) {
        Some(Any::StringValue(text)) => json!(text),
        Some(Any::BoolValue(flag)) => json!(flag),
        Some(Any::IntValue(number)) => json!(number),
        Some(Any::DoubleValue(number)) => json!(number),
        other => panic!("an attribute of no simple kind: {other:?}"),
    }
}
