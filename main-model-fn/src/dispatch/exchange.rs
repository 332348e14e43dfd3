//! Remote part of a layer call: sends messages and receives answers, with hedged requests, retries and failover.
//!
//! A replica that is late counts as slow until its connection breaks. Another replica gets the message as well, then the
//! experts are loaded as well, and the first answer wins.

use super::LayerCall;
use super::background_loads::BackgroundLoads;
use super::calls::{TracedRequest, record_named, requests_in_message, span_contexts};
use super::error::ExpertError;
use super::fallback::{EndedLoad, FallbackExperts};
use super::link::{Link, LinkEvent};
use super::metrics::ExpertMetrics;
use super::outstanding::{Attempt, MessageAction, Outstanding, OutstandingMessage};
use super::placement::Placement;
use super::replicas::Replicas;
use super::split::{Message, messages, part_count, split};
use bytes::Bytes;
use remoe_kernels::Dtype;
use remoe_proto::v1::{Cancel, ForwardReply, ForwardRequest, Work};
use remoe_proto::v1::{forward_reply::Outcome, forward_request::Body};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Shortest timeout of a replica: waking up and reading take time on a busy machine.
pub(super) const MIN_TIMEOUT: Duration = Duration::from_millis(500);
/// Shortest time before the fallback loads experts of a message that a replica may still answer.
pub(super) const MIN_LOAD_DELAY: Duration = Duration::from_secs(2);
/// Shortest time for which replicas that are too busy are asked again.
const MIN_BUSY_TIME: Duration = Duration::from_secs(6);
/// Longest pause of a message for which every replica is too busy.
const MAX_BUSY_PAUSE: Duration = Duration::from_millis(200);
/// Time beyond its timeout after which a remote function may drop a message.
const EXPIRY: Duration = Duration::from_secs(30);
/// Longest wait until messages have left, so that a peer that reads slowly does not delay the local kernels.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(20);
/// Shortest time to read answers that arrived during the local work.
const READ_TIME: Duration = Duration::from_millis(100);

/// Sends messages over the links and processes their events.
pub(super) struct Exchange {
    runtime: Rc<Runtime>,
    events: mpsc::UnboundedReceiver<LinkEvent>,
    pub(super) row_bytes: usize,
    pub(super) dtype: Dtype,
    /// Last id of an attempt or key of a message; never reused.
    last_id: u64,
    /// Time for which the engine polls for answers before it sleeps.
    poll: Duration,
    pub(super) replicas: Replicas,
    pub(super) metrics: ExpertMetrics,
    /// Traced requests of the iteration. If there are any, each call is recorded.
    pub(super) traced_requests: Vec<TracedRequest>,
}

/// A layer call in progress, under the placement in force.
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

    /// Returns the indices of the links that host the experts of `class`.
    fn hosts(&self, class: usize) -> &'a [usize] {
        self.placement.hosts_of_class(self.call.layer, class)
    }
}

/// Reason for sending a message again.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum ResendCause {
    /// The replica works but has as much in flight as it takes (backpressure).
    Busy,
    Failed,
    /// Other replicas would refuse the message as well.
    NotRetryable,
}

/// Event that a layer call waits for.
enum CallEvent {
    Link(LinkEvent),
    Load(EndedLoad),
    /// A local expert was loaded in the background.
    BackgroundLoad,
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
        let (replicas, traced_requests) = (Replicas::default(), Vec::new());
        Self { runtime, events, row_bytes, dtype, last_id: 0, poll, replicas, metrics, traced_requests }
    }

    /// Waits for the next event while no call is in progress. Returns false if no event will come.
    pub(super) async fn next_idle_event(&mut self) -> bool {
        let event = self.events.recv().await;
        let has_event = event.is_some();
        event.into_iter().for_each(|event| self.observe(&event));
        has_event
    }

    /// Sets the links of the routing generation that becomes active.
    pub(super) fn set_links(&mut self, links: &[Link]) {
        self.replicas.retain_links(links);
        self.metrics.activity.retain_addresses(links.iter().map(Link::address));
    }

    /// Sends the pairs of a layer and waits until the messages have left. Experts without a replica are loaded as fallback.
    ///
    /// `slots` has the slots of each host class.
    pub(super) fn dispatch(
        &mut self,
        placement: &Placement,
        call: &LayerCall<'_>,
        slots: &[Vec<u32>],
        fallback: &mut FallbackExperts,
    ) -> Outstanding {
        // Connections make progress here although LibTorch may compute for long.
        self.drive();
        self.discard_old_events();
        self.replicas.begin_call();
        fallback.begin_call();
        let links = &placement.links;
        let now = Instant::now();
        let mut outstanding = Outstanding::new(links.len(), now);
        if slots.iter().all(Vec::is_empty) {
            return outstanding;
        }
        let remote = &mut RemoteCall { placement, call, outstanding: &mut outstanding, fallback };
        for (class, slots) in slots.iter().enumerate().filter(|(_, slots)| !slots.is_empty()) {
            self.send_class(remote, class, slots, now);
        }
        // A replica answers its messages in order, so the timeout of each covers all of the replica's work.
        for open in outstanding.messages.values_mut() {
            if let (Some(attempt), Some((due, _))) = (open.attempts.last(), &mut open.due) {
                *due = now + self.replicas.timeout(links[attempt.link].id(), MIN_TIMEOUT);
            }
        }
        self.flush(links, &outstanding);
        outstanding
    }

    /// Sends the pairs `slots` of one host class, split over its hosts.
    fn send_class(&mut self, remote: &mut RemoteCall<'_>, class: usize, slots: &[u32], now: Instant) {
        let (links, routed) = (remote.links(), remote.call.routed);
        let rotation = (remote.call.layer, class);
        let hosts = remote.hosts(class);
        let mut ready = self.replicas.rank_available(links, hosts, rotation, &BTreeSet::new(), now);
        let pace = self.replicas.slowest_pace(ready.iter().map(|&(index, _)| links[index].id()));
        ready.truncate(part_count(routed, slots, ready.len(), pace));
        let in_flight: Vec<u64> = ready.iter().map(|&(_, units)| units).collect();
        for (part, slots) in split(routed, slots, &in_flight).iter().enumerate() {
            let link = ready.get(part).map(|&(index, _)| index);
            for message in messages(routed, slots, remote.call.inputs, self.row_bytes) {
                self.last_id += 1;
                let open = OutstandingMessage::new(message, class);
                self.send(remote, self.last_id, open, link, ResendCause::Failed);
            }
        }
    }

    /// Processes events of earlier calls, whose messages are not awaited any more.
    fn discard_old_events(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            self.observe(&event);
        }
    }

    /// Updates the state of the event's replica.
    fn observe(&mut self, event: &LinkEvent) {
        match event {
            LinkEvent::Reply { link, reply } => {
                self.replicas.record_reply(*link, reply.id, compute_time(reply));
            }
            LinkEvent::Broken { link, .. } => self.replicas.record_broken(*link),
            LinkEvent::Settled => (),
        }
    }

    /// Runs the connections' tasks without waiting.
    pub(super) fn drive(&self) {
        self.runtime.block_on(async {
            // The first turn reads sockets; the next ones let tasks process what was read.
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
        });
    }

    /// Starts to listen for answers. Extends timeouts: answers that arrived during the local work are not late, nor are
    /// messages that could not leave before it.
    pub(super) fn listen(&self, links: &[Link], outstanding: &mut Outstanding) {
        let now = Instant::now();
        outstanding.listening_since = now;
        outstanding.last_progress = now;
        for open in outstanding.messages.values_mut() {
            if let (Some(attempt), Some((due, _))) = (open.attempts.last(), &mut open.due) {
                let link = &links[attempt.link];
                let has_left = link.written() >= outstanding.write_targets[attempt.link];
                let least = if has_left { READ_TIME } else { self.replicas.timeout(link.id(), MIN_TIMEOUT) };
                *due = (*due).max(now + least);
            }
        }
    }

    /// Waits for the next event or due action, and processes it.
    ///
    /// # Errors
    /// Fails if experts are out of reach, or if the call made no progress until its deadline.
    pub(super) fn process_event(&mut self, remote: &mut RemoteCall<'_>) -> Result<(), ExpertError> {
        let deadline = remote.outstanding.deadline(remote.fallback.load_timeout());
        let deadline_passed = Instant::now() >= deadline;
        let (layer, top_k) = (remote.call.layer, remote.call.routed.top_k);
        if let Some(error) = remote.outstanding.failure(layer, top_k, deadline_passed) {
            self.cancel_all(remote.links(), remote.outstanding);
            return Err(error);
        }
        let next = remote.outstanding.next_due().map_or(deadline, |due| due.min(deadline));
        match self.next_event(
            remote.fallback,
            remote.placement.local.background_loads(),
            remote.outstanding.listening_since + self.poll,
            next,
        ) {
            Some(CallEvent::Link(LinkEvent::Reply { link, reply })) => {
                self.replicas.record_reply(link, reply.id, compute_time(&reply));
                self.process_reply(remote, link, reply);
            }
            Some(CallEvent::Link(LinkEvent::Broken { link, message })) => {
                self.process_broken_link(remote, link, &message);
            }
            Some(CallEvent::Link(LinkEvent::Settled)) => (),
            Some(CallEvent::BackgroundLoad) => remote.outstanding.last_progress = Instant::now(),
            Some(CallEvent::Load(ended)) => match remote.fallback.finish_load(ended) {
                Err((layer, expert, error)) if layer == remote.call.layer => {
                    tracing::error!(layer, expert, %error, "expert load failed");
                    remote.outstanding.unloadable.insert(expert, error.to_string());
                }
                Ok(()) | Err(_) => remote.outstanding.last_progress = Instant::now(),
            },
            None => self.run_due_actions(remote),
        }
        Ok(())
    }

    /// Returns the next event: polls until `poll_until`, then sleeps until `deadline`. Returns `None` at the deadline.
    fn next_event(
        &mut self,
        fallback: &mut FallbackExperts,
        background: Option<&BackgroundLoads>,
        poll_until: Instant,
        deadline: Instant,
    ) -> Option<CallEvent> {
        let events = &mut self.events;
        let loaded_before = background.map(BackgroundLoads::loaded_count);
        self.runtime.block_on(async {
            loop {
                if let Ok(event) = events.try_recv() {
                    return Some(CallEvent::Link(event));
                }
                if let Some(ended) = fallback.try_next() {
                    return Some(CallEvent::Load(ended));
                }
                if background.map(BackgroundLoads::loaded_count) != loaded_before {
                    return Some(CallEvent::BackgroundLoad);
                }
                if Instant::now() >= poll_until.min(deadline) {
                    break;
                }
                tokio::task::yield_now().await;
            }
            let background_load = async {
                match background {
                    Some(loads) => loads.changed().await,
                    None => std::future::pending().await,
                }
            };
            let next = async {
                tokio::select! {
                    Some(event) = events.recv() => CallEvent::Link(event),
                    Some(ended) = fallback.next() => CallEvent::Load(ended),
                    () = background_load => CallEvent::BackgroundLoad,
                }
            };
            tokio::time::timeout_at(deadline.into(), next).await.ok()
        })
    }

    /// Drives the connections until the messages have left, or for [`FLUSH_TIMEOUT`].
    fn flush(&self, links: &[Link], outstanding: &Outstanding) {
        let limit = Instant::now() + FLUSH_TIMEOUT;
        self.runtime.block_on(async {
            while !outstanding.have_left(links) && Instant::now() < limit {
                tokio::task::yield_now().await;
            }
        });
    }

    /// Sends a message to the link `first`, or else to the best host that it was not sent to.
    ///
    /// Without such a host, the message pauses if the hosts are only busy. Otherwise its experts are loaded as fallback.
    fn send(
        &mut self,
        remote: &mut RemoteCall<'_>,
        key: u64,
        mut open: OutstandingMessage,
        mut first: Option<usize>,
        cause: ResendCause,
    ) {
        let links = remote.links();
        let rotation = (remote.call.layer, open.class);
        let is_retry = std::mem::replace(&mut open.was_dispatched, true);
        loop {
            let now = Instant::now();
            let next = match cause {
                ResendCause::NotRetryable => None,
                ResendCause::Busy | ResendCause::Failed => first.take().or_else(|| {
                    let hosts = remote.hosts(open.class);
                    let ready = self.replicas.rank_available(links, hosts, rotation, &open.tried, now);
                    ready.first().map(|&(index, _)| index)
                }),
            };
            let Some(index) = next else { break };
            open.tried.insert(index);
            let link = &links[index];
            let units = open.message.units();
            let written = link.written();
            self.last_id += 1;
            let id = self.last_id;
            let timeout = self.replicas.timeout(link.id(), MIN_TIMEOUT);
            let top_k = remote.call.routed.top_k;
            let named = requests_in_message(&self.traced_requests, &open.message.slots, top_k);
            let trace = span_contexts(&self.traced_requests, &named, index);
            if !link.send(work_request(remote, id, &open.message, timeout + EXPIRY, trace)) {
                continue;
            }
            record_named(&mut self.traced_requests, &named, index, now);
            self.replicas.record_sent(link.id(), units, now);
            self.metrics.messages.inc();
            if is_retry {
                self.metrics.retries.inc();
                remote.outstanding.retried.extend(open.message.slots.first());
            }
            let target = &mut remote.outstanding.write_targets[index];
            *target = (*target).max(written) + open.message.rows.len() as u64;
            remote.outstanding.last_progress = now;
            remote.outstanding.record_attempt(key, id);
            open.attempts.push(Attempt { id, link: index, sent: now, is_late: false });
            let timeout = self.replicas.timeout(link.id(), MIN_TIMEOUT);
            open.due = Some((now + timeout, MessageAction::Hedge));
            remote.outstanding.messages.insert(key, open);
            return;
        }
        if let Some(attempt) = open.attempts.last() {
            // A replica may still answer, and a load is expensive: it starts later than a hedged request would.
            let timeout = self.replicas.timeout(links[attempt.link].id(), MIN_LOAD_DELAY);
            open.due = (!open.has_fallback).then_some((attempt.sent + timeout, MessageAction::Load));
            remote.outstanding.messages.insert(key, open);
        } else if cause == ResendCause::Busy && self.retries_busy(links, &open, remote.outstanding.started) {
            open.due = Some((Instant::now() + open.busy_pause, MessageAction::RetryBusy));
            remote.outstanding.messages.insert(key, open);
        } else if !open.has_fallback {
            if cause == ResendCause::Busy {
                // Pause them, so that the next messages do not have to find out again.
                for &index in &open.tried {
                    let _hangs = self.replicas.mark_late(links[index].id(), Instant::now());
                }
            }
            if is_retry {
                tracing::warn!(layer = remote.call.layer, "no replica left: local fallback");
            }
            remote.outstanding.fall_back(remote.call.layer, &open.message, remote.fallback);
        }
    }

    /// Reports if replicas that were too busy for `open` are asked again.
    fn retries_busy(&self, links: &[Link], open: &OutstandingMessage, started: Instant) -> bool {
        let timeouts =
            open.tried.iter().map(|&index| self.replicas.timeout(links[index].id(), Duration::ZERO));
        started.elapsed() < MIN_BUSY_TIME.max(3 * timeouts.max().unwrap_or_default())
    }

    /// Runs the actions that are due.
    fn run_due_actions(&mut self, remote: &mut RemoteCall<'_>) {
        let now = Instant::now();
        let is_due = |open: &OutstandingMessage| open.due.is_some_and(|(due, _)| due <= now);
        let due: Vec<(u64, OutstandingMessage)> =
            remote.outstanding.messages.extract_if(|_, open| is_due(open)).collect();
        for (key, mut open) in due {
            remote.outstanding.last_progress = now;
            match open.due.take() {
                Some((_, MessageAction::Hedge)) => {
                    for attempt in open.attempts.iter_mut().filter(|attempt| !attempt.is_late) {
                        attempt.is_late = true;
                        self.mark_late(&remote.links()[attempt.link], remote.call.layer, now);
                    }
                    self.send(remote, key, open, None, ResendCause::Failed);
                }
                Some((_, MessageAction::Load)) => {
                    open.has_fallback = true;
                    remote.outstanding.fall_back(remote.call.layer, &open.message, remote.fallback);
                    remote.outstanding.messages.insert(key, open);
                }
                Some((_, MessageAction::RetryBusy)) => {
                    open.tried.clear();
                    open.busy_pause = (open.busy_pause * 2).min(MAX_BUSY_PAUSE);
                    self.send(remote, key, open, None, ResendCause::Failed);
                }
                None => drop(remote.outstanding.messages.insert(key, open)),
            }
        }
    }

    /// Pauses the replica of `link`, which is late. If it hangs, opens its circuit.
    fn mark_late(&mut self, link: &Link, layer: usize, now: Instant) {
        let hangs = self.replicas.mark_late(link.id(), now);
        tracing::warn!(address = link.address(), layer, hangs, "remote function late: hedging");
        if hangs {
            link.open_circuit("no answer in time");
        }
    }

    /// Sends a message again after a failed attempt, unless another attempt is in flight.
    pub(super) fn resend(
        &mut self,
        remote: &mut RemoteCall<'_>,
        key: u64,
        open: OutstandingMessage,
        cause: ResendCause,
    ) {
        if !open.attempts.is_empty() {
            remote.outstanding.messages.insert(key, open);
        } else if !open.has_fallback {
            self.send(remote, key, open, None, cause);
        }
    }

    /// Cancels messages that need no answer any more, because the fallback has computed `slots`.
    pub(super) fn cancel_computed(&mut self, links: &[Link], outstanding: &mut Outstanding, slots: &[u32]) {
        for key in outstanding.record_computed(slots) {
            if let Some(mut open) = outstanding.messages.remove(&key) {
                self.cancel(links, &mut open, outstanding);
            }
        }
    }

    /// Cancels all messages of a failed call.
    fn cancel_all(&mut self, links: &[Link], outstanding: &mut Outstanding) {
        for (_, mut open) in std::mem::take(&mut outstanding.messages) {
            self.cancel(links, &mut open, outstanding);
        }
    }

    /// Cancels the attempts at `open`.
    pub(super) fn cancel(
        &mut self,
        links: &[Link],
        open: &mut OutstandingMessage,
        outstanding: &mut Outstanding,
    ) {
        let units = open.message.units();
        for attempt in outstanding.take_attempts(open) {
            let (link, id) = (&links[attempt.link], attempt.id);
            self.replicas.release(link.id(), units);
            let is_kept =
                attempt.is_late && self.replicas.keeps_for_measurement(link.id(), id, units, attempt.sent);
            if !is_kept {
                link.send(ForwardRequest { body: Some(Body::Cancel(Cancel { id })) });
            }
        }
    }
}

/// Returns the compute time that `reply` reports.
fn compute_time(reply: &ForwardReply) -> Option<Duration> {
    match &reply.outcome {
        Some(Outcome::Rows(rows)) => Some(Duration::from_micros(rows.compute_us.into())),
        Some(Outcome::Failure(_)) | None => None,
    }
}

/// Builds the request for `message`. The function may drop it after `budget`. `trace` names its parent spans.
fn work_request(
    remote: &RemoteCall<'_>,
    id: u64,
    message: &Message,
    budget: Duration,
    trace: Bytes,
) -> ForwardRequest {
    ForwardRequest {
        body: Some(Body::Work(Work {
            id,
            generation: remote.placement.generation,
            layer: remote.call.layer as u32,
            budget_us: u32::try_from(budget.as_micros()).unwrap_or(u32::MAX),
            rows: message.rows.clone(),
            counts: message.counts.clone(),
            experts: message.experts.clone(),
            trace,
        })),
    }
}
