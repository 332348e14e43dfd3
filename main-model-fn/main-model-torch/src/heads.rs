//! Up-projections of latent attention in the absorbed form: queries are projected to the latent space, and attention
//! outputs from there to values.
//!
//! On the host the kernels multiply, so that a row's result depends on no other row. A call reads the weights once for all
//! rows.

use crate::library::Tensor;
use main_model_fn::LoadModelError;
use main_model_fn::backend::{BackendError, ResidentPart};
use remoe_kernels::{MAX_ROWS, MatrixProduct, NumericsClass, PackedMatrix, Pool, StoredDtype};
use std::sync::Arc;

/// Up-projections of one layer.
pub(crate) enum HeadProjections {
    Host(HostHeads),
    Device(DeviceHeads),
}

/// Matrices of the kernels, one for each head and projection.
pub(crate) struct HostHeads {
    /// From the plain elements of a query to the latent space.
    absorbed_keys: Vec<PackedMatrix>,
    /// From the latent space to values.
    values: Vec<PackedMatrix>,
    pool: Arc<Pool>,
}

/// Matrices of LibTorch's batched products.
pub(crate) struct DeviceHeads {
    /// heads x plain elements x latent.
    pub(crate) keys: Tensor,
    /// heads x value x latent.
    pub(crate) values: Tensor,
}

impl ResidentPart for HeadProjections {
    fn bytes(&self) -> usize {
        match self {
            Self::Host(host) => {
                let all = host.absorbed_keys.iter().chain(&host.values);
                all.map(PackedMatrix::bytes).sum()
            }
            Self::Device(device) => device.keys.byte_count() + device.values.byte_count(),
        }
    }
}

impl HeadProjections {
    /// Projects `queries` (heads x rows x plain elements) to the latent space: heads x rows x latent.
    pub(crate) fn absorb_keys(&self, queries: &Tensor) -> Result<Tensor, BackendError> {
        match self {
            Self::Host(host) => host.multiply_heads(&host.absorbed_keys, queries),
            Self::Device(device) => queries.matmul(&device.keys),
        }
    }

    /// Projects `mixed` (heads x rows x latent) to values: heads x rows x value.
    pub(crate) fn expand_values(&self, mixed: &Tensor) -> Result<Tensor, BackendError> {
        match self {
            Self::Host(host) => host.multiply_heads(&host.values, mixed),
            Self::Device(device) => mixed.matmul(&device.values.transpose(1, 2)?),
        }
    }
}

impl HostHeads {
    /// Packs `keys` (heads x plain elements x latent) and `values` (heads x value x latent), which are `stored`, for the
    /// numerics of `class`.
    ///
    /// # Errors
    /// The kernels do not support the sizes, or memory is short.
    pub(crate) fn pack(
        keys: &Tensor,
        values: &Tensor,
        stored: StoredDtype,
        class: NumericsClass,
        pool: &Arc<Pool>,
    ) -> Result<Self, LoadModelError> {
        let matrices = |weights: &Tensor| -> Result<Vec<PackedMatrix>, LoadModelError> {
            let inputs = weights.size()[2] as usize;
            let pack = |head| {
                let bytes = weights.select(0, head)?.contiguous()?.bytes()?;
                Ok(PackedMatrix::pack(inputs, class, &[(stored, &bytes)])?)
            };
            (0..weights.size()[0]).map(pack).collect()
        };
        Ok(Self {
            absorbed_keys: matrices(&keys.transpose(1, 2)?)?,
            values: matrices(values)?,
            pool: pool.clone(),
        })
    }

    /// Multiplies the rows of each head with its matrix. `x`: heads x rows x inputs. Returns heads x rows x outputs.
    fn multiply_heads(&self, matrices: &[PackedMatrix], x: &Tensor) -> Result<Tensor, BackendError> {
        let bytes = x.contiguous()?.bytes()?;
        let input_bytes = bytes.len() / matrices.len();
        let size = x.size();
        let rows = size[size.len() - 2];
        let outputs = matrices.first().map_or(0, PackedMatrix::outputs);
        let output_bytes = rows as usize * matrices.first().map_or(0, PackedMatrix::output_bytes);
        let mut output = vec![0; matrices.len() * output_bytes];
        let heads = bytes.chunks_exact(input_bytes).zip(output.chunks_exact_mut(output_bytes));
        let mut products: Vec<MatrixProduct<'_>> = matrices
            .iter()
            .zip(heads)
            .map(|(matrix, (inputs, output))| MatrixProduct { matrix, inputs, output })
            .collect();
        // A call of the kernels takes at most `MAX_ROWS` rows, and a long prompt has its rows once for each head.
        for products in products.chunks_mut((MAX_ROWS / rows as usize).max(1)) {
            self.pool.multiply(products)?;
        }
        drop(products);
        let shape = [matrices.len() as i64, rows, outputs as i64];
        Tensor::from_bytes(x.device(), &output, &shape, x.kind())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::library::TorchDevice;
    use remoe_kernels::{Dtype, PoolConfig};

    const HEADS: i64 = 3;
    const NOPE: i64 = 10;
    const VALUE: i64 = 6;
    const LATENT: i64 = 34;

    fn random(device: &Arc<TorchDevice>, dtype: Dtype, size: &[i64]) -> Tensor {
        let count = size.iter().product::<i64>() as u64;
        let element = |index: u64| {
            let mixed = (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let elements: Vec<f32> = (0..count).map(element).collect();
        let all = Tensor::from_slice(device, &elements).unwrap().reshape(size).unwrap();
        all.to_kind(crate::host::kind(dtype)).unwrap()
    }

    fn projections(device: &Arc<TorchDevice>, dtype: Dtype, stored: StoredDtype) -> [HeadProjections; 2] {
        let weights = |rows| random(device, dtype, &[HEADS, rows, LATENT]);
        let (keys, values) = (weights(NOPE), weights(VALUE));
        let pool = Arc::new(Pool::new(PoolConfig { threads: 2, ..PoolConfig::default() }).unwrap());
        let host = HostHeads::pack(&keys, &values, stored, dtype.into(), &pool).unwrap();
        [HeadProjections::Host(host), HeadProjections::Device(DeviceHeads { keys, values })]
    }

    /// A row's result is that of the row alone, and near LibTorch's.
    #[test]
    fn rows_of_a_batch_equal_rows_alone() {
        let device = TorchDevice::simulated(1 << 30);
        for (dtype, stored, tolerance) in
            [(Dtype::F32, StoredDtype::F32, 1e-4), (Dtype::Bf16, StoredDtype::Bf16, 0.2)]
        {
            let [host, torch] = projections(&device, dtype, stored);
            let queries = random(&device, dtype, &[HEADS, 5, NOPE]);
            let mixed = random(&device, dtype, &[HEADS, 5, LATENT]);
            let close = |a: &Tensor, b: &Tensor| {
                assert_eq!(a.size(), b.size());
                for (a, b) in a.floats().unwrap().into_iter().zip(b.floats().unwrap()) {
                    assert!((a - b).abs() < tolerance, "{dtype}: {a} {b}");
                }
            };
            let all = host.absorb_keys(&queries).unwrap();
            close(&all, &torch.absorb_keys(&queries).unwrap());
            let released = host.expand_values(&mixed).unwrap();
            close(&released, &torch.expand_values(&mixed).unwrap());
            for row in 0..5 {
                let one = |x: &Tensor| x.narrow(1, row, 1).unwrap();
                let same = |a: Tensor, b: Tensor| assert_eq!(a.bytes().unwrap(), b.bytes().unwrap());
                same(host.absorb_keys(&one(&queries)).unwrap(), one(&all));
                same(host.expand_values(&one(&mixed)).unwrap(), one(&released));
            }
        }
    }
}
