//! The remote half of a layer call: messages out, answers in, and what is done about answers that
//! fail or stay away.

use super::error::ExpertError;
use super::fallback::FallbackExperts;
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
/// All attempts of a layer call, so that the layer's limit leaves time to load experts here.
const REMOTE_LIMIT: Duration = Duration::from_secs(6);
/// How long a message rests after every replica was too busy for it, the first time ..
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// .. and at most.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
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
    /// Messages that every replica was too busy for, and when to try again.
    resting: Vec<(Instant, Attempt)>,
    /// Answers: rows, and the slot of each.
    pub(super) answers: Vec<(Bytes, Vec<u32>)>,
    /// Slots that no replica will answer.
    pub(super) orphans: Vec<u32>,
    /// One slot of every message that was sent again.
    pub(super) retried: Vec<u32>,
    /// What the functions behind the answers say that they computed.
    pub(super) computed: Duration,
}

/// A message and what was tried with it.
struct Attempt {
    message: Message,
    /// Indices of links in the placement.
    tried: BTreeSet<usize>,
    /// How long to rest when every replica is too busy.
    pause: Duration,
}

/// An attempt that waits for its answer.
struct Part {
    attempt: Attempt,
    /// Index of the link in the placement.
    link: usize,
    deadline: Instant,
}

/// Why a message needs another replica.
#[derive(Clone, Copy, PartialEq)]
enum Cause {
    /// The replica has as much as it takes; it is well.
    Busy,
    Failed,
}

impl Outstanding {
    /// (token, expert) pairs whose answers are still out.
    fn missing(&self) -> usize {
        let waiting = self.parts.values().map(|part| &part.attempt);
        waiting.chain(self.resting.iter().map(|(_, attempt)| attempt)).map(|a| a.message.slots.len()).sum()
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
        // Connections go on although LibTorch may compute for long.
        self.drive();
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
                let attempt = Attempt { message, tried: BTreeSet::new(), pause: FIRST_PAUSE };
                if let Some(refused) = self.send(placement, call, attempt, Some(link), &mut outstanding) {
                    outstanding.orphans.extend(refused.message.slots);
                }
            }
        }
        self.see_off(links, &left);
        outstanding
    }

    /// Lets the connections' tasks run, without waiting.
    fn drive(&self) {
        self.runtime.block_on(async {
            // One turn reads sockets, the next ones let tasks act upon what was read.
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
        });
    }

    /// Waits for answers; failed messages go to the next replica, those that none is left for
    /// become orphans, whose experts are ordered at once.
    ///
    /// # Errors
    /// `deadline` passes.
    pub(super) fn collect(
        &mut self,
        placement: &Placement,
        call: &LayerCall<'_>,
        outstanding: &mut Outstanding,
        fallback: &mut FallbackExperts,
        deadline: Instant,
    ) -> Result<(), ExpertError> {
        let started = Instant::now();
        let call = RemoteCall { placement, call, give_up: started + REMOTE_LIMIT };
        // Nobody listened while the local kernels ran: what came meanwhile is not late.
        for part in outstanding.parts.values_mut() {
            part.deadline = part.deadline.max(started + GRACE);
        }
        while !(outstanding.parts.is_empty() && outstanding.resting.is_empty()) {
            if Instant::now() >= deadline {
                let (layer, missing) = (call.call.layer, outstanding.missing());
                return Err(ExpertError::Deadline { layer, missing, limit: LAYER_LIMIT });
            }
            let overdue = outstanding.parts.values().map(|part| part.deadline);
            let rested = outstanding.resting.iter().map(|(until, _)| *until);
            let next = overdue.chain(rested).fold(deadline, Instant::min);
            match self.next_event(started + POLL, next) {
                Some(LinkEvent::Reply(reply)) => self.take_reply(&call, reply, outstanding, fallback),
                Some(LinkEvent::Broken { link, message }) => {
                    let lost = outstanding.take(|part| placement.links[part.link].id() == link);
                    self.retry(&call, lost, Cause::Failed, &message, outstanding, fallback);
                }
                Some(LinkEvent::Settled) => (),
                None => {
                    self.expire(&call, outstanding, fallback);
                    self.wake_rested(&call, outstanding, fallback);
                }
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

    /// Sends the message to `link`, or to the next replica that takes it. Gives it back when there is
    /// none.
    fn send(
        &mut self,
        placement: &Placement,
        call: &LayerCall<'_>,
        mut attempt: Attempt,
        mut link: Option<usize>,
        outstanding: &mut Outstanding,
    ) -> Option<Attempt> {
        loop {
            let next = link.take();
            let next = next
                .or_else(|| self.candidates(&placement.links, call.layer, &attempt.tried).first().copied());
            let Some(index) = next else {
                return Some(attempt);
            };
            attempt.tried.insert(index);
            self.next_id += 1;
            let id = self.next_id;
            let work = Work {
                id,
                generation: placement.generation,
                layer: call.layer as u32,
                budget_us: ATTEMPT_LIMIT.as_micros() as u32,
                rows: attempt.message.rows.clone(),
                counts: attempt.message.counts.clone(),
                experts: attempt.message.experts.clone(),
            };
            if placement.links[index].send(ForwardRequest { body: Some(Body::Work(work)) }) {
                self.metrics.messages.inc();
                let deadline = Instant::now() + ATTEMPT_LIMIT;
                outstanding.parts.insert(id, Part { attempt, link: index, deadline });
                return None;
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
        call: &RemoteCall<'_>,
        reply: ForwardReply,
        outstanding: &mut Outstanding,
        fallback: &mut FallbackExperts,
    ) {
        // A late answer to an attempt that was given up: another one won.
        let Some(part) = outstanding.parts.remove(&reply.id) else {
            return;
        };
        let link = &call.placement.links[part.link];
        let (layer, slots) = (call.call.layer, &part.attempt.message.slots);
        let expected = slots.len() * self.row_bytes;
        match reply.outcome {
            Some(Outcome::Rows(rows)) if rows.rows.len() == expected => {
                outstanding.computed += Duration::from_micros(rows.compute_us.into());
                outstanding.answers.push((rows.rows, part.attempt.message.slots));
            }
            Some(Outcome::Failure(failure)) => {
                let (code, message) = (failure.code(), failure.message);
                tracing::warn!(address = link.address(), layer, ?code, %message, "remote function refused");
                if code == Code::Draining {
                    link.rest();
                }
                let cause = match code {
                    Code::ResourceExhausted => Cause::Busy,
                    _ => Cause::Failed,
                };
                if failure.retryable {
                    self.retry(call, vec![part], cause, &message, outstanding, fallback);
                } else {
                    call.orphan(part.attempt, outstanding, fallback);
                }
            }
            Some(Outcome::Rows(_)) | None => {
                const REASON: &str = "answer of the wrong size";
                tracing::error!(address = link.address(), layer, expected, "{REASON}");
                link.give_up(REASON);
                self.retry(call, vec![part], Cause::Failed, REASON, outstanding, fallback);
            }
        }
    }

    /// Gives up on every replica whose answer is overdue.
    fn expire(
        &mut self,
        call: &RemoteCall<'_>,
        outstanding: &mut Outstanding,
        fallback: &mut FallbackExperts,
    ) {
        const REASON: &str = "no answer in time";
        let now = Instant::now();
        for (&id, part) in outstanding.parts.iter().filter(|(_, part)| part.deadline <= now) {
            let link = &call.placement.links[part.link];
            link.send(ForwardRequest { body: Some(Body::Cancel(Cancel { id })) });
            link.give_up(REASON);
            // Where one replica hangs others may: the experts are fetched while those are asked.
            for &slot in &part.attempt.message.slots {
                fallback.order(call.call.layer, call.call.routed.experts[slot as usize]);
            }
        }
        let overdue = outstanding.take(|part| part.deadline <= now);
        self.retry(call, overdue, Cause::Failed, REASON, outstanding, fallback);
    }

    /// Sends what has rested for long enough to any replica.
    fn wake_rested(
        &mut self,
        call: &RemoteCall<'_>,
        outstanding: &mut Outstanding,
        fallback: &mut FallbackExperts,
    ) {
        let now = Instant::now();
        let rested: Vec<_> = outstanding.resting.extract_if(.., |(until, _)| *until <= now).collect();
        for (_, mut attempt) in rested {
            attempt.tried.clear();
            attempt.pause = (attempt.pause * 2).min(LONGEST_PAUSE);
            if let Some(refused) = self.again(call, attempt, outstanding) {
                call.orphan(refused, outstanding, fallback);
            }
        }
    }

    /// Sends a message another time, to a replica that it was not sent to since it rested. Gives it
    /// back when there is none.
    fn again(
        &mut self,
        call: &RemoteCall<'_>,
        attempt: Attempt,
        outstanding: &mut Outstanding,
    ) -> Option<Attempt> {
        let first = attempt.message.slots.first().copied();
        let left = self.send(call.placement, call.call, attempt, None, outstanding);
        if left.is_none() {
            self.metrics.retries.inc();
            outstanding.retried.extend(first);
        }
        left
    }

    /// Sends what `parts` hold to other replicas.
    fn retry(
        &mut self,
        call: &RemoteCall<'_>,
        parts: Vec<Part>,
        cause: Cause,
        reason: &str,
        outstanding: &mut Outstanding,
        fallback: &mut FallbackExperts,
    ) {
        for part in parts {
            let late = Instant::now() >= call.give_up;
            let left = match late {
                true => Some(part.attempt),
                false => self.again(call, part.attempt, outstanding),
            };
            match left {
                None => (),
                Some(attempt) if cause == Cause::Busy && !late => {
                    outstanding.resting.push((Instant::now() + attempt.pause, attempt));
                }
                Some(attempt) => {
                    tracing::warn!(layer = call.call.layer, reason, "no replica is left; computing locally");
                    call.orphan(attempt, outstanding, fallback);
                }
            }
        }
    }
}

/// The remote half of a layer call that is being waited for.
struct RemoteCall<'a> {
    placement: &'a Placement,
    call: &'a LayerCall<'a>,
    /// No further attempts from here on.
    give_up: Instant,
}

impl RemoteCall<'_> {
    /// No replica will answer: the experts are ordered and the pairs left to the caller.
    fn orphan(&self, attempt: Attempt, outstanding: &mut Outstanding, fallback: &mut FallbackExperts) {
        for &slot in &attempt.message.slots {
            fallback.order(self.call.layer, self.call.routed.experts[slot as usize]);
        }
        outstanding.orphans.extend(attempt.message.slots);
    }
}
