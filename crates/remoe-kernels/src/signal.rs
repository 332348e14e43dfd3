//! Waiting for another thread: polling for a bounded time, then sleeping.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of polls between two readings of the clock.
const POLLS_PER_CLOCK_READ: u32 = 32;

/// Time that an idle thread polls before it starts to yield its core to other threads.
const POLL_BEFORE_YIELD: Duration = Duration::from_micros(5);

/// Wakes threads that wait for some atomic state to change.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Signal {
    /// Waits until `ready()` is true. Polls for `poll`, then sleeps between calls of [`wake`](Self::wake).
    pub(crate) fn wait(&self, poll: Duration, ready: impl Fn() -> bool) {
        self.wait_for(poll, false, ready);
    }

    /// Waits like [`Self::wait`], but yields the core to other threads, which may keep it for milliseconds. For threads
    /// that no other thread waits for.
    pub(crate) fn wait_idle(&self, poll: Duration, ready: impl Fn() -> bool) {
        self.wait_for(poll, true, ready);
    }

    fn wait_for(&self, poll: Duration, yields: bool, ready: impl Fn() -> bool) {
        if ready() {
            return;
        }
        if !poll.is_zero() {
            let start = Instant::now();
            loop {
                for _ in 0..POLLS_PER_CLOCK_READ {
                    std::hint::spin_loop();
                    if ready() {
                        return;
                    }
                }
                let polled = start.elapsed();
                if polled >= poll {
                    break;
                }
                if yields && polled >= POLL_BEFORE_YIELD {
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

    /// Wakes sleeping threads. To be called after each change of the state; costs only a fence if no thread sleeps.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // Taking the lock ensures that a thread counted in `sleepers` is waiting already, or will still check the
            // state.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }
}
