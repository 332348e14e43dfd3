//! Observer of a model's requests, for predictions: nothing here waits for it.

use crate::privacy::Privacy;
use bytes::Bytes;
use remoe_usage::{Keeps, UsageLearner};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Is told when requests come, what they used, and when they are over.
///
/// Called where requests are served: it must not block.
pub trait Witness: Send + Sync {
    /// The request `id` of `tenant` has come, before it is decided whether it waits; `privacy` says what may be known
    /// of it. False: nothing else of it is wanted.
    fn came(&self, id: u64, tenant: &str, privacy: Privacy, body: &Bytes) -> bool;
    /// Takes the expert usage of the request, as its main function reports it in `x-remoe-activations`.
    fn told(&self, id: u64, activations: &str);
    /// It is over, whatever became of it.
    fn left(&self, id: u64);
}

impl Witness for UsageLearner {
    fn came(&self, id: u64, tenant: &str, privacy: Privacy, body: &Bytes) -> bool {
        let keeps = match privacy {
            Privacy::Shared => Keeps::Shared,
            Privacy::None => Keeps::Records,
            Privacy::CountsOnly => Keeps::Counts,
            Privacy::LeftOut => Keeps::Nothing,
        };
        self.came(id, tenant, keeps, body)
    }

    fn told(&self, id: u64, activations: &str) {
        self.told(id, activations);
    }

    fn left(&self, id: u64) {
        self.left(id);
    }
}

/// Numbers of requests.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A request that a witness was told of, until it is over.
pub(crate) struct Sighting {
    id: u64,
    witness: Arc<dyn Witness>,
}

impl Sighting {
    /// Tells `witness` that the request with this body has come; none where it wants nothing else of it.
    pub(crate) fn begin(
        witness: Arc<dyn Witness>,
        tenant: &str,
        privacy: Privacy,
        body: &Bytes,
    ) -> Option<Self> {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let is_followed = witness.came(id, tenant, privacy, body);
        // A request that opts out is left out, whatever the witness says.
        (is_followed && privacy != Privacy::LeftOut).then(|| Self { id, witness })
    }

    pub(crate) fn told(&self, activations: &str) {
        self.witness.told(self.id, activations);
    }
}

impl Drop for Sighting {
    fn drop(&mut self) {
        self.witness.left(self.id);
    }
}
