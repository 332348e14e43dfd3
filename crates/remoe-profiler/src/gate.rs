//! Gate that pauses measurements. While it is closed, the measured functions are stopped, and disturbed measurements
//! are repeated.

use crate::error::ProfileError;
use rustix::process::{Pid, Signal, kill_process_group};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Gate that lets measurements run or pauses them.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    /// Start of the current pause; absent while open.
    closed_since: Option<Instant>,
    /// Total duration of earlier pauses.
    closed_before: Duration,
    /// Number of pauses so far.
    pauses: u64,
    /// Process groups of measured functions, by their leaders.
    functions: Vec<Pid>,
    /// Set when measurements have ended for good.
    ended: bool,
    /// Counts of valid and disturbed measurements.
    counts: MeasurementCounts,
}

/// Counts of measurements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MeasurementCounts {
    /// Number of valid measurements.
    pub done: u64,
    /// Number of disturbed measurements, which are repeated.
    pub disturbed: u64,
}

impl Gate {
    /// Creates a gate that is open, or closed until [`Self::open`].
    pub fn new(open: bool) -> Arc<Self> {
        let state = GateState {
            closed_since: (!open).then(Instant::now),
            closed_before: Duration::ZERO,
            pauses: 0,
            functions: Vec::new(),
            ended: false,
            counts: MeasurementCounts::default(),
        };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Resumes measurements.
    pub fn open(&self) {
        let mut state = self.state();
        if let Some(since) = state.closed_since.take() {
            state.closed_before += since.elapsed();
            state.signal(Signal::CONT);
            self.changed.notify_all();
        }
    }

    /// Pauses measurements by stopping the measured functions.
    pub fn close(&self) {
        let mut state = self.state();
        if state.closed_since.is_none() {
            state.closed_since = Some(Instant::now());
            state.pauses += 1;
            state.signal(Signal::STOP);
        }
    }

    /// Kills the measured functions; all further measurements fail.
    pub fn end(&self) {
        let mut state = self.state();
        state.ended = true;
        state.pauses += 1;
        state.signal(Signal::KILL);
        self.changed.notify_all();
    }

    /// Returns the total time for which the gate was closed. Functions made no progress in that time.
    pub(crate) fn total_pause(&self) -> Duration {
        let state = self.state();
        state.closed_before + state.closed_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns the counts of measurements so far.
    pub fn counts(&self) -> MeasurementCounts {
        self.state().counts
    }

    /// Registers a started function.
    pub(crate) fn register(&self, pid: u32) {
        let Some(pid) = Pid::from_raw(pid.cast_signed()) else { return };
        let mut state = self.state();
        state.functions.push(pid);
        let signal = if state.ended { Some(Signal::KILL) } else { state.closed_since.map(|_| Signal::STOP) };
        if let Some(signal) = signal {
            let _gone = kill_process_group(pid, signal);
        }
    }

    /// Unregisters a function that its launcher ends.
    pub(crate) fn unregister(&self, pid: u32) {
        self.state().functions.retain(|known| known.as_raw_nonzero().get() != pid.cast_signed());
    }

    /// Repeats `measure` while the gate is open until one result is undisturbed, and returns it.
    ///
    /// # Errors
    /// `measure` fails, since a stopped function may have lost its connections; or measurements have ended.
    pub(crate) fn undisturbed<T>(
        &self,
        mut measure: impl FnMut() -> Result<T, ProfileError>,
    ) -> Result<T, ProfileError> {
        loop {
            let before = self.enter()?;
            let measured = measure()?;
            let mut state = self.state();
            if state.pauses == before {
                state.counts.done += 1;
                return Ok(measured);
            }
            state.counts.disturbed += 1;
        }
    }

    /// Returns the result of `measure`, which starts its own functions. Repeats it if it failed after a disturbance.
    ///
    /// # Errors
    /// `measure` fails without a disturbance, or measurements have ended.
    pub(crate) fn retry_if_disturbed<T>(
        &self,
        mut measure: impl FnMut() -> Result<T, ProfileError>,
    ) -> Result<T, ProfileError> {
        loop {
            let before = self.enter()?;
            match measure() {
                Err(_) if self.state().pauses != before => self.state().counts.disturbed += 1,
                result => return result,
            }
        }
    }

    /// Waits until the gate is open. Returns the number of pauses so far.
    fn enter(&self) -> Result<u64, ProfileError> {
        let mut state = self.state();
        while state.closed_since.is_some() && !state.ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended { Err(ProfileError::Interrupted) } else { Ok(state.pauses) }
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        // Every change is a few assignments that cannot panic, so the state is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GateState {
    fn signal(&self, signal: Signal) {
        for pid in &self.functions {
            // It can only fail if the process has ended meanwhile.
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
        assert!(gate.retry_if_disturbed(|| failing(true)).is_ok());
        rounds.set(0);
        assert!(gate.retry_if_disturbed(|| failing(false)).is_err());
    }

    #[test]
    fn nothing_is_measured_behind_the_end() {
        let gate = Gate::new(false);
        gate.end();
        assert!(gate.undisturbed(|| Ok(())).is_err());
    }
}
