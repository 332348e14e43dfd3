//! Scale to zero: the pure step of a model's phase, for `remoe up` and for the operator.
//!
//! Level-based: the next phase depends on the present phase and the present state, never on the last event. A model
//! is awake while a request waits or runs, or while the idle window is open. Before it scales to zero, new requests
//! are held and the engine is asked whether it still has requests. A request that arrives meanwhile is served by the
//! same processes. Remote groups may scale to zero earlier, one by one ([`groups`]).

pub mod groups;

use serde::Serialize;
use std::time::Duration;

/// Phase of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ScalingPhase {
    /// Functions run and serve requests.
    Active,
    /// Functions run, new requests are held, and the engine is asked whether it is idle.
    Draining,
    /// No function runs.
    Asleep,
    /// Functions are being started.
    Waking,
}

/// Inputs of a step.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs {
    /// Number of waiting requests.
    pub waiting: usize,
    /// Number of requests that functions work on.
    pub in_flight: usize,
    /// Time since a request last arrived or ended, or the model woke.
    pub quiet: Duration,
    /// Idle window after which the model sleeps; `None`: never.
    pub idle: Option<Duration>,
    /// Time for which a wake continues after the last waiting client has disconnected.
    pub wake_limit: Duration,
    /// Set if functions that were started for the present phase serve.
    pub serving: bool,
    /// Requests that the engine reports since draining began; `None`: not reported yet.
    pub engine: Option<u32>,
}

/// Returns the phase that follows `phase`.
#[must_use]
pub fn step(phase: ScalingPhase, inputs: &StepInputs) -> ScalingPhase {
    let has_requests = inputs.waiting > 0 || inputs.in_flight > 0;
    let is_window_open = |minimum: Duration| inputs.idle.is_none_or(|idle| inputs.quiet < idle.max(minimum));
    let needed = has_requests || is_window_open(Duration::ZERO);
    match phase {
        ScalingPhase::Active if needed => ScalingPhase::Active,
        ScalingPhase::Active => ScalingPhase::Draining,
        ScalingPhase::Draining if needed || inputs.engine.is_some_and(|running| running > 0) => {
            ScalingPhase::Active
        }
        ScalingPhase::Draining if inputs.engine == Some(0) => ScalingPhase::Asleep,
        ScalingPhase::Draining => ScalingPhase::Draining,
        ScalingPhase::Asleep if needed => ScalingPhase::Waking,
        ScalingPhase::Asleep => ScalingPhase::Asleep,
        ScalingPhase::Waking if inputs.serving => ScalingPhase::Active,
        // A wake continues after its client has disconnected, so that a retry need not start over.
        ScalingPhase::Waking if has_requests || is_window_open(inputs.wake_limit) => ScalingPhase::Waking,
        ScalingPhase::Waking => ScalingPhase::Asleep,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const IDLE: u64 = 50;
    const WAKE_LIMIT: u64 = 400;

    /// Simulated model with clients and functions that come, go and fail. Times are in milliseconds.
    #[derive(Debug)]
    struct ScalingWorld {
        phase: ScalingPhase,
        now: u64,
        last_active: u64,
        waiting: usize,
        in_flight: usize,
        engine: Option<u32>,
        /// Time at which the functions serve; `None`: none run.
        ready_at: Option<u64>,
        wakes: usize,
        demands: usize,
    }

    impl ScalingWorld {
        fn serving(&self) -> bool {
            self.ready_at.is_some_and(|at| at <= self.now)
        }

        fn settle(&mut self) {
            loop {
                let inputs = StepInputs {
                    waiting: self.waiting,
                    in_flight: self.in_flight,
                    quiet: Duration::from_millis(self.now - self.last_active),
                    idle: Some(Duration::from_millis(IDLE)),
                    wake_limit: Duration::from_millis(WAKE_LIMIT),
                    serving: self.serving(),
                    engine: self.engine,
                };
                let next = step(self.phase, &inputs);
                if next == self.phase {
                    break;
                }
                match next {
                    ScalingPhase::Draining => {
                        assert_eq!((self.waiting, self.in_flight), (0, 0));
                        self.engine = None;
                    }
                    ScalingPhase::Asleep => {
                        assert_eq!((self.waiting, self.in_flight), (0, 0), "stopped with work at hand");
                        self.ready_at = None;
                    }
                    ScalingPhase::Waking => {
                        assert!(self.waiting > 0, "woken without a request");
                        self.wakes += 1;
                        self.ready_at = Some(self.now + 120);
                    }
                    ScalingPhase::Active => self.last_active = self.now,
                }
                self.phase = next;
            }
            if self.phase == ScalingPhase::Active && self.serving() {
                self.in_flight += std::mem::take(&mut self.waiting);
            }
        }
    }

    proptest! {
        /// For any sequence of arrivals, disconnects and failures: functions with requests never stop, a model never
        /// wakes without a request, and in the end every request was served and the model sleeps.
        #[test]
        fn no_request_is_lost_or_waits_for_ever(moves in proptest::collection::vec((0_u8..8, 0_u64..90), 1..300)) {
            let mut world = ScalingWorld {
                phase: ScalingPhase::Asleep, now: 1000, last_active: 0, waiting: 0, in_flight: 0, engine: None,
                ready_at: None, wakes: 0, demands: 0,
            };
            let (mut arrivals, mut disconnects, mut served) = (0, 0, 0);
            for (kind, time) in moves {
                match kind {
                    0 | 1 => {
                        arrivals += 1;
                        world.demands += usize::from(world.waiting + world.in_flight == 0);
                        world.waiting += 1;
                        world.last_active = world.now;
                    }
                    2 if world.waiting > 0 => {
                        world.waiting -= 1;
                        disconnects += 1;
                    }
                    3 if world.in_flight > 0 => {
                        world.in_flight -= 1;
                        served += 1;
                        world.last_active = world.now;
                    }
                    // Functions fail: their requests are retried, and the functions start again.
                    4 if world.ready_at.is_some() => {
                        world.waiting += std::mem::take(&mut world.in_flight);
                        world.ready_at = Some(world.now + 120);
                    }
                    5 if world.phase == ScalingPhase::Draining => world.engine = Some(u32::from(time < 20)),
                    _ => world.now += time,
                }
                world.settle();
            }
            for _ in 0..20 {
                served += std::mem::take(&mut world.in_flight);
                world.now += 60;
                world.engine = (world.phase == ScalingPhase::Draining).then_some(0);
                world.settle();
            }
            prop_assert_eq!(arrivals, disconnects + served, "{:?}", world);
            prop_assert_eq!(world.phase, ScalingPhase::Asleep);
            prop_assert!(world.wakes <= world.demands, "{:?}", world);
        }
    }

    #[test]
    fn model_without_idle_window_never_sleeps() {
        let inputs = StepInputs {
            waiting: 0,
            in_flight: 0,
            quiet: Duration::MAX,
            idle: None,
            wake_limit: Duration::ZERO,
            serving: true,
            engine: Some(0),
        };
        assert_eq!(step(ScalingPhase::Active, &inputs), ScalingPhase::Active);
    }
}
