//! Byte ranges of tensors, grouped as the engine uses them.
//!
//! All weights of projections are [rows, columns] = [outputs, inputs], row after row.

use std::ops::Range;
use std::sync::Arc;

use crate::decode::{MXFP4_BYTES, MXFP4_GROUP};
use crate::facts::StoredDtype;

/// A contiguous range of one file that holds one tensor, or one expert's part of a fused tensor. Sizes and
/// element type are those that it has when it is read; what is stored in a shorter form is decoded then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRef {
    /// Index of the file.
    pub file: usize,
    /// Name of the tensor; parts of a fused tensor have its name.
    pub name: Arc<str>,
    /// Position of the first byte in the file.
    pub offset: u64,
    /// Length in bytes, as it is stored, without scales.
    pub bytes: u64,
    /// Element type.
    pub dtype: StoredDtype,
    /// Sizes, the slowest first.
    pub shape: Vec<usize>,
    /// Where the elements lie, unless they lie row after row.
    pub strides: Option<Strides>,
    /// The form in which the elements are stored.
    pub stored: StoredAs,
}

/// The form in which the elements of a tensor are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredAs {
    /// As elements of its dtype.
    Plain,
    /// As fp8 e4m3, a byte each, which a scale multiplies: one for each block of a matrix.
    Fp8 {
        /// Rows and columns of a block; the last blocks may be cut off.
        block: [usize; 2],
        /// One for each block, row after row of blocks.
        scales: Box<Scales>,
        /// Their type: float32 or bfloat16.
        scale_dtype: StoredDtype,
    },
    /// As MXFP4 (OCP Microscaling Formats 1.0): e2m1, two in a byte, the first in the lower half.
    Mxfp4 {
        /// A byte, e8m0, for every 32 elements of a row.
        scales: Box<Scales>,
    },
}

/// The byte range of scales.
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
    /// Part `index` of parts of `bytes` each.
    fn part(&self, index: usize, bytes: u64) -> Box<Self> {
        Box::new(Self { offset: self.offset + index as u64 * bytes, bytes, ..self.clone() })
    }
}

/// A matrix, or a vector as its first column, among other elements of the same bytes: element (row, column)
/// is number `first` + row x `row` + column x `column`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// Element (0, 0).
    pub first: usize,
    /// From row to row.
    pub row: usize,
    /// From column to column.
    pub column: usize,
}

impl TensorRef {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }

    /// Bytes of its own elements with their scales, as they are stored; of a matrix among others less than its
    /// byte range.
    #[must_use]
    pub fn own_bytes(&self) -> u64 {
        match &self.stored {
            StoredAs::Plain => self.elements() * self.dtype.bytes(),
            StoredAs::Fp8 { scales, .. } => self.elements() + scales.bytes,
            StoredAs::Mxfp4 { .. } => self.elements() / MXFP4_GROUP as u64 * (MXFP4_BYTES as u64 + 1),
        }
    }

    /// Bytes of its own elements when they have been read.
    pub(crate) fn decoded_bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }

    /// Elements of a row as they lie in the byte range; of a vector one.
    pub(crate) fn stored_columns(&self) -> usize {
        match self.strides {
            // Its rows are columns of what is stored.
            Some(strides) if strides.column > 1 => strides.column,
            _ => self.shape.get(1..).unwrap_or_default().iter().product(),
        }
    }

    /// Rows of the byte range.
    pub(crate) fn stored_rows(&self) -> usize {
        let row = self.row_range(&(0..1)).end.max(1);
        usize::try_from(self.bytes / row).unwrap_or(usize::MAX)
    }

    /// Where some rows of the byte range lie in it.
    pub(crate) fn row_range(&self, rows: &Range<usize>) -> Range<u64> {
        let columns = self.stored_columns() as u64;
        let row = match self.stored {
            StoredAs::Plain => columns * self.dtype.bytes(),
            StoredAs::Fp8 { .. } => columns,
            StoredAs::Mxfp4 { .. } => columns / 2,
        };
        rows.start as u64 * row..rows.end as u64 * row
    }

    /// Returns the byte ranges of the tensor and of its scales: name, file, bytes.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (&str, usize, Range<u64>)> {
        let scales = match &self.stored {
            StoredAs::Plain => None,
            StoredAs::Fp8 { scales, .. } | StoredAs::Mxfp4 { scales } => Some(scales),
        };
        let own = (&*self.name, self.file, self.offset..self.offset + self.bytes);
        let besides =
            scales.map(|scales| (&*scales.name, scales.file, scales.offset..scales.offset + scales.bytes));
        std::iter::once(own).chain(besides)
    }

    /// Part `index` of the first dimension.
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

    /// Part `index` of the first dimension, [outputs, inputs], of whose outputs every `step`th is taken, from
    /// `first` on.
    pub(crate) fn every_row(&self, index: usize, first: usize, step: usize) -> Self {
        let part = self.part(index);
        let (height, width) = (part.shape.first().copied().unwrap_or(0), part.shape.get(1).copied());
        let width = width.unwrap_or(0);
        let strides = (step > 1).then_some(Strides { first: first * width, row: step * width, column: 1 });
        Self { shape: vec![height / step, width], strides, ..part }
    }

    /// Part `index` of the first dimension, [inputs, outputs], of whose outputs every `step`th is taken, from
    /// `first` on: as [outputs, inputs].
    pub(crate) fn columns_of(&self, index: usize, first: usize, step: usize) -> Self {
        let part = self.part(index);
        let (height, width) = (part.shape.first().copied().unwrap_or(0), part.shape.get(1).copied());
        let width = width.unwrap_or(0);
        let strides = Some(Strides { first, row: step, column: width });
        Self { shape: vec![width / step, height], strides, ..part }
    }

    /// Part `index` of the first dimension, a vector of which every `step`th element is taken, from `first` on.
    pub(crate) fn every(&self, index: usize, first: usize, step: usize) -> Self {
        let part = self.part(index);
        let length = part.shape.first().copied().unwrap_or(0) / step;
        let strides = (step > 1).then_some(Strides { first, row: step, column: 0 });
        Self { shape: vec![length], strides, ..part }
    }

    /// The matrix of rows `from` to `from + rows` of matrix `index` of a stack of matrices.
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

/// A projection, or a norm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linear {
    /// [outputs, inputs]; of a norm [hidden].
    pub weight: TensorRef,
    /// [outputs], where the model has one.
    pub bias: Option<TensorRef>,
}

impl From<TensorRef> for Linear {
    fn from(weight: TensorRef) -> Self {
        Self { weight, bias: None }
    }
}

impl Linear {
    /// Maps the two parts by `weight` and `bias`.
    pub(crate) fn each(
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

/// The attention of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionTensors {
    /// Grouped-query attention.
    Gqa(GqaTensors),
    /// Multi-head latent attention.
    Mla(MlaTensors),
}

impl AttentionTensors {
    /// All of them.
    pub(crate) fn tensors(&self) -> Vec<&TensorRef> {
        match self {
            Self::Gqa(GqaTensors { q, k, v, o, q_norm, k_norm, sinks }) => {
                let besides = q_norm.iter().chain(k_norm).chain(sinks);
                [q, k, v, o].into_iter().flat_map(Linear::tensors).chain(besides).collect()
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

/// Grouped-query attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GqaTensors {
    /// Queries: [heads x `head_dim`, hidden].
    pub q: Linear,
    /// Keys: [`kv_heads` x `head_dim`, hidden].
    pub k: Linear,
    /// Values: [`kv_heads` x `head_dim`, hidden].
    pub v: Linear,
    /// Output: [hidden, heads x `head_dim`].
    pub o: Linear,
    /// Norm of queries: [heads x `head_dim`], or [`head_dim`] where each head has its own.
    pub q_norm: Option<TensorRef>,
    /// Norm of keys: [`kv_heads` x `head_dim`], or [`head_dim`].
    pub k_norm: Option<TensorRef>,
    /// The heads' sinks: [heads].
    pub sinks: Option<TensorRef>,
}

/// Multi-head latent attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlaTensors {
    /// Queries, direct or through a latent.
    pub query: QueryTensors,
    /// Latent of keys and values, then the shared rotated key: [`kv_rank` + `rope_dim`, hidden].
    pub kv_a: Linear,
    /// Norm of that latent: [`kv_rank`].
    pub kv_a_norm: TensorRef,
    /// Per head the plain part of the key, then the value: [heads x (`nope_dim` + `value_dim`), `kv_rank`].
    pub kv_b: TensorRef,
    /// Output: [hidden, heads x `value_dim`].
    pub o: Linear,
}

/// Queries of multi-head latent attention; per head the plain part, then the rotated one.
#[expect(clippy::large_enum_variant, reason = "there is one per layer")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueryTensors {
    /// [heads x (`nope_dim` + `rope_dim`), hidden].
    Direct(TensorRef),
    /// Through a latent.
    Latent {
        /// [`q_rank`, hidden].
        a: Linear,
        /// Norm of the latent: [`q_rank`].
        a_norm: TensorRef,
        /// [heads x (`nope_dim` + `rope_dim`), `q_rank`].
        b: TensorRef,
    },
}

/// Router of one layer, which chooses its experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterTensors {
    /// [experts, hidden], and its bias [experts].
    pub linear: Linear,
    /// Correction that is added to each expert's score for the choice: [experts]. It may be float32 beside weights of
    /// another type.
    pub correction: Option<TensorRef>,
}

impl RouterTensors {
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
        self.linear.tensors().chain(&self.correction)
    }
}

/// The norms of one layer, each [hidden].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NormTensors {
    /// Before the attention.
    pub attention: Linear,
    /// Before the feed-forward part.
    pub mlp: Linear,
}

/// An MLP: down(activation(gate(x)) * up(x)), or down(activation(up(x))) where it has no gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlpTensors {
    /// [width, hidden].
    pub gate: Option<Linear>,
    /// [width, hidden].
    pub up: Linear,
    /// [hidden, width].
    pub down: Linear,
}

impl MlpTensors {
    /// Bytes of all of them together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors().map(TensorRef::own_bytes).sum()
    }

    /// Gate, up and down projection.
    #[must_use]
    pub fn linears(&self) -> [Option<&Linear>; 3] {
        [self.gate.as_ref(), Some(&self.up), Some(&self.down)]
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
        self.linears().into_iter().flatten().flat_map(Linear::tensors)
    }
}

/// One routed expert.
pub type ExpertTensors = MlpTensors;

/// The shared experts of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedTensors {
    /// One MLP for all of them.
    pub mlp: MlpTensors,
    /// The gate whose sigmoid multiplies the output: [1, hidden].
    pub gate: Option<TensorRef>,
}
