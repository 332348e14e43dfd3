//! Vector operations on integers, for dot products with quantised weights.

use super::floats::Floats;
use crate::WeightFormat;
use crate::quantise::E2M1;

/// Twice the number of each e2m1 code, plus the offset 12 that makes it unsigned.
pub(super) const E2M1_WITH_OFFSET: [u8; 16] = {
    let mut table = [0; 16];
    let mut code = 0;
    while code < 8 {
        table[code] = (WeightFormat::Mxfp4.offset() + E2M1[code] as i32) as u8;
        table[code + 8] = (WeightFormat::Mxfp4.offset() - E2M1[code] as i32) as u8;
        code += 1;
    }
    table
};

/// Largest entry of [`E2M1_WITH_OFFSET`].
pub(super) const MAX_E2M1_WITH_OFFSET: usize = 24;

/// Upper bound of a sum of nibbles. Multiplied with magnitudes up to 127 and added in pairs, it fits 16 signed bits.
pub(super) const MAX_NIBBLE_SUM: usize = i16::MAX as usize / (2 * 127);

/// Vectors of `LANES` 32-bit integers. A dot product multiplies the four bytes of each lane of weights with four signed
/// bytes, the same in all lanes, and adds the products to the lane's sum. It is exact.
///
/// # Safety
/// As for [`Floats`].
pub(crate) trait Integers: Floats {
    /// A vector of `LANES` 32-bit integers.
    type I: Copy;

    /// Set if [`int8_dot`](Self::int8_dot) subtracts the offset of 128 from the weights. Sums then begin at zero,
    /// otherwise at the row's correction.
    const REMOVES_OFFSET: bool;

    /// Returns a vector with `x` in all lanes.
    unsafe fn splat_integer(x: i32) -> Self::I;
    /// Reads `LANES` words.
    unsafe fn load_words(from: *const u32) -> Self::I;
    /// Returns the lower nibble of each byte.
    unsafe fn low_nibbles(words: Self::I) -> Self::I;
    /// Returns the upper nibble of each byte, shifted down.
    unsafe fn high_nibbles(words: Self::I) -> Self::I;
    /// Looks up each byte, an e2m1 code, in [`E2M1_WITH_OFFSET`].
    unsafe fn e2m1(codes: Self::I) -> Self::I;
    /// Computes `sum + w . x` for unsigned bytes `w`, or `sum + (w - 128) . x` if [`REMOVES_OFFSET`](Self::REMOVES_OFFSET). No byte of `x` is -128.
    unsafe fn int8_dot(sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Partial sums of [`nibble_dot`](Self::nibble_dot), in the form that the path adds fastest.
    type Partial: Copy;
    /// Returns partial sums of zero.
    unsafe fn empty_partial() -> Self::Partial;
    /// Adds `w . x` to `partial`, for unsigned bytes `w`. No byte of `x` is -128. Between two calls of
    /// [`add_partial`](Self::add_partial), the bytes of `w` at one position of a word sum to at most [`MAX_NIBBLE_SUM`].
    unsafe fn nibble_dot(partial: Self::Partial, w: Self::I, x: Self::I) -> Self::Partial;
    /// Adds partial sums to 32-bit sums.
    unsafe fn add_partial(sum: Self::I, partial: Self::Partial) -> Self::I;
    /// Converts sums below 2^24 to float32, which is exact.
    unsafe fn to_floats(sums: Self::I) -> Self::V;
}
