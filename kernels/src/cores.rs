//! Keeps the threads of a pool on cores of their own.
//!
//! Two pools that compute in turn, in two processes that share a machine's cores, leave the scheduler with a choice that it
//! makes badly: a worker that is woken while the other pool still polls on its core waits behind its own caller, which
//! computes for milliseconds, and a core that falls idle then takes nobody over, because it is never idle for long.
//! So workers go where their caller is not. Callers are left to the scheduler, which spreads those of several
//! processes over the cores.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Of a pool that has a thread for each core that it may use.
#[derive(Debug)]
pub(crate) struct Cores {
    /// All that the process may use.
    cores: Vec<usize>,
    /// Of the workers, in the order of their numbers; 0 before they run.
    ids: Vec<AtomicI32>,
    /// Where the last caller was.
    caller: AtomicUsize,
}

impl Cores {
    /// For a pool of `threads`, its caller included; `None` where there are fewer or more of them than cores, so that the
    /// scheduler knows better.
    pub(crate) fn of(threads: usize) -> Option<Self> {
        let allowed = sched_getaffinity(None).ok()?;
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        (threads > 1 && cores.len() == threads).then(|| Self {
            cores,
            ids: (1..threads).map(|_| AtomicI32::new(0)).collect(),
            caller: AtomicUsize::new(usize::MAX),
        })
    }

    /// The calling thread is worker `thread`, from 1 on.
    pub(crate) fn joined(&self, thread: usize) {
        self.ids[thread - 1].store(gettid().as_raw_nonzero().get(), Ordering::Relaxed);
        // The next call places it, wherever it is made.
        self.caller.store(usize::MAX, Ordering::Release);
    }

    /// Moves the workers away from the core that the calling thread is on, if it has moved there.
    pub(crate) fn apart(&self) {
        let caller = sched_getcpu();
        if self.caller.swap(caller, Ordering::AcqRel) == caller {
            return;
        }
        let Some(place) = self.cores.iter().position(|&core| core == caller) else { return };
        for (next, id) in (place + 1..).zip(&self.ids) {
            let mut only = CpuSet::new();
            only.set(self.cores[next % self.cores.len()]);
            if let Some(id) = Pid::from_raw(id.load(Ordering::Relaxed)) {
                // Only speed depends on it: where it is not allowed, or a core has gone, the thread stays where it was.
                let _ = sched_setaffinity(Some(id), &only);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn place_of(id: &AtomicI32) -> CpuSet {
        sched_getaffinity(Pid::from_raw(id.load(Ordering::Relaxed))).unwrap()
    }

    fn only(core: usize) -> CpuSet {
        let mut set = CpuSet::new();
        set.set(core);
        set
    }

    #[test]
    fn workers_go_where_their_caller_is_not() {
        let allowed = sched_getaffinity(None).unwrap();
        let count = allowed.count() as usize;
        assert!(Cores::of(count + 1).is_none() && Cores::of(1).is_none());
        // A machine with one core has nowhere to go.
        let Some(cores) = Cores::of(count) else { return };
        // A call before there are workers: the next one places them, though its caller has not moved.
        sched_setaffinity(None, &only(cores.cores[0])).unwrap();
        cores.apart();
        std::thread::scope(|scope| {
            let (joined, all) = mpsc::channel();
            let ends: Vec<mpsc::Sender<()>> = (1..count)
                .map(|thread| {
                    let (end, ended) = mpsc::channel();
                    let (cores, joined) = (&cores, joined.clone());
                    scope.spawn(move || {
                        cores.joined(thread);
                        joined.send(()).unwrap();
                        ended.recv().unwrap_err();
                    });
                    end
                })
                .collect();
            (1..count).for_each(|_| all.recv().unwrap());
            for &here in &cores.cores {
                sched_setaffinity(None, &only(here)).unwrap();
                cores.apart();
                let mut taken = only(here);
                for id in &cores.ids {
                    let place = place_of(id);
                    assert_eq!(place.count(), 1);
                    (0..CpuSet::MAX_CPU).filter(|&core| place.is_set(core)).for_each(|core| taken.set(core));
                }
                assert_eq!(taken, allowed, "each on a core of its own, beside {here}");
            }
            drop(ends);
        });
    }
}
