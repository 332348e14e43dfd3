//! Where the time to the first token went: parts that follow each other without a gap. Pure.

use std::time::Instant;

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

/// The parts of a request's time until a main function has it, in milliseconds:
/// `decide;dur=0.1, schedule;dur=0, start;dur=0, load;dur=0, ready;dur=0`. They add up to the time from
/// `arrived` to `released`. The wake was decided at `decided`, or none was needed.
pub(crate) fn parts(
    arrived: Instant,
    decided: Option<Instant>,
    wake: &WakeMarks,
    released: Instant,
) -> String {
    let Some(decided) = decided else {
        return render(arrived, &[released; 5]);
    };
    let known = [Some(decided), wake.started, wake.listening, wake.serving, Some(released)];
    let mut last = arrived;
    let ends = known.map(|mark| {
        // A request that came in the middle of a wake has not waited for the parts before.
        last = mark.unwrap_or(last).max(last).min(released);
        last
    });
    render(arrived, &ends)
}

fn render(arrived: Instant, ends: &[Instant; 5]) -> String {
    const NAMES: [&str; 5] = ["decide", "schedule", "start", "load", "ready"];
    let mut from = arrived;
    let parts = NAMES.iter().zip(ends).map(|(name, end)| {
        let milliseconds = end.saturating_duration_since(from).as_secs_f64() * 1e3;
        from = *end;
        format!("{name};dur={milliseconds:.3}")
    });
    parts.collect::<Vec<_>>().join(", ")
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
        let text = parts(start, None, &WakeMarks::default(), start + Duration::from_millis(3));
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
            let parts = durations(&parts(at(arrived), marks[0].map(at), &wake, released));
            prop_assert!(parts.iter().all(|part| *part >= 0.0), "{parts:?}");
            prop_assert!((parts.iter().sum::<f64>() - wait as f64).abs() < 0.01, "{parts:?}");
        }
    }
}
