//! Backpressure of bodies: a byte budget, reserved before a body is read. Requests reserve for a client, answers for a
//! client and a model.
//!
//! Each of them may have as much as it leaves free: one alone half of all, two a third each. So the next one always finds
//! some, however many hold theirs without end (dynamic thresholds: Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998).

use bytes::Bytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of an answer up to which it is read whole before the client gets any of it: until then a main function that
/// fails costs nothing. Without room for that it is handed on as it comes.
pub(crate) const WHOLE: usize = 1 << 20;
/// Bytes of each held answer for which there is always room: errors are smaller. The connections bound them: 480 unless set.
pub(crate) const FLOOR: usize = 16 << 10;

/// Bytes for bodies.
pub(crate) struct BodyBudget {
    all: usize,
    /// A sender may have one body of this size, whatever its share is.
    largest: usize,
    /// Bytes of every body that do not count.
    floor: usize,
    taken: Mutex<ReservedTotals>,
}

#[derive(Default)]
struct ReservedTotals {
    all: usize,
    /// By client and by model; those without any are left out.
    clients: HashMap<Arc<str>, usize>,
    models: HashMap<Arc<str>, usize>,
}

/// Sender of a body, or client and model of an answer.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) client: Arc<str>,
    pub(crate) model: Option<Arc<str>>,
}

/// Reason why a body gets no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyBudgetError {
    /// All of it is taken.
    Everybody,
    /// The client, or the model, has its share.
    Client,
}

/// Room of one body; given back when dropped.
pub(crate) struct BodyReservation {
    body_budget: Arc<BodyBudget>,
    holder: Holder,
    bytes: usize,
}

impl Holder {
    /// Client that sends a request.
    pub(crate) fn client(client: &Arc<str>) -> Self {
        Self { client: client.clone(), model: None }
    }

    /// Client that gets an answer of `model`.
    pub(crate) fn answer(client: &Arc<str>, model: &Arc<str>) -> Self {
        Self { client: client.clone(), model: Some(model.clone()) }
    }
}

impl BodyBudget {
    /// `all` bytes together, in which each client may have one body of `largest` bytes whatever its share is.
    pub(crate) fn new(all: usize, largest: usize) -> Self {
        Self { all: all.max(largest), largest, floor: 0, taken: Mutex::default() }
    }

    /// Leaves the first `floor` bytes of every body uncounted: small ones always fit. The number of requests bounds them.
    pub(crate) fn with_floor(self, floor: usize) -> Self {
        Self { floor, ..self }
    }

    /// Takes `bytes` for a body of `holder`.
    ///
    /// # Errors
    /// There are not so many left.
    pub(crate) fn take(
        self: &Arc<Self>,
        holder: Holder,
        bytes: usize,
    ) -> Result<BodyReservation, BodyBudgetError> {
        let mut reservation = self.empty(holder);
        reservation.resize(bytes)?;
        Ok(reservation)
    }

    /// Returns room of `holder` that grows by [`BodyReservation::resize`].
    pub(crate) fn empty(self: &Arc<Self>, holder: Holder) -> BodyReservation {
        BodyReservation { body_budget: self.clone(), holder, bytes: 0 }
    }

    /// Bytes that count of a body of `bytes`.
    fn counted(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.floor)
    }

    fn add(&self, holder: &Holder, bytes: usize) -> Result<(), BodyBudgetError> {
        let mut taken = self.taken();
        let all = taken.all.checked_add(bytes).filter(|sum| *sum <= self.all);
        let share = all.map_or(0, |all| self.all - all).max(self.largest);
        let fits = |has: Option<&usize>| {
            has.copied().unwrap_or(0).checked_add(bytes).is_some_and(|sum| sum <= share)
        };
        if !fits(taken.clients.get(&holder.client))
            || holder.model.as_ref().is_some_and(|model| !fits(taken.models.get(model)))
        {
            return Err(BodyBudgetError::Client);
        }
        taken.all = all.ok_or(BodyBudgetError::Everybody)?;
        *taken.clients.entry(holder.client.clone()).or_default() += bytes;
        if let Some(model) = &holder.model {
            *taken.models.entry(model.clone()).or_default() += bytes;
        }
        Ok(())
    }

    fn taken(&self) -> MutexGuard<'_, ReservedTotals> {
        // Sums that are right after every step.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, holder: &Holder, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut taken = self.taken();
        taken.all -= bytes;
        less(&mut taken.clients, &holder.client, bytes);
        if let Some(model) = &holder.model {
            less(&mut taken.models, model, bytes);
        }
    }
}

fn less(taken: &mut HashMap<Arc<str>, usize>, name: &Arc<str>, bytes: usize) {
    if let Some(its) = taken.get_mut(name) {
        *its -= bytes;
        if *its == 0 {
            taken.remove(name);
        }
    }
}

impl BodyReservation {
    /// Bytes that it has.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps `bytes` and gives the rest back: what was announced, or could have come, is more than what came.
    pub(crate) fn keep(&mut self, bytes: usize) {
        let kept = self.bytes.min(bytes);
        self.body_budget
            .give_back(&self.holder, self.body_budget.counted(self.bytes) - self.body_budget.counted(kept));
        self.bytes = kept;
    }

    /// Has it `bytes`, as what it is for grows or leaves.
    ///
    /// # Errors
    /// There are not so many left; it keeps those that it had.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), BodyBudgetError> {
        if bytes <= self.bytes {
            self.keep(bytes);
            return Ok(());
        }
        let more = self.body_budget.counted(bytes) - self.body_budget.counted(self.bytes);
        if more > 0 {
            self.body_budget.add(&self.holder, more)?;
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Returns `bytes` that keep it until they have left.
    pub(crate) fn around(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(ReservedBytes { bytes, _room: self })
    }
}

/// Bytes and their room.
struct ReservedBytes {
    bytes: Bytes,
    _room: BodyReservation,
}

impl AsRef<[u8]> for ReservedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        self.body_budget.give_back(&self.holder, self.body_budget.counted(self.bytes));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{BodyBudget, BodyBudgetError, Holder};
    use bytes::Bytes;
    use std::sync::Arc;

    fn body_budget(all: usize, largest: usize) -> Arc<BodyBudget> {
        Arc::new(BodyBudget::new(all, largest))
    }

    fn client(name: &str) -> Holder {
        Holder::client(&name.into())
    }

    #[test]
    fn client_has_as_much_as_it_leaves_free() {
        let body_budget = body_budget(100, 10);
        let mut first = body_budget.take(client("one"), 45).unwrap();
        assert_eq!(body_budget.take(client("one"), 6).err(), Some(BodyBudgetError::Client));
        let second = body_budget.take(client("two"), 27).unwrap();
        assert_eq!(body_budget.take(client("two"), 1).err(), Some(BodyBudgetError::Client));
        // The next one has a share as well.
        let third = body_budget.take(client("three"), 14).unwrap();
        // Whatever its share is, one may have a body of the largest size, as long as it fits.
        let fourth = body_budget.take(client("four"), 10).unwrap();
        assert_eq!(body_budget.take(client("five"), 5).err(), Some(BodyBudgetError::Everybody));
        first.keep(5);
        let fifth = body_budget.take(client("five"), 20).unwrap();
        drop((first, second, third, fourth, fifth));
        let left = body_budget.taken();
        assert_eq!((left.all, left.clients.len(), left.models.len()), (0, 0, 0), "all of it came back");
        drop(left);
        assert_eq!(body_budget.take(client("one"), usize::MAX).err(), Some(BodyBudgetError::Client));
    }

    #[test]
    fn clients_and_models_have_shares_of_their_own() {
        let body_budget = body_budget(100, 0);
        let answer = |client: &str, model: &str| Holder::answer(&client.into(), &model.into());
        // A client that does not read keeps no other one out of the same model ..
        let _first = body_budget.take(answer("one", "m"), 40).unwrap();
        assert_eq!(body_budget.take(answer("one", "n"), 20).err(), Some(BodyBudgetError::Client));
        let _second = body_budget.take(answer("two", "n"), 20).unwrap();
        // .. and a model that does not answer keeps no client out of another one.
        assert_eq!(body_budget.take(answer("three", "m"), 1).err(), Some(BodyBudgetError::Client));
        assert!(body_budget.take(answer("three", "o"), 20).is_ok());
    }

    #[test]
    fn small_bodies_fit_while_all_room_is_taken() {
        let body_budget = Arc::new(BodyBudget::new(100, 100).with_floor(10));
        let all = body_budget.take(client("one"), 110).unwrap();
        let mut small = body_budget.take(client("two"), 10).unwrap();
        assert_eq!(small.resize(11), Err(BodyBudgetError::Everybody));
        drop(all);
        assert_eq!(small.resize(11), Ok(()));
        small.keep(10);
        assert_eq!(body_budget.taken().all, 0);
    }

    #[test]
    fn room_grows_and_lasts_as_long_as_its_bytes() {
        let body_budget = body_budget(100, 10);
        let taken = || {
            let taken = body_budget.taken();
            (taken.all, taken.clients.len())
        };
        let mut reservation = body_budget.empty(client("one"));
        assert_eq!(reservation.resize(40), Ok(()));
        assert_eq!(reservation.resize(51), Err(BodyBudgetError::Client));
        assert_eq!((reservation.bytes(), taken()), (40, (40, 1)));
        assert_eq!(reservation.resize(5), Ok(()));
        let bytes = reservation.around(Bytes::from_static(b"12345"));
        let part = bytes.slice(1..2);
        drop(bytes);
        assert_eq!((&part[..], taken()), (&b"2"[..], (5, 1)));
        drop(part);
        assert_eq!(taken(), (0, 0));
    }

    #[test]
    fn the_largest_body_always_fits_into_an_empty_room() {
        let body_budget = body_budget(10, 100);
        let reservation = body_budget.take(client("one"), 100).unwrap();
        assert_eq!(body_budget.take(client("one"), 1).err(), Some(BodyBudgetError::Client));
        drop(reservation);
        assert!(body_budget.take(client("one"), 100).is_ok());
    }
}
