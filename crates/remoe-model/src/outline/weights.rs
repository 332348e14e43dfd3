//! The forms in which weights are stored.

use super::Elements;
use crate::error::CheckpointError;
use crate::fields::Fields;

/// How the weights of a checkpoint are stored, as its `quantization_config` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// All of them in the checkpoint's dtype.
    Plain,
    /// Matrices of layers in one byte an element (DeepSeek-V3), with a float32 scale for every block of so
    /// many elements, where the config names blocks; routers, norms, embedding and head in the dtype.
    Fp8 {
        /// Elements that share a scale.
        block: Option<u32>,
    },
    /// Matrices of routed experts in 4 bits, with a byte of scale for every 32 (gpt-oss, the OCP MX format
    /// MXFP4); everything else in the dtype.
    Mxfp4,
}

impl Weights {
    /// Returns the name of the form, `dtype` where weights have no shorter one.
    #[must_use]
    pub fn name(self, dtype: &str) -> &str {
        match self {
            Self::Plain => dtype,
            Self::Fp8 { .. } => "fp8",
            Self::Mxfp4 => "mxfp4",
        }
    }

    /// Returns the assumptions about it, for people; `dtype` is the type of the rest.
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

    /// Bytes of a routed expert.
    pub(super) fn expert_bytes(self, elements: Elements, element: u128) -> u128 {
        let matrices = match self {
            // 32 elements in 16 bytes, and one of scale.
            Self::Mxfp4 => (elements.matrices * 17).div_ceil(32),
            other => other.matrix_bytes(elements.matrices, element),
        };
        matrices + elements.rest * element
    }

    /// Bytes of any other part of a layer.
    pub(super) fn bytes(self, elements: Elements, element: u128) -> u128 {
        self.matrix_bytes(elements.matrices, element) + 4 * elements.wide + elements.rest * element
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

/// Elements of a block, from its two sides.
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
