//! Stateless random numbers: each is a function of (seed, choice, position), so that a seed gives the same tokens in
//! every batch.

/// Returns a number in [0, 1) with 53 random bits.
pub(crate) fn uniform(seed: u64, choice: usize, position: usize) -> f64 {
    let mut state = mix(seed.wrapping_add(GOLDEN));
    state = mix(state ^ (choice as u64).wrapping_add(GOLDEN));
    state = mix(state ^ (position as u64).wrapping_add(GOLDEN));
    (state >> 11) as f64 / (1_u64 << 53) as f64
}

/// Increment of SplitMix64: 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
/// generators, 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::uniform;

    #[test]
    fn numbers_are_uniform_and_depend_on_every_argument() {
        let mut buckets = [0_u32; 16];
        for seed in 0..16 {
            for choice in 0..4 {
                for position in 0..256 {
                    let value = uniform(seed, choice, position);
                    assert!((0.0..1.0).contains(&value));
                    buckets[(value * 16.0) as usize] += 1;
                }
            }
        }
        // 16384 draws: 1024 expected a bucket, standard deviation 31.
        assert!(buckets.iter().all(|&count| (850..1200).contains(&count)), "{buckets:?}");
        assert_ne!(uniform(1, 0, 0), uniform(0, 1, 0));
        assert_ne!(uniform(0, 1, 0), uniform(0, 0, 1));
    }
}
