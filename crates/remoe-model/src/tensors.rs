//! Byte ranges of tensors, grouped as the engine uses them.
//!
//! Weights of projections are row-major, `[rows, columns]` = `[outputs, inputs]`.

use std::ops::Range;
use std::sync::Arc;

use crate::decode::{MXFP4_BYTES, MXFP4_GROUP};
use crate::facts::StoredDtype;

/// A contiguous byte range of one file with a tensor, or with one expert's part of a fused tensor. Shape and dtype are those
/// of the decoded elements: quantised tensors are decoded when they are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRef {
    /// Index of the file.
    pub file: usize,
    /// Name of the tensor. Parts of a fused tensor have its name.
    pub name: Arc<str>,
    /// Position of the first byte in the file.
    pub offset: u64,
    /// Stored length in bytes, without scales.
    pub bytes: u64,
    /// Element type after decoding.
    pub dtype: StoredDtype,
    /// Sizes of the dimensions, the outermost first.
    pub shape: Vec<usize>,
    /// Strides of the elements. `None` if they are contiguous and row-major.
    pub strides: Option<Strides>,
    /// Storage format of the elements.
    pub stored: StoredAs,
}

/// Storage format of a tensor's elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredAs {
    /// Elements of the tensor's dtype.
    Plain,
    /// fp8 e4m3, one byte per element, with a scale for each block of the matrix.
    Fp8 {
        /// Rows and columns of a block. Blocks at the edges may be partial.
        block: [usize; 2],
        /// Scales of the blocks, row-major.
        scales: Box<Scales>,
        /// Type of the scales: float32 or bfloat16.
        scale_dtype: StoredDtype,
    },
    /// MXFP4 (OCP Microscaling Formats 1.0): e2m1, two elements in a byte, the first in the lower half.
    Mxfp4 {
        /// Scales in e8m0, one byte for every 32 elements of a row.
        scales: Box<Scales>,
    },
}

/// Byte range of a tensor of scales.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scales {
    /// Index of the file.
    pub file: usize,
    /// Name of the tensor.
    pub name: Arc<str>,
    /// Position of the first byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Scales {
    /// Returns part `index` of parts of `bytes` bytes each.
    fn part(&self, index: usize, bytes: u64) -> Box<Self> {
        Box::new(Self { offset: self.offset + index as u64 * bytes, bytes, ..self.clone() })
    }
}

/// Positions of the elements of a matrix that is interleaved with others in one byte range. Element (row, column) is
/// element number `first + row * self.row + column * self.column` of the range. A vector is the first column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// Number of element (0, 0).
    pub first: usize,
    /// Distance between rows, in elements.
    pub row: usize,
    /// Distance between columns, in elements.
    pub column: usize,
}

impl TensorRef {
    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }

    /// Returns the stored bytes of the tensor's own elements, with their scales. For an interleaved matrix this is less than
    /// its byte range.
    #[must_use]
    pub fn own_bytes(&self) -> u64 {
        match &self.stored {
            StoredAs::Plain => self.elements() * self.dtype.bytes(),
            StoredAs::Fp8 { scales, .. } => self.elements() + scales.bytes,
            StoredAs::Mxfp4 { .. } => self.elements() / MXFP4_GROUP as u64 * (MXFP4_BYTES as u64 + 1),
        }
    }

    /// Returns the bytes of the tensor's own elements after decoding.
    pub(crate) fn decoded_bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }

    /// Returns the elements of a stored row; 1 for a vector.
    pub(crate) fn stored_columns(&self) -> usize {
        match self.strides {
            // The tensor is stored transposed.
            Some(strides) if strides.column > 1 => strides.column,
            _ => self.shape.get(1..).unwrap_or_default().iter().product(),
        }
    }

    /// Returns the number of stored rows.
    pub(crate) fn stored_rows(&self) -> usize {
        let row = self.row_range(&(0..1)).end.max(1);
        usize::try_from(self.bytes / row).unwrap_or(usize::MAX)
    }

    /// Returns the byte range of some stored rows, relative to the tensor.
    pub(crate) fn row_range(&self, rows: &Range<usize>) -> Range<u64> {
        let columns = self.stored_columns() as u64;
        let row = match self.stored {
            StoredAs::Plain => columns * self.dtype.bytes(),
            StoredAs::Fp8 { .. } => columns,
            StoredAs::Mxfp4 { .. } => columns / 2,
        };
        rows.start as u64 * row..rows.end as u64 * row
    }

    /// Returns the byte ranges of the tensor and of its scales, with name and file.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (&str, usize, Range<u64>)> {
        let scales = match &self.stored {
            StoredAs::Plain => None,
            StoredAs::Fp8 { scales, .. } | StoredAs::Mxfp4 { scales } => Some(scales),
        };
        let elements = (&*self.name, self.file, self.offset..self.offset + self.bytes);
        let scales =
            scales.map(|scales| (&*scales.name, scales.file, scales.offset..scales.offset + scales.bytes));
        std::iter::once(elements).chain(scales)
    }

    /// Returns part `index` of the first dimension.
    fn part(&self, index: usize) -> Self {
        let shape = self.shape.get(1..).unwrap_or_default().to_vec();
        let elements = shape.iter().map(|&size| size as u64).product::<u64>();
        let (bytes, stored) = match &self.stored {
            StoredAs::Mxfp4 { scales } => {
                let groups = elements / MXFP4_GROUP as u64;
                (groups * MXFP4_BYTES as u64, StoredAs::Mxfp4 { scales: scales.part(index, groups) })
            }
            other => (elements * self.dtype.bytes(), other.clone()),
        };
        Self { offset: self.offset + index as u64 * bytes, bytes, shape, stored, ..self.clone() }
    }

    /// Returns every `step`th output of part `index` of the first dimension, `[outputs, inputs]`, from `first` on.
    pub(crate) fn every_row(&self, index: usize, first: usize, step: usize) -> Self {
        let part = self.part(index);
        let (height, width) = (part.shape.first().copied().unwrap_or(0), part.shape.get(1).copied());
        let width = width.unwrap_or(0);
        let strides = (step > 1).then_some(Strides { first: first * width, row: step * width, column: 1 });
        Self { shape: vec![height / step, width], strides, ..part }
    }

    /// Returns every `step`th output of part `index` of the first dimension, stored as `[inputs, outputs]`, from `first` on.
    /// The result has the shape `[outputs, inputs]`.
    pub(crate) fn every_column(&self, index: usize, first: usize, step: usize) -> Self {
        let part = self.part(index);
        let (height, width) = (part.shape.first().copied().unwrap_or(0), part.shape.get(1).copied());
        let width = width.unwrap_or(0);
        let strides = Some(Strides { first, row: step, column: width });
        Self { shape: vec![width / step, height], strides, ..part }
    }

    /// Returns every `step`th element of part `index` of the first dimension, a vector, from `first` on.
    pub(crate) fn every_element(&self, index: usize, first: usize, step: usize) -> Self {
        let part = self.part(index);
        let length = part.shape.first().copied().unwrap_or(0) / step;
        let strides = (step > 1).then_some(Strides { first, row: step, column: 0 });
        Self { shape: vec![length], strides, ..part }
    }

    /// Returns rows `from .. from + rows` of matrix `index` of a stack of matrices.
    pub(crate) fn rows_of(&self, index: usize, from: usize, rows: usize) -> Self {
        let height = self.shape.get(1).copied().unwrap_or(0);
        let width = self.shape.get(2).copied().unwrap_or(0);
        let row = width as u64 * self.dtype.bytes();
        Self {
            offset: self.offset + (index as u64 * height as u64 + from as u64) * row,
            bytes: rows as u64 * row,
            shape: vec![rows, width],
            ..self.clone()
        }
    }
}

/// Weight and bias of a projection or a norm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linear {
    /// `[outputs, inputs]`; for a norm `[hidden]`.
    pub weight: TensorRef,
    /// `[outputs]`, if the model has a bias.
    pub bias: Option<TensorRef>,
}

impl From<TensorRef> for Linear {
    fn from(weight: TensorRef) -> Self {
        Self { weight, bias: None }
    }
}

impl Linear {
    /// Returns weight and bias converted by `weight` and `bias`.
    pub(crate) fn map(
        &self,
        weight: impl Fn(&TensorRef) -> TensorRef,
        bias: impl Fn(&TensorRef) -> TensorRef,
    ) -> Self {
        Self { weight: weight(&self.weight), bias: self.bias.as_ref().map(bias) }
    }

    pub(crate) fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
        std::iter::once(&self.weight).chain(&self.bias)
    }
}

/// Attention tensors of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionTensors {
    /// Grouped-query attention.
    Gqa(GqaTensors),
    /// Multi-head latent attention.
    Mla(MlaTensors),
}

impl AttentionTensors {
    /// Returns all tensors.
    pub(crate) fn tensors(&self) -> Vec<&TensorRef> {
        match self {
            Self::Gqa(GqaTensors { q, k, v, o, q_norm, k_norm, sinks }) => {
                let others = q_norm.iter().chain(k_norm).chain(sinks);
                [q, k, v, o].into_iter().flat_map(Linear::tensors).chain(others).collect()
            }
            Self::Mla(MlaTensors { query, kv_a, kv_a_norm, kv_b, o }) => {
                let query: Vec<_> = match query {
                    QueryTensors::Direct(weight) => vec![weight],
                    QueryTensors::Latent { a, a_norm, b } => a.tensors().chain([a_norm, b]).collect(),
                };
                let rest = kv_a.tensors().chain([kv_a_norm, kv_b]).chain(o.tensors());
                query.into_iter().chain(rest).collect()
            }
        }
    }
}

/// Tensors of grouped-query attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GqaTensors {
    /// Query projection: `[heads x head_dim, hidden]`.
    pub q: Linear,
    /// Key projection: `[kv_heads x head_dim, hidden]`.
    pub k: Linear,
    /// Value projection: `[kv_heads x head_dim, hidden]`.
    pub v: Linear,
    /// Output projection: `[hidden, heads x head_dim]`.
    pub o: Linear,
    /// Norm of queries: `[heads x head_dim]`, or `[head_dim]` if heads are normalised separately.
    pub q_norm: Option<TensorRef>,
    /// Norm of keys: `[kv_heads x head_dim]`, or `[head_dim]`.
    pub k_norm: Option<TensorRef>,
    /// Attention sinks: `[heads]`.
    pub sinks: Option<TensorRef>,
}

/// Tensors of multi-head latent attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlaTensors {
    /// Query projection, direct or through a latent.
    pub query: QueryTensors,
    /// Projection to the latent of keys and values, then to the shared rotated key: `[kv_rank + rope_dim, hidden]`.
    pub kv_a: Linear,
    /// Norm of the latent of keys and values: `[kv_rank]`.
    pub kv_a_norm: TensorRef,
    /// Projection from the latent, for each head to the unrotated part of the key, then to the value:
    /// `[heads x (nope_dim + value_dim), kv_rank]`.
    pub kv_b: TensorRef,
    /// Output projection: `[hidden, heads x value_dim]`.
    pub o: Linear,
}

/// Query projection of multi-head latent attention. Each head has its unrotated part first, then the rotated one.
#[expect(clippy::large_enum_variant, reason = "there is one per layer")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueryTensors {
    /// `[heads x (nope_dim + rope_dim), hidden]`.
    Direct(TensorRef),
    /// Two projections with a latent in between.
    Latent {
        /// Projection to the latent: `[q_rank, hidden]`.
        a: Linear,
        /// Norm of the latent: `[q_rank]`.
        a_norm: TensorRef,
        /// Projection from the latent: `[heads x (nope_dim + rope_dim), q_rank]`.
        b: TensorRef,
    },
}

/// Router tensors of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterTensors {
    /// Weight `[experts, hidden]`, and bias `[experts]` if there is one.
    pub linear: Linear,
    /// Correction that is added to each expert's score when experts are chosen: `[experts]`. It may be float32 even if
    /// weights have another type.
    pub correction: Option<TensorRef>,
}

impl RouterTensors {
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
        self.linear.tensors().chain(&self.correction)
    }
}

/// Norms of one layer, each `[hidden]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NormTensors {
    /// Norm before the attention.
    pub attention: Linear,
    /// Norm before the MLP.
    pub mlp: Linear,
}

/// Tensors of an MLP: `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlpTensors {
    /// `[width, hidden]`.
    pub gate: Option<Linear>,
    /// `[width, hidden]`.
    pub up: Linear,
    /// `[hidden, width]`.
    pub down: Linear,
}

impl MlpTensors {
    /// Returns the stored bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors().map(TensorRef::own_bytes).sum()
    }

    /// Returns the gate, up and down projections.
    #[must_use]
    pub fn linears(&self) -> [Option<&Linear>; 3] {
        [self.gate.as_ref(), Some(&self.up), Some(&self.down)]
    }

    /// Returns all tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
        self.linears().into_iter().flatten().flat_map(Linear::tensors)
    }
}

/// Tensors of one routed expert.
pub type ExpertTensors = MlpTensors;

/// Tensors of the shared experts of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedTensors {
    /// MLP that combines all shared experts.
    pub mlp: MlpTensors,
    /// Gate, whose sigmoid multiplies the output: `[1, hidden]`.
    pub gate: Option<TensorRef>,
}
