//! Waiting for another thread: polling for a bounded time, then sleeping.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Looks at the clock once in so many polls.
const POLLS_PER_LOOK: u32 = 32;

/// How long an idle thread polls without letting others have its core.
const ALONE: Duration = Duration::from_micros(5);

/// Wakes threads that wait for some atomic state to change.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Signal {
    /// Returns once `ready()`. Polls for `poll`, then sleeps between calls of [`wake`](Self::wake).
    pub(crate) fn wait(&self, poll: Duration, ready: impl Fn() -> bool) {
        self.wait_for(poll, false, ready);
    }

    /// As [`Self::wait`], for a thread that no other waits for: others have its core meanwhile if they want it, and may
    /// keep it for milliseconds.
    pub(crate) fn wait_idle(&self, poll: Duration, ready: impl Fn() -> bool) {
        self.wait_for(poll, true, ready);
    }

    fn wait_for(&self, poll: Duration, politely: bool, ready: impl Fn() -> bool) {
        if ready() {
            return;
        }
        if !poll.is_zero() {
            let start = Instant::now();
            loop {
                for _ in 0..POLLS_PER_LOOK {
                    std::hint::spin_loop();
                    if ready() {
                        return;
                    }
                }
                let polled = start.elapsed();
                if polled >= poll {
                    break;
                }
                if politely && polled >= ALONE {
                    std::thread::yield_now();
                }
            }
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // Pairs with the fence in `wake`: either this thread sees the new state, or the other one sees a sleeper.
        fence(Ordering::SeqCst);
        while !ready() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// To be called after the state has changed. Costs only a fence if no thread sleeps.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // The lock makes sure that a thread that has counted itself is really waiting, or has yet to look at the
            // state.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }
}
