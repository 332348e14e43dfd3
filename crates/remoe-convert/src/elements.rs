//! Operations on the stored elements of matrices: transposing, selecting rows, and conversion from and to float32.

use half::{bf16, f16};
use remoe_model::StoredDtype;

/// Transposes `matrix`, whose rows have `columns` elements of `element_bytes` bytes.
pub(crate) fn transpose(matrix: &[u8], columns: usize, element_bytes: usize) -> Vec<u8> {
    let rows = matrix.len() / (columns * element_bytes).max(1);
    let mut out = vec![0; matrix.len()];
    for (row, elements) in matrix.chunks_exact((columns * element_bytes).max(1)).enumerate() {
        for (column, element) in elements.chunks_exact(element_bytes).enumerate() {
            let offset = (column * rows + row) * element_bytes;
            if let Some(target) = out.get_mut(offset..offset + element_bytes) {
                target.copy_from_slice(element);
            }
        }
    }
    out
}

/// Copies the given `rows` of `matrix`, in that order. A row has `row_bytes` bytes.
pub(crate) fn select_rows(matrix: &[u8], row_bytes: usize, rows: &[usize]) -> Vec<u8> {
    let row = |row: &usize| matrix.get(row * row_bytes..(row + 1) * row_bytes).unwrap_or_default();
    rows.iter().flat_map(row).copied().collect()
}

/// Converts elements to float32, exactly.
pub(crate) fn to_floats(dtype: StoredDtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        StoredDtype::F32 => bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect(),
        StoredDtype::Bf16 => {
            bytes.as_chunks().0.iter().map(|&two| bf16::from_le_bytes(two).to_f32()).collect()
        }
        StoredDtype::F16 => bytes.as_chunks().0.iter().map(|&two| f16::from_le_bytes(two).to_f32()).collect(),
    }
}

/// Converts numbers to elements of `dtype`, rounding to nearest even.
pub(crate) fn from_floats(dtype: StoredDtype, numbers: &[f32]) -> Vec<u8> {
    match dtype {
        StoredDtype::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        StoredDtype::Bf16 => numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        StoredDtype::F16 => numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
    }
}
