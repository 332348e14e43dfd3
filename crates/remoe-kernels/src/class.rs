//! Numerics classes: the formats that, besides the numbers themselves, decide the bits of a result.

use std::fmt;

use crate::Dtype;

/// Format of weights in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// Not quantised: elements of the type in which they are computed.
    Plain,
    /// Signed 8-bit integers with one scale for each 32 weights of a row: 8.5 bits a weight.
    Int8,
    /// Signed 4-bit integers with one scale for each 32 weights of a row: 4.5 bits a weight.
    Int4,
    /// The OCP MX format MXFP4, with one power of two for each 32 weights of a row: 4.5 bits a weight. Twice an element
    /// is an integer from -12 to 12.
    Mxfp4,
    /// fp8 e4m3 codes with a float32 scale for each block of a matrix, as in checkpoints: 8.25 bits a weight. A weight
    /// is decoded at each use, to the same element that [`Plain`](Self::Plain) would hold.
    Fp8,
}

impl WeightFormat {
    /// Formats of quantised weights, those with more bits first.
    pub const QUANTISED: [Self; 3] = [Self::Int8, Self::Int4, Self::Mxfp4];

    /// Reports if weights are elements of the type in which they are computed.
    pub(crate) const fn is_plain(self) -> bool {
        matches!(self, Self::Plain)
    }

    /// Reports if the format is one of [`QUANTISED`](Self::QUANTISED). Input rows are quantised to integers, too, then.
    pub(crate) const fn has_integers(self) -> bool {
        match self {
            Self::Plain | Self::Fp8 => false,
            Self::Int8 | Self::Int4 | Self::Mxfp4 => true,
        }
    }

    /// Offset added to each integer, so that it is stored unsigned.
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

/// The element type of rows and the format of weights. Within a class, a result has the same bits on every machine and
/// in every batch; classes differ from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NumericsClass {
    /// Type of input rows, intermediate values and results.
    pub dtype: Dtype,
    /// Format of the weights.
    pub weights: WeightFormat,
}

impl NumericsClass {
    /// All classes, each at its own [`index`](Self::index).
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

    /// Name of the class: of its formats, order of accumulation, roundings and functions.
    ///
    /// Two processes may share a model's experts only if their names agree. Weights that stay fp8 give the same bits as
    /// decoded weights, and so have the same name.
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
    fn classes_have_unique_names_and_positions() {
        for (position, class) in NumericsClass::ALL.into_iter().enumerate() {
            assert_eq!(class.index(), position);
            let same = NumericsClass::ALL.into_iter().filter(|other| other.name() == class.name());
            // fp8 and what it is decoded to give the same bits.
            let expected = if class.weights.has_integers() { 1 } else { 2 };
            assert_eq!(same.count(), expected, "{class}");
        }
    }
}
