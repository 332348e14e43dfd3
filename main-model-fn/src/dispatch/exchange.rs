//! The remote half of a layer call: messages out, answers in, and hedged requests, retries and failover for
//! answers that fail or stay away.
//!
//! A replica that takes longer than it should is slow until it is known to be dead: another one is
//! asked as well, then the experts are loaded as well, and the first answer wins.

use super::LayerCall;
use super::arrivals::Arrivals;
use super::calls::{TracedRequest, contexts, named, told};
use super::error::ExpertError;
use super::fallback::{FallbackExperts, Loaded};
use super::link::{Link, LinkEvent};
use super::metrics::ExpertMetrics;
use super::outstanding::{Attempt, MessageAction, Outstanding, OutstandingMessage};
use super::placement::Placement;
use super::replicas::Replicas;
use super::split::{Message, messages, parts, split};
use bytes::Bytes;
use remoe_kernels::Dtype;
use remoe_proto::v1::{Cancel, ForwardReply, ForwardRequest, Work};
use remoe_proto::v1::{forward_reply::Outcome, forward_request::Body};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// A replica is not late before this time: waking and reading take their time on a busy machine.
pub(super) const LEAST_PATIENCE: Duration = Duration::from_millis(500);
/// Experts are not loaded for a replica that may still answer before this time.
pub(super) const LEAST_BEFORE_LOADS: Duration = Duration::from_secs(2);
/// Replicas that are too busy for a message are asked again for at least this long.
const BUSY_LIMIT: Duration = Duration::from_secs(6);
/// The longest rest of a message that every replica is too busy for.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// Longest time that a function may take before its answer is worthless, beyond the time that it is waited for.
const WORTHLESS: Duration = Duration::from_secs(30);
/// Messages have left when the socket has taken them; a peer that reads slowly must not keep the
/// local kernels waiting for longer than this.
const LEAVE_LIMIT: Duration = Duration::from_millis(20);
/// Answers that arrived during the local work have at least so long to be read.
const GRACE: Duration = Duration::from_millis(100);

/// The engine's conversations with remote functions.
pub(super) struct Exchange {
    runtime: Rc<Runtime>,
    events: mpsc::UnboundedReceiver<LinkEvent>,
    pub(super) row_bytes: usize,
    pub(super) dtype: Dtype,
    /// Last id of an attempt or a message; ids are never used twice.
    next_id: u64,
    /// How long the engine polls for answers before it sleeps.
    poll: Duration,
    pub(super) replicas: Replicas,
    pub(super) metrics: ExpertMetrics,
    /// Traced requests of the iteration: while there are any each message is noted.
    pub(super) followed: Vec<TracedRequest>,
}

/// A layer call on its way, under the placement in force.
pub(super) struct RemoteCall<'a> {
    pub(super) placement: &'a Placement,
    pub(super) call: &'a LayerCall<'a>,
    pub(super) outstanding: &'a mut Outstanding,
    pub(super) fallback: &'a mut FallbackExperts,
}

impl<'a> RemoteCall<'a> {
    pub(super) fn links(&self) -> &'a [Link] {
        &self.placement.links
    }

    /// Indices of the links that can answer messages of the layer's class.
    fn hosts(&self, class: usize) -> &'a [usize] {
        self.placement.hosts_of(self.call.layer, class)
    }
}

/// Why a message needs another replica.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum ResendCause {
    /// The replica has as much as it takes; it is well.
    Busy,
    Failed,
    /// No replica may do better.
    Hopeless,
}

/// Event that a call waits for.
enum CallEvent {
    Link(LinkEvent),
    Load(Loaded),
    /// A local expert has been read.
    Arrival,
}

impl Exchange {
    pub(super) fn new(
        runtime: Rc<Runtime>,
        events: mpsc::UnboundedReceiver<LinkEvent>,
        row_bytes: usize,
        dtype: Dtype,
        poll: Duration,
        metrics: ExpertMetrics,
    ) -> Self {
        let replicas = Replicas::default();
        Self { runtime, events, row_bytes, dtype, next_id: 0, poll, replicas, metrics, followed: Vec::new() }
    }

    /// Waits for the next event of any link while there is no call. False when none will come.
    pub(super) async fn event(&mut self) -> bool {
        let event = self.events.recv().await;
        let comes = event.is_some();
        event.into_iter().for_each(|event| self.note(&event));
        comes
    }

    /// Another routing generation is in force, with these links.
    pub(super) fn switched(&mut self, links: &[Link]) {
        self.replicas.keep(links);
        self.metrics.activity.keep(links.iter().map(Link::address));
    }

    /// Sends the pairs on their way, those of every class at the same time, and sees them leave. The experts
    /// of pairs that no replica can take are ordered. `slots` has the pairs of each class.
    pub(super) fn send_off(
        &mut self,
        placement: &Placement,
        call: &LayerCall<'_>,
        slots: &[Vec<u32>],
        fallback: &mut FallbackExperts,
    ) -> Outstanding {
        // Connections go on although LibTorch may compute for long.
        self.drive();
        self.begin();
        fallback.begin();
        let links = &placement.links;
        let now = Instant::now();
        let mut outstanding = Outstanding::new(links.len(), now);
        if slots.iter().all(Vec::is_empty) {
            return outstanding;
        }
        let at = &mut RemoteCall { placement, call, outstanding: &mut outstanding, fallback };
        for (class, slots) in slots.iter().enumerate().filter(|(_, slots)| !slots.is_empty()) {
            self.send_class(at, class, slots, now);
        }
        // The last message of a replica waits for all before it.
        for open in outstanding.open.values_mut() {
            if let (Some(attempt), Some((due, _))) = (open.attempts.last(), &mut open.due) {
                *due = now + self.replicas.patience(links[attempt.link].id(), LEAST_PATIENCE);
            }
        }
        self.see_off(links, &outstanding);
        outstanding
    }

    /// Sends the pairs `slots` of one class, in parts to the hosts that can take them.
    fn send_class(&mut self, at: &mut RemoteCall<'_>, class: usize, slots: &[u32], now: Instant) {
        let (links, routed) = (at.links(), at.call.routed);
        let turn_of = (at.call.layer, class);
        let mut ready = self.replicas.ranked(links, at.hosts(class), turn_of, &BTreeSet::new(), now);
        let pace = self.replicas.slowest(ready.iter().map(|&(index, _)| links[index].id()));
        ready.truncate(parts(routed, slots, ready.len(), pace));
        let owed: Vec<u64> = ready.iter().map(|&(_, owed)| owed).collect();
        for (part, slots) in split(routed, slots, &owed).iter().enumerate() {
            let link = ready.get(part).map(|&(index, _)| index);
            for message in messages(routed, slots, at.call.inputs, self.row_bytes) {
                self.next_id += 1;
                self.ask(
                    at,
                    self.next_id,
                    OutstandingMessage::new(message, class),
                    link,
                    ResendCause::Failed,
                );
            }
        }
    }

    /// Forgets earlier calls: what comes for them now has no one waiting for it.
    fn begin(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            self.note(&event);
        }
        self.replicas.begin();
    }

    /// Records what an event says about its replica.
    fn note(&mut self, event: &LinkEvent) {
        match event {
            LinkEvent::Reply { link, reply } => self.replicas.heard(*link, reply.id, took(reply)),
            LinkEvent::Broken { link, .. } => self.replicas.broken(*link),
            LinkEvent::Settled => (),
        }
    }

    /// Lets the connections' tasks run, without waiting.
    pub(super) fn drive(&self) {
        self.runtime.block_on(async {
            // One turn reads sockets, the next ones let tasks act upon what was read.
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
        });
    }

    /// Starts to wait for answers. Answers that came during the local work are not late, nor are messages that could
    /// not leave before it.
    pub(super) fn listen(&self, links: &[Link], outstanding: &mut Outstanding) {
        let now = Instant::now();
        outstanding.listening = now;
        outstanding.moved = now;
        for open in outstanding.open.values_mut() {
            if let (Some(attempt), Some((due, _))) = (open.attempts.last(), &mut open.due) {
                let link = &links[attempt.link];
                let left = link.written() >= outstanding.left[attempt.link];
                let least = if left { GRACE } else { self.replicas.patience(link.id(), LEAST_PATIENCE) };
                *due = (*due).max(now + least);
            }
        }
    }

    /// Waits until something comes or is to be done, and acts upon it.
    ///
    /// # Errors
    /// Pairs are out of reach, or nothing has moved for too long.
    pub(super) fn step(&mut self, at: &mut RemoteCall<'_>) -> Result<(), ExpertError> {
        let deadline = at.outstanding.deadline(at.fallback.patience());
        let passed = Instant::now() >= deadline;
        if let Some(error) = at.outstanding.failure(at.call.layer, at.call.routed.top_k, passed) {
            self.cancel_all(at.links(), at.outstanding);
            return Err(error);
        }
        let next = at.outstanding.next_due().map_or(deadline, |due| due.min(deadline));
        match self.next(
            at.fallback,
            at.placement.local.arrivals(),
            at.outstanding.listening + self.poll,
            next,
        ) {
            Some(CallEvent::Link(LinkEvent::Reply { link, reply })) => {
                self.replicas.heard(link, reply.id, took(&reply));
                self.take_reply(at, link, reply);
            }
            Some(CallEvent::Link(LinkEvent::Broken { link, message })) => {
                self.take_break(at, link, &message);
            }
            Some(CallEvent::Link(LinkEvent::Settled)) => (),
            Some(CallEvent::Arrival) => at.outstanding.moved = Instant::now(),
            Some(CallEvent::Load(loaded)) => match at.fallback.arrive(loaded) {
                Err((layer, expert, error)) if layer == at.call.layer => {
                    tracing::error!(layer, expert, %error, "expert load failed");
                    at.outstanding.unloadable.insert(expert, error.to_string());
                }
                Ok(()) | Err(_) => at.outstanding.moved = Instant::now(),
            },
            None => self.act(at),
        }
        Ok(())
    }

    /// The next event or load, polled for until `poll_until`, then slept for until `deadline`.
    fn next(
        &mut self,
        fallback: &mut FallbackExperts,
        arrivals: Option<&Arrivals>,
        poll_until: Instant,
        deadline: Instant,
    ) -> Option<CallEvent> {
        let events = &mut self.events;
        let come = arrivals.map(Arrivals::come);
        self.runtime.block_on(async {
            loop {
                if let Ok(event) = events.try_recv() {
                    return Some(CallEvent::Link(event));
                }
                if let Some(loaded) = fallback.try_next() {
                    return Some(CallEvent::Load(loaded));
                }
                if arrivals.map(Arrivals::come) != come {
                    return Some(CallEvent::Arrival);
                }
                if Instant::now() >= poll_until.min(deadline) {
                    break;
                }
                tokio::task::yield_now().await;
            }
            let arrival = async {
                match arrivals {
                    Some(arrivals) => arrivals.changed().await,
                    None => std::future::pending().await,
                }
            };
            let next = async {
                tokio::select! {
                    Some(event) = events.recv() => CallEvent::Link(event),
                    Some(loaded) = fallback.next() => CallEvent::Load(loaded),
                    () = arrival => CallEvent::Arrival,
                }
            };
            tokio::time::timeout_at(deadline.into(), next).await.ok()
        })
    }

    /// Drives the connections until the messages have left.
    fn see_off(&self, links: &[Link], outstanding: &Outstanding) {
        let limit = Instant::now() + LEAVE_LIMIT;
        self.runtime.block_on(async {
            while !outstanding.have_left(links) && Instant::now() < limit {
                tokio::task::yield_now().await;
            }
        });
    }

    /// Sends the message to `first`, or to the best host of its experts that it was not sent to. Where there
    /// is none it rests if they are only `Busy`, else its experts are ordered.
    fn ask(
        &mut self,
        at: &mut RemoteCall<'_>,
        key: u64,
        mut open: OutstandingMessage,
        mut first: Option<usize>,
        cause: ResendCause,
    ) {
        let links = at.links();
        let turn_of = (at.call.layer, open.class);
        let again = std::mem::replace(&mut open.sent, true);
        loop {
            let now = Instant::now();
            let next = match cause {
                ResendCause::Hopeless => None,
                ResendCause::Busy | ResendCause::Failed => first.take().or_else(|| {
                    let hosts = at.hosts(open.class);
                    let ready = self.replicas.ranked(links, hosts, turn_of, &open.tried, now);
                    ready.first().map(|&(index, _)| index)
                }),
            };
            let Some(index) = next else { break };
            open.tried.insert(index);
            let link = &links[index];
            let units = open.message.units();
            let written = link.written();
            self.next_id += 1;
            let id = self.next_id;
            let patience = self.replicas.patience(link.id(), LEAST_PATIENCE);
            let named = named(&self.followed, &open.message.slots, at.call.routed.top_k);
            let trace = contexts(&self.followed, &named, index);
            if !link.send(work(at, id, &open.message, patience + WORTHLESS, trace)) {
                continue;
            }
            told(&mut self.followed, &named, index, now);
            self.replicas.sent(link.id(), units, now);
            self.metrics.messages.inc();
            if again {
                self.metrics.retries.inc();
                at.outstanding.retried.extend(open.message.slots.first());
            }
            let left = &mut at.outstanding.left[index];
            *left = (*left).max(written) + open.message.rows.len() as u64;
            at.outstanding.moved = now;
            at.outstanding.note(key, id);
            open.attempts.push(Attempt { id, link: index, sent: now, late: false });
            let patience = self.replicas.patience(link.id(), LEAST_PATIENCE);
            open.due = Some((now + patience, MessageAction::Hedge));
            at.outstanding.open.insert(key, open);
            return;
        }
        if let Some(attempt) = open.attempts.last() {
            // Slow is not dead, and a load is dear: it comes after a while longer.
            let patience = self.replicas.patience(links[attempt.link].id(), LEAST_BEFORE_LOADS);
            open.due = (!open.ordered).then_some((attempt.sent + patience, MessageAction::Load));
            at.outstanding.open.insert(key, open);
        } else if cause == ResendCause::Busy && self.is_patient(links, &open, at.outstanding.started) {
            open.due = Some((Instant::now() + open.pause, MessageAction::Again));
            at.outstanding.open.insert(key, open);
        } else if !open.ordered {
            if cause == ResendCause::Busy {
                // They are left alone for a while: what comes next need not find out again.
                for &index in &open.tried {
                    let _asked_of_late = self.replicas.late(links[index].id(), Instant::now());
                }
            }
            if again {
                tracing::warn!(layer = at.call.layer, "no replica left: local fallback");
            }
            at.outstanding.orphan(at.call.layer, &open.message, at.fallback);
        }
    }

    /// Reports if replicas that were too busy for `open` are asked again.
    fn is_patient(&self, links: &[Link], open: &OutstandingMessage, started: Instant) -> bool {
        let patience =
            open.tried.iter().map(|&index| self.replicas.patience(links[index].id(), Duration::ZERO));
        started.elapsed() < BUSY_LIMIT.max(3 * patience.max().unwrap_or_default())
    }

    /// Does what is due.
    fn act(&mut self, at: &mut RemoteCall<'_>) {
        let now = Instant::now();
        let is_due = |open: &OutstandingMessage| open.due.is_some_and(|(due, _)| due <= now);
        let due: Vec<(u64, OutstandingMessage)> =
            at.outstanding.open.extract_if(|_, open| is_due(open)).collect();
        for (key, mut open) in due {
            at.outstanding.moved = now;
            match open.due.take() {
                Some((_, MessageAction::Hedge)) => {
                    for attempt in open.attempts.iter_mut().filter(|attempt| !attempt.late) {
                        attempt.late = true;
                        self.late(&at.links()[attempt.link], at.call.layer, now);
                    }
                    self.ask(at, key, open, None, ResendCause::Failed);
                }
                Some((_, MessageAction::Load)) => {
                    open.ordered = true;
                    at.outstanding.orphan(at.call.layer, &open.message, at.fallback);
                    at.outstanding.open.insert(key, open);
                }
                Some((_, MessageAction::Again)) => {
                    open.tried.clear();
                    open.pause = (open.pause * 2).min(LONGEST_PAUSE);
                    self.ask(at, key, open, None, ResendCause::Failed);
                }
                None => drop(at.outstanding.open.insert(key, open)),
            }
        }
    }

    /// Leaves `link` alone for a while; one that keeps silent for long is given up.
    fn late(&mut self, link: &Link, layer: usize, now: Instant) {
        let hangs = self.replicas.late(link.id(), now);
        tracing::warn!(address = link.address(), layer, hangs, "remote function late: hedging");
        if hangs {
            link.give_up("no answer in time");
        }
    }

    /// An attempt at the message has failed: another replica is asked unless one is already.
    pub(super) fn again(
        &mut self,
        at: &mut RemoteCall<'_>,
        key: u64,
        open: OutstandingMessage,
        cause: ResendCause,
    ) {
        if !open.attempts.is_empty() {
            at.outstanding.open.insert(key, open);
        } else if !open.ordered {
            self.ask(at, key, open, None, cause);
        }
    }

    /// `slots` have been computed here: who was asked for them is told to stop.
    pub(super) fn computed_here(&mut self, links: &[Link], outstanding: &mut Outstanding, slots: &[u32]) {
        for key in outstanding.computed_here(slots) {
            if let Some(mut open) = outstanding.open.remove(&key) {
                self.cancel(links, &mut open, outstanding);
            }
        }
    }

    /// Takes back what the call has asked for and not got.
    fn cancel_all(&mut self, links: &[Link], outstanding: &mut Outstanding) {
        for (_, mut open) in std::mem::take(&mut outstanding.open) {
            self.cancel(links, &mut open, outstanding);
        }
    }

    /// Cancels `open`, whose answer is not needed any more.
    pub(super) fn cancel(
        &mut self,
        links: &[Link],
        open: &mut OutstandingMessage,
        outstanding: &mut Outstanding,
    ) {
        let units = open.message.units();
        for attempt in outstanding.forget(open) {
            let (link, id) = (&links[attempt.link], attempt.id);
            self.replicas.gone(link.id(), units);
            if !(attempt.late && self.replicas.learns_from(link.id(), id, units, attempt.sent)) {
                link.send(ForwardRequest { body: Some(Body::Cancel(Cancel { id })) });
            }
        }
    }
}

/// How long `reply` says that its rows were computed.
fn took(reply: &ForwardReply) -> Option<Duration> {
    match &reply.outcome {
        Some(Outcome::Rows(rows)) => Some(Duration::from_micros(rows.compute_us.into())),
        Some(Outcome::Failure(_)) | None => None,
    }
}

/// The request for `message`, worthless after `budget`, as part of the spans that `trace` names.
fn work(at: &RemoteCall<'_>, id: u64, message: &Message, budget: Duration, trace: Bytes) -> ForwardRequest {
    ForwardRequest {
        body: Some(Body::Work(Work {
            id,
            generation: at.placement.generation,
            layer: at.call.layer as u32,
            budget_us: u32::try_from(budget.as_micros()).unwrap_or(u32::MAX),
            rows: message.rows.clone(),
            counts: message.counts.clone(),
            experts: message.experts.clone(),
            trace,
        })),
    }
}
