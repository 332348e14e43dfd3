//! Scale to zero of remote groups while their main function runs: the pure step, for `remoe up` and for the operator.
//!
//! Main functions count how often requests use the experts of a group. While the group sleeps, they load and compute
//! those experts themselves, so that sleep changes the time of an answer and never its content. A group sleeps after
//! a window without use, and wakes when it is used. If a sleep was too short to be worth the wake, the next window is
//! twice as long. So a group with frequent, spaced requests wakes a few times and then stays awake.

use std::time::Duration;

/// Largest factor by which repeated wakes extend a group's window.
pub const MAX_STRETCH: u32 = 16;

/// Factor of the window that a sleep must last to be worth its wake.
const WORTHWHILE_FACTOR: u32 = 4;

/// State of a remote group. Times are since any fixed moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SleepingGroup {
    /// Set if the group's functions are to run.
    pub awake: bool,
    /// Time when the group fell asleep or woke.
    pub since: Duration,
    /// Time when its experts were last used; `None`: not since it woke.
    pub asked: Option<Duration>,
    /// Number of windows without use before the group sleeps, 1 to [`MAX_STRETCH`].
    pub stretch: u32,
    /// Set if a prediction woke the group and it was not used. Then only use wakes it, not another prediction.
    pub doubted: bool,
}

/// Observations of a group since the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupObservation {
    /// Set if experts of the group were used.
    pub asked: bool,
    /// Set if present requests are predicted to use them.
    pub predicted: bool,
    /// Set if the group is awake and none of its functions serves yet. The window begins when one does.
    pub starting: bool,
}

impl SleepingGroup {
    /// Makes the state of a group that is `awake` or asleep from `now` on.
    #[must_use]
    pub fn new(awake: bool, now: Duration) -> Self {
        Self { awake, since: now, asked: None, stretch: 1, doubted: false }
    }

    /// Returns the time after which the group sleeps unused: `window` times its stretch.
    #[must_use]
    pub fn idle_window(&self, window: Duration) -> Duration {
        window.saturating_mul(self.stretch.clamp(1, MAX_STRETCH))
    }

    /// Returns the state at `now`, after the `observation`. Two wakes are at least `window` apart.
    #[must_use]
    pub fn step(self, window: Duration, observation: GroupObservation, now: Duration) -> Self {
        let asked = if observation.asked { Some(now) } else { self.asked };
        let idle_window = self.idle_window(window);
        let time_in_state = now.saturating_sub(self.since);
        if !self.awake {
            if !(observation.asked || observation.predicted && !self.doubted) {
                return self;
            }
            let was_sleep_worth_it = time_in_state >= idle_window.saturating_mul(WORTHWHILE_FACTOR);
            let stretch = if was_sleep_worth_it { self.stretch / 2 } else { self.stretch.saturating_mul(2) };
            let stretch = stretch.clamp(1, MAX_STRETCH);
            return Self { awake: true, since: now, asked, stretch, doubted: false };
        }
        if observation.starting {
            return Self { asked, since: now, ..self };
        }
        let used = asked.map_or(self.since, |asked| asked.max(self.since));
        if now.saturating_sub(used) < idle_window {
            return Self { asked, ..self };
        }
        Self { awake: false, since: now, asked: None, stretch: self.stretch, doubted: asked.is_none() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WINDOW: Duration = Duration::from_millis(100);
    const ASKED: GroupObservation = GroupObservation { asked: true, predicted: false, starting: false };
    const PREDICTED: GroupObservation = GroupObservation { asked: false, predicted: true, starting: false };
    const NOTHING: GroupObservation = GroupObservation { asked: false, predicted: false, starting: false };

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    proptest! {
        /// For any sequence of observations: use wakes the group, a group that was used within the window stays
        /// awake, an unused one sleeps, and wakes are at least a window apart.
        #[test]
        fn group_is_awake_when_used_and_sleeps_when_unused(observations in proptest::collection::vec((1_u64..90, any::<bool>(), any::<bool>()), 1..400)) {
            let mut group = SleepingGroup::new(true, at(0));
            let (mut now, mut used, mut woken) = (at(0), at(0), None);
            for (passed, asked, predicted) in observations {
                // Most observations are empty.
                let observation = GroupObservation {
                    asked: asked && passed % 7 == 0,
                    predicted: predicted && passed % 5 == 0,
                    starting: group.awake && passed % 11 == 0,
                };
                now += at(passed);
                let next = group.step(WINDOW, observation, now);
                if observation.asked {
                    used = now;
                    prop_assert!(next.awake);
                }
                if group.awake && now - used.max(group.since) < WINDOW {
                    prop_assert!(next.awake, "asleep {:?} after it was used", now - used);
                }
                if now - used.max(next.since) >= WINDOW * MAX_STRETCH {
                    prop_assert!(!next.awake);
                }
                if !group.awake && next.awake {
                    prop_assert!(observation.asked || observation.predicted);
                    prop_assert!(woken.is_none_or(|before| now - before >= WINDOW), "wakes follow each other");
                    woken = Some(now);
                }
                prop_assert!((1..=MAX_STRETCH).contains(&next.stretch));
                group = next;
            }
        }

        /// Periodic use wakes the group a few times at most, whatever the period is, unless the group sleeps most of
        /// the time.
        #[test]
        fn group_does_not_flap(period in 1_u64..3000) {
            let mut group = SleepingGroup::new(true, at(0));
            let mut wakes = 0;
            for ms in (0..300 * period).step_by(5) {
                let observation = if ms % period < 5 { ASKED } else { NOTHING };
                let next = group.step(WINDOW, observation, at(ms));
                wakes += u32::from(!group.awake && next.awake);
                group = next;
            }
            if period < 480 {
                prop_assert!(wakes <= 4, "{wakes} wakes");
            } else {
                prop_assert!(wakes <= 300, "{wakes} wakes for 300 that asked");
            }
        }
    }

    #[test]
    fn rare_use_does_not_extend_the_window() {
        let mut group = SleepingGroup::new(true, at(0));
        for round in 1..20 {
            let now = at(round * 10_000);
            group = group.step(WINDOW, NOTHING, now);
            assert!(!group.awake);
            group = group.step(WINDOW, ASKED, now + at(5_000));
            assert_eq!((group.awake, group.stretch), (true, 1));
        }
    }

    #[test]
    fn group_that_starts_slowly_stays_awake() {
        let starting = GroupObservation { starting: true, ..NOTHING };
        let mut group = SleepingGroup::new(false, at(0)).step(WINDOW, ASKED, at(1000));
        for ms in [1500, 2000, 2500] {
            group = group.step(WINDOW, starting, at(ms));
            assert!(group.awake);
        }
        assert!(group.step(WINDOW, NOTHING, at(2599)).awake);
        assert!(!group.step(WINDOW, NOTHING, at(2600)).awake);
    }

    #[test]
    fn wrong_prediction_wakes_the_group_only_once() {
        let mut group = SleepingGroup::new(false, at(0)).step(WINDOW, PREDICTED, at(50));
        assert!(group.awake);
        group = group.step(WINDOW, PREDICTED, at(1000));
        assert!(!group.awake && group.doubted, "no request came");
        group = group.step(WINDOW, PREDICTED, at(2000));
        assert!(!group.awake);
        group = group.step(WINDOW, ASKED, at(3000));
        assert!(group.awake && !group.doubted);
        group = group.step(WINDOW, ASKED, at(3001)).step(WINDOW, NOTHING, at(9000));
        assert!(!group.awake && !group.doubted);
        assert!(group.step(WINDOW, PREDICTED, at(9001)).awake, "the last wake was followed by use");
    }
}
