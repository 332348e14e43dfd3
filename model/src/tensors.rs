//! Byte ranges of tensors, grouped as the engine uses them.
//!
//! All weights of projections are [rows, columns] = [outputs, inputs], row after row.

use std::sync::Arc;

use crate::facts::StoredDtype;

/// A contiguous range of one file that holds one tensor, or one expert's part of a fused tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRef {
    /// Index of the file.
    pub file: usize,
    /// Name of the tensor; parts of a fused tensor have its name.
    pub name: Arc<str>,
    /// Position of the first byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Element type.
    pub dtype: StoredDtype,
    /// Sizes, the slowest first.
    pub shape: Vec<usize>,
}

impl TensorRef {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.bytes / self.dtype.bytes()
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

/// A projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linear {
    /// [outputs, inputs].
    pub weight: TensorRef,
    /// [outputs], where the model has one.
    pub bias: Option<TensorRef>,
}

impl Linear {
    fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
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
            Self::Gqa(GqaTensors { q, k, v, o, q_norm, k_norm }) => {
                [q, k, v, o].into_iter().flat_map(Linear::tensors).chain(q_norm).chain(k_norm).collect()
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

/// What chooses the experts of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterTensors {
    /// [experts, hidden].
    pub weight: TensorRef,
    /// What is added to each expert's score for the choice: [experts]. It may be float32 beside weights of
    /// another type.
    pub correction: Option<TensorRef>,
}

impl RouterTensors {
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
        std::iter::once(&self.weight).chain(&self.correction)
    }
}

/// The norms of one layer, each [hidden].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NormTensors {
    /// Before the attention.
    pub attention: TensorRef,
    /// Before the feed-forward part.
    pub mlp: TensorRef,
}

/// A gated MLP: down(activation(gate(x)) * up(x)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlpTensors {
    /// [width, hidden].
    pub gate: TensorRef,
    /// [width, hidden].
    pub up: TensorRef,
    /// [hidden, width].
    pub down: TensorRef,
}

impl MlpTensors {
    /// Bytes of the three together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.bytes).iter().sum()
    }

    /// The three.
    #[must_use]
    pub fn tensors(&self) -> [&TensorRef; 3] {
        [&self.gate, &self.up, &self.down]
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
