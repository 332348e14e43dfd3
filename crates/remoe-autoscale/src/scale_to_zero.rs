//! Scale to zero: the pure step of a model's phase, for a gateway that keeps functions itself and for the operator.
//!
//! Level-based: the next phase depends on the present one and on what is there now, never on which event came last. A model
//! is awake while a request waits or runs, or the idle window is open. Before it scales to zero new requests are held and
//! the engine is asked once more if it runs anything: a request that comes by then is served by the same processes. Remote
//! groups may scale to zero before that, one by one ([`groups`]).

pub mod groups;

use serde::Serialize;
use std::time::Duration;

/// Where a model is between awake and asleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ScalingPhase {
    /// Requests go to its functions as these have room.
    Active,
    /// Functions run, new requests are held, and the engine is asked if it is idle.
    Draining,
    /// Nothing is to run.
    Asleep,
    /// Functions start.
    Waking,
}

/// Inputs of a step.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs {
    /// Requests that are held.
    pub waiting: usize,
    /// Requests that functions work on.
    pub in_flight: usize,
    /// Time since a request last came or ended, or the model woke up.
    pub quiet: Duration,
    /// Without requests for so long it sleeps; `None`: never.
    pub idle: Option<Duration>,
    /// Time that a wake may go on after the last waiting client left.
    pub wake_limit: Duration,
    /// Functions that were started for the present phase answer.
    pub serving: bool,
    /// Requests that the engine says it has, asked since the drain began; `None`: no answer yet.
    pub engine: Option<u32>,
}

/// The phase that follows `phase`.
#[must_use]
pub fn step(phase: ScalingPhase, seen: &StepInputs) -> ScalingPhase {
    let busy = seen.waiting > 0 || seen.in_flight > 0;
    let open = |least: Duration| seen.idle.is_none_or(|idle| seen.quiet < idle.max(least));
    let needed = busy || open(Duration::ZERO);
    match phase {
        ScalingPhase::Active if needed => ScalingPhase::Active,
        ScalingPhase::Active => ScalingPhase::Draining,
        ScalingPhase::Draining if needed || seen.engine.is_some_and(|running| running > 0) => {
            ScalingPhase::Active
        }
        ScalingPhase::Draining if seen.engine == Some(0) => ScalingPhase::Asleep,
        ScalingPhase::Draining => ScalingPhase::Draining,
        ScalingPhase::Asleep if needed => ScalingPhase::Waking,
        ScalingPhase::Asleep => ScalingPhase::Asleep,
        ScalingPhase::Waking if seen.serving => ScalingPhase::Active,
        // A wake outlives the client that caused it, so that the next one need not begin again.
        ScalingPhase::Waking if busy || open(seen.wake_limit) => ScalingPhase::Waking,
        ScalingPhase::Waking => ScalingPhase::Asleep,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const IDLE: u64 = 50;
    const WAKE_LIMIT: u64 = 400;

    /// A model with clients and functions that come, go and die; times in milliseconds.
    #[derive(Debug)]
    struct ScalingWorld {
        phase: ScalingPhase,
        now: u64,
        last_active: u64,
        waiting: usize,
        in_flight: usize,
        engine: Option<u32>,
        /// When the functions will answer; `None`: none run.
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
                let seen = StepInputs {
                    waiting: self.waiting,
                    in_flight: self.in_flight,
                    quiet: Duration::from_millis(self.now - self.last_active),
                    idle: Some(Duration::from_millis(IDLE)),
                    wake_limit: Duration::from_millis(WAKE_LIMIT),
                    serving: self.serving(),
                    engine: self.engine,
                };
                let next = step(self.phase, &seen);
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
        /// Whenever clients come and leave and functions die: nothing stops with work at hand, nothing
        /// wakes without a request, and at the end every request was served and the model sleeps.
        #[test]
        fn no_request_is_lost_or_waits_for_ever(moves in proptest::collection::vec((0_u8..8, 0_u64..90), 1..300)) {
            let mut world = ScalingWorld {
                phase: ScalingPhase::Asleep, now: 1000, last_active: 0, waiting: 0, in_flight: 0, engine: None,
                ready_at: None, wakes: 0, demands: 0,
            };
            let (mut came, mut left, mut served) = (0, 0, 0);
            for (kind, time) in moves {
                match kind {
                    0 | 1 => {
                        came += 1;
                        world.demands += usize::from(world.waiting + world.in_flight == 0);
                        world.waiting += 1;
                        world.last_active = world.now;
                    }
                    2 if world.waiting > 0 => {
                        world.waiting -= 1;
                        left += 1;
                    }
                    3 if world.in_flight > 0 => {
                        world.in_flight -= 1;
                        served += 1;
                        world.last_active = world.now;
                    }
                    // Functions die: what they had is sent again, and they are started again.
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
            prop_assert_eq!(came, left + served, "{:?}", world);
            prop_assert_eq!(world.phase, ScalingPhase::Asleep);
            prop_assert!(world.wakes <= world.demands, "{:?}", world);
        }
    }

    #[test]
    fn without_a_window_a_model_never_sleeps() {
        let seen = StepInputs {
            waiting: 0,
            in_flight: 0,
            quiet: Duration::MAX,
            idle: None,
            wake_limit: Duration::ZERO,
            serving: true,
            engine: Some(0),
        };
        assert_eq!(step(ScalingPhase::Active, &seen), ScalingPhase::Active);
    }
}
