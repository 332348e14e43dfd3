//! Scores of query rows with the keys of a page, and their weights.

use std::ops::Range;

use super::{BlockScratch, Element, PAGE_POSITIONS, SUM_LANES, TILE_DIMS};
use crate::attention_shape::AttentionShape;
use crate::paths::activation::exp;
use crate::paths::floats::Floats;
use crate::paths::panel::{FAR, LINE, prefetch};

/// Rows that are scored together: as many sums as there are registers for.
const fn score_group<F: Floats>() -> usize {
    match F::LANES {
        16 => 8,
        8 => 2,
        _ => 1,
    }
}

/// Rows up to which widening a page's elements where they are used, for each group of rows again, takes less than doing so once in a tile.
pub(super) const fn few_rows<F: Floats>() -> usize {
    match F::LANES {
        16 | 8 => 2 * score_group::<F>(),
        _ => 0,
    }
}

/// Scores `rows` with the keys of a page. Few rows read the page's elements themselves and fetch what lies at `asked`, which is read next: into the
/// second-level cache, which has more requests under way (18 GB/s; the first-level cache reached 9, Zen 4, 2026-11-29).
#[inline(always)]
pub(super) unsafe fn score_page<F: Floats, E: Element>(
    shape: &AttentionShape,
    parts: &BlockScratch,
    rows: Range<usize>,
    keys: *const E,
    asked: *const u8,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if rows.len() <= few_rows::<F>() || size_of::<E>() == size_of::<f32>() {
            return score_dims::<F, E>(parts, rows, 0..shape.key_dim, keys, asked);
        }
        for first in (0..shape.key_dim).step_by(TILE_DIMS) {
            let dims = first..(first + TILE_DIMS).min(shape.key_dim);
            let from = keys.add(first * PAGE_POSITIONS);
            for at in (0..dims.len() * PAGE_POSITIONS).step_by(F::LANES) {
                F::store(parts.tile.add(at), E::load::<F>(from.add(at)));
            }
            score_dims::<F, f32>(parts, rows.clone(), dims, parts.tile, parts.tile.cast());
        }
    }
}

/// Adds the products of the key elements `dims`, which lie at `keys`, to the scores of `rows`, or begins them.
#[inline(always)]
unsafe fn score_dims<F: Floats, E: Element>(
    parts: &BlockScratch,
    rows: Range<usize>,
    dims: Range<usize>,
    keys: *const E,
    asked: *const u8,
) {
    let mut asked = asked;
    let mut r = rows.start;
    while r < rows.end {
        let left = (rows.end - r).min(score_group::<F>());
        // SAFETY: the caller's promise; `C * LANES` is PAGE_POSITIONS.
        r += unsafe {
            match (F::LANES, left) {
                (16, 8) => score_rows::<F, E, 8, 2>(parts, r, &dims, keys, asked),
                (16, 4..) => score_rows::<F, E, 4, 2>(parts, r, &dims, keys, asked),
                (16, 2..) => score_rows::<F, E, 2, 2>(parts, r, &dims, keys, asked),
                (16, _) => score_rows::<F, E, 1, 2>(parts, r, &dims, keys, asked),
                (8, 2..) => score_rows::<F, E, 2, 4>(parts, r, &dims, keys, asked),
                (8, _) => score_rows::<F, E, 1, 4>(parts, r, &dims, keys, asked),
                _ => score_rows::<F, E, 1, 8>(parts, r, &dims, keys, asked),
            }
        };
        // Once is enough.
        asked = keys.cast();
    }
}

/// Scores `R` rows by `C` vectors of positions and returns `R`.
#[inline(always)]
unsafe fn score_rows<F: Floats, E: Element, const R: usize, const C: usize>(
    parts: &BlockScratch,
    row: usize,
    dims: &Range<usize>,
    keys: *const E,
    asked: *const u8,
) -> usize {
    let lines = 2 * PAGE_POSITIONS * E::CACHED / LINE;
    // SAFETY: the caller's promise.
    unsafe {
        let to = parts.scores.add(row * PAGE_POSITIONS);
        let mut query = [parts.query.add(row * parts.query_stride + dims.start).cast_const(); R];
        let mut acc = [[F::splat(0.0); C]; R];
        for r in 0..R {
            query[r] = query[r].add(r * parts.query_stride);
            if dims.start > 0 {
                for c in 0..C {
                    acc[r][c] = F::load(to.add(r * PAGE_POSITIONS + c * F::LANES));
                }
            }
        }
        let (mut keys, mut asked) = (keys, asked);
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
            prefetch::<FAR>(asked, lines);
            asked = asked.wrapping_add(lines * LINE);
            keys = keys.add(2 * PAGE_POSITIONS);
        }
        if dims.len() % 2 == 1 {
            // The odd element of the last pair is a zero.
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

/// Turns the scores of the positions that row `row` sees into weights and adds them to its sums, the others into none. Returns the factor of the row's earlier sums.
#[inline(always)]
pub(super) unsafe fn weigh<F: Floats, const C: usize>(
    parts: &BlockScratch,
    row: usize,
    (low, high): (usize, usize),
    scale: f32,
) -> f32 {
    let apart = SUM_LANES / F::LANES;
    // SAFETY: the caller's promise; LANES divides SUM_LANES, and `C * LANES` is PAGE_POSITIONS.
    unsafe {
        let at = parts.scores.add(row * PAGE_POSITIONS);
        let sums = parts.sums(row);
        let largest = &mut *parts.largest(row);
        let mut scores = [F::splat(0.0); C];
        for c in 0..C {
            scores[c] = F::mul(F::load(at.add(c * F::LANES)), F::splat(scale));
        }
        if low > 0 || high < PAGE_POSITIONS {
            for c in 0..C {
                F::store(at.add(c * F::LANES), scores[c]);
            }
            let positions = std::slice::from_raw_parts_mut(at, PAGE_POSITIONS);
            positions[..low].fill(f32::NEG_INFINITY);
            positions[high..].fill(f32::NEG_INFINITY);
            for c in 0..C {
                scores[c] = F::load(at.add(c * F::LANES));
            }
        }
        let mut most = F::splat(*largest);
        for c in 0..C {
            most = F::at_least(scores[c], most);
        }
        let best = F::largest(most);
        let mut factor = 1.0;
        if best > *largest {
            factor = first::<F>(exp::<F>(F::splat(*largest - best)));
            for lane in 0..apart {
                let sums = sums.add(lane * F::LANES);
                F::store(sums, F::mul(F::load(sums), F::splat(factor)));
            }
            *largest = best;
        }
        let offset = F::splat(-*largest);
        for lane in 0..apart {
            let sums = sums.add(lane * F::LANES);
            let mut sum = F::load(sums);
            for c in (lane..C).step_by(apart) {
                let weight = exp::<F>(F::add(scores[c], offset));
                F::store(at.add(c * F::LANES), weight);
                sum = F::add(sum, weight);
            }
            F::store(sums, sum);
        }
        factor
    }
}

/// The first lane.
#[inline(always)]
unsafe fn first<F: Floats>(v: F::V) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: LANES is at most 16.
    unsafe { F::store(lanes.as_mut_ptr(), v) };
    lanes[0]
}
