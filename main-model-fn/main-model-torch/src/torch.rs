//! LibTorch's operations, as the seam wants them.

use crate::attention::{LatentHeads, grouped};
use crate::error::Refused;
use crate::heads::{DeviceHeads, HeadProjections, HostHeads};
use crate::host::{self, HostMatrix, HostMlp};
use crate::linear::{DeviceMlp, Embedding, Gated, Linear, Weight};
use crate::norm::Norm;
use crate::pages::TorchPages;
use crate::rope::{Angles, Rope};
use main_model_fn::backend::{Affine, Backend, BackendError, PagedLayer, Span};
use main_model_fn::{DeviceError, DeviceName, LoadModelError};
use remoe_kernels::{Dtype, NumericsClass, Pool, WeightFormat};
use remoe_model::{
    Activation, Checkpoint, MlaFacts, MlpTensors, NormKind, RopeFacts, StoredDtype, TensorRef,
};
use remoe_weights::{load_gated, load_matrix, stored_dtype};
use std::borrow::Cow;
use std::sync::Arc;
use tch::{Cuda, Device, Kind, Tensor};

/// Operations by LibTorch.
pub struct Torch {
    name: DeviceName,
    device: Device,
    dtype: Dtype,
    pool: Arc<Pool>,
}

/// CUDA where there is one, else the processor.
fn best() -> DeviceName {
    if Cuda::is_available() { DeviceName::Cuda(0) } else { DeviceName::Cpu }
}

impl Torch {
    fn kind(&self) -> Kind {
        host::kind(self.dtype)
    }

    fn tensor(&self, checkpoint: &Checkpoint, tensor: &TensorRef) -> Result<Tensor, LoadModelError> {
        self.tensor_as(checkpoint, tensor, self.dtype)
    }

    fn tensor_as(
        &self,
        checkpoint: &Checkpoint,
        tensor: &TensorRef,
        dtype: Dtype,
    ) -> Result<Tensor, LoadModelError> {
        Ok(self.stored(checkpoint, tensor)?.f_to_kind(host::kind(dtype)).told()?)
    }

    /// As the checkpoint has it, on the device.
    fn stored(&self, checkpoint: &Checkpoint, tensor: &TensorRef) -> Result<Tensor, LoadModelError> {
        let stored = match tensor.dtype {
            StoredDtype::F32 => Kind::Float,
            StoredDtype::Bf16 => Kind::BFloat16,
            StoredDtype::F16 => Kind::Half,
        };
        let bytes = checkpoint.read(tensor)?;
        let shape: Vec<i64> = tensor.shape.iter().map(|&size| size as i64).collect();
        let tensor = Tensor::f_from_data_size(&bytes, &shape, stored).told()?;
        Ok(tensor.f_to_device(self.device).told()?)
    }

    fn weight(
        &self,
        checkpoint: &Checkpoint,
        parts: &[Affine<'_>],
        class: NumericsClass,
        threads: usize,
    ) -> Result<Weight, LoadModelError> {
        if self.device == Device::Cpu {
            let weights: Vec<_> = parts.iter().map(|part| part.weight).collect();
            let matrix = Arc::new(load_matrix(checkpoint, &weights, class, threads)?);
            return Ok(Weight::Host(HostMatrix { matrix, pool: self.pool.clone() }));
        }
        let parts = parts
            .iter()
            .map(|part| self.tensor_as(checkpoint, part.weight, class.dtype))
            .collect::<Result<Vec<_>, LoadModelError>>()?;
        Ok(Weight::Device(Tensor::f_cat(&parts, 0).told()?))
    }
}

impl Backend for Torch {
    const NAME: &'static str = "torch";
    type Tensor = Tensor;
    type Embedding = Embedding;
    type Linear = Linear;
    type Norm = Norm;
    type Gated = Gated;
    type Heads = LatentHeads;
    type Rope = Rope;
    type Angles = Angles;
    type Pages = TorchPages;

    fn open(device: Option<DeviceName>, dtype: Dtype, pool: &Arc<Pool>) -> Result<Self, DeviceError> {
        tch::set_num_threads(i32::try_from(pool.threads()).unwrap_or(i32::MAX));
        let name = device.unwrap_or_else(best);
        let device = match name {
            DeviceName::Cpu => Device::Cpu,
            DeviceName::Cuda(index) => {
                let found = if Cuda::is_available() { Cuda::device_count() } else { 0 };
                let found = usize::try_from(found).unwrap_or(0);
                if index >= found {
                    return Err(DeviceError::Missing { index, found });
                }
                Device::Cuda(index)
            }
        };
        Ok(Self { name, device, dtype, pool: pool.clone() })
    }

    fn device(&self) -> DeviceName {
        self.name
    }

    fn enter_thread(&self) {
        // As long as the thread lives.
        #[expect(clippy::disallowed_methods, reason = "the guard lives as long as the thread")]
        std::mem::forget(tch::no_grad_guard());
    }

    fn load_embedding(
        &self,
        checkpoint: &Arc<Checkpoint>,
        table: &TensorRef,
        class: NumericsClass,
    ) -> Result<Embedding, LoadModelError> {
        Ok(match class.weights {
            WeightFormat::Plain => Embedding::Rows(self.tensor(checkpoint, table)?),
            _ => Embedding::Packed(Arc::new(load_matrix(checkpoint, &[table], class, self.pool.threads())?)),
        })
    }

    fn table_of(&self, weight: &Linear) -> Option<Embedding> {
        Some(match &weight.weight {
            Weight::Host(host) => Embedding::Packed(host.matrix.clone()),
            Weight::Device(weight) => Embedding::Rows(weight.shallow_clone()),
        })
    }

    fn load_linear(
        &self,
        checkpoint: &Checkpoint,
        parts: &[Affine<'_>],
        class: NumericsClass,
        threads: usize,
    ) -> Result<Linear, LoadModelError> {
        let weight = self.weight(checkpoint, parts, class, threads)?;
        if parts.iter().all(|part| part.bias.is_none()) {
            return Ok(Linear { weight, bias: None });
        }
        let biases = parts
            .iter()
            .map(|part| match part.bias {
                Some(bias) => self.tensor(checkpoint, bias),
                None => {
                    let outputs = part.weight.shape.first().copied().unwrap_or(0) as i64;
                    Ok(Tensor::f_zeros([outputs], (self.kind(), self.device)).told()?)
                }
            })
            .collect::<Result<Vec<_>, LoadModelError>>()?;
        Ok(Linear { weight, bias: Some(Tensor::f_cat(&biases, 0).told()?) })
    }

    fn load_norm(
        &self,
        checkpoint: &Checkpoint,
        norm: Affine<'_>,
        kind: NormKind,
        epsilon: f64,
    ) -> Result<Norm, LoadModelError> {
        let bias = norm.bias.map(|bias| self.tensor(checkpoint, bias)).transpose()?;
        Ok(Norm { kind, weight: self.tensor(checkpoint, norm.weight)?, bias, eps: epsilon })
    }

    fn load_gated(
        &self,
        checkpoint: &Checkpoint,
        tensors: &MlpTensors,
        activation: Activation,
        class: NumericsClass,
    ) -> Result<Gated, LoadModelError> {
        if self.device != Device::Cpu {
            let gate = tensors.gate.as_ref();
            let gate = gate.ok_or(LoadModelError::Inconsistent("a gated network has no gate"))?;
            return Ok(Gated::Device(DeviceMlp {
                gate: self.tensor(checkpoint, &gate.weight)?,
                up: self.tensor(checkpoint, &tensors.up.weight)?,
                down: self.tensor(checkpoint, &tensors.down.weight)?,
                activation,
            }));
        }
        let packed = load_gated(checkpoint, tensors, class)?;
        Ok(Gated::Host(HostMlp { packed, pool: self.pool.clone() }))
    }

    fn load_heads(
        &self,
        checkpoint: &Checkpoint,
        expand: &TensorRef,
        facts: &MlaFacts,
        class: NumericsClass,
    ) -> Result<LatentHeads, LoadModelError> {
        let size = |size: usize| size as i64;
        let (heads, latent_dim) = (size(facts.heads), size(facts.kv_rank));
        let (nope_dim, value_dim) = (size(facts.nope_dim), size(facts.value_dim));
        let stored = stored_dtype(expand.dtype);
        let expand = self.stored(checkpoint, expand)?;
        let expand = expand.f_view([heads, nope_dim + value_dim, latent_dim]).told()?;
        let part = |from, count| expand.f_narrow(1, from, count).told();
        let (keys, values) = (part(0, nope_dim)?, part(nope_dim, value_dim)?);
        let projections = if self.device == Device::Cpu {
            HeadProjections::Host(HostHeads::pack(&keys, &values, stored, class, &self.pool)?)
        } else {
            let on_device = |part: &Tensor| part.f_to_kind(self.kind())?.f_contiguous();
            let (keys, values) = (on_device(&keys).told()?, on_device(&values).told()?);
            HeadProjections::Device(DeviceHeads { keys, values })
        };
        Ok(LatentHeads { projections, heads, nope_dim, rope_dim: size(facts.rope_dim), latent_dim })
    }

    fn rope(&self, facts: &RopeFacts) -> Result<Rope, BackendError> {
        Rope::new(facts, self.device).told()
    }

    fn pages(&self, layers: &[PagedLayer]) -> TorchPages {
        TorchPages::new(layers, self.kind(), self.device)
    }

    fn page_bytes(pages: &TorchPages) -> usize {
        pages.page_bytes()
    }

    fn copy_page(&self, pages: &mut TorchPages, from: usize, to: usize) -> Result<(), BackendError> {
        pages.copy(from, to).told()
    }

    fn embed(&self, table: &Embedding, tokens: &[u32]) -> Result<Tensor, BackendError> {
        let table = match table {
            Embedding::Rows(table) => table,
            Embedding::Packed(matrix) => {
                let mut rows = vec![0; tokens.len() * matrix.input_bytes()];
                for (&token, to) in tokens.iter().zip(rows.chunks_exact_mut(matrix.input_bytes())) {
                    matrix.read_row(token as usize, to)?;
                }
                let size = [tokens.len() as i64, matrix.inputs() as i64];
                return Tensor::f_from_data_size(&rows, &size, host::kind(matrix.dtype())).told();
            }
        };
        let tokens: Vec<i64> = tokens.iter().copied().map(i64::from).collect();
        let tokens = Tensor::f_from_slice(&tokens).told()?.f_to_device(self.device).told()?;
        table.f_index_select(0, &tokens).told()
    }

    fn linear(&self, weight: &Linear, x: &Tensor) -> Result<Tensor, BackendError> {
        weight.forward(x)
    }

    fn norm(&self, norm: &Norm, x: &Tensor) -> Result<Tensor, BackendError> {
        norm.forward(x).told()
    }

    fn split<const N: usize>(&self, x: Tensor, widths: [usize; N]) -> Result<[Tensor; N], BackendError> {
        let parts = x.f_split_with_sizes(&widths.map(|width| width as i64)[..], 1).told()?;
        let actual = parts.len();
        parts.try_into().map_err(|_| BackendError::Shape { what: "parts of a row", actual, expected: N })
    }

    fn clamp(&self, x: Tensor, bound: f64) -> Result<Tensor, BackendError> {
        x.f_clamp(-bound, bound).told()
    }

    fn angles(&self, rope: &Rope, positions: &[usize]) -> Result<Angles, BackendError> {
        let positions: Vec<i64> = positions.iter().map(|&position| position as i64).collect();
        rope.angles(&positions, self.kind()).told()
    }

    fn angles_of(&self, angles: &Angles, rows: &[usize]) -> Result<Angles, BackendError> {
        let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
        angles.of_rows(&Tensor::f_from_slice(&rows).told()?.f_to_device(self.device).told()?).told()
    }

    fn rotate(&self, angles: &Angles, x: Tensor, head_dim: usize) -> Result<Tensor, BackendError> {
        let size = x.size();
        let heads = x.f_reshape([size[0], -1, head_dim as i64]).told()?;
        angles.rotate(&heads).told()?.f_reshape(&size[..]).told()
    }

    fn attend(
        &self,
        pages: &mut TorchPages,
        layer: usize,
        query_key_value: [Tensor; 3],
        sinks: Option<&[f32]>,
        spans: &[Span],
    ) -> Result<Tensor, BackendError> {
        let sinks = match sinks {
            None => None,
            Some(sinks) => {
                let sinks = Tensor::f_from_slice(sinks).told()?.f_to_kind(self.kind()).told()?;
                Some(sinks.f_to_device(self.device).told()?)
            }
        };
        grouped(pages, layer, &query_key_value, sinks.as_ref(), spans).told()
    }

    fn attend_latent(
        &self,
        pages: &mut TorchPages,
        layer: usize,
        heads: &LatentHeads,
        [query, latent, key]: [Tensor; 3],
        spans: &[Span],
    ) -> Result<Tensor, BackendError> {
        heads.attend(pages, layer, &query, &latent, &key, spans)
    }

    fn add(&self, x: Tensor, y: &Tensor) -> Result<Tensor, BackendError> {
        x.f_add(y).told()
    }

    fn add_rows(&self, x: &mut Tensor, first: usize, y: &Tensor) -> Result<(), BackendError> {
        let rows = y.size().first().copied().unwrap_or_default();
        let _same_memory = x.f_narrow(0, first as i64, rows).told()?.f_add_(y).told()?;
        Ok(())
    }

    fn gated(&self, network: &Gated, x: &Tensor) -> Result<Tensor, BackendError> {
        network.forward(x)
    }

    fn scale(&self, x: Tensor, factor: f64) -> Result<Tensor, BackendError> {
        x.f_mul_scalar(factor).told()
    }

    fn scale_by_sigmoid(&self, x: Tensor, gate: &Tensor) -> Result<Tensor, BackendError> {
        gate.f_sigmoid().told()?.f_mul(&x).told()
    }

    fn rows(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor, BackendError> {
        let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
        let rows = Tensor::f_from_slice(&rows).told()?.f_to_device(self.device).told()?;
        x.f_index_select(0, &rows).told()
    }

    fn bytes<'a>(&self, x: &'a Tensor) -> Result<Cow<'a, [u8]>, BackendError> {
        host::bytes(x).map(Cow::Owned).told()
    }

    fn floats(&self, x: &Tensor) -> Result<Vec<f32>, BackendError> {
        host::floats(x).told()
    }

    fn filled<E: From<BackendError>>(
        &self,
        rows: usize,
        width: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Tensor, E> {
        let mut bytes = vec![0; rows * width * self.dtype.bytes()];
        fill(&mut bytes)?;
        let tensor = Tensor::f_from_data_size(&bytes, &[rows as i64, width as i64], self.kind());
        Ok(tensor.told()?.f_to_device(self.device).told()?)
    }
}
