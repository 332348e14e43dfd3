//! Pseudo-random numbers that are reproducible from a seed on all machines.

/// `SplitMix64` generator (Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`, which is at least 1.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// Returns a number in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns the first `count` elements of a random permutation of `0..total`.
    pub(crate) fn sample(&mut self, total: usize, count: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..total as u32).collect();
        let count = count.min(total);
        for index in 0..count {
            let other = index + self.below(total - index);
            all.swap(index, other);
        }
        all.truncate(count);
        all
    }
}
