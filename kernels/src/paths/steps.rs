//! One pair of K for a block of rows and columns: the innermost part of every product.

use std::marker::PhantomData;

use super::floats::Floats;

/// How one pair of K is added to a block of accumulators.
///
/// # Safety
/// As for [`Floats`]; besides, `x[r]` must be valid for pair number `pair` (two elements), and `w` for the pair's weights of `C * LANES` columns.
pub(crate) trait Step {
    type F: Floats;
    /// Are elements bfloat16?
    const BF16: bool;
    /// Does every use of a weight widen it first?
    const WIDENS: bool = false;
    /// Bytes of an element.
    const ELEMENT: usize = if Self::BF16 { 2 } else { 4 };
    /// Words in which a pair of 64 columns is packed.
    const WORDS: usize;

    /// `acc[r][c] += odd(x) * odd(w)`, then the same with the even elements; `w` points to the block's first column.
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[<Self::F as Floats>::V; C]; R],
        x: &[*const u8; R],
        pair: usize,
        w: *const u32,
    );

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
    const BF16: bool = true;
    const WIDENS: bool = true;
    const WORDS: usize = 64;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[F::V; C]; R],
        x: &[*const u8; R],
        pair: usize,
        w: *const u32,
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
                weights[c] = F::odd(w.add(c * F::LANES));
            }
            for r in 0..R {
                let x = F::splat(f32::from_bits(words[r] & 0xffff_0000));
                for c in 0..C {
                    acc[r][c] = F::fma(x, weights[c], acc[r][c]);
                }
            }
            for c in 0..C {
                weights[c] = F::even(w.add(c * F::LANES));
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
    const BF16: bool = false;
    const WORDS: usize = 128;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[F::V; C]; R],
        x: &[*const u8; R],
        pair: usize,
        w: *const u32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            for element in [1, 0] {
                let mut weights = [F::splat(0.0); C];
                for c in 0..C {
                    weights[c] = F::load(w.add(element * 64 + c * F::LANES).cast());
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
