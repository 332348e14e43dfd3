//! Activations, element by element, as every path computes them.

use crate::Activation;
use crate::numerics::flush;
use crate::paths::{activation, portable::Portable};

/// `e^x` as every path computes it: within 1 unit in the last place of the true value; 0 where that is below 2^-126.
pub fn exp(x: f32) -> f32 {
    // SAFETY: the portable path needs no CPU feature.
    unsafe { activation::exp::<Portable>(Portable::all(flush(x))) }.first()
}

/// Factor of an activation from the up projection, in float32.
pub fn factor(activation: Activation, up: f32) -> f32 {
    // SAFETY: the portable path needs no CPU feature.
    unsafe { activation::factor::<Portable>(activation, Portable::all(flush(up))) }.first()
}

/// An activation as every path computes it, in float32.
pub fn activate(activation: Activation, x: f32) -> f32 {
    // SAFETY: the portable path needs no CPU feature.
    unsafe { activation::activate::<Portable>(activation, Portable::all(flush(x))) }.first()
}
