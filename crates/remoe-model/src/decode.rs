//! Decodes quantised weights (fp8, MXFP4) of a checkpoint to its dtype; each is rounded once.

use std::ops::Range;

use crate::facts::StoredDtype;

/// Elements that share a scale in MXFP4.
pub(crate) const MXFP4_GROUP: usize = 32;
/// Bytes of a group of MXFP4 without its scale.
pub(crate) const MXFP4_BYTES: usize = MXFP4_GROUP / 2;

/// Position of an element that is not finite, with its row counted among the decoded rows, and the reason.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NotFinite {
    pub(crate) row: usize,
    pub(crate) column: usize,
    pub(crate) why: String,
}

/// Decodes rows of e4m3 codes. `scale(row, i)` returns the scale of the `i`-th block of `block` columns. Appends the
/// float32 products of codes and scales, rounded once to `dtype`, to `decoded`.
pub(crate) fn fp8(
    codes: &[u8],
    columns: usize,
    block: usize,
    scale: impl Fn(usize, usize) -> f32,
    dtype: StoredDtype,
    decoded: &mut Vec<u8>,
) -> Result<(), NotFinite> {
    for (row, codes) in codes.chunks_exact(columns.max(1)).enumerate() {
        for (index, codes) in codes.chunks(block.max(1)).enumerate() {
            let scale = scale(row, index);
            // 448 is the largest magnitude of e4m3: no product overflows if this one does not.
            if !round_bf16(448.0 * scale).is_finite() {
                let why = format!("its block has the invalid scale {scale}");
                return Err(NotFinite { row, column: index * block, why });
            }
            if let Some((at, why)) = find_nan(codes) {
                return Err(NotFinite { row, column: index * block + at, why });
            }
            append(codes.len(), codes.iter().map(|&code| e4m3(code) * scale), dtype, decoded);
        }
    }
    Ok(())
}

/// Finds the first e4m3 code that is NaN. Returns its index and a message.
pub(crate) fn find_nan(codes: &[u8]) -> Option<(usize, String)> {
    let at = codes.iter().position(|code| code & 0x7f == 0x7f)?;
    Some((at, format!("{:#04x} of e4m3 is not a number", codes.get(at).copied().unwrap_or_default())))
}

/// Decodes rows of MXFP4 groups: 32 e2m1 elements in 16 bytes, the first element of a byte in its lower half, times
/// 2^(scale - 127). Appends elements of `dtype` to `decoded`. Nothing is rounded.
pub(crate) fn mxfp4(
    codes: &[u8],
    scales: &[u8],
    columns: usize,
    dtype: StoredDtype,
    decoded: &mut Vec<u8>,
) -> Result<(), NotFinite> {
    let per_row = (columns / MXFP4_GROUP).max(1);
    for (index, (codes, &exponent)) in codes.chunks_exact(MXFP4_BYTES).zip(scales).enumerate() {
        let place = |at: usize, why: String| NotFinite {
            row: index / per_row,
            column: index % per_row * MXFP4_GROUP + at,
            why,
        };
        if exponent == u8::MAX {
            return Err(place(0, "the scale 0xff of e8m0 is not a number".to_owned()));
        }
        let scale = e8m0(exponent);
        let elements = || codes.iter().flat_map(|byte| [byte & 15, byte >> 4]);
        // With the two largest exponents, some elements overflow.
        if exponent > 252
            && let Some((at, code)) =
                elements().enumerate().find(|(_, code)| !(e2m1(*code) * scale).is_finite())
        {
            return Err(place(
                at,
                format!("{} times 2^{} is too large", e2m1(code), i32::from(exponent) - 127),
            ));
        }
        append(MXFP4_GROUP, elements().map(|code| e2m1(code) * scale), dtype, decoded);
    }
    Ok(())
}

/// Decodes block scales, which are stored as float32 or bfloat16.
pub(crate) fn scales(bytes: &[u8], dtype: StoredDtype) -> Vec<f32> {
    match dtype {
        StoredDtype::F32 => bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect(),
        StoredDtype::Bf16 | StoredDtype::F16 => {
            let widened = |&half| f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16);
            bytes.as_chunks().0.iter().map(widened).collect()
        }
    }
}

/// Rounds `count` values to `dtype` and appends them to `decoded`.
fn append(count: usize, values: impl Iterator<Item = f32>, dtype: StoredDtype, decoded: &mut Vec<u8>) {
    let start = decoded.len();
    decoded.resize(start + count * dtype.bytes() as usize, 0);
    let target = decoded.get_mut(start..).unwrap_or_default();
    match dtype {
        StoredDtype::F32 => {
            for (to, value) in target.as_chunks_mut().0.iter_mut().zip(values) {
                *to = value.to_le_bytes();
            }
        }
        StoredDtype::Bf16 | StoredDtype::F16 => {
            for (to, value) in target.as_chunks_mut().0.iter_mut().zip(values) {
                *to = ((round_bf16(value).to_bits() >> 16) as u16).to_le_bytes();
            }
        }
    }
}

/// Rounds a finite number to bfloat16, to nearest, ties to even.
fn round_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    let odd = bits >> 16 & 1;
    f32::from_bits(bits.wrapping_add(0x7fff + odd) & 0xffff_0000)
}

/// Decodes e4m3: a sign, four exponent bits with bias 7, three mantissa bits; no infinities.
fn e4m3(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f) << 20;
    // Exponent and mantissa move to their positions in a float32. The product adds the difference of the biases, 120,
    // and is right for denormals, too.
    let value = f32::from_bits(magnitude) * f32::from_bits((127 + 120) << 23);
    f32::from_bits(value.to_bits() | u32::from(code & 0x80) << 24)
}

/// Decodes e2m1: a sign, two exponent bits, one mantissa bit.
fn e2m1(code: u8) -> f32 {
    const NUMBERS: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    NUMBERS[usize::from(code & 15)]
}

/// Decodes an e8m0 scale other than 255: a power of two.
fn e8m0(code: u8) -> f32 {
    // Code 0 is 2^-127, a denormal float32.
    f32::from_bits(if code == 0 { 1 << 22 } else { u32::from(code) << 23 })
}

/// Returns the rows of blocks that contain `rows`.
pub(crate) fn block_rows(rows: &Range<usize>, block: usize) -> Range<usize> {
    rows.start / block..rows.end.div_ceil(block)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use serde::Deserialize;

    use super::*;

    /// Values that torch and transformers give every code, as bit patterns (`tests/fixtures/short_forms.py`).
    #[derive(Deserialize)]
    struct Reference {
        e4m3: Vec<u32>,
        scales: Vec<u32>,
        fp8: Vec<Vec<u16>>,
        blocks: Vec<u8>,
        exponents: Vec<u8>,
        mxfp4: Vec<Vec<u16>>,
    }

    fn reference() -> Reference {
        serde_json::from_str(include_str!("../../../tests/fixtures/short_forms.json")).unwrap()
    }

    fn halves(bytes: &[u8]) -> Vec<u16> {
        bytes.as_chunks().0.iter().map(|&half| u16::from_le_bytes(half)).collect()
    }

    const NUMBERS: [std::ops::RangeInclusive<u8>; 2] = [0..=0x7e, 0x80..=0xfe];

    #[test]
    fn e4m3_codes_decode_as_specified_and_as_in_torch() {
        // OCP 8-bit floating point 1.0, table 1: zero, least and largest denormal, least and largest normal.
        let table = [
            (0x00, 0.0),
            (0x01, 2.0_f32.powi(-9)),
            (0x07, 0.875 * 2.0_f32.powi(-6)),
            (0x08, 2.0_f32.powi(-6)),
            (0x38, 1.0),
            (0x7e, 448.0),
        ];
        for (code, value) in table {
            assert_eq!(e4m3(code), value);
            assert_eq!(e4m3(code | 0x80), -value);
        }
        let torch = reference().e4m3;
        for code in NUMBERS.into_iter().flatten() {
            assert_eq!(e4m3(code).to_bits(), torch[usize::from(code)], "{code:#04x}");
        }
        for nan in [0x7f, 0xff] {
            assert!(f32::from_bits(torch[nan]).is_nan());
        }
    }

    #[test]
    fn fp8_decodes_as_the_reference() {
        let reference = reference();
        for (scale, expected) in reference.scales.iter().zip(&reference.fp8) {
            for codes in NUMBERS {
                let expected = &expected[usize::from(*codes.start())..=usize::from(*codes.end())];
                let codes: Vec<u8> = codes.collect();
                let scale = |_, _| f32::from_bits(*scale);
                let mut decoded = Vec::new();
                fp8(&codes, codes.len(), 50, scale, StoredDtype::Bf16, &mut decoded).unwrap();
                assert_eq!(halves(&decoded), expected);
            }
        }
    }

    #[test]
    fn fp8_uses_the_scale_of_its_block() {
        let scale = |row: usize, column: usize| 2.0_f32.powi((2 * row + column) as i32);
        let mut decoded = Vec::new();
        fp8(&[0x38; 6], 3, 2, scale, StoredDtype::F32, &mut decoded).unwrap();
        let decoded: Vec<f32> = decoded.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect();
        assert_eq!(decoded, [1.0, 1.0, 2.0, 4.0, 4.0, 8.0]);
    }

    #[test]
    fn mxfp4_decodes_as_in_transformers() {
        let reference = reference();
        // OCP Microscaling Formats 1.0, table 6, of the codes in the order of the blocks.
        let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (exponent, expected) in reference.exponents.iter().zip(&reference.mxfp4) {
            let mut decoded = Vec::new();
            mxfp4(&reference.blocks, &[*exponent], 32, StoredDtype::Bf16, &mut decoded).unwrap();
            assert_eq!(&halves(&decoded), expected, "{exponent}");
            let mut wide = Vec::new();
            mxfp4(&reference.blocks, &[*exponent], 32, StoredDtype::F32, &mut wide).unwrap();
            for (k, &word) in wide.as_chunks().0.iter().enumerate() {
                let magnitude = table[k % 8] * 2.0_f64.powi(i32::from(*exponent) - 127);
                let value = f64::from(f32::from_le_bytes(word));
                assert_eq!(value, if k % 16 < 8 { magnitude } else { -magnitude });
            }
        }
    }

    #[test]
    fn nan_is_refused_with_its_position() {
        for code in [0x7f, 0xff] {
            let mut codes = [0x38; 40];
            codes[33] = code;
            let error = fp8(&codes, 20, 8, |_, _| 1.0, StoredDtype::Bf16, &mut Vec::new()).unwrap_err();
            assert_eq!((error.row, error.column), (1, 13), "{error:?}");
        }
        for scale in [f32::NAN, f32::INFINITY, 1e36] {
            let scale = |row: usize, column: usize| if (row, column) == (1, 2) { scale } else { 1.0 };
            let error = fp8(&[0x38; 40], 20, 8, scale, StoredDtype::F32, &mut Vec::new()).unwrap_err();
            assert_eq!((error.row, error.column), (1, 16), "{error:?}");
        }
        for (exponent, code, column) in [(255, 0, 32), (254, 0x40, 41), (253, 0x07, 40)] {
            let mut codes = [0x11; 64];
            codes[52] = code;
            let decode = |scales: &[u8]| mxfp4(&codes, scales, 64, StoredDtype::Bf16, &mut Vec::new());
            let error = decode(&[254, 0, 0, exponent]).unwrap_err();
            assert_eq!((error.row, error.column), (1, column), "{error:?}");
            decode(&[254, 0, 0, 252]).unwrap();
        }
    }
}
