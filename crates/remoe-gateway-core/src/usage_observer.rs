//! Observer of a model's requests, for predictions: nothing here waits for it.

use crate::privacy::Privacy;
use bytes::Bytes;
use remoe_usage::{Retention, UsageLearner};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Is told when requests come, what they used, and when they are over.
///
/// Called where requests are served: it must not block.
pub trait UsageObserver: Send + Sync {
    /// The request `id` of `tenant` has come, before it is decided whether it waits; `privacy` says what may be known
    /// of it. False: nothing else of it is wanted.
    fn came(&self, id: u64, tenant: &str, privacy: Privacy, body: &Bytes) -> bool;
    /// Takes the expert usage of the request, as its main function reports it in `x-remoe-activations`.
    fn told(&self, id: u64, activations: &str);
    /// It is over, whatever became of it.
    fn left(&self, id: u64);
}

impl UsageObserver for UsageLearner {
    fn came(&self, id: u64, tenant: &str, privacy: Privacy, body: &Bytes) -> bool {
        let keeps = match privacy {
            Privacy::Shared => Retention::Shared,
            Privacy::None => Retention::Records,
            Privacy::CountsOnly => Retention::Counts,
            Privacy::LeftOut => Retention::Nothing,
        };
        self.begin_request(id, tenant, keeps, body)
    }

    fn told(&self, id: u64, activations: &str) {
        self.record_usage(id, activations);
    }

    fn left(&self, id: u64) {
        self.end_request(id);
    }
}

/// Numbers of requests.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A request that a witness was told of, until it is over.
pub(crate) struct ObservedRequest {
    id: u64,
    usage_observer: Arc<dyn UsageObserver>,
}

impl ObservedRequest {
    /// Tells `usage_observer` that the request with this body has come; none where it wants nothing else of it.
    pub(crate) fn begin(
        usage_observer: Arc<dyn UsageObserver>,
        tenant: &str,
        privacy: Privacy,
        body: &Bytes,
    ) -> Option<Self> {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let is_followed = usage_observer.came(id, tenant, privacy, body);
        // A request that opts out is left out, whatever the witness says.
        (is_followed && privacy != Privacy::LeftOut).then(|| Self { id, usage_observer })
    }

    pub(crate) fn told(&self, activations: &str) {
        self.usage_observer.told(self.id, activations);
    }
}

impl Drop for ObservedRequest {
    fn drop(&mut self) {
        self.usage_observer.left(self.id);
    }
}
