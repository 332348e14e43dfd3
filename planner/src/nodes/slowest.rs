//! How long a token waits for its experts when they are split over paths that work at the same time.

/// A place where some of a layer's experts are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Path {
    /// Share of the layer's assignments that goes there.
    pub(super) share: f64,
    /// Seconds of one expert for one token.
    pub(super) seconds_per_expert: f64,
    /// Seconds of a call, whatever its number of experts.
    pub(super) round_trip: f64,
    /// Places that are the same in all of this.
    pub(super) count: usize,
}

/// Expected seconds until the slowest path has computed its part of a token's `top_k` experts, which are
/// drawn independently by the paths' shares. A path without any takes no time. Exact: P(no path takes longer
/// than t) is a coefficient of the product of the paths' truncated exponential series.
pub(super) fn slowest_path(paths: &[Path], top_k: usize) -> f64 {
    let total: f64 = paths.iter().map(|path| path.share * path.count as f64).sum();
    if total <= 0.0 {
        return 0.0;
    }
    let paths = || paths.iter().filter(|path| path.count > 0 && path.share > 0.0);
    let mut times: Vec<f64> = paths()
        .flat_map(|path| {
            (1..=top_k).map(|experts| path.round_trip + experts as f64 * path.seconds_per_expert)
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times.dedup();
    let (mut expected, mut from) = (0.0, 0.0);
    for time in times {
        // No path ends between two of these times.
        let done: f64 = within(paths(), from, top_k, total);
        expected += (time - from) * (1.0 - done);
        if done >= 1.0 {
            break;
        }
        from = time;
    }
    expected
}

/// Probability that every path ends within `time`.
fn within<'a>(paths: impl Iterator<Item = &'a Path>, time: f64, top_k: usize, total: f64) -> f64 {
    let mut product = one(top_k);
    let mut certain = true;
    for path in paths {
        let fits = |experts: &usize| path.round_trip + *experts as f64 * path.seconds_per_expert <= time;
        let most = (1..=top_k).rev().find(fits).unwrap_or(0);
        certain &= most == top_k;
        let share = path.share / total;
        let mut series = one(top_k);
        for experts in 1..=top_k {
            series[experts] =
                if experts <= most { series[experts - 1] * share / experts as f64 } else { 0.0 };
        }
        product = times(&product, &power(series, path.count));
    }
    if certain {
        return 1.0;
    }
    let factorial: f64 = (1..=top_k).map(|factor| factor as f64).product();
    (product[top_k] * factorial).clamp(0.0, 1.0)
}

/// The series 1.
fn one(top_k: usize) -> Vec<f64> {
    let mut series = vec![0.0; top_k + 1];
    series[0] = 1.0;
    series
}

/// The product of two series, cut behind their last power.
fn times(a: &[f64], b: &[f64]) -> Vec<f64> {
    let mut product = vec![0.0; a.len()];
    for (i, left) in a.iter().enumerate().filter(|(_, left)| **left != 0.0) {
        for (target, right) in product[i..].iter_mut().zip(b) {
            *target += left * right;
        }
    }
    product
}

fn power(mut base: Vec<f64>, mut exponent: usize) -> Vec<f64> {
    let mut result = one(base.len() - 1);
    while exponent > 0 {
        if exponent % 2 == 1 {
            result = times(&result, &base);
        }
        exponent /= 2;
        if exponent > 0 {
            base = times(&base, &base);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over every sequence of draws.
    fn enumerated(paths: &[Path], top_k: usize) -> f64 {
        let single: Vec<Path> =
            paths.iter().flat_map(|path| vec![Path { count: 1, ..*path }; path.count]).collect();
        let total: f64 = single.iter().map(|path| path.share).sum();
        let mut expected = 0.0;
        for number in 0..single.len().pow(top_k as u32) {
            let mut experts = vec![0; single.len()];
            let (mut rest, mut probability) = (number, 1.0);
            for _ in 0..top_k {
                let path = rest % single.len();
                rest /= single.len();
                experts[path] += 1;
                probability *= single[path].share / total;
            }
            let slowest = single.iter().zip(&experts).filter(|(_, count)| **count > 0);
            let slowest =
                slowest.map(|(path, count)| path.round_trip + f64::from(*count) * path.seconds_per_expert);
            expected += probability * slowest.fold(0.0, f64::max);
        }
        expected
    }

    #[test]
    fn the_expectation_is_that_of_every_split() {
        let path = |share, seconds_per_expert, round_trip, count| Path {
            share,
            seconds_per_expert,
            round_trip,
            count,
        };
        for (paths, top_k) in [
            (vec![path(1.0, 2.0, 0.0, 1)], 3),
            (vec![path(0.4, 1.0, 0.0, 1), path(0.2, 0.7, 0.5, 3)], 4),
            (vec![path(0.0, 1.0, 0.0, 1), path(0.25, 1.0, 0.1, 4)], 5),
            (vec![path(0.5, 3.0, 0.0, 1), path(0.1, 1.0, 0.2, 2), path(0.3, 0.5, 1.0, 1)], 6),
            (vec![path(0.5, 0.0, 0.0, 1), path(0.5, 0.0, 1.0, 1)], 2),
        ] {
            let (exact, slow) = (slowest_path(&paths, top_k), enumerated(&paths, top_k));
            assert!((exact - slow).abs() < 1e-12, "{paths:?}: {exact} {slow}");
        }
        assert_eq!(slowest_path(&[], 4), 0.0);
    }
}
