//! Spans in progress, and references to them.

use crate::context::{self, CONTEXT_BYTES};
use crate::ids;
use http::HeaderMap;
use opentelemetry::trace::{SpanId, SpanKind, Status, TraceContextExt, TraceId, Tracer};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::trace::SdkTracer;
use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

/// Role of a span in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanRole {
    /// Server side of a call.
    Server,
    /// Client side of a call.
    Client,
    /// Work within the process.
    Internal,
}

impl From<SpanRole> for SpanKind {
    fn from(kind: SpanRole) -> Self {
        match kind {
            SpanRole::Server => Self::Server,
            SpanRole::Client => Self::Client,
            SpanRole::Internal => Self::Internal,
        }
    }
}

/// Reference to a span, by which other code adds attributes, events and children. It does not keep the span open. The
/// default refers to no span.
#[derive(Debug, Clone, Default)]
pub struct SpanRef(Option<Arc<SpanState>>);

/// Shared state of a span.
#[derive(Debug)]
struct SpanState {
    tracer: SdkTracer,
    context: Context,
    clock: Clock,
    is_recording: bool,
    has_failed: AtomicBool,
}

/// Readings of the monotonic clock and the system clock at the same moment. All spans of a request in this process
/// share them, so that children lie within their parents even if the system clock is set meanwhile.
#[derive(Debug, Clone, Copy)]
struct Clock {
    instant: Instant,
    time: SystemTime,
}

impl Clock {
    /// Reads both clocks.
    fn read() -> Self {
        // The pair with the smallest gap between both readings is used: the thread may be interrupted between them.
        let readings = std::array::from_fn::<_, 3, _>(|_| {
            let clock = Self { instant: Instant::now(), time: SystemTime::now() };
            (clock.instant.elapsed(), clock)
        });
        let [first, others @ ..] = readings;
        others.into_iter().fold(first, |best, next| if next.0 < best.0 { next } else { best }).1
    }

    /// Returns the system time of `instant`.
    fn time(self, instant: Instant) -> SystemTime {
        match instant.checked_duration_since(self.instant) {
            Some(after) => self.time + after,
            None => self.time - self.instant.duration_since(instant),
        }
    }
}

impl PartialEq for SpanRef {
    /// Compares identities: equal if both refer to the same span, or both to none.
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl SpanRef {
    /// Reports if the span is recorded: traces are on and the span is sampled.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        self.0.as_ref().is_some_and(|state| state.is_recording)
    }

    /// Returns the trace id, sampled or not; `None` if traces are off.
    #[must_use]
    pub fn trace_id(&self) -> Option<TraceId> {
        let id = self.0.as_ref()?.context.span().span_context().trace_id();
        (id != TraceId::INVALID).then_some(id)
    }

    /// Sets an attribute.
    pub fn set(&self, key: &'static str, value: impl Into<Value>) {
        if let Some(state) = self.recording() {
            state.context.span().set_attribute(KeyValue::new(key, value));
        }
    }

    /// Changes the span's name.
    pub fn rename(&self, name: impl Into<Cow<'static, str>>) {
        if let Some(state) = self.recording() {
            state.context.span().update_name(name);
        }
    }

    /// Adds an event with the present time.
    pub fn event(&self, name: &'static str) {
        if let Some(state) = self.recording() {
            state.context.span().add_event_with_timestamp(name, state.clock.time(Instant::now()), Vec::new());
        }
    }

    /// Marks the span as failed with error type `kind`. Only the first call has an effect. `message` is for people,
    /// and must not contain text of a client.
    pub fn fail(&self, kind: impl Into<Cow<'static, str>>, message: &'static str) {
        if let Some(state) = self.recording()
            && !state.has_failed.swap(true, Ordering::Relaxed)
        {
            let span = state.context.span();
            span.set_attribute(KeyValue::new("error.type", kind.into()));
            span.set_status(Status::error(message));
        }
    }

    /// Starts a child span now.
    #[must_use]
    pub fn child(&self, name: impl Into<Cow<'static, str>>, kind: SpanRole) -> Span {
        match self.recording() {
            Some(_) => self.child_at(name, kind, Instant::now()),
            None => self.not_recorded(),
        }
    }

    /// Makes a child span that began at `start`.
    #[must_use]
    pub fn child_at(&self, name: impl Into<Cow<'static, str>>, kind: SpanRole, start: Instant) -> Span {
        let Some(state) = self.recording() else { return self.not_recorded() };
        let SpanState { tracer, context, clock, .. } = &**state;
        Span::start(tracer, name.into(), kind, context, *clock, start)
    }

    /// Reserves the id of a child span that is made later, so that other processes can refer to it before. Returns
    /// `None` if the span is not recorded.
    #[must_use]
    pub fn reserve(&self) -> Option<ReservedSpan> {
        let trace = self.recording()?.context.span().span_context().trace_id();
        let id = ids::reserve();
        Some(ReservedSpan { id, context: context::pack(trace, id) })
    }

    /// Makes the child span with the id `reserved`, which began at `start`.
    #[must_use]
    pub fn reserved_child(
        &self,
        reserved: &ReservedSpan,
        name: impl Into<Cow<'static, str>>,
        kind: SpanRole,
        start: Instant,
    ) -> Span {
        ids::with_reserved(reserved.id, || self.child_at(name, kind, start))
    }

    /// Writes the span's context to `headers`, in place of any other. If traces are off, `headers` stay as they are.
    pub fn inject(&self, headers: &mut HeaderMap) {
        if let Some(state) = &self.0 {
            context::write(state.context.span().span_context(), headers);
        }
    }

    fn recording(&self) -> Option<&Arc<SpanState>> {
        self.0.as_ref().filter(|state| state.is_recording)
    }

    /// Returns a child that is not recorded. Its context is that of this span.
    fn not_recorded(&self) -> Span {
        Span { reference: self.clone(), is_open: false, drop_error: CANCELLED }
    }
}

/// Error of a span that was dropped before its end.
const CANCELLED: (&str, &str) = ("cancelled", "cancelled before its end");

/// Reserved id of a span that is not made yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReservedSpan {
    id: SpanId,
    /// Context of the span for another process, for [`Traces::server_of`](crate::Traces::server_of).
    pub context: [u8; CONTEXT_BYTES],
}

/// Span in progress. If it is dropped before [`end`](Self::end), it fails as cancelled.
#[derive(Debug)]
pub struct Span {
    reference: SpanRef,
    is_open: bool,
    drop_error: (&'static str, &'static str),
}

impl Default for Span {
    /// Returns a span that records nothing.
    fn default() -> Self {
        SpanRef::default().not_recorded()
    }
}

impl Span {
    /// Starts the first span of a request in this process.
    pub(crate) fn root(
        tracer: &SdkTracer,
        name: Cow<'static, str>,
        kind: SpanRole,
        parent: &Context,
        start: Option<Instant>,
    ) -> Self {
        let clock = Clock::read();
        Self::start(tracer, name, kind, parent, clock, start.unwrap_or(clock.instant))
    }

    fn start(
        tracer: &SdkTracer,
        name: Cow<'static, str>,
        kind: SpanRole,
        parent: &Context,
        clock: Clock,
        start: Instant,
    ) -> Self {
        let builder = tracer.span_builder(name).with_kind(kind.into()).with_start_time(clock.time(start));
        let context = parent.with_span(builder.start_with_context(tracer, parent));
        let is_recording = context.span().is_recording();
        let has_failed = AtomicBool::new(false);
        let state = SpanState { tracer: tracer.clone(), context, clock, is_recording, has_failed };
        Self { reference: SpanRef(Some(Arc::new(state))), is_open: is_recording, drop_error: CANCELLED }
    }

    /// Sets the error type and the message with which the span fails if it is dropped before its end.
    #[must_use]
    pub fn or_else(mut self, kind: &'static str, message: &'static str) -> Self {
        self.drop_error = (kind, message);
        self
    }

    /// Returns a reference for other code that works on the request.
    #[must_use]
    pub fn reference(&self) -> SpanRef {
        self.reference.clone()
    }

    /// Ends the span now.
    pub fn end(self) {
        if self.is_open {
            self.end_at(Instant::now());
        }
    }

    /// Ends the span at `end`.
    pub fn end_at(mut self, end: Instant) {
        self.close(end);
    }

    fn close(&mut self, end: Instant) {
        if std::mem::take(&mut self.is_open)
            && let Some(state) = &self.reference.0
        {
            state.context.span().end_with_timestamp(state.clock.time(end));
        }
    }
}

impl Deref for Span {
    type Target = SpanRef;

    fn deref(&self) -> &SpanRef {
        &self.reference
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if self.is_open {
            let (kind, message) = self.drop_error;
            self.fail(kind, message);
            self.close(Instant::now());
        }
    }
}
