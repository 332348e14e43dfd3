//! Relay of answers to clients: a main function's bytes as they come, comments while a stream waits, and an error
//! event if it breaks off.

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

/// Time between the comments of a stream that waits, which keep the connection open.
const COMMENT_INTERVAL: Duration = Duration::from_secs(1);
const COMMENT: &[u8] = b": keep-alive\n\n";
/// A main function that sends nothing for this long has failed: in streams it sends comments itself.
pub(crate) const SILENCE_TIMEOUT: Duration = Duration::from_secs(3600);

/// Answer of a main function, of which nothing has been sent to the client yet.
pub(crate) struct BackendResponse {
    pub(crate) head: response::Parts,
    body: BackendResponseBody,
    pub(crate) grant: Grant,
    /// Span of the answer, until the answer is complete.
    span: Span,
}

/// Body of an answer: all of it, or its first frame and the rest.
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

/// Form in which an answer is relayed: its API, and whether it is stored.
pub(crate) struct ResponseRelay {
    pub(crate) api: Api,
    /// Stores the answer as it passes, if it is to be stored.
    pub(crate) recording: Option<Recording>,
}

/// Largest answer that is no stream and can be stored, in bytes.
const MAX_RECORDED_BYTES: usize = 16 << 20;

/// Body of an answer to a client.
pub(crate) struct Relay {
    stage: Stage,
    account: RequestAccount,
    options: ResponseRelay,
    /// Bytes so far of an answer that is no stream and is to be stored.
    recorded: BytesMut,
    recorded_reservation: BodyReservation,
    /// Set if the client gets server-sent events.
    is_stream: bool,
    /// Span of the main function's answer.
    span: Span,
}

enum Stage {
    /// Stream whose main function has not answered yet.
    Waiting {
        response_future: BackendResponseFuture,
        comment: Pin<Box<Sleep>>,
    },
    /// Last bytes of the answer.
    Last(Bytes),
    /// Body of the answer. The end of a stream, and usage that states the cost, are held until the cost is in the
    /// ledger.
    Body {
        body: Box<BackendBody>,
        ending: StreamEnding,
    },
    /// Trailers, which follow the last bytes.
    Trailers(Frame<Bytes>),
    Ended,
}

/// Rest of a main function's body, which has not ended.
struct BackendBody {
    first: Option<Frame<Bytes>>,
    body: Incoming,
    last_frame_at: Instant,
    silence_timer: Pin<Box<Sleep>>,
    _grant: Grant,
}

impl BackendBody {
    fn new(first: Frame<Bytes>, body: Incoming, grant: Grant) -> Self {
        Self {
            first: Some(first),
            body,
            last_frame_at: Instant::now(),
            silence_timer: Box::pin(sleep(SILENCE_TIMEOUT)),
            _grant: grant,
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            self.last_frame_at = Instant::now();
            return Poll::Ready(frame.map(|frame| frame.map_err(|error| error.to_string())));
        }
        while self.silence_timer.as_mut().poll(context).is_ready() {
            let deadline = self.last_frame_at + SILENCE_TIMEOUT;
            if deadline <= Instant::now() {
                return Poll::Ready(Some(Err(format!("no data for {SILENCE_TIMEOUT:?}"))));
            }
            self.silence_timer.as_mut().reset(deadline.into());
        }
        Poll::Pending
    }

    /// Reports if the body has ended. A body of known length is not polled after its last byte.
    fn is_over(&self) -> bool {
        self.first.is_none() && self.body.is_end_stream()
    }
}

impl Relay {
    /// Relays the answer `response`. Returns its head and its body.
    pub(crate) fn answer(
        response: BackendResponse,
        account: RequestAccount,
        options: ResponseRelay,
    ) -> (response::Parts, Self) {
        let is_stream = is_stream(&response.head);
        let mut relay = Self::new(Stage::Ended, account, options, is_stream);
        let head = relay.begin(response);
        (head, relay)
    }

    /// Sends comments until the main function answers, and then the events of its answer.
    pub(crate) fn stream(
        response_future: BackendResponseFuture,
        account: RequestAccount,
        options: ResponseRelay,
    ) -> Self {
        // The first comment leaves at once, with the head.
        let comment = Box::pin(sleep(Duration::ZERO));
        let stage = Stage::Waiting { response_future, comment };
        Self::new(stage, account, options, true)
    }

    fn new(stage: Stage, account: RequestAccount, options: ResponseRelay, is_stream: bool) -> Self {
        let recorded_reservation = answer_reservation(&account);
        let (recorded, span) = (BytesMut::new(), Span::default());
        Self { stage, account, options, recorded, recorded_reservation, is_stream, span }
    }

    fn begin(&mut self, mut response: BackendResponse) -> response::Parts {
        self.account.wake = response.grant.awaited_wake();
        // A stream reports its cost in its trailers.
        let cost = self.account.take_report(&mut response.head.headers);
        self.span = response.span;
        if !response.head.status.is_success() {
            self.options.recording = None;
        }
        let placeholder = self.account.bill.placeholder();
        let ending = if is_stream(&response.head) {
            let is_held = self.account.bill.is_open() || self.options.recording.is_some();
            let marks = if is_held { self.options.api.last_event_lines() } else { &[] };
            StreamEnding::of_stream(marks, placeholder).within(answer_reservation(&self.account))
        } else {
            if placeholder.is_some() {
                // Writing the cost in place of the placeholder changes the length.
                response.head.headers.remove(header::CONTENT_LENGTH);
            }
            StreamEnding::of_body(placeholder, cost.as_ref())
        };
        if !is_stream(&response.head) {
            // An answer that is no stream has reported its cost in its headers; without a report it cost nothing.
            self.account.bill.close_without_cost();
        }
        self.stage = match response.body {
            BackendResponseBody::Whole(bytes, reservation) => {
                let bytes = complete_body(ending, bytes);
                if let Some(recording) = self.options.recording.take() {
                    recording.store_body(&bytes);
                }
                Stage::Last(reservation.attach_to(bytes))
            }
            BackendResponseBody::Stream(first, rest) => {
                let body = Box::new(BackendBody::new(first, rest, response.grant));
                Stage::Body { body, ending }
            }
        };
        response.head
    }

    /// Begins an answer after comments have been sent. An answer that is no stream becomes an event.
    fn begin_late(&mut self, mut response: BackendResponse) {
        if is_stream(&response.head) {
            self.begin(response);
            return;
        }
        let cost = self.account.take_report(&mut response.head.headers);
        let ending = StreamEnding::of_body(self.account.bill.placeholder(), cost.as_ref());
        self.account.bill.close_without_cost();
        if response.head.status.is_server_error() {
            self.account.fail_stream(StreamFailure::NotBegun);
        }
        let event = match response.body {
            BackendResponseBody::Whole(bytes, reservation) => {
                reservation.attach_to(self.options.api.error_body_event(&complete_body(ending, bytes)))
            }
            BackendResponseBody::Stream(..) => {
                let message = "cannot stream the answer: expected server-sent events from the main function";
                self.error_event(ServiceError::new(ErrorCode::Internal, message))
            }
        };
        self.stage = Stage::Last(event);
    }

    /// Ends a stream with `trailers`. The cost is written to the ledger before the end of the stream is sent.
    fn end_with_trailers(&mut self, mut trailers: HeaderMap) -> Frame<Bytes> {
        let cost = self.account.take_report(&mut trailers);
        let held = self.release(cost.as_ref());
        self.store(&held);
        self.end_span();
        let trailers = Frame::trailers(trailers);
        if held.is_empty() {
            return trailers;
        }
        // The held end goes first.
        self.stage = Stage::Trailers(trailers);
        Frame::data(held)
    }

    /// Releases the held end of the answer, with `cost` in place of the placeholder.
    fn release(&mut self, cost: Option<&RequestCost>) -> Bytes {
        match &mut self.stage {
            Stage::Body { ending, .. } => ending.release(cost),
            _ => Bytes::new(),
        }
    }

    fn error_event(&self, error: ServiceError) -> Bytes {
        self.options.api.error_event(&error.into())
    }

    /// Counts `data` if it begins an event. If the answer is no stream and is to be stored, keeps `data`.
    fn observe_data(&mut self, data: &[u8]) {
        if self.is_stream && (data.starts_with(b"data: ") || data.starts_with(b"event: ")) {
            self.account.events += 1;
        }
        if self.is_stream || self.options.recording.is_none() {
            return;
        }
        let bytes = self.recorded.len() + data.len();
        if bytes > MAX_RECORDED_BYTES || self.recorded_reservation.resize(bytes).is_err() {
            self.options.recording = None;
            self.recorded = BytesMut::new();
            self.recorded_reservation.shrink_to(0);
            return;
        }
        self.recorded.extend_from_slice(data);
    }

    /// Stores the answer, before its end is sent. `last_event` is the last event of a stream.
    fn store(&mut self, last_event: &[u8]) {
        match self.options.recording.take() {
            Some(recording) if self.is_stream => recording.store_event(last_event),
            Some(recording) => recording.store_body(&self.recorded.split()),
            None => (),
        }
    }

    /// Ends the answer with the bytes `last`, without trailers.
    fn end_with(&mut self, last: Bytes) {
        self.end_span();
        self.account.bill.record_lost(0);
        self.stage = Stage::Last(last);
    }

    /// Ends the span of the main function's answer.
    fn end_span(&mut self) {
        std::mem::take(&mut self.span).end();
    }
}

/// Returns an empty reservation for bytes of an answer that are held.
fn answer_reservation(account: &RequestAccount) -> BodyReservation {
    account.bill.gateway.answer_budget.empty(account.bill.holder())
}

/// Returns the complete `body` with its cost in place of the placeholder.
fn complete_body(mut ending: StreamEnding, body: Bytes) -> Bytes {
    let body = ending.take(body);
    if ending.is_held() { [body, ending.release(None)].concat().into() } else { body }
}

pub(crate) fn is_stream(head: &response::Parts) -> bool {
    let content_type = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    content_type.is_some_and(|content_type| content_type.starts_with("text/event-stream"))
}

/// Failure of a main function after the head was sent. If the answer is no stream, closing the connection is the only
/// way to report it.
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
                Stage::Waiting { response_future, comment } => match response_future.as_mut().poll(context) {
                    Poll::Ready(Ok(response)) => self.begin_late(response),
                    Poll::Ready(Err(error)) => {
                        self.account.fail_stream(StreamFailure::NotBegun);
                        self.stage = Stage::Last(self.options.api.error_event(&error));
                    }
                    Poll::Pending => {
                        ready!(comment.as_mut().poll(context));
                        comment.as_mut().reset(tokio::time::Instant::now() + COMMENT_INTERVAL);
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
                Stage::Body { body, ending } => match ready!(body.poll(context)) {
                    Some(Ok(frame)) => {
                        let data = match frame.into_data() {
                            Ok(data) => ending.take(data),
                            Err(frame) => match frame.into_trailers() {
                                Ok(trailers) => {
                                    return Poll::Ready(Some(Ok(self.end_with_trailers(trailers))));
                                }
                                Err(frame) => return Poll::Ready(Some(Ok(frame))),
                            },
                        };
                        if data.is_empty() {
                            continue;
                        }
                        let is_over = body.is_over() && !ending.is_held();
                        self.observe_data(&data);
                        if is_over {
                            self.store(&[]);
                            self.end_with(Bytes::new());
                        }
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                    None => {
                        let held = ending.release(None);
                        self.store(&held);
                        self.end_with(held);
                    }
                    Some(Err(problem)) => {
                        tracing::warn!(problem, "main function ended the answer early");
                        let rest = ending.abandon();
                        self.span.fail("broken_off", "main function ended the answer early");
                        self.end_span();
                        // The tenant is not charged for a main function's failure.
                        self.account.bill.record_lost(0);
                        self.stage = Stage::Ended;
                        if !self.is_stream {
                            return Poll::Ready(Some(Err(BrokenStream(problem))));
                        }
                        self.account.fail_stream(StreamFailure::BrokenOff);
                        let message = "cannot complete the answer: its main function failed";
                        let error = ServiceError::new(ErrorCode::Unavailable, message);
                        self.stage = Stage::Last([rest, self.error_event(error)].concat().into());
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
