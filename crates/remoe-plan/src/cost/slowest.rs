//! Expected time of the slowest of several concurrent paths: the main function and the groups of remote functions.

/// Largest top-k for which the distribution of a token's experts over paths is summed exactly.
pub const MAX_EXACT_TOP_K: usize = 16;

/// One path on which a token's experts may be computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Path {
    /// Share of the layer's assignments.
    pub share: f64,
    /// Seconds per expert.
    pub seconds: f64,
    /// Seconds of a call, once if the path has any expert.
    pub trip: f64,
    /// Number of equal paths.
    pub count: usize,
}

/// Returns the expected seconds of the slowest of `paths` for one token with `top_k` experts.
///
/// Each expert is on a path with the path's share as probability: the multinomial form of equation 5 of the Remoe paper,
/// which with two paths is the binomial form.
///
/// The slowest path takes at most t if no path has more experts than it computes within t. The probability of that is a
/// coefficient of a product of truncated exponential series, one for each path.
pub fn expected_slowest(top_k: usize, paths: &[Path]) -> f64 {
    if top_k > MAX_EXACT_TOP_K {
        let work = paths.iter().flat_map(|path| vec![PathWork::of_token(path, top_k); path.count]);
        return slowest_of(work);
    }
    let seconds = |path: &Path, count: usize| match count {
        0 => 0.0,
        count => count as f64 * path.seconds + path.trip,
    };
    let possible = || paths.iter().filter(|path| path.share > 0.0 && path.count > 0);
    let mut times: Vec<f64> =
        possible().flat_map(|path| (0..=top_k).map(move |count| seconds(path, count))).collect();
    times.sort_by(f64::total_cmp);
    times.dedup();
    let most =
        |path: &Path, time: f64| (0..=top_k).rev().find(|count| seconds(path, *count) <= time).unwrap_or(0);
    // Usually all paths but the last, the main function, are equally fast. Then their distribution depends only on the
    // most experts that each computes within the time, and is reused.
    let (last, others) = match possible().next_back() {
        Some(last) => (last, possible().take(possible().count() - 1)),
        None => return 0.0,
    };
    let is_as_fast = |path: &Path, other: &Path| path.seconds == other.seconds && path.trip == other.trip;
    let first = others.clone().next();
    let others_as_fast =
        first.is_some_and(|first| last.count == 1 && others.clone().all(|path| is_as_fast(path, first)));
    let mut last_spread: Option<(usize, Spread)> = None;
    let (mut expected, mut before) = (0.0, 0.0);
    for time in times {
        let within = match first.filter(|_| others_as_fast) {
            Some(first) => {
                let each = most(first, time);
                if last_spread.as_ref().is_none_or(|(most, _)| *most != each) {
                    let paths = others.clone().map(|path| (path.share, each, path.count));
                    last_spread = Some((each, Spread::of(top_k, paths)));
                }
                last_spread.as_ref().map_or(0.0, |(_, spread)| spread.with(last.share, most(last, time)))
            }
            None => {
                let paths = possible().map(|path| (path.share, most(path, time), path.count));
                Spread::of(top_k, paths).probability()
            }
        };
        expected += time * (within - before);
        before = within;
        // The rest is rounding.
        if within >= 1.0 - 1e-15 {
            break;
        }
    }
    expected
}

/// Distribution of a token's experts over paths with at most a given number of experts each.
///
/// It consists of the coefficients of: product over the paths of sum over j <= most of (share x)^j / j!
#[derive(Debug, Clone)]
pub struct Spread {
    coefficients: Vec<f64>,
}

impl Spread {
    /// `paths`: share of each path, most experts on it, and the number of such paths.
    pub fn of(top_k: usize, paths: impl Iterator<Item = (f64, usize, usize)>) -> Self {
        let mut coefficients = vec![0.0; top_k + 1];
        coefficients[0] = 1.0;
        let mut terms = vec![0.0; top_k + 1];
        for (share, most, count) in paths {
            let most = most.min(top_k);
            let mut term = 1.0;
            for (count, slot) in terms.iter_mut().enumerate().take(most + 1) {
                *slot = term;
                term *= share / (count + 1) as f64;
            }
            for _ in 0..count {
                for total in (0..=top_k).rev() {
                    let counts = 0..=most.min(total);
                    coefficients[total] =
                        counts.map(|count| terms[count] * coefficients[total - count]).sum();
                }
            }
        }
        Self { coefficients }
    }

    /// Returns the probability that no path has more experts than its most.
    pub fn probability(&self) -> f64 {
        let top_k = self.coefficients.len() - 1;
        self.coefficients[top_k] * factorial(top_k)
    }

    /// Returns that probability with an additional path with `share` and at most `most` experts.
    pub fn with(&self, share: f64, most: usize) -> f64 {
        let top_k = self.coefficients.len() - 1;
        let mut term = 1.0;
        let mut sum = 0.0;
        for count in 0..=most.min(top_k) {
            sum += term * self.coefficients[top_k - count];
            term *= share / (count + 1) as f64;
        }
        sum * factorial(top_k)
    }
}

fn factorial(number: usize) -> f64 {
    (1..=number).map(|factor| factor as f64).product()
}

/// Seconds of a path with many independent experts, approximated by a normal distribution.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PathWork {
    /// Mean, in seconds.
    pub mean: f64,
    /// Variance, in square seconds.
    pub variance: f64,
}

impl PathWork {
    /// Returns the seconds of one token's experts on `path`.
    fn of_token(path: &Path, top_k: usize) -> Self {
        let count = top_k as f64;
        let called = 1.0 - (1.0 - path.share.min(1.0)).powf(count);
        Self {
            mean: count * path.share * path.seconds + called * path.trip,
            variance: count * path.share * (1.0 - path.share.min(1.0)) * path.seconds * path.seconds,
        }
    }

    /// Returns the maximum of two independent normal variables, approximated by a normal variable (Clark, "The greatest of
    /// a finite set of random variables", Operations Research 9, 1961, equations 2 to 4).
    fn slower(self, other: Self) -> Self {
        let spread = (self.variance + other.variance).sqrt();
        let distance = (self.mean - other.mean).abs();
        if distance >= 6.0 * spread {
            return if self.mean >= other.mean { self } else { other };
        }
        let ratio = (self.mean - other.mean) / spread;
        let (own, others, density) = (normal_cdf(ratio), normal_cdf(-ratio), normal_density(ratio));
        let mean = self.mean * own + other.mean * others + spread * density;
        let square = (self.mean * self.mean + self.variance) * own
            + (other.mean * other.mean + other.variance) * others
            + (self.mean + other.mean) * spread * density;
        Self { mean, variance: (square - mean * mean).max(0.0) }
    }
}

/// Returns the expected seconds of the slowest path, given the `work` of each.
pub fn slowest_of(work: impl Iterator<Item = PathWork>) -> f64 {
    work.reduce(PathWork::slower).map_or(0.0, |slowest| slowest.mean)
}

fn normal_density(at: f64) -> f64 {
    (-0.5 * at * at).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// Returns the standard normal distribution function, with an error below 1.5e-7 (Abramowitz and Stegun, 26.2.17).
fn normal_cdf(at: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * at.abs());
    let series = t
        * (0.319_381_530
            + t * (-0.356_563_782 + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    let above = normal_density(at) * series;
    if at >= 0.0 { 1.0 - above } else { above }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cost::decode::{expected_slower_path, remote_count_probabilities};
    use proptest::prelude::*;

    fn paths() -> impl Strategy<Value = Vec<Path>> {
        let path = (0.0_f64..1.0, 0.0_f64..3.0, 0.0_f64..2.0).prop_map(|(share, seconds, trip)| Path {
            share,
            seconds,
            trip,
            count: 1,
        });
        proptest::collection::vec(path, 1..5).prop_map(|mut paths| {
            let sum: f64 = paths.iter().map(|path| path.share).sum();
            paths.iter_mut().for_each(|path| path.share /= sum.max(1e-9));
            paths
        })
    }

    /// Sums over every assignment of experts to paths.
    fn enumerated(top_k: usize, paths: &[Path], counts: &mut Vec<usize>) -> f64 {
        if top_k == 0 {
            let seconds = paths.iter().zip(counts.iter()).map(|(path, count)| match count {
                0 => 0.0,
                count => *count as f64 * path.seconds + path.trip,
            });
            return seconds.fold(0.0, f64::max);
        }
        (0..paths.len())
            .map(|path| {
                counts[path] += 1;
                let rest = enumerated(top_k - 1, paths, counts);
                counts[path] -= 1;
                paths[path].share * rest
            })
            .sum()
    }

    proptest! {
        #[test]
        fn expected_slowest_equals_sum_over_all_assignments(paths in paths(), top_k in 0_usize..6) {
            let sum: f64 = paths.iter().map(|path| path.share).sum();
            prop_assume!(sum > 0.5);
            let exact = enumerated(top_k, &paths, &mut vec![0; paths.len()]);
            let found = expected_slowest(top_k, &paths);
            prop_assert!((found - exact).abs() <= 1e-9 * exact.max(1.0), "{found} {exact}");
        }

        #[test]
        fn equal_paths_equal_one_path_with_count(share in 0.0_f64..1.0, seconds in 0.1_f64..2.0, trip in 0.0_f64..1.0, count in 1_usize..5, top_k in 1_usize..6) {
            let local = Path { share: 1.0 - share, seconds: 1.0, trip: 0.0, count: 1 };
            let one = Path { share: share / count as f64, seconds, trip, count: 1 };
            let counted = expected_slowest(top_k, &[local, Path { count, ..one }]);
            let single = expected_slowest(top_k, &[vec![local], vec![one; count]].concat());
            prop_assert!((counted - single).abs() <= 1e-9 * single.max(1.0));
        }

        #[test]
        fn two_paths_are_the_binomial_form(share in 0.0_f64..1.0, local in 0.01_f64..3.0, remote in 0.01_f64..3.0, trip in 0.0_f64..2.0, top_k in 1_usize..9) {
            let paths = [
                Path { share: 1.0 - share, seconds: local, trip: 0.0, count: 1 },
                Path { share, seconds: remote, trip, count: 1 },
            ];
            let binomial = expected_slower_path(&remote_count_probabilities(top_k, share), local, remote, trip);
            prop_assert!((expected_slowest(top_k, &paths) - binomial).abs() <= 1e-9 * binomial.max(1.0));
        }

        #[test]
        fn spread_with_additional_path_equals_spread_of_all(share in 0.0_f64..1.0, most in 0_usize..5, top_k in 1_usize..6) {
            let others = [(share * 0.4, 3, 1), (share * 0.3, 2, 2)];
            let all = others.into_iter().chain([(1.0 - share, most, 1)]);
            let whole = Spread::of(top_k, all).probability();
            let apart = Spread::of(top_k, others.into_iter()).with(1.0 - share, most);
            prop_assert!((whole - apart).abs() < 1e-12);
        }
    }

    #[test]
    fn normal_approximation_is_close_to_exact_slowest() {
        let paths = [0.2, 0.3, 0.5].map(|share| Path { share, seconds: 1.0, trip: 0.1, count: 1 });
        let exact = expected_slowest(MAX_EXACT_TOP_K, &paths);
        let normal = slowest_of(paths.iter().map(|path| PathWork::of_token(path, MAX_EXACT_TOP_K)));
        assert!((exact - normal).abs() < 0.03 * exact, "{exact} {normal}");
    }
}
