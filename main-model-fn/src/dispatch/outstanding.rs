//! State of a layer call in progress: messages and their attempts (hedged requests, retries), answers, and pairs for the
//! local fallback. Bookkeeping only; [`super::exchange`] acts on it.

use super::calls::CompletedCall;
use super::error::ExpertError;
use super::fallback::FallbackExperts;
use super::link::Link;
use super::split::Message;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Time without progress, and without anything left to try, after which a layer call fails.
pub(super) const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);
/// First pause of a message for which every replica was too busy.
const FIRST_BUSY_PAUSE: Duration = Duration::from_millis(5);

/// Remote part of one layer call.
pub(crate) struct Outstanding {
    /// Messages without an answer, by message key.
    pub(super) messages: HashMap<u64, OutstandingMessage>,
    /// Message key of each attempt, by the attempt's id.
    attempts: HashMap<u64, u64>,
    /// Answers that have arrived.
    pub(super) replies: Vec<ReplicaReply>,
    /// Number of messages that were answered.
    pub(super) answered_messages: u64,
    /// Slots to compute in this process once their remote expert is loaded, by expert.
    pub(super) fallback_slots: BTreeMap<u32, Vec<u32>>,
    /// Slots to compute in this process once their local expert is loaded, by expert.
    pub(super) loading_slots: BTreeMap<u32, Vec<u32>>,
    /// Slots of remote experts that this process has computed.
    computed_slots: BTreeSet<u32>,
    /// One slot of every message that was sent again.
    pub(super) retried: Vec<u32>,
    /// Compute time that the answers report.
    pub(super) remote_compute_time: Duration,
    /// Calls that are over, in an iteration with traced requests.
    pub(super) completed_calls: Vec<CompletedCall>,
    /// (link index, slot) of rows that were not finite although their input was.
    pub(super) non_finite_rows: Vec<(usize, u32)>,
    /// Error of each expert that cannot be loaded.
    pub(super) unloadable: BTreeMap<u32, String>,
    /// Bytes that each link will have written when the messages have left.
    pub(super) write_targets: Vec<u64>,
    pub(super) started: Instant,
    /// Time at which the engine began to listen for answers.
    pub(super) listening_since: Instant,
    /// Time of the last event or attempt.
    pub(super) last_progress: Instant,
}

/// Rows that a remote function computed.
pub(super) struct ReplicaReply {
    /// Index of the link in the placement.
    pub(super) link: usize,
    pub(super) rows: Bytes,
    /// Slot of each row.
    pub(super) slots: Vec<u32>,
}

/// A message without an answer.
pub(super) struct OutstandingMessage {
    pub(super) message: Message,
    /// Host class of its experts.
    pub(super) class: usize,
    /// Attempts in flight, the newest last.
    pub(super) attempts: Vec<Attempt>,
    /// Indices of the links that it was sent to since its last pause.
    pub(super) tried: BTreeSet<usize>,
    /// True once it was sent, or no replica could take it.
    pub(super) was_dispatched: bool,
    /// Next pause if every replica is too busy.
    pub(super) busy_pause: Duration,
    /// Time and kind of the next action if no answer arrives.
    pub(super) due: Option<(Instant, MessageAction)>,
    /// True if its experts are being loaded as fallback: the first to deliver, replica or load, provides the rows.
    pub(super) has_fallback: bool,
}

/// A message that was sent to one replica.
pub(super) struct Attempt {
    pub(super) id: u64,
    /// Index of the link in the placement.
    pub(super) link: usize,
    pub(super) sent: Instant,
    /// True if its timeout has passed.
    pub(super) is_late: bool,
}

/// Next action for a message without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageAction {
    /// Send it to another replica as well (hedged request).
    Hedge,
    /// Load its experts as well (local fallback).
    Load,
    /// Ask the replicas that were too busy again.
    RetryBusy,
}

impl OutstandingMessage {
    pub(super) fn new(message: Message, class: usize) -> Self {
        Self {
            message,
            class,
            attempts: Vec::new(),
            tried: BTreeSet::new(),
            was_dispatched: false,
            busy_pause: FIRST_BUSY_PAUSE,
            due: None,
            has_fallback: false,
        }
    }

    /// Reports if the newest attempt was sent over the link with this index.
    pub(super) fn waits_for(&self, link: usize) -> bool {
        self.attempts.last().is_some_and(|attempt| attempt.link == link)
    }
}

impl Outstanding {
    /// Creates the state of a call that begins `now` over `links` links.
    pub(super) fn new(links: usize, now: Instant) -> Self {
        Self {
            messages: HashMap::new(),
            attempts: HashMap::new(),
            replies: Vec::new(),
            answered_messages: 0,
            fallback_slots: BTreeMap::new(),
            loading_slots: BTreeMap::new(),
            computed_slots: BTreeSet::new(),
            retried: Vec::new(),
            remote_compute_time: Duration::ZERO,
            completed_calls: Vec::new(),
            non_finite_rows: Vec::new(),
            unloadable: BTreeMap::new(),
            write_targets: vec![0; links],
            started: now,
            listening_since: now,
            last_progress: now,
        }
    }

    /// Returns the number of (token, expert) pairs in unanswered messages.
    pub(super) fn pairs(&self) -> usize {
        self.messages.values().map(|open| open.message.slots.len()).sum()
    }

    /// Reports if each ready link has written the messages that were sent over it.
    pub(super) fn have_left(&self, links: &[Link]) -> bool {
        let targets = links.iter().zip(&self.write_targets);
        targets.into_iter().all(|(link, &target)| link.written() >= target || !link.is_ready())
    }

    /// Reports if every pair has its row.
    pub(super) fn is_complete(&self) -> bool {
        self.messages.is_empty() && self.fallback_slots.is_empty() && self.loading_slots.is_empty()
    }

    /// Records the attempt `id` at the message `key`.
    pub(super) fn record_attempt(&mut self, key: u64, id: u64) {
        self.attempts.insert(id, key);
    }

    /// Returns the key of the message that `id` is an attempt at, if an answer from link `link` is still wanted.
    pub(super) fn message_key(&self, id: u64, link: usize) -> Option<u64> {
        let key = *self.attempts.get(&id)?;
        let attempts = &self.messages.get(&key)?.attempts;
        attempts.iter().any(|attempt| attempt.id == id && attempt.link == link).then_some(key)
    }

    /// Takes the attempts out of `message`: their answers are not wanted any more.
    pub(super) fn take_attempts(&mut self, message: &mut OutstandingMessage) -> Vec<Attempt> {
        let attempts = std::mem::take(&mut message.attempts);
        for attempt in &attempts {
            self.attempts.remove(&attempt.id);
        }
        attempts
    }

    /// Takes the attempt `id` out of `message`.
    pub(super) fn take_attempt(&mut self, message: &mut OutstandingMessage, id: u64) -> Option<Attempt> {
        self.attempts.remove(&id);
        let position = message.attempts.iter().position(|attempt| attempt.id == id)?;
        Some(message.attempts.remove(position))
    }

    /// Requests the experts of `message` as local fallback.
    pub(super) fn fall_back(&mut self, layer: usize, message: &Message, fallback: &mut FallbackExperts) {
        for (&slot, &expert) in message.slots.iter().zip(&message.experts) {
            self.fallback_slots.entry(expert).or_default().push(slot);
            if !self.unloadable.contains_key(&expert) {
                fallback.request(layer, expert);
            }
        }
    }

    /// Records the rows that answer `message` over link `link`. Rows that this process has computed meanwhile stay: they
    /// have the same bits.
    pub(super) fn record_answer(
        &mut self,
        layer: usize,
        message: Message,
        (link, rows): (usize, &Bytes),
        row_bytes: usize,
        fallback: &mut FallbackExperts,
    ) {
        self.answered_messages += 1;
        for (&slot, expert) in message.slots.iter().zip(&message.experts) {
            if let Some(slots) = self.fallback_slots.get_mut(expert) {
                slots.retain(|&other| other != slot);
                if slots.is_empty() {
                    self.fallback_slots.remove(expert);
                    fallback.release(layer, *expert);
                }
            }
        }
        if message.slots.iter().any(|slot| self.computed_slots.contains(slot)) {
            for (row, slot) in message.slots.into_iter().enumerate() {
                if !self.computed_slots.contains(&slot) {
                    let rows = rows.slice(row * row_bytes..(row + 1) * row_bytes);
                    self.replies.push(ReplicaReply { link, rows, slots: vec![slot] });
                }
            }
        } else {
            self.replies.push(ReplicaReply { link, rows: rows.clone(), slots: message.slots });
        }
    }

    /// Records that this process has computed `slots`, all fallback slots of their experts. Returns the keys of the
    /// messages that need no answer any more.
    pub(super) fn record_computed(&mut self, slots: &[u32]) -> Vec<u64> {
        self.computed_slots.extend(slots);
        let fallback_slots = &self.fallback_slots;
        let is_done = |open: &OutstandingMessage| {
            open.has_fallback
                && !open.message.experts.iter().any(|expert| fallback_slots.contains_key(expert))
        };
        self.messages.iter().filter(|(_, open)| is_done(open)).map(|(&key, _)| key).collect()
    }

    /// Returns the time of the next due action.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.messages.values().filter_map(|open| open.due).map(|(due, _)| due).min()
    }

    /// Returns the time at which the call fails without further progress. A load may take `load_timeout`.
    pub(super) fn deadline(&self, load_timeout: Duration) -> Instant {
        let last = self.next_due().map_or(self.last_progress, |due| due.max(self.last_progress));
        last + PROGRESS_TIMEOUT.max(load_timeout)
    }

    /// Returns the slots without a row.
    fn missing(&self) -> BTreeSet<u32> {
        let open = self.messages.values().flat_map(|open| open.message.slots.iter());
        let waiting = self.fallback_slots.values().chain(self.loading_slots.values()).flatten();
        open.chain(waiting).copied().filter(|slot| !self.computed_slots.contains(slot)).collect()
    }

    /// Returns the slots of experts that cannot be loaded and that no replica is asked for any more.
    fn lost(&self) -> BTreeSet<u32> {
        let asked = self.messages.values().flat_map(|open| open.message.slots.iter().copied());
        let asked: BTreeSet<u32> = asked.collect();
        let unloadable =
            self.fallback_slots.iter().filter(|(expert, _)| self.unloadable.contains_key(expert));
        unloadable.flat_map(|(_, slots)| slots.iter().copied()).filter(|slot| !asked.contains(slot)).collect()
    }

    /// Returns the error of the call, if slots are lost or its deadline has passed.
    pub(super) fn failure(&self, layer: usize, top_k: usize, deadline_passed: bool) -> Option<ExpertError> {
        let lost = if self.unloadable.is_empty() { BTreeSet::new() } else { self.lost() };
        let rows = |slots: &BTreeSet<u32>| {
            let rows: BTreeSet<usize> = slots.iter().map(|&slot| slot as usize / top_k).collect();
            rows.into_iter().collect()
        };
        if !lost.is_empty() {
            let experts = || {
                self.fallback_slots.iter().filter(|(_, slots)| slots.iter().any(|slot| lost.contains(slot)))
            };
            let expert =
                experts().map(|(&expert, _)| expert).find(|expert| self.unloadable.contains_key(expert))?;
            let message = self.unloadable.get(&expert)?.clone();
            return Some(ExpertError::Load { layer, expert, message, rows: rows(&lost) });
        }
        deadline_passed.then(|| {
            let missing = self.missing();
            let limit = self.last_progress.elapsed();
            ExpertError::Deadline { layer, missing: missing.len(), limit, rows: rows(&missing) }
        })
    }
}
