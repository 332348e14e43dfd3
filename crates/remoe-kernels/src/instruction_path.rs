//! Instruction paths: sets of CPU instructions for which kernels are compiled.

use std::fmt;

/// A set of CPU instructions. All paths give the same bits; they differ in speed only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InstructionPath {
    /// 512-bit vectors, with the dot product of bfloat16 pairs. For quantised weights the same as [`Avx2Fma`](Self::Avx2Fma).
    Avx512Bf16,
    /// 512-bit vectors, with the dot product of bytes. For weights that are not quantised the same as [`Avx512F`](Self::Avx512F).
    Avx512Vnni,
    /// 512-bit vectors; bfloat16 is widened. For quantised weights the same as [`Avx2Fma`](Self::Avx2Fma).
    Avx512F,
    /// 256-bit vectors with fused multiply-add and conversions of binary16; bfloat16 is widened.
    Avx2Fma,
    /// No particular instructions; far slower than the others.
    Portable,
}

impl InstructionPath {
    /// All paths, the widest first. The fastest one depends on the processor: [`crate::PathChoice`] measures it.
    pub const ALL: [Self; 5] =
        [Self::Avx512Bf16, Self::Avx512Vnni, Self::Avx512F, Self::Avx2Fma, Self::Portable];

    /// Returns the paths that this CPU supports, the widest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|path| path.is_available()).collect()
    }

    /// Reports if this CPU supports the path.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512F => is_x86_feature_detected!("avx512f"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Fma => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512Bf16 | Self::Avx512Vnni | Self::Avx512F | Self::Avx2Fma => false,
            Self::Portable => true,
        }
    }

    /// Returns the name that [`FromStr`] parses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Avx512Vnni => "avx512-vnni",
            Self::Avx512F => "avx512f",
            Self::Avx2Fma => "avx2-fma",
            Self::Portable => "portable",
        }
    }
}

impl fmt::Display for InstructionPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
