//! Ids of traces and spans. A caller that sends many messages reserves a span id and tells it the other process; it
//! makes the span when all messages are answered.

use opentelemetry::trace::{SpanId, TraceId};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator};
use std::cell::Cell;

thread_local! {
    /// Reserved id for the next span of this thread, if it has one.
    static NEXT_SPAN_ID: Cell<Option<SpanId>> = const { Cell::new(None) };
}

/// Generator of random ids, which uses a reserved id if there is one.
#[derive(Debug, Default)]
pub(crate) struct SpanIds(RandomIdGenerator);

impl IdGenerator for SpanIds {
    fn new_trace_id(&self) -> TraceId {
        self.0.new_trace_id()
    }

    fn new_span_id(&self) -> SpanId {
        NEXT_SPAN_ID.take().unwrap_or_else(|| self.0.new_span_id())
    }
}

/// Returns an id for a span that is made later.
pub(crate) fn reserve() -> SpanId {
    RandomIdGenerator::default().new_span_id()
}

/// Gives the id `id` to the span that `make` makes.
pub(crate) fn with_reserved<T>(id: SpanId, make: impl FnOnce() -> T) -> T {
    NEXT_SPAN_ID.set(Some(id));
    let made = make();
    // A tracer that was shut down makes no span, and so takes no id.
    NEXT_SPAN_ID.set(None);
    made
}
