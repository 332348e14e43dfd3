//! State of a layer call that waits: messages and the attempts at them (hedged requests, retries), answers, and pairs
//! that are to be computed here. Bookkeeping only; [`super::exchange`] acts.

use super::calls::Call;
use super::error::ExpertError;
use super::fallback::FallbackExperts;
use super::link::Link;
use super::split::Message;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// A layer in which nothing has moved for this long, and nothing is left to try, has failed.
pub(super) const LAYER_LIMIT: Duration = Duration::from_secs(10);
/// How long a message rests after every replica was too busy for it, the first time.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// The remote half of one layer call.
pub(crate) struct Outstanding {
    /// Messages without an answer, by a number of their own.
    pub(super) open: HashMap<u64, OutstandingMessage>,
    /// The message of each attempt, by the attempt's id.
    attempts: HashMap<u64, u64>,
    /// Answers that have come.
    pub(super) answers: Vec<ReplicaReply>,
    /// How many messages were answered.
    pub(super) replies: u64,
    /// Slots to compute here once their expert is loaded, by expert.
    pub(super) orphans: BTreeMap<u32, Vec<u32>>,
    /// Slots to compute here once their expert, which is local, has been read, by expert.
    pub(super) awaited: BTreeMap<u32, Vec<u32>>,
    /// Slots that have been computed here.
    here: BTreeSet<u32>,
    /// One slot of every message that was sent again.
    pub(super) retried: Vec<u32>,
    /// Time that the functions behind the answers report to have computed.
    pub(super) computed: Duration,
    /// Messages that are over, while that is followed.
    pub(super) calls: Vec<Call>,
    /// Links (by index) whose row for a slot was not finite, although its input was.
    pub(super) accused: Vec<(usize, u32)>,
    /// Experts that cannot be loaded, and why.
    pub(super) unloadable: BTreeMap<u32, String>,
    /// Bytes that each link has to have written when the messages have left.
    pub(super) left: Vec<u64>,
    pub(super) started: Instant,
    /// When the engine began to listen for answers.
    pub(super) listening: Instant,
    /// When something last came or was tried.
    pub(super) moved: Instant,
}

/// Rows that a function computed.
pub(super) struct ReplicaReply {
    /// Index of its link in the placement.
    pub(super) link: usize,
    pub(super) rows: Bytes,
    /// The slot of each row.
    pub(super) slots: Vec<u32>,
}

/// A message without an answer.
pub(super) struct OutstandingMessage {
    pub(super) message: Message,
    /// The class of the layer's remote experts that all of its experts are of.
    pub(super) class: usize,
    /// On their way, the newest last.
    pub(super) attempts: Vec<Attempt>,
    /// Indices of links in the placement that it was sent to since it rested.
    pub(super) tried: BTreeSet<usize>,
    /// It has been sent, or no replica could take it.
    pub(super) sent: bool,
    /// How long to rest when every replica is too busy.
    pub(super) pause: Duration,
    /// Action to take if no answer comes, and when.
    pub(super) due: Option<(Instant, MessageAction)>,
    /// Set if its experts are being loaded: the first to come, replica or load, gives the rows.
    pub(super) ordered: bool,
}

/// A message that was sent to a replica.
pub(super) struct Attempt {
    pub(super) id: u64,
    /// Index of the link in the placement.
    pub(super) link: usize,
    pub(super) sent: Instant,
    /// Another way was looked for meanwhile.
    pub(super) late: bool,
}

/// Action that is possible for a message without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageAction {
    /// Ask another replica as well.
    Hedge,
    /// Load its experts as well.
    Load,
    /// Ask replicas that were too busy once more.
    Again,
}

impl OutstandingMessage {
    pub(super) fn new(message: Message, class: usize) -> Self {
        Self {
            message,
            class,
            attempts: Vec::new(),
            tried: BTreeSet::new(),
            sent: false,
            pause: FIRST_PAUSE,
            due: None,
            ordered: false,
        }
    }

    /// Reports if the newest attempt at the message is over the link with this index.
    pub(super) fn waits_for(&self, link: usize) -> bool {
        self.attempts.last().is_some_and(|attempt| attempt.link == link)
    }
}

impl Outstanding {
    /// Nothing, for a call that begins `now` over `links` links.
    pub(super) fn new(links: usize, now: Instant) -> Self {
        Self {
            open: HashMap::new(),
            attempts: HashMap::new(),
            answers: Vec::new(),
            replies: 0,
            orphans: BTreeMap::new(),
            awaited: BTreeMap::new(),
            here: BTreeSet::new(),
            retried: Vec::new(),
            computed: Duration::ZERO,
            calls: Vec::new(),
            accused: Vec::new(),
            unloadable: BTreeMap::new(),
            left: vec![0; links],
            started: now,
            listening: now,
            moved: now,
        }
    }

    /// (token, expert) pairs whose rows are on their way here.
    pub(super) fn pairs(&self) -> usize {
        self.open.values().map(|open| open.message.slots.len()).sum()
    }

    /// Reports if each of `links` that is ready has written what was sent over it.
    pub(super) fn have_left(&self, links: &[Link]) -> bool {
        links.iter().zip(&self.left).all(|(link, &left)| link.written() >= left || !link.is_ready())
    }

    /// Reports if every pair has its row.
    pub(super) fn is_settled(&self) -> bool {
        self.open.is_empty() && self.orphans.is_empty() && self.awaited.is_empty()
    }

    /// Notes an attempt at the message `key`.
    pub(super) fn note(&mut self, key: u64, id: u64) {
        self.attempts.insert(id, key);
    }

    /// The message that `id` is an attempt at, if its answer is still wanted from link `link`.
    pub(super) fn message_of(&self, id: u64, link: usize) -> Option<u64> {
        let key = *self.attempts.get(&id)?;
        let attempts = &self.open.get(&key)?.attempts;
        attempts.iter().any(|attempt| attempt.id == id && attempt.link == link).then_some(key)
    }

    /// Nothing is expected any more from the attempts of `message`, which are returned.
    pub(super) fn forget(&mut self, message: &mut OutstandingMessage) -> Vec<Attempt> {
        let attempts = std::mem::take(&mut message.attempts);
        for attempt in &attempts {
            self.attempts.remove(&attempt.id);
        }
        attempts
    }

    /// As [`Self::forget`], for one attempt.
    pub(super) fn forget_one(&mut self, message: &mut OutstandingMessage, id: u64) -> Option<Attempt> {
        self.attempts.remove(&id);
        let position = message.attempts.iter().position(|attempt| attempt.id == id)?;
        Some(message.attempts.remove(position))
    }

    /// The pairs of `message` are to be computed here as soon as their experts, which are ordered, are
    /// there.
    pub(super) fn orphan(&mut self, layer: usize, message: &Message, fallback: &mut FallbackExperts) {
        for (&slot, &expert) in message.slots.iter().zip(&message.experts) {
            self.orphans.entry(expert).or_default().push(slot);
            if !self.unloadable.contains_key(&expert) {
                fallback.order(layer, expert);
            }
        }
    }

    /// The rows of `message` have come over link `link`. What was computed here meanwhile stays: the bits are the same.
    pub(super) fn answer(
        &mut self,
        layer: usize,
        message: Message,
        (link, rows): (usize, &Bytes),
        row_bytes: usize,
        fallback: &mut FallbackExperts,
    ) {
        self.replies += 1;
        for (&slot, expert) in message.slots.iter().zip(&message.experts) {
            if let Some(slots) = self.orphans.get_mut(expert) {
                slots.retain(|&orphan| orphan != slot);
                if slots.is_empty() {
                    self.orphans.remove(expert);
                    fallback.release(layer, *expert);
                }
            }
        }
        if message.slots.iter().any(|slot| self.here.contains(slot)) {
            for (row, slot) in message.slots.into_iter().enumerate() {
                if !self.here.contains(&slot) {
                    let rows = rows.slice(row * row_bytes..(row + 1) * row_bytes);
                    self.answers.push(ReplicaReply { link, rows, slots: vec![slot] });
                }
            }
        } else {
            self.answers.push(ReplicaReply { link, rows: rows.clone(), slots: message.slots });
        }
    }

    /// `slots`, all that were orphans of their experts, have been computed here. Returns the messages
    /// that need no answer any more.
    pub(super) fn computed_here(&mut self, slots: &[u32]) -> Vec<u64> {
        self.here.extend(slots);
        let orphans = &self.orphans;
        let done = |open: &OutstandingMessage| {
            open.ordered && !open.message.experts.iter().any(|expert| orphans.contains_key(expert))
        };
        self.open.iter().filter(|(_, open)| done(open)).map(|(&key, _)| key).collect()
    }

    /// When the next thing is to be done.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.open.values().filter_map(|open| open.due).map(|(due, _)| due).min()
    }

    /// When the call has failed: nothing has moved, nothing is left to try, and a load may take
    /// `load` at least.
    pub(super) fn deadline(&self, load: Duration) -> Instant {
        let last = self.next_due().map_or(self.moved, |due| due.max(self.moved));
        last + LAYER_LIMIT.max(load)
    }

    /// Slots without a row.
    fn missing(&self) -> BTreeSet<u32> {
        let open = self.open.values().flat_map(|open| open.message.slots.iter());
        let missing = open.chain(self.orphans.values().chain(self.awaited.values()).flatten()).copied();
        missing.filter(|slot| !self.here.contains(slot)).collect()
    }

    /// Slots of experts that cannot be loaded and that no replica is asked for any more.
    fn lost(&self) -> BTreeSet<u32> {
        let asked = self.open.values().flat_map(|open| open.message.slots.iter().copied());
        let asked: BTreeSet<u32> = asked.collect();
        let unloadable = self.orphans.iter().filter(|(expert, _)| self.unloadable.contains_key(expert));
        unloadable.flat_map(|(_, slots)| slots.iter().copied()).filter(|slot| !asked.contains(slot)).collect()
    }

    /// The failure of a call in which pairs are lost, or of one whose `deadline` has passed.
    pub(super) fn failure(&self, layer: usize, top_k: usize, deadline: bool) -> Option<ExpertError> {
        let lost = if self.unloadable.is_empty() { BTreeSet::new() } else { self.lost() };
        let rows = |slots: &BTreeSet<u32>| {
            let rows: BTreeSet<usize> = slots.iter().map(|&slot| slot as usize / top_k).collect();
            rows.into_iter().collect()
        };
        if !lost.is_empty() {
            let experts =
                || self.orphans.iter().filter(|(_, slots)| slots.iter().any(|it| lost.contains(it)));
            let expert = experts().map(|(&expert, _)| expert).find(|it| self.unloadable.contains_key(it))?;
            let message = self.unloadable.get(&expert)?.clone();
            return Some(ExpertError::Load { layer, expert, message, rows: rows(&lost) });
        }
        deadline.then(|| {
            let missing = self.missing();
            let limit = self.moved.elapsed();
            ExpertError::Deadline { layer, missing: missing.len(), limit, rows: rows(&missing) }
        })
    }
}
