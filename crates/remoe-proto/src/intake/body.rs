//! Message reader: splits the body of a request into complete messages, whose bytes are reserved before they are
//! read.

use super::message_budget::{GrantNotice, ReservationOutcome};
use super::peer::Peer;
use super::{Intake, RequestReader};
use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body::Body as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::time::{Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;

/// Bytes before each message: a flag and the length (gRPC over HTTP/2, "Length-Prefixed-Message").
pub(super) const PREFIX_BYTES: usize = 5;

/// Channel of notices to a message about its reservation.
pub(super) struct Reservation {
    notice: AtomicU8,
    task: AtomicWaker,
}

impl Reservation {
    fn new() -> Arc<Self> {
        Arc::new(Self { notice: AtomicU8::new(0), task: AtomicWaker::new() })
    }

    pub(super) fn deliver(&self, notice: GrantNotice) {
        let code = match notice {
            GrantNotice::Granted => 1,
            GrantNotice::Dropped => 2,
            GrantNotice::Refused => 3,
        };
        self.notice.store(code, Ordering::Release);
        self.task.wake();
    }

    fn notice(&self) -> Option<GrantNotice> {
        match self.notice.load(Ordering::Acquire) {
            1 => Some(GrantNotice::Granted),
            2 => Some(GrantNotice::Dropped),
            3 => Some(GrantNotice::Refused),
            _ => None,
        }
    }
}

/// Message reader of one request.
pub(super) struct MessageReader {
    body: Body,
    intake: Intake,
    peer: Arc<Peer>,
    state: ReadState,
    /// Received bytes that are not processed yet, fewer than a prefix between calls of `next_in_buffer`.
    rest: Bytes,
}

enum ReadState {
    /// Between two messages.
    Between,
    /// A message of `bytes`, with its prefix, waits for its reservation.
    Waiting {
        entry: u64,
        reservation: Arc<Reservation>,
        bytes: usize,
        recheck: Pin<Box<Sleep>>,
    },
    /// A message of `bytes` is being read into `message`.
    Filling {
        entry: u64,
        reservation: Arc<Reservation>,
        bytes: usize,
        message: Vec<u8>,
    },
    Ended,
}

impl MessageReader {
    pub(super) fn new(body: Body, intake: Intake, peer: Arc<Peer>) -> Self {
        Self { body, intake, peer, state: ReadState::Between, rest: Bytes::new() }
    }

    /// Reads the next message with its prefix. Returns `None` at the end of the request.
    pub(super) fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        let outcome = ready!(self.poll(context));
        match &outcome {
            Some(Ok(_)) => self.peer.record_completed_message(),
            Some(Err(_)) | None => self.end(),
        }
        Poll::Ready(outcome)
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        loop {
            match &mut self.state {
                ReadState::Ended => return Poll::Ready(None),
                ReadState::Between => match self.next_in_buffer()? {
                    Some(message) => return Poll::Ready(Some(Ok(message))),
                    None if matches!(self.state, ReadState::Between) => {
                        match ready!(self.poll_data(context))? {
                            Some(data) => self.append(data),
                            None if self.rest.is_empty() => return Poll::Ready(None),
                            None => return Poll::Ready(Some(Err(truncated()))),
                        }
                    }
                    None => {}
                },
                ReadState::Waiting { entry, reservation, bytes, recheck } => {
                    reservation.task.register(context.waker());
                    match reservation.notice() {
                        Some(GrantNotice::Granted) => {
                            let (entry, reservation, bytes) = (*entry, reservation.clone(), *bytes);
                            reservation.notice.store(0, Ordering::Release);
                            self.peer.resume();
                            self.fill(entry, reservation, bytes)?;
                        }
                        Some(GrantNotice::Dropped | GrantNotice::Refused) => {
                            return Poll::Ready(Some(Err(dropped("message budget exhausted"))));
                        }
                        None => {
                            ready!(recheck.as_mut().poll(context));
                            recheck.as_mut().reset(self.intake.recheck(Instant::now()).into());
                        }
                    }
                }
                ReadState::Filling { reservation, bytes, message, .. } => {
                    if message.len() == *bytes {
                        let message = std::mem::take(message);
                        self.release();
                        return Poll::Ready(Some(Ok(message.into())));
                    }
                    if reservation.notice().is_none() {
                        match Pin::new(&mut self.body).poll_frame(context) {
                            Poll::Ready(frame) => {
                                let Some(data) = data_of(frame)? else {
                                    return Poll::Ready(Some(Err(truncated())));
                                };
                                let (current, following) =
                                    data.split_at(data.len().min(*bytes - message.len()));
                                message.extend_from_slice(current);
                                self.rest = Bytes::copy_from_slice(following);
                                continue;
                            }
                            Poll::Pending => reservation.task.register(context.waker()),
                        }
                    }
                    if reservation.notice().is_none() {
                        return Poll::Pending;
                    }
                    self.peer.record_dropped_message();
                    return Poll::Ready(Some(Err(dropped("too slow while other messages waited"))));
                }
            }
        }
    }

    /// Returns the next message if it is complete. If only its prefix is complete, reserves its bytes and changes the
    /// state.
    fn next_in_buffer(&mut self) -> Result<Option<Bytes>, Status> {
        let Some(prefix) = self.rest.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let [_, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        let limit = self.intake.limits().message_bytes;
        if length > limit {
            return Err(Status::out_of_range(format!(
                "message too large: {length} bytes, limit {limit} bytes"
            )));
        }
        let bytes = PREFIX_BYTES + length;
        if self.rest.len() >= bytes {
            return Ok(Some(self.rest.split_to(bytes)));
        }
        let reservation = Reservation::new();
        match self.intake.reserve(&self.peer, bytes, &reservation) {
            (entry, ReservationOutcome::Taken) => self.fill(entry, reservation, bytes)?,
            (entry, ReservationOutcome::Wait) => {
                self.peer.pause();
                let recheck = Box::pin(sleep_until(self.intake.recheck(Instant::now()).into()));
                self.state = ReadState::Waiting { entry, reservation, bytes, recheck };
            }
            (_, ReservationOutcome::Refused) => {
                self.peer.record_dropped_message();
                return Err(dropped("share of this connection exhausted"));
            }
        }
        Ok(None)
    }

    /// Starts to fill a message with reserved bytes.
    fn fill(&mut self, entry: u64, reservation: Arc<Reservation>, bytes: usize) -> Result<(), Status> {
        // From here on, the state releases the reservation.
        let mut message = Vec::new();
        let reserved = message.try_reserve_exact(bytes);
        message.extend_from_slice(&std::mem::take(&mut self.rest));
        self.state = ReadState::Filling { entry, reservation, bytes, message };
        reserved.map_err(|_| dropped("out of memory"))
    }

    /// Appends `data` to the rest of the previous frame. Copies the rest, because a few bytes would keep the whole
    /// frame.
    fn append(&mut self, data: Bytes) {
        self.rest = match self.rest.len() {
            0 if data.len() >= PREFIX_BYTES => data,
            0 => Bytes::copy_from_slice(&data),
            _ => [&self.rest[..], &data].concat().into(),
        };
    }

    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
        data_of(ready!(Pin::new(&mut self.body).poll_frame(context))).into()
    }

    fn release(&mut self) {
        match std::mem::replace(&mut self.state, ReadState::Between) {
            ReadState::Filling { entry, .. } => self.intake.release(entry),
            ReadState::Waiting { entry, .. } => {
                self.intake.release(entry);
                self.peer.resume();
            }
            ReadState::Between => {}
            ReadState::Ended => self.state = ReadState::Ended,
        }
    }

    /// Ends the request. Data that still arrives is discarded.
    fn end(&mut self) {
        self.release();
        self.state = ReadState::Ended;
        self.rest = Bytes::new();
        self.body = Body::empty();
    }
}

impl Drop for MessageReader {
    fn drop(&mut self) {
        self.release();
        self.intake.close_stream(&self.peer);
    }
}

/// Returns the data of a frame. Returns `None` at the end.
fn data_of(frame: Option<Result<http_body::Frame<Bytes>, Status>>) -> Result<Option<Bytes>, Status> {
    match frame.transpose()? {
        // Trailers of a request are ignored; they mark its end.
        Some(frame) => Ok(frame.into_data().ok()),
        None => Ok(None),
    }
}

fn truncated() -> Status {
    Status::internal("the request ended within a message")
}

fn dropped(why: &str) -> Status {
    Status::resource_exhausted(format!("message dropped: {why}; retry"))
}

/// Body for tonic that yields complete messages, so that tonic buffers no parts.
pub(super) struct MeteredBody(pub(super) Arc<RequestReader>);

impl http_body::Body for MeteredBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
        match &mut *self.0.reader() {
            Some(reader) => reader.poll_message(context).map_ok(http_body::Frame::data),
            None => Poll::Ready(None),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::IntakeLimits;
    use std::collections::VecDeque;
    use std::future::poll_fn;
    use std::task::Waker;

    const BUDGET: usize = 1 << 20;

    /// Body in pieces, which ends or stays open.
    struct PiecewiseBody {
        pieces: VecDeque<Bytes>,
        is_complete: bool,
    }

    impl http_body::Body for PiecewiseBody {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
            match self.pieces.pop_front() {
                Some(piece) => Poll::Ready(Some(Ok(http_body::Frame::data(piece)))),
                None if self.is_complete => Poll::Ready(None),
                None => Poll::Pending,
            }
        }
    }

    fn intake() -> Intake {
        Intake::new(IntakeLimits {
            connections: 1,
            streams: 10,
            connection_streams: 10,
            message_bytes: BUDGET - PREFIX_BYTES,
            unfinished_bytes: BUDGET,
        })
    }

    fn reader(
        intake: &Intake,
        peer: &Arc<Peer>,
        bytes: &[u8],
        piece_bytes: usize,
        is_complete: bool,
    ) -> MessageReader {
        let pieces = bytes.chunks(piece_bytes).map(Bytes::copy_from_slice).collect();
        assert!(intake.open_stream(peer));
        MessageReader::new(Body::new(PiecewiseBody { pieces, is_complete }), intake.clone(), peer.clone())
    }

    fn message(length: usize) -> Vec<u8> {
        let head = u32::try_from(length).unwrap().to_be_bytes();
        [&[0], &head[..], &vec![length as u8; length]].concat()
    }

    async fn next(reader: &mut MessageReader) -> Option<Result<Bytes, Status>> {
        poll_fn(|context| reader.poll_message(context)).await
    }

    fn is_pending(reader: &mut MessageReader) -> bool {
        reader.poll_message(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    /// Returns the status code of the next outcome.
    async fn code(reader: &mut MessageReader) -> Option<tonic::Code> {
        next(reader).await.map(|outcome| outcome.err().map_or(tonic::Code::Ok, |status| status.code()))
    }

    /// Returns true if the whole budget is free.
    fn is_free(intake: &Intake) -> bool {
        let (entry, outcome) = intake.reserve(&Peer::new(99), BUDGET, &Reservation::new());
        intake.release(entry);
        outcome == ReservationOutcome::Taken
    }

    #[tokio::test]
    async fn messages_are_whole_wherever_frames_end() {
        let intake = intake();
        let lengths = [0, 1, 10, 70_000, 5, 0, 0, 300_000, 3];
        let bytes: Vec<u8> = lengths.iter().flat_map(|&length| message(length)).collect();
        for piece in [1, 2, 3, 4, 5, 6, 7, 16, 1000, 16_384, 70_010, bytes.len()] {
            let mut reader = reader(&intake, &Peer::new(1), &bytes, piece, true);
            for length in lengths {
                assert_eq!(next(&mut reader).await.unwrap().unwrap(), message(length), "pieces of {piece}");
            }
            assert!(next(&mut reader).await.is_none());
            assert!(is_free(&intake));
        }
    }

    #[tokio::test]
    async fn truncated_or_oversized_request_fails_and_frees_its_budget() {
        let intake = intake();
        let whole = message(1000);
        for end in 1..whole.len() {
            let mut reader = reader(&intake, &Peer::new(1), &whole[..end], 100, true);
            assert_eq!(code(&mut reader).await, Some(tonic::Code::Internal), "{end} bytes");
            assert_eq!(code(&mut reader).await, None);
            assert!(is_free(&intake));
        }
        let mut reader = reader(&intake, &Peer::new(1), &message(BUDGET), 10, true);
        assert_eq!(code(&mut reader).await, Some(tonic::Code::OutOfRange));
        assert!(is_free(&intake));
    }

    #[tokio::test]
    async fn message_waits_for_budget_and_takes_it_from_abandoned_one() {
        let intake = intake();
        let (first, second) = (Peer::new(1), Peer::new(2));
        first.record_completed_message();
        second.record_completed_message();
        let large = message(BUDGET - PREFIX_BYTES);
        let mut holder = reader(&intake, &first, &large[..1000], 1000, false);
        assert!(is_pending(&mut holder));
        // A second message of the same connection is refused.
        let mut greedy = reader(&intake, &first, &large[..1000], 1000, false);
        assert_eq!(code(&mut greedy).await, Some(tonic::Code::ResourceExhausted));
        let mut waiter = reader(&intake, &second, &large, 5000, true);
        assert!(is_pending(&mut waiter));
        drop(holder);
        assert_eq!(next(&mut waiter).await.unwrap().unwrap(), large);
    }

    #[tokio::test]
    async fn unproven_connection_loses_its_budget_to_proven_one() {
        let intake = intake();
        let (bad, good) = (Peer::new(1), Peer::new(2));
        good.record_completed_message();
        let large = message(BUDGET - PREFIX_BYTES);
        let mut holder = reader(&intake, &bad, &large[..1000], 1000, false);
        assert!(is_pending(&mut holder));
        let mut waiter = reader(&intake, &good, &large, 5000, true);
        assert!(is_pending(&mut waiter));
        assert_eq!(code(&mut holder).await, Some(tonic::Code::ResourceExhausted));
        assert_eq!(next(&mut waiter).await.unwrap().unwrap(), large);
    }
}
