//! Load shedding among unfinished messages: which message gets bytes of the budget, and which one gives way. Pure.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// A message that holds others up may be ended when it has taken longer than this ..
const PATIENCE: Duration = Duration::from_secs(1);
/// .. and than its bytes take at this rate, in bytes per second.
const SLOWEST: u64 = 8 << 20;
/// So long a message waits for room.
const WAIT_LIMIT: Duration = Duration::from_secs(10);

/// Trust in a connection, best first: connections of which no message had to be ended, and among them those that have
/// finished a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// Number of its messages that were ended because they held others up.
    pub(super) ended: u32,
    /// Set if it has never finished a message.
    pub(super) unproven: bool,
}

/// Outcome of a request for room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReservationOutcome {
    /// The room is there.
    Taken,
    /// A notice will come.
    Wait,
    /// There is none, and the connection has its share.
    Refused,
}

/// Later notice to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GrantNotice {
    /// The room that it waited for is there.
    Granted,
    /// It gives way: its room is to be released.
    Ended,
    /// It waited too long and waits no more.
    Refused,
}

/// Notices with the handles that they are for.
pub(super) type Notices<T> = Vec<(T, GrantNotice)>;

/// Room for unfinished messages. `T` is the handle that a message is told through.
pub(super) struct Ledger<T> {
    free: usize,
    next: u64,
    entries: BTreeMap<u64, LedgerEntry<T>>,
    /// How many of the entries wait.
    waiting: usize,
}

struct LedgerEntry<T> {
    peer: u64,
    rank: Rank,
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
        /// From then on it may be ended for another.
        due: Instant,
    },
    /// Inbound to give way.
    Leaving,
}

impl<T: Clone> Ledger<T> {
    /// `room` bytes, the largest message at least.
    pub(super) fn new(room: usize) -> Self {
        Self { free: room, next: 0, entries: BTreeMap::new(), waiting: 0 }
    }

    /// Asks for `bytes` for a message of connection `peer`. The number names the entry; a refused message
    /// has none.
    pub(super) fn ask(
        &mut self,
        peer: u64,
        rank: Rank,
        bytes: usize,
        handle: T,
        now: Instant,
    ) -> (u64, ReservationOutcome, Notices<T>) {
        let id = self.next;
        self.next += 1;
        let ahead =
            self.waiting > 0 && self.entries.values().any(|entry| entry.waits() && entry.rank <= rank);
        if bytes <= self.free && !ahead {
            self.free -= bytes;
            let state = EntryState::Held { due: due(bytes, now) };
            self.entries.insert(id, LedgerEntry { peer, rank, bytes, state, handle });
            return (id, ReservationOutcome::Taken, Vec::new());
        }
        // Its connection is not read while it waits, so that nothing else of it must be unfinished.
        if self.entries.values().any(|entry| entry.peer == peer) {
            return (id, ReservationOutcome::Refused, Vec::new());
        }
        let state = EntryState::Waiting { until: now + WAIT_LIMIT };
        self.entries.insert(id, LedgerEntry { peer, rank, bytes, state, handle });
        self.waiting += 1;
        (id, ReservationOutcome::Wait, self.settle(now))
    }

    /// The message `id` is complete, or given up.
    pub(super) fn release(&mut self, id: u64, now: Instant) -> Notices<T> {
        let Some(entry) = self.entries.remove(&id) else { return Vec::new() };
        match entry.state {
            EntryState::Waiting { .. } => self.waiting -= 1,
            EntryState::Held { .. } | EntryState::Leaving => self.free += entry.bytes,
        }
        self.settle(now)
    }

    /// Gives room to those that wait, the most trusted first, and says who gives way for the next one.
    pub(super) fn settle(&mut self, now: Instant) -> Notices<T> {
        let mut notices = Vec::new();
        if self.waiting == 0 {
            return notices;
        }
        let waiting = &mut self.waiting;
        self.entries.retain(|_, entry| {
            let tired = matches!(entry.state, EntryState::Waiting { until } if until <= now);
            if tired {
                notices.push((entry.handle.clone(), GrantNotice::Refused));
                *waiting -= 1;
            }
            !tired
        });
        while let Some((&id, first)) = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.waits())
            .min_by_key(|(id, entry)| (entry.rank, **id))
        {
            let (rank, bytes) = (first.rank, first.bytes);
            if bytes > self.free {
                self.make_way(rank, bytes, now, &mut notices);
                break;
            }
            let Some(entry) = self.entries.get_mut(&id) else { break };
            entry.state = EntryState::Held { due: due(bytes, now) };
            notices.push((entry.handle.clone(), GrantNotice::Granted));
            self.free -= bytes;
            self.waiting -= 1;
        }
        notices
    }

    /// Ends as many messages as a message of `bytes` of a connection of `rank` needs, if that helps it.
    fn make_way(&mut self, rank: Rank, bytes: usize, now: Instant, notices: &mut Notices<T>) {
        let leaving = self.entries.values().filter(|entry| entry.state == EntryState::Leaving);
        let coming = self.free + leaving.map(|entry| entry.bytes).sum::<usize>();
        let mut of_peer: HashMap<u64, (usize, usize)> = HashMap::new();
        for entry in self.entries.values() {
            let (count, held) = of_peer.entry(entry.peer).or_default();
            *count += 1;
            *held += entry.bytes;
        }
        let mut candidates: Vec<(Instant, u64, usize)> = Vec::new();
        for (&id, entry) in &self.entries {
            let EntryState::Held { due } = entry.state else { continue };
            let (count, held) = of_peer.get(&entry.peer).copied().unwrap_or_default();
            // Only several messages of a connection at a time can exceed its share: a single message never counts as
            // excess.
            if due <= now || entry.rank > rank || (count > 1 && held > bytes) {
                candidates.push((due, id, entry.bytes));
            }
        }
        candidates.sort_unstable();
        let reach = candidates.iter().scan(coming, |sum, (.., bytes)| {
            *sum += bytes;
            Some(*sum)
        });
        let needed =
            if coming >= bytes { Some(0) } else { reach.clone().position(|sum| sum >= bytes).map(|i| i + 1) };
        for (_, id, _) in candidates.into_iter().take(needed.unwrap_or(0)) {
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.state = EntryState::Leaving;
                notices.push((entry.handle.clone(), GrantNotice::Ended));
            }
        }
    }

    /// When [`Self::settle`] can bring something new by itself.
    pub(super) fn next_change(&self) -> Option<Instant> {
        let changes = self.entries.values().filter_map(|entry| match entry.state {
            EntryState::Waiting { until } => Some(until),
            EntryState::Held { due } => Some(due),
            EntryState::Leaving => None,
        });
        changes.min()
    }
}

impl<T> LedgerEntry<T> {
    fn waits(&self) -> bool {
        matches!(self.state, EntryState::Waiting { .. })
    }
}

fn due(bytes: usize, now: Instant) -> Instant {
    now + PATIENCE + Duration::from_micros(bytes as u64 * 1_000_000 / SLOWEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROVEN: Rank = Rank { ended: 0, unproven: false };
    const NEW: Rank = Rank { ended: 0, unproven: true };

    /// A ledger of 100 bytes and a clock.
    struct LedgerFixture {
        ledger: Ledger<&'static str>,
        now: Instant,
    }

    impl LedgerFixture {
        fn new() -> Self {
            Self { ledger: Ledger::new(100), now: Instant::now() }
        }

        fn ask(
            &mut self,
            name: &'static str,
            peer: u64,
            rank: Rank,
            bytes: usize,
        ) -> (u64, ReservationOutcome) {
            let (id, answer, notices) = self.ledger.ask(peer, rank, bytes, name, self.now);
            assert_eq!(notices, [], "for {name}");
            (id, answer)
        }
    }

    #[test]
    fn room_is_taken_before_and_comes_back_after() {
        let mut case = LedgerFixture::new();
        let (first, answer) = case.ask("a", 1, PROVEN, 60);
        assert_eq!(answer, ReservationOutcome::Taken);
        assert_eq!(case.ask("b", 2, PROVEN, 41).1, ReservationOutcome::Wait);
        assert_eq!(case.ledger.release(first, case.now), [("b", GrantNotice::Granted)]);
        assert_eq!(case.ask("c", 3, PROVEN, 59).1, ReservationOutcome::Taken);
    }

    #[test]
    fn a_connection_has_one_message_beyond_the_room() {
        let mut case = LedgerFixture::new();
        assert_eq!(case.ask("a", 1, NEW, 60).1, ReservationOutcome::Taken);
        assert_eq!(case.ask("a2", 1, NEW, 60).1, ReservationOutcome::Refused);
        assert_eq!(case.ask("b", 2, NEW, 60).1, ReservationOutcome::Wait);
        assert_eq!(case.ask("b2", 2, NEW, 10).1, ReservationOutcome::Refused);
    }

    #[test]
    fn those_that_never_finished_a_message_give_way_at_once() {
        let mut case = LedgerFixture::new();
        let (bad, _) = case.ask("bad", 1, NEW, 50);
        case.ask("good", 2, PROVEN, 50);
        case.ask("waits", 3, NEW, 50);
        let (_, answer, notices) = case.ledger.ask(4, PROVEN, 50, "better", case.now);
        assert_eq!((answer, notices), (ReservationOutcome::Wait, vec![("bad", GrantNotice::Ended)]));
        assert_eq!(case.ledger.release(bad, case.now), [("better", GrantNotice::Granted)]);
    }

    #[test]
    fn connection_with_several_messages_yields_to_another() {
        let mut case = LedgerFixture::new();
        case.ask("a", 1, PROVEN, 50);
        case.ask("a2", 1, PROVEN, 50);
        let (_, _, notices) = case.ledger.ask(2, PROVEN, 40, "b", case.now);
        assert_eq!(notices, [("a", GrantNotice::Ended)]);
    }

    #[test]
    fn overdue_message_among_equals_yields_only_if_it_helps() {
        let mut case = LedgerFixture::new();
        case.ask("a", 1, PROVEN, 30);
        case.now += PATIENCE / 2;
        let (later, _) = case.ask("b", 2, PROVEN, 60);
        assert_eq!(case.ask("c", 3, PROVEN, 80).1, ReservationOutcome::Wait);
        case.now += PATIENCE / 2 + Duration::from_millis(1);
        assert_eq!(case.ledger.settle(case.now), [], "40 bytes are too few for any message");
        case.now += PATIENCE;
        let ended = [("a", GrantNotice::Ended), ("b", GrantNotice::Ended)];
        assert_eq!(case.ledger.settle(case.now), ended);
        assert_eq!(case.ledger.settle(case.now), [], "they are told once");
        case.ledger.release(0, case.now);
        assert_eq!(case.ledger.release(later, case.now), [("c", GrantNotice::Granted)]);
    }

    #[test]
    fn no_message_waits_for_ever() {
        let mut case = LedgerFixture::new();
        // Ended, it never lets go.
        case.ask("a", 1, PROVEN, 100);
        case.ask("b", 2, PROVEN, 10);
        assert_eq!(case.ledger.settle(case.now + WAIT_LIMIT), [("b", GrantNotice::Refused)]);
        assert_eq!(case.ledger.waiting, 0);
    }

    #[test]
    fn newcomers_do_not_pass_those_that_wait() {
        let mut case = LedgerFixture::new();
        case.ask("a", 1, PROVEN, 60);
        case.ask("b", 2, PROVEN, 60);
        assert_eq!(case.ask("c", 3, PROVEN, 10).1, ReservationOutcome::Wait);
        assert_eq!(case.ask("d", 4, NEW, 10).1, ReservationOutcome::Wait);
        assert_eq!(case.ledger.next_change(), Some(due(60, case.now)));
    }
}
