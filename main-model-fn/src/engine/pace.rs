//! Time budget of prefill between decode iterations.
//!
//! All costs are measured: seconds per unit of each kind of step, and seconds of decode iterations.

use crate::transformer::{StepBudget, StepKind};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Longest planned step, so that new requests are noticed.
const MAX_STEP: Duration = Duration::from_millis(50);
/// Longest planned step with messages: remote functions read their experts' weights again for every message.
const MAX_REMOTE_STEP: Duration = Duration::from_millis(250);
/// Weight of the newest measurement of a step in the average.
const NEWEST_WEIGHT: f64 = 0.5;
/// Largest factor from the average to a new measurement: outliers of a busy machine say little about the next step.
const MAX_GROWTH: f64 = 4.0;
/// Number of decode iterations in the median.
const MEDIAN_WINDOW: usize = 31;
/// Without a target, running streams may slow down by this factor.
const DEFAULT_SLOWDOWN: f64 = 3.0;
/// Change of the planned fraction of the target after a gap above the target. With [`FRACTION_UP`], 1 in 50 gaps is
/// above it.
const FRACTION_DOWN: f64 = 0.02;
/// Change of the planned fraction after a gap below the target.
const FRACTION_UP: f64 = FRACTION_DOWN / 49.0;
/// Smallest planned fraction of a target.
const MIN_FRACTION: f64 = 0.6;
/// Smallest time for prefill, as a fraction of a decode iteration, however short the target.
const MIN_PREFILL_SHARE: f64 = 0.1;

/// Measured costs of prefill steps and decode iterations.
#[derive(Debug)]
pub(super) struct PrefillPace {
    /// Seconds per unit of each kind of step.
    step_seconds: BTreeMap<StepKind, f64>,
    /// Seconds of the latest decode iterations.
    decode_seconds: VecDeque<f64>,
    /// Fraction of the target that is planned for, because steps and iterations sometimes take longer than expected.
    planned_fraction: f64,
    /// End of the last decode iteration, if prompts advanced since.
    last_token: Option<Instant>,
}

impl Default for PrefillPace {
    fn default() -> Self {
        let (step_seconds, decode_seconds) = (BTreeMap::new(), VecDeque::new());
        Self { step_seconds, decode_seconds, planned_fraction: 1.0, last_token: None }
    }
}

impl PrefillPace {
    /// Records a decode iteration from `started` to `ended`. `target` is the target inter-token latency.
    pub(super) fn record_decode(&mut self, started: Instant, ended: Instant, target: Option<Duration>) {
        let target = self.effective_target(target);
        self.decode_seconds.push_back((ended - started).as_secs_f64());
        if self.decode_seconds.len() > MEDIAN_WINDOW {
            self.decode_seconds.pop_front();
        }
        if let (Some(before), Some(target)) = (self.last_token.take(), target) {
            let is_above = ended - before > target;
            let change = if is_above { -FRACTION_DOWN } else { FRACTION_UP };
            self.planned_fraction = (self.planned_fraction + change).clamp(MIN_FRACTION, 1.0);
        }
    }

    /// Returns `target`, or else [`DEFAULT_SLOWDOWN`] decode iterations; `None` before the first iteration.
    fn effective_target(&self, target: Option<Duration>) -> Option<Duration> {
        target.or_else(|| Some(Duration::from_secs_f64(self.median_decode_seconds()? * DEFAULT_SLOWDOWN)))
    }

    /// Returns the median of the latest decode iterations in seconds.
    fn median_decode_seconds(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.decode_seconds.iter().copied().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }

    /// Returns how long prompts may advance from `now`, right after a decode iteration, until the next one.
    pub(super) fn prefill_time(&mut self, now: Instant, target: Option<Duration>) -> Duration {
        self.last_token = Some(now);
        let (Some(target), Some(decode)) = (self.effective_target(target), self.median_decode_seconds())
        else {
            return MAX_STEP;
        };
        let left = target.as_secs_f64() * self.planned_fraction - decode;
        Duration::from_secs_f64(left.max(decode * MIN_PREFILL_SHARE))
    }
}

/// Budget of prefill until the next decode iteration.
pub(super) struct TimeBudget<'a> {
    pub(super) pace: &'a mut PrefillPace,
    pub(super) until: Instant,
    /// Returns true if a request or a placement has arrived that the engine must process first.
    pub(super) is_interrupted: &'a dyn Fn() -> bool,
}

/// Returns the size of a step whose cost has not been measured. The first remote step is not divided.
fn unmeasured_units(kind: StepKind) -> u64 {
    match kind {
        StepKind::Attention => 1 << 16,
        StepKind::Rows | StepKind::Sum => 64,
        StepKind::RemoteExperts => u64::MAX,
    }
}

impl StepBudget for TimeBudget<'_> {
    fn max_units(&mut self, kind: StepKind) -> u64 {
        if self.is_over() {
            return 0;
        }
        let left = self.until.saturating_duration_since(Instant::now());
        let longest = if kind == StepKind::RemoteExperts { MAX_REMOTE_STEP } else { MAX_STEP };
        match self.pace.step_seconds.get(&kind) {
            Some(&seconds) => (left.min(longest).as_secs_f64() / seconds) as u64,
            None => unmeasured_units(kind),
        }
    }

    fn is_over(&mut self) -> bool {
        Instant::now() >= self.until || (self.is_interrupted)()
    }

    fn record(&mut self, kind: StepKind, units: u64, time: Duration) {
        if units == 0 {
            return;
        }
        // A coarse clock may show no time for a step.
        let new = time.as_secs_f64().max(1e-9) / units as f64;
        let average = self.pace.step_seconds.entry(kind).or_insert(new);
        *average += NEWEST_WEIGHT * (new.min(*average * MAX_GROWTH) - *average);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn at(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn prefill_gets_the_time_that_the_target_leaves() {
        let (mut pace, start) = (PrefillPace::default(), Instant::now());
        assert_eq!(pace.prefill_time(start, None), MAX_STEP, "nothing is measured yet");
        let mut pace_of = |target: Option<u64>| {
            for token in 0..40 {
                pace.record_decode(
                    at(start, token * 20),
                    at(start, token * 20 + 20),
                    target.map(Duration::from_millis),
                );
            }
            pace.prefill_time(start, target.map(Duration::from_millis)).as_millis()
        };
        assert_eq!(pace_of(None), 40, "three times 20 ms");
        assert_eq!(pace_of(Some(48)), 28);
        assert_eq!(pace_of(Some(5)), 2, "prefill never stops");
    }

    /// Gaps exceed the plan by a random amount: about one in fifty is above the target.
    #[test]
    fn planned_fraction_adapts_to_measured_gaps() {
        let (mut pace, target) = (PrefillPace::default(), Duration::from_millis(50));
        let (mut now, mut above, mut random) = (Instant::now(), 0, 1_u64);
        for token in 0..20_000 {
            let rest = pace.prefill_time(now, Some(target));
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let longer = Duration::from_micros((random >> 40) % 8_000);
            let (started, before) = (now + rest, now);
            now = started + Duration::from_millis(16) + longer;
            pace.record_decode(started, now, Some(target));
            above += usize::from(token >= 2_000 && now - before > target);
        }
        assert!((180..720).contains(&above), "{above} of 18000");
    }

    #[test]
    fn steps_fit_the_rest_of_the_iteration() {
        let mut pace = PrefillPace::default();
        let idle = || false;
        let mut rest = TimeBudget {
            pace: &mut pace,
            until: Instant::now() + Duration::from_secs(9),
            is_interrupted: &idle,
        };
        assert_eq!((rest.max_units(StepKind::Rows), rest.is_over()), (64, false));
        rest.record(StepKind::Rows, 100, Duration::from_millis(10));
        assert_eq!(rest.max_units(StepKind::Rows), 500, "50 ms at 0.1 ms");
        rest.record(StepKind::Rows, 100, Duration::from_secs(10));
        assert_eq!(rest.max_units(StepKind::Rows), 200, "0.25 ms");
        rest.until = Instant::now();
        assert_eq!((rest.max_units(StepKind::Rows), rest.is_over()), (0, true));
        let (until, is_interrupted) = (Instant::now() + Duration::from_secs(9), || true);
        let mut interrupted = TimeBudget { pace: &mut pace, until, is_interrupted: &is_interrupted };
        assert_eq!(interrupted.max_units(StepKind::Rows), 0);
    }
}
