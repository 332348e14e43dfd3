//! Multiversioning: compiles plain Rust loops for several vector widths, and runs the widest that the processor has.

/// Work whose loops the compiler vectorises. The compiler neither reorders nor fuses floating-point operations, so that
/// results have the same bits at every vector width.
pub trait VectorisedWork {
    /// Result of the work.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`, and so is every function with a loop that they call: a
    /// function that is not inlined is compiled without the wider vectors.
    fn run(self) -> Self::Output;
}

/// Runs `work` with the widest vectors of this processor.
#[inline]
pub fn run_vectorised<W: VectorisedWork>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the processor has these features.
            return unsafe { run_avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has this feature.
            return unsafe { run_avx2(work) };
        }
    }
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn run_avx512<W: VectorisedWork>(work: W) -> W::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<W: VectorisedWork>(work: W) -> W::Output {
    work.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct RowSums<'a>(&'a [f32]);

    impl VectorisedWork for RowSums<'_> {
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
        assert_eq!(run_vectorised(RowSums(&values)).map(f32::to_bits), expected);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has this feature.
            assert_eq!(unsafe { run_avx2(RowSums(&values)) }.map(f32::to_bits), expected);
        }
    }
}
