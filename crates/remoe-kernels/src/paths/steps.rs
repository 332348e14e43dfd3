//! One step of K for a block of rows and columns: the innermost part of every product. A step is a pair of elements, or
//! a group of them where weights are quantised ([`super::quantised`]).

use std::marker::PhantomData;

use super::floats::Floats;
use super::panel::ROWS;
use crate::WeightFormat;
use crate::shape::PANEL;

/// Rows of bfloat16 up to which reading weights takes about as long as arithmetic, so that widening them again for each
/// block costs little.
pub(super) const UNWIDENED: usize = 3 * ROWS;

/// How one step of K is added to a block of accumulators.
///
/// # Safety
/// As for [`Floats`]; besides, `x[r]` must be valid for step number `step` (two elements, or a
/// [`crate::quantise::RowGroup`]), and `w` for the step's weights of the panel, which has `C * LANES` columns from
/// `first` on.
pub(crate) trait Step {
    type F: Floats;
    /// This step with bfloat16 for results, where it is left to the panel ([`super::panel::either`]); else itself.
    type InBf16: Step<F = Self::F>;
    /// Are elements bfloat16?
    const BF16: bool;
    /// The form of weights, and with it that of rows.
    const WEIGHTS: WeightFormat = WeightFormat::Plain;
    /// Where every use of a weight widens it first, most rows for which that is quicker than to widen it once for all
    /// of them.
    const MOST_UNWIDENED: usize = usize::MAX;
    /// Bytes of an element.
    const ELEMENT: usize = if Self::BF16 { 2 } else { 4 };
    /// Words in which a step of 64 columns is packed.
    const WORDS: usize;
    /// Pairs of elements of K in a step, where it is one of those that [`widen`](Self::widen) takes.
    const PAIRS: usize = 1;
    /// Steps between two times that the following weights are asked for.
    const ASKING: usize = 4;

    /// Adds one step. For pairs: `acc[r][c] += odd(x) * odd(w)`, then likewise for the even elements. For groups:
    /// `acc[r][c] += sum of products * (scale of w * scale of x)`, with a fused multiply-add.
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[<Self::F as Floats>::V; C]; R],
        x: &[*const u8; R],
        step: usize,
        w: *const u32,
        first: usize,
    );

    /// Writes so many pairs of weights, whole steps, as float32: of each pair the odd elements of all columns, then the
    /// even ones. For steps whose weights are widened ([`MOST_UNWIDENED`](Self::MOST_UNWIDENED)).
    ///
    /// # Safety
    /// As for the others; `w` is valid for the steps, and `to` for as many pairs of 64 columns.
    #[inline(always)]
    unsafe fn widen(w: *const u32, pairs: usize, to: *mut f32) {
        for pair in 0..pairs {
            for column in (0..PANEL).step_by(Self::F::LANES) {
                // SAFETY: the caller's promise; `LANES` divides PANEL.
                unsafe {
                    let from = w.add(pair * PANEL + column);
                    let to = to.add(2 * pair * PANEL + column);
                    Self::F::store(to, Self::F::odd(from));
                    Self::F::store(to.add(PANEL), Self::F::even(from));
                }
            }
        }
    }

    /// Rounds to bfloat16 and keeps the value as float32. NaN stays NaN.
    #[inline(always)]
    unsafe fn round(v: <Self::F as Floats>::V) -> <Self::F as Floats>::V {
        // SAFETY: the caller's promise.
        unsafe { Self::F::round_bf16(v) }
    }

    /// Rounds to bfloat16 and writes that; every NaN becomes the one that is stored.
    #[inline(always)]
    unsafe fn store_rounded(to: *mut u16, v: <Self::F as Floats>::V) {
        // SAFETY: the caller's promise.
        unsafe { Self::F::store_bf16(to, Self::F::round_bf16(v)) }
    }
}

/// bfloat16 by widening both halves and two fused multiply-adds.
pub(crate) struct WidenedStep<F>(PhantomData<F>);

impl<F: Floats> Step for WidenedStep<F> {
    type F = F;
    type InBf16 = Self;
    const BF16: bool = true;
    const MOST_UNWIDENED: usize = UNWIDENED;
    const WORDS: usize = 64;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[F::V; C]; R],
        x: &[*const u8; R],
        pair: usize,
        w: *const u32,
        first: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            // No closures here: they would be functions without the path's target features.
            let mut words = [0u32; R];
            for r in 0..R {
                words[r] = x[r].cast::<u32>().add(pair).read_unaligned();
            }
            let mut weights = [F::splat(0.0); C];
            for c in 0..C {
                weights[c] = F::odd(w.add(first + c * F::LANES));
            }
            for r in 0..R {
                let x = F::splat(f32::from_bits(words[r] & 0xffff_0000));
                for c in 0..C {
                    acc[r][c] = F::fma(x, weights[c], acc[r][c]);
                }
            }
            for c in 0..C {
                weights[c] = F::even(w.add(first + c * F::LANES));
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

/// float32: the even element's 64 columns are packed first, then the odd one's.
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
        // SAFETY: the caller's promise.
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
