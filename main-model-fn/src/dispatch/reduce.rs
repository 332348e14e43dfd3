//! Reduction: the only place where experts' outputs are summed.
//!
//! The order of operations is fixed, so that the placement of experts never changes an answer: in float32, expert ids
//! ascending, `sum + (weight x row)` with two roundings (no fused multiply-add), then the shared experts, then one
//! rounding to the compute dtype.

use crate::routing::Routed;
use remoe_kernels::{Dtype, KernelError, Pool, VectorisedWork, run_vectorised};
use std::marker::PhantomData;

/// Output rows of experts.
pub(super) struct ExpertRows<'a> {
    /// One row per slot of [`Routed`]: `hidden` elements, little endian.
    pub(super) rows: &'a [&'a [u8]],

    pub(super) dtype: Dtype,
    /// Elements per row.
    pub(super) hidden: usize,
}

/// Writes the weighted sums of `rows`, plus the `shared` contribution (tokens x hidden, compute dtype), to `output`
/// (tokens x hidden, compute dtype). Tokens are distributed over the threads of `pool`.
///
/// # Errors
/// Fails if a thread panicked.
pub(super) fn reduce(
    routed: &Routed,
    rows: &ExpertRows<'_>,
    shared: Option<&[u8]>,
    output: &mut [u8],
    pool: &Pool,
) -> Result<(), KernelError> {
    let tokens = (JOB_ELEMENTS / (routed.top_k * rows.hidden)).max(1);
    let part_bytes = tokens * rows.hidden * rows.dtype.bytes();
    let mut parts: Vec<TokenRange<'_>> = output
        .chunks_mut(part_bytes)
        .zip((0..).step_by(tokens))
        .map(|(output, first)| TokenRange { first, output })
        .collect();
    let reduce = |part: &mut TokenRange<'_>| match rows.dtype {
        Dtype::F32 => run_vectorised(Reduction::<F32> { routed, rows, shared, part, element: PhantomData }),
        Dtype::Bf16 => run_vectorised(Reduction::<Bf16> { routed, rows, shared, part, element: PhantomData }),
    };
    match parts.as_mut_slice() {
        [only] => {
            reduce(only);
            Ok(())
        }
        parts => pool.each(parts, reduce),
    }
}

/// Elements of experts' rows that one job of the pool sums.
const JOB_ELEMENTS: usize = 1 << 18;

/// Consecutive tokens and their part of the output.
struct TokenRange<'a> {
    first: usize,
    output: &'a mut [u8],
}

/// Stored form of an element.
trait Element {
    const BYTES: usize;
    fn read(bytes: &[u8]) -> f32;
    fn write(value: f32, bytes: &mut [u8]);
}

struct F32;
struct Bf16;

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn read(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
    #[inline(always)]
    fn write(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn read(bytes: &[u8]) -> f32 {
        // As `half` does, except for NaNs, which the sum makes quiet anyway. Branch-free, so that the compiler vectorises it.
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
    }
    #[inline(always)]
    fn write(value: f32, bytes: &mut [u8]) {
        // As `half` does: denormals stay, NaNs become quiet. Branch-free, so that the compiler vectorises it.
        let bits = value.to_bits();
        let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        let rounded = if value.is_nan() { bits | 0x0040_0000 } else { nearest };
        bytes.copy_from_slice(&((rounded >> 16) as u16).to_le_bytes());
    }
}

/// Sums of the tokens of one job.
struct Reduction<'a, 'part, E> {
    routed: &'a Routed,
    rows: &'a ExpertRows<'a>,
    shared: Option<&'a [u8]>,
    part: &'a mut TokenRange<'part>,
    element: PhantomData<E>,
}

impl<E: Element> VectorisedWork for Reduction<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { routed, rows, shared, part, .. } = self;
        let row_bytes = rows.hidden * E::BYTES;
        let mut sum = vec![0.0_f32; rows.hidden];
        let token_rows = rows.rows.chunks_exact(routed.top_k).enumerate().skip(part.first);
        for ((token, rows), output) in token_rows.zip(part.output.chunks_exact_mut(row_bytes)) {
            sum.fill(0.0);
            for ((_, weight), row) in routed.token_experts(token).zip(rows) {
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
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use half::bf16;
    use remoe_kernels::PoolConfig;

    fn pool() -> Pool {
        Pool::new(PoolConfig { threads: 2, ..PoolConfig::default() }).unwrap()
    }

    /// Several threads give the same bits as each token alone, denormals included.
    #[test]
    fn threads_do_not_change_the_sums() {
        const HIDDEN: usize = 3000;
        const TOKENS: usize = 200;
        let value = |index: usize| ((index * 7919) % 4096) as f32 / 1000.0 - 2.0;
        let rows: Vec<f32> = (0..2 * TOKENS * HIDDEN)
            .map(|index| if index % 5 == 0 { value(index) * f32::MIN_POSITIVE } else { value(index) })
            .collect();
        let stored: Vec<Vec<u8>> = rows.chunks(HIDDEN).map(bytes).collect();
        let rows: Vec<&[u8]> = stored.iter().map(Vec::as_slice).collect();
        let experts = [1, 4].repeat(TOKENS);
        let weights: Vec<f32> = (0..2 * TOKENS).map(value).collect();
        let shared = bytes(&(0..TOKENS * HIDDEN).map(|index| value(index + 3)).collect::<Vec<_>>());
        let all = Routed { top_k: 2, experts, weights: weights.clone() };
        let mut together = vec![0; 4 * TOKENS * HIDDEN];
        let expert_rows = ExpertRows { rows: &rows, dtype: Dtype::F32, hidden: HIDDEN };
        reduce(&all, &expert_rows, Some(&shared), &mut together, &pool()).unwrap();
        for (token, found) in together.chunks(4 * HIDDEN).enumerate() {
            let one = Routed { top_k: 2, experts: vec![1, 4], weights: weights[2 * token..][..2].to_vec() };
            let expert_rows = ExpertRows { rows: &rows[2 * token..][..2], ..expert_rows };
            let mut alone = vec![0; 4 * HIDDEN];
            let own = &shared[4 * HIDDEN * token..][..4 * HIDDEN];
            reduce(&one, &expert_rows, Some(own), &mut alone, &pool()).unwrap();
            assert!(found == alone, "token {token}");
        }
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    /// Uses values for which a fused multiply-add or another order gives other bits.
    #[test]
    fn order_and_roundings_are_fixed() {
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
        assert_ne!(expected, sum([0, 1, 2], true), "the values must distinguish fused sums");
        assert_ne!(expected, sum([2, 1, 0], false), "the values must distinguish orders");
        let mut output = vec![0; 4 * HIDDEN];
        reduce(&routed, &rows, None, &mut output, &pool()).unwrap();
        assert_eq!(output, bytes(&expected));
        reduce(&routed, &rows, Some(&bytes(&[0.5; HIDDEN])), &mut output, &pool()).unwrap();
        let with_shared: Vec<f32> = expected.iter().map(|sum| sum + 0.5).collect();
        assert_eq!(output, bytes(&with_shared));
    }

    #[test]
    fn bfloat16_rounds_once() {
        let routed = Routed { top_k: 2, experts: vec![0, 1], weights: vec![1.0, 1.0] };
        // 1 + 2^-8 + 2^-8: if each partial sum were rounded to bfloat16, the sum would stay at 1.
        let small = bf16::from_f32(1.0 / 256.0).to_le_bytes();
        let one = bf16::ONE.to_le_bytes();
        let mut output = [0; 2];
        let rows = ExpertRows { rows: &[&one, &small], dtype: Dtype::Bf16, hidden: 1 };
        reduce(&routed, &rows, Some(&small), &mut output, &pool()).unwrap();
        assert_eq!(bf16::from_le_bytes(output).to_f32(), 1.0 + 2.0 / 256.0);
    }
}
