//! Term of a leader: the time until which it may write, and a client that enforces it.
//!
//! Stopping when the Lease is lost is not enough: a process that was suspended for longer than the Lease lasts
//! resumes before it checks the Lease. So every write checks the time itself.

use kube::Client;
use kube::client::Body;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::time::Instant;
use tower::BoxError;

/// End of a term, which renewals extend; shared by all writers.
#[derive(Debug, Clone, Default)]
pub(super) struct Term {
    end: Arc<Mutex<Option<Instant>>>,
}

/// Write after the end of the term, when another operator may lead.
#[derive(Debug, thiserror::Error)]
#[error("request dropped: no longer the leader")]
struct TermOver;

impl Term {
    /// Returns the end; absent if the term never began or was closed.
    pub(super) fn end(&self) -> Option<Instant> {
        *self.lock()
    }

    /// Extends the term to `end`.
    pub(super) fn extend(&self, end: Instant) {
        *self.lock() = Some(end);
    }

    /// Ends the term now.
    pub(super) fn close(&self) {
        *self.lock() = None;
    }

    fn is_current(&self) -> bool {
        self.end().is_some_and(|end| Instant::now() < end)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        // Every critical section is one assignment, so the value is consistent after a panic.
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a copy of `client` whose writes outside of `term` fail without being sent.
pub(super) fn client_for_term(term: Term, client: &Client) -> Client {
    let sender = client.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (sender, term) = (sender.clone(), term.clone());
        async move {
            if request.method() != http::Method::GET && !term.is_current() {
                return Err(BoxError::from(TermOver));
            }
            sender.send(request).await.map_err(BoxError::from)
        }
    });
    Client::new(service, client.default_namespace())
}
