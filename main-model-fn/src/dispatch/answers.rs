//! Outcomes from replicas: rows, refusals, rows that cannot be right, and the ends of streams.

use super::calls::Call;
use super::exchange::{Exchange, LEAST_BEFORE_LOADS, LEAST_PATIENCE, RemoteCall, ResendCause};
use super::finite::{first_strange, is_finite};
use super::link::Link;
use super::outstanding::{Attempt, MessageAction, OutstandingMessage};
use super::split::Message;
use bytes::Bytes;
use remoe_proto::v1::forward_reply::Outcome;
use remoe_proto::v1::{Code, Failure, ForwardReply};
use std::time::{Duration, Instant};

impl Exchange {
    /// Takes an answer of link `link`.
    pub(super) fn take_reply(&mut self, at: &mut RemoteCall<'_>, link: u64, reply: ForwardReply) {
        let Some(index) = at.links().iter().position(|it| it.id() == link) else { return };
        // A late answer to an attempt that was given up: another one won.
        let Some(key) = at.outstanding.message_of(reply.id, index) else { return };
        let Some(mut open) = at.outstanding.open.remove(&key) else { return };
        let Some(attempt) = at.outstanding.forget_one(&mut open, reply.id) else { return };
        at.outstanding.moved = Instant::now();
        let cause = match reply.outcome {
            Some(Outcome::Rows(rows)) if rows.rows.len() == open.message.slots.len() * self.row_bytes => {
                match self.first_strange(at, &open.message, &rows.rows) {
                    None => {
                        let took = Duration::from_micros(rows.compute_us.into());
                        self.accept(at, &attempt, open, rows.rows, took);
                        return;
                    }
                    Some(slot) => {
                        at.outstanding.accused.push((index, slot));
                        ResendCause::Failed
                    }
                }
            }
            Some(Outcome::Failure(failure)) => refused(&at.links()[index], at.call.layer, &failure),
            Some(Outcome::Rows(_)) | None => {
                const REASON: &str = "wrong answer size from a remote function";
                tracing::error!(address = at.links()[index].address(), layer = at.call.layer, "{REASON}");
                at.links()[index].give_up(REASON);
                ResendCause::Failed
            }
        };
        self.note_call(at, &attempt, &open.message, None);
        self.replicas.gone(link, open.message.units());
        self.again(at, key, open, cause);
    }

    /// The message of `attempt` is over: its `answer` has so many bytes, computed in so long, or there is none.
    fn note_call(
        &self,
        at: &mut RemoteCall<'_>,
        attempt: &Attempt,
        message: &Message,
        answer: Option<(usize, Duration)>,
    ) {
        if !self.followed.is_empty() {
            let (link, sent, ended) = (attempt.link, attempt.sent, Instant::now());
            at.outstanding.calls.push(Call { link, sent, ended, sent_bytes: message.rows.len(), answer });
        }
    }

    /// The first slot of `message` whose row is not finite although its input is.
    fn first_strange(&self, at: &RemoteCall<'_>, message: &Message, rows: &[u8]) -> Option<u32> {
        let first = first_strange(rows, self.row_bytes, self.dtype)?;
        let input_is_finite = |slot: u32| {
            let token = slot as usize / at.call.routed.top_k;
            is_finite(&at.call.inputs[token * self.row_bytes..][..self.row_bytes], self.dtype)
        };
        let rows = rows.chunks_exact(self.row_bytes).zip(&message.slots).skip(first);
        let mut strange = rows.filter(|(row, _)| !is_finite(row, self.dtype)).map(|(_, &slot)| slot);
        strange.find(|&slot| input_is_finite(slot))
    }

    /// The rows of `open`, computed in `took`, are what `attempt` at it has brought.
    fn accept(
        &mut self,
        at: &mut RemoteCall<'_>,
        attempt: &Attempt,
        mut open: OutstandingMessage,
        rows: Bytes,
        took: Duration,
    ) {
        let links = at.links();
        let link = links[attempt.link].id();
        // It cannot have taken longer than the answer did.
        let believed = took.min(attempt.sent.elapsed());
        self.replicas.answered(link, open.message.units(), believed, attempt.late);
        at.outstanding.computed += took;
        self.note_call(at, attempt, &open.message, Some((rows.len(), believed)));
        self.metrics.activity.answered(links[attempt.link].address(), took);
        self.cancel(links, &mut open, at.outstanding);
        at.outstanding.answer(
            at.call.layer,
            open.message,
            (attempt.link, &rows),
            self.row_bytes,
            at.fallback,
        );
        // The replica works: what else it owes is not late yet.
        let now = Instant::now();
        for other in at.outstanding.open.values_mut().filter(|other| other.waits_for(attempt.link)) {
            if let Some((due, what)) = &mut other.due {
                let least = if *what == MessageAction::Load { LEAST_BEFORE_LOADS } else { LEAST_PATIENCE };
                *due = (*due).max(now + self.replicas.patience(link, least));
            }
        }
    }

    /// Link `link` has broken: nothing that it owes will come.
    pub(super) fn take_break(&mut self, at: &mut RemoteCall<'_>, link: u64, message: &str) {
        self.replicas.broken(link);
        let Some(index) = at.links().iter().position(|it| it.id() == link) else { return };
        let hit = |open: &OutstandingMessage| open.attempts.iter().any(|attempt| attempt.link == index);
        let hit: Vec<(u64, OutstandingMessage)> =
            at.outstanding.open.extract_if(|_, open| hit(open)).collect();
        if !hit.is_empty() {
            at.outstanding.moved = Instant::now();
            tracing::warn!(link, message, messages = hit.len(), "remote answers lost");
        }
        for (key, mut open) in hit {
            let lost: Vec<u64> = open
                .attempts
                .iter()
                .filter(|attempt| attempt.link == index)
                .map(|attempt| attempt.id)
                .collect();
            for id in lost {
                if let Some(attempt) = at.outstanding.forget_one(&mut open, id) {
                    self.note_call(at, &attempt, &open.message, None);
                }
            }
            self.again(at, key, open, ResendCause::Failed);
        }
    }

    /// Gives up on replicas whose rows of `layer` were not finite where those that count, `rows` by
    /// slot, are: they break what others compute well. Where those are not finite either it is what the
    /// weights say.
    pub(super) fn convict(&self, links: &[Link], layer: usize, accused: &[(usize, u32)], rows: &[&[u8]]) {
        const REASON: &str = "non-finite rows from a remote function";
        for &(index, slot) in accused {
            if is_finite(rows[slot as usize], self.dtype) {
                let link = &links[index];
                tracing::error!(address = link.address(), layer, "{REASON}");
                link.give_up(REASON);
            }
        }
    }
}

/// Logs a refusal and returns its meaning for the message.
fn refused(link: &Link, layer: usize, failure: &Failure) -> ResendCause {
    let code = failure.code();
    /// Characters of the remote function's message in a line of the log.
    const SHOWN: usize = 200;
    let message: String = failure.message.chars().filter(|c| !c.is_control()).take(SHOWN).collect();
    tracing::warn!(address = link.address(), layer, ?code, %message, "remote function refused a message");
    if code == Code::Draining {
        link.rest();
    }
    match code {
        _ if !failure.retryable => ResendCause::Hopeless,
        Code::ResourceExhausted => ResendCause::Busy,
        _ => ResendCause::Failed,
    }
}
