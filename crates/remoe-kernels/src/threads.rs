//! Shared state of a pool's threads, and how they divide a call: work stealing over ranges of units.
//!
//! A call is open or closed. Workers join it while it is open. No thread waits for a worker that has not joined, so that
//! a worker that wakes late does not delay the call. The caller computes like a worker, waits until all units are done,
//! closes the call, and waits until all workers that joined have left.
//!
//! A long call can be suspended. Threads then take no further unit, and the rest of their ranges is stored until the
//! call is continued.
//!
//! Each thread begins with a range of the units of a phase that is contiguous in memory, and takes units from its front.
//! A thread that runs out of work steals single units from the back of another thread's range.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

#[cfg(target_os = "linux")]
use crate::cores::Cores;
use crate::paths::float_mode::FloatMode;
use crate::paths::panel::Panel;
use crate::paths::{Kernels, PathChoice, SelectedPath};
use crate::phase::CallPhase;
use crate::plan::CallPlan;
use crate::shape::step_words;
use crate::signal::Signal;
use crate::{Dtype, InstructionPath, KernelError, NumericsClass};

/// State bit: the call may be joined.
const OPEN_BIT: u64 = 1 << 31;
/// State bits below: the number of workers that have joined the call.
const JOINED_MASK: u64 = OPEN_BIT - 1;
/// State bits above: the number of the call.
const CALL_SHIFT: u32 = 32;

/// A range of units that threads take from, on cache lines of its own. The lower half of the word is the front, the
/// upper half the end.
#[derive(Debug, Default)]
#[repr(align(128))]
struct UnitRange(AtomicU64);

impl UnitRange {
    fn set(&self, front: u32, end: u32) {
        self.0.store(u64::from(front) | u64::from(end) << 32, Ordering::Relaxed);
    }

    fn is_empty(&self) -> bool {
        self.front().is_none()
    }

    fn take_front(&self) -> Option<u32> {
        self.take(true)
    }

    fn take_back(&self) -> Option<u32> {
        self.take(false)
    }

    #[inline(always)]
    fn take(&self, from_front: bool) -> Option<u32> {
        let mut range = self.0.load(Ordering::Relaxed);
        loop {
            let (front, end) = (range as u32, (range >> 32) as u32);
            if front >= end {
                return None;
            }
            let (unit, rest) = if from_front {
                (front, u64::from(front + 1) | u64::from(end) << 32)
            } else {
                (end - 1, u64::from(front) | u64::from(end - 1) << 32)
            };
            // Relaxed: the call's state publishes the units' data, not the range.
            match self.0.compare_exchange_weak(range, rest, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(unit),
                Err(current) => range = current,
            }
        }
    }

    fn front(&self) -> Option<u32> {
        let range = self.0.load(Ordering::Relaxed);
        let (front, end) = (range as u32, (range >> 32) as u32);
        (front < end).then_some(front)
    }
}

/// Progress of one phase of a call.
#[derive(Debug, Default)]
struct PhaseProgress {
    /// Units that are not taken yet, by thread.
    ranges: Box<[UnitRange]>,
    /// Number of units that are not done.
    remaining: AtomicU32,
}

impl PhaseProgress {
    /// Divides `units` units evenly among the threads.
    fn begin(&self, units: u32) {
        let threads = self.ranges.len() as u64;
        for (thread, range) in (0u64..).zip(&self.ranges) {
            let bound = |thread: u64| (u64::from(units) * thread / threads) as u32;
            range.set(bound(thread), bound(thread + 1));
        }
        self.remaining.store(units, Ordering::Relaxed);
    }

    /// Continues with the units that remained when the call was suspended.
    fn resume(&self, units: &RemainingUnits) {
        match units {
            RemainingUnits::All(units) => self.begin(*units),
            RemainingUnits::ByThread(ranges) => {
                for (range, stored) in self.ranges.iter().zip(ranges) {
                    range.0.store(*stored, Ordering::Relaxed);
                }
                let units = self.ranges.iter().map(|range| {
                    let range = range.0.load(Ordering::Relaxed);
                    ((range >> 32) as u32).saturating_sub(range as u32)
                });
                self.remaining.store(units.sum(), Ordering::Relaxed);
            }
        }
    }

    /// Returns the units that are not taken. No unit may be being computed.
    fn remaining_units(&self) -> RemainingUnits {
        if self.ranges.iter().all(UnitRange::is_empty) {
            return RemainingUnits::All(0);
        }
        RemainingUnits::ByThread(self.ranges.iter().map(|range| range.0.load(Ordering::Relaxed)).collect())
    }
}

/// Units of a phase that are not done.
#[derive(Debug)]
enum RemainingUnits {
    /// All units of the phase, by their number.
    All(u32),
    /// The words of the threads' [`UnitRange`]s.
    ByThread(Vec<u64>),
}

impl RemainingUnits {
    fn is_done(&self) -> bool {
        matches!(self, Self::All(0))
    }
}

/// A call that is not complete and not being computed.
#[derive(Debug)]
pub(crate) struct SuspendedCall {
    plan: CallPlan,
    remaining: [RemainingUnits; 2],
    /// Address of the [`PoolShared`] that has begun the call; `None` before the first unit.
    pool: Option<usize>,
}

impl SuspendedCall {
    /// Wraps a plan of which no unit has been computed.
    pub(crate) fn new(plan: CallPlan) -> Self {
        let remaining = CallPhase::ALL.map(|phase| RemainingUnits::All(plan.units(phase)));
        Self { plan, remaining, pool: None }
    }
}

/// Selects the instruction path of each panel.
#[derive(Clone, Copy)]
pub(crate) struct PathSelector {
    /// Path for everything; `None` selects the fastest measured path.
    pub(crate) fixed: Option<InstructionPath>,
    /// Returns the kernels of a path. Tests replace it.
    pub(crate) kernels: fn(InstructionPath, NumericsClass) -> Kernels,
}

impl PathSelector {
    /// Returns the paths that are currently in use for a class.
    pub(crate) fn choice(&self, class: NumericsClass) -> PathChoice {
        self.fixed.map_or_else(|| PathChoice::current(class), PathChoice::only)
    }

    /// Returns the path of attention, for any number of rows: the path that is measured to be the fastest for one row.
    /// Online tuning is about reading weights, and attention has none.
    pub(crate) fn attention_path(&self, dtype: Dtype) -> InstructionPath {
        self.fixed.unwrap_or_else(|| PathChoice::measured(dtype).of_rows(1))
    }

    /// Selects the path of a panel.
    fn select(&self, class: NumericsClass, panel: &Panel) -> SelectedPath {
        match self.fixed {
            Some(path) => SelectedPath::fixed(path),
            None => {
                let bytes = panel.steps * step_words(class.dtype, class.weights) * 4;
                SelectedPath::select(class, panel.row_count, bytes as u64)
            }
        }
    }
}

/// State that the threads of a pool share.
pub(crate) struct PoolShared {
    pub(crate) paths: PathSelector,
    pub(crate) poll: Duration,
    /// [`OPEN_BIT`], number of joined workers, number of the call.
    state: AtomicU64,
    /// Tells the workers to end.
    stop: AtomicBool,
    /// Set if a thread panicked in the current call.
    panicked: AtomicBool,
    /// Set if threads are to take no further unit in this call.
    suspended: AtomicBool,
    /// Written by the caller while no call is open and no worker has joined. Read by the threads of an open call.
    plan: UnsafeCell<CallPlan>,
    phases: [PhaseProgress; 2],
    /// Wakes workers when a call opens, or the pool stops.
    opened: Signal,
    /// Wakes threads that wait for the end of a phase or of a call.
    progressed: Signal,
    #[cfg(target_os = "linux")]
    cores: Option<Cores>,
}

// SAFETY: `plan` is only written between calls, when no other thread reads it. Everything else is `Sync`.
unsafe impl Sync for PoolShared {}

impl PoolShared {
    /// Prepares the state for `threads` threads. `parallelism` is the number of threads that the process's share of the
    /// machine can run at a time.
    #[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
    pub(crate) fn new(
        paths: PathSelector,
        poll: Duration,
        threads: usize,
        parallelism: usize,
    ) -> Result<Self, KernelError> {
        let progress = || PhaseProgress {
            ranges: (0..threads).map(|_| UnitRange::default()).collect(),
            remaining: AtomicU32::new(0),
        };
        Ok(Self {
            paths,
            poll,
            state: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
            plan: UnsafeCell::new(CallPlan::new()?),
            phases: [progress(), progress()],
            opened: Signal::default(),
            progressed: Signal::default(),
            #[cfg(target_os = "linux")]
            cores: (threads == parallelism).then(|| Cores::for_pool(threads)).flatten(),
        })
    }

    /// Ends the workers; no call may be open.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.opened.wake();
    }

    /// Prepares a call with `prepare` and, if that succeeds, computes it. The calling thread runs `between` after each
    /// of its units.
    ///
    /// # Safety
    /// One thread calls this at a time, and not from within a call. Everything that the plan points to outlives the
    /// function, and is not used by other code meanwhile.
    pub(crate) unsafe fn call(
        &self,
        prepare: impl FnOnce(&mut CallPlan) -> Result<(), KernelError>,
        between: &mut dyn FnMut(),
    ) -> Result<(), KernelError> {
        {
            // SAFETY: no call is open and no worker has joined: the previous call waited for that, and only one thread
            // calls at a time.
            let plan = unsafe { &mut *self.plan.get() };
            prepare(plan)?;
            for phase in CallPhase::ALL {
                self.phases[phase as usize].begin(plan.units(phase));
            }
        }
        // SAFETY: the function's own contract.
        unsafe { self.open_call(between) }
    }

    /// Computes units of `suspended` until all are done, or `should_suspend` returns true. The calling thread calls it
    /// after each of its units. Returns true if all units are done.
    ///
    /// # Safety
    /// As for [`call`](Self::call). Everything that the plan points to stays in place until the plan is done or dropped.
    pub(crate) unsafe fn advance(
        &self,
        suspended: &mut SuspendedCall,
        should_suspend: &mut dyn FnMut() -> bool,
    ) -> Result<bool, KernelError> {
        let address = std::ptr::from_ref(self).addr();
        // The remaining ranges belong to the threads of one pool.
        if *suspended.pool.get_or_insert(address) != address {
            return Err(KernelError::OtherPool);
        }
        // SAFETY: no call is open and no worker has joined, as in `call`.
        let plan = unsafe { &mut *self.plan.get() };
        std::mem::swap(plan, &mut suspended.plan);
        for (progress, units) in self.phases.iter().zip(&suspended.remaining) {
            progress.resume(units);
        }
        let mut between = || {
            if should_suspend() {
                self.suspended.store(true, Ordering::Relaxed);
            }
        };
        // SAFETY: the function's own contract.
        let computed = unsafe { self.open_call(&mut between) };
        self.suspended.store(false, Ordering::Relaxed);
        for (progress, units) in self.phases.iter().zip(&mut suspended.remaining) {
            *units = progress.remaining_units();
        }
        // SAFETY: the call is closed and all workers have left.
        std::mem::swap(unsafe { &mut *self.plan.get() }, &mut suspended.plan);
        computed.map(|()| suspended.remaining.iter().all(RemainingUnits::is_done))
    }

    /// Opens the prepared call, computes units, and closes the call once it is done or suspended.
    ///
    /// # Safety
    /// As for [`call`](Self::call).
    unsafe fn open_call(&self, between: &mut dyn FnMut()) -> Result<(), KernelError> {
        self.panicked.store(false, Ordering::Relaxed);
        #[cfg(target_os = "linux")]
        if let Some(cores) = &self.cores {
            cores.keep_off_caller();
        }
        let number = (self.state.load(Ordering::Relaxed) >> CALL_SHIFT).wrapping_add(1);
        self.state.store(number << CALL_SHIFT | OPEN_BIT, Ordering::SeqCst);
        self.opened.wake();
        // SAFETY: the call is open and this thread has not closed it yet.
        unsafe { self.compute_units(0, between) };
        if self.is_suspended() {
            self.progressed.wake();
        } else {
            // This ends even after a panic, because the unit of a thread that panicked counts as done.
            self.progressed
                .wait(self.poll, || self.is_done(CallPhase::GateUp) && self.is_done(CallPhase::Down));
        }
        self.state.fetch_and(!OPEN_BIT, Ordering::SeqCst);
        self.progressed.wait(self.poll, || self.state.load(Ordering::Acquire) & JOINED_MASK == 0);
        if self.panicked.load(Ordering::Relaxed) { Err(KernelError::Panicked) } else { Ok(()) }
    }

    /// Reports if workers have cores of their own.
    pub(crate) fn is_pinned(&self) -> bool {
        #[cfg(target_os = "linux")]
        return self.cores.is_some();
        #[cfg(not(target_os = "linux"))]
        false
    }

    /// Returns the bytes of scratch memory that the plan holds.
    ///
    /// # Safety
    /// As for [`call`](Self::call).
    pub(crate) unsafe fn scratch_bytes(&self) -> usize {
        // SAFETY: only `call` and `advance` write the plan, and neither runs now.
        unsafe { &*self.plan.get() }.scratch_bytes()
    }

    /// Runs worker number `thread` until the pool stops.
    pub(crate) fn run_worker(&self, thread: usize) {
        #[cfg(target_os = "linux")]
        if let Some(cores) = &self.cores {
            cores.add_worker();
        }
        let mut last_call = 0;
        loop {
            let is_new = |state: u64| state & OPEN_BIT != 0 && state >> CALL_SHIFT != last_call;
            self.opened.wait_idle(self.poll, || {
                is_new(self.state.load(Ordering::Relaxed)) || self.stop.load(Ordering::Relaxed)
            });
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let join = |state| is_new(state).then_some(state + 1);
            // Acquire: makes the plan visible that the caller wrote before it opened the call.
            if let Ok(state) = self.state.fetch_update(Ordering::AcqRel, Ordering::Relaxed, join) {
                last_call = state >> CALL_SHIFT;
                // SAFETY: this thread has joined an open call and leaves it below.
                unsafe { self.compute_units(thread, &mut || {}) };
                self.state.fetch_sub(1, Ordering::AcqRel);
                self.progressed.wake();
            }
        }
    }

    fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::Relaxed)
    }

    fn is_done(&self, phase: CallPhase) -> bool {
        self.phases[phase as usize].remaining.load(Ordering::Acquire) == 0
    }

    /// Computes units of both phases until none is left to take, and runs `between` after each.
    ///
    /// # Safety
    /// The calling thread has joined the call, or opened it, and has not left it yet.
    unsafe fn compute_units(&self, thread: usize, between: &mut dyn FnMut()) {
        // SAFETY: the plan is not written while the call is open or joined.
        let plan = unsafe { &*self.plan.get() };
        for phase in CallPhase::ALL {
            let ranges = &self.phases[phase as usize].ranges;
            while !self.is_suspended()
                && let Some(unit) = ranges[thread].take_front()
            {
                let next = ranges[thread].front().map(|unit| (phase, unit));
                let next = next.or_else(|| {
                    let down = &self.phases[CallPhase::Down as usize].ranges[thread];
                    down.front().map(|unit| (CallPhase::Down, unit))
                });
                self.compute_unit(plan, phase, unit, next);
                self.run_between(between);
            }
            for other in 1..ranges.len() {
                while !self.is_suspended()
                    && let Some(unit) = ranges[(thread + other) % ranges.len()].take_back()
                {
                    self.compute_unit(plan, phase, unit, None);
                    self.run_between(between);
                }
            }
            if phase == CallPhase::GateUp {
                self.progressed.wait(self.poll, || self.is_done(phase) || self.is_suspended());
                if !self.is_done(phase) {
                    return;
                }
            }
        }
    }

    /// Runs `between` and catches its panic: other threads still compute for this call, so that this thread may not
    /// leave it by unwinding.
    fn run_between(&self, between: &mut dyn FnMut()) {
        if catch_unwind(AssertUnwindSafe(between)).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }

    /// Computes one unit and counts it as done, even if it panics. `next` is the unit that this thread will probably
    /// compute next, for prefetching.
    fn compute_unit(&self, plan: &CallPlan, phase: CallPhase, unit: u32, next: Option<(CallPhase, u32)>) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            if let Some(task) = plan.task() {
                // Tasks run in the default float mode, like all code outside of the kernels.
                // SAFETY: the call that the task was prepared for has not returned, so that its closure is alive.
                return unsafe { task.run(unit) };
            }
            let Some((class, mut panel)) = plan.panel(phase, unit) else {
                return;
            };
            if let Some((_, next_panel)) = next.and_then(|(phase, unit)| plan.panel(phase, unit)) {
                panel.next = next_panel.weights.cast();
            }
            let selected = self.paths.select(class, &panel);
            let path = selected.path;
            let kernel = (self.paths.kernels)(path, class).for_phase(phase);
            let mode = FloatMode::enter(path);
            // SAFETY: the pool checked that the path is available, and its float mode is set. The caller borrows weights
            // and inputs for the whole call. Intermediate rows are complete, because the second phase begins after the
            // first. Each unit is taken once, and units write to disjoint columns.
            unsafe { kernel(&panel) };
            drop(mode);
            selected.record_time();
        }));
        if result.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        // Release: publishes the unit's results to the threads that wait for the end of the phase.
        if self.phases[phase as usize].remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.progressed.wake();
        }
    }
}
