//! Scores of query rows with the keys of a page, and softmax weights.

use std::ops::Range;

use super::{BlockScratch, Element, PAGE_POSITIONS, SUM_LANES, TILE_DIMS};
use crate::attention_shape::AttentionShape;
use crate::paths::activation::exp;
use crate::paths::floats::Floats;
use crate::paths::panel::{CACHE_LINE, INTO_L2, prefetch};

/// Largest number of rows that are scored together: as many as there are registers for their sums.
const fn max_group_rows<F: Floats>() -> usize {
    match F::LANES {
        16 => 8,
        8 => 2,
        _ => 1,
    }
}

/// Largest number of rows that widen a page's elements at each use, again for each group of rows. With more rows it is
/// faster to widen them once, to a tile.
pub(super) const fn max_rows_without_tile<F: Floats>() -> usize {
    match F::LANES {
        16 | 8 => 2 * max_group_rows::<F>(),
        _ => 0,
    }
}

/// Scores `rows` with the keys of a page.
///
/// A few rows also prefetch the memory at `ahead`, which is read next, into the second-level cache. That allows more
/// requests in flight than the first-level cache (18 GB/s instead of 9; Zen 4, 2026-11-29).
///
/// # Safety
/// The contract of [`super::attend`]: `keys` points to the page's keys of one KV head.
#[inline(always)]
pub(super) unsafe fn score_page<F: Floats, E: Element>(
    shape: &AttentionShape,
    scratch: &BlockScratch,
    rows: Range<usize>,
    keys: *const E,
    ahead: *const u8,
) {
    // SAFETY: `keys` and the rows' scratch memory are valid, as the caller guarantees.
    unsafe {
        if rows.len() <= max_rows_without_tile::<F>() || size_of::<E>() == size_of::<f32>() {
            return score_dims::<F, E>(scratch, rows, 0..shape.key_dim, keys, ahead);
        }
        for first in (0..shape.key_dim).step_by(TILE_DIMS) {
            let dims = first..(first + TILE_DIMS).min(shape.key_dim);
            let from = keys.add(first * PAGE_POSITIONS);
            for at in (0..dims.len() * PAGE_POSITIONS).step_by(F::LANES) {
                F::store(scratch.tile.add(at), E::load::<F>(from.add(at)));
            }
            score_dims::<F, f32>(scratch, rows.clone(), dims, scratch.tile, scratch.tile.cast());
        }
    }
}

/// Adds the products of the key elements `dims`, which lie at `keys`, to the scores of `rows`. Element 0 begins the scores.
///
/// # Safety
/// As for [`score_page`]; `keys` is valid for all positions of `dims`.
#[inline(always)]
unsafe fn score_dims<F: Floats, E: Element>(
    scratch: &BlockScratch,
    rows: Range<usize>,
    dims: Range<usize>,
    keys: *const E,
    ahead: *const u8,
) {
    let mut ahead = ahead;
    let mut r = rows.start;
    while r < rows.end {
        let left = (rows.end - r).min(max_group_rows::<F>());
        // SAFETY: `keys` and the rows' scratch memory are valid, as the caller guarantees; `C * LANES` is PAGE_POSITIONS.
        r += unsafe {
            match (F::LANES, left) {
                (16, 8) => score_rows::<F, E, 8, 2>(scratch, r, &dims, keys, ahead),
                (16, 4..) => score_rows::<F, E, 4, 2>(scratch, r, &dims, keys, ahead),
                (16, 2..) => score_rows::<F, E, 2, 2>(scratch, r, &dims, keys, ahead),
                (16, _) => score_rows::<F, E, 1, 2>(scratch, r, &dims, keys, ahead),
                (8, 2..) => score_rows::<F, E, 2, 4>(scratch, r, &dims, keys, ahead),
                (8, _) => score_rows::<F, E, 1, 4>(scratch, r, &dims, keys, ahead),
                _ => score_rows::<F, E, 1, 8>(scratch, r, &dims, keys, ahead),
            }
        };
        // Only the first rows prefetch; the others prefetch what is in the cache already.
        ahead = keys.cast();
    }
}

/// Scores `R` rows, with the positions of a page in `C` vectors. Returns `R`.
///
/// # Safety
/// As for [`score_dims`]; the block has `R` rows from `row` on.
#[inline(always)]
unsafe fn score_rows<F: Floats, E: Element, const R: usize, const C: usize>(
    scratch: &BlockScratch,
    row: usize,
    dims: &Range<usize>,
    keys: *const E,
    ahead: *const u8,
) -> usize {
    let lines = 2 * PAGE_POSITIONS * E::CACHED_BYTES / CACHE_LINE;
    // SAFETY: `keys` and the rows' scratch memory are valid, as the caller guarantees.
    unsafe {
        let to = scratch.scores.add(row * PAGE_POSITIONS);
        let mut query = [scratch.query.add(row * scratch.query_stride + dims.start).cast_const(); R];
        let mut acc = [[F::splat(0.0); C]; R];
        for r in 0..R {
            query[r] = query[r].add(r * scratch.query_stride);
            if dims.start > 0 {
                for c in 0..C {
                    acc[r][c] = F::load(to.add(r * PAGE_POSITIONS + c * F::LANES));
                }
            }
        }
        let (mut keys, mut ahead) = (keys, ahead);
        for pair in 0..dims.len() / 2 {
            for odd in [1, 0] {
                let mut k = [F::splat(0.0); C];
                for c in 0..C {
                    k[c] = E::load::<F>(keys.add(odd * PAGE_POSITIONS + c * F::LANES));
                }
                for r in 0..R {
                    let q = F::splat(*query[r].add(pair.wrapping_mul(2)).add(odd));
                    for c in 0..C {
                        acc[r][c] = F::fma(q, k[c], acc[r][c]);
                    }
                }
            }
            prefetch::<INTO_L2>(ahead, lines);
            ahead = ahead.wrapping_add(lines * CACHE_LINE);
            keys = keys.add(2 * PAGE_POSITIONS);
        }
        if dims.len() % 2 == 1 {
            // The last pair is padded with a zero as its odd element.
            let zero = F::splat(0.0);
            for r in 0..R {
                let q = F::splat(*query[r].add(dims.len() - 1));
                for c in 0..C {
                    acc[r][c] = F::fma(zero, zero, acc[r][c]);
                    acc[r][c] = F::fma(q, E::load::<F>(keys.add(c * F::LANES)), acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                F::store(to.add(r * PAGE_POSITIONS + c * F::LANES), acc[r][c]);
            }
        }
    }
    R
}

/// Replaces the scores of a row by softmax weights, and adds them to the row's sums of weights. Positions outside of `low
/// .. high` get weight 0. Returns the factor by which the row's sums of values over earlier pages are to be multiplied.
///
/// # Safety
/// As for [`score_page`]; the row has been scored.
#[inline(always)]
pub(super) unsafe fn softmax_weights<F: Floats, const C: usize>(
    scratch: &BlockScratch,
    row: usize,
    (low, high): (usize, usize),
    scale: f32,
) -> f32 {
    let sum_vectors = SUM_LANES / F::LANES;
    // SAFETY: the row's scratch memory is valid, as the caller guarantees. LANES divides SUM_LANES, and `C * LANES` is PAGE_POSITIONS.
    unsafe {
        let row_scores = scratch.scores.add(row * PAGE_POSITIONS);
        let sums = scratch.weight_sums(row);
        let largest = &mut *scratch.largest_score(row);
        let mut scores = [F::splat(0.0); C];
        for c in 0..C {
            scores[c] = F::mul(F::load(row_scores.add(c * F::LANES)), F::splat(scale));
        }
        if low > 0 || high < PAGE_POSITIONS {
            for c in 0..C {
                F::store(row_scores.add(c * F::LANES), scores[c]);
            }
            let positions = std::slice::from_raw_parts_mut(row_scores, PAGE_POSITIONS);
            positions[..low].fill(f32::NEG_INFINITY);
            positions[high..].fill(f32::NEG_INFINITY);
            for c in 0..C {
                scores[c] = F::load(row_scores.add(c * F::LANES));
            }
        }
        let mut maxima = F::splat(*largest);
        for c in 0..C {
            maxima = F::at_least(scores[c], maxima);
        }
        let new_largest = F::largest(maxima);
        let mut factor = 1.0;
        if new_largest > *largest {
            factor = first_lane::<F>(exp::<F>(F::splat(*largest - new_largest)));
            for lane in 0..sum_vectors {
                let sums = sums.add(lane * F::LANES);
                F::store(sums, F::mul(F::load(sums), F::splat(factor)));
            }
            *largest = new_largest;
        }
        let offset = F::splat(-*largest);
        for lane in 0..sum_vectors {
            let sums = sums.add(lane * F::LANES);
            let mut sum = F::load(sums);
            for c in (lane..C).step_by(sum_vectors) {
                let weight = exp::<F>(F::add(scores[c], offset));
                F::store(row_scores.add(c * F::LANES), weight);
                sum = F::add(sum, weight);
            }
            F::store(sums, sum);
        }
        factor
    }
}

/// Returns the first lane of `v`.
///
/// # Safety
/// The CPU has the features of `F`.
#[inline(always)]
unsafe fn first_lane<F: Floats>(v: F::V) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: the CPU has the features, as the caller guarantees, and LANES is at most 16.
    unsafe { F::store(lanes.as_mut_ptr(), v) };
    lanes[0]
}
