//! Traces of one process.

use crate::context::{self, CONTEXT_BYTES};
use crate::export::{Queue, SpanCounts};
use crate::ids::Ids;
use crate::settings::{ExportSettings, TracesError};
use crate::span::{Kind, Span};
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

/// At the end a collector has so long to take what is left.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Where spans go; nowhere by default. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Traces(Option<Arc<ActiveTracer>>);

#[derive(Debug)]
struct ActiveTracer {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    counts: SpanCounts,
}

impl Traces {
    /// No traces at all.
    #[must_use]
    pub fn off() -> Self {
        Self(None)
    }

    /// As the process's environment asks for it; [off](Self::off) where it asks for nothing. The service is called
    /// `service` where the environment has no name for it.
    ///
    /// # Errors
    /// Traces are asked for in a way that there is not.
    pub fn from_environment(service: &'static str) -> Result<Self, TracesError> {
        Self::from_variables(service, |name| std::env::var(name).ok())
    }

    /// As [`from_environment`](Self::from_environment), with `variable` in place of the environment. Attributes of the
    /// resource, headers for the collector and its time to answer are the process's in any case.
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
            // The connection's tasks are the runtime's in which it is made.
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
        let queue = Queue::start(runtime, exporter, &settings, counts.clone())?;
        let provider = SdkTracerProvider::builder()
            .with_sampler(settings.sampler)
            .with_span_processor(queue)
            .with_id_generator(Ids::default())
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

    /// Registers `remoe_trace_spans_total`, where there are traces.
    ///
    /// # Errors
    /// The name is taken.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        self.0.as_ref().map_or(Ok(()), |on| registry.register(Box::new(on.counts.0.clone())))
    }

    /// The span of a request that has come with `headers`: a child of the one that they name, where they name one by
    /// the rules. Dropped before it is ended it says that its client left.
    #[must_use]
    pub fn server(&self, name: impl Into<Cow<'static, str>>, headers: &HeaderMap) -> Span {
        let Some(on) = &self.0 else { return Span::default() };
        let parent = match context::read(headers) {
            Some(parent) => Context::new().with_remote_span_context(parent),
            None => Context::new(),
        };
        let span = Span::root(&on.tracer, name.into(), Kind::Server, &parent, None);
        span.or_else("client_disconnected", "the client left before the answer was complete")
    }

    /// The span of work that began at `start` for the span of a caller that `context` names, as [`Reserved::context`]
    /// has it; none where it names none.
    #[must_use]
    pub fn server_of(
        &self,
        context: &[u8; CONTEXT_BYTES],
        name: impl Into<Cow<'static, str>>,
        start: Instant,
    ) -> Span {
        let parent = context::unpack(context);
        let Some(on) = self.0.as_ref().filter(|_| parent.is_valid()) else { return Span::default() };
        let parent = Context::new().with_remote_span_context(parent);
        Span::root(&on.tracer, name.into(), Kind::Server, &parent, Some(start))
    }

    /// Exports what is left, in bounded time whatever the collector does; spans that end later are lost.
    pub async fn shut_down(&self) {
        let Some(on) = self.0.clone() else { return };
        let ending = tokio::task::spawn_blocking(move || on.provider.shutdown_with_timeout(LAST_WORDS));
        if let Ok(Err(error)) = ending.await {
            tracing::warn!(%error, "last traces not exported");
        }
    }
}

/// Returns the identity of this process for the collector: attributes from the environment, the program's name, and a
/// number of its own.
fn resource(service: &'static str, settings: &ExportSettings) -> Resource {
    let mut attributes = vec![KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))];
    if !settings.is_named {
        attributes.push(KeyValue::new("service.name", service));
    }
    if !settings.is_numbered {
        attributes.push(KeyValue::new("service.instance.id", instance()));
    }
    Resource::builder().with_attributes(attributes).build()
}

/// A random UUID (version 4).
fn instance() -> String {
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
        let one = instance();
        assert_ne!(one, instance());
        let parts: Vec<usize> = one.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12]);
        assert!(one.as_bytes()[14] == b'4' && b"89ab".contains(&one.as_bytes()[19]), "{one}");
    }

    #[test]
    fn without_an_environment_there_is_nothing() {
        let traces = Traces::from_variables("test", |_| None).unwrap_or_default();
        assert!(!traces.is_on());
        let mut headers = HeaderMap::new();
        let span = traces.server("name", &headers);
        assert!(!span.is_recording() && span.trace_id().is_none());
        span.inject(&mut headers);
        assert!(headers.is_empty());
        span.child("child", Kind::Internal).end();
    }
}
