//! The up-projections of latent attention, absorbed into query and output: from queries to what meets latents, and from
//! what heads mix of latents to values. On the host they are the
//! kernels' products, so that a row's result depends on no other row; the weights are read once per call,
//! however many rows there are.

use crate::library::Tensor;
use main_model_fn::LoadModelError;
use main_model_fn::backend::{BackendError, ResidentPart};
use remoe_kernels::{MAX_ROWS, MatrixProduct, NumericsClass, PackedMatrix, Pool, StoredDtype};
use std::sync::Arc;

/// The up-projections of one layer.
pub(crate) enum HeadProjections {
    Host(HostHeads),
    /// LibTorch's.
    Device(DeviceHeads),
}

/// One matrix per head and use.
pub(crate) struct HostHeads {
    /// nope -> latent.
    absorbed_keys: Vec<PackedMatrix>,
    /// latent -> value.
    values: Vec<PackedMatrix>,
    pool: Arc<Pool>,
}

/// Batched products of LibTorch.
pub(crate) struct DeviceHeads {
    /// heads x nope x latent.
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
    /// Queries that are multiplied with latents instead of keys, heads x rows x latent, of `queries`,
    /// heads x rows x nope.
    pub(crate) fn absorb(&self, queries: &Tensor) -> Result<Tensor, BackendError> {
        match self {
            Self::Host(host) => host.each(&host.absorbed_keys, queries),
            Self::Device(device) => queries.matmul(&device.keys),
        }
    }

    /// Expands `mixed`, heads x rows x latent, from latents to values: heads x rows x value.
    pub(crate) fn release(&self, mixed: &Tensor) -> Result<Tensor, BackendError> {
        match self {
            Self::Host(host) => host.each(&host.values, mixed),
            Self::Device(device) => mixed.matmul(&device.values.transpose(1, 2)?),
        }
    }
}

impl HostHeads {
    /// Packs `keys` (heads x nope x latent) and `values` (heads x value x latent) as stored for computing as `class`
    /// says.
    ///
    /// # Errors
    /// Their sizes are beyond what the kernels take, or there is no memory.
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

    /// `x`, heads x rows x inputs, each head's rows times its own matrix.
    fn each(&self, matrices: &[PackedMatrix], x: &Tensor) -> Result<Tensor, BackendError> {
        let bytes = x.contiguous()?.bytes()?;
        let head_bytes = bytes.len() / matrices.len();
        self.multiply(matrices, x, |head| &bytes[head * head_bytes..][..head_bytes])
    }

    /// heads x rows x outputs; `inputs` gives the rows of a head, of which there are as many as `x` has.
    fn multiply<'a>(
        &self,
        matrices: &[PackedMatrix],
        x: &Tensor,
        inputs: impl Fn(usize) -> &'a [u8],
    ) -> Result<Tensor, BackendError> {
        let size = x.size();
        let rows = size[size.len() - 2];
        let outputs = matrices.first().map_or(0, PackedMatrix::outputs);
        let head_bytes = rows as usize * matrices.first().map_or(0, PackedMatrix::output_bytes);
        let mut output = vec![0; matrices.len() * head_bytes];
        let heads = matrices.iter().enumerate().zip(output.chunks_exact_mut(head_bytes));
        let mut products: Vec<MatrixProduct<'_>> = heads
            .map(|((head, matrix), output)| MatrixProduct { matrix, inputs: inputs(head), output })
            .collect();
        // A call takes a bounded number of rows, and a long prompt has them once per head.
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
        let element = |at: u64| {
            let mixed = (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
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

    /// A row's result does not depend on the rows beside it, and is what LibTorch computes.
    #[test]
    fn rows_together_are_rows_alone() {
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
            let all = host.absorb(&queries).unwrap();
            close(&all, &torch.absorb(&queries).unwrap());
            let released = host.release(&mixed).unwrap();
            close(&released, &torch.release(&mixed).unwrap());
            for row in 0..5 {
                let one = |x: &Tensor| x.narrow(1, row, 1).unwrap();
                let same = |a: Tensor, b: Tensor| assert_eq!(a.bytes().unwrap(), b.bytes().unwrap());
                same(host.absorb(&one(&queries)).unwrap(), one(&all));
                same(host.release(&one(&mixed)).unwrap(), one(&released));
            }
        }
    }
}
