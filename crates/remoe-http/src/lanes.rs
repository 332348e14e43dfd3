//! Concurrency limits of parsing and tokenizing bodies. Small bodies never wait for large ones.

use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Largest small body in bytes: some milliseconds of work for a slow tokenizer.
const MAX_SMALL_BYTES: usize = 64 << 10;
/// Total size of large bodies that are processed or wait, in bytes; at least one body of the largest size.
const LARGE_BYTES: usize = 64 << 20;
/// Unit in which the semaphore counts memory, in bytes.
const UNIT_BYTES: usize = 1 << 10;

/// Limits of the bodies that are processed at the same time, and of the memory of large ones that wait.
pub struct BodyLanes {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// Memory for large bodies, in units of [`UNIT_BYTES`].
    memory: Arc<Semaphore>,
}

/// Permission to process a body, until this is dropped.
pub struct LanePermit {
    _lane: OwnedSemaphorePermit,
    _memory: Option<OwnedSemaphorePermit>,
}

impl BodyLanes {
    /// Makes limits for `cores` small bodies at the same time and a quarter as many large ones. A body has at most
    /// `body_limit` bytes.
    pub fn new(cores: usize, body_limit: usize) -> Self {
        let memory = LARGE_BYTES.max(body_limit).div_ceil(UNIT_BYTES).min(Semaphore::MAX_PERMITS);
        Self {
            small: Arc::new(Semaphore::new(cores.max(1))),
            large: Arc::new(Semaphore::new((cores / 4).max(1))),
            memory: Arc::new(Semaphore::new(memory)),
        }
    }

    /// Waits until a body of `bytes` may be processed.
    ///
    /// # Errors
    /// The large bodies that are processed or wait have used up their memory.
    pub async fn acquire(&self, bytes: usize) -> Result<LanePermit, ServiceError> {
        let closed = |_| ServiceError::new(ErrorCode::Unavailable, "the server has stopped");
        if bytes <= MAX_SMALL_BYTES {
            let lane = self.small.clone().acquire_owned().await.map_err(closed)?;
            return Ok(LanePermit { _lane: lane, _memory: None });
        }
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        let memory = self.memory.clone().try_acquire_many_owned(units).map_err(|_| {
            ServiceError::new(
                ErrorCode::ResourceExhausted,
                format!(
                    "too many large requests wait to be parsed (this one has {bytes} bytes); retry later"
                ),
            )
        })?;
        let lane = self.large.clone().acquire_owned().await.map_err(closed)?;
        Ok(LanePermit { _lane: lane, _memory: Some(memory) })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn small_bodies_pass_large_ones() {
        let lanes = Arc::new(BodyLanes::new(2, 4 << 20));
        let first = lanes.acquire(4 << 20).await.ok().unwrap();
        // 15 more fit into the memory and wait.
        let waiting: Vec<_> = (0..15)
            .map(|_| {
                let lanes = lanes.clone();
                tokio::spawn(async move { lanes.acquire(4 << 20).await.map(drop) })
            })
            .collect();
        while lanes.memory.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let refused = lanes.acquire(4 << 20).await.err().unwrap();
        assert_eq!(refused.code, ErrorCode::ResourceExhausted);
        assert!(waiting.iter().all(|task| !task.is_finished()), "one large body at a time");
        let small =
            [lanes.acquire(MAX_SMALL_BYTES).await.ok().unwrap(), lanes.acquire(0).await.ok().unwrap()];
        drop((first, small));
        for task in waiting {
            task.await.unwrap().ok().unwrap();
        }
        assert_eq!(lanes.memory.available_permits(), 64 << 10, "all memory was given back");
    }
}
