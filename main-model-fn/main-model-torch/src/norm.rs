//! Layer normalisation and RMS normalisation.

use crate::library::Tensor;
use main_model_fn::backend::{BackendError, ResidentPart};
use remoe_model::NormKind;

/// Normalisation of each run of as many elements as there are weights: whole rows, or each head of a row.
///
/// LibTorch computes it in float32 and rounds to the compute dtype once. Some references also round before they multiply
/// with the weights.
pub struct Norm {
    pub(crate) kind: NormKind,
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) epsilon: f64,
}

impl ResidentPart for Norm {
    fn bytes(&self) -> usize {
        self.weight.byte_count() + self.bias.as_ref().map_or(0, Tensor::byte_count)
    }
}

impl Norm {
    /// `x`: rows x features, which are a multiple of the weights.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        let (size, run_size) = (x.size(), self.weight.size());
        let runs = if size.last() == run_size.last() { x.alias() } else { x.reshape(&[-1, run_size[0]])? };
        let normed = match self.kind {
            NormKind::Rms | NormKind::RmsInFloat32 => runs.rms_norm(&run_size, &self.weight, self.epsilon)?,
            NormKind::Layer => runs.layer_norm(&run_size, &self.weight, self.bias.as_ref(), self.epsilon)?,
        };
        normed.reshape(&size)
    }
}
