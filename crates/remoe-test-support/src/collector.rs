//! Trace collector: OTLP over gRPC on a real socket, which accepts, rejects, or never answers.

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

/// Behaviour of a collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectorBehaviour {
    /// Accepts all spans.
    Takes,
    /// Rejects all spans.
    Refuses,
    /// Never answers.
    Hangs,
}

/// Exported span.
#[derive(Debug, Clone)]
pub struct ExportedSpan {
    /// Trace id, in hexadecimal digits.
    pub trace: String,
    /// Span id.
    pub id: String,
    /// Span id of the parent. Empty for a root span.
    pub parent: String,
    /// Name of the span.
    pub name: String,
    /// Kind: 1 is internal, 2 is server, 3 is client.
    pub kind: i32,
    /// Start in nanoseconds since 1970.
    pub start: u64,
    /// End in nanoseconds since 1970.
    pub end: u64,
    /// Attributes of the span.
    pub attributes: Map<String, Value>,
    /// True if the status is an error.
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

/// Running collector, which ends with the test's runtime.
#[derive(Clone)]
pub struct Collector {
    /// Address of the collector.
    pub address: SocketAddr,
    received: Arc<Mutex<ReceivedSpans>>,
    behaviour: CollectorBehaviour,
}

#[derive(Default)]
struct ReceivedSpans {
    requests: usize,
    spans: Vec<ExportedSpan>,
}

impl Collector {
    /// Starts a collector on a free port.
    pub async fn start(behaviour: CollectorBehaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let collector = Self { address, received: Arc::default(), behaviour };
        let server =
            tonic::transport::Server::builder().add_service(TraceServiceServer::new(collector.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        collector
    }

    /// Returns the environment that makes a process export to it without delay.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}", self.address)),
            ("OTEL_BSP_SCHEDULE_DELAY", "50".to_owned()),
        ]
    }

    /// Returns the number of export requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).requests
    }

    /// Returns all accepted spans.
    #[must_use]
    pub fn spans(&self) -> Vec<ExportedSpan> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).spans.clone()
    }

    /// Waits until `is_complete` accepts the spans of `trace` and returns them.
    pub async fn trace(
        &self,
        trace: &str,
        what: &str,
        is_complete: impl Fn(&[ExportedSpan]) -> bool,
    ) -> Vec<ExportedSpan> {
        let spans_of_trace =
            || self.spans().into_iter().filter(|span| span.trace == trace).collect::<Vec<_>>();
        let what = format!("{what} in trace {trace}");
        until(LONG, &what, async || Some(spans_of_trace()).filter(|spans| is_complete(spans))).await
    }
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).requests += 1;
        match self.behaviour {
            CollectorBehaviour::Takes => {}
            CollectorBehaviour::Refuses => return Err(Status::invalid_argument("no")),
            CollectorBehaviour::Hangs => std::future::pending().await,
        }
        let mut spans = Vec::new();
        for process_spans in request.into_inner().resource_spans {
            let resource =
                attributes(process_spans.resource.map(|resource| resource.attributes).unwrap_or_default());
            for span in process_spans.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                spans.push(ExportedSpan {
                    trace: hexadecimal(&span.trace_id),
                    id: hexadecimal(&span.span_id),
                    parent: hexadecimal(&span.parent_span_id),
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
        self.received.lock().unwrap_or_else(PoisonError::into_inner).spans.extend(spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attributes(pairs: Vec<KeyValue>) -> Map<String, Value> {
    let mut attributes = Map::new();
    for pair in pairs {
        let previous = attributes.insert(pair.key.clone(), value(pair.value));
        assert!(previous.is_none(), "{} was set twice", pair.key);
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
