//! Numbers of traces and spans. Who asks another process in many messages tells it the number of a span that is only made
//! when all of them are answered.

use opentelemetry::trace::{SpanId, TraceId};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator};
use std::cell::Cell;

thread_local! {
    /// The number of the span that this thread makes next, where it was given out before.
    static NEXT: Cell<Option<SpanId>> = const { Cell::new(None) };
}

/// Random numbers, but those that were given out.
#[derive(Debug, Default)]
pub(crate) struct Ids(RandomIdGenerator);

impl IdGenerator for Ids {
    fn new_trace_id(&self) -> TraceId {
        self.0.new_trace_id()
    }

    fn new_span_id(&self) -> SpanId {
        NEXT.take().unwrap_or_else(|| self.0.new_span_id())
    }
}

/// A number for a span that is made later.
pub(crate) fn reserve() -> SpanId {
    RandomIdGenerator::default().new_span_id()
}

/// Has the span that `make` makes the number `id`.
pub(crate) fn with<T>(id: SpanId, make: impl FnOnce() -> T) -> T {
    NEXT.set(Some(id));
    let made = make();
    // A tracer that has ended takes none.
    NEXT.set(None);
    made
}
