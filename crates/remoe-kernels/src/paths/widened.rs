//! bfloat16 and fp8 by float32 arithmetic for many rows: weights are widened once for all of them, not once per block of rows.
//!
//! K is walked in chunks whose widened weights stay in the first-level cache. All blocks of a group of rows go over a chunk before the next one begins; between chunks their sums lie in memory, as float32, so that nothing is rounded on the way and K still ascends: the bits are those of one pass.
//! The packed panel is read once per group, and the blocks of a chunk fetch the packed chunk that follows.

use super::floats::Floats;
use super::panel::{Aligned, LINE, NEAR, Panel, PanelSums, PanelWalk, ROWS, prefetch};
use super::steps::Step;
use crate::shape::PANEL;

/// Pairs of K that are widened together: 16 KB of weights, half of the smallest first-level cache there is.
const CHUNK: usize = 32;
/// Most rows that share a widened chunk; their sums are 48 KB, of a second-level cache and of the stack.
pub(super) const GROUP: usize = 192;

/// A pair's weights: the odd elements of all columns, then the even ones.
type Weights = [PanelSums; 2];
/// A chunk of a row: the odd elements, then the even ones.
type Row = [[f32; CHUNK]; 2];

/// By chunks whose weights are widened.
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
        let mut weights = Aligned::<[Weights; CHUNK]>::new();
        let weights = weights.0.as_mut_ptr().cast::<Weights>();
        let mut x = Aligned::<[Row; ROWS]>::new();
        let x = x.0.as_mut_ptr().cast::<Row>();
        let blocks = count.div_ceil(ROWS);
        let all = panel.steps * S::PAIRS;
        let packed = |pair: usize| panel.weights.wrapping_add(pair / S::PAIRS * S::WORDS);
        for pair in (0..all).step_by(CHUNK) {
            let pairs = CHUNK.min(all - pair);
            let end = pair + pairs;
            let mut early = if end < all { packed(end).cast() } else { after };
            let lines_per_block = (CHUNK / S::PAIRS * S::WORDS * 4 / LINE).div_ceil(blocks);
            // SAFETY: the caller's promise; `end <= all`, `pairs <= CHUNK`, whole steps both, and blocks have between 1 and ROWS rows.
            unsafe {
                S::widen(packed(pair), pairs, weights.cast());
                let mut first = 0;
                for block in 0..blocks {
                    prefetch::<NEAR>(early, lines_per_block);
                    early = early.wrapping_add(lines_per_block * LINE);
                    let block_rows = (count - first).div_ceil(blocks - block);
                    widen_rows::<S>(rows.add(first), block_rows, pair, pairs, x);
                    let following = first + block_rows;
                    if following < count {
                        prefetch_rows::<S>(rows.add(following), block_rows.min(count - following), pair);
                    } else {
                        prefetch_rows::<S>(rows, block_rows, end);
                    }
                    let sums = sums.add(first);
                    let begins = pair == 0;
                    match block_rows {
                        1 => sum_block::<S::F, 1>(weights, pairs, x, begins, sums),
                        2 => sum_block::<S::F, 2>(weights, pairs, x, begins, sums),
                        3 => sum_block::<S::F, 3>(weights, pairs, x, begins, sums),
                        4 => sum_block::<S::F, 4>(weights, pairs, x, begins, sums),
                        5 => sum_block::<S::F, 5>(weights, pairs, x, begins, sums),
                        _ => sum_block::<S::F, 6>(weights, pairs, x, begins, sums),
                    }
                    first += block_rows;
                }
            }
        }
    }
}

/// Widens so many pairs of `count` rows, from `pair` on; of the last vector, what lies beyond them is of no meaning.
#[inline(always)]
unsafe fn widen_rows<S: Step>(rows: *const *const u8, count: usize, pair: usize, pairs: usize, to: *mut Row) {
    let whole = pairs - pairs % S::F::LANES;
    // SAFETY: the caller's promise: `count` rows of `pair + pairs` pairs. LANES divides CHUNK, so that the last vector fits in `to`.
    unsafe {
        for r in 0..count {
            let to = to.add(r).cast::<f32>();
            if !S::BF16 {
                let row = (*rows.add(r)).cast::<[f32; 2]>().add(pair);
                for p in 0..pairs {
                    let [even, odd] = row.add(p).read_unaligned();
                    to.add(p).write(odd);
                    to.add(CHUNK + p).write(even);
                }
                continue;
            }
            let row = (*rows.add(r)).cast::<u32>().add(pair);
            for p in (0..whole).step_by(S::F::LANES) {
                S::F::store(to.add(p), S::F::odd(row.add(p)));
                S::F::store(to.add(CHUNK + p), S::F::even(row.add(p)));
            }
            if whole < pairs {
                let mut rest = [0u32; CHUNK];
                rest.as_mut_ptr()
                    .cast::<u8>()
                    .copy_from_nonoverlapping(row.add(whole).cast(), (pairs - whole) * 4);
                S::F::store(to.add(whole), S::F::odd(rest.as_ptr()));
                S::F::store(to.add(CHUNK + whole), S::F::even(rest.as_ptr()));
            }
        }
    }
}

/// Asks for a chunk of `count` rows, from `pair` on. Rows are far apart, so that no prefetcher of the processor sees them coming.
#[inline(always)]
unsafe fn prefetch_rows<S: Step>(rows: *const *const u8, count: usize, pair: usize) {
    for r in 0..count {
        // SAFETY: the caller's promise: so many rows.
        let row = unsafe { *rows.add(r) };
        prefetch::<NEAR>(row.wrapping_add(2 * pair * S::ELEMENT), 2 * CHUNK * S::ELEMENT / LINE);
    }
}

/// Adds a chunk to the sums of `R` rows, or begins them. Narrow vectors take fewer columns at a time, as in [`super::chunked`].
#[inline(always)]
unsafe fn sum_block<F: Floats, const R: usize>(
    weights: *const Weights,
    pairs: usize,
    x: *const Row,
    begins: bool,
    sums: *mut PanelSums,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if F::LANES == 16 {
            sum_columns::<F, R, 4>(weights, pairs, x, begins, sums);
        } else if R == 1 {
            sum_columns::<F, R, 8>(weights, pairs, x, begins, sums);
        } else if R == 2 {
            sum_columns::<F, R, 4>(weights, pairs, x, begins, sums);
        } else {
            sum_columns::<F, R, 2>(weights, pairs, x, begins, sums);
        }
    }
}

#[inline(always)]
unsafe fn sum_columns<F: Floats, const R: usize, const C: usize>(
    weights: *const Weights,
    pairs: usize,
    x: *const Row,
    begins: bool,
    sums: *mut PanelSums,
) {
    for first in (0..PANEL).step_by(C * F::LANES) {
        // SAFETY: the caller's promise; `C * LANES` divides PANEL.
        unsafe {
            let mut acc = [[F::splat(0.0); C]; R];
            if !begins {
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
                        let x = F::splat(*x.add(r).cast::<f32>().add(element * CHUNK + pair));
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
