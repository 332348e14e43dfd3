//! [`Backend`] by LibTorch's operations.

use crate::attention::{LatentHeads, attend_grouped};
use crate::heads::{DeviceHeads, HeadProjections, HostHeads};
use crate::host::{self, HostMatrix, HostMlp};
use crate::library::{self, DeviceOpener, InstalledDevices, Kind, Tensor, TorchDevice};
use crate::linear::{DeviceMlp, Embedding, Gated, Linear, Weight};
use crate::norm::Norm;
use crate::pages::TorchPages;
use crate::rope::{Angles, Rope};
use crate::rows::RowSelection;
use crate::selection;
use crate::spans::TorchSpans;
use main_model_fn::backend::{Affine, Backend, BackendError, PagedLayer, Router, RowSpan};
use main_model_fn::{DeviceError, DeviceName, LoadModelError, Routed};
use remoe_kernels::{Dtype, NumericsClass, Pool, WeightFormat};
use remoe_model::{
    Activation, Checkpoint, MlaFacts, MlpTensors, NormKind, RopeFacts, StoredDtype, TensorRef,
};
use remoe_weights::{load_gated, load_matrix, stored_dtype};
use std::borrow::Cow;
use std::marker::PhantomData;
use std::sync::Arc;

/// Operations by LibTorch on the machine's devices.
pub type Torch = TorchOn<InstalledDevices>;

/// Operations by LibTorch on the device that `D` opens.
pub struct TorchOn<D> {
    device: Arc<TorchDevice>,
    dtype: Dtype,
    pool: Arc<Pool>,
    opener: PhantomData<D>,
}

impl<D: DeviceOpener> TorchOn<D> {
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
        Ok(self.stored(checkpoint, tensor)?.to_kind(host::kind(dtype))?)
    }

    /// Reads a tensor to the device in the type of the checkpoint.
    fn stored(&self, checkpoint: &Checkpoint, tensor: &TensorRef) -> Result<Tensor, LoadModelError> {
        let stored = match tensor.dtype {
            StoredDtype::F32 => Kind::Float,
            StoredDtype::Bf16 => Kind::BFloat16,
            StoredDtype::F16 => Kind::Half,
        };
        let bytes = checkpoint.read(tensor)?;
        let shape: Vec<i64> = tensor.shape.iter().map(|&size| size as i64).collect();
        Ok(Tensor::from_bytes(&self.device, &bytes, &shape, stored)?)
    }

    fn weight(
        &self,
        checkpoint: &Checkpoint,
        parts: &[Affine<'_>],
        class: NumericsClass,
        threads: usize,
    ) -> Result<Weight, LoadModelError> {
        if self.device.is_host() {
            let weights: Vec<_> = parts.iter().map(|part| part.weight).collect();
            let matrix = Arc::new(load_matrix(checkpoint, &weights, class, threads)?);
            return Ok(Weight::Host(HostMatrix { matrix, pool: self.pool.clone() }));
        }
        let parts = parts
            .iter()
            .map(|part| self.tensor_as(checkpoint, part.weight, class.dtype))
            .collect::<Result<Vec<_>, LoadModelError>>()?;
        Ok(Weight::Device(joined(parts)?))
    }
}

impl<D: DeviceOpener> Backend for TorchOn<D> {
    const NAME: &'static str = "torch";
    type Tensor = Tensor;
    type Embedding = Embedding;
    type Linear = Linear;
    type Norm = Norm;
    type GatedMlp = Gated;
    type UpProjections = LatentHeads;
    type Rope = Rope;
    type Angles = Angles;
    type Vector = Tensor;
    type Pages = TorchPages;
    type PreparedSpans = TorchSpans;
    const ADDS_SHARED: bool = true;
    const SELECTS_LOGITS: bool = true;

    fn open(device: Option<DeviceName>, dtype: Dtype, pool: &Arc<Pool>) -> Result<Self, DeviceError> {
        library::set_threads(pool.threads());
        Ok(Self { device: D::open(device)?, dtype, pool: pool.clone(), opener: PhantomData })
    }

    fn device(&self) -> DeviceName {
        self.device.name()
    }

    fn enter_thread(&self) {
        library::forbid_gradients();
    }

    fn enter_layer(&self, layer: Option<usize>) {
        self.device.set_layer(layer);
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

    fn tied_embedding(&self, weight: &Linear) -> Option<Embedding> {
        Some(match &weight.weight {
            Weight::Host(host) => Embedding::Packed(host.matrix.clone()),
            Weight::Device(weight) => Embedding::Rows(weight.alias()),
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
        // Rounded to the compute dtype like all weights, then converted to the dtype of the product, which may be wider.
        let kind = host::kind(class.dtype);
        let biases = parts
            .iter()
            .map(|part| match part.bias {
                Some(bias) => Ok(self.tensor(checkpoint, bias)?.to_kind(kind)?),
                None => {
                    let outputs = part.weight.shape.first().copied().unwrap_or(0) as i64;
                    Ok(Tensor::zeros(&self.device, &[outputs], kind)?)
                }
            })
            .collect::<Result<Vec<_>, LoadModelError>>()?;
        Ok(Linear { weight, bias: Some(joined(biases)?) })
    }

    fn load_norm(
        &self,
        checkpoint: &Checkpoint,
        norm: Affine<'_>,
        kind: NormKind,
        epsilon: f64,
    ) -> Result<Norm, LoadModelError> {
        let bias = norm.bias.map(|bias| self.tensor(checkpoint, bias)).transpose()?;
        Ok(Norm { kind, weight: self.tensor(checkpoint, norm.weight)?, bias, epsilon })
    }

    fn load_gated(
        &self,
        checkpoint: &Checkpoint,
        tensors: &MlpTensors,
        activation: Activation,
        class: NumericsClass,
    ) -> Result<Gated, LoadModelError> {
        if !self.device.is_host() {
            let gate = tensors.gate.as_ref();
            let gate = gate.ok_or(LoadModelError::Inconsistent("a gated network has no gate"))?;
            return Ok(Gated::Device(DeviceMlp {
                gate_up: Tensor::cat(
                    &[&self.tensor(checkpoint, &gate.weight)?, &self.tensor(checkpoint, &tensors.up.weight)?],
                    0,
                )?,
                down: self.tensor(checkpoint, &tensors.down.weight)?,
                activation,
            }));
        }
        let packed = load_gated(checkpoint, tensors, class)?;
        Ok(Gated::Host(HostMlp { packed, pool: self.pool.clone() }))
    }

    fn load_up_projections(
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
        let expand = expand.reshape(&[heads, nope_dim + value_dim, latent_dim])?;
        let part = |from, count| expand.narrow(1, from, count);
        let (keys, values) = (part(0, nope_dim)?, part(nope_dim, value_dim)?);
        let projections = if self.device.is_host() {
            HeadProjections::Host(HostHeads::pack(&keys, &values, stored, class, &self.pool)?)
        } else {
            let on_device = |part: &Tensor| part.to_kind(self.kind())?.contiguous();
            let (keys, values) = (on_device(&keys)?, on_device(&values)?);
            HeadProjections::Device(DeviceHeads { keys, values })
        };
        Ok(LatentHeads { projections, heads, nope_dim, rope_dim: size(facts.rope_dim), latent_dim })
    }

    fn rope(&self, facts: &RopeFacts) -> Result<Rope, BackendError> {
        Rope::new(facts, &self.device)
    }

    fn new_pages(&self, layers: &[PagedLayer]) -> TorchPages {
        TorchPages::new(layers, self.kind(), self.device.clone())
    }

    fn page_bytes(pages: &TorchPages) -> usize {
        pages.page_bytes()
    }

    fn upload_vector(&self, values: &[f32]) -> Result<Tensor, BackendError> {
        Tensor::from_slice(&self.device, values)
    }

    fn reserve_pages(
        &self,
        pages: &mut TorchPages,
        count: usize,
        positions: usize,
    ) -> Result<usize, BackendError> {
        pages.reserve(count, positions)
    }

    fn workspace_bytes(pages: &TorchPages) -> usize {
        pages.workspace_bytes()
    }

    fn prepare_spans(&self, pages: &TorchPages, spans: Vec<RowSpan>) -> Result<TorchSpans, BackendError> {
        TorchSpans::new(pages, &spans)
    }

    fn route<'a>(
        &self,
        router: &Router<Self>,
        x: &'a Tensor,
    ) -> Result<(Cow<'a, [u8]>, Routed), BackendError> {
        let logits = router.linear.forward(x)?;
        let (rows, routed) = selection::route(&router.rule, router.correction.as_ref(), &logits, x)?;
        Ok((Cow::Owned(rows), routed))
    }

    fn largest_logits(&self, x: &Tensor, count: usize) -> Result<(Vec<u32>, Vec<f32>), BackendError> {
        selection::likeliest(x, count)
    }

    fn copy_page(&self, pages: &mut TorchPages, from: usize, to: usize) -> Result<(), BackendError> {
        pages.copy(from, to)
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
                return Tensor::from_bytes(&self.device, &rows, &size, host::kind(matrix.dtype()));
            }
        };
        let tokens: Vec<i64> = tokens.iter().copied().map(i64::from).collect();
        let tokens = Tensor::from_slice(&self.device, &tokens)?;
        table.index_select(0, &tokens)
    }

    fn linear(&self, weight: &Linear, x: &Tensor) -> Result<Tensor, BackendError> {
        weight.forward(x)
    }

    fn norm(&self, norm: &Norm, x: &Tensor) -> Result<Tensor, BackendError> {
        norm.forward(x)
    }

    fn split<const N: usize>(&self, x: Tensor, widths: [usize; N]) -> Result<[Tensor; N], BackendError> {
        let parts = x.split(&widths.map(|width| width as i64), 1)?;
        let actual = parts.len();
        parts.try_into().map_err(|_| BackendError::Shape { what: "parts of a row", actual, expected: N })
    }

    fn clamp(&self, x: Tensor, bound: f64) -> Result<Tensor, BackendError> {
        x.clamp(-bound, bound)
    }

    fn angles(&self, rope: &Rope, positions: &[usize]) -> Result<Angles, BackendError> {
        rope.angles(positions, self.kind())
    }

    fn select_angles(&self, angles: &Angles, rows: &[usize]) -> Result<Angles, BackendError> {
        let rows = rows_of(&self.device, rows)?;
        angles.select_rows(|all| rows.select(all))
    }

    fn rotate(&self, angles: &Angles, x: Tensor, head_dim: usize) -> Result<Tensor, BackendError> {
        let size = x.size();
        angles.rotate(&in_heads(&x, head_dim)?)?.reshape(&size)
    }

    fn rotate_pair(
        &self,
        angles: &Angles,
        [first, second]: [Tensor; 2],
        head_dims: [usize; 2],
    ) -> Result<[Tensor; 2], BackendError> {
        let sizes = [first.size(), second.size()];
        let heads = [in_heads(&first, head_dims[0])?, in_heads(&second, head_dims[1])?];
        let [first, second] = angles.rotate_both(heads.each_ref())?;
        Ok([first.reshape(&sizes[0])?, second.reshape(&sizes[1])?])
    }

    fn attend(
        &self,
        pages: &mut TorchPages,
        layer: usize,
        query_key_value: [Tensor; 3],
        sinks: Option<&Tensor>,
        spans: &TorchSpans,
    ) -> Result<Tensor, BackendError> {
        attend_grouped(pages, layer, &query_key_value, sinks, spans)
    }

    fn attend_latent(
        &self,
        pages: &mut TorchPages,
        layer: usize,
        heads: &LatentHeads,
        query_latent_key: [Tensor; 3],
        spans: &TorchSpans,
    ) -> Result<Tensor, BackendError> {
        heads.attend(pages, layer, &query_latent_key, spans)
    }

    fn add(&self, x: Tensor, y: &Tensor) -> Result<Tensor, BackendError> {
        x.add(y)
    }

    fn add_rows(&self, x: &mut Tensor, first: usize, y: &Tensor) -> Result<(), BackendError> {
        let rows = y.size().first().copied().unwrap_or_default();
        x.narrow(0, first as i64, rows)?.add_(y)
    }

    fn gated(&self, network: &Gated, x: &Tensor) -> Result<Tensor, BackendError> {
        network.forward(x)
    }

    fn scale(&self, x: Tensor, factor: f64) -> Result<Tensor, BackendError> {
        x.mul_scalar(factor)
    }

    fn scale_by_sigmoid(&self, x: Tensor, gate: &Tensor) -> Result<Tensor, BackendError> {
        gate.sigmoid()?.mul(&x)
    }

    fn select_rows(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor, BackendError> {
        rows_of(&self.device, rows)?.select(x)
    }

    fn host_bytes<'a>(&self, x: &'a Tensor) -> Result<Cow<'a, [u8]>, BackendError> {
        x.bytes().map(Cow::Owned)
    }

    fn host_floats(&self, x: &Tensor) -> Result<Vec<f32>, BackendError> {
        x.floats()
    }

    fn tensor_from_host<E: From<BackendError>>(
        &self,
        rows: usize,
        width: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Tensor, E> {
        let mut bytes = vec![0; rows * width * self.dtype.bytes()];
        fill(&mut bytes)?;
        Ok(Tensor::from_bytes(&self.device, &bytes, &[rows as i64, width as i64], self.kind())?)
    }
}

/// Joins matrices or biases by outputs.
fn joined(mut parts: Vec<Tensor>) -> Result<Tensor, BackendError> {
    match parts.len() {
        1 => Ok(parts.swap_remove(0)),
        _ => Tensor::cat(&parts.iter().collect::<Vec<_>>(), 0),
    }
}

/// Reshapes rows x elements to rows x heads x `head_dim`.
fn in_heads(x: &Tensor, head_dim: usize) -> Result<Tensor, BackendError> {
    x.reshape(&[x.size()[0], -1, head_dim as i64])
}

/// Selects `rows`.
fn rows_of(device: &Arc<TorchDevice>, rows: &[usize]) -> Result<RowSelection, BackendError> {
    let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    RowSelection::new(device, &rows)
}
