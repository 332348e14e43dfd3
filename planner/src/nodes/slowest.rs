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

/// Experts per token, at most: series have as many powers.
pub(super) const MOST_TOP_K: usize = 32;

/// A power series, cut behind the last power that is needed.
type Series = [f64; MOST_TOP_K + 1];

/// Expected seconds until the slowest path has computed its part of a token's `top_k` experts (at most
/// [`MOST_TOP_K`]), which are drawn independently by the paths' shares. A path without any takes no time.
/// Exact: the probability that no path takes longer than t is a coefficient of the product of the paths'
/// truncated exponential series.
pub(super) fn slowest_path(paths: &[Path], top_k: usize) -> f64 {
    let top_k = top_k.min(MOST_TOP_K);
    let paths = || paths.iter().filter(|path| path.count > 0 && path.share > 0.0);
    let total: f64 = paths().map(|path| path.share * path.count as f64).sum();
    // When a path is done with so many experts: none of its places is done with more before.
    let mut steps: Vec<(f64, usize, usize)> = Vec::with_capacity(paths().count() * top_k);
    for (index, path) in paths().enumerate() {
        let at = |experts: usize| path.round_trip + experts as f64 * path.seconds_per_expert;
        steps.extend((1..=top_k).map(|experts| (at(experts), index, experts)));
    }
    steps.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
    let mut series: Vec<Series> = paths().map(|_| one()).collect();
    let shares: Vec<(f64, usize)> = paths().map(|path| (path.share / total, path.count)).collect();
    let factorial: f64 = (1..=top_k).map(|factor| factor as f64).product();
    let (mut expected, mut from, mut done) = (0.0, 0.0, 0.0);
    for (index, (time, path, most)) in steps.iter().enumerate() {
        expected += (time - from) * (1.0 - done);
        from = *time;
        let (share, count) = shares[*path];
        series[*path] = power(exponential(share, *most), count, top_k);
        // Of steps at the same time only the last one leaves its mark.
        if steps.get(index + 1).is_some_and(|next| next.0 == from) {
            continue;
        }
        done = f64::clamp(last_of_product(&series, top_k) * factorial, 0.0, 1.0);
    }
    expected
}

/// What [`slowest_path`] is not below, at a fraction of the effort: the slowest of equal places takes no less
/// than their mean.
pub(super) fn least_slowest_path(paths: &[Path], top_k: usize) -> f64 {
    let total: f64 = paths.iter().map(|path| path.share * path.count as f64).sum();
    let of_path = |path: &Path| {
        let share = path.share / total.max(f64::MIN_POSITIVE);
        let called = 1.0 - (1.0 - (share * path.count as f64).min(1.0)).powi(top_k as i32);
        called * path.round_trip + top_k as f64 * share * path.seconds_per_expert
    };
    paths.iter().filter(|path| path.count > 0).map(of_path).fold(0.0, f64::max)
}

/// The series 1.
fn one() -> Series {
    let mut series = [0.0; MOST_TOP_K + 1];
    series[0] = 1.0;
    series
}

/// exp(share x), cut behind the power `most`.
fn exponential(share: f64, most: usize) -> Series {
    let mut series = one();
    for power in 1..=most {
        series[power] = series[power - 1] * share / power as f64;
    }
    series
}

/// The product of two series up to the power `top_k`.
fn times(a: &Series, b: &Series, top_k: usize) -> Series {
    let mut product = [0.0; MOST_TOP_K + 1];
    for (i, left) in a[..=top_k].iter().enumerate().filter(|(_, left)| **left != 0.0) {
        for (target, right) in product[i..=top_k].iter_mut().zip(b) {
            *target += left * right;
        }
    }
    product
}

/// The coefficient of the power `top_k` of the product of all `series`.
fn last_of_product(series: &[Series], top_k: usize) -> f64 {
    let Some((last, others)) = series.split_last() else { return 0.0 };
    let mut product = one();
    for (index, series) in others.iter().enumerate() {
        product = if index == 0 { *series } else { times(&product, series, top_k) };
    }
    product[..=top_k].iter().zip(last[..=top_k].iter().rev()).map(|(a, b)| a * b).sum()
}

fn power(mut base: Series, mut exponent: usize, top_k: usize) -> Series {
    if exponent == 1 {
        return base;
    }
    let mut result = one();
    while exponent > 0 {
        if exponent % 2 == 1 {
            result = times(&result, &base, top_k);
        }
        exponent /= 2;
        if exponent > 0 {
            base = times(&base, &base, top_k);
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
            let least = least_slowest_path(&paths, top_k);
            assert!(least <= exact + 1e-12 && least > exact / 3.0, "{paths:?}: {least} {exact}");
        }
        assert_eq!((slowest_path(&[], 4), least_slowest_path(&[], 4)), (0.0, 0.0));
    }
}
