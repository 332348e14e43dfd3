//! The body of a request, cut into whole messages for which there was room before they were read.

use super::ledger::{GrantNotice, ReservationOutcome};
use super::peer::Peer;
use super::{Inbound, Intake};
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
pub(super) const PREFIX: usize = 5;

/// How a message hears of its room.
pub(super) struct Ticket {
    notice: AtomicU8,
    task: AtomicWaker,
}

impl Ticket {
    fn new() -> Arc<Self> {
        Arc::new(Self { notice: AtomicU8::new(0), task: AtomicWaker::new() })
    }

    pub(super) fn tell(&self, notice: GrantNotice) {
        let code = match notice {
            GrantNotice::Granted => 1,
            GrantNotice::Ended => 2,
            GrantNotice::Refused => 3,
        };
        self.notice.store(code, Ordering::Release);
        self.task.wake();
    }

    fn notice(&self) -> Option<GrantNotice> {
        match self.notice.load(Ordering::Acquire) {
            1 => Some(GrantNotice::Granted),
            2 => Some(GrantNotice::Ended),
            3 => Some(GrantNotice::Refused),
            _ => None,
        }
    }
}

/// Reads one request.
pub(super) struct MessageReader {
    body: Body,
    intake: Intake,
    peer: Arc<Peer>,
    state: ReadState,
    /// Received and not looked at yet; shorter than a prefix unless something is being cut from it.
    rest: Bytes,
}

enum ReadState {
    /// Between two messages.
    Between,
    /// A message of `bytes`, prefix included, waits for room.
    Waiting {
        entry: u64,
        ticket: Arc<Ticket>,
        bytes: usize,
        look: Pin<Box<Sleep>>,
    },
    /// A message of `bytes` has room.
    Filling {
        entry: u64,
        ticket: Arc<Ticket>,
        bytes: usize,
        message: Vec<u8>,
    },
    Ended,
}

impl MessageReader {
    pub(super) fn new(body: Body, intake: Intake, peer: Arc<Peer>) -> Self {
        Self { body, intake, peer, state: ReadState::Between, rest: Bytes::new() }
    }

    /// The next message with its prefix; none at the end of the request.
    pub(super) fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        let outcome = ready!(self.poll(context));
        match &outcome {
            Some(Ok(_)) => self.peer.finished_message(),
            Some(Err(_)) | None => self.end(),
        }
        Poll::Ready(outcome)
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        loop {
            match &mut self.state {
                ReadState::Ended => return Poll::Ready(None),
                ReadState::Between => match self.cut()? {
                    Some(message) => return Poll::Ready(Some(Ok(message))),
                    None if matches!(self.state, ReadState::Between) => {
                        match ready!(self.poll_data(context))? {
                            Some(data) => self.join(data),
                            None if self.rest.is_empty() => return Poll::Ready(None),
                            None => return Poll::Ready(Some(Err(cut_off()))),
                        }
                    }
                    None => {}
                },
                ReadState::Waiting { entry, ticket, bytes, look } => {
                    ticket.task.register(context.waker());
                    match ticket.notice() {
                        Some(GrantNotice::Granted) => {
                            let (entry, ticket, bytes) = (*entry, ticket.clone(), *bytes);
                            ticket.notice.store(0, Ordering::Release);
                            self.peer.resume();
                            self.fill(entry, ticket, bytes)?;
                        }
                        Some(GrantNotice::Ended | GrantNotice::Refused) => {
                            return Poll::Ready(Some(Err(no_room("message budget exhausted"))));
                        }
                        None => {
                            ready!(look.as_mut().poll(context));
                            look.as_mut().reset(self.intake.look_again(Instant::now()).into());
                        }
                    }
                }
                ReadState::Filling { ticket, bytes, message, .. } => {
                    if message.len() == *bytes {
                        let message = std::mem::take(message);
                        self.release();
                        return Poll::Ready(Some(Ok(message.into())));
                    }
                    if ticket.notice().is_none() {
                        match Pin::new(&mut self.body).poll_frame(context) {
                            Poll::Ready(frame) => {
                                let Some(data) = data_of(frame)? else {
                                    return Poll::Ready(Some(Err(cut_off())));
                                };
                                let (now, later) = data.split_at(data.len().min(*bytes - message.len()));
                                message.extend_from_slice(now);
                                self.rest = Bytes::copy_from_slice(later);
                                continue;
                            }
                            Poll::Pending => ticket.task.register(context.waker()),
                        }
                    }
                    if ticket.notice().is_none() {
                        return Poll::Pending;
                    }
                    self.peer.lost_message();
                    return Poll::Ready(Some(Err(no_room("too slow while other messages waited"))));
                }
            }
        }
    }

    /// A message that is there as a whole, or the next state for one whose prefix is there.
    fn cut(&mut self) -> Result<Option<Bytes>, Status> {
        let Some(prefix) = self.rest.first_chunk::<PREFIX>() else { return Ok(None) };
        let [_, length @ ..] = *prefix;
        let length = u32::from_be_bytes(length) as usize;
        let limit = self.intake.limits().message_bytes;
        if length > limit {
            return Err(Status::out_of_range(format!(
                "message too large: {length} bytes, limit {limit} bytes"
            )));
        }
        let bytes = PREFIX + length;
        if self.rest.len() >= bytes {
            return Ok(Some(self.rest.split_to(bytes)));
        }
        let ticket = Ticket::new();
        match self.intake.ask(&self.peer, bytes, &ticket) {
            (entry, ReservationOutcome::Taken) => self.fill(entry, ticket, bytes)?,
            (entry, ReservationOutcome::Wait) => {
                self.peer.pause();
                let look = Box::pin(sleep_until(self.intake.look_again(Instant::now()).into()));
                self.state = ReadState::Waiting { entry, ticket, bytes, look };
            }
            (_, ReservationOutcome::Refused) => {
                self.peer.lost_message();
                return Err(no_room("share of this connection exhausted"));
            }
        }
        Ok(None)
    }

    /// Goes on with a message that has room.
    fn fill(&mut self, entry: u64, ticket: Arc<Ticket>, bytes: usize) -> Result<(), Status> {
        // From here on the room comes back by the state.
        let mut message = Vec::new();
        let reserved = message.try_reserve_exact(bytes);
        message.extend_from_slice(&std::mem::take(&mut self.rest));
        self.state = ReadState::Filling { entry, ticket, bytes, message };
        reserved.map_err(|_| no_room("out of memory"))
    }

    /// Puts `data` behind what is left of the frame before. What is kept is a copy: a few bytes of a frame
    /// would keep all of it.
    fn join(&mut self, data: Bytes) {
        self.rest = match self.rest.len() {
            0 if data.len() >= PREFIX => data,
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

    /// Nothing more is read; the connection forgets what is still sent.
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

/// The data of a frame, none at the end.
fn data_of(frame: Option<Result<http_body::Frame<Bytes>, Status>>) -> Result<Option<Bytes>, Status> {
    match frame.transpose()? {
        // Trailers of a request say nothing to anybody here; they are its end.
        Some(frame) => Ok(frame.into_data().ok()),
        None => Ok(None),
    }
}

fn cut_off() -> Status {
    Status::internal("the request ended within a message")
}

fn no_room(why: &str) -> Status {
    Status::resource_exhausted(format!("message dropped: {why}; retry"))
}

/// As tonic takes a body: whole messages, which it need not keep parts of.
pub(super) struct MeteredBody(pub(super) Arc<Inbound>);

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

    const ROOM: usize = 1 << 20;

    /// A body in pieces, which ends or goes on for ever.
    struct Pieces {
        pieces: VecDeque<Bytes>,
        ends: bool,
    }

    impl http_body::Body for Pieces {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
            match self.pieces.pop_front() {
                Some(piece) => Poll::Ready(Some(Ok(http_body::Frame::data(piece)))),
                None if self.ends => Poll::Ready(None),
                None => Poll::Pending,
            }
        }
    }

    fn intake() -> Intake {
        Intake::new(IntakeLimits {
            connections: 1,
            streams: 10,
            connection_streams: 10,
            message_bytes: ROOM - PREFIX,
            unfinished_bytes: ROOM,
        })
    }

    fn reader(intake: &Intake, peer: &Arc<Peer>, bytes: &[u8], piece: usize, ends: bool) -> MessageReader {
        let pieces = bytes.chunks(piece).map(Bytes::copy_from_slice).collect();
        assert!(intake.open_stream(peer));
        MessageReader::new(Body::new(Pieces { pieces, ends }), intake.clone(), peer.clone())
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

    /// Returns the code of the next outcome.
    async fn code(reader: &mut MessageReader) -> Option<tonic::Code> {
        next(reader).await.map(|outcome| outcome.err().map_or(tonic::Code::Ok, |status| status.code()))
    }

    /// Reports if all of the room is free.
    fn is_free(intake: &Intake) -> bool {
        let (entry, answer) = intake.ask(&Peer::new(99), ROOM, &Ticket::new());
        intake.release(entry);
        answer == ReservationOutcome::Taken
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
        let mut reader = reader(&intake, &Peer::new(1), &message(ROOM), 10, true);
        assert_eq!(code(&mut reader).await, Some(tonic::Code::OutOfRange));
        assert!(is_free(&intake));
    }

    #[tokio::test]
    async fn message_waits_for_budget_and_takes_it_from_abandoned_one() {
        let intake = intake();
        let (first, second) = (Peer::new(1), Peer::new(2));
        first.finished_message();
        second.finished_message();
        let large = message(ROOM - PREFIX);
        let mut holds = reader(&intake, &first, &large[..1000], 1000, false);
        assert!(is_pending(&mut holds));
        // A second one of the same connection has no claim to more.
        let mut greedy = reader(&intake, &first, &large[..1000], 1000, false);
        assert_eq!(code(&mut greedy).await, Some(tonic::Code::ResourceExhausted));
        let mut waits = reader(&intake, &second, &large, 5000, true);
        assert!(is_pending(&mut waits));
        drop(holds);
        assert_eq!(next(&mut waits).await.unwrap().unwrap(), large);
    }

    #[tokio::test]
    async fn unproven_connection_loses_its_budget_to_proven_one() {
        let intake = intake();
        let (bad, good) = (Peer::new(1), Peer::new(2));
        good.finished_message();
        let large = message(ROOM - PREFIX);
        let mut holds = reader(&intake, &bad, &large[..1000], 1000, false);
        assert!(is_pending(&mut holds));
        let mut asks = reader(&intake, &good, &large, 5000, true);
        assert!(is_pending(&mut asks));
        assert_eq!(code(&mut holds).await, Some(tonic::Code::ResourceExhausted));
        assert_eq!(next(&mut asks).await.unwrap().unwrap(), large);
    }
}
