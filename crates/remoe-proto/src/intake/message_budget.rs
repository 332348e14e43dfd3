//! Load shedding among incomplete messages: grants bytes of a common budget and decides which message is dropped for
//! another. Pure, without a clock.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// Time after which a message may be dropped while others wait, plus its transfer time at [`MIN_BYTES_PER_SECOND`].
const MIN_DROP_AGE: Duration = Duration::from_secs(1);
/// Slowest tolerated transfer rate, in bytes per second.
const MIN_BYTES_PER_SECOND: u64 = 8 << 20;
/// Timeout of a message that waits for bytes of the budget.
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Standing of a connection, best first: connections without dropped messages, and among them those that have
/// completed a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerStanding {
    /// Number of its messages that were dropped because they delayed others.
    pub(super) dropped_messages: u32,
    /// True if it has never completed a message.
    pub(super) is_unproven: bool,
}

/// Outcome of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReservationOutcome {
    /// The bytes are reserved.
    Taken,
    /// The message waits for a notice.
    Wait,
    /// The budget is exhausted, and the connection has another message in progress.
    Refused,
}

/// Notice to a message after its reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GrantNotice {
    /// The bytes that it waited for are reserved.
    Granted,
    /// The message is dropped and must release its bytes.
    Dropped,
    /// The message waited until the timeout.
    Refused,
}

/// Notices with the handles of their messages.
pub(super) type Notices<T> = Vec<(T, GrantNotice)>;

/// Budget of bytes for incomplete messages. `T` is the handle by which a message is notified.
pub(super) struct MessageBudget<T> {
    free: usize,
    next: u64,
    entries: BTreeMap<u64, BudgetEntry<T>>,
    /// Number of waiting entries.
    waiting: usize,
}

struct BudgetEntry<T> {
    peer: u64,
    standing: PeerStanding,
    bytes: usize,
    state: EntryState,
    handle: T,
}

#[derive(Clone, Copy, PartialEq)]
enum EntryState {
    Waiting {
        until: Instant,
    },
    Held {
        /// Time from which on it may be dropped for another message.
        droppable_from: Instant,
    },
    /// Told to release its bytes.
    Dropping,
}

impl<T: Clone> MessageBudget<T> {
    /// Creates a budget of `bytes`, at least the largest message.
    pub(super) fn new(bytes: usize) -> Self {
        Self { free: bytes, next: 0, entries: BTreeMap::new(), waiting: 0 }
    }

    /// Reserves `bytes` for a message of connection `peer`. The number identifies the entry; a refused message has
    /// none.
    pub(super) fn reserve(
        &mut self,
        peer: u64,
        standing: PeerStanding,
        bytes: usize,
        handle: T,
        now: Instant,
    ) -> (u64, ReservationOutcome, Notices<T>) {
        let id = self.next;
        self.next += 1;
        let is_outranked = self.waiting > 0
            && self.entries.values().any(|entry| entry.is_waiting() && entry.standing <= standing);
        if bytes <= self.free && !is_outranked {
            self.free -= bytes;
            let state = EntryState::Held { droppable_from: droppable_from(bytes, now) };
            self.entries.insert(id, BudgetEntry { peer, standing, bytes, state, handle });
            return (id, ReservationOutcome::Taken, Vec::new());
        }
        // The connection is not read while a message waits, so it must not have another incomplete message.
        if self.entries.values().any(|entry| entry.peer == peer) {
            return (id, ReservationOutcome::Refused, Vec::new());
        }
        let state = EntryState::Waiting { until: now + WAIT_TIMEOUT };
        self.entries.insert(id, BudgetEntry { peer, standing, bytes, state, handle });
        self.waiting += 1;
        (id, ReservationOutcome::Wait, self.update(now))
    }

    /// Releases the bytes of message `id`, which is complete or dropped.
    pub(super) fn release(&mut self, id: u64, now: Instant) -> Notices<T> {
        let Some(entry) = self.entries.remove(&id) else { return Vec::new() };
        match entry.state {
            EntryState::Waiting { .. } => self.waiting -= 1,
            EntryState::Held { .. } | EntryState::Dropping => self.free += entry.bytes,
        }
        self.update(now)
    }

    /// Grants bytes to waiting messages, the best standing first, and selects messages to drop for the next one.
    pub(super) fn update(&mut self, now: Instant) -> Notices<T> {
        let mut notices = Vec::new();
        if self.waiting == 0 {
            return notices;
        }
        let waiting = &mut self.waiting;
        self.entries.retain(|_, entry| {
            let is_expired = matches!(entry.state, EntryState::Waiting { until } if until <= now);
            if is_expired {
                notices.push((entry.handle.clone(), GrantNotice::Refused));
                *waiting -= 1;
            }
            !is_expired
        });
        while let Some((&id, first)) = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_waiting())
            .min_by_key(|(id, entry)| (entry.standing, **id))
        {
            let (standing, bytes) = (first.standing, first.bytes);
            if bytes > self.free {
                self.drop_for(standing, bytes, now, &mut notices);
                break;
            }
            let Some(entry) = self.entries.get_mut(&id) else { break };
            entry.state = EntryState::Held { droppable_from: droppable_from(bytes, now) };
            notices.push((entry.handle.clone(), GrantNotice::Granted));
            self.free -= bytes;
            self.waiting -= 1;
        }
        notices
    }

    /// Drops as many messages as a message of `bytes` with this standing needs, if that suffices.
    fn drop_for(&mut self, standing: PeerStanding, bytes: usize, now: Instant, notices: &mut Notices<T>) {
        let dropping = self.entries.values().filter(|entry| entry.state == EntryState::Dropping);
        let available = self.free + dropping.map(|entry| entry.bytes).sum::<usize>();
        let mut per_peer: HashMap<u64, (usize, usize)> = HashMap::new();
        for entry in self.entries.values() {
            let (count, held) = per_peer.entry(entry.peer).or_default();
            *count += 1;
            *held += entry.bytes;
        }
        let mut candidates: Vec<(Instant, u64, usize)> = Vec::new();
        for (&id, entry) in &self.entries {
            let EntryState::Held { droppable_from } = entry.state else { continue };
            let (count, held) = per_peer.get(&entry.peer).copied().unwrap_or_default();
            // A connection exceeds its share only with several messages: a single one never counts as excess.
            if droppable_from <= now || entry.standing > standing || (count > 1 && held > bytes) {
                candidates.push((droppable_from, id, entry.bytes));
            }
        }
        candidates.sort_unstable();
        let cumulative = candidates.iter().scan(available, |sum, (.., bytes)| {
            *sum += bytes;
            Some(*sum)
        });
        let needed = if available >= bytes {
            Some(0)
        } else {
            cumulative.clone().position(|sum| sum >= bytes).map(|i| i + 1)
        };
        for (_, id, _) in candidates.into_iter().take(needed.unwrap_or(0)) {
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.state = EntryState::Dropping;
                notices.push((entry.handle.clone(), GrantNotice::Dropped));
            }
        }
    }

    /// Returns the time of the next expiry that [`Self::update`] acts on.
    pub(super) fn next_change(&self) -> Option<Instant> {
        let changes = self.entries.values().filter_map(|entry| match entry.state {
            EntryState::Waiting { until } => Some(until),
            EntryState::Held { droppable_from } => Some(droppable_from),
            EntryState::Dropping => None,
        });
        changes.min()
    }
}

impl<T> BudgetEntry<T> {
    fn is_waiting(&self) -> bool {
        matches!(self.state, EntryState::Waiting { .. })
    }
}

fn droppable_from(bytes: usize, now: Instant) -> Instant {
    now + MIN_DROP_AGE + Duration::from_micros(bytes as u64 * 1_000_000 / MIN_BYTES_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROVEN: PeerStanding = PeerStanding { dropped_messages: 0, is_unproven: false };
    const NEW: PeerStanding = PeerStanding { dropped_messages: 0, is_unproven: true };

    /// Budget of 100 bytes with a clock.
    struct BudgetFixture {
        budget: MessageBudget<&'static str>,
        now: Instant,
    }

    impl BudgetFixture {
        fn new() -> Self {
            Self { budget: MessageBudget::new(100), now: Instant::now() }
        }

        fn reserve(
            &mut self,
            name: &'static str,
            peer: u64,
            standing: PeerStanding,
            bytes: usize,
        ) -> (u64, ReservationOutcome) {
            let (id, outcome, notices) = self.budget.reserve(peer, standing, bytes, name, self.now);
            assert_eq!(notices, [], "for {name}");
            (id, outcome)
        }
    }

    #[test]
    fn released_bytes_are_granted_to_the_waiting_message() {
        let mut case = BudgetFixture::new();
        let (first, outcome) = case.reserve("a", 1, PROVEN, 60);
        assert_eq!(outcome, ReservationOutcome::Taken);
        assert_eq!(case.reserve("b", 2, PROVEN, 41).1, ReservationOutcome::Wait);
        assert_eq!(case.budget.release(first, case.now), [("b", GrantNotice::Granted)]);
        assert_eq!(case.reserve("c", 3, PROVEN, 59).1, ReservationOutcome::Taken);
    }

    #[test]
    fn second_message_of_a_connection_beyond_the_budget_is_refused() {
        let mut case = BudgetFixture::new();
        assert_eq!(case.reserve("a", 1, NEW, 60).1, ReservationOutcome::Taken);
        assert_eq!(case.reserve("a2", 1, NEW, 60).1, ReservationOutcome::Refused);
        assert_eq!(case.reserve("b", 2, NEW, 60).1, ReservationOutcome::Wait);
        assert_eq!(case.reserve("b2", 2, NEW, 10).1, ReservationOutcome::Refused);
    }

    #[test]
    fn unproven_connection_is_dropped_for_a_proven_one() {
        let mut case = BudgetFixture::new();
        let (bad, _) = case.reserve("bad", 1, NEW, 50);
        case.reserve("good", 2, PROVEN, 50);
        case.reserve("waits", 3, NEW, 50);
        let (_, outcome, notices) = case.budget.reserve(4, PROVEN, 50, "better", case.now);
        assert_eq!((outcome, notices), (ReservationOutcome::Wait, vec![("bad", GrantNotice::Dropped)]));
        assert_eq!(case.budget.release(bad, case.now), [("better", GrantNotice::Granted)]);
    }

    #[test]
    fn connection_with_several_messages_yields_to_another() {
        let mut case = BudgetFixture::new();
        case.reserve("a", 1, PROVEN, 50);
        case.reserve("a2", 1, PROVEN, 50);
        let (_, _, notices) = case.budget.reserve(2, PROVEN, 40, "b", case.now);
        assert_eq!(notices, [("a", GrantNotice::Dropped)]);
    }

    #[test]
    fn overdue_message_among_equals_yields_only_if_it_helps() {
        let mut case = BudgetFixture::new();
        case.reserve("a", 1, PROVEN, 30);
        case.now += MIN_DROP_AGE / 2;
        let (later, _) = case.reserve("b", 2, PROVEN, 60);
        assert_eq!(case.reserve("c", 3, PROVEN, 80).1, ReservationOutcome::Wait);
        case.now += MIN_DROP_AGE / 2 + Duration::from_millis(1);
        assert_eq!(case.budget.update(case.now), [], "40 bytes are too few for any message");
        case.now += MIN_DROP_AGE;
        let notices = [("a", GrantNotice::Dropped), ("b", GrantNotice::Dropped)];
        assert_eq!(case.budget.update(case.now), notices);
        assert_eq!(case.budget.update(case.now), [], "they are told once");
        case.budget.release(0, case.now);
        assert_eq!(case.budget.release(later, case.now), [("c", GrantNotice::Granted)]);
    }

    #[test]
    fn waiting_message_is_refused_after_the_timeout() {
        let mut case = BudgetFixture::new();
        // The dropped message never releases its bytes.
        case.reserve("a", 1, PROVEN, 100);
        case.reserve("b", 2, PROVEN, 10);
        assert_eq!(case.budget.update(case.now + WAIT_TIMEOUT), [("b", GrantNotice::Refused)]);
        assert_eq!(case.budget.waiting, 0);
    }

    #[test]
    fn new_message_does_not_overtake_waiting_ones() {
        let mut case = BudgetFixture::new();
        case.reserve("a", 1, PROVEN, 60);
        case.reserve("b", 2, PROVEN, 60);
        assert_eq!(case.reserve("c", 3, PROVEN, 10).1, ReservationOutcome::Wait);
        assert_eq!(case.reserve("d", 4, NEW, 10).1, ReservationOutcome::Wait);
        assert_eq!(case.budget.next_change(), Some(droppable_from(60, case.now)));
    }
}
