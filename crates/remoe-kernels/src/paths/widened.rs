//! Walks a panel of bfloat16 or fp8 weights for many rows: weights are widened to float32 once for all rows, not once for
//! each block of rows.
//!
//! The panel is walked in chunks of K. The widened weights of a chunk stay in the first-level cache while all blocks of a
//! group of rows are multiplied with them. Between chunks, sums lie in memory as float32: nothing is rounded and K still
//! ascends, so that the bits are those of one pass. The packed panel is read once per group, and the blocks of a chunk
//! prefetch the next packed chunk.

use super::floats::Floats;
use super::panel::{Aligned, CACHE_LINE, INTO_L1, MAX_BLOCK_ROWS, Panel, PanelSums, PanelWalk, prefetch};
use super::steps::Step;
use crate::shape::PANEL;

/// Pairs of K of a chunk: 16 KB of widened weights, half of the smallest first-level cache.
const CHUNK_PAIRS: usize = 32;
/// Largest number of rows that share a widened chunk. Their sums take 48 KB of stack, and of the second-level cache.
pub(super) const MAX_GROUP_ROWS: usize = 192;

/// Widened weights of a pair: the odd elements of all columns, then the even ones.
type PairWeights = [[f32; PANEL]; 2];
/// Widened chunk of a row: the odd elements, then the even ones.
type RowChunk = [[f32; CHUNK_PAIRS]; 2];

/// The walk in chunks with widened weights.
pub(super) struct Widened;

impl PanelWalk for Widened {
    #[inline(always)]
    unsafe fn sum_group<S: Step>(
        panel: &Panel,
        rows: *const *const u8,
        count: usize,
        after: *const u8,
        sums: *mut PanelSums,
    ) {
        let mut weights = Aligned::<[PairWeights; CHUNK_PAIRS]>::new();
        let weights = weights.0.as_mut_ptr().cast::<PairWeights>();
        let mut x = Aligned::<[RowChunk; MAX_BLOCK_ROWS]>::new();
        let x = x.0.as_mut_ptr().cast::<RowChunk>();
        let blocks = count.div_ceil(MAX_BLOCK_ROWS);
        let all_pairs = panel.steps * S::PAIRS;
        let packed = |pair: usize| panel.weights.wrapping_add(pair / S::PAIRS * S::WORDS);
        for pair in (0..all_pairs).step_by(CHUNK_PAIRS) {
            let pairs = CHUNK_PAIRS.min(all_pairs - pair);
            let end = pair + pairs;
            let mut ahead = if end < all_pairs { packed(end).cast() } else { after };
            let lines_per_block = (CHUNK_PAIRS / S::PAIRS * S::WORDS * 4 / CACHE_LINE).div_ceil(blocks);
            // SAFETY: there are `count` rows with room for their sums, as the caller guarantees. `end <= all_pairs` and
            // `pairs <= CHUNK_PAIRS`, both whole steps; blocks have 1 to 6 rows.
            unsafe {
                S::widen(packed(pair), pairs, weights.cast());
                let mut first = 0;
                for block in 0..blocks {
                    prefetch::<INTO_L1>(ahead, lines_per_block);
                    ahead = ahead.wrapping_add(lines_per_block * CACHE_LINE);
                    let block_rows = (count - first).div_ceil(blocks - block);
                    widen_rows::<S>(rows.add(first), block_rows, pair, pairs, x);
                    let next = first + block_rows;
                    if next < count {
                        prefetch_rows::<S>(rows.add(next), block_rows.min(count - next), pair);
                    } else {
                        prefetch_rows::<S>(rows, block_rows, end);
                    }
                    let sums = sums.add(first);
                    let is_first = pair == 0;
                    match block_rows {
                        1 => sum_block::<S::F, 1>(weights, pairs, x, is_first, sums),
                        2 => sum_block::<S::F, 2>(weights, pairs, x, is_first, sums),
                        3 => sum_block::<S::F, 3>(weights, pairs, x, is_first, sums),
                        4 => sum_block::<S::F, 4>(weights, pairs, x, is_first, sums),
                        5 => sum_block::<S::F, 5>(weights, pairs, x, is_first, sums),
                        _ => sum_block::<S::F, 6>(weights, pairs, x, is_first, sums),
                    }
                    first += block_rows;
                }
            }
        }
    }
}

/// Widens `pairs` pairs of `count` rows, from `pair` on. Lanes beyond the last pair are undefined.
#[inline(always)]
unsafe fn widen_rows<S: Step>(
    rows: *const *const u8,
    count: usize,
    pair: usize,
    pairs: usize,
    to: *mut RowChunk,
) {
    let whole = pairs - pairs % S::F::LANES;
    // SAFETY: there are `count` rows of `pair + pairs` pairs, as the caller guarantees. LANES divides CHUNK_PAIRS, so that the
    // last vector fits in `to`.
    unsafe {
        for r in 0..count {
            let to = to.add(r).cast::<f32>();
            if !S::BF16 {
                let row = (*rows.add(r)).cast::<[f32; 2]>().add(pair);
                for p in 0..pairs {
                    let [even, odd] = row.add(p).read_unaligned();
                    to.add(p).write(odd);
                    to.add(CHUNK_PAIRS + p).write(even);
                }
                continue;
            }
            let row = (*rows.add(r)).cast::<u32>().add(pair);
            for p in (0..whole).step_by(S::F::LANES) {
                S::F::store(to.add(p), S::F::load_odd(row.add(p)));
                S::F::store(to.add(CHUNK_PAIRS + p), S::F::load_even(row.add(p)));
            }
            if whole < pairs {
                let mut rest = [0u32; CHUNK_PAIRS];
                rest.as_mut_ptr()
                    .cast::<u8>()
                    .copy_from_nonoverlapping(row.add(whole).cast(), (pairs - whole) * 4);
                S::F::store(to.add(whole), S::F::load_odd(rest.as_ptr()));
                S::F::store(to.add(CHUNK_PAIRS + whole), S::F::load_even(rest.as_ptr()));
            }
        }
    }
}

/// Prefetches a chunk of `count` rows, from `pair` on. Rows are too far apart for the processor's own prefetcher.
#[inline(always)]
unsafe fn prefetch_rows<S: Step>(rows: *const *const u8, count: usize, pair: usize) {
    for r in 0..count {
        // SAFETY: there are `count` rows, as the caller guarantees.
        let row = unsafe { *rows.add(r) };
        prefetch::<INTO_L1>(
            row.wrapping_add(2 * pair * S::ELEMENT_BYTES),
            2 * CHUNK_PAIRS * S::ELEMENT_BYTES / CACHE_LINE,
        );
    }
}

/// Adds a chunk's products to the sums of `R` rows; the first chunk begins the sums. The number of columns at a time is as in [`super::chunked`].
#[inline(always)]
unsafe fn sum_block<F: Floats, const R: usize>(
    weights: *const PairWeights,
    pairs: usize,
    x: *const RowChunk,
    is_first: bool,
    sums: *mut PanelSums,
) {
    // SAFETY: `x` has `R` rows and `sums` has room for them, as the caller guarantees.
    unsafe {
        if F::LANES == 16 {
            sum_columns::<F, R, 4>(weights, pairs, x, is_first, sums);
        } else if R == 1 {
            sum_columns::<F, R, 8>(weights, pairs, x, is_first, sums);
        } else if R == 2 {
            sum_columns::<F, R, 4>(weights, pairs, x, is_first, sums);
        } else {
            sum_columns::<F, R, 2>(weights, pairs, x, is_first, sums);
        }
    }
}

/// Adds a chunk's products to the sums of `R` rows, `C` vectors of columns at a time.
#[inline(always)]
unsafe fn sum_columns<F: Floats, const R: usize, const C: usize>(
    weights: *const PairWeights,
    pairs: usize,
    x: *const RowChunk,
    is_first: bool,
    sums: *mut PanelSums,
) {
    for first in (0..PANEL).step_by(C * F::LANES) {
        // SAFETY: weights, rows and sums are valid for the chunk, as the caller guarantees; `C * LANES` divides PANEL.
        unsafe {
            let mut acc = [[F::splat(0.0); C]; R];
            if !is_first {
                for r in 0..R {
                    for c in 0..C {
                        acc[r][c] = F::load(sums.add(r).cast::<f32>().add(first + c * F::LANES));
                    }
                }
            }
            for pair in 0..pairs {
                for element in 0..2 {
                    let from = weights.add(pair).cast::<f32>().add(element * PANEL + first);
                    let mut w = [F::splat(0.0); C];
                    for c in 0..C {
                        w[c] = F::load(from.add(c * F::LANES));
                    }
                    for r in 0..R {
                        let x = F::splat(*x.add(r).cast::<f32>().add(element * CHUNK_PAIRS + pair));
                        for c in 0..C {
                            acc[r][c] = F::fma(x, w[c], acc[r][c]);
                        }
                    }
                }
            }
            for r in 0..R {
                for c in 0..C {
                    F::store(sums.add(r).cast::<f32>().add(first + c * F::LANES), acc[r][c]);
                }
            }
        }
    }
}
