//! Measured times between their grid points.

use crate::problem::{CpuProfile, GpuProfile};
use ndarray::Array2;

/// Seconds over tokens and vCPUs: isotonic, linear between the points.
///
/// More vCPUs never take longer and more tokens are never quicker, whatever was measured: a running
/// minimum along vCPUs, then a running maximum along tokens. Outside the measured vCPUs the nearest
/// column holds. Tokens start at (0, 0) and go on with the slope of the last segment.
#[derive(Debug, Clone)]
pub struct Curve {
    vcpus: Vec<f64>,
    /// With 0 in front.
    tokens: Vec<f64>,
    /// `[token][vcpu]`, with a row of zeros in front.
    seconds: Array2<f64>,
    /// Seconds of one token, at each measured vCPU column.
    one: Vec<f64>,
}

/// A place between two vCPU columns.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    low: usize,
    high: usize,
    fraction: f64,
}

impl Column {
    /// The place of `vcpus` among ascending `points`, one at least; outside of them the nearest one holds.
    pub fn between(points: &[f64], vcpus: f64) -> Self {
        let above = points.partition_point(|point| *point <= vcpus);
        if above == 0 {
            return Self { low: 0, high: 0, fraction: 0.0 };
        }
        if above == points.len() {
            return Self { low: above - 1, high: above - 1, fraction: 0.0 };
        }
        let (low, high) = (points[above - 1], points[above]);
        Self { low: above - 1, high: above, fraction: (vcpus - low) / (high - low) }
    }

    /// The value there of a row over the columns.
    pub fn of(self, row: ndarray::ArrayView1<'_, f64>) -> f64 {
        let low = row[self.low];
        low + (row[self.high] - low) * self.fraction
    }

    /// The least value of a row over the columns there or anywhere at fewer vCPUs: what no place up to this one
    /// undercuts, where more vCPUs may take longer.
    pub fn least_of(self, row: ndarray::ArrayView1<'_, f64>) -> f64 {
        (0..=self.low).fold(self.of(row), |least, column| least.min(row[column]))
    }
}

/// A place between two token rows, beyond the last with a fraction above 1.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    low: usize,
    fraction: f64,
}

impl Curve {
    /// Compiles measured times of CPUs.
    pub fn of_cpu(profile: &CpuProfile) -> Self {
        Self::new(profile.vcpus.clone(), &profile.tokens, |row, column| profile.seconds[row][column])
    }

    /// Compiles measured times of a device.
    pub fn of_gpu(profile: &GpuProfile) -> Self {
        Self::new(vec![1.0], &profile.tokens, |row, _| profile.seconds[row])
    }

    fn new(vcpus: Vec<f64>, tokens: &[f64], measured: impl Fn(usize, usize) -> f64) -> Self {
        let mut seconds = Array2::zeros((tokens.len() + 1, vcpus.len()));
        for row in 0..tokens.len() {
            let mut least = f64::INFINITY;
            for column in 0..vcpus.len() {
                least = least.min(measured(row, column));
                seconds[(row + 1, column)] = least.max(seconds[(row, column)]);
            }
        }
        let tokens = std::iter::once(0.0).chain(tokens.iter().copied()).collect();
        let mut curve = Self { vcpus, tokens, seconds, one: Vec::new() };
        curve.one = curve.over_columns(1.0);
        curve
    }

    /// Reports if more vCPUs never take longer for any number of tokens. Between the points that always
    /// holds; beyond the last one the slope of the last segment may rise with vCPUs.
    pub fn is_isotonic_beyond(&self) -> bool {
        let last = self.tokens.len() - 1;
        let rise = |column: usize| self.seconds[(last, column)] - self.seconds[(last - 1, column)];
        (1..self.vcpus.len()).all(|column| rise(column) <= rise(column - 1))
    }

    /// Measured vCPU columns.
    pub fn columns(&self) -> usize {
        self.vcpus.len()
    }

    /// The measured vCPUs, ascending.
    pub fn vcpus(&self) -> &[f64] {
        &self.vcpus
    }

    /// Seconds of one token at every measured vCPU column.
    pub fn one(&self) -> &[f64] {
        &self.one
    }

    /// The place of a function with `vcpus`.
    pub fn column(&self, vcpus: f64) -> Column {
        Column::between(&self.vcpus, vcpus)
    }

    /// The place of `tokens`.
    pub fn row(&self, tokens: f64) -> Row {
        let above = self.tokens.partition_point(|point| *point <= tokens);
        let low = above.saturating_sub(1).min(self.tokens.len() - 2);
        let (from, to) = (self.tokens[low], self.tokens[low + 1]);
        Row { low, fraction: (tokens - from) / (to - from) }
    }

    /// Seconds for `tokens` at every measured vCPU column.
    pub fn over_columns(&self, tokens: f64) -> Vec<f64> {
        let row = self.row(tokens);
        (0..self.columns()).map(|column| self.at_column(row, column)).collect()
    }

    /// Seconds at a measured vCPU column.
    pub fn at_column(&self, row: Row, column: usize) -> f64 {
        let low = self.seconds[(row.low, column)];
        low + (self.seconds[(row.low + 1, column)] - low) * row.fraction
    }

    /// Seconds for `row` at `column`: along vCPUs first, then along tokens.
    pub fn at(&self, row: Row, column: Column) -> f64 {
        let low = column.of(self.seconds.row(row.low));
        let high = column.of(self.seconds.row(row.low + 1));
        low + (high - low) * row.fraction
    }

    /// Seconds for `tokens` at `column`.
    pub fn seconds(&self, tokens: f64, column: Column) -> f64 {
        self.at(self.row(tokens), column)
    }

    /// The curve over tokens at one place between columns, for many evaluations.
    pub fn slice(&self, column: Column) -> Vec<f64> {
        self.seconds.rows().into_iter().map(|row| column.of(row)).collect()
    }
}

impl Row {
    /// The value there of a [`Curve::slice`].
    pub fn of(self, slice: &[f64]) -> f64 {
        let low = slice[self.low];
        low + (slice[self.low + 1] - low) * self.fraction
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(vcpus: &[f64], tokens: &[f64], seconds: &[&[f64]]) -> Curve {
        let seconds = seconds.iter().map(|row| row.to_vec()).collect();
        Curve::of_cpu(&CpuProfile { vcpus: vcpus.to_vec(), tokens: tokens.to_vec(), seconds })
    }

    #[test]
    fn measurements_become_isotonic() {
        // More vCPUs took longer once, and more tokens were quicker once.
        let curve = curve(&[1.0, 2.0], &[1.0, 2.0, 3.0], &[&[4.0, 5.0], &[3.0, 2.0], &[9.0, 1.0]]);
        let at = |tokens, vcpus| curve.seconds(tokens, curve.column(vcpus));
        assert_eq!([at(1.0, 1.0), at(1.0, 2.0)], [4.0, 4.0]);
        assert_eq!([at(2.0, 1.0), at(2.0, 2.0)], [4.0, 4.0]);
        assert_eq!([at(3.0, 1.0), at(3.0, 2.0)], [9.0, 4.0]);
    }

    #[test]
    fn between_and_beyond_the_points() {
        let curve = curve(&[1.0, 3.0], &[2.0, 4.0], &[&[8.0, 4.0], &[12.0, 6.0]]);
        let at = |tokens, vcpus| curve.seconds(tokens, curve.column(vcpus));
        // From nothing to the first count, between, and on with the last slope.
        assert_eq!([at(0.0, 1.0), at(1.0, 1.0), at(3.0, 1.0), at(6.0, 1.0)], [0.0, 4.0, 10.0, 16.0]);
        // Between columns, and the nearest one outside.
        assert_eq!([at(2.0, 2.0), at(2.0, 0.1), at(2.0, 9.0)], [6.0, 8.0, 4.0]);
        // A single point goes on from (0, 0).
        let single = super::tests::curve(&[1.0], &[2.0], &[&[3.0]]);
        assert_eq!(single.seconds(6.0, single.column(5.0)), 9.0);
    }
}
