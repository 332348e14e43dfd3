//! Pins each worker of a pool to a core of its own.
//!
//! The scheduler places threads badly if two processes share a machine's cores and their pools compute in turn. A worker
//! that is woken while the other pool still polls on its core is queued behind its own caller, which computes for
//! milliseconds. The core that then falls idle takes over no thread, because it is never idle for long. So each worker
//! is pinned to its own core, and moves to another core if the caller arrives on it. Callers are not pinned: the
//! scheduler spreads the callers of several processes over the cores.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io;
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Stands for "no core": the thread has not been placed.
const NO_CORE: usize = usize::MAX;

/// Pinning of a pool that has as many threads as the process has cores.
#[derive(Debug)]
pub(crate) struct Cores {
    /// Cores that the process may use.
    allowed: CpuSet,
    /// Core of the last caller, or [`NO_CORE`].
    caller: AtomicUsize,
    workers: Mutex<Vec<Worker>>,
}

#[derive(Debug)]
struct Worker {
    id: Pid,
    /// Core that the thread is pinned to, or [`NO_CORE`].
    core: usize,
}

impl Cores {
    /// Prepares pinning for a pool of `threads` threads, the caller included. Returns `None` if there are not as many
    /// threads as cores: the scheduler places them better then.
    pub(crate) fn for_pool(threads: usize) -> Option<Self> {
        let allowed = sched_getaffinity(None).ok()?;
        (threads > 1 && allowed.count() as usize == threads).then(|| Self {
            allowed,
            caller: AtomicUsize::new(NO_CORE),
            workers: Mutex::default(),
        })
    }

    /// Registers the calling thread as a worker.
    pub(crate) fn add_worker(&self) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.push(Worker { id: gettid(), core: NO_CORE });
        // Forces the next call to place the worker, even if the caller is still on the same core.
        self.caller.store(NO_CORE, Ordering::Release);
    }

    /// Moves workers off the core of the calling thread.
    pub(crate) fn keep_off_caller(&self) {
        let caller_core = sched_getcpu();
        if self.caller.load(Ordering::Acquire) == caller_core {
            return;
        }
        self.caller.store(caller_core, Ordering::Release);
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        if self.place(&mut workers, caller_core).is_err() {
            // Pinning is not permitted, or the process has lost cores: unpins all workers.
            for worker in workers.drain(..) {
                let _ = sched_setaffinity(Some(worker.id), &self.allowed);
            }
        }
    }

    /// Pins each worker that has no core, or the caller's core, to a free one.
    fn place(&self, workers: &mut [Worker], caller_core: usize) -> io::Result<()> {
        for index in 0..workers.len() {
            if ![NO_CORE, caller_core].contains(&workers[index].core) {
                continue;
            }
            let is_free = |&core: &usize| {
                self.allowed.is_set(core)
                    && core != caller_core
                    && workers.iter().all(|worker| worker.core != core)
            };
            let Some(core) = (0..CpuSet::MAX_CPU).find(is_free) else { continue };
            let mut single_core = CpuSet::new();
            single_core.set(core);
            sched_setaffinity(Some(workers[index].id), &single_core)?;
            workers[index].core = core;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    fn single_core(core: usize) -> CpuSet {
        let mut set = CpuSet::new();
        set.set(core);
        set
    }

    fn cores_of(set: &CpuSet) -> Vec<usize> {
        (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
    }

    /// Returns the cores that each worker may use.
    fn places(cores: &Cores) -> Vec<Vec<usize>> {
        let workers = cores.workers.lock().unwrap();
        workers.iter().map(|worker| cores_of(&sched_getaffinity(Some(worker.id)).unwrap())).collect()
    }

    /// Calls `test`, in a thread that is not pinned, while `count` workers are registered.
    fn with_workers(cores: &Cores, count: usize, test: impl FnOnce() + Send) {
        thread::scope(|scope| {
            let (joined, all) = mpsc::channel();
            let ends: Vec<mpsc::Sender<()>> = (0..count)
                .map(|_| {
                    let (end, ended) = mpsc::channel();
                    let joined = joined.clone();
                    scope.spawn(move || {
                        cores.add_worker();
                        joined.send(()).unwrap();
                        ended.recv().unwrap_err();
                    });
                    end
                })
                .collect();
            (0..count).for_each(|_| all.recv().unwrap());
            // A thread of its own: its affinity ends with it.
            let tested = scope.spawn(test).join();
            drop(ends);
            tested.unwrap();
        });
    }

    #[test]
    fn workers_leave_only_the_caller_core() {
        let allowed = sched_getaffinity(None).unwrap();
        let count = allowed.count() as usize;
        assert!(Cores::for_pool(count + 1).is_none() && Cores::for_pool(1).is_none());
        // A machine with one core is not pinned.
        let Some(cores) = Cores::for_pool(count) else { return };
        thread::scope(|scope| {
            scope.spawn(|| {
                // A call before there are workers: the next call places them, though its caller is on the same core.
                sched_setaffinity(None, &single_core(cores_of(&allowed)[0])).unwrap();
                cores.keep_off_caller();
            });
        });
        with_workers(&cores, count - 1, || {
            let mut before = Vec::new();
            for caller_core in cores_of(&allowed) {
                sched_setaffinity(None, &single_core(caller_core)).unwrap();
                cores.keep_off_caller();
                let places = places(&cores);
                let mut taken = places.concat();
                taken.push(caller_core);
                taken.sort_unstable();
                assert_eq!(
                    taken,
                    cores_of(&allowed),
                    "each on a core of its own, beside {caller_core}: {places:?}"
                );
                let moved = places.iter().zip(&before).filter(|(now, before)| now != before).count();
                assert!(moved <= 1, "{before:?} became {places:?}");
                before = places;
            }
        });
    }

    #[test]
    fn workers_are_unpinned_if_a_core_is_refused() {
        let allowed = sched_getaffinity(None).unwrap();
        let count = allowed.count() as usize;
        let Some(mut cores) = Cores::for_pool(count) else { return };
        // A core number that no machine has stands for a core that has been taken away.
        let missing_core = CpuSet::MAX_CPU - 1;
        if allowed.is_set(missing_core) {
            return;
        }
        cores.allowed.set(missing_core);
        with_workers(&cores, count, || {
            let ids: Vec<Pid> = cores.workers.lock().unwrap().iter().map(|worker| worker.id).collect();
            cores.keep_off_caller();
            assert!(places(&cores).is_empty());
            for id in ids {
                assert_eq!(sched_getaffinity(Some(id)).unwrap(), allowed);
            }
        });
    }
}
