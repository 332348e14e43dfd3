//! Lists of memory sizes.

use crate::problem::{SizeRange, VcpuRange};

/// Slack of comparisons of bytes.
pub const BYTE_SLACK: f64 = 1e-6;
/// Bytes of the GB that prices and vCPUs are stated for.
pub const GB: f64 = 1e9;

impl SizeRange {
    /// Returns the number of sizes, as a float that cannot overflow.
    pub fn count(&self) -> f64 {
        ((self.max_bytes - self.min_bytes + BYTE_SLACK) / self.step_bytes).floor() + 1.0
    }

    /// Returns the largest size in bytes.
    #[must_use]
    pub fn largest(&self) -> f64 {
        self.min_bytes + (self.count() - 1.0) * self.step_bytes
    }

    /// Returns all sizes in bytes, ascending.
    #[must_use]
    pub fn sizes(&self) -> Vec<f64> {
        // Checked problems have few enough sizes for the conversion to be exact.
        let count = self.count() as u32;
        (0..count).map(|index| self.min_bytes + f64::from(index) * self.step_bytes).collect()
    }

    /// Returns the size that is nearest to `bytes`.
    pub fn nearest(&self, bytes: f64) -> f64 {
        let index = ((bytes - self.min_bytes) / self.step_bytes).round();
        self.min_bytes + index.clamp(0.0, self.count() - 1.0) * self.step_bytes
    }
}

impl VcpuRange {
    /// Returns how many numbers of vCPUs there are, as a float that cannot overflow.
    pub fn count(&self) -> f64 {
        ((self.max - self.min) / self.step + 1e-9).floor() + 1.0
    }

    /// Returns the most vCPUs of the range.
    #[must_use]
    pub fn largest(self) -> f64 {
        self.min + (self.count() - 1.0) * self.step
    }

    /// Returns the number of vCPUs of the range that is nearest to `vcpus`.
    pub fn nearest(self, vcpus: f64) -> f64 {
        let index = ((vcpus - self.min) / self.step).round();
        self.min + index.clamp(0.0, self.count() - 1.0) * self.step
    }

    /// Returns all numbers of vCPUs, ascending.
    pub fn all(self) -> impl Iterator<Item = f64> {
        // Checked problems have few enough for the conversion to be exact.
        (0..self.count() as u32).map(move |index| self.min + f64::from(index) * self.step)
    }
}

/// Returns the index of the first of the ascending `sizes` that is at least `bytes`, within [`BYTE_SLACK`].
pub fn first_at_least(sizes: &[f64], bytes: f64) -> usize {
    sizes.partition_point(|size| size + BYTE_SLACK < bytes)
}
