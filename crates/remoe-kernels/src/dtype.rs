//! Element types and activations.

use std::fmt;

/// Element type in which an expert is computed: the type of its packed weights, input rows and output rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32, 4 bytes.
    F32,
    /// bfloat16, 2 bytes. Sums are kept in float32 and rounded to bfloat16 at the places that the crate documentation names.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        })
    }
}

/// Element type in which a checkpoint stores its weights; converted once, when they are packed.
///
/// Widening is exact. Narrowing to bfloat16 rounds to nearest, ties to even ([`crate::numerics::round_bf16`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredDtype {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl StoredDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

impl From<Dtype> for StoredDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

/// The function applied to the gate projection, or to the up projection where there is no gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// The tanh form of GELU, computed as `x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3)))`, which is the same function.
    GeluTanh,
    /// `max(x, 0)`; NaN stays NaN.
    Relu,
    /// The clamped SwiGLU of gpt-oss: `g / (1 + exp(-1.702 g)) * (u + 1)`, where `g` is the gate, at most 7, and `u` the
    /// up projection, clamped to -7 ..= 7.
    ClampedSwiglu,
}
