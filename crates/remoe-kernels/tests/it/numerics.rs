//! Scalar definition of the results: exactness, flushing of tiny results, the exponential.

use crate::common;

use common::{Data, SplitMix64, bits, forward, pool, stored_bits, to_bytes};
use remoe_kernels::activations::{activate, exp};
use remoe_kernels::numerics::{add, div, flush, fma, from_bf16, from_f16, mul, round_bf16, to_bf16};
use remoe_kernels::{Activation, Dtype, ExpertShape, InstructionPath, PackedExpert};

const LEAST: f32 = f32::MIN_POSITIVE;

#[test]
fn operations_equal_ieee_for_normal_numbers() {
    let mut random = SplitMix64(21);
    for data in Data::ALL {
        for _ in 0..200_000 {
            let [a, b, c] = [0; 3].map(|_| flush(data.number(&mut random)));
            let cases =
                [(fma(a, b, c), a.mul_add(b, c)), (add(a, b), a + b), (mul(a, b), a * b), (div(a, b), a / b)];
            for (i, (ours, ieee)) in cases.into_iter().enumerate() {
                let same = ours.to_bits() == ieee.to_bits() || (ours.is_nan() && ieee.is_nan());
                // The edge has a test of its own.
                let flushed =
                    ieee.abs() <= LEAST && ours == 0.0 && ours.is_sign_negative() == ieee.is_sign_negative();
                assert!(same || flushed, "operation {i}: {a:e} {b:e} {c:e}: {ours:e}, {ieee:e}");
                assert!(ours == 0.0 || ours.is_nan() || ours.abs() >= LEAST);
            }
        }
    }
}

#[test]
fn fused_multiply_add_rounds_once() {
    // The product is 2^-24 - 2^-54. Added to 1 + 2^-23 it is so close to halfway that float64 rounds to the tie.
    let small = 2f32.powi(-15);
    let (a, b) = ((1.0 + small) * 2f32.powi(-12), (1.0 - small) * 2f32.powi(-12));
    let odd = 1.0 + f32::EPSILON;
    assert_eq!(fma(a, b, odd), odd);
    assert_eq!(fma(-a, b, odd), odd);
    assert_eq!(fma(a, -b, -odd), -odd);
    assert_eq!(fma(a, b, -odd), -odd);
    for c in [odd, -odd] {
        assert_eq!(fma(a, b, c), a.mul_add(b, c));
    }
}

#[test]
fn results_are_flushed_after_rounding_to_24_bits() {
    let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    // 2^-126 - 2^-k, exactly: the half-way point to 2^-126 is at k = 151, and the tie goes to even.
    for k in 140..=200 {
        let half = k / 2;
        let result = fma(-power(-half), power(half - k), LEAST);
        let expected = if k >= 151 { LEAST } else { 0.0 };
        assert_eq!(result.to_bits(), expected.to_bits(), "{k}");
        let negative = fma(power(-half), power(half - k), -LEAST);
        assert_eq!(negative.to_bits(), (-expected).to_bits(), "{k}");
    }
    // Slightly more than half a unit below the bound is flushed, slightly less is not.
    let up = 1.0 + f32::EPSILON;
    let down = 1.0 - f32::EPSILON / 2.0;
    assert_eq!(fma(-power(-75) * up, power(-76), LEAST).to_bits(), 0.0f32.to_bits());
    assert_eq!(fma(-power(-75) * down, power(-76), LEAST), LEAST);
    // IEEE's gradual underflow would give 2^-126 here; its rounding is coarser.
    assert_eq!((-power(-75) * up).mul_add(power(-76), LEAST), LEAST);
    // (1 - a)(1 + a) = 1 - a^2: a quarter of a unit below 2^-126, then one whole unit.
    let product = |a: f32| mul(power(-63) * (1.0 - a), power(-63) * (1.0 + a));
    assert_eq!(product(power(-13)).to_bits(), LEAST.to_bits());
    assert_eq!(product(power(-12)).to_bits(), 0.0f32.to_bits());
    assert_eq!(mul(-power(-64), power(-63)).to_bits(), (-0.0f32).to_bits());
    assert_eq!(div(LEAST, 2.0).to_bits(), 0.0f32.to_bits());
    assert_eq!(add(LEAST * 1.5, -LEAST).to_bits(), 0.0f32.to_bits());
    assert_eq!(add(-LEAST * 1.5, LEAST).to_bits(), (-0.0f32).to_bits());
    // Denormal operands are flushed before the operation.
    let denormal = f32::from_bits(0x007f_ffff);
    assert_eq!(fma(denormal, 3e38, 0.0), 0.0);
    assert!(fma(denormal, f32::INFINITY, 1.0).is_nan());
    assert_eq!(fma(0.0, 1.0, -denormal).to_bits(), 0.0f32.to_bits());
    assert_eq!(fma(-LEAST, 0.5, LEAST / 2.0).to_bits(), (-0.0f32).to_bits());
}

/// Sums `h0 * d0 + (h1 * d1 + 0)` in the down projection of every path: x = (h0, h1, 1), gate = 1, up = h.
#[test]
fn all_paths_flush_at_the_same_bound() {
    let mut random = SplitMix64(22);
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let columns = 64;
        let hidden = columns.max(3);
        let shape = ExpertShape::new(hidden, 2, dtype, Activation::Relu).unwrap();
        let unit = |at: &[usize]| -> Vec<f32> {
            at.iter().flat_map(|&one| (0..hidden).map(move |k| f32::from(u8::from(k == one)))).collect()
        };
        let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
        // d1 makes the accumulator +-2^-126 (times a few units), d0 takes away about half a unit in the last place.
        let (h0, h1) = (power(-75), power(-60));
        let down: Vec<f32> = (0..columns)
            .flat_map(|n| {
                let sign = if n % 2 == 0 { 1.0 } else { -1.0 };
                let fraction = match n / 2 % 8 {
                    0 => 1.0,
                    1 => 1.0 + 1.0 / 128.0,
                    2 => 1.0 - 1.0 / 256.0,
                    3 => 0.5,
                    4 => 1.5,
                    5 => 2.0,
                    6 => 1.0 + f32::from(random.below(128) as u8) / 128.0,
                    _ => -1.0,
                };
                let size = if n >= 32 { 1.0 + 1.0 / 128.0 } else { 1.0 };
                [-sign * fraction * power(-76), sign * size * power(-66)]
            })
            .collect();
        let bytes = |m: &[f32]| to_bytes(m, dtype);
        let packed = PackedExpert::pack(
            shape,
            dtype.into(),
            &bytes(&unit(&[2, 2])),
            &bytes(&unit(&[0, 1])),
            &bytes(&down),
        )
        .unwrap();
        let mut x = vec![0.0; hidden];
        x[..3].copy_from_slice(&[h0, h1, 1.0]);
        let mut seen = [0, 0];
        for path in InstructionPath::available() {
            let out = bits(&forward(&pool(1, path), &packed, &bytes(&x), &[0]), dtype);
            for (n, &out) in out.iter().enumerate() {
                let sum = fma(h0, down[2 * n], fma(h1, down[2 * n + 1], 0.0));
                assert_eq!(out, stored_bits(sum, dtype), "{path} {dtype} column {n}: {sum:e}");
                seen[usize::from(sum == 0.0)] += 1;
            }
        }
        assert!(seen[0] > 0 && seen[1] > 0, "both sides of the edge");
    }
}

#[test]
fn exponential_is_within_one_unit() {
    let mut worst = (0.0f64, 0.0f32);
    for sign in [0u32, 1 << 31] {
        for magnitude in (0x3000_0000u32..0x42b2_0000).step_by(487) {
            let x = f32::from_bits(sign | magnitude);
            let exact = f64::from(x).exp();
            if exact < f64::from(LEAST) || exact >= f64::from(f32::MAX) {
                continue;
            }
            let exponent = exact.log2().floor() as i32;
            let unit = f64::from(exponent - 23).exp2();
            let error = (f64::from(exp(x)) - exact).abs() / unit;
            if error > worst.0 {
                worst = (error, x);
            }
        }
    }
    assert!(worst.0 <= 1.0, "{} units at {:e}", worst.0, worst.1);
}

#[test]
fn exponential_saturates_at_its_limits() {
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-0.0), 1.0);
    assert_eq!(exp(f32::from_bits(1)), 1.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
    assert_eq!(exp(f32::MAX), f32::INFINITY);
    assert_eq!(exp(f32::MIN).to_bits(), 0);
    assert_eq!(exp(88.73), f32::INFINITY);
    assert!(exp(88.72) < f32::INFINITY);
    assert_eq!(exp(-87.34).to_bits(), 0);
    assert!(exp(-87.33) >= LEAST);
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn activations_saturate_at_their_limits() {
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::Relu] {
        assert_eq!(activate(activation, 0.0).to_bits(), 0);
        assert_eq!(activate(activation, f32::INFINITY), f32::INFINITY);
        assert_eq!(activate(activation, 1e30), 1e30);
        assert_eq!(activate(activation, -1e30), 0.0);
        assert!(activate(activation, f32::NAN).is_nan());
    }
    // -inf / inf by the formula.
    assert!(activate(Activation::Silu, f32::NEG_INFINITY).is_nan());
    assert_eq!(activate(Activation::Relu, f32::NEG_INFINITY), 0.0);
}

#[test]
fn bfloat16_rounds_to_nearest_even() {
    for (bits, rounded) in [
        (0x3f80_0000, 0x3f80),
        (0x3f80_7fff, 0x3f80),
        (0x3f80_8000, 0x3f80),
        (0x3f80_8001, 0x3f81),
        (0x3f81_8000, 0x3f82),
        (0xbf81_8000, 0xbf82),
        (0x7f7f_8000, 0x7f80),
        (0x7f7f_7fff, 0x7f7f),
        (0x7f80_0000, 0x7f80),
        (0xff80_0001, 0x7fc0),
        (0x7fff_ffff, 0x7fc0),
        (0x0080_0000, 0x0080),
        (0x007f_ffff, 0x0000),
        (0x8000_0001, 0x8000),
    ] {
        assert_eq!(to_bf16(f32::from_bits(bits)), rounded, "{bits:#x}");
        assert_eq!(round_bf16(f32::from_bits(bits)).to_bits(), u32::from(rounded) << 16, "{bits:#x}");
    }
    for bits in 0..=u16::MAX {
        let x = from_bf16(bits);
        if x.is_normal() || x == 0.0 || x.is_infinite() {
            assert_eq!(to_bf16(x), bits);
        }
    }
}

#[test]
fn binary16_widens_exactly() {
    for bits in 0..=u16::MAX {
        let exponent = i32::from(bits >> 10 & 31);
        let fraction = f64::from(bits & 0x3ff);
        let magnitude = match exponent {
            0 => fraction * (-24f64).exp2(),
            31 if fraction == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            e => (1024.0 + fraction) * f64::from(e - 25).exp2(),
        };
        let x = f64::from(from_f16(bits));
        assert!(x.abs() == magnitude || (x.is_nan() && magnitude.is_nan()), "{bits:#x}");
        assert!(x.is_nan() || x.is_sign_negative() == (bits >> 15 == 1));
    }
}
