//! How long an iteration may take, and what fits into the rest of it. Pure but for the clock.
//!
//! Costs are measured, never assumed: seconds per unit of each kind of step, and of the decode iterations between which
//! the steps go.

use crate::transformer::{StepBudget, StepKind};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// A step is no longer than this, so that what arrives is noticed.
const LONGEST_STEP: Duration = Duration::from_millis(50);
/// A step that sends messages may take so long: remote functions read their experts again for every message.
const LONGEST_EXCHANGE: Duration = Duration::from_millis(250);
/// The weight of the newest measurement of a step.
const NEWEST: f64 = 0.5;
/// A measurement counts as at most so many times the one before it: a machine that was busy with something else says
/// little about the next step.
const MOST_GROWTH: f64 = 4.0;
/// Decode iterations whose median counts.
const REMEMBERED: usize = 31;
/// Without a target, running streams may slow down to so many times what they take alone.
const DEFAULT_SLOWDOWN: f64 = 3.0;
/// Change of the planned part of the target after a gap above it, and after one below it: 1 in 50 gaps is above it
/// then.
const STEP_DOWN: f64 = 0.02;
const STEP_UP: f64 = STEP_DOWN / 49.0;
/// The least part of a target that is planned for.
const LEAST_PART: f64 = 0.6;
/// A prompt gets at least this part of a decode iteration's time, however short the target.
const LEAST_SHARE: f64 = 0.1;

/// The measured costs.
#[derive(Debug)]
pub(super) struct PrefillPace {
    /// Seconds per unit.
    steps: BTreeMap<StepKind, f64>,
    /// Seconds of the latest decode iterations.
    decode: VecDeque<f64>,
    /// Which part of the target is planned for: steps and iterations take longer than expected at times.
    part: f64,
    /// When the last decode iteration ended, if prompts went on since.
    last_token: Option<Instant>,
}

impl Default for PrefillPace {
    fn default() -> Self {
        Self { steps: BTreeMap::new(), decode: VecDeque::new(), part: 1.0, last_token: None }
    }
}

impl PrefillPace {
    /// A decode iteration took from `started` to `ended`; `target` is the inter-token latency that is aimed at.
    pub(super) fn decoded(&mut self, started: Instant, ended: Instant, target: Option<Duration>) {
        let target = self.target(target);
        self.decode.push_back((ended - started).as_secs_f64());
        if self.decode.len() > REMEMBERED {
            self.decode.pop_front();
        }
        if let (Some(before), Some(target)) = (self.last_token.take(), target) {
            let above = ended - before > target;
            let change = if above { -STEP_DOWN } else { STEP_UP };
            self.part = (self.part + change).clamp(LEAST_PART, 1.0);
        }
    }

    /// The inter-token latency that is aimed at: `target`, else some times what iterations take alone. None before
    /// there was one.
    fn target(&self, target: Option<Duration>) -> Option<Duration> {
        target.or_else(|| Some(Duration::from_secs_f64(self.median()? * DEFAULT_SLOWDOWN)))
    }

    /// Seconds of a decode iteration.
    fn median(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.decode.iter().copied().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }

    /// How long prompts may go on `now`, right after a decode iteration, until the next one.
    pub(super) fn between_tokens(&mut self, now: Instant, target: Option<Duration>) -> Duration {
        self.last_token = Some(now);
        let (Some(target), Some(decode)) = (self.target(target), self.median()) else {
            return LONGEST_STEP;
        };
        let left = target.as_secs_f64() * self.part - decode;
        Duration::from_secs_f64(left.max(decode * LEAST_SHARE))
    }
}

/// The time that is left of an iteration.
pub(super) struct TimeBudget<'a> {
    pub(super) pace: &'a mut PrefillPace,
    pub(super) until: Instant,
    /// True once a request or a placement has arrived that is to be looked at before the next step.
    pub(super) interrupted: &'a dyn Fn() -> bool,
}

/// Units of a step whose cost has not been measured. Messages are not divided before it is.
fn unmeasured(kind: StepKind) -> u64 {
    match kind {
        StepKind::Attention => 1 << 16,
        StepKind::Rows | StepKind::Sum => 64,
        StepKind::RemoteExperts => u64::MAX,
    }
}

impl StepBudget for TimeBudget<'_> {
    fn units(&mut self, kind: StepKind) -> u64 {
        if self.is_over() {
            return 0;
        }
        let left = self.until.saturating_duration_since(Instant::now());
        let longest = if kind == StepKind::RemoteExperts { LONGEST_EXCHANGE } else { LONGEST_STEP };
        match self.pace.steps.get(&kind) {
            Some(&cost) => (left.min(longest).as_secs_f64() / cost) as u64,
            None => unmeasured(kind),
        }
    }

    fn is_over(&mut self) -> bool {
        Instant::now() >= self.until || (self.interrupted)()
    }

    fn took(&mut self, kind: StepKind, units: u64, time: Duration) {
        if units == 0 {
            return;
        }
        // The clock may stand still for a step.
        let new = time.as_secs_f64().max(1e-9) / units as f64;
        let cost = self.pace.steps.entry(kind).or_insert(new);
        *cost += NEWEST * (new.min(*cost * MOST_GROWTH) - *cost);
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
    fn prompts_get_what_the_target_leaves() {
        let (mut pace, start) = (PrefillPace::default(), Instant::now());
        assert_eq!(pace.between_tokens(start, None), LONGEST_STEP, "nothing is known yet");
        let mut pace_of = |target: Option<u64>| {
            for token in 0..40 {
                pace.decoded(
                    at(start, token * 20),
                    at(start, token * 20 + 20),
                    target.map(Duration::from_millis),
                );
            }
            pace.between_tokens(start, target.map(Duration::from_millis)).as_millis()
        };
        assert_eq!(pace_of(None), 40, "three times 20 ms");
        assert_eq!(pace_of(Some(48)), 28);
        assert_eq!(pace_of(Some(5)), 2, "a prompt never stops");
    }

    /// Gaps that are longer than planned by a random amount: about one in fifty is above the target.
    #[test]
    fn the_planned_part_of_the_target_follows_what_gaps_are() {
        let (mut pace, target) = (PrefillPace::default(), Duration::from_millis(50));
        let (mut now, mut above, mut random) = (Instant::now(), 0, 1_u64);
        for token in 0..20_000 {
            let rest = pace.between_tokens(now, Some(target));
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let longer = Duration::from_micros((random >> 40) % 8_000);
            let (started, before) = (now + rest, now);
            now = started + Duration::from_millis(16) + longer;
            pace.decoded(started, now, Some(target));
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
            interrupted: &idle,
        };
        assert_eq!((rest.units(StepKind::Rows), rest.is_over()), (64, false));
        rest.took(StepKind::Rows, 100, Duration::from_millis(10));
        assert_eq!(rest.units(StepKind::Rows), 500, "50 ms at 0.1 ms");
        rest.took(StepKind::Rows, 100, Duration::from_secs(10));
        assert_eq!(rest.units(StepKind::Rows), 200, "0.25 ms");
        rest.until = Instant::now();
        assert_eq!((rest.units(StepKind::Rows), rest.is_over()), (0, true));
        let (until, called) = (Instant::now() + Duration::from_secs(9), || true);
        assert_eq!(TimeBudget { pace: &mut pace, until, interrupted: &called }.units(StepKind::Rows), 0);
    }
}
