//! Steps of K with quantised weights: one group of 32 elements, by integer dot products.
//!
//! The weights of a group, for a panel's 64 columns, are followed by 64 bfloat16 scales.
//!
//! - int8: `[8][64][4]` bytes; a word has four consecutive weights of a column.
//! - int4 and mxfp4: `[4][64][4]` bytes; lower nibbles are the first 16 weights of a column, upper nibbles the other 16.

use std::marker::PhantomData;

use super::integers::{Integers, MAX_E2M1_WITH_OFFSET, MAX_NIBBLE_SUM};
use super::steps::Step;
use crate::WeightFormat;
use crate::quantise::{GROUP, RowGroup};
use crate::shape::{PANEL, step_words};

/// Words of four elements of K in a group.
const QUADS: usize = GROUP / 4;

/// A group of quantised weights and row elements. Sums are exact within a group. Results are bfloat16 if `BF16`, else float32.
pub(crate) struct QuantisedStep<N, const FORMAT: u8, const BF16: bool>(PhantomData<N>);

/// Values of the parameter `FORMAT` of [`QuantisedStep`]: [`WeightFormat`]s.
pub(crate) const INT8: u8 = WeightFormat::Int8 as u8;
pub(crate) const INT4: u8 = WeightFormat::Int4 as u8;
pub(crate) const MXFP4: u8 = WeightFormat::Mxfp4 as u8;

impl<N, const FORMAT: u8, const BF16: bool> QuantisedStep<N, FORMAT, BF16> {
    /// Set if a byte holds two weights.
    const NIBBLES: bool = FORMAT != INT8;
    /// Lines of nibbles whose products are added to the same partial sum: as many as [`MAX_NIBBLE_SUM`] allows.
    const LINES_PER_PARTIAL: usize = {
        let max_nibble = if FORMAT == MXFP4 { MAX_E2M1_WITH_OFFSET } else { 15 };
        let mut lines = QUADS / 2;
        while lines * 2 * max_nibble > MAX_NIBBLE_SUM {
            lines /= 2;
        }
        lines
    };
}

impl<N: Integers, const FORMAT: u8, const BF16: bool> Step for QuantisedStep<N, FORMAT, BF16> {
    type F = N;
    type InBf16 = QuantisedStep<N, FORMAT, true>;
    const BF16: bool = BF16;
    const WEIGHTS: WeightFormat = match FORMAT {
        INT8 => WeightFormat::Int8,
        INT4 => WeightFormat::Int4,
        _ => WeightFormat::Mxfp4,
    };
    const WORDS: usize = step_words(if BF16 { crate::Dtype::Bf16 } else { crate::Dtype::F32 }, Self::WEIGHTS);
    const STEPS_PER_PREFETCH: usize = 1;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[N::V; C]; R],
        x: &[*const u8; R],
        group: usize,
        w: *const u32,
        first: usize,
    ) {
        // SAFETY: rows and weights are valid for this group, by the trait's contract.
        unsafe {
            let mut rows = [std::ptr::null::<RowGroup>(); R];
            let mut sums = [[N::splat_integer(0); C]; R];
            for r in 0..R {
                rows[r] = x[r].cast::<RowGroup>().add(group);
                if Self::NIBBLES || !N::REMOVES_OFFSET {
                    let correction = (&raw const (*rows[r]).correction).read_unaligned();
                    sums[r] = [N::splat_integer(correction); C];
                }
            }
            if Self::NIBBLES {
                for lines in 0..QUADS / 2 / Self::LINES_PER_PARTIAL {
                    let mut partial = [[N::empty_partial(); C]; R];
                    for line in 0..Self::LINES_PER_PARTIAL {
                        let line = lines * Self::LINES_PER_PARTIAL + line;
                        let mut words = [N::splat_integer(0); C];
                        for c in 0..C {
                            words[c] = N::load_words(w.add(line * PANEL + first + c * N::LANES));
                        }
                        for half in 0..2 {
                            let mut weights = [N::splat_integer(0); C];
                            for c in 0..C {
                                weights[c] = if half == 0 {
                                    N::low_nibbles(words[c])
                                } else {
                                    N::high_nibbles(words[c])
                                };
                                if FORMAT == MXFP4 {
                                    weights[c] = N::e2m1(weights[c]);
                                }
                            }
                            for r in 0..R {
                                let x = N::splat_integer(quad(rows[r], half * QUADS / 2 + line));
                                for c in 0..C {
                                    partial[r][c] = N::nibble_dot(partial[r][c], weights[c], x);
                                }
                            }
                        }
                    }
                    for r in 0..R {
                        for c in 0..C {
                            sums[r][c] = N::add_partial(sums[r][c], partial[r][c]);
                        }
                    }
                }
            } else {
                for line in 0..QUADS {
                    let mut words = [N::splat_integer(0); C];
                    for c in 0..C {
                        words[c] = N::load_words(w.add(line * PANEL + first + c * N::LANES));
                    }
                    for r in 0..R {
                        let x = N::splat_integer(quad(rows[r], line));
                        for c in 0..C {
                            sums[r][c] = N::int8_dot(sums[r][c], words[c], x);
                        }
                    }
                }
            }
            let scales = w.add(Self::WORDS - PANEL / 2).cast::<u16>().add(first);
            let mut weight_scales = [N::splat(0.0); C];
            for c in 0..C {
                weight_scales[c] = N::load_bf16(scales.add(c * N::LANES));
            }
            for r in 0..R {
                let row_scale = N::splat((&raw const (*rows[r]).scale).read_unaligned());
                for c in 0..C {
                    let scale = N::mul(weight_scales[c], row_scale);
                    acc[r][c] = N::fma(N::to_floats(sums[r][c]), scale, acc[r][c]);
                }
            }
        }
    }
}

/// Reads word `index` of a row's group: four consecutive integers.
#[inline(always)]
unsafe fn quad(row: *const RowGroup, index: usize) -> i32 {
    // SAFETY: `row` points to a group and `index` is below QUADS, as the caller guarantees.
    unsafe { (&raw const (*row).values).cast::<i32>().add(index).read_unaligned() }
}
