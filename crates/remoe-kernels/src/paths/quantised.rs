//! One group of K by integers, for a block of rows and columns.
//!
//! A group's weights of a panel's 64 columns lie together: for int8 `[8][64][4]` bytes, four consecutive weights of a column to a word; for int4 and mxfp4 `[4][64][4]` bytes, whose lower halves are the first 16 weights of the columns and whose upper halves the others; then 64 scales, as bfloat16.

use std::marker::PhantomData;

use super::integers::{Integers, MOST_OF_E2M1, MOST_OF_NIBBLES};
use super::steps::Step;
use crate::WeightFormat;
use crate::quantise::{GROUP, RowGroup};
use crate::shape::{PANEL, step_words};

/// Words of four elements in a group.
const QUADS: usize = GROUP / 4;

/// Weights and rows by integers; sums are exact within a group. Elements of results are bfloat16, or float32.
pub(crate) struct QuantisedStep<N, const FORMAT: u8, const BF16: bool>(PhantomData<N>);

/// [`WeightFormat`]s as parameters of [`QuantisedStep`].
pub(crate) const INT8: u8 = WeightFormat::Int8 as u8;
pub(crate) const INT4: u8 = WeightFormat::Int4 as u8;
pub(crate) const MXFP4: u8 = WeightFormat::Mxfp4 as u8;

impl<N, const FORMAT: u8, const BF16: bool> QuantisedStep<N, FORMAT, BF16> {
    /// Two weights to a byte.
    const NIBBLES: bool = FORMAT != INT8;
    /// Lines of nibbles whose products are summed before they are made whole: as many as a group has, or as meet the bound.
    const LINES_AT_ONCE: usize = {
        let most = if FORMAT == MXFP4 { MOST_OF_E2M1 } else { 15 };
        let mut lines = QUADS / 2;
        while lines * 2 * most > MOST_OF_NIBBLES {
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
    const ASKING: usize = 1;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[N::V; C]; R],
        x: &[*const u8; R],
        group: usize,
        w: *const u32,
        first: usize,
    ) {
        // SAFETY: the caller's promise.
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
                for lines in 0..QUADS / 2 / Self::LINES_AT_ONCE {
                    let mut partial = [[N::no_products(); C]; R];
                    for line in 0..Self::LINES_AT_ONCE {
                        let line = lines * Self::LINES_AT_ONCE + line;
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
                            sums[r][c] = N::whole(sums[r][c], partial[r][c]);
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
            let mut sizes = [N::splat(0.0); C];
            for c in 0..C {
                sizes[c] = N::load_bf16(scales.add(c * N::LANES));
            }
            for r in 0..R {
                let size = N::splat((&raw const (*rows[r]).scale).read_unaligned());
                for c in 0..C {
                    acc[r][c] = N::fma(N::to_floats(sums[r][c]), N::mul(sizes[c], size), acc[r][c]);
                }
            }
        }
    }
}

/// Four consecutive integers of a row's group, as one word.
#[inline(always)]
unsafe fn quad(row: *const RowGroup, index: usize) -> i32 {
    // SAFETY: the caller's promise: a group, `index` below QUADS.
    unsafe { (&raw const (*row).values).cast::<i32>().add(index).read_unaligned() }
}
