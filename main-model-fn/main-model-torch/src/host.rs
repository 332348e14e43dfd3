//! Linear layers and gated networks on the host, computed by the kernels.
//!
//! A row's result depends on no other row. One row takes no longer than reading the weights.

use crate::library::{Kind, Tensor};
use main_model_fn::backend::BackendError;
use remoe_kernels::{Dtype, ExpertJob, MatrixProduct, PackedExpert, PackedMatrix, Pool};
use std::sync::Arc;

/// Packed weight matrix with the threads that multiply it.
pub(crate) struct HostMatrix {
    pub(crate) matrix: Arc<PackedMatrix>,
    pub(crate) pool: Arc<Pool>,
}

/// Gated network that the kernels compute like an expert.
pub struct HostMlp {
    pub(crate) packed: PackedExpert,
    pub(crate) pool: Arc<Pool>,
}

impl HostMatrix {
    /// Multiplies `x`, rows x inputs, with the matrix. Returns rows x outputs in the element type of the matrix.
    pub(crate) fn multiply(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        let kind = kind(self.matrix.dtype());
        let rows = x.size()[0];
        let inputs = x.to_kind(kind)?.bytes()?;
        let mut output = vec![0; rows as usize * self.matrix.output_bytes()];
        self.pool.multiply(&mut [MatrixProduct {
            matrix: &self.matrix,
            inputs: &inputs,
            output: &mut output,
        }])?;
        Tensor::from_bytes(x.device(), &output, &[rows, self.matrix.outputs() as i64], kind)
    }
}

impl HostMlp {
    /// `x`: rows x hidden.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        let rows: Vec<u32> = (0..).zip(0..x.size()[0]).map(|(row, _)| row).collect();
        let inputs = x.bytes()?;
        let mut output = vec![0; inputs.len()];
        let job = ExpertJob { expert: &self.packed, inputs: &inputs, row_index: &rows, output: &mut output };
        self.pool.forward(&mut [job])?;
        Tensor::from_bytes(x.device(), &output, &x.size(), x.kind())
    }
}

/// Returns LibTorch's name of an element type.
pub(crate) fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
    }
}
