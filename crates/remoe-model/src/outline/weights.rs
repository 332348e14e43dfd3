//! Storage formats of weights, and the bytes that elements take in them.

use super::Elements;
use crate::error::CheckpointError;
use crate::fields::Fields;

/// Storage format of a checkpoint's weights, as declared by `quantization_config`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// All weights are in the checkpoint's dtype.
    Plain,
    /// Matrices of layers have one byte per element (DeepSeek-V3). Routers, norms, embedding and head are in the dtype.
    Fp8 {
        /// Elements that share a float32 scale, if the config states a block size.
        block: Option<u32>,
    },
    /// Matrices of routed experts have 4 bits per element, and a one-byte scale for every 32 (gpt-oss, the OCP MX format
    /// MXFP4). All other weights are in the dtype.
    Mxfp4,
}

impl Weights {
    /// Returns the name of the format, or `dtype` if weights are not quantised.
    #[must_use]
    pub fn name(self, dtype: &str) -> &str {
        match self {
            Self::Plain => dtype,
            Self::Fp8 { .. } => "fp8",
            Self::Mxfp4 => "mxfp4",
        }
    }

    /// Describes the assumed storage, for users. `dtype` is the type of weights that are not quantised.
    #[must_use]
    pub fn meaning(self, dtype: &str) -> String {
        match self {
            Self::Plain => format!("all weights in {dtype}"),
            Self::Fp8 { .. } => {
                format!("matrices of layers in 1 byte an element with their scales, the rest in {dtype}")
            }
            Self::Mxfp4 => {
                format!("matrices of experts in 4.25 bits an element with their scales, the rest in {dtype}")
            }
        }
    }

    /// Returns the bytes of a routed expert, with `element` bytes per unquantised element.
    pub(super) fn expert_bytes(self, elements: Elements, element: u128) -> u128 {
        let matrices = match self {
            // 32 elements take 16 bytes, and one byte for their scale.
            Self::Mxfp4 => (elements.matrices * 17).div_ceil(32),
            other => other.matrix_bytes(elements.matrices, element),
        };
        matrices + elements.rest * element
    }

    /// Returns the bytes of any other part of a layer, with `element` bytes per unquantised element.
    pub(super) fn bytes(self, elements: Elements, element: u128) -> u128 {
        self.matrix_bytes(elements.matrices, element) + 4 * elements.float32 + elements.rest * element
    }

    fn matrix_bytes(self, matrices: u128, element: u128) -> u128 {
        match self {
            Self::Plain | Self::Mxfp4 => matrices * element,
            Self::Fp8 { block } => {
                matrices + block.map_or(0, |block| 4 * matrices.div_ceil(u128::from(block.max(1))))
            }
        }
    }

    pub(super) fn read(fields: Fields<'_>) -> Result<Self, CheckpointError> {
        let Some(quantization) = fields.object("quantization_config")? else { return Ok(Self::Plain) };
        match quantization.text("quant_method")? {
            Some("fp8") => Ok(Self::Fp8 { block: block(quantization)? }),
            Some("mxfp4") => Ok(Self::Mxfp4),
            other => Err(quantization.unsupported(
                "quant_method",
                format!(
                    "`{}`; sizes are known for fp8 and mxfp4, set the dtype to count in (--dtype bfloat16)",
                    other.unwrap_or("null")
                ),
            )),
        }
    }
}

/// Returns the number of elements of a block.
fn block(quantization: Fields<'_>) -> Result<Option<u32>, CheckpointError> {
    const NAME: &str = "weight_block_size";
    let Some(sides) = quantization.list(NAME)? else { return Ok(None) };
    let sides: Option<Vec<u32>> = sides
        .iter()
        .map(|side| u32::try_from(side.as_u64()?).ok().filter(|side| (1..=65_535).contains(side)))
        .collect();
    match sides.as_deref() {
        Some([rows, columns]) => Ok(Some(rows * columns)),
        _ => Err(quantization.error(NAME, "expected two sides of a block, each from 1 to 65535")),
    }
}
