//! The vector operations of dot products of integers.

use super::floats::Floats;
use crate::WeightFormat;
use crate::quantise::E2M1;

/// By the codes of e2m1, twice the number, with the offset that makes it unsigned.
pub(super) const E2M1_AND_OFFSET: [u8; 16] = {
    let mut table = [0; 16];
    let mut code = 0;
    while code < 8 {
        table[code] = (WeightFormat::Mxfp4.offset() + E2M1[code] as i32) as u8;
        table[code + 8] = (WeightFormat::Mxfp4.offset() - E2M1[code] as i32) as u8;
        code += 1;
    }
    table
};

/// Vectors of `LANES` 32-bit integers beside those of float32. A dot product multiplies the four bytes of each lane of weights with four signed bytes, which are the same in all lanes, and adds the products to the lane's sum; all of it is exact.
///
/// # Safety
/// As for [`Floats`]; pointers need no alignment.
pub(crate) trait Integers: Floats {
    /// `LANES` integers of 32 bits.
    type I: Copy;

    /// Whether [`int8_dot`](Self::int8_dot) takes the offset of 128 off the weights itself: sums begin at zero then, else at the row's correction.
    const REMOVES_OFFSET: bool;

    /// All lanes `x`.
    unsafe fn splat_integer(x: i32) -> Self::I;
    /// Reads `LANES` words.
    unsafe fn load_words(from: *const u32) -> Self::I;
    /// The lower halves of all bytes.
    unsafe fn low_nibbles(words: Self::I) -> Self::I;
    /// The upper halves of all bytes, as bytes.
    unsafe fn high_nibbles(words: Self::I) -> Self::I;
    /// For bytes that are codes of e2m1, twice the number and 12 for each: [`E2M1_AND_OFFSET`].
    unsafe fn e2m1(codes: Self::I) -> Self::I;
    /// `sum + w . x` of any unsigned bytes `w`, or of `w - 128`; no byte of `x` is -128.
    unsafe fn int8_dot(sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// `sum + w . x` of unsigned bytes `w` below 32; no byte of `x` is -128.
    unsafe fn int4_dot(sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Sums below 2^24 as float32, which is exact.
    unsafe fn to_floats(sums: Self::I) -> Self::V;
    /// Reads `LANES` bfloat16 and widens them.
    unsafe fn load_bf16(from: *const u16) -> Self::V;
}
