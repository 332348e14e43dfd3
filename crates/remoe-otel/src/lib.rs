//! OpenTelemetry traces of requests. They are configured by the standard environment variables, propagated between
//! processes as W3C trace context, and exported by OTLP over gRPC.
//!
//! Code makes spans explicitly ([`Span`], [`SpanRef`]), not from log lines, so that their number per request is
//! bounded. If traces are off ([`Traces::off`], the default), nothing is allocated, no clock is read and no span is
//! made. A request that is not sampled costs only its context.
//!
//! ```text
//! environment ─▶ ExportSettings ─▶ Traces ─▶ Span ─▶ queue (bounded) ─▶ export thread ─▶ collector
//! traceparent ─▶ context ──────────────────▶ ┘  └─▶ traceparent of the next process
//! ```

mod context;
mod export;
mod ids;
mod settings;
mod span;
mod traces;

#[doc(hidden)]
pub use context::forwarded_headers;
pub use context::{CONTEXT_BYTES, TRACEPARENT, TRACESTATE, is_valid};
pub use settings::TracesError;
pub use span::{ReservedSpan, Span, SpanRef, SpanRole};
pub use traces::Traces;
