//! Room for unfinished messages: which message gets it, and which one gives way when there is none. Pure.

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
pub(super) enum Answer {
    /// The room is there.
    Taken,
    /// A notice will come.
    Wait,
    /// There is none, and the connection has its share.
    Refused,
}

/// Later notice to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notice {
    /// The room that it waited for is there.
    Granted,
    /// It gives way: its room is to be released.
    Ended,
    /// It waited too long and waits no more.
    Refused,
}

/// Notices with the handles that they are for.
pub(super) type Notices<T> = Vec<(T, Notice)>;

/// Room for unfinished messages. `T` is the handle that a message is told through.
pub(super) struct Ledger<T> {
    free: usize,
    next: u64,
    entries: BTreeMap<u64, Entry<T>>,
    /// How many of the entries wait.
    waiting: usize,
}

struct Entry<T> {
    peer: u64,
    rank: Rank,
    bytes: usize,
    state: State,
    handle: T,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
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
    ) -> (u64, Answer, Notices<T>) {
        let id = self.next;
        self.next += 1;
        let ahead =
            self.waiting > 0 && self.entries.values().any(|entry| entry.waits() && entry.rank <= rank);
        if bytes <= self.free && !ahead {
            self.free -= bytes;
            let state = State::Held { due: due(bytes, now) };
            self.entries.insert(id, Entry { peer, rank, bytes, state, handle });
            return (id, Answer::Taken, Vec::new());
        }
        // Its connection is not read while it waits, so that nothing else of it must be unfinished.
        if self.entries.values().any(|entry| entry.peer == peer) {
            return (id, Answer::Refused, Vec::new());
        }
        let state = State::Waiting { until: now + WAIT_LIMIT };
        self.entries.insert(id, Entry { peer, rank, bytes, state, handle });
        self.waiting += 1;
        (id, Answer::Wait, self.settle(now))
    }

    /// The message `id` is complete, or given up.
    pub(super) fn release(&mut self, id: u64, now: Instant) -> Notices<T> {
        let Some(entry) = self.entries.remove(&id) else { return Vec::new() };
        match entry.state {
            State::Waiting { .. } => self.waiting -= 1,
            State::Held { .. } | State::Leaving => self.free += entry.bytes,
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
            let tired = matches!(entry.state, State::Waiting { until } if until <= now);
            if tired {
                notices.push((entry.handle.clone(), Notice::Refused));
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
            entry.state = State::Held { due: due(bytes, now) };
            notices.push((entry.handle.clone(), Notice::Granted));
            self.free -= bytes;
            self.waiting -= 1;
        }
        notices
    }

    /// Ends as many messages as a message of `bytes` of a connection of `rank` needs, if that helps it.
    fn make_way(&mut self, rank: Rank, bytes: usize, now: Instant, notices: &mut Notices<T>) {
        let leaving = self.entries.values().filter(|entry| entry.state == State::Leaving);
        let coming = self.free + leaving.map(|entry| entry.bytes).sum::<usize>();
        let mut of_peer: HashMap<u64, (usize, usize)> = HashMap::new();
        for entry in self.entries.values() {
            let (count, held) = of_peer.entry(entry.peer).or_default();
            *count += 1;
            *held += entry.bytes;
        }
        let mut candidates: Vec<(Instant, u64, usize)> = Vec::new();
        for (&id, entry) in &self.entries {
            let State::Held { due } = entry.state else { continue };
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
                entry.state = State::Leaving;
                notices.push((entry.handle.clone(), Notice::Ended));
            }
        }
    }

    /// When [`Self::settle`] can bring something new by itself.
    pub(super) fn next_change(&self) -> Option<Instant> {
        let changes = self.entries.values().filter_map(|entry| match entry.state {
            State::Waiting { until } => Some(until),
            State::Held { due } => Some(due),
            State::Leaving => None,
        });
        changes.min()
    }
}

impl<T> Entry<T> {
    fn waits(&self) -> bool {
        matches!(self.state, State::Waiting { .. })
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
    struct Case {
        ledger: Ledger<&'static str>,
        now: Instant,
    }

    impl Case {
        fn new() -> Self {
            Self { ledger: Ledger::new(100), now: Instant::now() }
        }

        fn ask(&mut self, name: &'static str, peer: u64, rank: Rank, bytes: usize) -> (u64, Answer) {
            let (id, answer, notices) = self.ledger.ask(peer, rank, bytes, name, self.now);
            assert_eq!(notices, [], "for {name}");
            (id, answer)
        }
    }

    #[test]
    fn room_is_taken_before_and_comes_back_after() {
        let mut case = Case::new();
        let (first, answer) = case.ask("a", 1, PROVEN, 60);
        assert_eq!(answer, Answer::Taken);
        assert_eq!(case.ask("b", 2, PROVEN, 41).1, Answer::Wait);
        assert_eq!(case.ledger.release(first, case.now), [("b", Notice::Granted)]);
        assert_eq!(case.ask("c", 3, PROVEN, 59).1, Answer::Taken);
    }

    #[test]
    fn a_connection_has_one_message_beyond_the_room() {
        let mut case = Case::new();
        assert_eq!(case.ask("a", 1, NEW, 60).1, Answer::Taken);
        assert_eq!(case.ask("a2", 1, NEW, 60).1, Answer::Refused);
        assert_eq!(case.ask("b", 2, NEW, 60).1, Answer::Wait);
        assert_eq!(case.ask("b2", 2, NEW, 10).1, Answer::Refused);
    }

    #[test]
    fn those_that_never_finished_a_message_give_way_at_once() {
        let mut case = Case::new();
        let (bad, _) = case.ask("bad", 1, NEW, 50);
        case.ask("good", 2, PROVEN, 50);
        case.ask("waits", 3, NEW, 50);
        let (_, answer, notices) = case.ledger.ask(4, PROVEN, 50, "better", case.now);
        assert_eq!((answer, notices), (Answer::Wait, vec![("bad", Notice::Ended)]));
        assert_eq!(case.ledger.release(bad, case.now), [("better", Notice::Granted)]);
    }

    #[test]
    fn several_messages_of_one_connection_give_way_to_one_of_another() {
        let mut case = Case::new();
        case.ask("a", 1, PROVEN, 50);
        case.ask("a2", 1, PROVEN, 50);
        let (_, _, notices) = case.ledger.ask(2, PROVEN, 40, "b", case.now);
        assert_eq!(notices, [("a", Notice::Ended)]);
    }

    #[test]
    fn one_message_of_equals_gives_way_when_it_is_late_and_not_in_vain() {
        let mut case = Case::new();
        case.ask("a", 1, PROVEN, 30);
        case.now += PATIENCE / 2;
        let (later, _) = case.ask("b", 2, PROVEN, 60);
        assert_eq!(case.ask("c", 3, PROVEN, 80).1, Answer::Wait);
        case.now += PATIENCE / 2 + Duration::from_millis(1);
        assert_eq!(case.ledger.settle(case.now), [], "40 bytes help nobody");
        case.now += PATIENCE;
        let ended = [("a", Notice::Ended), ("b", Notice::Ended)];
        assert_eq!(case.ledger.settle(case.now), ended);
        assert_eq!(case.ledger.settle(case.now), [], "they are told once");
        case.ledger.release(0, case.now);
        assert_eq!(case.ledger.release(later, case.now), [("c", Notice::Granted)]);
    }

    #[test]
    fn nobody_waits_for_ever() {
        let mut case = Case::new();
        // Ended, it never lets go.
        case.ask("a", 1, PROVEN, 100);
        case.ask("b", 2, PROVEN, 10);
        assert_eq!(case.ledger.settle(case.now + WAIT_LIMIT), [("b", Notice::Refused)]);
        assert_eq!(case.ledger.waiting, 0);
    }

    #[test]
    fn newcomers_do_not_pass_those_that_wait() {
        let mut case = Case::new();
        case.ask("a", 1, PROVEN, 60);
        case.ask("b", 2, PROVEN, 60);
        assert_eq!(case.ask("c", 3, PROVEN, 10).1, Answer::Wait);
        assert_eq!(case.ask("d", 4, NEW, 10).1, Answer::Wait);
        assert_eq!(case.ledger.next_change(), Some(due(60, case.now)));
    }
}
