//! Checks for infinities and NaNs.

use remoe_kernels::Dtype;

/// Returns the index of the first row with an infinity or a NaN. `rows`: elements of `dtype`, little endian.
pub(super) fn first_non_finite(rows: &[u8], row_bytes: usize, dtype: Dtype) -> Option<usize> {
    // The usual case is one pass over all bytes, which the compiler vectorises.
    if is_finite(rows, dtype) {
        return None;
    }
    rows.chunks_exact(row_bytes).position(|row| !is_finite(row, dtype))
}

/// Reports if every element of `bytes` is finite.
pub(super) fn is_finite(bytes: &[u8], dtype: Dtype) -> bool {
    // Infinities and NaNs have an exponent of all ones: without the sign, they are the largest bit patterns.
    match dtype {
        Dtype::Bf16 => {
            let elements = bytes.as_chunks::<2>().0.iter();
            elements.fold(0, |largest, &element| largest.max(u16::from_le_bytes(element) & 0x7fff)) < 0x7f80
        }
        Dtype::F32 => {
            let elements = bytes.as_chunks::<4>().0.iter();
            let largest =
                elements.fold(0, |largest, &element| largest.max(u32::from_le_bytes(element) & 0x7fff_ffff));
            largest < 0x7f80_0000
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn infinities_and_nans_are_found_in_their_row() {
        let fine = [0.0, -0.0, 1.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE / 2.0];
        for strange in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for position in 0..fine.len() {
                let mut values = fine;
                values[position] = strange;
                let row = position / 3;
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(first_non_finite(&bytes, 12, Dtype::F32), Some(row));
                let tame = |value: f32| if value.is_finite() { value.clamp(-1.0, 1.0) } else { value };
                let values = values.map(|value| bf16::from_f32(tame(value)));
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(first_non_finite(&bytes, 6, Dtype::Bf16), Some(row));
            }
        }
        let bytes: Vec<u8> = fine.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(first_non_finite(&bytes, 12, Dtype::F32), None);
        let bytes: Vec<u8> =
            [bf16::MAX, bf16::MIN, bf16::ZERO].iter().flat_map(|it| it.to_le_bytes()).collect();
        assert_eq!(first_non_finite(&bytes, 6, Dtype::Bf16), None);
    }
}
