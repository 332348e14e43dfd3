//! The remote half of a layer call: messages out, answers in, and what is done about answers that
//! fail or stay away.

use super::error::ExpertError;
use super::link::{Link, LinkEvent};
use super::metrics::ExpertMetrics;
use super::placement::Placement;
use super::split::{Message, messages, split};
use super::{LAYER_LIMIT, LayerCall};
use bytes::Bytes;
use remoe_wire::v1::{Cancel, Code, ForwardReply, ForwardRequest, Work};
use remoe_wire::v1::{forward_reply::Outcome, forward_request::Body};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// One attempt at a replica.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(2);
/// Messages have left when the socket has taken them; a peer that reads slowly must not keep the
/// local kernels waiting for longer than this.
const LEAVE_LIMIT: Duration = Duration::from_millis(20);
/// Answers that arrived during the local work have at least so long to be read.
const GRACE: Duration = Duration::from_millis(100);
/// Up to this many tokens a call counts as decoding and goes to one replica.
const DECODE_TOKENS: usize = 16;
/// How long the engine polls for answers before it sleeps: waking a thread costs ten times a
/// loopback exchange.
const POLL: Duration = Duration::from_micros(100);

/// The engine's conversations with remote functions.
pub(super) struct Exchange {
    runtime: Rc<Runtime>,
    events: mpsc::UnboundedReceiver<LinkEvent>,
    row_bytes: usize,
    next_id: u64,
    rotation: usize,
    metrics: ExpertMetrics,
}

/// The remote half of one layer call.
#[derive(Default)]
pub(super) struct Outstanding {
    parts: HashMap<u64, Part>,
    /// Answers: rows, and the slot of each.
    pub(super) answers: Vec<(Bytes, Vec<u32>)>,
    /// Slots that no replica will answer.
    pub(super) orphans: Vec<u32>,
    /// One slot of every message that was sent again.
    pub(super) retried: Vec<u32>,
}

/// A message that waits for its answer.
struct Part {
    message: Message,
    /// Index of the link in the placement.
    link: usize,
    tried: BTreeSet<usize>,
    deadline: Instant,
}

impl Outstanding {
    /// (token, expert) pairs whose answers are still out.
    fn missing(&self) -> usize {
        self.parts.values().map(|part| part.message.slots.len()).sum()
    }

    /// Removes the messages that `matches`.
    fn take(&mut self, matches: impl Fn(&Part) -> bool) -> Vec<Part> {
        self.parts.extract_if(|_, part| matches(part)).map(|(_, part)| part).collect()
    }
}

impl Exchange {
    pub(super) fn new(
        runtime: Rc<Runtime>,
        events: mpsc::UnboundedReceiver<LinkEvent>,
        row_bytes: usize,
        metrics: ExpertMetrics,
    ) -> Self {
        Self { runtime, events, row_bytes, next_id: 0, rotation: 0, metrics }
    }

    /// Waits for the next event of any link.
    pub(super) async fn event(&mut self) -> Option<LinkEvent> {
        self.events.recv().await
    }

    /// Sends the pairs `slots` on their way and sees them leave. Pairs that no replica can take
    /// come back as orphans.
    pub(super) fn send_off(
        &mut self,
        placement: &Placement,
        call: &LayerCall<'_>,
        slots: &[u32],
    ) -> Outstanding {
        // Answers and failures of earlier calls have no one waiting for them.
        while self.events.try_recv().is_ok() {}
        let mut outstanding = Outstanding::default();
        if slots.is_empty() {
            return outstanding;
        }
        let links = &placement.links;
        let ready = self.candidates(links, call.layer, &BTreeSet::new());
        if ready.is_empty() {
            outstanding.orphans = slots.to_vec();
            return outstanding;
        }
        let parts = match call.routed.tokens() <= DECODE_TOKENS {
            true => vec![slots.to_vec()],
            false => split(call.routed, slots, ready.len()),
        };
        // What each link has to have written when the messages have left.
        let mut left: Vec<u64> = links.iter().map(Link::written).collect();
        for (part, &link) in parts.iter().zip(&ready) {
            for message in messages(call.routed, part, call.inputs, self.row_bytes) {
                left[link] += message.rows.len() as u64;
                self.send(placement, call, message, BTreeSet::new(), Some(link), &mut outstanding);
            }
        }
        self.see_off(links, &left);
        outstanding
    }

    /// Waits for answers; failed messages go to the next replica, those that none is left for
    /// become orphans.
    ///
    /// # Errors
    /// `deadline` passes.
    pub(super) fn collect(
        &mut self,
        placement: &Placement,
        call: &LayerCall<'_>,
        outstanding: &mut Outstanding,
        deadline: Instant,
    ) -> Result<(), ExpertError> {
        let started = Instant::now();
        // Nobody listened while the local kernels ran: what came meanwhile is not late.
        for part in outstanding.parts.values_mut() {
            part.deadline = part.deadline.max(started + GRACE);
        }
        while !outstanding.parts.is_empty() {
            if Instant::now() >= deadline {
                let missing = outstanding.missing();
                return Err(ExpertError::Deadline { layer: call.layer, missing, limit: LAYER_LIMIT });
            }
            let next = outstanding.parts.values().map(|part| part.deadline).fold(deadline, Instant::min);
            match self.next_event(started + POLL, next) {
                Some(LinkEvent::Reply(reply)) => self.take_reply(placement, call, reply, outstanding),
                Some(LinkEvent::Broken { link, message }) => {
                    let lost = outstanding.take(|part| placement.links[part.link].id() == link);
                    self.retry(placement, call, lost, &message, outstanding);
                }
                Some(LinkEvent::Settled) => (),
                None => self.expire(placement, call, outstanding),
            }
        }
        self.metrics.wait.observe(started.elapsed().as_secs_f64());
        Ok(())
    }

    /// Ready links that serve `layer` and are not in `tried`, rotated from call to call so that
    /// replicas share the decoding.
    fn candidates(&mut self, links: &[Link], layer: usize, tried: &BTreeSet<usize>) -> Vec<usize> {
        let mut ready: Vec<usize> = (0..links.len())
            .filter(|index| !tried.contains(index))
            .filter(|&index| links[index].serves(layer as u32) && links[index].is_ready())
            .collect();
        self.rotation = self.rotation.wrapping_add(1);
        if !ready.is_empty() {
            let turn = self.rotation % ready.len();
            ready.rotate_left(turn);
        }
        ready
    }

    /// Sends `message` to `link`, or to the next replica that takes it.
    fn send(
        &mut self,
        placement: &Placement,
        call: &LayerCall<'_>,
        message: Message,
        mut tried: BTreeSet<usize>,
        mut link: Option<usize>,
        outstanding: &mut Outstanding,
    ) {
        loop {
            let next = link.take();
            let next =
                next.or_else(|| self.candidates(&placement.links, call.layer, &tried).first().copied());
            let Some(index) = next else {
                outstanding.orphans.extend(&message.slots);
                return;
            };
            tried.insert(index);
            self.next_id += 1;
            let id = self.next_id;
            let work = Work {
                id,
                generation: placement.generation,
                layer: call.layer as u32,
                budget_us: ATTEMPT_LIMIT.as_micros() as u32,
                rows: message.rows.clone(),
                counts: message.counts.clone(),
                experts: message.experts.clone(),
            };
            if placement.links[index].send(ForwardRequest { body: Some(Body::Work(work)) }) {
                self.metrics.messages.inc();
                let deadline = Instant::now() + ATTEMPT_LIMIT;
                outstanding.parts.insert(id, Part { message, link: index, tried, deadline });
                return;
            }
        }
    }

    /// Drives the connections until each link has written as much as `left` says.
    fn see_off(&self, links: &[Link], left: &[u64]) {
        let limit = Instant::now() + LEAVE_LIMIT;
        let waiting = || links.iter().zip(left).any(|(link, &left)| link.written() < left && link.is_ready());
        self.runtime.block_on(async {
            while waiting() && Instant::now() < limit {
                tokio::task::yield_now().await;
            }
        });
    }

    /// The next event, polled for until `poll_until`, then slept for until `deadline`.
    fn next_event(&mut self, poll_until: Instant, deadline: Instant) -> Option<LinkEvent> {
        let events = &mut self.events;
        self.runtime.block_on(async {
            loop {
                if let Ok(event) = events.try_recv() {
                    return Some(event);
                }
                if Instant::now() >= poll_until.min(deadline) {
                    break;
                }
                tokio::task::yield_now().await;
            }
            tokio::time::timeout_at(deadline.into(), events.recv()).await.ok().flatten()
        })
    }

    fn take_reply(
        &mut self,
        placement: &Placement,
        call: &LayerCall<'_>,
        reply: ForwardReply,
        outstanding: &mut Outstanding,
    ) {
        // A late answer to an attempt that was given up: another one won.
        let Some(part) = outstanding.parts.remove(&reply.id) else {
            return;
        };
        let link = &placement.links[part.link];
        let expected = part.message.slots.len() * self.row_bytes;
        match reply.outcome {
            Some(Outcome::Rows(rows)) if rows.rows.len() == expected => {
                outstanding.answers.push((rows.rows, part.message.slots));
            }
            Some(Outcome::Failure(failure)) => {
                let (code, message) = (failure.code(), failure.message);
                tracing::warn!(address = link.address(), layer = call.layer, ?code, %message, "remote function refused");
                if code == Code::Draining {
                    link.rest();
                }
                if failure.retryable {
                    self.retry(placement, call, vec![part], &message, outstanding);
                } else {
                    outstanding.orphans.extend(part.message.slots);
                }
            }
            Some(Outcome::Rows(_)) | None => {
                const REASON: &str = "answer of the wrong size";
                tracing::error!(address = link.address(), layer = call.layer, expected, "{REASON}");
                link.give_up(REASON);
                self.retry(placement, call, vec![part], REASON, outstanding);
            }
        }
    }

    /// Gives up on every replica whose answer is overdue.
    fn expire(&mut self, placement: &Placement, call: &LayerCall<'_>, outstanding: &mut Outstanding) {
        const REASON: &str = "no answer in time";
        let now = Instant::now();
        for (&id, part) in outstanding.parts.iter().filter(|(_, part)| part.deadline <= now) {
            let link = &placement.links[part.link];
            link.send(ForwardRequest { body: Some(Body::Cancel(Cancel { id })) });
            link.give_up(REASON);
        }
        let overdue = outstanding.take(|part| part.deadline <= now);
        self.retry(placement, call, overdue, REASON, outstanding);
    }

    /// Sends what `parts` hold to other replicas.
    fn retry(
        &mut self,
        placement: &Placement,
        call: &LayerCall<'_>,
        parts: Vec<Part>,
        reason: &str,
        outstanding: &mut Outstanding,
    ) {
        for part in parts {
            let (orphans, first) = (outstanding.orphans.len(), part.message.slots.first().copied());
            self.send(placement, call, part.message, part.tried, None, outstanding);
            if outstanding.orphans.len() == orphans {
                self.metrics.retries.inc();
                outstanding.retried.extend(first);
            } else {
                tracing::warn!(layer = call.layer, reason, "no replica is left; computing locally");
            }
        }
    }
}
