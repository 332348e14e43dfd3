//! Figures that were taken several times, and what is said of them.

use serde::Serialize;

/// Values of one figure in the order in which they were taken, one per round.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Series(Vec<f64>);

/// Summary of a series: the middle, and the noise beside it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) min: f64,
    pub(crate) median: f64,
    pub(crate) max: f64,
    /// How many values there were.
    pub(crate) count: usize,
}

impl Series {
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Round by round, this over `limit`: both sides of each quotient saw the same disturbances.
    pub(crate) fn over(&self, limit: &Self) -> Self {
        Self(self.0.iter().zip(&limit.0).map(|(a, b)| a / b).collect())
    }

    /// Round by round, this less `other`.
    pub(crate) fn minus(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| a - b).collect())
    }

    /// The value that a share `quantile` of the others lies below, between two of them where it must
    /// be; none for an empty series.
    pub(crate) fn quantile(&self, quantile: f64) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let at = sorted.len().checked_sub(1)? as f64 * quantile;
        let (below, above) = (sorted.get(at.floor() as usize)?, sorted.get(at.ceil() as usize)?);
        Some(below + (above - below) * at.fract())
    }

    pub(crate) fn median(&self) -> Option<f64> {
        self.quantile(0.5)
    }

    /// Returns the summary; `None` for an empty series.
    pub(crate) fn spread(&self) -> Option<Spread> {
        Some(Spread {
            min: self.quantile(0.0)?,
            median: self.median()?,
            max: self.quantile(1.0)?,
            count: self.0.len(),
        })
    }
}

impl Extend<f64> for Series {
    fn extend<I: IntoIterator<Item = f64>>(&mut self, values: I) {
        self.0.extend(values);
    }
}

impl FromIterator<f64> for Series {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_are_taken_round_by_round() {
        let ours = Series::from_iter([1.0, 20.0, 3.0]);
        let limit = Series::from_iter([2.0, 40.0, 6.0]);
        let spread = ours.over(&limit).spread();
        assert_eq!(spread, Some(Spread { min: 0.5, median: 0.5, max: 0.5, count: 3 }));
        assert_eq!(Series::default().spread(), None);
        assert_eq!(ours.quantile(1.0), Some(20.0));
        assert_eq!(Series::from_iter([4.0, 1.0, 3.0, 2.0]).median(), Some(2.5));
    }
}
