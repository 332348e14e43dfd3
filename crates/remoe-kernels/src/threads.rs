//! State that the threads of a pool share, and how they divide a call.
//!
//! A call is open or closed. While it is open, workers join it; nothing waits for a worker that has not joined, so that
//! a call never takes longer because a thread wakes late. The caller takes part like a worker, waits until all units
//! are done, closes the call and waits until those who joined have left.
//!
//! A call that may take long can be suspended: threads take no further unit then, and what is left of their ranges is
//! kept until it goes on.
//!
//! Each thread begins with a contiguous range of the units of a phase (contiguous in memory, too) and takes them from
//! its front; a thread without work takes single units from the back of another one's range.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

#[cfg(target_os = "linux")]
use crate::cores::Cores;
use crate::paths::float_mode::FloatMode;
use crate::paths::panel::Panel;
use crate::paths::{Computing, Kernels, PathChoice};
use crate::phase::CallPhase;
use crate::plan::Plan;
use crate::shape::step_words;
use crate::signal::Signal;
use crate::{Dtype, InstructionPath, KernelError, NumericsClass};

/// State bit: the call may be joined. The bits below count the workers in it, those above number the calls.
const OPEN: u64 = 1 << 31;
const JOINED: u64 = OPEN - 1;
const CALL: u32 = 32;

/// A range of units, on cache lines of its own: the front in the lower half, the end in the upper.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Range(AtomicU64);

impl Range {
    fn set(&self, front: u32, end: u32) {
        self.0.store(u64::from(front) | u64::from(end) << 32, Ordering::Relaxed);
    }

    fn is_empty(&self) -> bool {
        self.front().is_none()
    }

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
            // The units' data are published by the call's state, not by the range.
            match self.0.compare_exchange_weak(range, rest, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(unit),
                Err(now) => range = now,
            }
        }
    }

    fn front(&self) -> Option<u32> {
        let range = self.0.load(Ordering::Relaxed);
        let (front, end) = (range as u32, (range >> 32) as u32);
        (front < end).then_some(front)
    }
}

#[derive(Debug, Default)]
struct PhaseProgress {
    ranges: Box<[Range]>,
    remaining: AtomicU32,
}

impl PhaseProgress {
    /// All units are left, the same number for each thread.
    fn begin(&self, units: u32) {
        let threads = self.ranges.len() as u64;
        for (thread, range) in (0u64..).zip(&self.ranges) {
            let bound = |thread: u64| (u64::from(units) * thread / threads) as u32;
            range.set(bound(thread), bound(thread + 1));
        }
        self.remaining.store(units, Ordering::Relaxed);
    }

    fn resume(&self, left: &RemainingUnits) {
        match left {
            RemainingUnits::All(units) => self.begin(*units),
            RemainingUnits::Some(ranges) => {
                for (range, left) in self.ranges.iter().zip(ranges) {
                    range.0.store(*left, Ordering::Relaxed);
                }
                let units = self.ranges.iter().map(|range| {
                    let range = range.0.load(Ordering::Relaxed);
                    ((range >> 32) as u32).saturating_sub(range as u32)
                });
                self.remaining.store(units.sum(), Ordering::Relaxed);
            }
        }
    }

    /// The rest of the threads' ranges, while no unit is being computed.
    fn left(&self) -> RemainingUnits {
        if self.ranges.iter().all(Range::is_empty) {
            return RemainingUnits::All(0);
        }
        RemainingUnits::Some(self.ranges.iter().map(|range| range.0.load(Ordering::Relaxed)).collect())
    }
}

/// Units of a phase that are not done.
#[derive(Debug)]
enum RemainingUnits {
    /// The first so many.
    All(u32),
    /// By thread, as in [`Range`].
    Some(Vec<u64>),
}

impl RemainingUnits {
    fn is_done(&self) -> bool {
        matches!(self, Self::All(0))
    }
}

/// A call that is not done, between two times that it goes on.
#[derive(Debug)]
pub(crate) struct Suspended {
    plan: Plan,
    left: [RemainingUnits; 2],
    /// Address of what the threads share that have computed a part of it.
    pool: Option<usize>,
}

impl Suspended {
    /// Begins `plan`.
    pub(crate) fn new(plan: Plan) -> Self {
        let left = CallPhase::ALL.map(|phase| RemainingUnits::All(plan.units(phase)));
        Self { plan, left, pool: None }
    }
}

/// Instruction paths and kernels that compute panels.
#[derive(Clone, Copy)]
pub(crate) struct Paths {
    /// For everything; none: what is measured fastest.
    pub(crate) only: Option<InstructionPath>,
    pub(crate) kernels: fn(InstructionPath, NumericsClass) -> Kernels,
}

impl Paths {
    pub(crate) fn of(&self, class: NumericsClass) -> PathChoice {
        self.only.map_or_else(|| PathChoice::now(class), PathChoice::only)
    }

    /// By which path attention is computed, to whatever number of rows: what is measured fastest for one. Contests are
    /// about weights, of which it has none.
    pub(crate) fn attending(&self, dtype: Dtype) -> InstructionPath {
        self.only.unwrap_or_else(|| PathChoice::measured(dtype).of_rows(1))
    }

    /// By which path a panel is computed.
    fn computing(&self, class: NumericsClass, panel: &Panel) -> Computing {
        match self.only {
            Some(path) => Computing::only(path),
            None => {
                let bytes = panel.steps * step_words(class.dtype, class.weights) * 4;
                Computing::of(class, panel.row_count, bytes as u64)
            }
        }
    }
}

pub(crate) struct PoolShared {
    pub(crate) paths: Paths,
    pub(crate) poll: Duration,
    state: AtomicU64,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// No further unit is taken in this call.
    suspended: AtomicBool,
    /// Written by the caller while no call is open and no worker joined; read by those who take part.
    plan: UnsafeCell<Plan>,
    phases: [PhaseProgress; 2],
    opened: Signal,
    progressed: Signal,
    #[cfg(target_os = "linux")]
    cores: Option<Cores>,
}

// SAFETY: `plan` is written only between calls, see its comment; everything else is Sync by itself.
unsafe impl Sync for PoolShared {}

impl PoolShared {
    /// For so many `threads`, on cores that have time for `at_once`.
    #[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
    pub(crate) fn new(
        paths: Paths,
        poll: Duration,
        threads: usize,
        at_once: usize,
    ) -> Result<Self, KernelError> {
        let progress = || PhaseProgress {
            ranges: (0..threads).map(|_| Range::default()).collect(),
            remaining: AtomicU32::new(0),
        };
        Ok(Self {
            paths,
            poll,
            state: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
            plan: UnsafeCell::new(Plan::new()?),
            phases: [progress(), progress()],
            opened: Signal::default(),
            progressed: Signal::default(),
            #[cfg(target_os = "linux")]
            cores: (threads == at_once).then(|| Cores::of(threads)).flatten(),
        })
    }

    /// Ends the workers; no call may be open.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.opened.wake();
    }

    /// Prepares a call with `prepare` and, if that succeeds, computes it; this thread does `between` after each of its
    /// units.
    ///
    /// # Safety
    /// One thread at a time, not from within a call; what the plan's pointers point to outlives this function and is
    /// not used by others.
    pub(crate) unsafe fn call(
        &self,
        prepare: impl FnOnce(&mut Plan) -> Result<(), KernelError>,
        between: &mut dyn FnMut(),
    ) -> Result<(), KernelError> {
        {
            // SAFETY: no call is open and no thread has joined: the previous one waited for that, and calls come one at
            // a time.
            let plan = unsafe { &mut *self.plan.get() };
            prepare(plan)?;
            for phase in CallPhase::ALL {
                self.phases[phase as usize].begin(plan.units(phase));
            }
        }
        // SAFETY: the caller's promises.
        unsafe { self.open_call(between) }
    }

    /// Computes units of `suspended` until all are done or `until` says so, which is asked after each unit of this
    /// thread. True where they are done.
    ///
    /// # Safety
    /// As for [`call`](Self::call); what the plan's pointers point to stays where it is until the plan is done or
    /// dropped.
    pub(crate) unsafe fn advance(
        &self,
        suspended: &mut Suspended,
        until: &mut dyn FnMut() -> bool,
    ) -> Result<bool, KernelError> {
        let this = std::ptr::from_ref(self).addr();
        // Ranges are the threads' own.
        if *suspended.pool.get_or_insert(this) != this {
            return Err(KernelError::OtherPool);
        }
        // SAFETY: no call is open and no worker has joined, as in `call`.
        let plan = unsafe { &mut *self.plan.get() };
        std::mem::swap(plan, &mut suspended.plan);
        for (progress, left) in self.phases.iter().zip(&suspended.left) {
            progress.resume(left);
        }
        let mut between = || {
            if until() {
                self.suspended.store(true, Ordering::Relaxed);
            }
        };
        // SAFETY: the caller's promises.
        let computed = unsafe { self.open_call(&mut between) };
        self.suspended.store(false, Ordering::Relaxed);
        for (progress, left) in self.phases.iter().zip(&mut suspended.left) {
            *left = progress.left();
        }
        // SAFETY: as above; all workers have left.
        std::mem::swap(unsafe { &mut *self.plan.get() }, &mut suspended.plan);
        computed.map(|()| suspended.left.iter().all(RemainingUnits::is_done))
    }

    /// Opens the call that is prepared, takes part in it and closes it, once it is done or suspended.
    ///
    /// # Safety
    /// As for [`call`](Self::call).
    unsafe fn open_call(&self, between: &mut dyn FnMut()) -> Result<(), KernelError> {
        self.panicked.store(false, Ordering::Relaxed);
        #[cfg(target_os = "linux")]
        if let Some(cores) = &self.cores {
            cores.apart();
        }
        let number = (self.state.load(Ordering::Relaxed) >> CALL).wrapping_add(1);
        self.state.store(number << CALL | OPEN, Ordering::SeqCst);
        self.opened.wake();
        // SAFETY: the call is open and this thread has not closed it yet.
        unsafe { self.take_part(0, between) };
        if self.is_suspended() {
            self.progressed.wake();
        } else {
            // A thread that panicked has counted its unit as done all the same, so that this ends.
            self.progressed
                .wait(self.poll, || self.is_done(CallPhase::GateUp) && self.is_done(CallPhase::Down));
        }
        self.state.fetch_and(!OPEN, Ordering::SeqCst);
        self.progressed.wait(self.poll, || self.state.load(Ordering::Acquire) & JOINED == 0);
        if self.panicked.load(Ordering::Relaxed) { Err(KernelError::Panicked) } else { Ok(()) }
    }

    /// Reports if workers have cores of their own.
    pub(crate) fn is_pinned(&self) -> bool {
        #[cfg(target_os = "linux")]
        return self.cores.is_some();
        #[cfg(not(target_os = "linux"))]
        false
    }

    /// Scratch bytes that are held.
    ///
    /// # Safety
    /// As for [`call`](Self::call).
    pub(crate) unsafe fn scratch_bytes(&self) -> usize {
        // SAFETY: only `call` writes the plan.
        unsafe { &*self.plan.get() }.scratch_bytes()
    }

    /// A worker's life.
    pub(crate) fn work(&self, thread: usize) {
        #[cfg(target_os = "linux")]
        if let Some(cores) = &self.cores {
            cores.joined();
        }
        let mut last = 0;
        loop {
            let is_new = |state: u64| state & OPEN != 0 && state >> CALL != last;
            self.opened.wait_idle(self.poll, || {
                is_new(self.state.load(Ordering::Relaxed)) || self.stop.load(Ordering::Relaxed)
            });
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let join = |state| is_new(state).then_some(state + 1);
            // Acquires the plan that the caller wrote before it opened the call.
            if let Ok(state) = self.state.fetch_update(Ordering::AcqRel, Ordering::Relaxed, join) {
                last = state >> CALL;
                // SAFETY: this thread has joined an open call and leaves it below.
                unsafe { self.take_part(thread, &mut || {}) };
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

    /// Computes units until there are none left to take, and does `between` after each.
    ///
    /// # Safety
    /// Between joining and leaving a call.
    unsafe fn take_part(&self, thread: usize, between: &mut dyn FnMut()) {
        // SAFETY: the plan is not written while the call is open or joined.
        let plan = unsafe { &*self.plan.get() };
        for phase in CallPhase::ALL {
            let ranges = &self.phases[phase as usize].ranges;
            while !self.is_suspended()
                && let Some(unit) = ranges[thread].take(true)
            {
                let next = ranges[thread].front().map(|unit| (phase, unit));
                let next = next.or_else(|| {
                    self.phases[CallPhase::Down as usize].ranges[thread].front().map(|u| (CallPhase::Down, u))
                });
                self.compute(plan, phase, unit, next);
                self.in_between(between);
            }
            for other in 1..ranges.len() {
                while !self.is_suspended()
                    && let Some(unit) = ranges[(thread + other) % ranges.len()].take(false)
                {
                    self.compute(plan, phase, unit, None);
                    self.in_between(between);
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

    /// Others compute for this call until it is over: a panic ends it, and does not leave it.
    fn in_between(&self, between: &mut dyn FnMut()) {
        if catch_unwind(AssertUnwindSafe(between)).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }

    /// Computes one unit and counts it as done, whatever happens.
    fn compute(&self, plan: &Plan, phase: CallPhase, unit: u32, next: Option<(CallPhase, u32)>) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            if let Some(task) = plan.task() {
                // What is not the kernels' own is computed as anywhere else: no float mode is entered.
                // SAFETY: the call that the task was prepared for has not returned.
                return unsafe { task.run(unit) };
            }
            let Some((class, mut panel)) = plan.panel(phase, unit) else {
                return;
            };
            if let Some((_, following)) = next.and_then(|(phase, unit)| plan.panel(phase, unit)) {
                panel.next = following.weights.cast();
            }
            let computing = self.paths.computing(class, &panel);
            let path = computing.path;
            let kernel = (self.paths.kernels)(path, class).of(phase);
            let mode = FloatMode::enter(path);
            // SAFETY: the pool checked that the path is available, and its float mode is set. Weights and inputs are
            // borrowed by the caller for the whole call; intermediate rows are complete, because the second phase
            // begins after the first; each unit is taken once, and units write to disjoint columns.
            unsafe { kernel(&panel) };
            drop(mode);
            computing.end();
        }));
        if result.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        // Publishes what was computed to those who wait for the phase.
        if self.phases[phase as usize].remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.progressed.wake();
        }
    }
}
