//! Backpressure of bodies: a byte budget, reserved before a body is read. Requests reserve for a client, answers for a
//! client and a model.
//!
//! Each holder may have as much as is left free: one alone half of the budget, two a third each. So the next one
//! always finds some, however many keep theirs without end (dynamic thresholds: Choudhury and Hahne, IEEE/ACM ToN
//! 6(2), 1998).

use bytes::Bytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Largest answer that is read completely before any of it is sent, in bytes. Until then the request can be retried.
/// If it cannot be reserved, the answer is relayed as it arrives.
pub(crate) const MAX_HELD_BYTES: usize = 1 << 20;
/// Bytes of each held answer that are not counted, so that error answers always fit. The number of connections bounds
/// their total.
pub(crate) const UNCOUNTED_BYTES: usize = 16 << 10;

/// Byte budget for bodies, shared by clients and models.
pub(crate) struct BodyBudget {
    total_bytes: usize,
    /// Size of one body that every client may have regardless of its share.
    guaranteed_bytes: usize,
    /// First bytes of every body that are not counted.
    uncounted_bytes: usize,
    reserved: Mutex<ReservedTotals>,
}

#[derive(Default)]
struct ReservedTotals {
    total: usize,
    /// Bytes by client and by model; entries of 0 are removed.
    clients: HashMap<Arc<str>, usize>,
    models: HashMap<Arc<str>, usize>,
}

/// Holder of a reservation: the client of a request, or the client and the model of an answer.
#[derive(Debug, Clone)]
pub(crate) struct BudgetHolder {
    pub(crate) client: Arc<str>,
    pub(crate) model: Option<Arc<str>>,
}

/// Reason why bytes cannot be reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyBudgetError {
    /// The budget is exhausted.
    Total,
    /// The client or the model has its share already.
    Client,
}

/// Bytes reserved for one body. Dropping it gives them back.
pub(crate) struct BodyReservation {
    body_budget: Arc<BodyBudget>,
    holder: BudgetHolder,
    bytes: usize,
}

impl BudgetHolder {
    /// Makes the holder of a request's body.
    pub(crate) fn client(client: &Arc<str>) -> Self {
        Self { client: client.clone(), model: None }
    }

    /// Makes the holder of an answer of `model` to `client`.
    pub(crate) fn answer(client: &Arc<str>, model: &Arc<str>) -> Self {
        Self { client: client.clone(), model: Some(model.clone()) }
    }
}

impl BodyBudget {
    /// Makes a budget of `total_bytes`, in which every client may have one body of `guaranteed_bytes` regardless of its
    /// share.
    pub(crate) fn new(total_bytes: usize, guaranteed_bytes: usize) -> Self {
        let total_bytes = total_bytes.max(guaranteed_bytes);
        Self { total_bytes, guaranteed_bytes, uncounted_bytes: 0, reserved: Mutex::default() }
    }

    /// Leaves the first `uncounted_bytes` bytes of every body uncounted: small ones always fit. The number of
    /// requests bounds them.
    pub(crate) fn with_uncounted(self, uncounted_bytes: usize) -> Self {
        Self { uncounted_bytes, ..self }
    }

    /// Reserves `bytes` for a body of `holder`.
    ///
    /// # Errors
    /// The budget, or the holder's share of it, has fewer bytes left.
    pub(crate) fn take(
        self: &Arc<Self>,
        holder: BudgetHolder,
        bytes: usize,
    ) -> Result<BodyReservation, BodyBudgetError> {
        let mut reservation = self.empty(holder);
        reservation.resize(bytes)?;
        Ok(reservation)
    }

    /// Returns a reservation of 0 bytes, which grows by [`BodyReservation::resize`].
    pub(crate) fn empty(self: &Arc<Self>, holder: BudgetHolder) -> BodyReservation {
        BodyReservation { body_budget: self.clone(), holder, bytes: 0 }
    }

    /// Returns the number of bytes that are counted for a body of `bytes`.
    fn counted(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.uncounted_bytes)
    }

    fn add(&self, holder: &BudgetHolder, bytes: usize) -> Result<(), BodyBudgetError> {
        let mut reserved = self.reserved();
        let new_total = reserved.total.checked_add(bytes).filter(|sum| *sum <= self.total_bytes);
        // A share is as large as what is left free.
        let share = new_total.map_or(0, |sum| self.total_bytes - sum).max(self.guaranteed_bytes);
        let fits = |present: Option<&usize>| {
            present.copied().unwrap_or(0).checked_add(bytes).is_some_and(|sum| sum <= share)
        };
        if !fits(reserved.clients.get(&holder.client))
            || holder.model.as_ref().is_some_and(|model| !fits(reserved.models.get(model)))
        {
            return Err(BodyBudgetError::Client);
        }
        reserved.total = new_total.ok_or(BodyBudgetError::Total)?;
        *reserved.clients.entry(holder.client.clone()).or_default() += bytes;
        if let Some(model) = &holder.model {
            *reserved.models.entry(model.clone()).or_default() += bytes;
        }
        Ok(())
    }

    fn reserved(&self) -> MutexGuard<'_, ReservedTotals> {
        // A panic cannot leave the sums inconsistent, so a poisoned lock is used as it is.
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, holder: &BudgetHolder, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut reserved = self.reserved();
        reserved.total -= bytes;
        subtract(&mut reserved.clients, &holder.client, bytes);
        if let Some(model) = &holder.model {
            subtract(&mut reserved.models, model, bytes);
        }
    }
}

fn subtract(reserved: &mut HashMap<Arc<str>, usize>, name: &Arc<str>, bytes: usize) {
    if let Some(present) = reserved.get_mut(name) {
        *present -= bytes;
        if *present == 0 {
            reserved.remove(name);
        }
    }
}

impl BodyReservation {
    /// Returns the number of reserved bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps `bytes` at most and gives the rest back. Used when less has arrived than was announced.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        let kept_bytes = self.bytes.min(bytes);
        self.body_budget.give_back(
            &self.holder,
            self.body_budget.counted(self.bytes) - self.body_budget.counted(kept_bytes),
        );
        self.bytes = kept_bytes;
    }

    /// Grows or shrinks the reservation to `bytes`.
    ///
    /// # Errors
    /// The budget, or the holder's share of it, has fewer bytes left. The reservation stays as it was.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), BodyBudgetError> {
        if bytes <= self.bytes {
            self.shrink_to(bytes);
            return Ok(());
        }
        let more = self.body_budget.counted(bytes) - self.body_budget.counted(self.bytes);
        if more > 0 {
            self.body_budget.add(&self.holder, more)?;
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Returns `bytes` as a buffer that holds the reservation until its last clone is dropped.
    pub(crate) fn attach_to(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(ReservedBytes { bytes, _reservation: self })
    }
}

/// Bytes and their reservation.
struct ReservedBytes {
    bytes: Bytes,
    _reservation: BodyReservation,
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
    use super::{BodyBudget, BodyBudgetError, BudgetHolder};
    use bytes::Bytes;
    use std::sync::Arc;

    fn body_budget(all: usize, largest: usize) -> Arc<BodyBudget> {
        Arc::new(BodyBudget::new(all, largest))
    }

    fn client(name: &str) -> BudgetHolder {
        BudgetHolder::client(&name.into())
    }

    #[test]
    fn client_may_reserve_as_much_as_it_leaves_free() {
        let body_budget = body_budget(100, 10);
        let mut first = body_budget.take(client("one"), 45).unwrap();
        assert_eq!(body_budget.take(client("one"), 6).err(), Some(BodyBudgetError::Client));
        let second = body_budget.take(client("two"), 27).unwrap();
        assert_eq!(body_budget.take(client("two"), 1).err(), Some(BodyBudgetError::Client));
        // A third client has a share as well.
        let third = body_budget.take(client("three"), 14).unwrap();
        // A client may have a body of the guaranteed size beyond its share, as long as it fits.
        let fourth = body_budget.take(client("four"), 10).unwrap();
        assert_eq!(body_budget.take(client("five"), 5).err(), Some(BodyBudgetError::Total));
        first.shrink_to(5);
        let fifth = body_budget.take(client("five"), 20).unwrap();
        drop((first, second, third, fourth, fifth));
        let reserved = body_budget.reserved();
        assert_eq!(
            (reserved.total, reserved.clients.len(), reserved.models.len()),
            (0, 0, 0),
            "all bytes were given back"
        );
        drop(reserved);
        assert_eq!(body_budget.take(client("one"), usize::MAX).err(), Some(BodyBudgetError::Client));
    }

    #[test]
    fn clients_and_models_have_separate_limits() {
        let body_budget = body_budget(100, 0);
        let answer = |client: &str, model: &str| BudgetHolder::answer(&client.into(), &model.into());
        // A client that does not read its answer leaves room for other clients of the same model ..
        let _first = body_budget.take(answer("one", "m"), 40).unwrap();
        assert_eq!(body_budget.take(answer("one", "n"), 20).err(), Some(BodyBudgetError::Client));
        let _second = body_budget.take(answer("two", "n"), 20).unwrap();
        // .. and a model that does not answer leaves room for other models.
        assert_eq!(body_budget.take(answer("three", "m"), 1).err(), Some(BodyBudgetError::Client));
        assert!(body_budget.take(answer("three", "o"), 20).is_ok());
    }

    #[test]
    fn small_bodies_fit_while_the_budget_is_exhausted() {
        let body_budget = Arc::new(BodyBudget::new(100, 100).with_uncounted(10));
        let all = body_budget.take(client("one"), 110).unwrap();
        let mut small = body_budget.take(client("two"), 10).unwrap();
        assert_eq!(small.resize(11), Err(BodyBudgetError::Total));
        drop(all);
        assert_eq!(small.resize(11), Ok(()));
        small.shrink_to(10);
        assert_eq!(body_budget.reserved().total, 0);
    }

    #[test]
    fn reservation_grows_and_lasts_as_long_as_its_bytes() {
        let body_budget = body_budget(100, 10);
        let taken = || {
            let reserved = body_budget.reserved();
            (reserved.total, reserved.clients.len())
        };
        let mut reservation = body_budget.empty(client("one"));
        assert_eq!(reservation.resize(40), Ok(()));
        assert_eq!(reservation.resize(51), Err(BodyBudgetError::Client));
        assert_eq!((reservation.bytes(), taken()), (40, (40, 1)));
        assert_eq!(reservation.resize(5), Ok(()));
        let bytes = reservation.attach_to(Bytes::from_static(b"12345"));
        let part = bytes.slice(1..2);
        drop(bytes);
        assert_eq!((&part[..], taken()), (&b"2"[..], (5, 1)));
        drop(part);
        assert_eq!(taken(), (0, 0));
    }

    #[test]
    fn guaranteed_body_fits_into_an_empty_budget() {
        let body_budget = body_budget(10, 100);
        let reservation = body_budget.take(client("one"), 100).unwrap();
        assert_eq!(body_budget.take(client("one"), 1).err(), Some(BodyBudgetError::Client));
        drop(reservation);
        assert!(body_budget.take(client("one"), 100).is_ok());
    }
}
