//! Steps of K with fp8 weights, which are decoded at each use.

use std::marker::PhantomData;

use super::floats::Floats;
use super::panel::MAX_BLOCK_ROWS;
use super::steps::Step;
use crate::quantise::GROUP;
use crate::shape::{PANEL, SCALE_COLUMNS, step_words};
use crate::{Dtype, WeightFormat};

/// Vector operations that decode fp8 weights.
///
/// # Safety
/// As for [`Floats`].
pub(crate) trait Codes: Floats {
    /// Reads `LANES` e4m3 codes of one byte each, none of them NaN. Returns their values times 2^-8
    /// ([`crate::numerics::E4M3`]).
    unsafe fn load_e4m3(from: *const u8) -> Self::V;
    /// Reads `LANES / 4` scales, and repeats each in four lanes.
    unsafe fn load_scales(from: *const f32) -> Self::V;
    /// Rounds finite numbers to bfloat16 and widens them again. The rounded numbers are finite, too.
    unsafe fn round_finite_bf16(v: Self::V) -> Self::V;

    /// Look-up table of the bfloat16 weights of all codes under one scale.
    type Table: Copy;
    /// Returns the table for [`TABLE_VECTORS`] vectors of columns with one scale for four columns each. Returns `None`
    /// unless all scales are the same positive number, and the path looks up faster than it multiplies and rounds.
    unsafe fn table(scales: *const f32) -> Option<Self::Table>;
    /// Decodes [`TABLE_VECTORS`] vectors of codes, with the same bits as multiplying and rounding.
    unsafe fn look_up(table: Self::Table, from: *const u8) -> [Self::V; TABLE_VECTORS];
}

/// Vectors that [`Codes::look_up`] decodes together.
pub(crate) const TABLE_VECTORS: usize = 4;

/// A group of fp8 weights with their scales ([`crate::fp8`]). Rows and results are bfloat16 if `BF16`, else float32.
pub(crate) struct Fp8Step<N, const BF16: bool>(PhantomData<N>);

/// Bytes of the codes of one step.
const CODE_BYTES: usize = GROUP * PANEL;

impl<N: Codes, const BF16: bool> Fp8Step<N, BF16> {
    /// Decodes the weights of element `k` of a step, for a vector of columns from `column` on.
    #[inline(always)]
    unsafe fn weights(w: *const u32, k: usize, column: usize, scale: N::V) -> N::V {
        // SAFETY: `w` points to a step and `k` is below GROUP, as the caller guarantees.
        unsafe {
            let weights = N::mul(N::load_e4m3(w.cast::<u8>().add(k * PANEL + column)), scale);
            if BF16 { N::round_finite_bf16(weights) } else { weights }
        }
    }

    /// Reads the scales of a vector of columns.
    #[inline(always)]
    unsafe fn load_scales(w: *const u32, column: usize) -> N::V {
        // SAFETY: `w` points to a step, as the caller guarantees.
        unsafe { N::load_scales(Self::scales(w, column)) }
    }

    /// Returns a pointer to the scales from `column` on.
    #[inline(always)]
    unsafe fn scales(w: *const u32, column: usize) -> *const f32 {
        // SAFETY: `w` points to a step, as the caller guarantees, whose scales follow its codes.
        unsafe { w.cast::<u8>().add(CODE_BYTES).cast::<f32>().add(column / SCALE_COLUMNS) }
    }

    /// Returns the destination of the widened weights of element `k` of a step. The odd element of each pair comes first.
    #[inline(always)]
    unsafe fn widened_line(to: *mut f32, step: usize, k: usize) -> *mut f32 {
        // SAFETY: `to` has room for all columns of the step, as the caller guarantees.
        unsafe { to.add((step * GROUP + (k ^ 1)) * PANEL) }
    }

    /// Returns the look-up table for [`TABLE_VECTORS`] vectors of columns from `column` on, if there is one.
    #[inline(always)]
    unsafe fn table(w: *const u32, column: usize) -> Option<N::Table> {
        // SAFETY: `w` points to a step, as the caller guarantees.
        unsafe { if BF16 { N::table(Self::scales(w, column)) } else { None } }
    }

    /// Adds the products of element `k` of each row with the weights to the accumulators.
    #[inline(always)]
    unsafe fn add_products<const R: usize, const C: usize>(
        acc: &mut [[N::V; C]; R],
        x: &[*const u8; R],
        k: usize,
        weights: &[N::V],
    ) {
        // SAFETY: each row has an element `k`, as the caller guarantees.
        unsafe {
            for r in 0..R {
                let x = if BF16 {
                    let half = x[r].cast::<u16>().add(k).read_unaligned();
                    f32::from_bits(u32::from(half) << 16)
                } else {
                    x[r].cast::<f32>().add(k).read_unaligned()
                };
                let x = N::splat(x);
                for c in 0..C {
                    acc[r][c] = N::fma(x, weights[c], acc[r][c]);
                }
            }
        }
    }
}

impl<N: Codes, const BF16: bool> Step for Fp8Step<N, BF16> {
    type F = N;
    type InBf16 = Self;
    const BF16: bool = BF16;
    const WEIGHTS: WeightFormat = WeightFormat::Fp8;
    const MAX_UNWIDENED_ROWS: usize = MAX_BLOCK_ROWS;
    const PAIRS: usize = GROUP / 2;
    const WORDS: usize = step_words(if BF16 { Dtype::Bf16 } else { Dtype::F32 }, WeightFormat::Fp8);
    const STEPS_PER_PREFETCH: usize = 1;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[N::V; C]; R],
        x: &[*const u8; R],
        step: usize,
        w: *const u32,
        first: usize,
    ) {
        // SAFETY: rows and weights are valid for this step, by the trait's contract.
        unsafe {
            if C == TABLE_VECTORS
                && let Some(table) = Self::table(w, first)
            {
                for pair in 0..Self::PAIRS {
                    for k in [2 * pair + 1, 2 * pair] {
                        let weights = N::look_up(table, w.cast::<u8>().add(k * PANEL + first));
                        Self::add_products(acc, x, step * GROUP + k, &weights);
                    }
                }
                return;
            }
            let mut scales = [N::splat(0.0); C];
            for c in 0..C {
                scales[c] = Self::load_scales(w, first + c * N::LANES);
            }
            for pair in 0..Self::PAIRS {
                for k in [2 * pair + 1, 2 * pair] {
                    let mut weights = [N::splat(0.0); C];
                    for c in 0..C {
                        weights[c] = Self::weights(w, k, first + c * N::LANES, scales[c]);
                    }
                    Self::add_products(acc, x, step * GROUP + k, &weights);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn widen(w: *const u32, pairs: usize, to: *mut f32) {
        for step in 0..pairs / Self::PAIRS {
            // SAFETY: `w` is valid for all steps, and `to` for as many pairs of all columns, by the method's contract.
            unsafe {
                let w = w.add(step * Self::WORDS);
                for columns in (0..PANEL).step_by(TABLE_VECTORS * N::LANES) {
                    if let Some(table) = Self::table(w, columns) {
                        for k in 0..GROUP {
                            let weights = N::look_up(table, w.cast::<u8>().add(k * PANEL + columns));
                            let to = Self::widened_line(to, step, k).add(columns);
                            for c in 0..TABLE_VECTORS {
                                N::store(to.add(c * N::LANES), weights[c]);
                            }
                        }
                        continue;
                    }
                    for column in (columns..columns + TABLE_VECTORS * N::LANES).step_by(N::LANES) {
                        let scale = Self::load_scales(w, column);
                        for k in 0..GROUP {
                            N::store(
                                Self::widened_line(to, step, k).add(column),
                                Self::weights(w, k, column, scale),
                            );
                        }
                    }
                }
            }
        }
    }
}
