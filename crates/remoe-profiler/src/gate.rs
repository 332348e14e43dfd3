//! When measurements may run. While the gate is closed the measured functions are stopped, and what they were measuring
//! is measured again.

use crate::error::ProfileError;
use rustix::process::{Pid, Signal, kill_process_group};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Lets measurements run, or holds them up.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    /// Start of the present pause; none while it is open.
    closed_since: Option<Instant>,
    /// How long it was closed before that.
    closed_before: Duration,
    /// How often it was closed so far.
    closings: u64,
    /// Measured functions, leaders of process groups of their own.
    functions: Vec<Pid>,
    /// Nothing is measured any more.
    ended: bool,
    /// Results so far, and those that a closing spoiled.
    counts: MeasurementCounts,
}

/// Measurements behind a gate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MeasurementCounts {
    /// Number that were not disturbed.
    pub done: u64,
    /// Number that were disturbed, and are repeated.
    pub disturbed: u64,
}

impl Gate {
    /// One that is open, or closed until [`Self::open`].
    pub fn new(open: bool) -> Arc<Self> {
        let state = GateState {
            closed_since: (!open).then(Instant::now),
            closed_before: Duration::ZERO,
            closings: 0,
            functions: Vec::new(),
            ended: false,
            counts: MeasurementCounts::default(),
        };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Lets measurements go on.
    pub fn open(&self) {
        let mut state = self.state();
        if let Some(since) = state.closed_since.take() {
            state.closed_before += since.elapsed();
            state.signal(Signal::CONT);
            self.changed.notify_all();
        }
    }

    /// Stops the measured functions, whatever they compute.
    pub fn close(&self) {
        let mut state = self.state();
        if state.closed_since.is_none() {
            state.closed_since = Some(Instant::now());
            state.closings += 1;
            state.signal(Signal::STOP);
        }
    }

    /// Ends the measured functions; measurements fail from now on.
    pub fn end(&self) {
        let mut state = self.state();
        state.ended = true;
        state.closings += 1;
        state.signal(Signal::KILL);
        self.changed.notify_all();
    }

    /// Returns how long the gate has been closed so far, all together: in that time functions did not get on.
    pub(crate) fn held_up(&self) -> Duration {
        let state = self.state();
        state.closed_before + state.closed_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns how many measurements there were so far.
    pub fn counts(&self) -> MeasurementCounts {
        self.state().counts
    }

    /// Takes note of a measured function that has been started.
    pub(crate) fn started(&self, pid: u32) {
        let Some(pid) = Pid::from_raw(pid.cast_signed()) else { return };
        let mut state = self.state();
        state.functions.push(pid);
        let signal = if state.ended { Some(Signal::KILL) } else { state.closed_since.map(|_| Signal::STOP) };
        if let Some(signal) = signal {
            let _gone = kill_process_group(pid, signal);
        }
    }

    /// Takes note that a function is ended by its launcher.
    pub(crate) fn ending(&self, pid: u32) {
        self.state().functions.retain(|known| known.as_raw_nonzero().get() != pid.cast_signed());
    }

    /// Returns the first result of `measure` that was not disturbed, while the gate is open.
    ///
    /// # Errors
    /// `measure` fails: a function that was stopped may have lost its connections. Or nothing is measured any more.
    pub(crate) fn undisturbed<T>(
        &self,
        mut measure: impl FnMut() -> Result<T, ProfileError>,
    ) -> Result<T, ProfileError> {
        loop {
            let before = self.enter()?;
            let measured = measure()?;
            let mut state = self.state();
            if state.closings == before {
                state.counts.done += 1;
                return Ok(measured);
            }
            state.counts.disturbed += 1;
        }
    }

    /// Returns the result of `measure`, which starts functions of its own: again where it failed after a disturbance.
    ///
    /// # Errors
    /// `measure` fails without a disturbance, or nothing is measured any more.
    pub(crate) fn piece<T>(
        &self,
        mut measure: impl FnMut() -> Result<T, ProfileError>,
    ) -> Result<T, ProfileError> {
        loop {
            let before = self.enter()?;
            match measure() {
                Err(_) if self.state().closings != before => self.state().counts.disturbed += 1,
                result => return result,
            }
        }
    }

    /// Waits until the gate is open; returns how often it has been closed.
    fn enter(&self) -> Result<u64, ProfileError> {
        let mut state = self.state();
        while state.closed_since.is_some() && !state.ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended { Err(ProfileError::Interrupted) } else { Ok(state.closings) }
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        // Every change is a few assignments that cannot panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GateState {
    fn signal(&self, signal: Signal) {
        for pid in &self.functions {
            // The only failure is that it has ended meanwhile.
            let _gone = kill_process_group(*pid, signal);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn measurement_is_repeated_if_it_was_disturbed() {
        let (gate, rounds) = (Gate::new(true), Cell::new(0));
        let measured = gate.undisturbed(|| {
            rounds.set(rounds.get() + 1);
            if rounds.get() == 1 {
                gate.close();
                gate.open();
            }
            Ok(rounds.get())
        });
        assert_eq!(measured.unwrap(), 2);
        assert_eq!(gate.counts(), MeasurementCounts { done: 1, disturbed: 1 });
    }

    #[test]
    fn piece_is_repeated_only_if_it_failed_after_a_disturbance() {
        let (gate, rounds) = (Gate::new(true), Cell::new(0));
        let failing = |disturbed: bool| {
            rounds.set(rounds.get() + 1);
            if disturbed && rounds.get() == 1 {
                gate.close();
                gate.open();
            }
            if rounds.get() == 1 { Err(ProfileError::Gone { name: "lost".to_owned() }) } else { Ok(()) }
        };
        assert!(gate.piece(|| failing(true)).is_ok());
        rounds.set(0);
        assert!(gate.piece(|| failing(false)).is_err());
    }

    #[test]
    fn nothing_is_measured_behind_the_end() {
        let gate = Gate::new(false);
        gate.end();
        assert!(gate.undisturbed(|| Ok(())).is_err());
    }
}
