//! One step of K for a block of rows and columns: the innermost part of every product. A step is a pair of elements of K,
//! or a group of them if weights are quantised ([`super::quantised`]) or fp8 ([`super::codes`]).

use std::marker::PhantomData;

use super::floats::Floats;
use super::panel::MAX_BLOCK_ROWS;
use crate::WeightFormat;
use crate::shape::PANEL;

/// Largest number of bfloat16 rows for which weights are widened again for each block. Up to it, reading weights takes
/// about as long as arithmetic, so that this costs little.
pub(super) const MAX_UNWIDENED_BF16_ROWS: usize = 3 * MAX_BLOCK_ROWS;

/// A format of weights and rows, and how one step of K is added to a block of accumulators.
///
/// # Safety
/// As for [`Floats`]. `x[r]` is valid for step number `step` (two elements, or a [`crate::quantise::RowGroup`]). `w`
/// points to the step's packed weights, and the panel has `C * LANES` columns from `first` on.
pub(crate) trait Step {
    type F: Floats;
    /// Variant of this step with bfloat16 results, for kernels that serve both element types
    /// ([`super::panel::any_phase`]); the step itself if it has no such variant.
    type InBf16: Step<F = Self::F>;
    /// Set if elements are bfloat16.
    const BF16: bool;
    /// Format of weights, which decides that of rows.
    const WEIGHTS: WeightFormat = WeightFormat::Plain;
    /// Largest number of rows for which weights are widened at each use. For more rows it is faster to widen them once,
    /// by [`widen`](Self::widen).
    const MAX_UNWIDENED_ROWS: usize = usize::MAX;
    /// Bytes of an element.
    const ELEMENT_BYTES: usize = if Self::BF16 { 2 } else { 4 };
    /// Words of a packed step of 64 columns.
    const WORDS: usize;
    /// Pairs of elements of K in a step, for [`widen`](Self::widen).
    const PAIRS: usize = 1;
    /// Steps between two prefetches of the following weights.
    const STEPS_PER_PREFETCH: usize = 4;

    /// Adds one step to the accumulators of `R` rows and `C` vectors of columns.
    ///
    /// For pairs: `acc[r][c] += odd(x) * odd(w)`, then likewise for the even elements. For groups:
    /// `acc[r][c] += sum of products * (scale of w * scale of x)`. Both are fused multiply-adds.
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[<Self::F as Floats>::V; C]; R],
        x: &[*const u8; R],
        step: usize,
        w: *const u32,
        first: usize,
    );

    /// Widens `pairs` pairs of weights, in whole steps, to float32. `to` gets the odd elements of all columns of a pair,
    /// then the even ones. Only called if [`MAX_UNWIDENED_ROWS`](Self::MAX_UNWIDENED_ROWS) is set.
    ///
    /// # Safety
    /// As for the trait. `w` is valid for the steps, and `to` for as many pairs of 64 columns.
    #[inline(always)]
    unsafe fn widen(w: *const u32, pairs: usize, to: *mut f32) {
        for pair in 0..pairs {
            for column in (0..PANEL).step_by(Self::F::LANES) {
                // SAFETY: `w` and `to` are valid for all pairs, by the method's contract, and `LANES` divides PANEL.
                unsafe {
                    let from = w.add(pair * PANEL + column);
                    let to = to.add(2 * pair * PANEL + column);
                    Self::F::store(to, Self::F::load_odd(from));
                    Self::F::store(to.add(PANEL), Self::F::load_even(from));
                }
            }
        }
    }

    /// Rounds to bfloat16 and widens again. NaN stays NaN.
    #[inline(always)]
    unsafe fn round(v: <Self::F as Floats>::V) -> <Self::F as Floats>::V {
        // SAFETY: the CPU has the path's features, by the trait's contract.
        unsafe { Self::F::round_bf16(v) }
    }

    /// Rounds to bfloat16 and writes the result; every NaN becomes the one with [`crate::numerics::NAN_BITS`].
    #[inline(always)]
    unsafe fn store_rounded(to: *mut u16, v: <Self::F as Floats>::V) {
        // SAFETY: `to` is valid for `LANES` elements, by the trait's contract.
        unsafe { Self::F::store_bf16(to, Self::F::round_bf16(v)) }
    }
}

/// bfloat16 pairs: widens both halves, then two fused multiply-adds.
pub(crate) struct WidenedStep<F>(PhantomData<F>);

impl<F: Floats> Step for WidenedStep<F> {
    type F = F;
    type InBf16 = Self;
    const BF16: bool = true;
    const MAX_UNWIDENED_ROWS: usize = MAX_UNWIDENED_BF16_ROWS;
    const WORDS: usize = 64;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[F::V; C]; R],
        x: &[*const u8; R],
        pair: usize,
        w: *const u32,
        first: usize,
    ) {
        // SAFETY: rows and weights are valid for this step, by the trait's contract.
        unsafe {
            // No closures here: the compiler would make them functions without the path's target features.
            let mut words = [0u32; R];
            for r in 0..R {
                words[r] = x[r].cast::<u32>().add(pair).read_unaligned();
            }
            let mut weights = [F::splat(0.0); C];
            for c in 0..C {
                weights[c] = F::load_odd(w.add(first + c * F::LANES));
            }
            for r in 0..R {
                let x = F::splat(f32::from_bits(words[r] & 0xffff_0000));
                for c in 0..C {
                    acc[r][c] = F::fma(x, weights[c], acc[r][c]);
                }
            }
            for c in 0..C {
                weights[c] = F::load_even(w.add(first + c * F::LANES));
            }
            for r in 0..R {
                let x = F::splat(f32::from_bits(words[r] << 16));
                for c in 0..C {
                    acc[r][c] = F::fma(x, weights[c], acc[r][c]);
                }
            }
        }
    }
}

/// float32 pairs. The even elements of 64 columns are packed first, then the odd ones.
pub(crate) struct F32Step<F>(PhantomData<F>);

impl<F: Floats> Step for F32Step<F> {
    type F = F;
    type InBf16 = Self;
    const BF16: bool = false;
    const WORDS: usize = 128;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[F::V; C]; R],
        x: &[*const u8; R],
        pair: usize,
        w: *const u32,
        first: usize,
    ) {
        // SAFETY: rows and weights are valid for this step, by the trait's contract.
        unsafe {
            for element in [1, 0] {
                let mut weights = [F::splat(0.0); C];
                for c in 0..C {
                    weights[c] = F::load(w.add(element * 64 + first + c * F::LANES).cast());
                }
                for r in 0..R {
                    let x = x[r].cast::<[f32; 2]>().add(pair).cast::<f32>();
                    let x = F::splat(x.add(element).read_unaligned());
                    for c in 0..C {
                        acc[r][c] = F::fma(x, weights[c], acc[r][c]);
                    }
                }
            }
        }
    }
}
