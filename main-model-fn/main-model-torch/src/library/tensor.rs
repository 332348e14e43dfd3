//! Tensors whose every operation is recorded.

use super::device::Device;
use main_model_fn::backend::BackendError;
use std::sync::Arc;
use tch::{Kind, TchError};

/// A tensor on a device.
///
/// Operations fail with [`BackendError::OutOfMemory`] if the device has no room for their result, and with
/// [`BackendError::DeviceLost`] if it does not answer any more.
#[derive(Debug)]
pub struct Tensor {
    tensor: tch::Tensor,
    /// Shared with the views of it.
    memory: Arc<Memory>,
}

/// Memory of a tensor, which it gives back.
#[derive(Debug)]
struct Memory {
    device: Arc<Device>,
    bytes: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.device.give_back(self.bytes);
    }
}

type Outcome = Result<Tensor, BackendError>;

fn bytes_of(tensor: &tch::Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// Creation and copies between host and device.
impl Tensor {
    /// The result of a call that launched work and took memory.
    fn computed(device: &Arc<Device>, outcome: Result<tch::Tensor, TchError>) -> Outcome {
        let tensor = device.outcome(outcome)?;
        device.count(|counts| counts.calls += 1);
        Self::holding(device, tensor)
    }

    fn holding(device: &Arc<Device>, tensor: tch::Tensor) -> Outcome {
        let bytes = bytes_of(&tensor);
        device.take(bytes)?;
        Ok(Self { tensor, memory: Arc::new(Memory { device: device.clone(), bytes }) })
    }

    /// Copies elements, little endian, to the device without waiting for it.
    pub(crate) fn from_bytes(device: &Arc<Device>, bytes: &[u8], size: &[i64], kind: Kind) -> Outcome {
        Self::up(device, tch::Tensor::f_from_data_size(bytes, size, kind))
    }

    /// Copies a row of elements to the device without waiting for it.
    pub(crate) fn from_slice<T: tch::kind::Element>(device: &Arc<Device>, elements: &[T]) -> Outcome {
        Self::up(device, tch::Tensor::f_from_slice(elements))
    }

    fn up(device: &Arc<Device>, host: Result<tch::Tensor, TchError>) -> Outcome {
        let host = device.outcome(host)?;
        let bytes = bytes_of(&host) as u64;
        device.count(|counts| {
            counts.copies_up += 1;
            counts.bytes_up += bytes;
        });
        let to = device.device;
        // From pinned memory, which LibTorch keeps until the copy is done: the host goes on at once.
        let copied = match to.is_cuda() {
            true => {
                host.f_pin_memory(to).and_then(|pinned| pinned.f_to_device_(to, host.kind(), true, false))
            }
            false => Ok(host),
        };
        Self::computed(device, copied)
    }

    /// Zeros.
    pub(crate) fn zeros(device: &Arc<Device>, size: &[i64], kind: Kind) -> Outcome {
        Self::computed(device, tch::Tensor::f_zeros(size, (kind, device.device)))
    }

    /// Ones.
    pub(crate) fn ones(device: &Arc<Device>, size: &[i64], kind: Kind) -> Outcome {
        Self::computed(device, tch::Tensor::f_ones(size, (kind, device.device)))
    }

    /// Returns the elements, little endian, once the device has computed them: one copy and one synchronisation.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>, BackendError> {
        let device = &self.memory.device;
        let count = bytes_of(&self.tensor);
        let host = match device.device.is_cuda() {
            true => Some(device.outcome(self.pinned())?),
            false => None,
        };
        let mut bytes = vec![0; count];
        let tensor = host.as_ref().unwrap_or(&self.tensor);
        device.outcome(tensor.f_copy_data_u8(&mut bytes, tensor.numel()))?;
        device.count(|counts| {
            counts.calls += 1;
            counts.copies_down += 1;
            counts.bytes_down += count as u64;
            counts.synchronisations += 1;
        });
        Ok(bytes)
    }

    /// A copy in pinned memory, which LibTorch's allocator keeps for the next one. The copy waits for this stream alone.
    fn pinned(&self) -> Result<tch::Tensor, TchError> {
        let host = tch::Tensor::f_empty(self.tensor.size(), (self.tensor.kind(), tch::Device::Cpu))?;
        let mut pinned = host.f_pin_memory(self.memory.device.device)?;
        pinned.f_copy_(&self.tensor)?;
        Ok(pinned)
    }

    /// Returns the elements as float32, as [`Self::bytes`] does.
    pub(crate) fn floats(&self) -> Result<Vec<f32>, BackendError> {
        let bytes = self.to_kind(Kind::Float)?.bytes()?;
        let (elements, _) = bytes.as_chunks::<4>();
        Ok(elements.iter().map(|element| f32::from_le_bytes(*element)).collect())
    }
}

/// Properties, and views of the same memory.
impl Tensor {
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.memory.device
    }

    pub(crate) fn kind(&self) -> Kind {
        self.tensor.kind()
    }

    /// Sizes of all dimensions.
    pub(crate) fn size(&self) -> Vec<i64> {
        self.tensor.size()
    }

    /// Bytes of the elements.
    pub(crate) fn byte_count(&self) -> usize {
        bytes_of(&self.tensor)
    }

    /// The same elements.
    pub(crate) fn alias(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), memory: self.memory.clone() }
    }

    fn view_of(&self, outcome: Result<tch::Tensor, TchError>) -> Outcome {
        let tensor = self.memory.device.outcome(outcome)?;
        self.memory.device.count(|counts| counts.views += 1);
        Ok(Self { tensor, memory: self.memory.clone() })
    }

    /// The result of a call that copies only if it must.
    fn view_or_copy(&self, outcome: Result<tch::Tensor, TchError>) -> Outcome {
        match outcome {
            Ok(tensor) if tensor.data_ptr() == self.tensor.data_ptr() => self.view_of(Ok(tensor)),
            outcome => self.result(outcome),
        }
    }

    pub(crate) fn narrow(&self, dim: i64, start: i64, length: i64) -> Outcome {
        self.view_of(self.tensor.f_narrow(dim, start, length))
    }

    pub(crate) fn select(&self, dim: i64, index: i64) -> Outcome {
        self.view_of(self.tensor.f_select(dim, index))
    }

    pub(crate) fn transpose(&self, first: i64, second: i64) -> Outcome {
        self.view_of(self.tensor.f_transpose(first, second))
    }

    pub(crate) fn unsqueeze(&self, dim: i64) -> Outcome {
        self.view_of(self.tensor.f_unsqueeze(dim))
    }

    pub(crate) fn squeeze_dim(&self, dim: i64) -> Outcome {
        self.view_of(self.tensor.f_squeeze_dim(dim))
    }

    pub(crate) fn expand(&self, size: &[i64]) -> Outcome {
        self.view_of(self.tensor.f_expand(size, false))
    }

    /// Copies where strides do not allow a view.
    pub(crate) fn reshape(&self, size: &[i64]) -> Outcome {
        self.view_or_copy(self.tensor.f_reshape(size))
    }

    /// Copies where elements do not lie together.
    pub(crate) fn contiguous(&self) -> Outcome {
        self.view_or_copy(self.tensor.f_contiguous())
    }

    /// Copies where the kind is another one.
    pub(crate) fn to_kind(&self, kind: Kind) -> Outcome {
        if self.kind() == kind {
            return Ok(self.alias());
        }
        self.result(self.tensor.f_to_kind(kind))
    }

    pub(crate) fn split(&self, widths: &[i64], dim: i64) -> Result<Vec<Self>, BackendError> {
        let parts = self.memory.device.outcome(self.tensor.f_split_with_sizes(widths, dim))?;
        self.memory.device.count(|counts| counts.views += 1);
        Ok(parts.into_iter().map(|tensor| Self { tensor, memory: self.memory.clone() }).collect())
    }
}

/// Operations that launch work. Each is the one of LibTorch with the same name.
impl Tensor {
    fn result(&self, outcome: Result<tch::Tensor, TchError>) -> Outcome {
        Self::computed(&self.memory.device, outcome)
    }

    /// An operation that writes to its own memory.
    fn in_place(
        &self,
        operation: impl FnOnce(&mut tch::Tensor) -> Result<(), TchError>,
    ) -> Result<(), BackendError> {
        let device = &self.memory.device;
        device.outcome(operation(&mut self.tensor.shallow_clone()))?;
        device.count(|counts| counts.calls += 1);
        Ok(())
    }

    pub(crate) fn cat(tensors: &[&Self], dim: i64) -> Outcome {
        let Some(first) = tensors.first() else {
            return Err(BackendError::Shape { what: "parts of a tensor", actual: 0, expected: 1 });
        };
        let parts: Vec<&tch::Tensor> = tensors.iter().map(|tensor| &tensor.tensor).collect();
        first.result(tch::Tensor::f_cat(&parts, dim))
    }

    pub(crate) fn add(&self, other: &Self) -> Outcome {
        self.result(self.tensor.f_add(&other.tensor))
    }

    pub(crate) fn add_(&self, other: &Self) -> Result<(), BackendError> {
        self.in_place(|own| own.f_add_(&other.tensor).map(drop))
    }

    pub(crate) fn copy_(&self, from: &Self) -> Result<(), BackendError> {
        self.in_place(|own| own.f_copy_(&from.tensor))
    }

    pub(crate) fn add_scalar(&self, value: f64) -> Outcome {
        self.result(self.tensor.f_add_scalar(value))
    }

    pub(crate) fn mul(&self, other: &Self) -> Outcome {
        self.result(self.tensor.f_mul(&other.tensor))
    }

    pub(crate) fn mul_scalar(&self, value: f64) -> Outcome {
        self.result(self.tensor.f_mul_scalar(value))
    }

    pub(crate) fn cos(&self) -> Outcome {
        self.result(self.tensor.f_cos())
    }

    pub(crate) fn sin(&self) -> Outcome {
        self.result(self.tensor.f_sin())
    }

    pub(crate) fn silu(&self) -> Outcome {
        self.result(self.tensor.f_silu())
    }

    pub(crate) fn gelu_tanh(&self) -> Outcome {
        self.result(self.tensor.f_gelu("tanh"))
    }

    pub(crate) fn relu(&self) -> Outcome {
        self.result(self.tensor.f_relu())
    }

    pub(crate) fn sigmoid(&self) -> Outcome {
        self.result(self.tensor.f_sigmoid())
    }

    pub(crate) fn clamp(&self, least: f64, most: f64) -> Outcome {
        self.result(self.tensor.f_clamp(least, most))
    }

    pub(crate) fn clamp_max(&self, most: f64) -> Outcome {
        self.result(self.tensor.f_clamp_max(most))
    }

    pub(crate) fn outer(&self, other: &Self) -> Outcome {
        self.result(self.tensor.f_outer(&other.tensor))
    }

    pub(crate) fn index_select(&self, dim: i64, index: &Self) -> Outcome {
        self.result(self.tensor.f_index_select(dim, &index.tensor))
    }

    pub(crate) fn matmul(&self, other: &Self) -> Outcome {
        self.result(self.tensor.f_matmul(&other.tensor))
    }

    /// `self weight' + bias`.
    pub(crate) fn linear(&self, weight: &Self, bias: Option<&Self>) -> Outcome {
        self.result(self.tensor.f_linear(&weight.tensor, bias.map(|bias| &bias.tensor)))
    }

    pub(crate) fn layer_norm(
        &self,
        size: &[i64],
        weight: &Self,
        bias: Option<&Self>,
        epsilon: f64,
    ) -> Outcome {
        let bias = bias.map(|bias| &bias.tensor);
        self.result(self.tensor.f_layer_norm(size, Some(&weight.tensor), bias, epsilon, false))
    }

    pub(crate) fn rms_norm(&self, size: &[i64], weight: &Self, epsilon: f64) -> Outcome {
        self.result(self.tensor.f_rms_norm(size, Some(&weight.tensor), epsilon))
    }

    /// Rotates the last dimension by `shift` elements.
    pub(crate) fn roll_last(&self, shift: i64) -> Outcome {
        self.result(self.tensor.f_roll(shift, -1_i64))
    }

    /// Reverses the last dimension.
    pub(crate) fn flip_last(&self) -> Outcome {
        self.result(self.tensor.f_flip(-1_i64))
    }

    /// `self + first x second`.
    pub(crate) fn addcmul(&self, first: &Self, second: &Self) -> Outcome {
        self.result(self.tensor.f_addcmul(&first.tensor, &second.tensor))
    }

    pub(crate) fn tril(&self, diagonal: i64) -> Outcome {
        self.result(self.tensor.f_tril(diagonal))
    }

    pub(crate) fn triu(&self, diagonal: i64) -> Outcome {
        self.result(self.tensor.f_triu(diagonal))
    }

    pub(crate) fn logical_not(&self) -> Outcome {
        self.result(self.tensor.f_logical_not())
    }

    pub(crate) fn masked_fill(&self, mask: &Self, value: f64) -> Outcome {
        self.result(self.tensor.f_masked_fill(&mask.tensor, value))
    }

    pub(crate) fn repeat_interleave(&self, repeats: i64, dim: i64) -> Outcome {
        self.result(self.tensor.f_repeat_interleave_self_int(repeats, dim, None))
    }

    /// softmax(`scale` q k' + mask) v: batch x heads x rows x elements.
    pub(crate) fn attend(
        [query, keys, values]: [&Self; 3],
        mask: Option<&Self>,
        causal: bool,
        scale: f64,
    ) -> Outcome {
        query.result(tch::Tensor::f_scaled_dot_product_attention(
            &query.tensor,
            &keys.tensor,
            &values.tensor,
            mask.map(|mask| &mask.tensor),
            0.0,
            causal,
            scale,
            false,
        ))
    }
}
