//! Vector operations on float32, from which all kernels are built.

/// Float32 vectors of one instruction set. All arithmetic rounds to nearest even, treats denormal operands as zero and
/// flushes results that are tiny after rounding; hardware paths rely on [`super::float_mode::FloatMode`] for that.
///
/// Methods are `inline(always)` without target features: each becomes an instruction when it is inlined into an entry
/// point of a path, which has the features.
///
/// # Safety
/// The CPU has the path's features. Pointers are valid for `LANES` elements of the pointer's type, with any alignment.
pub(crate) trait Floats {
    /// A vector of `LANES` float32.
    type V: Copy;
    /// Elements of a vector: 4, 8 or 16.
    const LANES: usize;

    /// Returns a vector with `x` in all lanes.
    unsafe fn splat(x: f32) -> Self::V;
    /// Reads `LANES` float32.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Reads `LANES` bfloat16 and widens them.
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    /// Reads `LANES` integers of 8 bits and widens them.
    unsafe fn load_i8(from: *const i8) -> Self::V;
    /// Writes `LANES` float32.
    unsafe fn store(to: *mut f32, v: Self::V);
    /// Computes `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Computes `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// Computes `a * b`.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// Computes `a / b`.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// Returns `bound` in lanes where it is greater than `x`, else `x`: a NaN in `x` stays.
    unsafe fn at_least(bound: Self::V, x: Self::V) -> Self::V;
    /// Returns `bound` in lanes where it is less than `x`, else `x`: a NaN in `x` stays.
    unsafe fn at_most(bound: Self::V, x: Self::V) -> Self::V;
    /// Returns the largest lane. Either no lane is NaN or all are.
    unsafe fn largest(v: Self::V) -> f32;
    /// Transposes `LANES` x `LANES` float32. Rows are `stride` elements apart in `from`, and `to_stride` in `to`.
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, to_stride: usize);
    /// Transposes and widens `LANES` rows of `2 * LANES` bfloat16. Rows are `stride` words apart in `from`.
    unsafe fn transpose_pairs(from: *const u32, stride: usize, to: *mut f32, to_stride: usize);
    /// Computes `v * 2^n`, rounded once, for an integer `n` between -252 and 254. `shifted` is `n + ROUNDER`, whose low bits hold `n`.
    unsafe fn scale(v: Self::V, n: Self::V, shifted: Self::V) -> Self::V;
    /// Replaces every NaN by the NaN with [`crate::numerics::NAN_BITS`].
    unsafe fn canonical(v: Self::V) -> Self::V;
    /// Rounds to bfloat16 and widens again; NaN as in [`canonical`](Self::canonical).
    unsafe fn round_bf16(v: Self::V) -> Self::V;
    /// Writes lanes that are already rounded to bfloat16: their upper halves.
    unsafe fn store_bf16(to: *mut u16, rounded: Self::V);
    /// Reads `LANES` pairs of bfloat16 and widens the odd elements, the upper halves of words.
    unsafe fn load_odd(from: *const u32) -> Self::V;
    /// Reads `LANES` pairs of bfloat16 and widens the even elements, the lower halves of words.
    unsafe fn load_even(from: *const u32) -> Self::V;
}
