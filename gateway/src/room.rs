//! Room for bodies, taken before any of it is read: so much for everybody together, and half of it for one sender at most,
//! so that one that sends slowly keeps no other out. Senders of requests are clients, senders of answers are models.

use bytes::Bytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes for bodies.
pub(crate) struct Rooms {
    all: usize,
    most_of_one: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    /// By client; who has none is not in it.
    of: HashMap<Arc<str>, usize>,
}

/// Why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// Others have it.
    Everybody,
    /// The client has as much as one may.
    Client,
}

/// What one body has; given back when dropped.
pub(crate) struct Room {
    rooms: Arc<Rooms>,
    client: Arc<str>,
    bytes: usize,
}

impl Rooms {
    /// `all` bytes together, in which each client may have one body of `largest` bytes whatever half of it is.
    pub(crate) fn new(all: usize, largest: usize) -> Arc<Self> {
        let all = all.max(largest);
        Arc::new(Self { all, most_of_one: (all / 2).max(largest), taken: Mutex::default() })
    }

    /// `bytes` for a body of `client`.
    ///
    /// # Errors
    /// There are not so many left.
    pub(crate) fn take(self: &Arc<Self>, client: &Arc<str>, bytes: usize) -> Result<Room, NoRoom> {
        self.add(client, bytes)?;
        Ok(Room { rooms: self.clone(), client: client.clone(), bytes })
    }

    /// Room of `client` that grows by [`Room::resize`].
    pub(crate) fn empty(self: &Arc<Self>, client: &Arc<str>) -> Room {
        Room { rooms: self.clone(), client: client.clone(), bytes: 0 }
    }

    fn add(&self, client: &Arc<str>, bytes: usize) -> Result<(), NoRoom> {
        let mut taken = self.taken();
        let its = taken.of.get(client).copied().unwrap_or(0);
        let fits = |has: usize, most: usize| has.checked_add(bytes).is_some_and(|sum| sum <= most);
        if !fits(its, self.most_of_one) {
            return Err(NoRoom::Client);
        }
        if !fits(taken.all, self.all) {
            return Err(NoRoom::Everybody);
        }
        taken.all += bytes;
        taken.of.insert(client.clone(), its + bytes);
        Ok(())
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // Sums that are right after every step.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, client: &Arc<str>, bytes: usize) {
        let mut taken = self.taken();
        taken.all -= bytes;
        if let Some(its) = taken.of.get_mut(client) {
            *its -= bytes;
            if *its == 0 {
                taken.of.remove(client);
            }
        }
    }
}

impl Room {
    /// Bytes that it has.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps `bytes` and gives the rest back: what was announced, or could have come, is more than what came.
    pub(crate) fn keep(&mut self, bytes: usize) {
        let surplus = self.bytes.saturating_sub(bytes);
        self.rooms.give_back(&self.client, surplus);
        self.bytes -= surplus;
    }

    /// Has it `bytes`, as what it is for grows or leaves.
    ///
    /// # Errors
    /// There are not so many left; it keeps those that it had.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), NoRoom> {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            self.keep(bytes);
            return Ok(());
        }
        self.rooms.add(&self.client, more)?;
        self.bytes = bytes;
        Ok(())
    }

    /// Returns `bytes` that keep it until they have left.
    pub(crate) fn around(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Held { bytes, _room: self })
    }
}

/// Bytes and their room.
struct Held {
    bytes: Bytes,
    _room: Room,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.rooms.give_back(&self.client, self.bytes);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{NoRoom, Rooms};
    use bytes::Bytes;
    use std::sync::Arc;

    #[test]
    fn one_client_has_half_of_it_and_everybody_all() {
        let rooms = Rooms::new(100, 10);
        let [one, two, three] = ["one", "two", "three"].map(Arc::<str>::from);
        let mut first = rooms.take(&one, 45).unwrap();
        assert_eq!(rooms.take(&one, 6).err(), Some(NoRoom::Client));
        let second = rooms.take(&two, 50).unwrap();
        assert_eq!(rooms.take(&three, 6).err(), Some(NoRoom::Everybody));
        first.keep(5);
        let third = rooms.take(&three, 45).unwrap();
        assert_eq!(rooms.take(&one, 1).err(), Some(NoRoom::Everybody));
        drop((first, second, third));
        let left = rooms.taken();
        assert_eq!((left.all, left.of.len()), (0, 0), "all of it came back");
        drop(left);
        assert_eq!(rooms.take(&one, usize::MAX).err(), Some(NoRoom::Client));
    }

    #[test]
    fn room_grows_and_lasts_as_long_as_its_bytes() {
        let rooms = Rooms::new(100, 10);
        let client: Arc<str> = "one".into();
        let taken = || {
            let taken = rooms.taken();
            (taken.all, taken.of.len())
        };
        let mut room = rooms.empty(&client);
        assert_eq!(room.resize(40), Ok(()));
        assert_eq!(room.resize(51), Err(NoRoom::Client));
        assert_eq!((room.bytes(), taken()), (40, (40, 1)));
        assert_eq!(room.resize(5), Ok(()));
        let bytes = room.around(Bytes::from_static(b"12345"));
        let part = bytes.slice(1..2);
        drop(bytes);
        assert_eq!((&part[..], taken()), (&b"2"[..], (5, 1)));
        drop(part);
        assert_eq!(taken(), (0, 0));
    }

    #[test]
    fn the_largest_body_always_fits_into_an_empty_room() {
        let rooms = Rooms::new(10, 100);
        let client: Arc<str> = "one".into();
        let room = rooms.take(&client, 100).unwrap();
        assert_eq!(rooms.take(&client, 1).err(), Some(NoRoom::Client));
        drop(room);
        assert!(rooms.take(&client, 100).is_ok());
    }
}
