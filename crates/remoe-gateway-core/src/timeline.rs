//! Time to first token of a cold start, in parts that follow each other without a gap. Pure.

use std::fmt;
use std::time::{Duration, Instant};

/// When the functions of a model reached what on their latest start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WakeMarks {
    /// The first process was started.
    pub started: Option<Instant>,
    /// All of them listened.
    pub listening: Option<Instant>,
    /// The placement was in force.
    pub serving: Option<Instant>,
}

/// Where the time to the first token went of the first request that was answered after a wake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColdStart {
    /// When the wake was decided: no other one of the model has the same.
    decided: Instant,
    /// Consecutive parts: decide, schedule, start, load, ready and first.
    pub parts: [Duration; 6],
}

impl ColdStart {
    /// Makes the timeline of a request that a main function got after `parts`, in a wake that was decided at `decided`,
    /// and whose first token came `first` seconds later.
    pub(crate) fn new(decided: Instant, parts: &RequestTimeline, first: f64) -> Self {
        let before = parts.each().map(|(_, from, until)| until.saturating_duration_since(from));
        let first = Duration::try_from_secs_f64(first).unwrap_or_default();
        let mut all = [Duration::ZERO; 6];
        all.iter_mut().zip(before.chain([first])).for_each(|(part, time)| *part = time);
        Self { decided, parts: all }
    }

    /// When the wake was decided.
    pub(crate) fn decided(&self) -> Instant {
        self.decided
    }

    /// Returns the parts with their names.
    pub(crate) fn named(&self) -> [(&'static str, Duration); 6] {
        let [decide, schedule, start, load, ready] = RequestTimeline::NAMES;
        let names = [decide, schedule, start, load, ready, "first"];
        std::array::from_fn(|part| (names[part], self.parts[part]))
    }

    /// Reports if this is of a later wake than `other`.
    pub(crate) fn is_of_a_later_wake(&self, other: &Self) -> bool {
        self.decided > other.decided
    }
}

/// The parts of a request's time until a main function has it. They add up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestTimeline {
    arrived: Instant,
    /// When each of them was over, in their order.
    ends: [Instant; 5],
}

impl RequestTimeline {
    /// Their names, in their order.
    pub(crate) const NAMES: [&str; 5] = ["decide", "schedule", "start", "load", "ready"];

    /// The parts of the time from `arrived` to `released`. The wake was decided at `decided`, or none was needed.
    pub(crate) fn new(
        arrived: Instant,
        decided: Option<Instant>,
        wake: &WakeMarks,
        released: Instant,
    ) -> Self {
        let Some(decided) = decided else { return Self { arrived, ends: [released; 5] } };
        let known = [Some(decided), wake.started, wake.listening, wake.serving, Some(released)];
        let mut last = arrived;
        let ends = known.map(|mark| {
            // A request that came in the middle of a wake has not waited for the parts before.
            last = mark.unwrap_or(last).max(last).min(released);
            last
        });
        Self { arrived, ends }
    }

    /// Each part with its beginning and its end.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&'static str, Instant, Instant)> {
        let prefix_index = std::iter::once(self.arrived).chain(self.ends);
        Self::NAMES.into_iter().zip(prefix_index).zip(self.ends).map(|((name, from), end)| (name, from, end))
    }
}

impl fmt::Display for RequestTimeline {
    /// In milliseconds: `decide;dur=0.1, schedule;dur=0, start;dur=0, load;dur=0, ready;dur=0`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (name, from, end)) in self.each().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            let milliseconds = end.saturating_duration_since(from).as_secs_f64() * 1e3;
            write!(formatter, "{separator}{name};dur={milliseconds:.3}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn durations(text: &str) -> Vec<f64> {
        text.split(", ").map(|part| part.split_once(";dur=").unwrap().1.parse().unwrap()).collect()
    }

    #[test]
    fn a_warm_request_has_only_waited() {
        let start = Instant::now();
        let parts =
            RequestTimeline::new(start, None, &WakeMarks::default(), start + Duration::from_millis(3));
        let text = parts.to_string();
        assert_eq!(
            text,
            "decide;dur=3.000, schedule;dur=0.000, start;dur=0.000, load;dur=0.000, ready;dur=0.000"
        );
    }

    proptest! {
        /// Whenever a request comes during a wake, and whatever is known of it, the parts are not
        /// negative and add up.
        #[test]
        fn the_parts_add_up(arrived in 0_u64..2000, marks in proptest::array::uniform4(proptest::option::of(0_u64..2000)), wait in 0_u64..2000) {
            let start = Instant::now();
            let at = |ms| start + Duration::from_millis(ms);
            let released = at(arrived + wait);
            let wake = WakeMarks { started: marks[1].map(at), listening: marks[2].map(at), serving: marks[3].map(at) };
            let parts = RequestTimeline::new(at(arrived), marks[0].map(at), &wake, released);
            let each: Vec<_> = parts.each().collect();
            prop_assert_eq!((each[0].1, each[4].2), (at(arrived), released));
            prop_assert!(each.iter().all(|(_, from, end)| from <= end));
            prop_assert!(each.is_sorted_by(|one, next| one.2 == next.1), "{:?}", each);
            let parts = durations(&parts.to_string());
            prop_assert!(parts.iter().all(|part| *part >= 0.0), "{parts:?}");
            prop_assert!((parts.iter().sum::<f64>() - wait as f64).abs() < 0.01, "{parts:?}");
        }
    }
}
