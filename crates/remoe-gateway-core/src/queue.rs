//! Request queue with load shedding: bounded in count and bytes, and fair among clients. Pure.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Number of an entry in a queue.
pub(crate) type Ticket = u64;

/// Queue of several clients' items. Clients take turns; the items of one client leave in the order of their arrival.
pub(crate) struct FairQueue<T> {
    max_bytes: usize,
    clients: BTreeMap<Arc<str>, VecDeque<QueueEntry<T>>>,
    /// Clients in the order of their turns, each client with waiting items once.
    next_clients: VecDeque<Arc<str>>,
    count: usize,
    bytes: usize,
    last_ticket: Ticket,
}

struct QueueEntry<T> {
    ticket: Ticket,
    bytes: usize,
    item: T,
}

/// Result of adding an item to the queue.
pub(crate) enum Pushed<T> {
    /// The item waits.
    Waits(Ticket),
    /// The item waits. In its place the last item of the client with the most items was removed.
    Displaced(Ticket, T),
    /// The queue is full, and no other item is removed.
    Full(T),
}

impl<T> FairQueue<T> {
    /// Makes a queue for items of `max_bytes` together.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            clients: BTreeMap::new(),
            next_clients: VecDeque::new(),
            count: 0,
            bytes: 0,
            last_ticket: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds `item` of `client` if there are fewer than `max_count` items. If the queue is full, removes the last item
    /// of the client with the most, provided that it still has as many as `client` then (load shedding).
    pub(crate) fn push(&mut self, client: &Arc<str>, bytes: usize, item: T, max_count: usize) -> Pushed<T> {
        let fits = |queue: &Self, freed: usize| queue.bytes - freed + bytes <= queue.max_bytes;
        if self.count < max_count && fits(self, 0) {
            return Pushed::Waits(self.add(client, bytes, item));
        }
        let own_count = self.clients.get(client).map_or(0, VecDeque::len);
        let largest = self.clients.iter().max_by_key(|(_, entries)| entries.len());
        let displaced_entry = largest.filter(|(_, entries)| entries.len() > own_count + 1);
        let displaced_entry = displaced_entry.and_then(|(_, entries)| entries.back());
        let Some((ticket, freed)) = displaced_entry.map(|entry| (entry.ticket, entry.bytes)) else {
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
        self.last_ticket += 1;
        let entries = self.clients.entry(client.clone()).or_default();
        if entries.is_empty() {
            self.next_clients.push_back(client.clone());
        }
        entries.push_back(QueueEntry { ticket: self.last_ticket, bytes, item });
        self.count += 1;
        self.bytes += bytes;
        self.last_ticket
    }

    /// Removes the oldest item of the client whose turn is next.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let client = self.next_clients.pop_front()?;
        let entries = self.clients.get_mut(&client)?;
        let entry = entries.pop_front()?;
        if entries.is_empty() {
            self.clients.remove(&client);
        } else {
            self.next_clients.push_back(client);
        }
        self.count -= 1;
        self.bytes -= entry.bytes;
        Some(entry.item)
    }

    /// Removes the item of `ticket`, if it still waits.
    pub(crate) fn remove(&mut self, ticket: Ticket) -> Option<T> {
        let (client, index) = self.clients.iter().find_map(|(client, entries)| {
            let index = entries.iter().position(|entry| entry.ticket == ticket)?;
            Some((client.clone(), index))
        })?;
        let entries = self.clients.get_mut(&client)?;
        let entry = entries.remove(index)?;
        if entries.is_empty() {
            self.clients.remove(&client);
            self.next_clients.retain(|turn| *turn != client);
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
    fn full_queue_sheds_items_of_the_largest_client() {
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
        /// For any sequence of pushes and removals, counts and bytes are those of the waiting items, each item leaves
        /// once, and clients take turns.
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
                        let first = queue.next_clients.front().cloned();
                        if let Some(item) = queue.pop() {
                            prop_assert!(waiting.remove(&item).is_some());
                            prop_assert!(queue.next_clients.len() < 2 || queue.next_clients.front() != first.as_ref());
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
