//! Counts of requests to a device, by layer of the model.

use serde::Serialize;
use std::ops::Sub;

/// Counts of requests to a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DeviceCounts {
    /// LibTorch calls that launch work on the device: kernels, and copies between host and device.
    pub calls: u64,
    /// LibTorch calls that return another view of the same memory; they launch nothing.
    pub views: u64,
    /// Tensors that were allocated on the device.
    pub allocations: u64,
    /// Copies from the device to the host.
    pub copies_down: u64,
    /// Bytes of `copies_down`.
    pub bytes_down: u64,
    /// Copies from the host to the device.
    pub copies_up: u64,
    /// Bytes of `copies_up`.
    pub bytes_up: u64,
    /// Copies within host memory that are part of copies from and to the device.
    pub host_copies: u64,
    /// Waits of the host for the device.
    pub synchronisations: u64,
}

impl Sub for DeviceCounts {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            calls: self.calls - before.calls,
            views: self.views - before.views,
            allocations: self.allocations - before.allocations,
            copies_down: self.copies_down - before.copies_down,
            bytes_down: self.bytes_down - before.bytes_down,
            copies_up: self.copies_up - before.copies_up,
            bytes_up: self.bytes_up - before.bytes_up,
            host_copies: self.host_copies - before.host_copies,
            synchronisations: self.synchronisations - before.synchronisations,
        }
    }
}

/// State of a device's counters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct DeviceRecording {
    /// Requests by layer of the model.
    pub layers: Vec<DeviceCounts>,
    /// Requests outside of layers: weights, embedding, angles, logits.
    pub outside: DeviceCounts,
    /// Bytes of tensors on the device.
    pub held_bytes: u64,
    /// Largest value of `held_bytes`.
    pub peak_bytes: u64,
    /// Bytes of the largest tensor that was allocated.
    pub largest_bytes: u64,
    /// Bytes of pinned host memory.
    pub pinned_bytes: u64,
    /// Memory of a simulated device.
    pub limit_bytes: Option<u64>,
}

impl DeviceRecording {
    /// Returns the counts since `before`, an earlier state of the same device.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier = before.layers.iter().copied().chain(std::iter::repeat(DeviceCounts::default()));
        Self {
            layers: self.layers.iter().zip(earlier).map(|(&now, before)| now - before).collect(),
            outside: self.outside - before.outside,
            ..self.clone()
        }
    }
}

/// Counters of a device.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    recording: DeviceRecording,
    /// Layer that counts are added to; `None`: outside of layers.
    layer: Option<usize>,
}

impl Recorder {
    pub(super) fn new(limit_bytes: Option<u64>) -> Self {
        Self { recording: DeviceRecording { limit_bytes, ..DeviceRecording::default() }, layer: None }
    }

    pub(super) fn recording(&self) -> DeviceRecording {
        self.recording.clone()
    }

    pub(super) fn set_limit(&mut self, bytes: u64) {
        self.recording.limit_bytes = Some(bytes);
    }

    pub(super) fn set_layer(&mut self, layer: Option<usize>) {
        self.layer = layer;
    }

    pub(super) fn counts(&mut self) -> &mut DeviceCounts {
        let Some(layer) = self.layer else { return &mut self.recording.outside };
        let layers = &mut self.recording.layers;
        if layers.len() <= layer {
            layers.resize(layer + 1, DeviceCounts::default());
        }
        &mut layers[layer]
    }

    /// Counts an allocation of `bytes`.
    ///
    /// # Errors
    /// A simulated device has less memory left; returns the bytes that are free.
    pub(super) fn allocate(&mut self, bytes: u64) -> Result<(), u64> {
        let recording = &mut self.recording;
        let free = recording.limit_bytes.map(|limit| limit.saturating_sub(recording.held_bytes));
        if let Some(free) = free.filter(|free| *free < bytes) {
            return Err(free);
        }
        recording.held_bytes += bytes;
        recording.peak_bytes = recording.peak_bytes.max(recording.held_bytes);
        recording.largest_bytes = recording.largest_bytes.max(bytes);
        self.counts().allocations += 1;
        Ok(())
    }

    pub(super) fn reset_peaks(&mut self) {
        (self.recording.peak_bytes, self.recording.largest_bytes) = (self.recording.held_bytes, 0);
    }

    pub(super) fn add_pinned(&mut self, bytes: u64) {
        self.recording.pinned_bytes += bytes;
    }

    pub(super) fn free(&mut self, bytes: u64) {
        self.recording.held_bytes = self.recording.held_bytes.saturating_sub(bytes);
    }
}
