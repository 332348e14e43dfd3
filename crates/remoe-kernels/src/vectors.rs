//! Loops that belong to no kernel, compiled for the vectors of the processor at hand.

/// Work whose loops the compiler computes several elements at a time of. It never takes another order of operations or
/// fuses any, so that results have the same bits by whatever vectors.
pub trait Loops {
    /// Result of the work.
    type Output;

    /// Does it. To be `#[inline(always)]`, as everything with a loop that it calls: a function by itself is compiled
    /// for every processor.
    fn run(self) -> Self::Output;
}

/// Does `work` by the widest vectors that this processor has.
#[inline]
pub fn by_vectors<L: Loops>(work: L) -> L::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the processor has these features.
            return unsafe { by_avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has this feature.
            return unsafe { by_avx2(work) };
        }
    }
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn by_avx512<L: Loops>(work: L) -> L::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn by_avx2<L: Loops>(work: L) -> L::Output {
    work.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct RowSums<'a>(&'a [f32]);

    impl Loops for RowSums<'_> {
        type Output = [f32; 8];

        #[inline(always)]
        fn run(self) -> [f32; 8] {
            let mut lanes = [0.0; 8];
            for chunk in self.0.as_chunks::<8>().0 {
                for (lane, x) in lanes.iter_mut().zip(chunk) {
                    *lane += x * 1.1 + x / 3.0;
                }
            }
            lanes
        }
    }

    #[test]
    fn vectors_of_any_width_give_the_same_bits() {
        let values: Vec<f32> = (0..4096).map(|i| ((i * 7919) % 4099) as f32 / 37.0 - 50.0).collect();
        let expected = RowSums(&values).run().map(f32::to_bits);
        assert_eq!(by_vectors(RowSums(&values)).map(f32::to_bits), expected);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has this feature.
            assert_eq!(unsafe { by_avx2(RowSums(&values)) }.map(f32::to_bits), expected);
        }
    }
}
