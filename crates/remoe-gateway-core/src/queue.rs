//! Request queue with load shedding: bounded in count and bytes, and fair among clients. Pure.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A place in a queue.
pub(crate) type Ticket = u64;

/// Waiting items of several clients. They leave in turns, one of each client; each client's in the order
/// in which they came.
pub(crate) struct FairQueue<T> {
    most_bytes: usize,
    clients: BTreeMap<Arc<str>, VecDeque<QueueEntry<T>>>,
    /// Whose turn is next; every client that has something waiting, once.
    turns: VecDeque<Arc<str>>,
    count: usize,
    bytes: usize,
    tickets: Ticket,
}

struct QueueEntry<T> {
    ticket: Ticket,
    bytes: usize,
    item: T,
}

/// Result of adding an item to the queue.
pub(crate) enum Pushed<T> {
    /// It waits.
    Waits(Ticket),
    /// It waits, and the youngest of the client that has most waiting gave way.
    Displaced(Ticket, T),
    /// There is no room.
    Full(T),
}

impl<T> FairQueue<T> {
    /// Room for items of `most_bytes` together.
    pub(crate) fn new(most_bytes: usize) -> Self {
        Self { most_bytes, clients: BTreeMap::new(), turns: VecDeque::new(), count: 0, bytes: 0, tickets: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Lets `item` of `client` wait, as one of `most`. Where the queue is full it takes the place of another client's
    /// youngest, if that client has more waiting than this one would have then.
    pub(crate) fn push(&mut self, client: &Arc<str>, bytes: usize, item: T, most: usize) -> Pushed<T> {
        let fits = |queue: &Self, freed: usize| queue.bytes - freed + bytes <= queue.most_bytes;
        if self.count < most && fits(self, 0) {
            return Pushed::Waits(self.add(client, bytes, item));
        }
        let own = self.clients.get(client).map_or(0, VecDeque::len);
        let greatest = self.clients.iter().max_by_key(|(_, entries)| entries.len());
        let victim = greatest.filter(|(_, entries)| entries.len() > own + 1);
        let victim = victim.and_then(|(_, entries)| entries.back());
        let Some((ticket, freed)) = victim.map(|entry| (entry.ticket, entry.bytes)) else {
            return Pushed::Full(item);
        };
        if !fits(self, freed) {
            return Pushed::Full(item);
        }
        let displaced = self.remove(ticket);
        let ticket = self.add(client, bytes, item);
        match displaced {
            Some(displaced) => Pushed::Displaced(ticket, displaced),
            None => Pushed::Waits(ticket),
        }
    }

    fn add(&mut self, client: &Arc<str>, bytes: usize, item: T) -> Ticket {
        self.tickets += 1;
        let entries = self.clients.entry(client.clone()).or_default();
        if entries.is_empty() {
            self.turns.push_back(client.clone());
        }
        entries.push_back(QueueEntry { ticket: self.tickets, bytes, item });
        self.count += 1;
        self.bytes += bytes;
        self.tickets
    }

    /// The oldest item of the client whose turn it is.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let client = self.turns.pop_front()?;
        let entries = self.clients.get_mut(&client)?;
        let entry = entries.pop_front()?;
        if entries.is_empty() {
            self.clients.remove(&client);
        } else {
            self.turns.push_back(client);
        }
        self.count -= 1;
        self.bytes -= entry.bytes;
        Some(entry.item)
    }

    /// Takes the item of `ticket` out, if it still waits.
    pub(crate) fn remove(&mut self, ticket: Ticket) -> Option<T> {
        let (client, place) = self.clients.iter().find_map(|(client, entries)| {
            let place = entries.iter().position(|entry| entry.ticket == ticket)?;
            Some((client.clone(), place))
        })?;
        let entries = self.clients.get_mut(&client)?;
        let entry = entries.remove(place)?;
        if entries.is_empty() {
            self.clients.remove(&client);
            self.turns.retain(|turn| *turn != client);
        }
        self.count -= 1;
        self.bytes -= entry.bytes;
        Some(entry.item)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names() -> [Arc<str>; 3] {
        ["a", "b", "c"].map(Arc::from)
    }

    #[test]
    fn clients_take_turns_regardless_of_their_load() {
        let [a, b, _] = names();
        let mut queue = FairQueue::new(100);
        for item in 0..4 {
            queue.push(&a, 1, item, 10);
        }
        queue.push(&b, 1, 10, 10);
        queue.push(&b, 1, 11, 10);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [0, 10, 1, 11, 2, 3]);
    }

    #[test]
    fn a_full_queue_has_room_for_those_who_have_less_in_it() {
        let [a, b, _] = names();
        let mut queue = FairQueue::new(100);
        for item in 0..3 {
            queue.push(&a, 10, item, 3);
        }
        assert!(matches!(queue.push(&a, 1, 9, 3), Pushed::Full(9)));
        assert!(matches!(queue.push(&b, 1, 10, 3), Pushed::Displaced(_, 2)));
        assert!(matches!(queue.push(&b, 1, 11, 3), Pushed::Full(11)), "two against one is fair");
        assert!(matches!(queue.push(&names()[2], 90, 12, 3), Pushed::Full(12)), "bytes count as well");
        assert_eq!((queue.len(), queue.bytes()), (3, 21));
    }

    proptest! {
        /// Whatever comes and leaves, counts and bytes are those of what waits, every item leaves once,
        /// and between two items of one client every other waiting client had a turn.
        #[test]
        fn nothing_is_lost_or_counted_twice(moves in proptest::collection::vec((0_usize..5, 0_usize..3, 0_usize..40), 1..200)) {
            let names = names();
            let mut queue = FairQueue::new(100);
            let mut waiting: BTreeMap<usize, (Ticket, usize)> = BTreeMap::new();
            for (number, (kind, client, bytes)) in moves.into_iter().enumerate() {
                match kind {
                    0..=2 => match queue.push(&names[client], bytes, number, 8) {
                        Pushed::Waits(ticket) => { waiting.insert(number, (ticket, bytes)); }
                        Pushed::Displaced(ticket, other) => {
                            prop_assert!(waiting.remove(&other).is_some());
                            waiting.insert(number, (ticket, bytes));
                        }
                        Pushed::Full(item) => prop_assert_eq!(item, number),
                    },
                    3 => {
                        let first = queue.turns.front().cloned();
                        if let Some(item) = queue.pop() {
                            prop_assert!(waiting.remove(&item).is_some());
                            prop_assert!(queue.turns.len() < 2 || queue.turns.front() != first.as_ref());
                        }
                    }
                    _ => {
                        if let Some((&item, &(ticket, _))) = waiting.iter().nth(client) {
                            prop_assert_eq!(queue.remove(ticket), Some(item));
                            prop_assert_eq!(queue.remove(ticket), None);
                            waiting.remove(&item);
                        }
                    }
                }
                prop_assert_eq!(queue.len(), waiting.len());
                prop_assert_eq!(queue.bytes(), waiting.values().map(|(_, bytes)| bytes).sum::<usize>());
                prop_assert!(queue.len() <= 8 && queue.bytes() <= 100);
            }
            prop_assert_eq!(std::iter::from_fn(|| queue.pop()).count(), waiting.len());
        }
    }
}
