//! A leader's term, after leader election: until when it may write, and a client that writes no later.
//!
//! Stopping the work when the Lease is lost is not enough: a process that stood still for longer than
//! the Lease lasts goes on where it stopped, before it looks at the Lease again. So every write looks
//! at the time itself.

use kube::Client;
use kube::client::Body;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::time::Instant;
use tower::BoxError;

/// The end of a term, which renewals move; shared by all that have to keep to it.
#[derive(Debug, Clone, Default)]
pub(super) struct Term {
    end: Arc<Mutex<Option<Instant>>>,
}

/// A write after the term: another operator may lead by now.
#[derive(Debug, thiserror::Error)]
#[error("request dropped: no longer the leader")]
struct TermOver;

impl Term {
    /// When it ends; none where it never began, or was closed.
    pub(super) fn end(&self) -> Option<Instant> {
        *self.lock()
    }

    /// Moves its end.
    pub(super) fn prolong(&self, end: Instant) {
        *self.lock() = Some(end);
    }

    /// Ends it now.
    pub(super) fn close(&self) {
        *self.lock() = None;
    }

    fn lasts(&self) -> bool {
        self.end().is_some_and(|end| Instant::now() < end)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        // Every change is one assignment: a panic elsewhere cannot have left it half-done.
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `client`, but for requests that change anything outside of `term`: they fail unsent.
pub(super) fn writes_within(term: Term, client: &Client) -> Client {
    let sender = client.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (sender, term) = (sender.clone(), term.clone());
        async move {
            if request.method() != http::Method::GET && !term.lasts() {
                return Err(BoxError::from(TermOver));
            }
            sender.send(request).await.map_err(BoxError::from)
        }
    });
    Client::new(service, client.default_namespace())
}
