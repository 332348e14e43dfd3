//! Counts of what a device was asked for, as a whole and by layer.

use serde::Serialize;
use std::ops::Sub;

/// Requests to a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// LibTorch calls that launch work on the device: kernels, and copies between host and device.
    pub calls: u64,
    /// LibTorch calls that return another view of the same memory; they launch nothing.
    pub views: u64,
    /// Tensors that took memory on the device.
    pub allocations: u64,
    /// Copies from the device to the host.
    pub copies_down: u64,
    /// Bytes of them.
    pub bytes_down: u64,
    /// Copies from the host to the device.
    pub copies_up: u64,
    /// Bytes of them.
    pub bytes_up: u64,
    /// Copies within the memory of the host that copies from and to the device take.
    pub host_copies: u64,
    /// Waits of the host for the device.
    pub synchronisations: u64,
}

impl Sub for Counts {
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
pub struct Recording {
    /// Requests by layer of the model.
    pub layers: Vec<Counts>,
    /// Requests outside of layers: weights, embedding, angles, logits.
    pub outside: Counts,
    /// Bytes of the tensors that hold memory now.
    pub held_bytes: u64,
    /// Largest value of `held_bytes`.
    pub peak_bytes: u64,
    /// Bytes of the largest tensor so far.
    pub largest_bytes: u64,
    /// Bytes of pinned host memory.
    pub pinned_bytes: u64,
    /// Limit of `held_bytes`, where the device is simulated.
    pub limit_bytes: Option<u64>,
}

impl Recording {
    /// Returns the counts since `before`, an earlier state of the same device.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier = before.layers.iter().copied().chain(std::iter::repeat(Counts::default()));
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
    recording: Recording,
    /// Layer that is computed.
    layer: Option<usize>,
}

impl Recorder {
    pub(super) fn new(limit_bytes: Option<u64>) -> Self {
        Self { recording: Recording { limit_bytes, ..Recording::default() }, layer: None }
    }

    pub(super) fn recording(&self) -> Recording {
        self.recording.clone()
    }

    pub(super) fn limit(&mut self, bytes: u64) {
        self.recording.limit_bytes = Some(bytes);
    }

    pub(super) fn enter(&mut self, layer: Option<usize>) {
        self.layer = layer;
    }

    pub(super) fn counts(&mut self) -> &mut Counts {
        let Some(layer) = self.layer else { return &mut self.recording.outside };
        let layers = &mut self.recording.layers;
        if layers.len() <= layer {
            layers.resize(layer + 1, Counts::default());
        }
        &mut layers[layer]
    }

    /// Takes `bytes`. Returns the bytes that are free where these are more.
    pub(super) fn take(&mut self, bytes: u64) -> Result<(), u64> {
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

    pub(super) fn pin(&mut self, bytes: u64) {
        self.recording.pinned_bytes += bytes;
    }

    pub(super) fn give_back(&mut self, bytes: u64) {
        self.recording.held_bytes = self.recording.held_bytes.saturating_sub(bytes);
    }
}
