//! Up-projections of latent attention (MLA), absorbed into queries and outputs.
//!
//! The keys' projection multiplies the queries, and the values' projection multiplies the attended latents. Latents in
//! the KV cache are never expanded to keys and values (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). A row's result
//! does not depend on the number of rows.

use super::Rows;
use super::rows::BufferPool;
use crate::backend::{BackendError, LoadModelError, ResidentPart};
use remoe_kernels::{MAX_ROWS, MatrixProduct, NumericsClass, PackedMatrix, Pool};
use remoe_model::{Checkpoint, MlaFacts, TensorRef};
use remoe_weights::stored_dtype;

/// Up-projections of one layer: one matrix per head and direction.
pub struct NativeUpProjections {
    /// nope -> latent, applied to queries.
    keys: Vec<PackedMatrix>,
    /// latent -> value, applied to attended latents.
    values: Vec<PackedMatrix>,
    pub(super) nope_dim: usize,
}

impl ResidentPart for NativeUpProjections {
    fn bytes(&self) -> usize {
        self.keys.iter().chain(&self.values).map(PackedMatrix::bytes).sum()
    }
}

impl NativeUpProjections {
    pub(super) fn load(
        checkpoint: &Checkpoint,
        expand: &TensorRef,
        facts: &MlaFacts,
        class: NumericsClass,
    ) -> Result<Self, LoadModelError> {
        let stored = stored_dtype(expand.dtype);
        let bytes = checkpoint.read(expand)?;
        let row = facts.kv_rank * stored.bytes();
        let heads = bytes.chunks_exact((facts.nope_dim + facts.value_dim) * row);
        let (mut key_matrices, mut value_matrices) = (Vec::new(), Vec::new());
        for head in heads.take(facts.heads) {
            let (keys, values) = head.split_at(facts.nope_dim * row);
            let keys = transposed(keys, row, stored.bytes());
            key_matrices.push(PackedMatrix::pack(facts.nope_dim, class, &[(stored, &keys)])?);
            value_matrices.push(PackedMatrix::pack(facts.kv_rank, class, &[(stored, values)])?);
        }
        if key_matrices.len() != facts.heads {
            return Err(LoadModelError::Inconsistent("an up-projection has fewer heads than its facts"));
        }
        Ok(Self { keys: key_matrices, values: value_matrices, nope_dim: facts.nope_dim })
    }

    /// Projects queries into the latent space: rows x heads x (latent and rotated elements), to be multiplied with
    /// entries of the KV cache. `query`: rows x heads x (nope and rotated elements).
    pub(super) fn absorb_query(
        &self,
        pool: &Pool,
        buffers: &BufferPool,
        query: &Rows,
    ) -> Result<Rows, BackendError> {
        let heads = self.keys.len();
        let (element, head_dim) = (query.dtype.bytes(), query.width / heads.max(1));
        let nope_bytes = self.nope_dim * element;
        let latent_bytes = self.keys.first().map_or(0, PackedMatrix::output_bytes);
        let rotated_bytes = head_dim * element - nope_bytes;
        let head_bytes = latent_bytes + rotated_bytes;
        let (rows, absorbed) = (query.rows, self.multiply(pool, &self.keys, query, nope_bytes)?);
        let mut out = Rows::new(buffers, query.dtype, query.rows, heads * head_bytes / element);
        let parts = out.bytes_mut().chunks_exact_mut(head_bytes);
        for (index, (to, query)) in parts.zip(query.bytes().chunks_exact(head_dim * element)).enumerate() {
            let (row, head) = (index / heads, index % heads);
            to[..latent_bytes]
                .copy_from_slice(&absorbed[(head * rows + row) * latent_bytes..][..latent_bytes]);
            to[latent_bytes..].copy_from_slice(&query[nope_bytes..]);
        }
        Ok(out)
    }

    /// Projects attended latents to values: rows x heads x value elements. `attended`: rows x heads x latent elements.
    pub(super) fn expand_values(
        &self,
        pool: &Pool,
        buffers: &BufferPool,
        attended: &Rows,
    ) -> Result<Rows, BackendError> {
        let heads = self.values.len();
        let value_bytes = self.values.first().map_or(0, PackedMatrix::output_bytes);
        let latent_bytes = attended.row_bytes() / heads.max(1);
        let values = self.multiply(pool, &self.values, attended, latent_bytes)?;
        let width = heads * value_bytes / attended.dtype.bytes();
        let mut out = Rows::new(buffers, attended.dtype, attended.rows, width);
        for (index, to) in out.bytes_mut().chunks_exact_mut(value_bytes.max(1)).enumerate() {
            let (row, head) = (index / heads, index % heads);
            to.copy_from_slice(&values[(head * attended.rows + row) * value_bytes..][..value_bytes]);
        }
        Ok(out)
    }

    /// Multiplies the first `input_bytes` bytes of each head's part of every row by the head's matrix. Returns heads x
    /// rows x outputs.
    fn multiply(
        &self,
        pool: &Pool,
        matrices: &[PackedMatrix],
        x: &Rows,
        input_bytes: usize,
    ) -> Result<Vec<u8>, BackendError> {
        let head_bytes = x.row_bytes() / matrices.len().max(1);
        let mut inputs = Vec::with_capacity(matrices.len() * x.rows * input_bytes);
        for head in 0..matrices.len() {
            for row in x.bytes().chunks_exact(x.row_bytes()) {
                inputs.extend_from_slice(&row[head * head_bytes..][..input_bytes]);
            }
        }
        let output_bytes = matrices.first().map_or(0, PackedMatrix::output_bytes);
        let mut output = vec![0; matrices.len() * x.rows * output_bytes];
        let heads = inputs.chunks_exact((x.rows * input_bytes).max(1));
        let outputs = output.chunks_exact_mut((x.rows * output_bytes).max(1));
        let mut products: Vec<MatrixProduct<'_>> = (matrices.iter().zip(heads).zip(outputs))
            .map(|((matrix, inputs), output)| MatrixProduct { matrix, inputs, output })
            .collect();
        // One call of the kernels takes at most `MAX_ROWS` rows; a long prompt has its rows once per head.
        for products in products.chunks_mut((MAX_ROWS / x.rows.max(1)).max(1)) {
            pool.multiply(products)?;
        }
        drop(products);
        Ok(output)
    }
}

/// Returns `matrix`, whose rows have `row_bytes` bytes and elements `element_bytes`, transposed.
fn transposed(matrix: &[u8], row_bytes: usize, element_bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(matrix.len());
    for column in (0..row_bytes).step_by(element_bytes) {
        for row in matrix.chunks_exact(row_bytes) {
            out.extend_from_slice(&row[column..column + element_bytes]);
        }
    }
    out
}
