//! Observer of a model's requests, from which expert usage is predicted. Requests never wait for it.

use crate::privacy::Privacy;
use bytes::Bytes;
use remoe_usage::{Retention, UsageLearner};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Receiver of the start, the expert usage and the end of requests.
///
/// The methods must not block, because they are called on the path of requests.
pub trait UsageObserver: Send + Sync {
    /// Takes the start of the request `id` of `tenant`, before it is admitted. `privacy` limits what may be remembered
    /// of it. Returns whether the observer wants the request's usage and end as well.
    fn request_started(&self, id: u64, tenant: &str, privacy: Privacy, body: &Bytes) -> bool;
    /// Takes the expert usage of the request, as its main function reports it in `x-remoe-activations`.
    fn usage_reported(&self, id: u64, activations: &str);
    /// Takes the end of the request, successful or not.
    fn request_ended(&self, id: u64);
}

impl UsageObserver for UsageLearner {
    fn request_started(&self, id: u64, tenant: &str, privacy: Privacy, body: &Bytes) -> bool {
        let retention = match privacy {
            Privacy::Shared => Retention::Shared,
            Privacy::None => Retention::Records,
            Privacy::CountsOnly => Retention::Counts,
            Privacy::LeftOut => Retention::Nothing,
        };
        self.begin_request(id, tenant, retention, body)
    }

    fn usage_reported(&self, id: u64, activations: &str) {
        self.record_usage(id, activations);
    }

    fn request_ended(&self, id: u64) {
        self.end_request(id);
    }
}

/// Id of the next observed request.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Request that an observer follows, until this is dropped.
pub(crate) struct ObservedRequest {
    id: u64,
    usage_observer: Arc<dyn UsageObserver>,
}

impl ObservedRequest {
    /// Reports the start of a request to `usage_observer`. Returns `None` if the observer does not follow it.
    pub(crate) fn begin(
        usage_observer: Arc<dyn UsageObserver>,
        tenant: &str,
        privacy: Privacy,
        body: &Bytes,
    ) -> Option<Self> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let is_followed = usage_observer.request_started(id, tenant, privacy, body);
        // The usage of a request that opts out is never reported, even if the observer asks for it.
        (is_followed && privacy != Privacy::LeftOut).then(|| Self { id, usage_observer })
    }

    /// Reports the expert usage `activations` of the request.
    pub(crate) fn report_usage(&self, activations: &str) {
        self.usage_observer.usage_reported(self.id, activations);
    }
}

impl Drop for ObservedRequest {
    fn drop(&mut self) {
        self.usage_observer.request_ended(self.id);
    }
}
