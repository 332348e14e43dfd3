use crate::library::Tensor;
use main_model_fn::backend::{BackendError, ResidentPart};
use remoe_model::NormKind;

/// Normalisation over runs of as many elements as there are weights: one operation of LibTorch, which computes in
/// float32 and rounds to the compute dtype once, also where the reference rounds before the weights.
pub struct Norm {
    pub(crate) kind: NormKind,
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) eps: f64,
}

impl ResidentPart for Norm {
    fn bytes(&self) -> usize {
        self.weight.byte_count() + self.bias.as_ref().map_or(0, Tensor::byte_count)
    }
}

impl Norm {
    /// `x`: rows x features, a multiple of the weights' number.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        let (size, run) = (x.size(), self.weight.size());
        let runs = if size.last() == run.last() { x.alias() } else { x.reshape(&[-1, run[0]])? };
        let normed = match self.kind {
            NormKind::Rms | NormKind::RmsInFloat32 => runs.rms_norm(&run, &self.weight, self.eps)?,
            NormKind::Layer => runs.layer_norm(&run, &self.weight, self.bias.as_ref(), self.eps)?,
        };
        normed.reshape(&size)
    }
}
