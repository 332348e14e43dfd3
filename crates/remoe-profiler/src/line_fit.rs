//! Fits lines to measurements over tokens: of prompts, or of the context of a decode step.

use remoe_planner::Affine;

/// Measurements with one number of vCPUs.
pub(crate) struct Points {
    pub(crate) vcpus: f64,
    /// Pairs of tokens and seconds.
    pub(crate) points: Vec<(f64, f64)>,
}

impl Points {
    fn means(&self) -> (f64, f64) {
        let count = self.points.len().max(1) as f64;
        let (x, y) = self.points.iter().fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
        (x / count, y / count)
    }

    /// Returns the slope of the least-squares line.
    fn slope(&self) -> f64 {
        let (mean_x, mean_y) = self.means();
        let covariance: f64 = self.points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
        let variance: f64 = self.points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
        if variance > 0.0 { covariance / variance } else { 0.0 }
    }

    /// Returns the line through the mean of the points with this slope, limited so that it starts at `least` or
    /// above.
    fn line_with_slope(&self, slope: f64, least: f64) -> Affine {
        let (mean_x, mean_y) = self.means();
        let steepest = if mean_x > 0.0 { (mean_y - least).max(0.0) / mean_x } else { 0.0 };
        let per_token = slope.clamp(0.0, steepest);
        // Only rounding can make it negative.
        Affine { base: (mean_y - per_token * mean_x).max(0.0), per_token }
    }
}

/// Returns the line of each of `columns`, ascending by vCPUs, with no negative part.
///
/// With more vCPUs no token takes longer. Slopes that contradict this are noise, and neighbours share their mean
/// (isotonic regression, pool adjacent violators). Below one vCPU, a quota comes in bursts, which longer work meets
/// more often: there a token takes its time on one vCPU, divided by the vCPUs.
pub(crate) fn lines(columns: &[Points]) -> Vec<Affine> {
    let whole = columns.iter().filter(|column| column.vcpus >= 1.0);
    let slopes = non_increasing(whole.clone().map(Points::slope));
    let mut lines: Vec<Affine> =
        whole.zip(slopes).map(|(column, slope)| column.line_with_slope(slope, 0.0)).collect();
    let one = lines.first().copied();
    let parts = columns.iter().filter(|column| column.vcpus < 1.0).map(|column| {
        let one = one.unwrap_or(Affine { base: 0.0, per_token: column.slope() * column.vcpus });
        column.line_with_slope(one.per_token / column.vcpus, one.base)
    });
    let mut all: Vec<Affine> = parts.collect();
    all.append(&mut lines);
    all
}

/// Returns the non-increasing sequence nearest to `values` (least squares); rising parts are replaced by their mean.
fn non_increasing(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for value in values {
        let mut pool = (value, 1);
        while let Some((sum, count)) =
            pools.pop_if(|(sum, count)| *sum / (*count as f64) < pool.0 / pool.1 as f64)
        {
            pool = (pool.0 + sum, pool.1 + count);
        }
        pools.push(pool);
    }
    pools.into_iter().flat_map(|(sum, count)| std::iter::repeat_n(sum / count as f64, count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(vcpus: f64, seconds: [f64; 3]) -> Points {
        Points { vcpus, points: [100.0, 200.0, 400.0].into_iter().zip(seconds).collect() }
    }

    fn assert_line(line: Affine, base: f64, per_token: f64) {
        assert!(
            (line.base - base).abs() < 1e-12 && (line.per_token - per_token).abs() < 1e-12,
            "{line:?} {base} {per_token}"
        );
    }

    #[test]
    fn a_column_is_a_line_that_falls_nowhere() {
        assert_line(lines(&[points(2.0, [3.0, 4.0, 6.0])])[0], 2.0, 0.01);
        // Falling lines and lines that start below zero are noise.
        assert_line(lines(&[points(2.0, [4.0, 3.0, 2.0])])[0], 3.0, 0.0);
        assert_line(lines(&[points(1.0, [0.5, 2.0, 4.5])])[0], 0.0, 1.0 / 100.0);
    }

    /// One column without a slope would hide those of all larger functions.
    #[test]
    fn slopes_that_rise_with_vcpus_share_their_mean() {
        let flat_at_one = lines(&[points(1.0, [5.0, 5.0, 5.0]), points(2.0, [3.0, 4.0, 6.0])]);
        assert_line(flat_at_one[0], 5.0 - 0.005 * 700.0 / 3.0, 0.005);
        assert_line(flat_at_one[1], 13.0 / 3.0 - 0.005 * 700.0 / 3.0, 0.005);
        assert_eq!(non_increasing([1.0, 4.0, 1.0, 3.0, 0.0].into_iter()), [2.5, 2.5, 2.0, 2.0, 0.0]);
    }

    #[test]
    fn below_one_vcpu_a_token_takes_what_it_takes_of_one_stretched() {
        let columns = [points(0.5, [9.0, 12.0, 9.0]), points(1.0, [3.0, 4.0, 6.0])];
        assert_line(lines(&columns)[0], 10.0 - 0.02 * 700.0 / 3.0, 0.02);
        // The base does not become smaller than that of one vCPU.
        let columns = [points(0.1, [3.0, 3.0, 3.0]), points(1.0, [3.0, 4.0, 6.0])];
        assert_line(lines(&columns)[0], 2.0, 3.0 / 700.0);
    }
}
