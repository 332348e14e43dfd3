//! The portable path: plain Rust for any processor, and the reference for the bits of all other paths.

use super::activation::ROUNDER;
use super::codes::{Codes, TABLE_VECTORS};
use super::floats::Floats;
use super::integers::{E2M1_WITH_OFFSET, Integers};
use super::steps::{F32Step, WidenedStep};
use crate::numerics;
use crate::numerics::E4M3;

/// Vectors of four lanes, computed by scalar arithmetic.
pub(crate) struct Portable;

/// A vector of four float32.
#[derive(Clone, Copy)]
pub(crate) struct F32x4([f32; 4]);

impl Portable {
    /// Returns a vector with `x` in all lanes.
    pub(crate) fn all(x: f32) -> F32x4 {
        F32x4([x; 4])
    }
}

impl F32x4 {
    /// Returns the first lane.
    pub(crate) fn first(self) -> f32 {
        self.0[0]
    }

    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Self(self.0.map(f))
    }

    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Floats for Portable {
    type V = F32x4;
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> F32x4 {
        F32x4([x; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> F32x4 {
        // SAFETY: valid for four float32, by the trait's contract.
        F32x4(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> F32x4 {
        // SAFETY: valid for four bytes, by the trait's contract.
        F32x4(unsafe { from.cast::<[i8; 4]>().read() }.map(f32::from))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> F32x4 {
        // SAFETY: valid for four bfloat16, by the trait's contract.
        F32x4(unsafe { from.cast::<[u16; 4]>().read_unaligned() }.map(numerics::from_bf16))
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: F32x4) {
        // SAFETY: valid for four float32, by the trait's contract.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(v.0) }
    }

    #[inline(always)]
    unsafe fn fma(a: F32x4, b: F32x4, c: F32x4) -> F32x4 {
        F32x4(std::array::from_fn(|i| numerics::fma(a.0[i], b.0[i], c.0[i])))
    }

    #[inline(always)]
    unsafe fn add(a: F32x4, b: F32x4) -> F32x4 {
        a.zip(b, numerics::add)
    }

    #[inline(always)]
    unsafe fn mul(a: F32x4, b: F32x4) -> F32x4 {
        a.zip(b, numerics::mul)
    }

    #[inline(always)]
    unsafe fn div(a: F32x4, b: F32x4) -> F32x4 {
        a.zip(b, numerics::div)
    }

    #[inline(always)]
    unsafe fn at_least(bound: F32x4, x: F32x4) -> F32x4 {
        bound.zip(x, |bound, x| if bound > x { bound } else { x })
    }

    #[inline(always)]
    unsafe fn at_most(bound: F32x4, x: F32x4) -> F32x4 {
        bound.zip(x, |bound, x| if bound < x { bound } else { x })
    }

    #[inline(always)]
    unsafe fn largest(v: F32x4) -> f32 {
        v.0.into_iter().reduce(|best, x| if x > best { x } else { best }).unwrap_or(f32::NEG_INFINITY)
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        for row in 0..4 {
            for column in 0..4 {
                // SAFETY: pointers are valid for four elements or rows, by the trait's contract.
                unsafe {
                    *to.add(column * to_stride + row) = from.add(row * stride + column).read_unaligned()
                };
            }
        }
    }

    #[inline(always)]
    unsafe fn transpose_pairs(from: *const u32, stride: usize, to: *mut f32, to_stride: usize) {
        for row in 0..4 {
            for pair in 0..4 {
                // SAFETY: pointers are valid for four elements or rows, by the trait's contract.
                unsafe {
                    let word = from.add(row * stride + pair).read_unaligned();
                    *to.add(2 * pair * to_stride + row) = f32::from_bits(word << 16);
                    *to.add((2 * pair + 1) * to_stride + row) = f32::from_bits(word & 0xffff_0000);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scale(v: F32x4, _n: F32x4, shifted: F32x4) -> F32x4 {
        let power_of_two = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
        // Two multiplications by normal numbers: only the second product can overflow or be flushed.
        v.zip(shifted, |v, shifted| {
            let n = (shifted.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32);
            numerics::mul(numerics::mul(v, power_of_two(n >> 1)), power_of_two(n.wrapping_sub(n >> 1)))
        })
    }

    #[inline(always)]
    unsafe fn canonical(v: F32x4) -> F32x4 {
        v.map(numerics::canonical)
    }

    #[inline(always)]
    unsafe fn round_bf16(v: F32x4) -> F32x4 {
        v.map(numerics::round_bf16)
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, rounded: F32x4) {
        let halves = rounded.0.map(|x| (x.to_bits() >> 16) as u16);
        // SAFETY: valid for four bfloat16, by the trait's contract.
        unsafe { to.cast::<[u16; 4]>().write_unaligned(halves) }
    }

    #[inline(always)]
    unsafe fn load_odd(from: *const u32) -> F32x4 {
        // SAFETY: valid for four words, by the trait's contract.
        let words = unsafe { from.cast::<[u32; 4]>().read_unaligned() };
        F32x4(words.map(|w| f32::from_bits(w & 0xffff_0000)))
    }

    #[inline(always)]
    unsafe fn load_even(from: *const u32) -> F32x4 {
        // SAFETY: valid for four words, by the trait's contract.
        let words = unsafe { from.cast::<[u32; 4]>().read_unaligned() };
        F32x4(words.map(|w| f32::from_bits(w << 16)))
    }
}

impl Integers for Portable {
    type I = [i32; 4];
    const REMOVES_OFFSET: bool = false;

    #[inline(always)]
    unsafe fn splat_integer(x: i32) -> [i32; 4] {
        [x; 4]
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> [i32; 4] {
        // SAFETY: valid for four words, by the trait's contract.
        unsafe { from.cast::<[i32; 4]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn low_nibbles(words: [i32; 4]) -> [i32; 4] {
        words.map(|word| word & 0x0f0f_0f0f)
    }

    #[inline(always)]
    unsafe fn high_nibbles(words: [i32; 4]) -> [i32; 4] {
        words.map(|word| word >> 4 & 0x0f0f_0f0f)
    }

    #[inline(always)]
    unsafe fn e2m1(codes: [i32; 4]) -> [i32; 4] {
        let decode = |code: u8| E2M1_WITH_OFFSET[usize::from(code & 15)];
        codes.map(|codes| i32::from_le_bytes(codes.to_le_bytes().map(decode)))
    }

    #[inline(always)]
    unsafe fn int8_dot(sum: [i32; 4], w: [i32; 4], x: [i32; 4]) -> [i32; 4] {
        std::array::from_fn(|i| {
            let products = w[i].to_le_bytes().into_iter().zip(x[i].to_le_bytes());
            products.fold(sum[i], |sum, (w, x)| sum + i32::from(w) * i32::from(x as i8))
        })
    }

    type Partial = [i32; 4];

    #[inline(always)]
    unsafe fn empty_partial() -> [i32; 4] {
        [0; 4]
    }

    #[inline(always)]
    unsafe fn nibble_dot(partial: [i32; 4], w: [i32; 4], x: [i32; 4]) -> [i32; 4] {
        // SAFETY: pointers are valid for four elements or rows, by the trait's contract.
        unsafe { Self::int8_dot(partial, w, x) }
    }

    #[inline(always)]
    unsafe fn add_partial(sum: [i32; 4], partial: [i32; 4]) -> [i32; 4] {
        std::array::from_fn(|i| sum[i] + partial[i])
    }

    #[inline(always)]
    unsafe fn to_floats(sums: [i32; 4]) -> F32x4 {
        F32x4(sums.map(|sum| sum as f32))
    }
}

impl Codes for Portable {
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> F32x4 {
        // SAFETY: valid for four codes, by the trait's contract.
        F32x4(unsafe { from.cast::<[u8; 4]>().read_unaligned() }.map(|code| E4M3[usize::from(code)]))
    }

    #[inline(always)]
    unsafe fn load_scales(from: *const f32) -> F32x4 {
        // SAFETY: valid for one float32, by the trait's contract.
        F32x4([unsafe { from.read_unaligned() }; 4])
    }

    #[inline(always)]
    unsafe fn round_finite_bf16(v: F32x4) -> F32x4 {
        v.map(numerics::round_bf16)
    }

    type Table = std::convert::Infallible;

    #[inline(always)]
    unsafe fn table(_scales: *const f32) -> Option<Self::Table> {
        None
    }

    #[inline(always)]
    unsafe fn look_up(table: Self::Table, _from: *const u8) -> [F32x4; TABLE_VECTORS] {
        match table {}
    }
}

super::entry_points!(WidenedStep<Portable>, F32Step<Portable>);
super::quantised_entry_points!(Portable);
super::fp8_entry_points!(Portable);
super::attend_entry_point!(Portable);
