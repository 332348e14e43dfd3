//! What the threads of a pool share, and how they divide a call.
//!
//! A call is open or closed. While it is open, workers join it; nothing waits for a worker that has not joined, so that a call never takes longer because a thread wakes late. The caller takes part like a worker, waits until all units are done, closes the call and waits until those who joined have left.
//!
//! Each thread begins with a contiguous range of the units of a phase (contiguous in memory, too) and takes them from its front; a thread without work takes single units from the back of another one's range.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

#[cfg(target_os = "linux")]
use crate::cores::Cores;
use crate::paths::float_mode::FloatMode;
use crate::paths::panel::Panel;
use crate::paths::{Computing, Kernels, PathChoice};
use crate::plan::{Phase, Plan};
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
struct Progress {
    ranges: Box<[Range]>,
    remaining: AtomicU32,
}

/// What computes a panel.
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

    /// By which path attention is computed, to whatever number of rows: what is measured fastest for one. Contests are about weights, of which it has none.
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

pub(crate) struct Shared {
    pub(crate) paths: Paths,
    pub(crate) poll: Duration,
    state: AtomicU64,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// Written by the caller while no call is open and no worker joined; read by those who take part.
    plan: UnsafeCell<Plan>,
    phases: [Progress; 2],
    opened: Signal,
    progressed: Signal,
    #[cfg(target_os = "linux")]
    cores: Option<Cores>,
}

// SAFETY: `plan` is written only between calls, see its comment; everything else is Sync by itself.
unsafe impl Sync for Shared {}

impl Shared {
    /// For so many `threads`, on cores that have time for `at_once`.
    #[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
    pub(crate) fn new(
        paths: Paths,
        poll: Duration,
        threads: usize,
        at_once: usize,
    ) -> Result<Self, KernelError> {
        let progress = || Progress {
            ranges: (0..threads).map(|_| Range::default()).collect(),
            remaining: AtomicU32::new(0),
        };
        Ok(Self {
            paths,
            poll,
            state: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
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

    /// Prepares a call with `prepare` and, if that succeeds, computes it; this thread does `between` after each of its units.
    ///
    /// # Safety
    /// One thread at a time, not from within a call; what the plan's pointers point to outlives this function and is not used by others.
    pub(crate) unsafe fn call(
        &self,
        prepare: impl FnOnce(&mut Plan) -> Result<(), KernelError>,
        between: &mut dyn FnMut(),
    ) -> Result<(), KernelError> {
        {
            // SAFETY: no call is open and nobody has joined: the previous one waited for that, and calls come one at a time.
            let plan = unsafe { &mut *self.plan.get() };
            prepare(plan)?;
            for phase in Phase::ALL {
                let progress = &self.phases[phase as usize];
                let units = u64::from(plan.units(phase));
                let threads = progress.ranges.len() as u64;
                for (thread, range) in (0u64..).zip(&progress.ranges) {
                    range.set((units * thread / threads) as u32, (units * (thread + 1) / threads) as u32);
                }
                progress.remaining.store(units as u32, Ordering::Relaxed);
            }
        }
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
        // A thread that panicked has counted its unit as done all the same, so that this ends.
        self.progressed.wait(self.poll, || self.is_done(Phase::GateUp) && self.is_done(Phase::Down));
        self.state.fetch_and(!OPEN, Ordering::SeqCst);
        self.progressed.wait(self.poll, || self.state.load(Ordering::Acquire) & JOINED == 0);
        if self.panicked.load(Ordering::Relaxed) { Err(KernelError::Panicked) } else { Ok(()) }
    }

    /// Whether workers have cores of their own.
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
        // SAFETY: nobody writes the plan outside of `call`.
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

    fn is_done(&self, phase: Phase) -> bool {
        self.phases[phase as usize].remaining.load(Ordering::Acquire) == 0
    }

    /// Computes units until there are none left to take, and does `between` after each.
    ///
    /// # Safety
    /// Between joining and leaving a call.
    unsafe fn take_part(&self, thread: usize, between: &mut dyn FnMut()) {
        // SAFETY: the plan is not written while the call is open or joined.
        let plan = unsafe { &*self.plan.get() };
        for phase in Phase::ALL {
            let ranges = &self.phases[phase as usize].ranges;
            while let Some(unit) = ranges[thread].take(true) {
                let next = ranges[thread].front().map(|unit| (phase, unit));
                let next = next.or_else(|| {
                    self.phases[Phase::Down as usize].ranges[thread].front().map(|u| (Phase::Down, u))
                });
                self.compute(plan, phase, unit, next);
                self.in_between(between);
            }
            for other in 1..ranges.len() {
                while let Some(unit) = ranges[(thread + other) % ranges.len()].take(false) {
                    self.compute(plan, phase, unit, None);
                    self.in_between(between);
                }
            }
            if phase == Phase::GateUp {
                self.progressed.wait(self.poll, || self.is_done(phase));
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
    fn compute(&self, plan: &Plan, phase: Phase, unit: u32, next: Option<(Phase, u32)>) {
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
            // SAFETY: the pool checked that the path is available, and its float mode is set. Weights and inputs are borrowed by the caller for the whole call; intermediate rows are complete, because the second phase begins after the first; each unit is taken once, and units write to disjoint columns.
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
