//! How much of the time nodes are there when they may go between requests.

use crate::problem::Arrivals;

/// Share of time in which nodes are there, where each burst of requests keeps them for `seconds` and the idle
/// window behind it. 1 where nothing ends without requests.
pub(super) fn share(arrivals: &Arrivals, seconds: f64) -> f64 {
    let Some(idle) = arrivals.idle_seconds else { return 1.0 };
    let kept = seconds + idle;
    if let Some(times) = &arrivals.recorded_seconds {
        let (Some(first), Some(last)) = (times.first(), times.last()) else { return 0.0 };
        let alive: f64 = times.windows(2).map(|pair| (pair[1] - pair[0]).min(kept)).sum();
        return ((alive + kept) / (last - first + kept)).clamp(0.0, 1.0);
    }
    // Bursts come at random: the nodes are gone exactly while none has come for so long.
    1.0 - (-arrivals.per_second / arrivals.burst.max(1.0) * kept).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_arrivals_keep_nodes_as_simulated() {
        let arrivals =
            Arrivals { per_second: 0.02, burst: 2.0, recorded_seconds: None, idle_seconds: Some(50.0) };
        // Gaps between bursts by a fixed sequence of uniform numbers.
        let (mut state, mut alive, mut all) = (7_u64, 0.0, 0.0);
        for _ in 0..200_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let uniform = (state >> 11) as f64 / (1_u64 << 53) as f64;
            let gap = -(1.0 - uniform).ln() / 0.01;
            alive += f64::min(gap, 60.0);
            all += gap;
        }
        let (simulated, share) = (alive / all, share(&arrivals, 10.0));
        assert!((simulated / share - 1.0).abs() < 0.01, "{simulated} {share}");
    }

    #[test]
    fn recorded_arrivals_count_their_gaps() {
        let recorded = Some(vec![0.0, 10.0, 1000.0]);
        let arrivals =
            Arrivals { per_second: 1.0, burst: 1.0, recorded_seconds: recorded, idle_seconds: Some(90.0) };
        // 10 s, then 100 s, then 100 s of 1,100.
        assert!((share(&arrivals, 10.0) - 210.0 / 1100.0).abs() < 1e-12);
        assert!((share(&Arrivals { idle_seconds: None, ..arrivals }, 10.0) - 1.0).abs() < 1e-12);
    }
}
