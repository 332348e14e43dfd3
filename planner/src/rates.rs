//! What memory costs per second.

use crate::problem::Pricing;
use crate::sizes::GB;

impl Pricing {
    /// Dollars per second of `bytes` on GPUs: by the GB, or by the whole GPU.
    pub(crate) fn gpu_rate(&self, bytes: f64) -> f64 {
        match (self.gpu_bytes_each, self.gpu_per_second_each) {
            (Some(each), Some(price)) => (bytes / each).ceil() * price,
            _ => self.gpu_per_gb_second.unwrap_or(self.cpu_per_gb_second) * bytes / GB,
        }
    }
}
