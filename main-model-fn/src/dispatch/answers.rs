//! Outcomes from replicas: rows, refusals, invalid rows, and broken streams.

use super::calls::CompletedCall;
use super::exchange::{Exchange, MIN_LOAD_DELAY, MIN_TIMEOUT, RemoteCall, ResendCause};
use super::finite::{first_non_finite, is_finite};
use super::link::Link;
use super::outstanding::{Attempt, MessageAction, OutstandingMessage};
use super::split::Message;
use bytes::Bytes;
use remoe_proto::v1::forward_reply::Outcome;
use remoe_proto::v1::{Code, Failure, ForwardReply};
use std::time::{Duration, Instant};

impl Exchange {
    /// Processes a reply of link `link`.
    pub(super) fn process_reply(&mut self, remote: &mut RemoteCall<'_>, link: u64, reply: ForwardReply) {
        let Some(index) = remote.links().iter().position(|other| other.id() == link) else { return };
        // Ignores late answers to attempts that are no longer wanted.
        let Some(key) = remote.outstanding.message_key(reply.id, index) else { return };
        let Some(mut open) = remote.outstanding.messages.remove(&key) else { return };
        let Some(attempt) = remote.outstanding.take_attempt(&mut open, reply.id) else { return };
        remote.outstanding.last_progress = Instant::now();
        let cause = match reply.outcome {
            Some(Outcome::Rows(rows)) if rows.rows.len() == open.message.slots.len() * self.row_bytes => {
                match self.first_non_finite_slot(remote, &open.message, &rows.rows) {
                    None => {
                        let took = Duration::from_micros(rows.compute_us.into());
                        self.accept(remote, &attempt, open, rows.rows, took);
                        return;
                    }
                    Some(slot) => {
                        remote.outstanding.non_finite_rows.push((index, slot));
                        ResendCause::Failed
                    }
                }
            }
            Some(Outcome::Failure(failure)) => {
                handle_refusal(&remote.links()[index], remote.call.layer, &failure)
            }
            Some(Outcome::Rows(_)) | None => {
                const REASON: &str = "wrong answer size from a remote function";
                let link = &remote.links()[index];
                tracing::error!(address = link.address(), layer = remote.call.layer, "{REASON}");
                link.open_circuit(REASON);
                ResendCause::Failed
            }
        };
        self.record_call(remote, &attempt, &open.message, None);
        self.replicas.release(link, open.message.units());
        self.resend(remote, key, open, cause);
    }

    /// Records that `attempt` at `message` is over. `answer`: bytes of its rows and compute time; `None` if it failed.
    fn record_call(
        &self,
        remote: &mut RemoteCall<'_>,
        attempt: &Attempt,
        message: &Message,
        answer: Option<(usize, Duration)>,
    ) {
        if !self.traced_requests.is_empty() {
            let (link, sent, ended) = (attempt.link, attempt.sent, Instant::now());
            let call = CompletedCall { link, sent, ended, sent_bytes: message.rows.len(), answer };
            remote.outstanding.completed_calls.push(call);
        }
    }

    /// Returns the first slot of `message` whose row is not finite although its input is.
    fn first_non_finite_slot(&self, remote: &RemoteCall<'_>, message: &Message, rows: &[u8]) -> Option<u32> {
        let first = first_non_finite(rows, self.row_bytes, self.dtype)?;
        let input_is_finite = |slot: u32| {
            let token = slot as usize / remote.call.routed.top_k;
            is_finite(&remote.call.inputs[token * self.row_bytes..][..self.row_bytes], self.dtype)
        };
        let rows = rows.chunks_exact(self.row_bytes).zip(&message.slots).skip(first);
        let mut non_finite = rows.filter(|(row, _)| !is_finite(row, self.dtype)).map(|(_, &slot)| slot);
        non_finite.find(|&slot| input_is_finite(slot))
    }

    /// Accepts `rows`, computed in `took`, as the answer of `attempt` to the message `open`.
    fn accept(
        &mut self,
        remote: &mut RemoteCall<'_>,
        attempt: &Attempt,
        mut open: OutstandingMessage,
        rows: Bytes,
        took: Duration,
    ) {
        let links = remote.links();
        let link = links[attempt.link].id();
        // A reported time above the time since sending is wrong.
        let plausible_time = took.min(attempt.sent.elapsed());
        self.replicas.record_answer(link, open.message.units(), plausible_time, attempt.is_late);
        remote.outstanding.remote_compute_time += took;
        self.record_call(remote, attempt, &open.message, Some((rows.len(), plausible_time)));
        self.metrics.activity.record_remote(links[attempt.link].address(), took);
        self.cancel(links, &mut open, remote.outstanding);
        remote.outstanding.record_answer(
            remote.call.layer,
            open.message,
            (attempt.link, &rows),
            self.row_bytes,
            remote.fallback,
        );
        // The replica works, so its other messages are not late yet.
        let now = Instant::now();
        for other in remote.outstanding.messages.values_mut().filter(|other| other.waits_for(attempt.link)) {
            if let Some((due, action)) = &mut other.due {
                let least = if *action == MessageAction::Load { MIN_LOAD_DELAY } else { MIN_TIMEOUT };
                *due = (*due).max(now + self.replicas.timeout(link, least));
            }
        }
    }

    /// Sends the unanswered messages of link `link`, which broke, to other replicas.
    pub(super) fn process_broken_link(&mut self, remote: &mut RemoteCall<'_>, link: u64, message: &str) {
        self.replicas.record_broken(link);
        let Some(index) = remote.links().iter().position(|other| other.id() == link) else { return };
        let is_affected =
            |open: &OutstandingMessage| open.attempts.iter().any(|attempt| attempt.link == index);
        let affected: Vec<(u64, OutstandingMessage)> =
            remote.outstanding.messages.extract_if(|_, open| is_affected(open)).collect();
        if !affected.is_empty() {
            remote.outstanding.last_progress = Instant::now();
            tracing::warn!(link, message, messages = affected.len(), "remote answers lost");
        }
        for (key, mut open) in affected {
            let lost: Vec<u64> = open
                .attempts
                .iter()
                .filter(|attempt| attempt.link == index)
                .map(|attempt| attempt.id)
                .collect();
            for id in lost {
                if let Some(attempt) = remote.outstanding.take_attempt(&mut open, id) {
                    self.record_call(remote, &attempt, &open.message, None);
                }
            }
            self.resend(remote, key, open, ResendCause::Failed);
        }
    }

    /// Opens the circuit of links whose rows of `layer` were not finite although another computation of the same row was.
    ///
    /// `non_finite` has (link index, slot); `rows` has the rows that count, by slot. If these are not finite either, the
    /// weights are the cause and the link stays.
    pub(super) fn drop_faulty_links(
        &self,
        links: &[Link],
        layer: usize,
        non_finite: &[(usize, u32)],
        rows: &[&[u8]],
    ) {
        const REASON: &str = "non-finite rows from a remote function";
        for &(index, slot) in non_finite {
            if is_finite(rows[slot as usize], self.dtype) {
                let link = &links[index];
                tracing::error!(address = link.address(), layer, "{REASON}");
                link.open_circuit(REASON);
            }
        }
    }
}

/// Logs a refusal and returns how to send the message again.
fn handle_refusal(link: &Link, layer: usize, failure: &Failure) -> ResendCause {
    let code = failure.code();
    /// Characters of the remote function's text that are logged.
    const MAX_LOGGED_CHARS: usize = 200;
    let message: String =
        failure.message.chars().filter(|c| !c.is_control()).take(MAX_LOGGED_CHARS).collect();
    tracing::warn!(address = link.address(), layer, ?code, %message, "remote function refused a message");
    if code == Code::Draining {
        link.drain();
    }
    match code {
        _ if !failure.retryable => ResendCause::NotRetryable,
        Code::ResourceExhausted => ResendCause::Busy,
        _ => ResendCause::Failed,
    }
}
