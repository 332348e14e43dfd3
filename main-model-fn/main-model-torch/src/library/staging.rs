//! Copies between host and device through pinned memory: one buffer for each direction, made at the first copy and
//! reused by all later ones.
//!
//! LibTorch never returns pinned memory to the system, and makes a block of its own for each size. So both buffers have a
//! fixed size, which bounds the pinned memory of a process.
//!
//! All copies of a device use its default stream, which works in order. So a copy to the host, which waits for the stream,
//! also waits for all earlier copies to the device, and their parts of the buffer are free again.

use super::device::TorchDevice;
use super::tensor::bytes_of;
use main_model_fn::backend::BackendError;
use std::sync::PoisonError;
use tch::{Kind, TchError};

/// Largest piece of a copy to the host, and largest copy to a device that does not wait for it. Weights are larger.
const PIECE_BYTES: usize = 16 << 20;
/// Copies to a device that are under way at the same time.
const UP_BYTES: usize = 32 << 20;
/// Copies begin at multiples of this, so that elements of every type are aligned.
const ALIGNED_BYTES: usize = 64;

/// The buffers of one device.
#[derive(Debug, Default)]
pub(super) struct Staging {
    down: Option<tch::Tensor>,
    up: Option<tch::Tensor>,
    /// Bytes of `up` in use by copies that the host has not waited for.
    used_bytes: usize,
}

/// Returns the buffer in `slot`, which is made if there is none. That of a simulated device is not pinned.
fn buffer<'a>(
    slot: &'a mut Option<tch::Tensor>,
    device: &TorchDevice,
    bytes: usize,
) -> Result<&'a tch::Tensor, TchError> {
    let made = match slot.take() {
        Some(made) => made,
        None => {
            let host = tch::Tensor::f_empty([bytes as i64], (Kind::Uint8, tch::Device::Cpu))?;
            let made = if device.device.is_cuda() { host.f_pin_memory(device.device)? } else { host };
            device.recorder().add_pinned(bytes as u64);
            made
        }
    };
    Ok(slot.insert(made))
}

impl TorchDevice {
    /// Copies `host` to the device. Up to [`PIECE_BYTES`], the host goes on before the copy is done.
    pub(super) fn copy_up(&self, host: &tch::Tensor) -> Result<tch::Tensor, BackendError> {
        let bytes = bytes_of(host);
        if bytes == 0 || bytes > PIECE_BYTES {
            return self.checked(host.f_to_device_(self.device, host.kind(), false, true));
        }
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let mut start = staging.used_bytes.next_multiple_of(ALIGNED_BYTES);
        if start + bytes > UP_BYTES {
            self.wait(&mut staging)?;
            start = 0;
        }
        staging.used_bytes = start + bytes;
        let mut copy = || {
            let buffer = buffer(&mut staging.up, self, UP_BYTES)?;
            let part = buffer.f_narrow(0, start as i64, bytes as i64)?;
            let mut part = part.f_view_dtype(host.kind())?.f_reshape(host.size())?;
            part.f_copy_(host)?;
            part.f_to_device_(self.device, host.kind(), true, true)
        };
        let copied = self.checked(copy())?;
        self.count(|counts| counts.host_copies += 1);
        Ok(copied)
    }

    /// Copies `from`, bytes in a row on the device, to `to`, which has as many. Returns the number of pieces, after each of
    /// which the device has done all that it was asked for before.
    pub(super) fn copy_down(&self, from: &tch::Tensor, to: &mut [u8]) -> Result<u64, BackendError> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut start, mut pieces) = (0, 0);
        for to in to.chunks_mut(PIECE_BYTES) {
            let mut copy = || {
                let mut part =
                    buffer(&mut staging.down, self, PIECE_BYTES)?.f_narrow(0, 0, to.len() as i64)?;
                part.f_copy_(&from.f_narrow(0, start, to.len() as i64)?)?;
                part.f_copy_data_u8(to, to.len())
            };
            self.checked(copy())?;
            // Earlier copies to the device are done.
            staging.used_bytes = 0;
            start += to.len() as i64;
            pieces += 1;
        }
        self.count(|counts| counts.host_copies += pieces);
        Ok(pieces)
    }

    /// Waits until all copies to the device are done, which a copy to the host does.
    fn wait(&self, staging: &mut Staging) -> Result<(), BackendError> {
        let mut wait = || {
            let from = tch::Tensor::f_zeros([1], (Kind::Uint8, self.device))?;
            buffer(&mut staging.down, self, PIECE_BYTES)?.f_narrow(0, 0, 1)?.f_copy_(&from)
        };
        self.checked(wait())?;
        staging.used_bytes = 0;
        self.count(|counts| counts.synchronisations += 1);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{DeviceCounts, Tensor};
    use super::*;

    #[test]
    fn copies_share_one_buffer_for_each_direction() {
        let device = TorchDevice::simulated(1 << 30);
        for count in 1..100 {
            let elements: Vec<f32> = (0..count * 1000).map(|element| element as f32).collect();
            let before = device.recording().outside;
            let tensor = Tensor::from_slice(&device, &elements).unwrap();
            let up = device.recording().outside - before;
            assert_eq!((up.copies_up, up.host_copies, up.synchronisations), (1, 2, 0));
            let before = device.recording().outside;
            let bytes = tensor.bytes().unwrap();
            let down = device.recording().outside - before;
            assert_eq!((down.copies_down, down.host_copies, down.synchronisations), (1, 1, 1));
            assert!(
                bytes.chunks_exact(4).zip(elements).all(|(bytes, element)| bytes == element.to_le_bytes())
            );
            assert_eq!(device.recording().pinned_bytes, (PIECE_BYTES + UP_BYTES) as u64);
        }
    }

    #[test]
    fn copy_that_fills_the_buffer_waits_and_changes_no_earlier_one() {
        let device = TorchDevice::simulated(1 << 30);
        let bytes = vec![0_u8; PIECE_BYTES - ALIGNED_BYTES];
        let mut tensors = Vec::new();
        for value in 1..=5 {
            let bytes = vec![value; bytes.len()];
            tensors.push(Tensor::from_bytes(&device, &bytes, &[bytes.len() as i64], Kind::Uint8).unwrap());
        }
        // Two fit in at the same time.
        assert_eq!(device.recording().outside.synchronisations, 2);
        for (value, tensor) in (1..=5).zip(tensors) {
            assert!(tensor.bytes().unwrap().iter().all(|byte| *byte == value), "{value}");
        }
        assert_eq!(device.recording().pinned_bytes, (PIECE_BYTES + UP_BYTES) as u64);
    }

    #[test]
    fn large_tensor_comes_in_pieces_of_the_buffer() {
        let device = TorchDevice::simulated(1 << 30);
        let elements: Vec<i64> = (0..5 << 20).collect();
        let tensor = Tensor::from_slice(&device, &elements).unwrap();
        let before = device.recording().outside;
        let halves = tensor.reshape(&[5 << 10, 1 << 10]).unwrap().narrow(1, 512, 512).unwrap();
        let bytes = halves.bytes().unwrap();
        let DeviceCounts { copies_down, bytes_down, .. } = device.recording().outside - before;
        assert_eq!((copies_down, bytes_down), (2, 20 << 20));
        let expected = elements.chunks(1 << 10).flat_map(|row| &row[512..]);
        assert!(bytes.chunks_exact(8).zip(expected).all(|(bytes, element)| bytes == element.to_le_bytes()));
        assert_eq!(device.recording().pinned_bytes, PIECE_BYTES as u64);
    }
}
