//! Recent changes of a model between awake and asleep, for people.

use crate::timeline::ColdStart;
use remoe_autoscale::scale_to_zero::ScalingPhase;
use serde::Serialize;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Most changes that are kept. The oldest are dropped first.
const CHANGES: usize = 32;

/// Times at which a model entered its phases, the latest last.
#[derive(Debug, Default)]
pub(super) struct History(VecDeque<(ScalingPhase, Instant)>);

impl History {
    /// The history of a model that is in `phase` from `now` on.
    pub(super) fn begin(phase: ScalingPhase, now: Instant) -> Self {
        Self(VecDeque::from([(phase, now)]))
    }

    /// Notes that the model enters `phase` at `now`.
    pub(super) fn enter(&mut self, phase: ScalingPhase, now: Instant) {
        if self.0.len() == CHANGES {
            self.0.pop_front();
        }
        self.0.push_back((phase, now));
    }

    /// Returns the changes as of `now`, the latest last.
    pub(super) fn changes(&self, now: Instant) -> Vec<PhaseEntry> {
        let ago = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
        self.0.iter().map(|(state, at)| PhaseEntry { state: *state, ago_s: ago(*at) }).collect()
    }
}

/// Entry of a model into a phase.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct PhaseEntry {
    state: ScalingPhase,
    /// Seconds since then.
    ago_s: f64,
}

/// Times of the latest wake that a request waited for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct LastWake {
    /// Seconds since it was decided.
    ago_s: f64,
    parts: [WakePart; 6],
}

/// Part of the time until the first token of that request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct WakePart {
    name: &'static str,
    /// Duration in seconds.
    s: f64,
}

impl LastWake {
    /// The wake of `start`, as of `now`.
    pub(super) fn of(start: &ColdStart, now: Instant) -> Self {
        let part = |(name, time): (&'static str, Duration)| WakePart { name, s: time.as_secs_f64() };
        Self {
            ago_s: now.saturating_duration_since(start.decided()).as_secs_f64(),
            parts: start.named().map(part),
        }
    }
}

/// Sleep of a model, for people.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct SleepView {
    /// Time since a request last came or ended, in seconds.
    pub(super) quiet_s: f64,
    /// Idle window in seconds; `None`: it never sleeps.
    pub(super) idle_s: Option<f64>,
    pub(super) history: Vec<PhaseEntry>,
    pub(super) wake: Option<LastWake>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_keeps_the_latest_changes() {
        let start = Instant::now();
        let mut history = History::begin(ScalingPhase::Waking, start);
        for second in 1..100 {
            let phase = if second % 2 == 0 { ScalingPhase::Waking } else { ScalingPhase::Active };
            history.enter(phase, start + Duration::from_secs(second));
        }
        let changes = history.changes(start + Duration::from_secs(100));
        assert_eq!(changes.len(), CHANGES);
        assert_eq!(changes.last(), Some(&PhaseEntry { state: ScalingPhase::Active, ago_s: 1.0 }));
        assert_eq!(changes.first(), Some(&PhaseEntry { state: ScalingPhase::Waking, ago_s: 32.0 }));
    }
}
