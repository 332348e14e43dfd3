//! Whose body is parsed and tokenised when: small ones never wait for large ones.

use remoe_proto::{ErrorCode, ServiceError};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most bytes of a small body: some milliseconds of work for a slow tokenizer.
const SMALL: usize = 64 << 10;
/// Bytes of large bodies that are prepared or wait for it, unless one body may be larger still.
const ROOM: usize = 64 << 20;
/// Unit of room, in bytes.
const UNIT: usize = 1 << 10;

/// Bounds the bodies that are prepared at the same time, and the large ones that wait.
pub struct Lanes {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// For large bodies, in units.
    room: Arc<Semaphore>,
}

/// Held while a body is prepared.
pub struct Pass {
    _lane: OwnedSemaphorePermit,
    _room: Option<OwnedSemaphorePermit>,
}

impl Lanes {
    /// As many small bodies at the same time as there are `cores`, and a quarter as many large ones; a
    /// body has at most `body_limit` bytes.
    pub fn new(cores: usize, body_limit: usize) -> Self {
        let room = ROOM.max(body_limit).div_ceil(UNIT).min(Semaphore::MAX_PERMITS);
        Self {
            small: Arc::new(Semaphore::new(cores.max(1))),
            large: Arc::new(Semaphore::new((cores / 4).max(1))),
            room: Arc::new(Semaphore::new(room)),
        }
    }

    /// Waits for the turn of a body of `bytes`.
    ///
    /// # Errors
    /// So many large bodies wait that there is no room for this one.
    pub async fn enter(&self, bytes: usize) -> Result<Pass, ServiceError> {
        let closed = |_| ServiceError::new(ErrorCode::Unavailable, "the server has stopped");
        if bytes <= SMALL {
            let lane = self.small.clone().acquire_owned().await.map_err(closed)?;
            return Ok(Pass { _lane: lane, _room: None });
        }
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        let room = self.room.clone().try_acquire_many_owned(units).map_err(|_| {
            ServiceError::new(
                ErrorCode::ResourceExhausted,
                format!(
                    "too many large requests wait to be parsed (this one has {bytes} bytes); retry later"
                ),
            )
        })?;
        let lane = self.large.clone().acquire_owned().await.map_err(closed)?;
        Ok(Pass { _lane: lane, _room: Some(room) })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn small_bodies_pass_large_ones() {
        let lanes = Arc::new(Lanes::new(2, 4 << 20));
        let first = lanes.enter(4 << 20).await.ok().unwrap();
        // 15 more fit into the room and wait.
        let waiting: Vec<_> = (0..15)
            .map(|_| {
                let lanes = lanes.clone();
                tokio::spawn(async move { lanes.enter(4 << 20).await.map(drop) })
            })
            .collect();
        while lanes.room.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let refused = lanes.enter(4 << 20).await.err().unwrap();
        assert_eq!(refused.code, ErrorCode::ResourceExhausted);
        assert!(waiting.iter().all(|task| !task.is_finished()), "one large body at a time");
        let small = [lanes.enter(SMALL).await.ok().unwrap(), lanes.enter(0).await.ok().unwrap()];
        drop((first, small));
        for task in waiting {
            task.await.unwrap().ok().unwrap();
        }
        assert_eq!(lanes.room.available_permits(), 64 << 10, "all room is back");
    }
}
