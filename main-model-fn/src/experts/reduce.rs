//! The one place where experts' outputs are summed.
//!
//! The order is part of the project's promise that placement never changes the answer: float32,
//! expert ids ascending, `acc + (w x row)` with two roundings (no fused multiply-add), then the
//! shared experts, then one rounding to the compute dtype.

use super::routing::Routed;
use half::bf16;
use remoe_kernels::Dtype;

/// Rows of experts' outputs, wherever they lie.
pub(super) struct ExpertRows<'a> {
    /// One row per (token, expert) in the order of [`Routed`]: `hidden` elements, little endian.
    pub(super) rows: &'a [&'a [u8]],
    /// Their dtype.
    pub(super) dtype: Dtype,
    /// Elements per row.
    pub(super) hidden: usize,
}

/// Writes the weighted sums of `rows`, plus `shared` (tokens x hidden, compute dtype) where there
/// is one, to `output` (tokens x hidden, compute dtype).
pub(super) fn reduce(routed: &Routed, rows: &ExpertRows<'_>, shared: Option<&[u8]>, output: &mut [u8]) {
    match rows.dtype {
        Dtype::F32 => reduce_as::<F32>(routed, rows, shared, output),
        Dtype::Bf16 => reduce_as::<Bf16>(routed, rows, shared, output),
    }
}

/// An element at rest.
trait Element {
    const BYTES: usize;
    fn read(bytes: &[u8]) -> f32;
    fn write(value: f32, bytes: &mut [u8]);
}

struct F32;
struct Bf16;

impl Element for F32 {
    const BYTES: usize = 4;
    fn read(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
    fn write(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;
    fn read(bytes: &[u8]) -> f32 {
        bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }
    fn write(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    }
}

fn reduce_as<E: Element>(routed: &Routed, rows: &ExpertRows<'_>, shared: Option<&[u8]>, output: &mut [u8]) {
    let row_bytes = rows.hidden * E::BYTES;
    let mut sum = vec![0.0_f32; rows.hidden];
    let token_rows = rows.rows.chunks_exact(routed.top_k);
    for (token, (rows, output)) in token_rows.zip(output.chunks_exact_mut(row_bytes)).enumerate() {
        sum.fill(0.0);
        for ((_, weight), row) in routed.of(token).zip(rows) {
            for (sum, element) in sum.iter_mut().zip(row.chunks_exact(E::BYTES)) {
                let product = weight * E::read(element);
                *sum += product;
            }
        }
        if let Some(shared) = shared {
            let row = &shared[token * row_bytes..][..row_bytes];
            for (sum, element) in sum.iter_mut().zip(row.chunks_exact(E::BYTES)) {
                *sum += E::read(element);
            }
        }
        for (sum, element) in sum.iter().zip(output.chunks_exact_mut(E::BYTES)) {
            E::write(*sum, element);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    /// Values for which a fused multiply-add or another order gives other bits.
    #[test]
    fn order_and_roundings_are_as_promised() {
        const HIDDEN: usize = 64;
        let routed = Routed { top_k: 3, experts: vec![1, 4, 6], weights: vec![0.1, 0.7, 0.2] };
        let value = |row: usize, column: usize| ((row * 37 + column * 11) % 64) as f32 / 7.0 - 4.3;
        let row = |row: usize| (0..HIDDEN).map(|column| value(row, column)).collect::<Vec<_>>();
        let stored: Vec<Vec<u8>> = (0..3).map(|index| bytes(&row(index))).collect();
        let rows: Vec<&[u8]> = stored.iter().map(Vec::as_slice).collect();
        let rows = ExpertRows { rows: &rows, dtype: Dtype::F32, hidden: HIDDEN };
        let sum = |order: [usize; 3], fused: bool| -> Vec<f32> {
            let add = |sum: f32, index: usize, column: usize| {
                let (weight, value) = (routed.weights[index], value(index, column));
                if fused { weight.mul_add(value, sum) } else { sum + weight * value }
            };
            (0..HIDDEN).map(|column| order.iter().fold(0.0, |sum, &index| add(sum, index, column))).collect()
        };
        let expected = sum([0, 1, 2], false);
        assert_ne!(expected, sum([0, 1, 2], true), "the values must tell fused sums apart");
        assert_ne!(expected, sum([2, 1, 0], false), "the values must tell orders apart");
        let mut output = vec![0; 4 * HIDDEN];
        reduce(&routed, &rows, None, &mut output);
        assert_eq!(output, bytes(&expected));
        reduce(&routed, &rows, Some(&bytes(&[0.5; HIDDEN])), &mut output);
        let with_shared: Vec<f32> = expected.iter().map(|sum| sum + 0.5).collect();
        assert_eq!(output, bytes(&with_shared));
    }

    #[test]
    fn bfloat16_rounds_once() {
        let routed = Routed { top_k: 2, experts: vec![0, 1], weights: vec![1.0, 1.0] };
        // 1 + 2^-8 + 2^-8: each partial sum rounded to bfloat16 would stay at 1.
        let small = bf16::from_f32(1.0 / 256.0).to_le_bytes();
        let one = bf16::ONE.to_le_bytes();
        let mut output = [0; 2];
        let rows = ExpertRows { rows: &[&one, &small], dtype: Dtype::Bf16, hidden: 1 };
        reduce(&routed, &rows, Some(&small), &mut output);
        assert_eq!(bf16::from_le_bytes(output).to_f32(), 1.0 + 2.0 / 256.0);
    }
}
