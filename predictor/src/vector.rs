//! Vector operations on rows, written for auto-vectorisation.

/// Independent partial sums of a dot product.
const LANES: usize = 16;

/// Returns the dot product of two rows of equal length.
#[must_use]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0_f32; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// Adds `factor` times `row` to `target`.
pub(crate) fn add_scaled(target: &mut [f32], factor: f32, row: &[f32]) {
    target.iter_mut().zip(row).for_each(|(target, value)| *target += factor * value);
}

/// Scales a row to length 1. A row of zeros is unchanged.
pub(crate) fn normalise(row: &mut [f32]) {
    let norm = dot(row, row).sqrt();
    if norm > 0.0 {
        row.iter_mut().for_each(|value| *value /= norm);
    }
}
