//! Concurrency limits of `/metrics`: each page asks all functions.

use remoe_http::ApiError;
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// Largest number of pages that are answered at the same time.
const MAX_RUNNING: usize = 2;
/// Largest number of requests for a page that wait.
const MAX_WAITING: usize = 14;
/// Largest number of requests of one client, of which one is answered and the others wait.
const MAX_PER_CLIENT: usize = 3;
/// Longest wait of a request: scrapers give up after 10 s, of which a page takes up to 6 s.
const MAX_WAIT: Duration = Duration::from_secs(4);
/// Time after which a refused client may try again.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// Concurrency limits of `/metrics`, in total and per client.
pub(crate) struct ScrapeLimits {
    /// Requests that run or wait.
    slots: Semaphore,
    /// Requests that run.
    running: Semaphore,
    clients: Mutex<HashMap<Arc<str>, ClientScrapes>>,
    max_wait: Duration,
}

/// Requests of one client.
#[derive(Clone)]
struct ClientScrapes {
    /// Requests that run or wait.
    slots: usize,
    /// The one request that runs.
    running: Arc<Semaphore>,
}

/// Permission to make a page, until this is dropped.
pub(crate) struct ScrapePermit<'a> {
    _slot: ScrapeSlot<'a>,
    _running: (OwnedSemaphorePermit, SemaphorePermit<'a>),
}

/// Slot of a request that runs or waits. Dropping it frees the slot.
struct ScrapeSlot<'a> {
    limits: &'a ScrapeLimits,
    client: Arc<str>,
    _slot_of_all: SemaphorePermit<'a>,
}

impl Default for ScrapeLimits {
    fn default() -> Self {
        Self {
            slots: Semaphore::new(MAX_RUNNING + MAX_WAITING),
            running: Semaphore::new(MAX_RUNNING),
            clients: Mutex::default(),
            max_wait: MAX_WAIT,
        }
    }
}

impl ScrapeLimits {
    /// Waits until `client` may have a page made.
    ///
    /// # Errors
    /// Too many requests of the client or of all clients wait, or the wait takes too long.
    pub(crate) async fn acquire(&self, client: &Arc<str>) -> Result<ScrapePermit<'_>, ApiError> {
        let refused = |message: String| {
            ApiError::from(ServiceError::new(ErrorCode::ResourceExhausted, message)).retry_after(RETRY_AFTER)
        };
        let slot = self.slots.try_acquire().ok().and_then(|slot| self.take_client_slot(client, slot));
        let (slot, client_running) = slot.ok_or_else(|| {
            refused(format!(
                "too many requests for /metrics: expected at most {} at the same time, {MAX_PER_CLIENT} of one client; \
                 retry later",
                MAX_RUNNING + MAX_WAITING
            ))
        })?;
        let permits =
            async { Some((client_running.acquire_owned().await.ok()?, self.running.acquire().await.ok()?)) };
        let permits = timeout(self.max_wait, permits).await.ok().flatten();
        let permits = permits.ok_or_else(|| {
            refused(format!("cannot show metrics: no turn within {:?}; retry later", self.max_wait))
        })?;
        Ok(ScrapePermit { _slot: slot, _running: permits })
    }

    /// Takes one of the slots of `client`, and returns it with the semaphore of the client's running request. Returns
    /// `None` if the client has all its slots in use.
    fn take_client_slot<'a>(
        &'a self,
        client: &Arc<str>,
        slot_of_all: SemaphorePermit<'a>,
    ) -> Option<(ScrapeSlot<'a>, Arc<Semaphore>)> {
        let mut clients = self.clients();
        let scrapes = clients
            .entry(client.clone())
            .or_insert_with(|| ClientScrapes { slots: 0, running: Arc::new(Semaphore::new(1)) });
        if scrapes.slots == MAX_PER_CLIENT {
            return None;
        }
        scrapes.slots += 1;
        let slot = ScrapeSlot { limits: self, client: client.clone(), _slot_of_all: slot_of_all };
        Some((slot, scrapes.running.clone()))
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<Arc<str>, ClientScrapes>> {
        // A panic cannot leave it half changed, so a poisoned lock is used as it is.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ScrapeSlot<'_> {
    fn drop(&mut self) {
        let mut clients = self.limits.clients();
        if let Some(scrapes) = clients.get_mut(&self.client) {
            scrapes.slots -= 1;
            if scrapes.slots == 0 {
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
        let names: Vec<Arc<str>> = (0..MAX_RUNNING + MAX_WAITING).map(client).collect();
        let mut turns: Vec<_> = names.iter().map(|name| Box::pin(scrapes.acquire(name))).collect();
        let running: Vec<_> = turns.iter_mut().map(|turn| turn.now_or_never()).collect();
        assert_eq!(running.iter().flatten().count(), MAX_RUNNING);
        let refused = scrapes.acquire(&client(99)).now_or_never().unwrap().err().unwrap().into_response();
        assert_eq!(refused.status(), 429);
        assert!(refused.headers().contains_key(header::RETRY_AFTER));
        drop(running);
        // The next ones in the queue.
        let next = turns.iter_mut().skip(MAX_RUNNING).filter_map(|turn| turn.now_or_never());
        assert!(next.collect::<Vec<_>>().len() >= MAX_RUNNING);
        drop(turns);
        assert!(scrapes.acquire(&client(0)).await.is_ok());
        assert!(scrapes.clients().is_empty());
    }

    #[tokio::test]
    async fn client_that_keeps_its_slots_blocks_no_scraper() {
        let scrapes = ScrapeLimits { max_wait: Duration::from_millis(50), ..ScrapeLimits::default() };
        let (greedy, scraper) = (Arc::from("greedy"), Arc::from("scraper"));
        let _held = scrapes.acquire(&greedy).await.unwrap();
        let mut waiting: Vec<_> = (1..MAX_PER_CLIENT).map(|_| Box::pin(scrapes.acquire(&greedy))).collect();
        assert!(waiting.iter_mut().all(|turn| turn.now_or_never().is_none()));
        assert!(scrapes.acquire(&greedy).now_or_never().unwrap().is_err(), "all its slots are in use");
        for _ in 0..2 * (MAX_RUNNING + MAX_WAITING) {
            assert!(scrapes.acquire(&scraper).now_or_never().unwrap().is_ok());
        }
        // A scrape that waits too long is refused.
        let late = waiting.remove(0).await.err().unwrap().into_response();
        assert_eq!(late.status(), 429);
    }
}
