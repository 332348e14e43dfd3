//! The scalar definition of the numerics classes: every instruction path computes the same bits. [`crate::quantise`]
//! defines quantised weights and rows.
//!
//! The functions use float64 and integer operations only, so that they give the same bits on every processor, whatever
//! its rules for denormals. They treat denormal operands as zero of the same sign and round to nearest even. Results
//! that are below 2^-126 after rounding to 24 bits become zero of the same sign (x86 decides "tiny" after rounding, as
//! if the exponent had no bound).

/// Bits of the only NaN that is ever stored.
pub(crate) const NAN_BITS: u32 = 0x7fc0_0000;

/// Smallest exact result that rounds to 2^-126, namely 2^-126 - 2^-151. Smaller ones are flushed to zero.
const TINY: f64 = f64::from_bits(((1023 - 126) << 52) - (1 << 28));

/// Returns `x`, or zero of the same sign if `x` is denormal.
#[inline(always)]
pub fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(x) } else { x }
}

/// Rounds a float64 to float32 and flushes tiny results. The argument is exact, or was rounded to odd.
#[inline(always)]
fn narrow(exact: f64) -> f32 {
    if exact.abs() < TINY { 0.0f32.copysign(exact as f32) } else { exact as f32 }
}

/// Computes `a * b + c`, rounded once.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    let product = f64::from(flush(a)) * f64::from(flush(b)); // exact: 24 + 24 bits
    let addend = f64::from(flush(c));
    let sum = product + addend;
    // The exact rounding error of the addition (Knuth's TwoSum). Rounding `sum` to odd instead of to nearest keeps the
    // second rounding, to 24 bits, correct (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums").
    let back = sum - product;
    let lost = (product - (sum - back)) + (addend - back);
    let bits = sum.to_bits();
    let exact = if lost != 0.0 && sum.is_finite() && bits & 1 == 0 {
        let away_from_zero = (lost > 0.0) == (sum > 0.0);
        f64::from_bits(if away_from_zero { bits + 1 } else { bits - 1 })
    } else {
        sum
    };
    narrow(exact)
}

/// Computes `a + b`. A tiny sum of two float32 is always exact, so that only its magnitude matters.
#[inline(always)]
pub fn add(a: f32, b: f32) -> f32 {
    flush(flush(a) + flush(b))
}

/// Computes `a * b`, rounded once.
#[inline(always)]
pub fn mul(a: f32, b: f32) -> f32 {
    narrow(f64::from(flush(a)) * f64::from(flush(b)))
}

/// Computes `a / b`, rounded once. Rounding to 53 bits first is harmless: no quotient of two 24-bit numbers is so close to a rounding boundary.
#[inline(always)]
pub fn div(a: f32, b: f32) -> f32 {
    narrow(f64::from(flush(a)) / f64::from(flush(b)))
}

/// Rounds to bfloat16 (nearest even); the result is a float32 with a zero lower half. Denormals become zero, and every NaN becomes [`NAN_BITS`].
#[inline(always)]
pub fn round_bf16(x: f32) -> f32 {
    if x.is_nan() {
        return f32::from_bits(NAN_BITS);
    }
    let bits = flush(x).to_bits();
    // Never wraps: the bits of a number are below those of NaN. Checked arithmetic would prevent vectorisation.
    f32::from_bits(bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

/// Rounds `x` to bfloat16 and returns its 16 bits.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    (round_bf16(x).to_bits() >> 16) as u16
}

/// Widens the 16 bits of a bfloat16; exact.
#[inline(always)]
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Widens the 16 bits of an IEEE binary16; exact, also for its denormals.
#[inline(always)]
pub fn from_f16(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let exponent = u32::from(bits >> 10) & 0x1f;
    let fraction = u32::from(bits & 0x3ff);
    let magnitude = match exponent {
        0 => (fraction as f32 * f32::from_bits((127 - 24) << 23)).to_bits(),
        31 => 0x7f80_0000 | (fraction << 13),
        _ => ((exponent + 127 - 15) << 23) | (fraction << 13),
    };
    f32::from_bits(sign | magnitude)
}

/// Returns `x`, or the NaN with [`NAN_BITS`] if `x` is any NaN.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(NAN_BITS) } else { x }
}

/// Values of the e4m3 codes, times 2^-8. The NaN codes 0x7f and 0xff have the values that the pattern continues with.
pub(crate) const E4M3: [f32; 256] = {
    let mut numbers = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, fraction) = ((code as u32 >> 3) & 15, code as u32 & 7);
        // Times 2^-8: exponents of 1 to 15 mean 2^-6 to 2^8.
        let magnitude = if exponent == 0 {
            fraction as f32 * f32::from_bits((127 - 17) << 23)
        } else {
            f32::from_bits((exponent + 127 - 7 - 8) << 23 | fraction << 20)
        };
        numbers[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    numbers
};
