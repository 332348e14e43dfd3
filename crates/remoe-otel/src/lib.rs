//! OpenTelemetry traces of requests: set up from the standard environment, carried from process to process as W3C
//! trace context, exported by OTLP over gRPC.
//!
//! Spans are made where a request's work is known by name and time ([`Span`], [`SpanRef`]) and not of log lines: their number
//! per request is bounded, and their times are those that the programs keep anyway. Where traces are off ([`Traces::off`],
//! which is the default) all of this is nothing: no allocation, no clock, no span. A request that is not sampled costs its
//! context and nothing else.
//!
//! ```text
//! environment ─▶ Settings ─▶ Traces ─▶ Span ─▶ queue (bounded) ─▶ a thread of its own ─▶ collector
//! traceparent ─▶ context ────────────▶ ┘  └─▶ traceparent of the next process
//! ```

mod context;
mod export;
mod ids;
mod settings;
mod span;
mod traces;

#[doc(hidden)]
pub use context::said_again;
pub use context::{CONTEXT_BYTES, TRACEPARENT, TRACESTATE, is_valid};
pub use settings::TracesError;
pub use span::{Kind, Reserved, Span, SpanRef};
pub use traces::Traces;
