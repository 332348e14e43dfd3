//! A bound on what runs at the same time: deployments are several processes each, and machines
//! that run tests have two cores.

use std::sync::{Arc, LazyLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Deployments alive at the same time in one test program.
const DEPLOYMENTS: usize = 2;

static SLOTS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(DEPLOYMENTS)));

/// The right to run a deployment, until it is dropped. A test holds one at a time.
pub async fn deployment() -> OwnedSemaphorePermit {
    SLOTS.clone().acquire_owned().await.expect("the semaphore is never closed")
}
