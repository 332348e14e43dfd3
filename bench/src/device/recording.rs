//! Counted calls of a device, as the program under check writes them.

use crate::error::{ErrorContext, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Counts since the start.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct DeviceRecording {
    /// By layer of the model.
    pub(super) layers: Vec<DeviceCounts>,
    /// Outside of layers.
    pub(super) outside: DeviceCounts,
    /// Bytes of tensors on the device.
    pub(super) held_bytes: u64,
}

/// Counts of one place.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct DeviceCounts {
    calls: u64,
    copies_down: u64,
    copies_up: u64,
    synchronisations: u64,
    allocations: u64,
}

/// Counts of an iteration, of one layer in the mean.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct PerLayer {
    pub(super) launches: f64,
    pub(super) copies_down: f64,
    pub(super) copies_up: f64,
    pub(super) synchronisations: f64,
    pub(super) allocations: f64,
    /// Launches outside of layers in a whole iteration.
    pub(super) launches_outside: f64,
}

impl DeviceRecording {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let reading = || format!("reading {}", path.display());
        let text = std::fs::read_to_string(path).doing(reading)?;
        serde_json::from_str(&text).doing(reading)
    }

    /// Counts since `before`, which is so many iterations ago.
    pub(super) fn per_layer(&self, before: &Self, iterations: f64) -> PerLayer {
        let sum =
            |recording: &Self, of: fn(&DeviceCounts) -> u64| -> u64 { recording.layers.iter().map(of).sum() };
        let layers = self.layers.len().max(1) as f64;
        let each = |of: fn(&DeviceCounts) -> u64| {
            sum(self, of).saturating_sub(sum(before, of)) as f64 / (layers * iterations.max(1.0))
        };
        let outside = self.outside.calls.saturating_sub(before.outside.calls);
        PerLayer {
            launches: each(|counts| counts.calls),
            copies_down: each(|counts| counts.copies_down),
            copies_up: each(|counts| counts.copies_up),
            synchronisations: each(|counts| counts.synchronisations),
            allocations: each(|counts| counts.allocations),
            launches_outside: outside as f64 / iterations.max(1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_of_one_layer_in_one_iteration() {
        let recording = |calls: u64, outside: u64| DeviceRecording {
            layers: vec![DeviceCounts { calls, ..DeviceCounts::default() }; 2],
            outside: DeviceCounts { calls: outside, ..DeviceCounts::default() },
            held_bytes: 0,
        };
        let each = recording(110, 8).per_layer(&recording(10, 2), 4.0);
        assert_eq!((each.launches, each.launches_outside, each.copies_up), (25.0, 1.5, 0.0));
    }
}
