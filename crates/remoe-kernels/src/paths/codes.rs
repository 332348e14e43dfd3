//! Steps of K whose weights are codes, which become numbers where they are used: fp8.

use std::marker::PhantomData;

use super::floats::Floats;
use super::panel::ROWS;
use super::steps::Step;
use crate::quantise::GROUP;
use crate::shape::{PANEL, SCALE_COLUMNS, step_words};
use crate::{Dtype, WeightFormat};

/// The vector operations that make numbers of codes.
///
/// # Safety
/// As for [`Floats`].
pub(crate) trait Codes: Floats {
    /// Reads `LANES` codes of e4m3, a byte each, none of which stands for no number: the numbers times 2^-8
    /// ([`crate::numerics::E4M3`]).
    unsafe fn e4m3(from: *const u8) -> Self::V;
    /// Reads `LANES / 4` float32, each for four lanes.
    unsafe fn fourfold(from: *const f32) -> Self::V;
    /// Rounds numbers that are not too large to bfloat16, and keeps them as float32.
    unsafe fn nearest_bf16(v: Self::V) -> Self::V;

    /// The bfloat16 of all codes under one scale.
    type Table: Copy;
    /// That of the [`TABLE_VECTORS`] vectors of columns whose scales these are, a scale for four columns: where all are
    /// the same positive number, and the path looks up faster than it multiplies and rounds.
    unsafe fn table(scales: *const f32) -> Option<Self::Table>;
    /// As [`nearest_bf16`](Self::nearest_bf16) of codes and scale, for as many vectors of codes.
    unsafe fn look_up(table: Self::Table, from: *const u8) -> [Self::V; TABLE_VECTORS];
}

/// Vectors that are looked up together.
pub(crate) const TABLE_VECTORS: usize = 4;

/// fp8 with scales ([`crate::fp8`]). Elements of rows and results are bfloat16, or float32.
pub(crate) struct Fp8Step<N, const BF16: bool>(PhantomData<N>);

/// Bytes of a step's codes.
const CODES: usize = GROUP * PANEL;

impl<N: Codes, const BF16: bool> Fp8Step<N, BF16> {
    /// The weights of a vector of columns at `k`, from `column` on.
    #[inline(always)]
    unsafe fn weights(w: *const u32, k: usize, column: usize, scale: N::V) -> N::V {
        // SAFETY: the caller's promise: a step, `k` below GROUP.
        unsafe {
            let weights = N::mul(N::e4m3(w.cast::<u8>().add(k * PANEL + column)), scale);
            if BF16 { N::nearest_bf16(weights) } else { weights }
        }
    }

    /// The scales of a vector of columns.
    #[inline(always)]
    unsafe fn scale(w: *const u32, column: usize) -> N::V {
        // SAFETY: the caller's promise.
        unsafe { N::fourfold(Self::scales(w, column)) }
    }

    /// Where the scales from `column` on are.
    #[inline(always)]
    unsafe fn scales(w: *const u32, column: usize) -> *const f32 {
        // SAFETY: the caller's promise: a step, whose scales follow its codes.
        unsafe { w.cast::<u8>().add(CODES).cast::<f32>().add(column / SCALE_COLUMNS) }
    }

    /// Where widened weights of element `k` of a step go.
    #[inline(always)]
    unsafe fn line(to: *mut f32, step: usize, k: usize) -> *mut f32 {
        // SAFETY: the caller's promise: room for all columns. Of each pair the odd element comes first.
        unsafe { to.add((step * GROUP + (k ^ 1)) * PANEL) }
    }

    /// The table for [`TABLE_VECTORS`] vectors of columns from `column` on, where there is one.
    #[inline(always)]
    unsafe fn table(w: *const u32, column: usize) -> Option<N::Table> {
        // SAFETY: the caller's promise.
        unsafe { if BF16 { N::table(Self::scales(w, column)) } else { None } }
    }

    /// Adds element `k` of the step of each row, times the weights.
    #[inline(always)]
    unsafe fn add_products<const R: usize, const C: usize>(
        acc: &mut [[N::V; C]; R],
        x: &[*const u8; R],
        k: usize,
        weights: &[N::V],
    ) {
        // SAFETY: the caller's promise.
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
    const MOST_UNWIDENED: usize = ROWS;
    const PAIRS: usize = GROUP / 2;
    const WORDS: usize = step_words(if BF16 { Dtype::Bf16 } else { Dtype::F32 }, WeightFormat::Fp8);
    const ASKING: usize = 1;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[N::V; C]; R],
        x: &[*const u8; R],
        step: usize,
        w: *const u32,
        first: usize,
    ) {
        // SAFETY: the caller's promise.
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
                scales[c] = Self::scale(w, first + c * N::LANES);
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
            // SAFETY: the caller's promise: so many steps, and room for so many pairs of all columns.
            unsafe {
                let w = w.add(step * Self::WORDS);
                for columns in (0..PANEL).step_by(TABLE_VECTORS * N::LANES) {
                    if let Some(table) = Self::table(w, columns) {
                        for k in 0..GROUP {
                            let weights = N::look_up(table, w.cast::<u8>().add(k * PANEL + columns));
                            let to = Self::line(to, step, k).add(columns);
                            for c in 0..TABLE_VECTORS {
                                N::store(to.add(c * N::LANES), weights[c]);
                            }
                        }
                        continue;
                    }
                    for column in (columns..columns + TABLE_VECTORS * N::LANES).step_by(N::LANES) {
                        let scale = Self::scale(w, column);
                        for k in 0..GROUP {
                            N::store(Self::line(to, step, k).add(column), Self::weights(w, k, column, scale));
                        }
                    }
                }
            }
        }
    }
}
