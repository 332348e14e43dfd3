//! Set-up of a process's traces, and server spans of requests.

use crate::context::{self, CONTEXT_BYTES};
use crate::export::{SpanCounts, SpanQueue};
use crate::ids::SpanIds;
use crate::settings::{ExportSettings, TracesError};
use crate::span::{Span, SpanRole};
use http::HeaderMap;
use opentelemetry::trace::{TraceContextExt, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::tonic_types::transport::ClientTlsConfig;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    IdGenerator, RandomIdGenerator, SdkTracer, SdkTracerProvider, SpanExporter as _,
};
use prometheus::Registry;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time for the last export at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Traces of a process; off by default. Clones share the tracer.
#[derive(Debug, Clone, Default)]
pub struct Traces(Option<Arc<ActiveTracer>>);

#[derive(Debug)]
struct ActiveTracer {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    counts: SpanCounts,
}

impl Traces {
    /// Returns traces that are off.
    #[must_use]
    pub fn off() -> Self {
        Self(None)
    }

    /// Sets up traces from the environment; [off](Self::off) if it does not configure them. `service` is the default
    /// of the service name.
    ///
    /// # Errors
    /// A variable has an invalid or unsupported value, or the export cannot be started.
    pub fn from_environment(service: &'static str) -> Result<Self, TracesError> {
        Self::from_variables(service, |name| std::env::var(name).ok())
    }

    /// As [`from_environment`](Self::from_environment), with `variable` in place of the environment. The SDK still
    /// reads resource attributes, headers for the collector and its timeout from the environment.
    ///
    /// # Errors
    /// As [`from_environment`](Self::from_environment).
    pub fn from_variables(
        service: &'static str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, TracesError> {
        let Some(settings) = ExportSettings::read(variable)? else { return Ok(Self::off()) };
        let resource = resource(service, &settings);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut exporter = {
            // The exporter spawns its tasks on the runtime in which it is made.
            let _entered = runtime.enter();
            let builder = SpanExporter::builder().with_tonic().with_endpoint(settings.endpoint.clone());
            let builder = match settings.endpoint.starts_with("https://") {
                true => builder.with_tls_config(ClientTlsConfig::new().with_enabled_roots()),
                false => builder,
            };
            builder.build().map_err(|error| TracesError::Exporter(error.to_string()))?
        };
        exporter.set_resource(&resource);
        let counts = SpanCounts::new()?;
        let queue = SpanQueue::start(runtime, exporter, &settings, counts.clone())?;
        let provider = SdkTracerProvider::builder()
            .with_sampler(settings.sampler)
            .with_span_processor(queue)
            .with_id_generator(SpanIds::default())
            .with_resource(resource)
            .build();
        let tracer = provider.tracer("remoe");
        tracing::info!(endpoint = settings.endpoint, "trace export enabled");
        Ok(Self(Some(Arc::new(ActiveTracer { provider, tracer, counts }))))
    }

    /// Reports if traces are on.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Registers `remoe_trace_spans_total` if traces are on.
    ///
    /// # Errors
    /// `registry` has a metric of the same name.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        self.0.as_ref().map_or(Ok(()), |active| registry.register(Box::new(active.counts.0.clone())))
    }

    /// Starts the server span of a request with `headers`, a child of the span in their context if that is valid. If
    /// it is dropped before its end, it fails as `client_disconnected`.
    #[must_use]
    pub fn server(&self, name: impl Into<Cow<'static, str>>, headers: &HeaderMap) -> Span {
        let Some(active) = &self.0 else { return Span::default() };
        let parent = match context::read(headers) {
            Some(parent) => Context::new().with_remote_span_context(parent),
            None => Context::new(),
        };
        let span = Span::root(&active.tracer, name.into(), SpanRole::Server, &parent, None);
        span.or_else("client_disconnected", "the client left before the answer was complete")
    }

    /// Makes the server span of work that began at `start`, a child of the caller's span `context`, which is a
    /// [`ReservedSpan::context`]. Returns a span that records nothing if `context` is invalid.
    #[must_use]
    pub fn server_of(
        &self,
        context: &[u8; CONTEXT_BYTES],
        name: impl Into<Cow<'static, str>>,
        start: Instant,
    ) -> Span {
        let parent = context::unpack(context);
        let Some(active) = self.0.as_ref().filter(|_| parent.is_valid()) else { return Span::default() };
        let parent = Context::new().with_remote_span_context(parent);
        Span::root(&active.tracer, name.into(), SpanRole::Server, &parent, Some(start))
    }

    /// Exports the remaining spans, within a bounded time. Spans that end later are lost.
    pub async fn shut_down(&self) {
        let Some(active) = self.0.clone() else { return };
        let ending =
            tokio::task::spawn_blocking(move || active.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT));
        if let Ok(Err(error)) = ending.await {
            tracing::warn!(%error, "last traces not exported");
        }
    }
}

/// Returns the resource of this process: attributes from the environment, the service name, and a random instance id.
fn resource(service: &'static str, settings: &ExportSettings) -> Resource {
    let mut attributes = vec![KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))];
    if !settings.has_service_name {
        attributes.push(KeyValue::new("service.name", service));
    }
    if !settings.has_instance_id {
        attributes.push(KeyValue::new("service.instance.id", random_uuid()));
    }
    Resource::builder().with_attributes(attributes).build()
}

/// Returns a random UUID (version 4).
fn random_uuid() -> String {
    let random = u128::from_be_bytes(RandomIdGenerator::default().new_trace_id().to_bytes());
    let number = random & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let text = format!("{number:032x}");
    [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_random_uuids() {
        let one = random_uuid();
        assert_ne!(one, random_uuid());
        let parts: Vec<usize> = one.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12]);
        assert!(one.as_bytes()[14] == b'4' && b"89ab".contains(&one.as_bytes()[19]), "{one}");
    }

    #[test]
    fn without_configuration_traces_are_off() {
        let traces = Traces::from_variables("test", |_| None).unwrap_or_default();
        assert!(!traces.is_on());
        let mut headers = HeaderMap::new();
        let span = traces.server("name", &headers);
        assert!(!span.is_recording() && span.trace_id().is_none());
        span.inject(&mut headers);
        assert!(headers.is_empty());
        span.child("child", SpanRole::Internal).end();
    }
}
