//! The up-projections of latent attention. Queries take the keys' side of the latents upon themselves and what was
//! mixed of latents becomes values afterwards, for one row as for many: nothing is expanded, and a row's result does
//! not depend on the rows beside it.

use super::Rows;
use super::rows::BufferPool;
use crate::backend::{BackendError, LoadModelError, ResidentPart};
use remoe_kernels::{MAX_ROWS, MatrixProduct, NumericsClass, PackedMatrix, Pool};
use remoe_model::{Checkpoint, MlaFacts, TensorRef};
use remoe_weights::stored_dtype;

/// The up-projections of one layer, a matrix per head.
pub struct NativeHeads {
    /// nope -> latent.
    absorb: Vec<PackedMatrix>,
    /// latent -> value.
    release: Vec<PackedMatrix>,
    pub(super) nope_dim: usize,
}

impl ResidentPart for NativeHeads {
    fn bytes(&self) -> usize {
        self.absorb.iter().chain(&self.release).map(PackedMatrix::bytes).sum()
    }
}

impl NativeHeads {
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
        let (mut absorb, mut release) = (Vec::new(), Vec::new());
        for head in heads.take(facts.heads) {
            let (keys, values) = head.split_at(facts.nope_dim * row);
            let keys = transposed(keys, row, stored.bytes());
            absorb.push(PackedMatrix::pack(facts.nope_dim, class, &[(stored, &keys)])?);
            release.push(PackedMatrix::pack(facts.kv_rank, class, &[(stored, values)])?);
        }
        if absorb.len() != facts.heads {
            return Err(LoadModelError::Inconsistent("an up-projection has fewer heads than its facts"));
        }
        Ok(Self { absorb, release, nope_dim: facts.nope_dim })
    }

    /// Queries that are multiplied with entries of the cache, rows x heads x (latent and rotated elements), of
    /// `query`, rows x heads x (nope and rotated elements).
    pub(super) fn absorb(&self, pool: &Pool, home: &BufferPool, query: &Rows) -> Result<Rows, BackendError> {
        let heads = self.absorb.len();
        let (element, head_dim) = (query.dtype.bytes(), query.width / heads.max(1));
        let plain = self.nope_dim * element;
        let latent = self.absorb.first().map_or(0, PackedMatrix::output_bytes);
        let rotated = head_dim * element - plain;
        let (rows, absorbed) = (query.rows, self.multiply(pool, &self.absorb, query, plain)?);
        let mut out = Rows::new(home, query.dtype, query.rows, heads * (latent + rotated) / element);
        let parts = out.bytes_mut().chunks_exact_mut(latent + rotated);
        for (index, (to, query)) in parts.zip(query.bytes().chunks_exact(head_dim * element)).enumerate() {
            let (row, head) = (index / heads, index % heads);
            to[..latent].copy_from_slice(&absorbed[(head * rows + row) * latent..][..latent]);
            to[latent..].copy_from_slice(&query[plain..]);
        }
        Ok(out)
    }

    /// Values, rows x heads x value elements, of what was mixed of latents.
    pub(super) fn release(&self, pool: &Pool, home: &BufferPool, mixed: &Rows) -> Result<Rows, BackendError> {
        let heads = self.release.len();
        let value = self.release.first().map_or(0, PackedMatrix::output_bytes);
        let released = self.multiply(pool, &self.release, mixed, mixed.row_bytes() / heads.max(1))?;
        let mut out = Rows::new(home, mixed.dtype, mixed.rows, heads * value / mixed.dtype.bytes());
        for (index, to) in out.bytes_mut().chunks_exact_mut(value.max(1)).enumerate() {
            let (row, head) = (index / heads, index % heads);
            to.copy_from_slice(&released[(head * mixed.rows + row) * value..][..value]);
        }
        Ok(out)
    }

    /// Multiplies the first `input` bytes of each head's part of every row by the head's matrix: heads x rows x
    /// outputs.
    fn multiply(
        &self,
        pool: &Pool,
        matrices: &[PackedMatrix],
        x: &Rows,
        input: usize,
    ) -> Result<Vec<u8>, BackendError> {
        let part = x.row_bytes() / matrices.len().max(1);
        let mut inputs = Vec::with_capacity(matrices.len() * x.rows * input);
        for head in 0..matrices.len() {
            for row in x.bytes().chunks_exact(x.row_bytes()) {
                inputs.extend_from_slice(&row[head * part..][..input]);
            }
        }
        let output_bytes = matrices.first().map_or(0, PackedMatrix::output_bytes);
        let mut output = vec![0; matrices.len() * x.rows * output_bytes];
        let heads = inputs.chunks_exact((x.rows * input).max(1));
        let outputs = output.chunks_exact_mut((x.rows * output_bytes).max(1));
        let mut products: Vec<MatrixProduct<'_>> = (matrices.iter().zip(heads).zip(outputs))
            .map(|((matrix, inputs), output)| MatrixProduct { matrix, inputs, output })
            .collect();
        // A call takes a bounded number of rows, and a long prompt has them once per head.
        for products in products.chunks_mut((MAX_ROWS / x.rows.max(1)).max(1)) {
            pool.multiply(products)?;
        }
        drop(products);
        Ok(output)
    }
}

/// A matrix of rows of `row_bytes` with its columns as rows.
fn transposed(matrix: &[u8], row_bytes: usize, element: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(matrix.len());
    for column in (0..row_bytes).step_by(element) {
        for row in matrix.chunks_exact(row_bytes) {
            out.extend_from_slice(&row[column..column + element]);
        }
    }
    out
}
