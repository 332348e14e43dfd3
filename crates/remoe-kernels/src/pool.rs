//! The thread pool, and the calls that it computes.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::paths::{self, PathChoice};
use crate::plan::CallPlan;
use crate::suspended::SuspendedRows;
use crate::threads::{PathSelector, PoolShared};
use crate::{Dtype, ExpertJob, InstructionPath, KernelError, MAX_ROWS, MatrixProduct, NumericsClass};

/// Most threads of a pool, the caller included.
pub const MAX_THREADS: usize = 256;

/// Time that threads poll by default before they sleep. Waking a sleeping thread takes about as long.
pub const DEFAULT_POLL: Duration = Duration::from_micros(100);

/// Configuration of a [`Pool`].
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Threads that compute, the caller of [`Pool::forward`] included: 1 starts no thread at all.
    pub threads: usize,
    /// Instruction path. `None` selects the path that is measured to be the fastest ([`Pool::paths`]).
    pub path: Option<InstructionPath>,
    /// Time that a thread polls before it sleeps: workers between calls, all threads within a call. Idle workers yield
    /// the core to other threads after the first microseconds. If `threads` exceeds [`thread::available_parallelism`],
    /// threads do not poll, as with [`Duration::ZERO`].
    pub poll: Duration,
}

impl Default for PoolConfig {
    /// One thread per core, the fastest measured paths, [`DEFAULT_POLL`].
    fn default() -> Self {
        let threads = thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
        Self { threads, path: None, poll: DEFAULT_POLL }
    }
}

/// Threads that compute experts, products, attention and element-wise operations.
///
/// A pool computes one call at a time with all its threads; concurrent calls wait for each other. Dropping a pool ends
/// and joins its workers.
pub struct Pool {
    shared: Arc<PoolShared>,
    workers: Vec<JoinHandle<()>>,
    threads: usize,
    /// Held during a call, since the pool has only one [`CallPlan`].
    call_lock: Mutex<()>,
}

impl Pool {
    /// Starts `config.threads - 1` workers. Without a configured path, the machine's instruction paths are measured when
    /// a class is first computed or its [`paths`](Self::paths) are first read; that takes about two milliseconds per
    /// class.
    ///
    /// # Errors
    /// [`KernelError::Threads`], [`KernelError::Unavailable`] for a path that this CPU lacks,
    /// [`KernelError::WrongBits`] for a path that gives wrong results on it, [`KernelError::Spawn`].
    pub fn new(config: PoolConfig) -> Result<Self, KernelError> {
        if let Some(path) = config.path {
            if !path.is_available() {
                return Err(KernelError::Unavailable { path, available: InstructionPath::available() });
            }
            if let Some(class) =
                NumericsClass::ALL.into_iter().find(|class| !paths::is_verified(path, *class))
            {
                return Err(KernelError::WrongBits { path, class });
            }
        }
        let paths = PathSelector { fixed: config.path, kernels: paths::kernels };
        Self::with_paths(config, paths)
    }

    fn with_paths(config: PoolConfig, paths: PathSelector) -> Result<Self, KernelError> {
        let threads = config.threads;
        if threads == 0 || threads > MAX_THREADS {
            return Err(KernelError::Threads { actual: threads, max: MAX_THREADS });
        }
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        let poll = if threads > cores { Duration::ZERO } else { config.poll };
        let shared = Arc::new(PoolShared::new(paths, poll, threads, cores)?);
        // Workers are added one by one: if one cannot be started, dropping the pool ends the others.
        let mut pool = Self { shared, workers: Vec::new(), threads, call_lock: Mutex::new(()) };
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = thread::Builder::new()
                .name(format!("expert-{thread}"))
                .spawn(move || shared.run_worker(thread))
                .map_err(|error| KernelError::Spawn { reason: error.to_string() })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that compute, the caller included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Reports if each worker is pinned to a core of its own. Workers are pinned if there are as many threads as cores,
    /// and the process may use all of the cores' time.
    pub fn is_pinned(&self) -> bool {
        self.shared.is_pinned()
    }

    /// Returns the instruction paths in use for a class, or for a [`crate::Dtype`]: as [`PathChoice::measured`], but for
    /// single rows the path that most recently read the model's weights fastest.
    pub fn paths(&self, class: impl Into<NumericsClass>) -> PathChoice {
        self.shared.paths.choice(class.into())
    }

    /// Returns the instruction path of attention.
    pub(crate) fn attention_path(&self, dtype: Dtype) -> InstructionPath {
        self.shared.paths.attention_path(dtype)
    }

    /// Returns the bytes of scratch memory that the pool holds: as much as its largest call so far needed, see
    /// [`crate::ExpertShape::scratch_bytes_per_row`].
    pub fn scratch_bytes(&self) -> usize {
        let _call_lock = self.call_lock.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the lock is held.
        unsafe { self.shared.scratch_bytes() }
    }

    /// Computes all jobs and returns when every output is complete. Jobs may differ in shape and element type.
    ///
    /// The calling thread takes part in the computation and blocks until it ends: do not call this on the threads of an
    /// asynchronous runtime. Calls from several threads are serialised by a lock. Calls no larger than earlier ones
    /// allocate no memory, except for the measured times of paths.
    ///
    /// # Errors
    /// Before anything is computed: [`KernelError::TooMany`], [`KernelError::InputLength`], [`KernelError::RowIndex`],
    /// [`KernelError::OutputLength`], [`KernelError::TooLarge`], [`KernelError::OutOfMemory`]. After it:
    /// [`KernelError::Panicked`].
    pub fn forward(&self, jobs: &mut [ExpertJob<'_>]) -> Result<(), KernelError> {
        self.forward_beside(jobs, &mut || {})
    }

    /// Computes all jobs like [`forward`](Self::forward), and lets the caller do other work meanwhile: the calling thread
    /// runs `between` after each panel that it has computed. A panel takes microseconds for one row, and a millisecond or
    /// more for hundreds of rows. `between` must not use the pool.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward); [`KernelError::Panicked`] also if `between` panicked.
    pub fn forward_beside(
        &self,
        jobs: &mut [ExpertJob<'_>],
        between: &mut dyn FnMut(),
    ) -> Result<(), KernelError> {
        let _call_lock = self.call_lock.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the lock is held, and the jobs' borrows last until `call` returns. Outputs are borrowed mutably, and
        // are so disjoint.
        unsafe { self.shared.call(|plan| plan.prepare_jobs(jobs), between) }
    }

    /// Computes rows of experts until they are done or `should_suspend` returns true. The calling thread calls
    /// `should_suspend` after each panel that it has computed. Returns true if all rows are done. The pool can be used for
    /// other calls before the rows are continued; no weight is read twice.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward); [`KernelError::OtherPool`] if another pool has begun the rows. After an error
    /// they cannot be continued.
    pub fn advance(
        &self,
        rows: &mut SuspendedRows,
        should_suspend: &mut dyn FnMut() -> bool,
    ) -> Result<bool, KernelError> {
        let _call_lock = self.call_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut suspended = rows.take()?;
        // SAFETY: the lock is held. `rows` owns everything that the plan points to, and neither moves nor uses it before
        // the plan is dropped.
        let is_done = unsafe { self.shared.advance(&mut suspended, should_suspend) }?;
        rows.put_back(suspended);
        Ok(is_done)
    }

    /// Computes all products and returns when every output is complete; otherwise like [`forward`](Self::forward).
    ///
    /// # Errors
    /// As for [`forward`](Self::forward), without [`KernelError::RowIndex`].
    pub fn multiply(&self, products: &mut [MatrixProduct<'_>]) -> Result<(), KernelError> {
        let _call_lock = self.call_lock.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `forward`.
        unsafe { self.shared.call(|plan| plan.prepare_products(products), &mut || {}) }
    }

    /// Calls `work` with every item, on the pool's threads, and returns when all are done. This pays off from tens of
    /// thousands of operations per item on. `work` must not use the pool. It runs in the thread's default float mode,
    /// not in the denormal-flushing mode of the kernels.
    ///
    /// # Errors
    /// [`KernelError::TooMany`]; [`KernelError::Panicked`] if `work` panicked for an item. The other items are completed.
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
        let _call_lock = self.call_lock.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `forward`; the task lives until `call` returns.
        unsafe {
            let prepare = |plan: &mut CallPlan| {
                plan.prepare_task(&task, count);
                Ok(())
            };
            self.shared.call(prepare, &mut || {})
        }
    }
}

/// Pointer to the items of a call, shared by all threads.
struct Items<T>(*mut T);

impl<T> Items<T> {
    /// Returns a pointer to one item.
    fn at(&self, index: u32) -> *mut T {
        self.0.wrapping_add(index as usize)
    }
}

// SAFETY: each item is accessed by one thread only, and may be sent to it.
unsafe impl<T: Send> Sync for Items<T> {}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads)
            .field("path", &self.shared.paths.fixed)
            .finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop();
        for worker in self.workers.drain(..) {
            // Workers catch panics of kernels, so that there is nothing to report.
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
    fn callers_do_other_work_between_panels() {
        let shape = ExpertShape::new(130, 65, Dtype::F32, Activation::Silu).unwrap();
        let weights: Vec<u8> =
            (0..130 * 65).flat_map(|i: u32| ((i % 7) as f32 / 8.0).to_le_bytes()).collect();
        let expert = PackedExpert::pack(shape, StoredDtype::F32, &weights, &weights, &weights).unwrap();
        let inputs: Vec<u8> = (0..130).flat_map(|i: u32| (i as f32 / 64.0).to_le_bytes()).collect();
        for threads in 1..=3 {
            let pool = Pool::new(PoolConfig { threads, ..PoolConfig::default() }).unwrap();
            let compute = |between: &mut dyn FnMut()| {
                let mut output = vec![0; shape.row_bytes()];
                let job =
                    ExpertJob { expert: &expert, inputs: &inputs, row_index: &[0], output: &mut output };
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
    fn worker_panic_is_an_error_and_the_pool_continues() {
        let faulty = PathSelector {
            fixed: Some(InstructionPath::Portable),
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
                    [ExpertJob { expert: &broken, inputs: &inputs, row_index: &[0], output: &mut output }];
                assert_eq!(pool.forward(&mut jobs), Err(KernelError::Panicked));
                let mut output = vec![1u8; 70 * 2];
                let mut jobs =
                    [ExpertJob { expert: &whole, inputs: &inputs, row_index: &[1], output: &mut output }];
                assert_eq!(pool.forward(&mut jobs), Ok(()));
                assert!(output.iter().all(|&b| b == 0));
            }
        }
    }
}
