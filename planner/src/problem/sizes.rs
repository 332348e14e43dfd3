//! Lists of memory sizes.

use crate::problem::SizeRange;

/// Slack of comparisons of bytes.
pub(crate) const BYTE_SLACK: f64 = 1e-6;
/// Bytes of the GB that prices and vCPUs are stated for.
pub(crate) const GB: f64 = 1e9;

impl SizeRange {
    /// How many sizes there are, as a number that cannot overflow.
    pub(crate) fn count(&self) -> f64 {
        ((self.max_bytes - self.min_bytes + BYTE_SLACK) / self.step_bytes).floor() + 1.0
    }

    /// The largest size of the list, in bytes.
    #[must_use]
    pub fn largest(&self) -> f64 {
        self.min_bytes + (self.count() - 1.0) * self.step_bytes
    }

    /// All sizes in bytes, ascending.
    #[must_use]
    pub fn sizes(&self) -> Vec<f64> {
        // Checked problems have few enough sizes for the conversion to be exact.
        let count = self.count() as u32;
        (0..count).map(|index| self.min_bytes + f64::from(index) * self.step_bytes).collect()
    }

    /// The size of the list that is closest to `bytes`.
    pub(crate) fn nearest(&self, bytes: f64) -> f64 {
        let index = ((bytes - self.min_bytes) / self.step_bytes).round();
        self.min_bytes + index.clamp(0.0, self.count() - 1.0) * self.step_bytes
    }
}

/// Index of the first of the ascending `sizes` that is at least `bytes`, within slack.
pub(crate) fn first_at_least(sizes: &[f64], bytes: f64) -> usize {
    sizes.partition_point(|size| size + BYTE_SLACK < bytes)
}
