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

/// The largest of them.
pub(super) const MOST_OF_E2M1: usize = 24;

/// Largest sum of unsigned bytes that are multiplied with magnitudes up to 127 and summed by pairs in 16 bits, with a
/// sign.
pub(super) const MOST_OF_NIBBLES: usize = i16::MAX as usize / (2 * 127);

/// Vectors of `LANES` 32-bit integers beside those of float32. A dot product multiplies the four bytes of each lane of
/// weights with four signed bytes, which are the same in all lanes, and adds the products to the lane's sum; all of it
/// is exact.
///
/// # Safety
/// As for [`Floats`]; pointers need no alignment.
pub(crate) trait Integers: Floats {
    /// `LANES` integers of 32 bits.
    type I: Copy;

    /// Set if [`int8_dot`](Self::int8_dot) takes the offset of 128 off the weights itself: sums begin at zero then,
    /// else at the row's correction.
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
    /// Dot products that are being summed by [`nibble_dot`](Self::nibble_dot), in whatever form is summed fastest.
    type Partial: Copy;
    /// Returns an empty sum of products.
    unsafe fn no_products() -> Self::Partial;
    /// `partial` and `w . x` of unsigned bytes `w`; no byte of `x` is -128. The bytes of `w` that meet between two
    /// calls of [`whole`](Self::whole) are at most [`MOST_OF_NIBBLES`] together, in each place of a word.
    unsafe fn nibble_dot(partial: Self::Partial, w: Self::I, x: Self::I) -> Self::Partial;
    /// `sum` and the products in `partial`.
    unsafe fn whole(sum: Self::I, partial: Self::Partial) -> Self::I;
    /// Sums below 2^24 as float32, which is exact.
    unsafe fn to_floats(sums: Self::I) -> Self::V;
}
