//! Interpolation of measured times.

use crate::problem::{CpuProfile, GpuProfile};
use ndarray::Array2;

/// Seconds over tokens and vCPUs: isotonic, and linear between grid points.
///
/// Measured times are made isotonic by a running minimum along vCPUs, then a running maximum along tokens. Outside the
/// measured vCPUs the nearest column holds. Along tokens the curve starts at (0, 0) and continues with the slope of the last
/// segment.
#[derive(Debug, Clone)]
pub struct Curve {
    vcpus: Vec<f64>,
    /// Token counts, with 0 as the first.
    tokens: Vec<f64>,
    /// `[token][vcpu]`, with a first row of zeros.
    seconds: Array2<f64>,
    /// Seconds of one token, at each measured vCPU column.
    one: Vec<f64>,
}

/// Position between two vCPU columns.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    low: usize,
    high: usize,
    fraction: f64,
}

impl Column {
    /// Returns the position of `vcpus` among ascending `points`, at least one. Outside of them it is the nearest point.
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

    /// Returns the value of `row` at this position.
    pub fn of(self, row: ndarray::ArrayView1<'_, f64>) -> f64 {
        let low = row[self.low];
        low + (row[self.high] - low) * self.fraction
    }

    /// Returns the least value of `row` up to this position. It is a lower bound if more vCPUs may be slower.
    pub fn least_of(self, row: ndarray::ArrayView1<'_, f64>) -> f64 {
        (0..=self.low).fold(self.of(row), |least, column| least.min(row[column]))
    }
}

/// Position between two token rows. Beyond the last row the fraction is above 1.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    low: usize,
    fraction: f64,
}

impl Curve {
    /// Creates the curve of measured times of CPUs.
    pub fn of_cpu(profile: &CpuProfile) -> Self {
        Self::new(profile.vcpus.clone(), &profile.tokens, |row, column| profile.seconds[row][column])
    }

    /// Creates the curve of measured times of a GPU.
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

    /// Reports if more vCPUs are never slower beyond the last token count. Between grid points that always holds.
    pub fn is_isotonic_beyond(&self) -> bool {
        let last = self.tokens.len() - 1;
        let rise = |column: usize| self.seconds[(last, column)] - self.seconds[(last - 1, column)];
        (1..self.vcpus.len()).all(|column| rise(column) <= rise(column - 1))
    }

    /// Returns the number of measured vCPU columns.
    pub fn columns(&self) -> usize {
        self.vcpus.len()
    }

    /// Returns the measured vCPUs, ascending.
    pub fn vcpus(&self) -> &[f64] {
        &self.vcpus
    }

    /// Returns the seconds of one token at every measured vCPU column.
    pub fn one(&self) -> &[f64] {
        &self.one
    }

    /// Returns the position of `vcpus`.
    pub fn column(&self, vcpus: f64) -> Column {
        Column::between(&self.vcpus, vcpus)
    }

    /// Returns the position of `tokens`.
    pub fn row(&self, tokens: f64) -> Row {
        let above = self.tokens.partition_point(|point| *point <= tokens);
        let low = above.saturating_sub(1).min(self.tokens.len() - 2);
        let (from, to) = (self.tokens[low], self.tokens[low + 1]);
        Row { low, fraction: (tokens - from) / (to - from) }
    }

    /// Returns the seconds for `tokens` at every measured vCPU column.
    pub fn over_columns(&self, tokens: f64) -> Vec<f64> {
        let row = self.row(tokens);
        (0..self.columns()).map(|column| self.at_column(row, column)).collect()
    }

    /// Returns the seconds at `row` and a measured vCPU column.
    pub fn at_column(&self, row: Row, column: usize) -> f64 {
        let low = self.seconds[(row.low, column)];
        low + (self.seconds[(row.low + 1, column)] - low) * row.fraction
    }

    /// Returns the seconds at `row` and `column`: interpolated along vCPUs first, then along tokens.
    pub fn at(&self, row: Row, column: Column) -> f64 {
        let low = column.of(self.seconds.row(row.low));
        let high = column.of(self.seconds.row(row.low + 1));
        low + (high - low) * row.fraction
    }

    /// Returns the seconds for `tokens` at `column`.
    pub fn seconds(&self, tokens: f64, column: Column) -> f64 {
        self.at(self.row(tokens), column)
    }

    /// Returns the curve over tokens at one position between columns, for many evaluations.
    pub fn slice(&self, column: Column) -> Vec<f64> {
        self.seconds.rows().into_iter().map(|row| column.of(row)).collect()
    }
}

impl Row {
    /// Returns the value of a [`Curve::slice`] at this position.
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
