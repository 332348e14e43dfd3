//! The thread pool and its operations.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::paths::{self, PathChoice};
use crate::plan::Plan;
use crate::suspended::SuspendedRows;
use crate::threads::{Paths, PoolShared};
use crate::{Dtype, InstructionPath, Job, KernelError, MAX_ROWS, NumericsClass, Product};

/// Most threads of a pool, the caller included.
pub const MAX_THREADS: usize = 256;

/// How long threads poll by default before they sleep. Waking a sleeping thread costs about as much.
pub const DEFAULT_POLL: Duration = Duration::from_micros(100);

/// How to set up a [`Pool`].
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Threads that compute, the caller of [`Pool::forward`] included: 1 starts no thread at all.
    pub threads: usize,
    /// The instruction path; `None` takes what is measured fastest ([`Pool::paths`]).
    pub path: Option<InstructionPath>,
    /// How long a thread polls before it sleeps: workers between calls, all threads within one. Idle workers let others
    /// have the core after the first microseconds. Polling keeps a core busy, so it is switched off (as by
    /// [`Duration::ZERO`]) where `threads` exceeds [`thread::available_parallelism`].
    pub poll: Duration,
}

impl Default for PoolConfig {
    /// As many threads as there are cores, the paths that are measured fastest, [`DEFAULT_POLL`].
    fn default() -> Self {
        let threads = thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
        Self { threads, path: None, poll: DEFAULT_POLL }
    }
}

/// Threads that compute experts.
///
/// A pool computes one call at a time with all its threads; calls from several threads wait for each other. Dropping it
/// ends and joins the workers.
pub struct Pool {
    shared: Arc<PoolShared>,
    workers: Vec<JoinHandle<()>>,
    threads: usize,
    /// Held during a call: there is one plan.
    calling: Mutex<()>,
}

impl Pool {
    /// Starts `config.threads - 1` workers. Where the path is left open, the machine's instruction paths are tried when
    /// a class is first computed or its [`paths`](Self::paths) are asked for, which takes about two milliseconds for
    /// each class.
    ///
    /// # Errors
    /// [`KernelError::Threads`], [`KernelError::Unavailable`] for a path that this CPU lacks,
    /// [`KernelError::WrongBits`] for one that does not compute right on it, [`KernelError::Spawn`].
    pub fn new(config: PoolConfig) -> Result<Self, KernelError> {
        if let Some(path) = config.path {
            if !path.is_available() {
                return Err(KernelError::Unavailable { path, available: InstructionPath::available() });
            }
            if let Some(class) = NumericsClass::ALL.into_iter().find(|class| !paths::is_right(path, *class)) {
                return Err(KernelError::WrongBits { path, class });
            }
        }
        let paths = Paths { only: config.path, kernels: paths::kernels };
        Self::with_paths(config, paths)
    }

    fn with_paths(config: PoolConfig, paths: Paths) -> Result<Self, KernelError> {
        let threads = config.threads;
        if threads == 0 || threads > MAX_THREADS {
            return Err(KernelError::Threads { actual: threads, max: MAX_THREADS });
        }
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        let poll = if threads > cores { Duration::ZERO } else { config.poll };
        let shared = Arc::new(PoolShared::new(paths, poll, threads, cores)?);
        // Workers are added one by one, so that a failure drops, and thereby ends, those that run.
        let mut pool = Self { shared, workers: Vec::new(), threads, calling: Mutex::new(()) };
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = thread::Builder::new()
                .name(format!("expert-{thread}"))
                .spawn(move || shared.work(thread))
                .map_err(|error| KernelError::Spawn { reason: error.to_string() })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that compute, the caller included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Reports if each worker is pinned to a core of its own, which its caller's is not: where there are as many
    /// threads as cores, and the process may use all of their time.
    pub fn is_pinned(&self) -> bool {
        self.shared.is_pinned()
    }

    /// The instructions in use for a class, or for a [`crate::Dtype`]: as [`PathChoice::measured`], and for one row the
    /// path that read a model's weights the fastest when they last took turns at work.
    pub fn paths(&self, class: impl Into<NumericsClass>) -> PathChoice {
        self.shared.paths.of(class.into())
    }

    /// The instructions of attention.
    pub(crate) fn attending(&self, dtype: Dtype) -> InstructionPath {
        self.shared.paths.attending(dtype)
    }

    /// Bytes of scratch memory that the pool holds: what its largest call so far needed, see
    /// [`crate::ExpertShape::scratch_bytes_per_row`].
    pub fn scratch_bytes(&self) -> usize {
        let _calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the lock is held.
        unsafe { self.shared.scratch_bytes() }
    }

    /// Computes all jobs and returns when every output is complete. Jobs may differ in shape and element type. The
    /// calling thread takes part; it blocks for as long as the computation takes, so call it outside of an asynchronous
    /// runtime's own threads.
    ///
    /// Takes `&self`: callers share a pool, and a lock makes their calls follow each other. After the first calls of a
    /// certain size nothing is allocated, but for times of paths that take turns.
    ///
    /// # Errors
    /// Before anything is computed: [`KernelError::TooMany`], [`KernelError::InputLength`], [`KernelError::RowIndex`],
    /// [`KernelError::OutputLength`], [`KernelError::TooLarge`], [`KernelError::OutOfMemory`]. After it:
    /// [`KernelError::Panicked`].
    pub fn forward(&self, jobs: &mut [Job<'_>]) -> Result<(), KernelError> {
        self.forward_beside(jobs, &mut || {})
    }

    /// As [`forward`](Self::forward), for a caller that has something else to see to: it does `between` after each
    /// panel of weights that it has multiplied with, which takes microseconds for one row and a millisecond or more for
    /// hundreds. `between` must not use the pool.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward); [`KernelError::Panicked`] where `between` panicked.
    pub fn forward_beside(&self, jobs: &mut [Job<'_>], between: &mut dyn FnMut()) -> Result<(), KernelError> {
        let _calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the lock is held, and the jobs' borrows last until `call` returns; outputs are borrowed mutably and
        // so disjoint.
        unsafe { self.shared.call(|plan| plan.prepare_jobs(jobs), between) }
    }

    /// Computes rows of experts until they are done or `until` is true, which is asked after each panel of weights that
    /// the calling thread has multiplied with. Returns true once they are done. Other calls can be made in between; no
    /// weight is read twice.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward); [`KernelError::OtherPool`] if another pool has begun them. They cannot be
    /// taken on any further then.
    pub fn advance(
        &self,
        rows: &mut SuspendedRows,
        until: &mut dyn FnMut() -> bool,
    ) -> Result<bool, KernelError> {
        let _calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        let mut suspended = rows.take()?;
        // SAFETY: the lock is held; the rows own all that the plan points to, and nothing of it moves or is used before
        // the plan is dropped.
        let done = unsafe { self.shared.advance(&mut suspended, until) }?;
        rows.put_back(suspended);
        Ok(done)
    }

    /// Computes all products; otherwise as [`forward`](Self::forward).
    ///
    /// # Errors
    /// As for [`forward`](Self::forward), without [`KernelError::RowIndex`].
    pub fn multiply(&self, products: &mut [Product<'_>]) -> Result<(), KernelError> {
        let _calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `forward`.
        unsafe { self.shared.call(|plan| plan.prepare_products(products), &mut || {}) }
    }

    /// Does `work` with every item, each on one of the pool's threads, and returns when all are done. Takes tens of
    /// thousands of operations per item to be worth it. `work` must not use the pool; the processor's modes for
    /// denormals are those of the thread's other code, not those of the kernels.
    ///
    /// # Errors
    /// [`KernelError::TooMany`]; [`KernelError::Panicked`] where `work` panicked for an item, after the others.
    pub fn each<T: Send>(&self, items: &mut [T], work: impl Fn(&mut T) + Sync) -> Result<(), KernelError> {
        if items.len() > MAX_ROWS {
            return Err(KernelError::TooMany { what: "items", actual: items.len(), max: MAX_ROWS });
        }
        let count = items.len() as u32;
        let items = Items(items.as_mut_ptr());
        let task = |unit: u32| {
            // SAFETY: units are below `count`, each is taken once, and the items' borrow lasts until `call` returns.
            work(unsafe { &mut *items.at(unit) });
        };
        let _calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `forward`; the task lives until `call` returns.
        unsafe {
            let prepare = |plan: &mut Plan| {
                plan.prepare_task(&task, count);
                Ok(())
            };
            self.shared.call(prepare, &mut || {})
        }
    }
}

/// The first of the items of a call, which threads work on one by one.
struct Items<T>(*mut T);

impl<T> Items<T> {
    /// A pointer to one of them.
    fn at(&self, index: u32) -> *mut T {
        self.0.wrapping_add(index as usize)
    }
}

// SAFETY: threads only get to different items, which may be sent to them.
unsafe impl<T: Send> Sync for Items<T> {}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads)
            .field("path", &self.shared.paths.only)
            .finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop();
        for worker in self.workers.drain(..) {
            // A worker catches panics of kernels; there is nothing left to report here.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::Kernels;
    use crate::paths::panel::Panel;
    use crate::{Activation, Dtype, ExpertShape, PackedExpert, StoredDtype};

    /// Panics in the panel that computes column 64.
    ///
    /// # Safety
    /// Always safe: touches nothing.
    unsafe fn broken(panel: &Panel) {
        assert!(panel.columns == 64, "a kernel that panics");
    }

    #[test]
    fn callers_see_to_other_things_between_panels() {
        let shape = ExpertShape::new(130, 65, Dtype::F32, Activation::Silu).unwrap();
        let weights: Vec<u8> =
            (0..130 * 65).flat_map(|i: u32| ((i % 7) as f32 / 8.0).to_le_bytes()).collect();
        let expert = PackedExpert::pack(shape, StoredDtype::F32, &weights, &weights, &weights).unwrap();
        let inputs: Vec<u8> = (0..130).flat_map(|i: u32| (i as f32 / 64.0).to_le_bytes()).collect();
        for threads in 1..=3 {
            let pool = Pool::new(PoolConfig { threads, ..PoolConfig::default() }).unwrap();
            let compute = |between: &mut dyn FnMut()| {
                let mut output = vec![0; shape.row_bytes()];
                let job = Job { expert: &expert, inputs: &inputs, row_index: &[0], output: &mut output };
                pool.forward_beside(&mut [job], between).map(|()| output)
            };
            let alone = compute(&mut || {}).unwrap();
            let (caller, mut times) = (std::thread::current().id(), 0);
            let mut between = || {
                assert_eq!(std::thread::current().id(), caller);
                times += 1;
            };
            assert_eq!(compute(&mut between).unwrap(), alone);
            // Of 32 columns of a gate and of 64: 3 and 3, of which others take their part.
            assert!(if threads == 1 { times == 6 } else { times <= 6 }, "{times}");
            // Where they take all of it, there is nothing in between.
            let mut called = false;
            let outcome = compute(&mut || {
                called = true;
                panic!("between panels")
            });
            assert!(called || threads > 1);
            assert_eq!(outcome, if called { Err(KernelError::Panicked) } else { Ok(alone.clone()) });
            assert_eq!(compute(&mut || {}).unwrap(), alone);
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_goes_on() {
        let faulty = Paths {
            only: Some(InstructionPath::Portable),
            kernels: |path, class| {
                let sound = paths::kernels(path, class);
                if class.dtype == Dtype::F32 { Kernels { down: broken, ..sound } } else { sound }
            },
        };
        let shape = ExpertShape::new(70, 33, Dtype::F32, Activation::Relu).unwrap();
        let good = ExpertShape::new(70, 33, Dtype::Bf16, Activation::Relu).unwrap();
        let zeros = vec![0u8; 70 * 33 * 4];
        let broken = PackedExpert::pack(shape, StoredDtype::F32, &zeros, &zeros, &zeros).unwrap();
        let half = &zeros[..70 * 33 * 2];
        let whole = PackedExpert::pack(good, StoredDtype::Bf16, half, half, half).unwrap();
        for threads in 1..=3 {
            let config = PoolConfig { threads, ..PoolConfig::default() };
            let pool = Pool::with_paths(config, faulty).unwrap();
            let inputs = vec![0u8; 70 * 4];
            for _ in 0..20 {
                let mut output = vec![1u8; 70 * 4];
                let mut jobs =
                    [Job { expert: &broken, inputs: &inputs, row_index: &[0], output: &mut output }];
                assert_eq!(pool.forward(&mut jobs), Err(KernelError::Panicked));
                let mut output = vec![1u8; 70 * 2];
                let mut jobs =
                    [Job { expert: &whole, inputs: &inputs, row_index: &[1], output: &mut output }];
                assert_eq!(pool.forward(&mut jobs), Ok(()));
                assert!(output.iter().all(|&b| b == 0));
            }
        }
    }
}
