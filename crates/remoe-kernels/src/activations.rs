//! Scalar forms of `exp` and of the activations, with the bits that every instruction path computes.

use crate::Activation;
use crate::numerics::flush;
use crate::paths::{activation, portable::Portable};

/// Computes `e^x`, within 1 unit in the last place of the true value; 0 if that is below 2^-126.
pub fn exp(x: f32) -> f32 {
    // SAFETY: the portable path needs no CPU feature.
    unsafe { activation::exp::<Portable>(Portable::all(flush(x))) }.first()
}

/// Computes the factor that the up projection contributes: `up` itself, but `clamp(up) + 1` for the clamped SwiGLU.
pub fn factor(activation: Activation, up: f32) -> f32 {
    // SAFETY: the portable path needs no CPU feature.
    unsafe { activation::factor::<Portable>(activation, Portable::all(flush(up))) }.first()
}

/// Computes an activation function in float32.
pub fn activate(activation: Activation, x: f32) -> f32 {
    // SAFETY: the portable path needs no CPU feature.
    unsafe { activation::activate::<Portable>(activation, Portable::all(flush(x))) }.first()
}
