//! Limits of requests for pages of metrics: each of them asks all functions.

use remoe_http::ApiError;
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// Requests for a page of metrics that are answered at the same time, and those that wait.
const TURNS: usize = 2;
const WAITING: usize = 14;
/// Requests of one client that are taken at the same time; one of them is answered.
const OF_ONE: usize = 3;
/// A request for a page waits this long: scrapers give up after 10 s, of which a page takes up to 6 s.
const TURN: Duration = Duration::from_secs(4);
/// Time after which a refused client may try again.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// Limits of the requests for pages of metrics.
pub(crate) struct ScrapeLimits {
    places: Semaphore,
    turns: Semaphore,
    clients: Mutex<HashMap<Arc<str>, ClientScrapes>>,
    patience: Duration,
}

/// Places of one client.
#[derive(Clone)]
struct ClientScrapes {
    taken: usize,
    turn: Arc<Semaphore>,
}

/// Turn of a request; it ends when this is dropped.
pub(crate) struct ScrapePermit<'a> {
    _place: ScrapeSlot<'a>,
    _turns: (OwnedSemaphorePermit, SemaphorePermit<'a>),
}

/// Place of a client in the queue; given back when dropped.
struct ScrapeSlot<'a> {
    scrapes: &'a ScrapeLimits,
    client: Arc<str>,
    _of_all: SemaphorePermit<'a>,
}

impl Default for ScrapeLimits {
    fn default() -> Self {
        Self {
            places: Semaphore::new(TURNS + WAITING),
            turns: Semaphore::new(TURNS),
            clients: Mutex::default(),
            patience: TURN,
        }
    }
}

impl ScrapeLimits {
    /// Waits for a turn of `client`.
    ///
    /// # Errors
    /// Too many wait, or it takes too long.
    pub(crate) async fn turn(&self, client: &Arc<str>) -> Result<ScrapePermit<'_>, ApiError> {
        let refused = |message: String| {
            ApiError::from(ServiceError::new(ErrorCode::ResourceExhausted, message)).retry_after(RETRY_AFTER)
        };
        let place = self.places.try_acquire().ok().and_then(|place| self.place(client, place));
        let (place, own) = place.ok_or_else(|| {
            refused(format!(
                "too many requests for /metrics: expected at most {} at the same time, {OF_ONE} of one client; \
                 retry later",
                TURNS + WAITING
            ))
        })?;
        let turns = async { Some((own.acquire_owned().await.ok()?, self.turns.acquire().await.ok()?)) };
        let turns = timeout(self.patience, turns).await.ok().flatten();
        let turns = turns.ok_or_else(|| {
            refused(format!("cannot show metrics: no turn within {:?}; retry later", self.patience))
        })?;
        Ok(ScrapePermit { _place: place, _turns: turns })
    }

    /// Takes a place of `client` beside its one of all, with its turn; `None` if it has as many as one client may.
    fn place<'a>(
        &'a self,
        client: &Arc<str>,
        of_all: SemaphorePermit<'a>,
    ) -> Option<(ScrapeSlot<'a>, Arc<Semaphore>)> {
        let mut clients = self.clients();
        let places = clients
            .entry(client.clone())
            .or_insert_with(|| ClientScrapes { taken: 0, turn: Arc::new(Semaphore::new(1)) });
        if places.taken == OF_ONE {
            return None;
        }
        places.taken += 1;
        Some((ScrapeSlot { scrapes: self, client: client.clone(), _of_all: of_all }, places.turn.clone()))
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<Arc<str>, ClientScrapes>> {
        // Each change of it is whole.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ScrapeSlot<'_> {
    fn drop(&mut self) {
        let mut clients = self.scrapes.clients();
        if let Some(places) = clients.get_mut(&self.client) {
            places.taken -= 1;
            if places.taken == 0 {
                clients.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use axum::http::header;
    use axum::response::IntoResponse;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn pages_beyond_the_queue_are_refused() {
        let scrapes = ScrapeLimits::default();
        let client = |number: usize| Arc::from(format!("client-{number}"));
        let names: Vec<Arc<str>> = (0..TURNS + WAITING).map(client).collect();
        let mut turns: Vec<_> = names.iter().map(|name| Box::pin(scrapes.turn(name))).collect();
        let running: Vec<_> = turns.iter_mut().map(|turn| turn.now_or_never()).collect();
        assert_eq!(running.iter().flatten().count(), TURNS);
        let refused = scrapes.turn(&client(99)).now_or_never().unwrap().err().unwrap().into_response();
        assert_eq!(refused.status(), 429);
        assert!(refused.headers().contains_key(header::RETRY_AFTER));
        drop(running);
        // The next ones in the queue.
        let next = turns.iter_mut().skip(TURNS).filter_map(|turn| turn.now_or_never());
        assert!(next.collect::<Vec<_>>().len() >= TURNS);
        drop(turns);
        assert!(scrapes.turn(&client(0)).await.is_ok());
        assert!(scrapes.clients().is_empty());
    }

    #[tokio::test]
    async fn client_that_keeps_its_places_blocks_no_scraper() {
        let scrapes = ScrapeLimits { patience: Duration::from_millis(50), ..ScrapeLimits::default() };
        let (greedy, scraper) = (Arc::from("greedy"), Arc::from("scraper"));
        let _held = scrapes.turn(&greedy).await.unwrap();
        let mut waiting: Vec<_> = (1..OF_ONE).map(|_| Box::pin(scrapes.turn(&greedy))).collect();
        assert!(waiting.iter_mut().all(|turn| turn.now_or_never().is_none()));
        assert!(scrapes.turn(&greedy).now_or_never().unwrap().is_err(), "it has all its places");
        for _ in 0..2 * (TURNS + WAITING) {
            assert!(scrapes.turn(&scraper).now_or_never().unwrap().is_ok());
        }
        // Those that wait are told so in time.
        let late = waiting.remove(0).await.err().unwrap().into_response();
        assert_eq!(late.status(), 429);
    }
}
