//! Tensors whose every operation is recorded.

use super::device::TorchDevice;
use main_model_fn::backend::BackendError;
use std::sync::Arc;
use tch::{Kind, TchError};

/// A tensor on a device.
///
/// Operations fail with [`BackendError::OutOfMemory`] if the device has no memory for their result, and with
/// [`BackendError::DeviceLost`] if it is lost.
#[derive(Debug)]
pub struct Tensor {
    tensor: tch::Tensor,
    /// Shared with views of the tensor.
    memory: Arc<Memory>,
}

/// Memory of a tensor. Dropping it returns the bytes to the recorded budget of the device.
#[derive(Debug)]
struct Memory {
    device: Arc<TorchDevice>,
    bytes: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.device.free(self.bytes);
    }
}

/// Result of an operation.
type TensorResult = Result<Tensor, BackendError>;

/// Returns the bytes of all elements.
pub(super) fn bytes_of(tensor: &tch::Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// Creation and copies between host and device.
impl Tensor {
    /// Counts a call that launched work, and the memory of its result.
    fn computed(device: &Arc<TorchDevice>, result: Result<tch::Tensor, TchError>) -> TensorResult {
        let tensor = device.checked(result)?;
        device.count(|counts| counts.calls += 1);
        Self::tracked(device, tensor)
    }

    /// Counts the memory of `tensor`.
    fn tracked(device: &Arc<TorchDevice>, tensor: tch::Tensor) -> TensorResult {
        let bytes = bytes_of(&tensor);
        device.allocate(bytes)?;
        Ok(Self { tensor, memory: Arc::new(Memory { device: device.clone(), bytes }) })
    }

    /// Copies elements, little endian, to the device, without waiting for it unless they are many.
    pub(crate) fn from_bytes(
        device: &Arc<TorchDevice>,
        bytes: &[u8],
        size: &[i64],
        kind: Kind,
    ) -> TensorResult {
        Self::to_device(device, tch::Tensor::f_from_data_size(bytes, size, kind))
    }

    /// Copies a row of elements to the device without waiting for it.
    pub(crate) fn from_slice<T: tch::kind::Element>(
        device: &Arc<TorchDevice>,
        elements: &[T],
    ) -> TensorResult {
        Self::to_device(device, tch::Tensor::f_from_slice(elements))
    }

    /// Copies `host` to the device.
    fn to_device(device: &Arc<TorchDevice>, host: Result<tch::Tensor, TchError>) -> TensorResult {
        let host = device.checked(host)?;
        let bytes = bytes_of(&host) as u64;
        device.count(|counts| {
            counts.copies_up += 1;
            counts.bytes_up += bytes;
            counts.host_copies += 1;
        });
        let copied = if device.is_host() { host } else { device.copy_up(&host)? };
        Self::computed(device, Ok(copied))
    }

    pub(crate) fn zeros(device: &Arc<TorchDevice>, size: &[i64], kind: Kind) -> TensorResult {
        Self::computed(device, tch::Tensor::f_zeros(size, (kind, device.device)))
    }

    /// Allocates elements without writing to them.
    pub(crate) fn empty(device: &Arc<TorchDevice>, size: &[i64], kind: Kind) -> TensorResult {
        Self::tracked(device, device.checked(tch::Tensor::f_empty(size, (kind, device.device)))?)
    }

    pub(crate) fn full(device: &Arc<TorchDevice>, size: &[i64], value: f64, kind: Kind) -> TensorResult {
        Self::computed(device, tch::Tensor::f_full(size, value, (kind, device.device)))
    }

    /// Returns the integers from 0 to below `end`, with 32 bits.
    pub(crate) fn arange(device: &Arc<TorchDevice>, end: i64) -> TensorResult {
        Self::computed(device, tch::Tensor::f_arange(end, (Kind::Int, device.device)))
    }

    /// Returns the elements, little endian, once the device has computed them: one copy and one synchronisation unless
    /// they are many.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>, BackendError> {
        let device = &self.memory.device;
        let mut bytes = vec![0; bytes_of(&self.tensor)];
        if bytes.is_empty() {
            return Ok(bytes);
        }
        let pieces = match device.is_host() {
            true => {
                device.checked(self.tensor.f_copy_data_u8(&mut bytes, self.tensor.numel()))?;
                device.count(|counts| counts.host_copies += 1);
                1
            }
            false => {
                let flat = self.contiguous()?.reshape(&[-1])?.view_as(Kind::Uint8)?;
                device.copy_down(&flat.tensor, &mut bytes)?
            }
        };
        device.count(|counts| {
            counts.calls += pieces;
            counts.copies_down += pieces;
            counts.bytes_down += bytes.len() as u64;
            counts.synchronisations += pieces;
        });
        Ok(bytes)
    }

    /// Returns the elements as float32, like [`Self::bytes`].
    pub(crate) fn floats(&self) -> Result<Vec<f32>, BackendError> {
        let bytes = self.to_kind(Kind::Float)?.bytes()?;
        let (elements, _) = bytes.as_chunks::<4>();
        Ok(elements.iter().map(|element| f32::from_le_bytes(*element)).collect())
    }
}

/// Properties, and views of the same memory.
impl Tensor {
    pub(crate) fn device(&self) -> &Arc<TorchDevice> {
        &self.memory.device
    }

    pub(crate) fn kind(&self) -> Kind {
        self.tensor.kind()
    }

    /// Returns the sizes of all dimensions.
    pub(crate) fn size(&self) -> Vec<i64> {
        self.tensor.size()
    }

    /// Returns the bytes of all elements.
    pub(crate) fn byte_count(&self) -> usize {
        bytes_of(&self.tensor)
    }

    /// Returns another handle of the same memory.
    pub(crate) fn alias(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), memory: self.memory.clone() }
    }

    fn view_of(&self, outcome: Result<tch::Tensor, TchError>) -> TensorResult {
        let tensor = self.memory.device.checked(outcome)?;
        self.memory.device.count(|counts| counts.views += 1);
        Ok(Self { tensor, memory: self.memory.clone() })
    }

    /// Counts the result of a call that returns a view if it can, and else a copy.
    fn view_or_copy(&self, outcome: Result<tch::Tensor, TchError>) -> TensorResult {
        match outcome {
            Ok(tensor) if tensor.data_ptr() == self.tensor.data_ptr() => self.view_of(Ok(tensor)),
            outcome => self.result(outcome),
        }
    }

    pub(crate) fn narrow(&self, dim: i64, start: i64, length: i64) -> TensorResult {
        self.view_of(self.tensor.f_narrow(dim, start, length))
    }

    pub(crate) fn select(&self, dim: i64, index: i64) -> TensorResult {
        self.view_of(self.tensor.f_select(dim, index))
    }

    pub(crate) fn transpose(&self, first: i64, second: i64) -> TensorResult {
        self.view_of(self.tensor.f_transpose(first, second))
    }

    pub(crate) fn permute(&self, dims: &[i64]) -> TensorResult {
        self.view_of(self.tensor.f_permute(dims))
    }

    /// Reinterprets the bytes of the elements as elements of `kind`. The last dimension is contiguous.
    pub(crate) fn view_as(&self, kind: Kind) -> TensorResult {
        self.view_of(self.tensor.f_view_dtype(kind))
    }

    pub(crate) fn unsqueeze(&self, dim: i64) -> TensorResult {
        self.view_of(self.tensor.f_unsqueeze(dim))
    }

    pub(crate) fn expand(&self, size: &[i64]) -> TensorResult {
        self.view_of(self.tensor.f_expand(size, false))
    }

    /// Copies if strides do not allow a view.
    pub(crate) fn reshape(&self, size: &[i64]) -> TensorResult {
        self.view_or_copy(self.tensor.f_reshape(size))
    }

    /// Copies if elements are not contiguous.
    pub(crate) fn contiguous(&self) -> TensorResult {
        self.view_or_copy(self.tensor.f_contiguous())
    }

    /// Copies if the kind differs.
    pub(crate) fn to_kind(&self, kind: Kind) -> TensorResult {
        if self.kind() == kind {
            return Ok(self.alias());
        }
        self.result(self.tensor.f_to_kind(kind))
    }

    pub(crate) fn split(&self, widths: &[i64], dim: i64) -> Result<Vec<Self>, BackendError> {
        let parts = self.memory.device.checked(self.tensor.f_split_with_sizes(widths, dim))?;
        self.memory.device.count(|counts| counts.views += 1);
        Ok(parts.into_iter().map(|tensor| Self { tensor, memory: self.memory.clone() }).collect())
    }
}

/// Operations that launch work. Each has the name of the LibTorch operation, unless its comment says more.
impl Tensor {
    fn result(&self, outcome: Result<tch::Tensor, TchError>) -> TensorResult {
        Self::computed(&self.memory.device, outcome)
    }

    /// Counts an operation that writes to this tensor.
    fn in_place(
        &self,
        operation: impl FnOnce(&mut tch::Tensor) -> Result<(), TchError>,
    ) -> Result<(), BackendError> {
        let device = &self.memory.device;
        device.checked(operation(&mut self.tensor.shallow_clone()))?;
        device.count(|counts| counts.calls += 1);
        Ok(())
    }

    pub(crate) fn cat(tensors: &[&Self], dim: i64) -> TensorResult {
        let Some(first) = tensors.first() else {
            return Err(BackendError::Shape { what: "parts of a tensor", actual: 0, expected: 1 });
        };
        let parts: Vec<&tch::Tensor> = tensors.iter().map(|tensor| &tensor.tensor).collect();
        first.result(tch::Tensor::f_cat(&parts, dim))
    }

    pub(crate) fn add(&self, other: &Self) -> TensorResult {
        self.result(self.tensor.f_add(&other.tensor))
    }

    pub(crate) fn add_(&self, other: &Self) -> Result<(), BackendError> {
        self.in_place(|own| own.f_add_(&other.tensor).map(drop))
    }

    pub(crate) fn copy_(&self, from: &Self) -> Result<(), BackendError> {
        self.in_place(|own| own.f_copy_(&from.tensor))
    }

    pub(crate) fn add_scalar(&self, value: f64) -> TensorResult {
        self.result(self.tensor.f_add_scalar(value))
    }

    pub(crate) fn mul(&self, other: &Self) -> TensorResult {
        self.result(self.tensor.f_mul(&other.tensor))
    }

    pub(crate) fn mul_scalar(&self, value: f64) -> TensorResult {
        self.result(self.tensor.f_mul_scalar(value))
    }

    pub(crate) fn mul_scalar_(&self, value: f64) -> Result<(), BackendError> {
        self.in_place(|own| own.f_mul_scalar_(value).map(drop))
    }

    pub(crate) fn cos(&self) -> TensorResult {
        self.result(self.tensor.f_cos())
    }

    pub(crate) fn sin(&self) -> TensorResult {
        self.result(self.tensor.f_sin())
    }

    pub(crate) fn silu(&self) -> TensorResult {
        self.result(self.tensor.f_silu())
    }

    pub(crate) fn gelu_tanh(&self) -> TensorResult {
        self.result(self.tensor.f_gelu("tanh"))
    }

    pub(crate) fn relu(&self) -> TensorResult {
        self.result(self.tensor.f_relu())
    }

    pub(crate) fn sigmoid(&self) -> TensorResult {
        self.result(self.tensor.f_sigmoid())
    }

    pub(crate) fn clamp(&self, least: f64, most: f64) -> TensorResult {
        self.result(self.tensor.f_clamp(least, most))
    }

    pub(crate) fn clamp_max(&self, most: f64) -> TensorResult {
        self.result(self.tensor.f_clamp_max(most))
    }

    pub(crate) fn outer(&self, other: &Self) -> TensorResult {
        self.result(self.tensor.f_outer(&other.tensor))
    }

    pub(crate) fn index_select(&self, dim: i64, index: &Self) -> TensorResult {
        self.result(self.tensor.f_index_select(dim, &index.tensor))
    }

    pub(crate) fn matmul(&self, other: &Self) -> TensorResult {
        self.result(self.tensor.f_matmul(&other.tensor))
    }

    /// `self weight' + bias`.
    pub(crate) fn linear(&self, weight: &Self, bias: Option<&Self>) -> TensorResult {
        self.result(self.tensor.f_linear(&weight.tensor, bias.map(|bias| &bias.tensor)))
    }

    pub(crate) fn layer_norm(
        &self,
        size: &[i64],
        weight: &Self,
        bias: Option<&Self>,
        epsilon: f64,
    ) -> TensorResult {
        let bias = bias.map(|bias| &bias.tensor);
        self.result(self.tensor.f_layer_norm(size, Some(&weight.tensor), bias, epsilon, false))
    }

    pub(crate) fn rms_norm(&self, size: &[i64], weight: &Self, epsilon: f64) -> TensorResult {
        self.result(self.tensor.f_rms_norm(size, Some(&weight.tensor), epsilon))
    }

    /// Rotates the last dimension by `shift` elements.
    pub(crate) fn roll_last(&self, shift: i64) -> TensorResult {
        self.result(self.tensor.f_roll(shift, -1_i64))
    }

    /// Reverses the last dimension.
    pub(crate) fn flip_last(&self) -> TensorResult {
        self.result(self.tensor.f_flip(-1_i64))
    }

    /// `self + first x second`.
    pub(crate) fn addcmul(&self, first: &Self, second: &Self) -> TensorResult {
        self.result(self.tensor.f_addcmul(&first.tensor, &second.tensor))
    }

    /// Scaled dot-product attention, softmax(`scale` q k' + mask) v. Sizes: batch x heads x rows x elements. Without a mask
    /// attention is causal: row n attends to the first n positions.
    pub(crate) fn attend([query, keys, values]: [&Self; 3], mask: Option<&Self>, scale: f64) -> TensorResult {
        if query.memory.device.device.is_cuda() {
            // LibTorch would prefer cuDNN on compute capability 9 and 10, which makes a plan for every new size.
            return Ok(Self::attend_efficiently([query, keys, values], mask, scale, false)?.0);
        }
        query.result(tch::Tensor::f_scaled_dot_product_attention(
            &query.tensor,
            &keys.tensor,
            &values.tensor,
            mask.map(|mask| &mask.tensor),
            0.0,
            mask.is_none(),
            scale,
            false,
        ))
    }

    /// As [`Self::attend`]. Also returns the logarithm of each row's softmax denominator, in float32: batch x heads x rows.
    pub(crate) fn attend_with_log_sum(
        [query, keys, values]: [&Self; 3],
        mask: Option<&Self>,
        scale: f64,
    ) -> Result<(Self, Self), BackendError> {
        let (q, k, v) = (&query.tensor, &keys.tensor, &values.tensor);
        let (bias, causal) = (mask.map(|mask| &mask.tensor), mask.is_none());
        if !query.memory.device.device.is_cuda() {
            let outcome = tch::Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, bias, scale,
            );
            return query.pair(outcome);
        }
        let (output, sum) = Self::attend_efficiently([query, keys, values], mask, scale, true)?;
        // Its rows are padded.
        let sum = sum.narrow(2, 0, q.size()[2])?;
        Ok((output, sum))
    }

    /// Memory-efficient attention of CUDA. Returns logarithms of softmax denominators if `with_sum`.
    fn attend_efficiently(
        [query, keys, values]: [&Self; 3],
        mask: Option<&Self>,
        scale: f64,
        with_sum: bool,
    ) -> Result<(Self, Self), BackendError> {
        let device = &query.memory.device;
        // The kernels read 16 bytes at a time. Further zeros change no score: the scale is stated.
        let padded = |x: &Self| {
            let step = if x.tensor.kind() == Kind::Float { 4 } else { 8 };
            match (step - x.tensor.size()[3] % step) % step {
                0 => Ok(x.tensor.shallow_clone()),
                missing => device.checked(x.tensor.f_constant_pad_nd([0, missing])),
            }
        };
        let (q, k, v) = (padded(query)?, padded(keys)?, padded(values)?);
        // The kernel takes a mask of full size; that is a view.
        let size = [q.size()[0], q.size()[1], q.size()[2], k.size()[2]];
        let bias = mask.map(|mask| mask.tensor.f_expand(size, false)).transpose();
        let bias = device.checked(bias)?;
        let outcome = tch::Tensor::f_internal_scaled_dot_product_efficient_attention(
            &q,
            &k,
            &v,
            bias.as_ref(),
            with_sum,
            0.0,
            mask.is_none(),
            scale,
        );
        let (output, sum) = query.pair(outcome.map(|(output, sum, _, _)| (output, sum)))?;
        Ok((output.narrow(3, 0, values.tensor.size()[3])?, sum))
    }

    /// Counts a call with two results.
    fn pair(
        &self,
        outcome: Result<(tch::Tensor, tch::Tensor), TchError>,
    ) -> Result<(Self, Self), BackendError> {
        let device = &self.memory.device;
        let (first, second) = device.checked(outcome)?;
        device.count(|counts| counts.calls += 1);
        Ok((Self::tracked(device, first)?, Self::tracked(device, second)?))
    }

    pub(crate) fn sub(&self, other: &Self) -> TensorResult {
        self.result(self.tensor.f_sub(&other.tensor))
    }

    pub(crate) fn add_integer(&self, value: i64) -> TensorResult {
        self.result(self.tensor.f_add_scalar(value))
    }

    pub(crate) fn zero_(&self) -> Result<(), BackendError> {
        self.in_place(|own| own.f_zero_().map(drop))
    }

    /// Writes row n of `rows` to row `index[n]`.
    pub(crate) fn index_copy_(&self, dim: i64, index: &Self, rows: &Self) -> Result<(), BackendError> {
        self.in_place(|own| own.f_index_copy_(dim, &index.tensor, &rows.tensor).map(drop))
    }

    pub(crate) fn greater(&self, other: &Self) -> TensorResult {
        self.result(self.tensor.f_gt_tensor(&other.tensor))
    }

    pub(crate) fn less(&self, other: &Self) -> TensorResult {
        self.result(self.tensor.f_lt_tensor(&other.tensor))
    }

    pub(crate) fn logical_or_(&self, other: &Self) -> Result<(), BackendError> {
        self.in_place(|own| own.f_logical_or_(&other.tensor).map(drop))
    }

    /// Softmax over the last dimension, computed in `kind`.
    pub(crate) fn softmax_last(&self, kind: Kind) -> TensorResult {
        self.result(self.tensor.f_softmax(-1, kind))
    }

    /// Returns the largest `count` elements of the last dimension in descending order, and their indices.
    pub(crate) fn top_k(&self, count: i64) -> Result<(Self, Self), BackendError> {
        self.pair(self.tensor.f_topk(count, -1, true, true))
    }

    pub(crate) fn gather_last(&self, index: &Self) -> TensorResult {
        self.result(self.tensor.f_gather(-1, &index.tensor, false))
    }

    /// Writes `value` at `index` of the last dimension.
    pub(crate) fn scatter_last_(&self, index: &Self, value: f64) -> Result<(), BackendError> {
        self.in_place(|own| own.f_scatter_value_(-1, &index.tensor, value).map(drop))
    }

    pub(crate) fn max_last(&self) -> TensorResult {
        self.result(self.tensor.f_amax(-1_i64, false))
    }

    pub(crate) fn sum_last(&self) -> TensorResult {
        self.result(self.tensor.f_sum_dim_intlist(-1_i64, false, None))
    }
}
