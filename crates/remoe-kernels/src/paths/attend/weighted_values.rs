//! Weighted sums of a page's values.

use std::ops::Range;

use super::score::max_rows_without_tile;
use super::{BLOCK_ROWS, BlockScratch, Element, PAGE_POSITIONS, TILE_VECTORS};
use crate::attention_shape::AttentionShape;
use crate::paths::floats::Floats;
use crate::paths::panel::{CACHE_LINE, INTO_L2, prefetch};

/// Largest number of rows whose values are summed together.
const fn max_group_rows<F: Floats>() -> usize {
    match F::LANES {
        16 => 4,
        8 => 2,
        _ => 1,
    }
}

/// Softmax weights of a page's positions, for some rows of a block.
pub(super) struct Weights<'a> {
    /// Holds the weights and the rows' sums of values.
    pub(super) scratch: &'a BlockScratch,
    pub(super) rows: Range<usize>,
    /// Positions of the page that each row attends to: the first one, and the one after the last.
    pub(super) visible: &'a [(usize, usize); BLOCK_ROWS],
    /// Factors by which the rows' sums over earlier pages are multiplied.
    pub(super) factors: &'a [f32; BLOCK_ROWS],
}

/// Adds the weighted values of a page to the rows' sums of values. A few rows also prefetch the memory at `ahead`, which
/// is read next.
///
/// # Safety
/// The contract of [`super::attend`]: `values` points to the page's values of one KV head.
#[inline(always)]
pub(super) unsafe fn add_weighted_values<F: Floats, E: Element>(
    shape: &AttentionShape,
    weights: &Weights<'_>,
    values: *const E,
    ahead: *const u8,
) {
    let mut ahead = ahead;
    let mut column = 0;
    // SAFETY: `values` and the rows' scratch memory are valid, as the caller guarantees.
    unsafe {
        while column + TILE_VECTORS * F::LANES <= shape.value_dim {
            add_columns::<F, E, TILE_VECTORS>(shape, weights, values, column, &mut ahead);
            column += TILE_VECTORS * F::LANES;
        }
        while column < shape.value_dim {
            add_columns::<F, E, 1>(shape, weights, values, column, &mut ahead);
            column += F::LANES;
        }
    }
}

/// Adds the weighted values of `C` vectors of value elements. The last vector may be partial.
///
/// # Safety
/// As for [`add_weighted_values`].
#[inline(always)]
unsafe fn add_columns<F: Floats, E: Element, const C: usize>(
    shape: &AttentionShape,
    weights: &Weights<'_>,
    values: *const E,
    column: usize,
    ahead: &mut *const u8,
) {
    let (tile, width) = (weights.scratch.tile, C * F::LANES);
    let is_whole = column + width <= shape.value_dim;
    // SAFETY: `values` has all positions and elements of the page, as the caller guarantees. Lanes beyond the last element are never read.
    unsafe {
        if shape.latent {
            let from = values.add(column * PAGE_POSITIONS);
            if is_whole {
                let words = F::LANES * size_of::<f32>() / size_of::<E>();
                for c in 0..C {
                    for position in (0..PAGE_POSITIONS).step_by(words) {
                        let from = from.add(c * F::LANES * PAGE_POSITIONS + position);
                        let to = tile.add(position * width + c * F::LANES);
                        E::transpose::<F>(from, PAGE_POSITIONS, to, width);
                    }
                }
            } else {
                gather(from, [1, PAGE_POSITIONS], shape.value_dim - column, tile, width);
            }
        } else if !is_whole {
            gather(values.add(column), [shape.value_dim, 1], shape.value_dim - column, tile, width);
        } else if weights.rows.len() <= max_rows_without_tile::<F>() / 2 || size_of::<E>() == size_of::<f32>()
        {
            return add_rows::<F, E, C>(weights, values.add(column), shape.value_dim, column, ahead);
        } else {
            for position in 0..PAGE_POSITIONS {
                let (from, to) =
                    (values.add(position * shape.value_dim + column), tile.add(position * width));
                for c in 0..C {
                    F::store(to.add(c * F::LANES), E::load::<F>(from.add(c * F::LANES)));
                }
            }
        }
        add_rows::<F, f32, C>(weights, tile, width, column, &mut tile.cast_const().cast());
    }
}

/// Widens `count` value elements of every position, one by one. `strides` are the distances of positions and of elements.
///
/// # Safety
/// `from` is valid for these elements, and `to` for [`PAGE_POSITIONS`] rows of `width` elements.
#[inline(always)]
unsafe fn gather<E: Element>(from: *const E, strides: [usize; 2], count: usize, to: *mut f32, width: usize) {
    for position in 0..PAGE_POSITIONS {
        for dim in 0..count {
            // SAFETY: `values` and the rows' scratch memory are valid, as the caller guarantees.
            unsafe {
                let value = E::load_one(from.add(position * strides[0] + dim * strides[1]));
                *to.add(position * width + dim) = value;
            }
        }
    }
}

/// Adds the weighted values at `values` to the sums of all rows, from element `column` on. Positions are `stride` apart.
///
/// # Safety
/// As for [`add_weighted_values`]; `values` is valid for `C` vectors of every position.
#[inline(always)]
unsafe fn add_rows<F: Floats, E: Element, const C: usize>(
    weights: &Weights<'_>,
    values: *const E,
    stride: usize,
    column: usize,
    ahead: &mut *const u8,
) {
    let rows = weights.rows.clone();
    let mut r = rows.start;
    while r < rows.end {
        let visible = weights.visible[r];
        let max_rows = (rows.end - r).min(max_group_rows::<F>());
        let is_like_first = |next: &usize| weights.visible[r + next] == visible;
        let similar = (1..max_rows).take_while(is_like_first).count();
        // Only the first rows prefetch; the others prefetch what is in the cache already.
        let mut cached = values.cast();
        let ahead = if r == rows.start { &mut *ahead } else { &mut cached };
        // SAFETY: `values` and the rows' scratch memory are valid, as the caller guarantees.
        r += unsafe {
            match (F::LANES, similar) {
                (16, 3) => add_row_group::<F, E, 4, C>(weights, r, values, stride, column, ahead),
                (16 | 8, 1..) => add_row_group::<F, E, 2, C>(weights, r, values, stride, column, ahead),
                _ => add_row_group::<F, E, 1, C>(weights, r, values, stride, column, ahead),
            }
        };
    }
}

/// Computes `sums = factor * sums + weights * values` for `R` rows that attend to the same positions, positions ascending.
/// Returns `R`.
///
/// # Safety
/// As for [`add_rows`]; the block has `R` rows from `row` on.
#[inline(always)]
unsafe fn add_row_group<F: Floats, E: Element, const R: usize, const C: usize>(
    weights: &Weights<'_>,
    row: usize,
    values: *const E,
    stride: usize,
    column: usize,
    ahead: &mut *const u8,
) -> usize {
    let scratch = weights.scratch;
    let lines = (C * F::LANES * E::CACHED_BYTES).div_ceil(CACHE_LINE);
    let (low, high) = weights.visible[row];
    // SAFETY: `values` and the rows' scratch memory are valid, as the caller guarantees.
    unsafe {
        let sums = scratch.value_sums(row).add(column);
        let mut acc = [[F::splat(0.0); C]; R];
        for r in 0..R {
            let factor = F::splat(weights.factors[row + r]);
            for c in 0..C {
                acc[r][c] = F::mul(F::load(sums.add(r * scratch.state_stride + c * F::LANES)), factor);
            }
        }
        let row_weights = scratch.scores.add(row * PAGE_POSITIONS).cast_const();
        let mut values = values.add(low * stride);
        for position in low..high {
            let mut v = [F::splat(0.0); C];
            for c in 0..C {
                v[c] = E::load::<F>(values.add(c * F::LANES));
            }
            for r in 0..R {
                let weight = F::splat(*row_weights.add(r * PAGE_POSITIONS + position));
                for c in 0..C {
                    acc[r][c] = F::fma(weight, v[c], acc[r][c]);
                }
            }
            prefetch::<INTO_L2>(*ahead, lines);
            *ahead = ahead.wrapping_add(lines * CACHE_LINE);
            values = values.wrapping_add(stride);
        }
        for r in 0..R {
            for c in 0..C {
                F::store(sums.add(r * scratch.state_stride + c * F::LANES), acc[r][c]);
            }
        }
    }
    R
}
