//! Recent phase changes of a model, and its latest cold start, as the page shows them.

use crate::timeline::ColdStart;
use remoe_autoscale::scale_to_zero::ScalingPhase;
use serde::Serialize;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Largest number of changes that are kept. The oldest are dropped first.
const MAX_CHANGES: usize = 32;

/// Times at which a model entered its phases, in order of time.
#[derive(Debug, Default)]
pub(super) struct PhaseHistory(VecDeque<(ScalingPhase, Instant)>);

impl PhaseHistory {
    /// Makes the history of a model that enters `phase` at `now`.
    pub(super) fn begin(phase: ScalingPhase, now: Instant) -> Self {
        Self(VecDeque::from([(phase, now)]))
    }

    /// Records that the model enters `phase` at `now`.
    pub(super) fn enter(&mut self, phase: ScalingPhase, now: Instant) {
        if self.0.len() == MAX_CHANGES {
            self.0.pop_front();
        }
        self.0.push_back((phase, now));
    }

    /// Returns the changes in order of time, each with its age at `now`.
    pub(super) fn changes(&self, now: Instant) -> Vec<PhaseEntry> {
        let seconds_ago = |time: Instant| now.saturating_duration_since(time).as_secs_f64();
        self.0.iter().map(|(state, time)| PhaseEntry { state: *state, ago_s: seconds_ago(*time) }).collect()
    }
}

/// Entry of a model into a phase.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct PhaseEntry {
    state: ScalingPhase,
    /// Seconds since then.
    ago_s: f64,
}

/// Latest cold start that a request waited for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct LastWake {
    /// Seconds since the wake was decided.
    ago_s: f64,
    parts: [WakePart; 6],
}

/// Part of the request's time to first token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct WakePart {
    name: &'static str,
    /// Duration in seconds.
    s: f64,
}

impl LastWake {
    /// Describes `start`, with its age at `now`.
    pub(super) fn new(start: &ColdStart, now: Instant) -> Self {
        let part = |(name, time): (&'static str, Duration)| WakePart { name, s: time.as_secs_f64() };
        Self {
            ago_s: now.saturating_duration_since(start.decided_at()).as_secs_f64(),
            parts: start.named_parts().map(part),
        }
    }
}

/// Scale to zero of a model, as the page shows it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct SleepView {
    /// Seconds since a request last arrived or ended.
    pub(super) quiet_s: f64,
    /// Idle window in seconds; `None`: the model never sleeps.
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
        let mut history = PhaseHistory::begin(ScalingPhase::Waking, start);
        for second in 1..100 {
            let phase = if second % 2 == 0 { ScalingPhase::Waking } else { ScalingPhase::Active };
            history.enter(phase, start + Duration::from_secs(second));
        }
        let changes = history.changes(start + Duration::from_secs(100));
        assert_eq!(changes.len(), MAX_CHANGES);
        assert_eq!(changes.last(), Some(&PhaseEntry { state: ScalingPhase::Active, ago_s: 1.0 }));
        assert_eq!(changes.first(), Some(&PhaseEntry { state: ScalingPhase::Waking, ago_s: 32.0 }));
    }
}
