//! When a remote group sleeps while its main function runs: the pure step, for a launcher of processes and for the operator.
//!
//! A group is asked for when requests use its experts, wherever they are computed: main functions count that. Where the group
//! sleeps they load the experts themselves, so that sleep changes how long an answer takes and never what it says. A group that
//! was not asked for in its window sleeps, and one that is asked for wakes. One that is asked for again before its sleep was
//! worth the wake stays awake for twice as long the next time: who asks every now and then has it wake a few times, and then
//! finds it awake.

use std::time::Duration;

/// By how much the window of a group grows that is woken again and again, at most.
pub const MOST_STRETCH: u32 = 16;

/// A sleep was worth its wake if it was so many times as long as the group had waited for it.
const WORTH: u32 = 4;

/// A remote group. Times are since any moment that stays the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SleepingGroup {
    /// Functions are to run.
    pub awake: bool,
    /// When it fell asleep or woke up.
    pub since: Duration,
    /// When its experts were last used; none: not since it woke up.
    pub asked: Option<Duration>,
    /// So many windows pass without use before it sleeps, 1 to [`MOST_STRETCH`].
    pub stretch: u32,
    /// It was awake for a whole window without use: it wakes for requests that use it, and no more for predictions.
    pub doubted: bool,
}

/// Observations of a group since the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupObservation {
    /// Experts of it were used.
    pub asked: bool,
    /// Requests that are there are expected to use them.
    pub predicted: bool,
    /// It is awake, and none of its functions is there yet: its window begins when one is.
    pub starting: bool,
}

impl SleepingGroup {
    /// One whose functions run from `now` on, or do not.
    #[must_use]
    pub fn new(awake: bool, now: Duration) -> Self {
        Self { awake, since: now, asked: None, stretch: 1, doubted: false }
    }

    /// How long it stays awake unused, where that is `window` for one that is seldom woken.
    #[must_use]
    pub fn patience(&self, window: Duration) -> Duration {
        window.saturating_mul(self.stretch.clamp(1, MOST_STRETCH))
    }

    /// State at `now`, after the observations. Between two wakes there is a `window` at least.
    #[must_use]
    pub fn step(self, window: Duration, seen: GroupObservation, now: Duration) -> Self {
        let asked = if seen.asked { Some(now) } else { self.asked };
        let patience = self.patience(window);
        let rested = now.saturating_sub(self.since);
        if !self.awake {
            if !(seen.asked || seen.predicted && !self.doubted) {
                return self;
            }
            let was_worth = rested >= patience.saturating_mul(WORTH);
            let stretch = if was_worth { self.stretch / 2 } else { self.stretch.saturating_mul(2) };
            let stretch = stretch.clamp(1, MOST_STRETCH);
            return Self { awake: true, since: now, asked, stretch, doubted: false };
        }
        if seen.starting {
            return Self { asked, since: now, ..self };
        }
        let used = asked.map_or(self.since, |asked| asked.max(self.since));
        if now.saturating_sub(used) < patience {
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
        /// Whatever is seen when: who asks finds it awake or wakes it, what was used within the window does not sleep, what
        /// without use does, and wakes have a window between them.
        #[test]
        fn a_group_is_there_for_those_who_ask(looks in proptest::collection::vec((1_u64..90, any::<bool>(), any::<bool>()), 1..400)) {
            let mut group = SleepingGroup::new(true, at(0));
            let (mut now, mut used, mut woken) = (at(0), at(0), None);
            for (passed, asked, predicted) in looks {
                // Most looks see nothing.
                let seen = GroupObservation {
                    asked: asked && passed % 7 == 0,
                    predicted: predicted && passed % 5 == 0,
                    starting: group.awake && passed % 11 == 0,
                };
                now += at(passed);
                let next = group.step(WINDOW, seen, now);
                if seen.asked {
                    used = now;
                    prop_assert!(next.awake);
                }
                if group.awake && now - used.max(group.since) < WINDOW {
                    prop_assert!(next.awake, "asleep {:?} after it was used", now - used);
                }
                if now - used.max(next.since) >= WINDOW * MOST_STRETCH {
                    prop_assert!(!next.awake);
                }
                if !group.awake && next.awake {
                    prop_assert!(seen.asked || seen.predicted);
                    prop_assert!(woken.is_none_or(|before| now - before >= WINDOW), "wakes follow each other");
                    woken = Some(now);
                }
                prop_assert!((1..=MOST_STRETCH).contains(&next.stretch));
                group = next;
            }
        }

        /// Repeated requests have it woken a few times at most, however that falls together with the window, unless
        /// it sleeps most of the time.
        #[test]
        fn it_does_not_flap(period in 1_u64..3000) {
            let mut group = SleepingGroup::new(true, at(0));
            let mut wakes = 0;
            for ms in (0..300 * period).step_by(5) {
                let seen = if ms % period < 5 { ASKED } else { NOTHING };
                let next = group.step(WINDOW, seen, at(ms));
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
    fn who_comes_seldom_pays_for_a_window_each_time() {
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
    fn what_starts_slowly_is_not_given_up() {
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
    fn a_prediction_that_did_not_come_true_is_not_believed_again() {
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
        assert!(group.step(WINDOW, PREDICTED, at(9001)).awake, "it was used the last time");
    }
}
