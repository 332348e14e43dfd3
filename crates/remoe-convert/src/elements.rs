//! Elements of matrices as bytes: moved as they are, read as float32, rounded back.

use half::{bf16, f16};
use remoe_model::StoredDtype;

/// `matrix`, which has rows of `columns` elements of `size` bytes, with rows and columns exchanged.
pub(crate) fn transposed(matrix: &[u8], columns: usize, size: usize) -> Vec<u8> {
    let rows = matrix.len() / (columns * size).max(1);
    let mut out = vec![0; matrix.len()];
    for (row, elements) in matrix.chunks_exact((columns * size).max(1)).enumerate() {
        for (column, element) in elements.chunks_exact(size).enumerate() {
            let at = (column * rows + row) * size;
            if let Some(to) = out.get_mut(at..at + size) {
                to.copy_from_slice(element);
            }
        }
    }
    out
}

/// The rows of `matrix`, each of `row_bytes` bytes, at `rows`, in that order.
pub(crate) fn chosen(matrix: &[u8], row_bytes: usize, rows: &[usize]) -> Vec<u8> {
    let row = |row: &usize| matrix.get(row * row_bytes..(row + 1) * row_bytes).unwrap_or_default();
    rows.iter().flat_map(row).copied().collect()
}

/// The elements as float32, which has every value that checkpoints store.
pub(crate) fn floats(dtype: StoredDtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        StoredDtype::F32 => bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect(),
        StoredDtype::Bf16 => {
            bytes.as_chunks().0.iter().map(|&two| bf16::from_le_bytes(two).to_f32()).collect()
        }
        StoredDtype::F16 => bytes.as_chunks().0.iter().map(|&two| f16::from_le_bytes(two).to_f32()).collect(),
    }
}

/// The numbers as elements of `dtype`, to nearest even.
pub(crate) fn rounded(dtype: StoredDtype, numbers: &[f32]) -> Vec<u8> {
    match dtype {
        StoredDtype::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        StoredDtype::Bf16 => numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        StoredDtype::F16 => numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
    }
}
