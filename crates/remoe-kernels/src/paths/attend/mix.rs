//! Sums of a page's values by weights.

use std::ops::Range;

use super::score::few_rows;
use super::{BLOCK_ROWS, BlockScratch, Element, PAGE_POSITIONS, TILE_VECTORS};
use crate::attention_shape::AttentionShape;
use crate::paths::floats::Floats;
use crate::paths::panel::{FAR, LINE, prefetch};

/// Rows whose values are summed together.
const fn mix_group<F: Floats>() -> usize {
    match F::LANES {
        16 => 4,
        8 => 2,
        _ => 1,
    }
}

/// Weights of a page's positions.
pub(super) struct Weights<'a> {
    pub(super) parts: &'a BlockScratch,
    pub(super) rows: Range<usize>,
    /// Positions that each row sees, from and to.
    pub(super) visible: &'a [(usize, usize); BLOCK_ROWS],
    /// Factors of what was summed before.
    pub(super) factors: &'a [f32; BLOCK_ROWS],
}

/// Adds the weighted values of a page to the rows' unfinished values. Few rows fetch what lies at `asked` meanwhile, which is read next.
#[inline(always)]
pub(super) unsafe fn mix_page<F: Floats, E: Element>(
    shape: &AttentionShape,
    weights: &Weights<'_>,
    values: *const E,
    asked: *const u8,
) {
    let mut asked = asked;
    let mut column = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while column + TILE_VECTORS * F::LANES <= shape.value_dim {
            mix_columns::<F, E, TILE_VECTORS>(shape, weights, values, column, &mut asked);
            column += TILE_VECTORS * F::LANES;
        }
        while column < shape.value_dim {
            mix_columns::<F, E, 1>(shape, weights, values, column, &mut asked);
            column += F::LANES;
        }
    }
}

/// Does it for `C` vectors of value elements, of which the last may be cut off.
#[inline(always)]
unsafe fn mix_columns<F: Floats, E: Element, const C: usize>(
    shape: &AttentionShape,
    weights: &Weights<'_>,
    values: *const E,
    column: usize,
    asked: &mut *const u8,
) {
    let (tile, width) = (weights.parts.tile, C * F::LANES);
    let is_whole = column + width <= shape.value_dim;
    // SAFETY: the caller's promise. What lanes beyond the last element hold is never read.
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
        } else if weights.rows.len() <= few_rows::<F>() / 2 || size_of::<E>() == size_of::<f32>() {
            return mix_from::<F, E, C>(weights, values.add(column), shape.value_dim, column, asked);
        } else {
            for position in 0..PAGE_POSITIONS {
                let (from, to) =
                    (values.add(position * shape.value_dim + column), tile.add(position * width));
                for c in 0..C {
                    F::store(to.add(c * F::LANES), E::load::<F>(from.add(c * F::LANES)));
                }
            }
        }
        mix_from::<F, f32, C>(weights, tile, width, column, &mut tile.cast_const().cast());
    }
}

/// Widens `count` value elements of every position, one by one. Positions and elements are `strides` apart.
#[inline(always)]
unsafe fn gather<E: Element>(from: *const E, strides: [usize; 2], count: usize, to: *mut f32, width: usize) {
    for position in 0..PAGE_POSITIONS {
        for dim in 0..count {
            // SAFETY: the caller's promise.
            unsafe {
                let value = E::widened(from.add(position * strides[0] + dim * strides[1]));
                *to.add(position * width + dim) = value;
            }
        }
    }
}

/// Adds weighted values at `values`, positions `stride` apart, to elements `column` and following of all rows.
#[inline(always)]
unsafe fn mix_from<F: Floats, E: Element, const C: usize>(
    weights: &Weights<'_>,
    values: *const E,
    stride: usize,
    column: usize,
    asked: &mut *const u8,
) {
    let rows = weights.rows.clone();
    let mut r = rows.start;
    while r < rows.end {
        let visible = weights.visible[r];
        let most = (rows.end - r).min(mix_group::<F>());
        let alike = (1..most).take_while(|&next| weights.visible[r + next] == visible).count();
        let mut again = values.cast();
        let asked = if r == rows.start { &mut *asked } else { &mut again };
        // SAFETY: the caller's promise.
        r += unsafe {
            match (F::LANES, alike) {
                (16, 3) => mix_rows::<F, E, 4, C>(weights, r, values, stride, column, asked),
                (16 | 8, 1..) => mix_rows::<F, E, 2, C>(weights, r, values, stride, column, asked),
                _ => mix_rows::<F, E, 1, C>(weights, r, values, stride, column, asked),
            }
        };
    }
}

/// `mixed = factor mixed + weights values` of `R` rows that see the same positions, these ascending. Returns `R`.
#[inline(always)]
unsafe fn mix_rows<F: Floats, E: Element, const R: usize, const C: usize>(
    weights: &Weights<'_>,
    row: usize,
    values: *const E,
    stride: usize,
    column: usize,
    asked: &mut *const u8,
) -> usize {
    let parts = weights.parts;
    let lines = (C * F::LANES * E::CACHED).div_ceil(LINE);
    let (low, high) = weights.visible[row];
    // SAFETY: the caller's promise.
    unsafe {
        let mixed = parts.mixed(row).add(column);
        let mut acc = [[F::splat(0.0); C]; R];
        for r in 0..R {
            let factor = F::splat(weights.factors[row + r]);
            for c in 0..C {
                acc[r][c] = F::mul(F::load(mixed.add(r * parts.stride + c * F::LANES)), factor);
            }
        }
        let at = parts.scores.add(row * PAGE_POSITIONS).cast_const();
        let mut values = values.add(low * stride);
        for position in low..high {
            let mut v = [F::splat(0.0); C];
            for c in 0..C {
                v[c] = E::load::<F>(values.add(c * F::LANES));
            }
            for r in 0..R {
                let weight = F::splat(*at.add(r * PAGE_POSITIONS + position));
                for c in 0..C {
                    acc[r][c] = F::fma(weight, v[c], acc[r][c]);
                }
            }
            prefetch::<FAR>(*asked, lines);
            *asked = asked.wrapping_add(lines * LINE);
            values = values.wrapping_add(stride);
        }
        for r in 0..R {
            for c in 0..C {
                F::store(mixed.add(r * parts.stride + c * F::LANES), acc[r][c]);
            }
        }
    }
    R
}
