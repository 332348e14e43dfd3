//! The few vector operations that all kernels are written in.

/// Vectors of float32 of one instruction set. All arithmetic rounds to nearest even, treats denormal operands as zero and flushes results that are tiny after rounding; hardware paths rely on [`super::float_mode::FloatMode`] for that.
///
/// Methods are `inline(always)` and carry no target feature themselves: they become instructions once they are inlined into a function that has the feature, which is what each path's entry points are.
///
/// # Safety
/// Every method may be called only where the CPU has the path's features; pointers must be valid for `LANES` elements (2 or 4 bytes each, as the method says), with no alignment.
pub(crate) trait Floats {
    /// `LANES` float32.
    type V: Copy;
    /// 4, 8 or 16.
    const LANES: usize;

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::V;
    /// Reads float32.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Reads `LANES` bfloat16 and widens them.
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    /// Reads `LANES` integers of 8 bits and widens them.
    unsafe fn load_i8(from: *const i8) -> Self::V;
    /// Writes float32.
    unsafe fn store(to: *mut f32, v: Self::V);
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `bound` where it is greater than `x`, else `x`, so that NaN stays.
    unsafe fn at_least(bound: Self::V, x: Self::V) -> Self::V;
    /// `bound` where it is less than `x`, else `x`, so that NaN stays.
    unsafe fn at_most(bound: Self::V, x: Self::V) -> Self::V;
    /// The largest lane, of lanes of which none or all are NaN.
    unsafe fn largest(v: Self::V) -> f32;
    /// Writes the columns of `LANES` rows of `LANES` float32; rows of `from` are `stride` apart, those of `to` `to_stride`.
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, to_stride: usize);
    /// Widens and writes the columns of `LANES` rows of `2 * LANES` bfloat16; rows of `from` are `stride` words apart.
    unsafe fn transpose_pairs(from: *const u32, stride: usize, to: *mut f32, to_stride: usize);
    /// `v * 2^n`, rounded once, for an integer `n` between -252 and 254 that is also in the low bits of `shifted = n + ROUNDER`.
    unsafe fn scale(v: Self::V, n: Self::V, shifted: Self::V) -> Self::V;
    /// Every NaN becomes the one that is stored.
    unsafe fn canonical(v: Self::V) -> Self::V;
    /// Rounds to bfloat16 and keeps the value as float32; every NaN becomes the one that is stored.
    unsafe fn round_bf16(v: Self::V) -> Self::V;
    /// Writes the upper halves: bfloat16 of lanes that are rounded already.
    unsafe fn store_bf16(to: *mut u16, rounded: Self::V);
    /// The odd (upper) halves of `LANES` words, widened.
    unsafe fn odd(from: *const u32) -> Self::V;
    /// The even (lower) halves of `LANES` words, widened.
    unsafe fn even(from: *const u32) -> Self::V;
}
