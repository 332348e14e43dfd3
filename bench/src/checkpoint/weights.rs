//! Random numbers that depend on seed, tensor and position only, so that any part of any tensor can
//! be made by any thread, and the same weights come out in every dtype.

use super::shape::Dtype;
use super::tensors::{Fill, TensorSpec};
use half::f16;

/// Elements that one random number gives; parts of a tensor begin at multiples of it.
pub(super) const LANES: usize = 4;

/// Steps of the counter: 2^64 over the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of splitmix64: a counter in, 64 bits that look random out.
fn mix(counter: u64) -> u64 {
    let z = (counter ^ (counter >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Where the sequence of the tensor of this name begins.
fn key(seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(seed.wrapping_add(STEP)), |key, byte| mix(key ^ u64::from(byte)))
}

/// The elements of `tensor` from number `first`, a multiple of [`LANES`], as many as `out` has room
/// for.
pub(super) fn fill(tensor: &TensorSpec, seed: u64, dtype: Dtype, first: usize, out: &mut [u8]) {
    match dtype {
        Dtype::Bfloat16 => elements(tensor, seed, first, out, bfloat16),
        Dtype::Float16 => elements(tensor, seed, first, out, |value| f16::from_f32(value).to_le_bytes()),
        Dtype::Float32 => elements(tensor, seed, first, out, f32::to_le_bytes),
    }
}

/// Rounds a finite number to the nearest, ties to even: the top half of its float32.
fn bfloat16(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    // Carries into the top half where the lower one says so; no finite weight is large enough to wrap.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    ((rounded >> 16) as u16).to_le_bytes()
}

fn elements<const BYTES: usize>(
    tensor: &TensorSpec,
    seed: u64,
    first: usize,
    out: &mut [u8],
    store: impl Fn(f32) -> [u8; BYTES],
) {
    let deviation = match tensor.fill {
        Fill::Random(deviation) => deviation,
        Fill::Constant(value) => {
            let bytes = store(value);
            out.chunks_exact_mut(BYTES).for_each(|element| element.copy_from_slice(&bytes));
            return;
        }
    };
    // Uniform between -1 and 1 has a standard deviation of 1 / sqrt(3).
    let scale = deviation * 3.0_f32.sqrt() / 32768.0;
    let key = key(seed, &tensor.name);
    for (group, elements) in (first / LANES..).zip(out.chunks_mut(LANES * BYTES)) {
        let random = mix(key.wrapping_add((group as u64).wrapping_mul(STEP)));
        for (lane, element) in elements.chunks_exact_mut(BYTES).enumerate() {
            let number = (random >> (16 * lane)) as i16;
            // The half keeps the mean at 0 and every weight off it.
            element.copy_from_slice(&store((f32::from(number) + 0.5) * scale));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(fill: Fill) -> TensorSpec {
        TensorSpec { name: "t".to_owned(), shape: vec![4096], fill }
    }

    #[test]
    fn any_part_has_the_elements_of_the_whole() {
        let tensor = tensor(Fill::Random(1.0));
        let mut whole = vec![0; 4096 * 2];
        fill(&tensor, 7, Dtype::Bfloat16, 0, &mut whole);
        let mut part = vec![0; 100 * 2];
        fill(&tensor, 7, Dtype::Bfloat16, 1024, &mut part);
        assert_eq!(part, whole[1024 * 2..][..part.len()]);
        fill(&tensor, 8, Dtype::Bfloat16, 1024, &mut part);
        assert_ne!(part, whole[1024 * 2..][..part.len()]);
    }

    #[test]
    fn the_spread_is_the_one_that_was_asked_for() {
        let mut bytes = vec![0; 4096 * 4];
        fill(&tensor(Fill::Random(0.5)), 1, Dtype::Float32, 0, &mut bytes);
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let mean = values.iter().sum::<f32>() / 4096.0;
        let deviation = (values.iter().map(|value| value * value).sum::<f32>() / 4096.0).sqrt();
        assert!(mean.abs() < 0.03, "mean {mean}");
        assert!((deviation - 0.5).abs() < 0.02, "deviation {deviation}");
    }
}
