//! Answers on their way to clients: the backend's bytes as they come, comments while a stream waits, and
//! an error event where it breaks off.

use crate::account::RequestAccount;
use crate::api::Api;
use crate::body_budget::BodyReservation;
use crate::metrics::StreamFailure;
use crate::model::Grant;
use crate::responses::Recording;
use crate::stream_ending::StreamEnding;
use axum::body::HttpBody;
use axum::http::{HeaderMap, header, response};
use bytes::{Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use remoe_billing::RequestCost;
use remoe_http::ApiError;
use remoe_otel::Span;
use remoe_proto::{ErrorCode, ServiceError};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::time::{Sleep, sleep};

/// Between comments of a stream that waits.
const COMMENTS: Duration = Duration::from_secs(1);
const COMMENT: &[u8] = b": keep-alive\n\n";
/// A backend that sends nothing for so long has failed: streams have comments of their own.
pub(crate) const SILENCE: Duration = Duration::from_secs(3600);

/// The answer of a backend, of which the client has seen nothing.
pub(crate) struct BackendResponse {
    pub(crate) head: response::Parts,
    body: BackendResponseBody,
    pub(crate) grant: Grant,
    /// Span of the backend's answer, until that is complete.
    span: Span,
}

/// Body of an answer as far as it has come.
pub(crate) enum BackendResponseBody {
    Whole(Bytes, BodyReservation),
    Stream(Frame<Bytes>, Incoming),
}

impl BackendResponse {
    pub(crate) fn new(head: response::Parts, body: BackendResponseBody, grant: Grant, span: Span) -> Self {
        let span = match body {
            BackendResponseBody::Whole(..) => {
                span.end();
                Span::default()
            }
            BackendResponseBody::Stream(..) => span,
        };
        Self { head, body, grant, span }
    }
}

type BackendResponseFuture = Pin<Box<dyn Future<Output = Result<BackendResponse, ApiError>> + Send>>;

/// Treatment of an answer on its way.
pub(crate) struct ResponseRelay {
    pub(crate) api: Api,
    /// It is stored.
    pub(crate) recording: Option<Recording>,
}

/// Most bytes of an answer that is no stream and is stored.
const RECORDED: usize = 16 << 20;

/// The body of an answer.
pub(crate) struct Relay {
    stage: Stage,
    account: RequestAccount,
    answering: ResponseRelay,
    /// Bytes that have come of an answer that is no stream and is stored.
    recorded: BytesMut,
    recorded_room: BodyReservation,
    /// Set if the answer that was begun is a stream of server-sent events.
    is_stream: bool,
    /// Span of the backend's answer.
    span: Span,
}

enum Stage {
    /// A stream whose backend is waited for.
    Waiting {
        obtaining: BackendResponseFuture,
        comment: Pin<Box<Sleep>>,
    },
    /// All that is left.
    Last(Bytes),
    /// Body of the answer. The end of a stream waits until its cost is written down, and with it the usage that states
    /// the cost.
    Rest {
        flow: Box<BackendBody>,
        end: StreamEnding,
    },
    /// Trailers, which follow the last bytes.
    Trailers(Frame<Bytes>),
    Ended,
}

/// A backend's body that has not ended.
struct BackendBody {
    first: Option<Frame<Bytes>>,
    body: Incoming,
    last: Instant,
    silence: Pin<Box<Sleep>>,
    _grant: Grant,
}

impl BackendBody {
    fn new(first: Frame<Bytes>, body: Incoming, grant: Grant) -> Self {
        Self {
            first: Some(first),
            body,
            last: Instant::now(),
            silence: Box::pin(sleep(SILENCE)),
            _grant: grant,
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            self.last = Instant::now();
            return Poll::Ready(frame.map(|frame| frame.map_err(|error| error.to_string())));
        }
        while self.silence.as_mut().poll(context).is_ready() {
            let until = self.last + SILENCE;
            if until <= Instant::now() {
                return Poll::Ready(Some(Err(format!("no data for {SILENCE:?}"))));
            }
            self.silence.as_mut().reset(until.into());
        }
        Poll::Pending
    }

    /// Reports if nothing follows what was polled. A body of known length is not polled beyond it.
    fn is_over(&self) -> bool {
        self.first.is_none() && self.body.is_end_stream()
    }
}

impl Relay {
    /// Hands on what a backend answers.
    pub(crate) fn answer(
        obtained: BackendResponse,
        account: RequestAccount,
        answering: ResponseRelay,
    ) -> (response::Parts, Self) {
        let is_stream = is_stream(&obtained.head);
        let mut relay = Self::new(Stage::Ended, account, answering, is_stream);
        let head = relay.begin(obtained);
        (head, relay)
    }

    /// Sends comments until there is an answer, and then its events.
    pub(crate) fn stream(
        obtaining: BackendResponseFuture,
        account: RequestAccount,
        answering: ResponseRelay,
    ) -> Self {
        // The first comment leaves at once, with the head.
        let comment = Box::pin(sleep(Duration::ZERO));
        let stage = Stage::Waiting { obtaining, comment };
        Self::new(stage, account, answering, true)
    }

    fn new(stage: Stage, account: RequestAccount, answering: ResponseRelay, is_stream: bool) -> Self {
        let recorded_room = reservation(&account);
        let (recorded, span) = (BytesMut::new(), Span::default());
        Self { stage, account, answering, recorded, recorded_room, is_stream, span }
    }

    fn begin(&mut self, mut obtained: BackendResponse) -> response::Parts {
        self.account.wake = obtained.grant.wake();
        // Of a stream it is told at the end.
        let cost = self.account.read(&mut obtained.head.headers);
        self.span = obtained.span;
        if !obtained.head.status.is_success() {
            self.answering.recording = None;
        }
        let placeholder = self.account.bill.placeholder();
        let end = if is_stream(&obtained.head) {
            let is_held = self.account.bill.is_open() || self.answering.recording.is_some();
            let marks = if is_held { self.answering.api.ends() } else { &[] };
            StreamEnding::of_stream(marks, placeholder).within(reservation(&self.account))
        } else {
            if placeholder.is_some() {
                // The cost changes the length.
                obtained.head.headers.remove(header::CONTENT_LENGTH);
            }
            StreamEnding::of_body(placeholder, cost.as_ref())
        };
        if !is_stream(&obtained.head) {
            // Only a stream tells what it cost at its end; what generated nothing cost nothing.
            self.account.bill.void();
        }
        self.stage = match obtained.body {
            BackendResponseBody::Whole(bytes, reservation) => {
                let bytes = whole(end, bytes);
                if let Some(recording) = self.answering.recording.take() {
                    recording.body(&bytes);
                }
                Stage::Last(reservation.around(bytes))
            }
            BackendResponseBody::Stream(first, rest) => {
                let flow = Box::new(BackendBody::new(first, rest, obtained.grant));
                Stage::Rest { flow, end }
            }
        };
        obtained.head
    }

    /// Begins an answer after comments were sent: what is no stream becomes an event of one.
    fn begin_late(&mut self, mut obtained: BackendResponse) {
        if is_stream(&obtained.head) {
            self.begin(obtained);
            return;
        }
        let cost = self.account.read(&mut obtained.head.headers);
        let end = StreamEnding::of_body(self.account.bill.placeholder(), cost.as_ref());
        self.account.bill.void();
        if obtained.head.status.is_server_error() {
            self.account.failed(StreamFailure::NotBegun);
        }
        let event = match obtained.body {
            BackendResponseBody::Whole(bytes, reservation) => {
                reservation.around(self.answering.api.late_event(&whole(end, bytes)))
            }
            BackendResponseBody::Stream(..) => {
                let message = "cannot stream the answer: expected server-sent events from the main function";
                self.error_event(ServiceError::new(ErrorCode::Internal, message))
            }
        };
        self.stage = Stage::Last(event);
    }

    /// Ends an answer with `trailers`. Its cost is in the ledger before anything of its end leaves.
    fn end_of(&mut self, mut trailers: HeaderMap) -> Frame<Bytes> {
        let cost = self.account.read(&mut trailers);
        let held = self.release(cost.as_ref());
        self.store(&held);
        self.is_whole();
        let trailers = Frame::trailers(trailers);
        if held.is_empty() {
            return trailers;
        }
        self.stage = Stage::Trailers(trailers);
        Frame::data(held)
    }

    /// Returns what is held of the answer's end.
    fn release(&mut self, cost: Option<&RequestCost>) -> Bytes {
        match &mut self.stage {
            Stage::Rest { end, .. } => end.release(cost),
            _ => Bytes::new(),
        }
    }

    fn error_event(&self, error: ServiceError) -> Bytes {
        self.answering.api.error_event(&error.into())
    }

    /// Counts `data` if it begins an event, and keeps it if it is of an answer that is no stream and is stored.
    fn record(&mut self, data: &[u8]) {
        if self.is_stream && (data.starts_with(b"data: ") || data.starts_with(b"event: ")) {
            self.account.events += 1;
        }
        if self.is_stream || self.answering.recording.is_none() {
            return;
        }
        let bytes = self.recorded.len() + data.len();
        if bytes > RECORDED || self.recorded_room.resize(bytes).is_err() {
            self.answering.recording = None;
            self.recorded = BytesMut::new();
            self.recorded_room.keep(0);
            return;
        }
        self.recorded.extend_from_slice(data);
    }

    /// Stores the answer, before the client has its end: `last` is the last event of a stream.
    fn store(&mut self, last: &[u8]) {
        match self.answering.recording.take() {
            Some(recording) if self.is_stream => recording.event(last),
            Some(recording) => recording.body(&self.recorded.split()),
            None => (),
        }
    }

    /// Nothing comes after `last`.
    fn end_with(&mut self, last: Bytes) {
        self.is_whole();
        self.account.bill.lost(0);
        self.stage = Stage::Last(last);
    }

    /// The backend's answer is there as a whole.
    fn is_whole(&mut self) {
        std::mem::take(&mut self.span).end();
    }
}

/// Room for what is held of an answer.
fn reservation(account: &RequestAccount) -> BodyReservation {
    account.bill.gateway.answers.empty(account.bill.holder())
}

/// Returns a body that has come whole, with its cost.
fn whole(mut end: StreamEnding, body: Bytes) -> Bytes {
    let body = end.take(body);
    if end.is_held() { [body, end.release(None)].concat().into() } else { body }
}

pub(crate) fn is_stream(head: &response::Parts) -> bool {
    let media = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    media.is_some_and(|media| media.starts_with("text/event-stream"))
}

/// A broken connection is all that is left to say where the answer is no stream.
#[derive(Debug, thiserror::Error)]
#[error("main function ended the answer early: {0}")]
pub(crate) struct BrokenStream(String);

impl HttpBody for Relay {
    type Data = Bytes;
    type Error = BrokenStream;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenStream>>> {
        loop {
            match &mut self.stage {
                Stage::Waiting { obtaining, comment } => match obtaining.as_mut().poll(context) {
                    Poll::Ready(Ok(obtained)) => self.begin_late(obtained),
                    Poll::Ready(Err(error)) => {
                        self.account.failed(StreamFailure::NotBegun);
                        self.stage = Stage::Last(self.answering.api.error_event(&error));
                    }
                    Poll::Pending => {
                        ready!(comment.as_mut().poll(context));
                        comment.as_mut().reset(tokio::time::Instant::now() + COMMENTS);
                        return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
                    }
                },
                Stage::Last(bytes) => {
                    let bytes = std::mem::take(bytes);
                    self.stage = Stage::Ended;
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(bytes))));
                    }
                }
                Stage::Rest { flow, end } => match ready!(flow.poll(context)) {
                    Some(Ok(frame)) => {
                        let data = match frame.into_data() {
                            Ok(data) => end.take(data),
                            Err(frame) => match frame.into_trailers() {
                                Ok(trailers) => return Poll::Ready(Some(Ok(self.end_of(trailers)))),
                                Err(frame) => return Poll::Ready(Some(Ok(frame))),
                            },
                        };
                        if data.is_empty() {
                            continue;
                        }
                        let is_over = flow.is_over() && !end.is_held();
                        self.record(&data);
                        if is_over {
                            self.store(&[]);
                            self.end_with(Bytes::new());
                        }
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                    None => {
                        let held = end.release(None);
                        self.store(&held);
                        self.end_with(held);
                    }
                    Some(Err(problem)) => {
                        tracing::warn!(problem, "main function ended the answer early");
                        let left = end.abandon();
                        self.span.fail("broken_off", "main function ended the answer early");
                        self.is_whole();
                        // The tenant is not charged for that.
                        self.account.bill.lost(0);
                        self.stage = Stage::Ended;
                        if !self.is_stream {
                            return Poll::Ready(Some(Err(BrokenStream(problem))));
                        }
                        self.account.failed(StreamFailure::BrokenOff);
                        let message = "cannot complete the answer: its main function failed";
                        let error = ServiceError::new(ErrorCode::Unavailable, message);
                        self.stage = Stage::Last([left, self.error_event(error)].concat().into());
                    }
                },
                Stage::Trailers(_) => {
                    if let Stage::Trailers(frame) = std::mem::replace(&mut self.stage, Stage::Ended) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Stage::Ended => return Poll::Ready(None),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.stage, Stage::Ended) || matches!(&self.stage, Stage::Last(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.stage {
            Stage::Last(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Stage::Ended => SizeHint::with_exact(0),
            _ => SizeHint::default(),
        }
    }
}
