//! `exp` and the activation functions, as the same sequence of operations on every instruction path.

use super::floats::Floats;
use crate::Activation;

/// Upper clamp of inputs: `e^x` overflows here already (2^128 is e^88.72...).
const HIGHEST: f32 = 89.0;
/// Lower clamp of inputs: `e^x` is flushed to zero here already (2^-126 is e^-87.33...).
const LOWEST: f32 = -88.0;
/// 1.5 * 2^23: adding it rounds a number to an integer, which the low bits of the sum then hold.
pub(super) const ROUNDER: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has trailing zeros, so that a product with a small integer is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Coefficients of r^7 down to r^2 of e^r on [-ln 2 / 2, ln 2 / 2], after Cephes' expf.
const POLYNOMIAL: [f32; 6] = [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 5e-1];
/// Coefficients of -2u, where GELU is 0.5 x (1 + tanh u) = x / (1 + e^(-2u)): -2 sqrt(2/pi) for x, and the same times
/// 0.044715 for x^3.
const GELU_LINEAR: f32 = -1.595_769_2;
const GELU_CUBIC: f32 = -0.071_354_814;
/// Slope and clamp of the clamped SwiGLU (gpt-oss).
const SWIGLU_SLOPE: f32 = 1.702;
const SWIGLU_LIMIT: f32 = 7.0;

/// Computes `e^x` as a polynomial in r, where x = n ln 2 + r, scaled by 2^n. Only the scaling overflows or is flushed.
///
/// # Safety
/// The CPU has the features of `F`, and denormals are flushed.
#[inline(always)]
pub(crate) unsafe fn exp<F: Floats>(x: F::V) -> F::V {
    // SAFETY: the CPU has the features of `F`, as the caller guarantees.
    unsafe {
        let x = F::at_most(F::splat(HIGHEST), x);
        let x = F::at_least(F::splat(LOWEST), x);
        let rounded_sum = F::fma(x, F::splat(std::f32::consts::LOG2_E), F::splat(ROUNDER));
        let n = F::add(rounded_sum, F::splat(-ROUNDER));
        let r = F::fma(n, F::splat(-LN2_HIGH), x);
        let r = F::fma(n, F::splat(-LN2_LOW), r);
        let mut p = F::splat(POLYNOMIAL[0]);
        for &c in &POLYNOMIAL[1..] {
            p = F::fma(p, r, F::splat(c));
        }
        let p = F::fma(p, F::mul(r, r), r);
        let p = F::add(p, F::splat(1.0));
        F::scale(p, n, rounded_sum)
    }
}

/// Computes the activation function of every lane. But for ReLU it has the form x / (1 + e^exponent).
///
/// # Safety
/// As for [`exp`].
#[inline(always)]
pub(crate) unsafe fn activate<F: Floats>(activation: Activation, x: F::V) -> F::V {
    // SAFETY: the CPU has the features of `F`, as the caller guarantees.
    unsafe {
        let mut x = x;
        let exponent = match activation {
            Activation::Relu => return F::at_least(F::splat(0.0), x),
            Activation::Silu => F::mul(x, F::splat(-1.0)),
            Activation::ClampedSwiglu => {
                x = F::at_most(F::splat(SWIGLU_LIMIT), x);
                F::mul(x, F::splat(-SWIGLU_SLOPE))
            }
            Activation::GeluTanh => {
                let exponent_over_x = F::fma(F::mul(x, x), F::splat(GELU_CUBIC), F::splat(GELU_LINEAR));
                F::mul(x, exponent_over_x)
            }
        };
        F::div(x, F::add(F::splat(1.0), exp::<F>(exponent)))
    }
}

/// Returns the factor of the activated gate: `up`, and for the clamped SwiGLU the clamped `up` plus 1.
///
/// # Safety
/// As for [`exp`].
#[inline(always)]
pub(crate) unsafe fn factor<F: Floats>(activation: Activation, up: F::V) -> F::V {
    match activation {
        // SAFETY: the CPU has the features of `F`, as the caller guarantees.
        Activation::ClampedSwiglu => unsafe {
            let up = F::at_least(F::splat(-SWIGLU_LIMIT), F::at_most(F::splat(SWIGLU_LIMIT), up));
            F::add(up, F::splat(1.0))
        },
        _ => up,
    }
}
