//! Time to first token of a cold start, in parts that follow each other without a gap. Pure.

use std::fmt;
use std::time::{Duration, Instant};

/// Times of the latest start of a model's functions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WakeMarks {
    /// The first process was started.
    pub started: Option<Instant>,
    /// All of them listened.
    pub listening: Option<Instant>,
    /// The placement was in force.
    pub serving: Option<Instant>,
}

/// Time to first token of the first request that was answered after a wake, in parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColdStart {
    /// Time at which the wake was decided. It identifies the wake.
    decided_at: Instant,
    /// Consecutive parts: decide, schedule, start, load, ready and first.
    pub parts: [Duration; 6],
}

impl ColdStart {
    /// Makes the cold start of a request: a wake decided at `decided_at`, the parts of `timeline` until a main
    /// function got the request, and `first_token_seconds` until its first token.
    pub(crate) fn new(decided_at: Instant, timeline: &RequestTimeline, first_token_seconds: f64) -> Self {
        let before = timeline.parts().map(|(_, start, end)| end.saturating_duration_since(start));
        let first = Duration::try_from_secs_f64(first_token_seconds).unwrap_or_default();
        let mut parts = [Duration::ZERO; 6];
        parts.iter_mut().zip(before.chain([first])).for_each(|(part, time)| *part = time);
        Self { decided_at, parts }
    }

    /// Returns the time at which the wake was decided.
    pub(crate) fn decided_at(&self) -> Instant {
        self.decided_at
    }

    /// Returns the parts with their names.
    pub(crate) fn named_parts(&self) -> [(&'static str, Duration); 6] {
        let [decide, schedule, start, load, ready] = RequestTimeline::NAMES;
        let names = [decide, schedule, start, load, ready, "first"];
        std::array::from_fn(|part| (names[part], self.parts[part]))
    }

    /// Reports if this belongs to a later wake than `other`.
    pub(crate) fn is_of_a_later_wake(&self, other: &Self) -> bool {
        self.decided_at > other.decided_at
    }
}

/// Parts of a request's time until a main function gets it. They follow each other without a gap.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestTimeline {
    arrived: Instant,
    /// End of each part, in the order of [`Self::NAMES`].
    ends: [Instant; 5],
}

impl RequestTimeline {
    /// Names of the parts, in order.
    pub(crate) const NAMES: [&str; 5] = ["decide", "schedule", "start", "load", "ready"];

    /// Divides the time from `arrived` to `released`. `decided_at` is the time at which the wake was decided; `None`:
    /// the model was awake.
    pub(crate) fn new(
        arrived: Instant,
        decided_at: Option<Instant>,
        wake: &WakeMarks,
        released: Instant,
    ) -> Self {
        let Some(decided_at) = decided_at else { return Self { arrived, ends: [released; 5] } };
        let marks = [Some(decided_at), wake.started, wake.listening, wake.serving, Some(released)];
        let mut previous_end = arrived;
        let ends = marks.map(|mark| {
            // A request that arrived during a wake has not waited for the parts before: they are empty.
            previous_end = mark.unwrap_or(previous_end).max(previous_end).min(released);
            previous_end
        });
        Self { arrived, ends }
    }

    /// Returns the name, start and end of each part.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&'static str, Instant, Instant)> {
        let starts = std::iter::once(self.arrived).chain(self.ends);
        Self::NAMES.into_iter().zip(starts).zip(self.ends).map(|((name, start), end)| (name, start, end))
    }
}

impl fmt::Display for RequestTimeline {
    /// Writes a `Server-Timing` value in milliseconds: `decide;dur=0.1, schedule;dur=0, start;dur=0, load;dur=0,
    /// ready;dur=0`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (name, start, end)) in self.parts().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            let milliseconds = end.saturating_duration_since(start).as_secs_f64() * 1e3;
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
    fn warm_request_has_only_a_queue_part() {
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
        /// For any arrival time during a wake and any known marks, no part is negative, and all parts add up to the
        /// waiting time.
        #[test]
        fn parts_add_up(arrived in 0_u64..2000, marks in proptest::array::uniform4(proptest::option::of(0_u64..2000)), wait in 0_u64..2000) {
            let start = Instant::now();
            let at = |ms| start + Duration::from_millis(ms);
            let released = at(arrived + wait);
            let wake = WakeMarks { started: marks[1].map(at), listening: marks[2].map(at), serving: marks[3].map(at) };
            let timeline = RequestTimeline::new(at(arrived), marks[0].map(at), &wake, released);
            let each: Vec<_> = timeline.parts().collect();
            prop_assert_eq!((each[0].1, each[4].2), (at(arrived), released));
            prop_assert!(each.iter().all(|(_, from, end)| from <= end));
            prop_assert!(each.is_sorted_by(|one, next| one.2 == next.1), "{:?}", each);
            let parts = durations(&timeline.to_string());
            prop_assert!(parts.iter().all(|part| *part >= 0.0), "{parts:?}");
            prop_assert!((parts.iter().sum::<f64>() - wait as f64).abs() < 0.01, "{parts:?}");
        }
    }
}
