//! Products and gated networks on the host, by the kernels: a row's result depends on no other row,
//! and one row costs no more than reading the weights.

use crate::error::Refused;
use main_model_fn::backend::BackendError;
use remoe_kernels::{Dtype, Job, PackedExpert, PackedMatrix, Pool, Product};
use std::sync::Arc;
use tch::{Kind, TchError, Tensor};

/// A weight matrix that the kernels multiply with.
pub(crate) struct HostMatrix {
    pub(crate) matrix: Arc<PackedMatrix>,
    pub(crate) pool: Arc<Pool>,
}

/// A gated network that the kernels compute as they compute an expert.
pub struct HostMlp {
    pub(crate) packed: PackedExpert,
    pub(crate) pool: Arc<Pool>,
}

impl HostMatrix {
    /// `x`: rows x inputs. Returns rows x outputs in the matrix' element type.
    pub(crate) fn multiply(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        let kind = kind(self.matrix.dtype());
        let rows = x.size()[0];
        let inputs = bytes(&x.f_to_kind(kind).told()?).told()?;
        let mut output = vec![0; rows as usize * self.matrix.output_bytes()];
        self.pool.multiply(&mut [Product { matrix: &self.matrix, inputs: &inputs, output: &mut output }])?;
        Tensor::f_from_data_size(&output, &[rows, self.matrix.outputs() as i64], kind).told()
    }
}

impl HostMlp {
    /// `x`: rows x hidden.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, BackendError> {
        let rows: Vec<u32> = (0..).zip(0..x.size()[0]).map(|(row, _)| row).collect();
        let inputs = bytes(x).told()?;
        let mut output = vec![0; inputs.len()];
        let job = Job { expert: &self.packed, inputs: &inputs, row_index: &rows, output: &mut output };
        self.pool.forward(&mut [job])?;
        Tensor::f_from_data_size(&output, &x.size(), x.f_kind().told()?).told()
    }
}

/// LibTorch's name of an element type.
pub(crate) fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
    }
}

/// A tensor's elements, little endian, in its own kind.
pub(crate) fn bytes(x: &Tensor) -> Result<Vec<u8>, TchError> {
    let mut bytes = vec![0; x.numel() * x.f_kind()?.elt_size_in_bytes()];
    x.f_copy_data_u8(&mut bytes, x.numel())?;
    Ok(bytes)
}

/// A tensor's elements as float32.
pub(crate) fn floats(x: &Tensor) -> Result<Vec<f32>, TchError> {
    let x = x.f_to_kind(Kind::Float)?;
    let mut values = vec![0.0; x.numel()];
    x.f_copy_data(&mut values, x.numel())?;
    Ok(values)
}
