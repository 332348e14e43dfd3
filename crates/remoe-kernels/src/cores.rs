//! Keeps the threads of a pool on cores of their own.
//!
//! Two pools that compute in turn, in two processes that share a machine's cores, leave the scheduler with a choice
//! that it makes badly: a worker that is woken while the other pool still polls on its core waits behind its own
//! caller, which computes for milliseconds, and a core that falls idle then takes over no thread, because it is never
//! idle for long. So each worker has a core of its own, and goes to another one when their caller comes there. Callers
//! are left to the scheduler, which spreads those of several processes over the cores.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io;
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// No core: the thread has yet to be given one.
const NOWHERE: usize = usize::MAX;

/// Cores of a pool that has a thread for each core that it may use.
#[derive(Debug)]
pub(crate) struct Cores {
    /// All that the process may use.
    allowed: CpuSet,
    /// Where the last caller was, or [`NOWHERE`].
    caller: AtomicUsize,
    workers: Mutex<Vec<Worker>>,
}

#[derive(Debug)]
struct Worker {
    id: Pid,
    /// The core that it has, or [`NOWHERE`].
    core: usize,
}

impl Cores {
    /// For a pool of `threads`, its caller included; `None` where there are fewer or more of them than cores, so that
    /// the scheduler knows better.
    pub(crate) fn of(threads: usize) -> Option<Self> {
        let allowed = sched_getaffinity(None).ok()?;
        (threads > 1 && allowed.count() as usize == threads).then(|| Self {
            allowed,
            caller: AtomicUsize::new(NOWHERE),
            workers: Mutex::default(),
        })
    }

    /// The calling thread is a worker.
    pub(crate) fn joined(&self) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.push(Worker { id: gettid(), core: NOWHERE });
        // The next call places it, wherever it is made.
        self.caller.store(NOWHERE, Ordering::Release);
    }

    /// Keeps the workers off the core that the calling thread is on.
    pub(crate) fn apart(&self) {
        let here = sched_getcpu();
        if self.caller.load(Ordering::Acquire) == here {
            return;
        }
        self.caller.store(here, Ordering::Release);
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        if self.place(&mut workers, here).is_err() {
            // Not allowed, or cores have been taken away: the scheduler has them all back.
            for worker in workers.drain(..) {
                let _ = sched_setaffinity(Some(worker.id), &self.allowed);
            }
        }
    }

    /// Gives a core to each worker that has none or that of the caller, `here`.
    fn place(&self, workers: &mut [Worker], here: usize) -> io::Result<()> {
        for index in 0..workers.len() {
            if ![NOWHERE, here].contains(&workers[index].core) {
                continue;
            }
            let is_free = |&core: &usize| {
                self.allowed.is_set(core) && core != here && workers.iter().all(|worker| worker.core != core)
            };
            let Some(core) = (0..CpuSet::MAX_CPU).find(is_free) else { continue };
            let mut only = CpuSet::new();
            only.set(core);
            sched_setaffinity(Some(workers[index].id), &only)?;
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

    fn only(core: usize) -> CpuSet {
        let mut set = CpuSet::new();
        set.set(core);
        set
    }

    fn cores_of(set: &CpuSet) -> Vec<usize> {
        (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
    }

    /// The cores that the workers may use, in their order.
    fn places(cores: &Cores) -> Vec<Vec<usize>> {
        let workers = cores.workers.lock().unwrap();
        workers.iter().map(|worker| cores_of(&sched_getaffinity(Some(worker.id)).unwrap())).collect()
    }

    /// Calls `test` while `count` workers have joined; its thread may go where it likes.
    fn with_workers(cores: &Cores, count: usize, test: impl FnOnce() + Send) {
        thread::scope(|scope| {
            let (joined, all) = mpsc::channel();
            let ends: Vec<mpsc::Sender<()>> = (0..count)
                .map(|_| {
                    let (end, ended) = mpsc::channel();
                    let joined = joined.clone();
                    scope.spawn(move || {
                        cores.joined();
                        joined.send(()).unwrap();
                        ended.recv().unwrap_err();
                    });
                    end
                })
                .collect();
            (0..count).for_each(|_| all.recv().unwrap());
            // A thread of its own: where it is allowed to go ends with it.
            let tested = scope.spawn(test).join();
            drop(ends);
            tested.unwrap();
        });
    }

    #[test]
    fn workers_go_where_their_caller_is_not_and_stay_elsewhere() {
        let allowed = sched_getaffinity(None).unwrap();
        let count = allowed.count() as usize;
        assert!(Cores::of(count + 1).is_none() && Cores::of(1).is_none());
        // A machine with one core has nowhere to go.
        let Some(cores) = Cores::of(count) else { return };
        thread::scope(|scope| {
            scope.spawn(|| {
                // A call before there are workers: the next one places them, though its caller has not moved.
                sched_setaffinity(None, &only(cores_of(&allowed)[0])).unwrap();
                cores.apart();
            });
        });
        with_workers(&cores, count - 1, || {
            let mut before = Vec::new();
            for here in cores_of(&allowed) {
                sched_setaffinity(None, &only(here)).unwrap();
                cores.apart();
                let places = places(&cores);
                let mut taken = places.concat();
                taken.push(here);
                taken.sort_unstable();
                assert_eq!(taken, cores_of(&allowed), "each on a core of its own, beside {here}: {places:?}");
                let moved = places.iter().zip(&before).filter(|(now, before)| now != before).count();
                assert!(moved <= 1, "{before:?} became {places:?}");
                before = places;
            }
        });
    }

    #[test]
    fn where_a_core_is_refused_the_scheduler_has_all_back() {
        let allowed = sched_getaffinity(None).unwrap();
        let count = allowed.count() as usize;
        let Some(mut cores) = Cores::of(count) else { return };
        // One that no machine has been seen with stands for one that has been taken away.
        let gone = CpuSet::MAX_CPU - 1;
        if allowed.is_set(gone) {
            return;
        }
        cores.allowed.set(gone);
        with_workers(&cores, count, || {
            let ids: Vec<Pid> = cores.workers.lock().unwrap().iter().map(|worker| worker.id).collect();
            cores.apart();
            assert!(places(&cores).is_empty());
            for id in ids {
                assert_eq!(sched_getaffinity(Some(id)).unwrap(), allowed);
            }
        });
    }
}
