//! Recorded requests to a device, read from the file that the program under check writes.

use crate::error::{ErrorContext, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Recording since the start of the program.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct DeviceRecording {
    /// By layer of the model.
    pub(super) layers: Vec<DeviceCounts>,
    /// Counts outside of layers.
    pub(super) outside: DeviceCounts,
    /// Bytes of tensors on the device.
    pub(super) held_bytes: u64,
}

/// Counts of requests to a device.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct DeviceCounts {
    calls: u64,
    copies_down: u64,
    copies_up: u64,
    synchronisations: u64,
    allocations: u64,
}

/// Mean counts of one layer in one iteration.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct PerLayer {
    pub(super) launches: f64,
    pub(super) copies_down: f64,
    pub(super) copies_up: f64,
    pub(super) synchronisations: f64,
    pub(super) allocations: f64,
    /// Launches of an iteration outside of layers.
    pub(super) launches_outside: f64,
}

impl DeviceRecording {
    /// Reads the recording in `path`.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let reading = || format!("reading {}", path.display());
        let text = std::fs::read_to_string(path).doing(reading)?;
        serde_json::from_str(&text).doing(reading)
    }

    /// Returns mean counts of the `iterations` since the recording `before`.
    pub(super) fn per_layer(&self, before: &Self, iterations: f64) -> PerLayer {
        let sum = |recording: &Self, count: fn(&DeviceCounts) -> u64| -> u64 {
            recording.layers.iter().map(count).sum()
        };
        let layers = self.layers.len().max(1) as f64;
        let mean = |count: fn(&DeviceCounts) -> u64| {
            sum(self, count).saturating_sub(sum(before, count)) as f64 / (layers * iterations.max(1.0))
        };
        let outside = self.outside.calls.saturating_sub(before.outside.calls);
        PerLayer {
            launches: mean(|counts| counts.calls),
            copies_down: mean(|counts| counts.copies_down),
            copies_up: mean(|counts| counts.copies_up),
            synchronisations: mean(|counts| counts.synchronisations),
            allocations: mean(|counts| counts.allocations),
            launches_outside: outside as f64 / iterations.max(1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_means_of_one_layer_in_one_iteration() {
        let recording = |calls: u64, outside: u64| DeviceRecording {
            layers: vec![DeviceCounts { calls, ..DeviceCounts::default() }; 2],
            outside: DeviceCounts { calls: outside, ..DeviceCounts::default() },
            held_bytes: 0,
        };
        let per_layer = recording(110, 8).per_layer(&recording(10, 2), 4.0);
        assert_eq!((per_layer.launches, per_layer.launches_outside, per_layer.copies_up), (25.0, 1.5, 0.0));
    }
}
