//! Numerics classes: what decides the bits of a result besides the numbers themselves.

use std::fmt;

use crate::Dtype;

/// How weights lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// As elements of the type that is computed in.
    Plain,
    /// As signed integers of 8 bits, 32 of a row with one scale: 8.5 bits a weight.
    Int8,
    /// As signed integers of 4 bits, 32 of a row with one scale: 4.5 bits a weight.
    Int4,
    /// As elements of the OCP MX format MXFP4, twice of which are integers of -12 to 12; 32 of a row with one power of
    /// two: 4.5 bits a weight.
    Mxfp4,
    /// As fp8 e4m3 codes with a float32 scale for every block of a matrix, as checkpoints store them: 8.25 bits a
    /// weight. Each is decoded when it is used, and then is the element that [`Plain`](Self::Plain) would hold of it.
    Fp8,
}

impl WeightFormat {
    /// Formats with integers, the longer ones first.
    pub const QUANTISED: [Self; 3] = [Self::Int8, Self::Int4, Self::Mxfp4];

    /// Are weights elements of the type that is computed in?
    pub(crate) const fn is_plain(self) -> bool {
        matches!(self, Self::Plain)
    }

    /// Reports if it is one of [`QUANTISED`](Self::QUANTISED): rows are integers then.
    pub(crate) const fn has_integers(self) -> bool {
        match self {
            Self::Plain | Self::Fp8 => false,
            Self::Int8 | Self::Int4 | Self::Mxfp4 => true,
        }
    }

    /// Offset that is added to an integer so that its stored form has no sign.
    pub(crate) const fn offset(self) -> i32 {
        match self {
            Self::Plain | Self::Fp8 => 0,
            Self::Int8 => 128,
            Self::Int4 => 8,
            Self::Mxfp4 => 12,
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Plain => "plain",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Mxfp4 => "mxfp4",
            Self::Fp8 => "fp8",
        })
    }
}

/// The type of rows and the form of weights. Results are the same bits within a class, wherever and in whatever company
/// they are computed, and differ between classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NumericsClass {
    /// Type of input rows, intermediate values and results.
    pub dtype: Dtype,
    /// Form of the weights.
    pub weights: WeightFormat,
}

impl NumericsClass {
    /// All there are, in the order in which tables by class are kept.
    pub const ALL: [Self; 10] = [
        Self { dtype: Dtype::F32, weights: WeightFormat::Plain },
        Self { dtype: Dtype::Bf16, weights: WeightFormat::Plain },
        Self { dtype: Dtype::F32, weights: WeightFormat::Int8 },
        Self { dtype: Dtype::Bf16, weights: WeightFormat::Int8 },
        Self { dtype: Dtype::F32, weights: WeightFormat::Int4 },
        Self { dtype: Dtype::Bf16, weights: WeightFormat::Int4 },
        Self { dtype: Dtype::F32, weights: WeightFormat::Mxfp4 },
        Self { dtype: Dtype::Bf16, weights: WeightFormat::Mxfp4 },
        Self { dtype: Dtype::F32, weights: WeightFormat::Fp8 },
        Self { dtype: Dtype::Bf16, weights: WeightFormat::Fp8 },
    ];

    /// The name of the class' formats, accumulation order, roundings and functions. Two processes may share a model's
    /// experts only if their names agree. Weights that stay fp8 give the bits of the same ones decoded, and have the
    /// name of those.
    pub const fn name(self) -> &'static str {
        match (self.weights, self.dtype) {
            (WeightFormat::Plain | WeightFormat::Fp8, Dtype::Bf16) => "pairwise-odd-first-v1/bf16",
            (WeightFormat::Plain | WeightFormat::Fp8, Dtype::F32) => "pairwise-odd-first-v1/f32",
            (WeightFormat::Int8, Dtype::Bf16) => "groups-of-32-v1/int8/bf16",
            (WeightFormat::Int8, Dtype::F32) => "groups-of-32-v1/int8/f32",
            (WeightFormat::Int4, Dtype::Bf16) => "groups-of-32-v1/int4/bf16",
            (WeightFormat::Int4, Dtype::F32) => "groups-of-32-v1/int4/f32",
            (WeightFormat::Mxfp4, Dtype::Bf16) => "groups-of-32-v1/mxfp4/bf16",
            (WeightFormat::Mxfp4, Dtype::F32) => "groups-of-32-v1/mxfp4/f32",
        }
    }

    /// Position of the class in [`ALL`](Self::ALL).
    pub(crate) const fn index(self) -> usize {
        2 * self.weights as usize + self.dtype as usize
    }
}

/// The class of weights that are not quantised.
impl From<Dtype> for NumericsClass {
    fn from(dtype: Dtype) -> Self {
        Self { dtype, weights: WeightFormat::Plain }
    }
}

impl fmt::Display for NumericsClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_have_names_and_positions_of_their_own() {
        for (position, class) in NumericsClass::ALL.into_iter().enumerate() {
            assert_eq!(class.index(), position);
            let same = NumericsClass::ALL.into_iter().filter(|other| other.name() == class.name());
            // fp8 and what it is decoded to give the same bits.
            let expected = if class.weights.has_integers() { 1 } else { 2 };
            assert_eq!(same.count(), expected, "{class}");
        }
    }
}
