//! Spans under way, and what belongs to them.

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

/// Whose side of a request a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Side of a call that answers.
    Server,
    /// Side of a call that asks.
    Client,
    /// Work without another party.
    Internal,
}

impl From<Kind> for SpanKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Server => Self::Server,
            Kind::Client => Self::Client,
            Kind::Internal => Self::Internal,
        }
    }
}

/// Reference to a span, through which other code that works on the request adds to it; none by default. It does not
/// keep the span open.
#[derive(Debug, Clone, Default)]
pub struct SpanRef(Option<Arc<SpanState>>);

/// A span's place in its trace.
#[derive(Debug)]
struct SpanState {
    tracer: SdkTracer,
    context: Context,
    clock: Clock,
    is_recording: bool,
    has_failed: AtomicBool,
}

/// One pair of readings of both clocks for all spans of a request in this process: what was measured to lie within
/// something lies within it in the trace, whatever is done to the time of day meanwhile.
#[derive(Debug, Clone, Copy)]
struct Clock {
    instant: Instant,
    time: SystemTime,
}

impl Clock {
    fn read() -> Self {
        // A thread that is interrupted between both readings is off by so much.
        let readings = std::array::from_fn::<_, 3, _>(|_| {
            let clock = Self { instant: Instant::now(), time: SystemTime::now() };
            (clock.instant.elapsed(), clock)
        });
        let [first, others @ ..] = readings;
        others.into_iter().fold(first, |best, next| if next.0 < best.0 { next } else { best }).1
    }

    fn time(self, at: Instant) -> SystemTime {
        match at.checked_duration_since(self.instant) {
            Some(after) => self.time + after,
            None => self.time - self.instant.duration_since(at),
        }
    }
}

impl PartialEq for SpanRef {
    /// Compares places: equal if both refer to the same span, or both to none.
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl SpanRef {
    /// Reports if what is set on the span is kept: not if traces are off, nor if this span is not sampled.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        self.0.as_ref().is_some_and(|place| place.is_recording)
    }

    /// The number of its trace, sampled or not; none where traces are off.
    #[must_use]
    pub fn trace_id(&self) -> Option<TraceId> {
        let id = self.0.as_ref()?.context.span().span_context().trace_id();
        (id != TraceId::INVALID).then_some(id)
    }

    /// Sets an attribute.
    pub fn set(&self, key: &'static str, value: impl Into<Value>) {
        if let Some(place) = self.recording() {
            place.context.span().set_attribute(KeyValue::new(key, value));
        }
    }

    /// Calls it otherwise.
    pub fn rename(&self, name: impl Into<Cow<'static, str>>) {
        if let Some(place) = self.recording() {
            place.context.span().update_name(name);
        }
    }

    /// Notes something that happened just now.
    pub fn event(&self, name: &'static str) {
        if let Some(place) = self.recording() {
            place.context.span().add_event_with_timestamp(name, place.clock.time(Instant::now()), Vec::new());
        }
    }

    /// It failed by an error of the class `kind`. The first one counts. `message` is for people, and nothing that a
    /// client sent.
    pub fn fail(&self, kind: impl Into<Cow<'static, str>>, message: &'static str) {
        if let Some(place) = self.recording()
            && !place.has_failed.swap(true, Ordering::Relaxed)
        {
            let span = place.context.span();
            span.set_attribute(KeyValue::new("error.type", kind.into()));
            span.set_status(Status::error(message));
        }
    }

    /// A part of it that begins now.
    #[must_use]
    pub fn child(&self, name: impl Into<Cow<'static, str>>, kind: Kind) -> Span {
        match self.recording() {
            Some(_) => self.child_at(name, kind, Instant::now()),
            None => self.silent(),
        }
    }

    /// A part of it that began at `start`.
    #[must_use]
    pub fn child_at(&self, name: impl Into<Cow<'static, str>>, kind: Kind, start: Instant) -> Span {
        let Some(place) = self.recording() else { return self.silent() };
        let SpanState { tracer, context, clock, .. } = &**place;
        Span::start(tracer, name.into(), kind, context, *clock, start)
    }

    /// A number for a part of it that is made later, so that others can name it before; none where nothing is kept.
    #[must_use]
    pub fn reserve(&self) -> Option<Reserved> {
        let trace = self.recording()?.context.span().span_context().trace_id();
        let id = ids::reserve();
        Some(Reserved { id, context: context::pack(trace, id) })
    }

    /// The part of it that has the number `reserved` and began at `start`.
    #[must_use]
    pub fn reserved_child(
        &self,
        reserved: &Reserved,
        name: impl Into<Cow<'static, str>>,
        kind: Kind,
        start: Instant,
    ) -> Span {
        ids::with(reserved.id, || self.child_at(name, kind, start))
    }

    /// Has `headers` name it, and no other span; where traces are off they stay as they are.
    pub fn inject(&self, headers: &mut HeaderMap) {
        if let Some(place) = &self.0 {
            context::write(place.context.span().span_context(), headers);
        }
    }

    fn recording(&self) -> Option<&Arc<SpanState>> {
        self.0.as_ref().filter(|place| place.is_recording)
    }

    /// Returns a child of which nothing is kept: its context is this span's.
    fn silent(&self) -> Span {
        Span { reference: self.clone(), is_open: false, otherwise: ABANDONED }
    }
}

/// Error of a span that was dropped before its end.
const ABANDONED: (&str, &str) = ("cancelled", "cancelled before its end");

/// The number of a span that is not made yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserved {
    id: SpanId,
    /// Context that names the span to another process ([`Traces::server_of`](crate::Traces::server_of)).
    pub context: [u8; CONTEXT_BYTES],
}

/// A span that ends with this value. It is an error to drop it before [`end`](Self::end).
#[derive(Debug)]
pub struct Span {
    reference: SpanRef,
    is_open: bool,
    otherwise: (&'static str, &'static str),
}

impl Default for Span {
    /// Returns a span that records nothing.
    fn default() -> Self {
        SpanRef::default().silent()
    }
}

impl Span {
    /// The first span of a request in this process.
    pub(crate) fn root(
        tracer: &SdkTracer,
        name: Cow<'static, str>,
        kind: Kind,
        parent: &Context,
        start: Option<Instant>,
    ) -> Self {
        let clock = Clock::read();
        Self::start(tracer, name, kind, parent, clock, start.unwrap_or(clock.instant))
    }

    fn start(
        tracer: &SdkTracer,
        name: Cow<'static, str>,
        kind: Kind,
        parent: &Context,
        clock: Clock,
        start: Instant,
    ) -> Self {
        let builder = tracer.span_builder(name).with_kind(kind.into()).with_start_time(clock.time(start));
        let context = parent.with_span(builder.start_with_context(tracer, parent));
        let is_recording = context.span().is_recording();
        let has_failed = AtomicBool::new(false);
        let place = SpanState { tracer: tracer.clone(), context, clock, is_recording, has_failed };
        Self { reference: SpanRef(Some(Arc::new(place))), is_open: is_recording, otherwise: ABANDONED }
    }

    /// Dropped before its end it failed by an error of the class `kind`.
    #[must_use]
    pub fn or_else(mut self, kind: &'static str, message: &'static str) -> Self {
        self.otherwise = (kind, message);
        self
    }

    /// For others that work on the same.
    #[must_use]
    pub fn reference(&self) -> SpanRef {
        self.reference.clone()
    }

    /// It is over.
    pub fn end(self) {
        if self.is_open {
            self.end_at(Instant::now());
        }
    }

    /// It was over at `end`.
    pub fn end_at(mut self, end: Instant) {
        self.close(end);
    }

    fn close(&mut self, end: Instant) {
        if std::mem::take(&mut self.is_open)
            && let Some(place) = &self.reference.0
        {
            place.context.span().end_with_timestamp(place.clock.time(end));
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
            let (kind, message) = self.otherwise;
            self.fail(kind, message);
            self.close(Instant::now());
        }
    }
}
