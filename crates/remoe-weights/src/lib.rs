//! Loads weights from a checkpoint (`remoe-model`) into the packed form of the kernels (`remoe-kernels`): experts, dense
//! layers and matrices, for main functions and remote-expert functions.
//!
//! Only the byte ranges of the requested weights are read, through a small buffer, directly into the packed form.

mod fp8;
mod nodes;
mod quantisation;
mod read;

pub use nodes::spread_over_nodes;
pub use quantisation::{QuantisationError, quantisation_errors};
pub use read::load_floats;
use read::{TensorReader, row_bytes};
use remoe_kernels::{
    Activation, Dtype, ExpertMatrix, ExpertShape, KernelError, NumericsClass, PackedExpert,
    PackedExpertBuilder, PackedMatrix, PackedMatrixBuilder, StoredDtype, WeightFormat,
};
use remoe_model::{Checkpoint, CheckpointError, ExpertBiases, ExpertsDtype, MlpTensors, TensorRef};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes of a matrix that a thread packs at a time.
const PART_BYTES: usize = 16 << 20;

/// Failure to load weights.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named by what they hold")]
pub enum LoadError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A routed expert cannot be packed.
    #[error("cannot pack expert {expert} of layer {layer}: {source}")]
    Kernel { layer: usize, expert: u32, source: KernelError },
    /// A dense layer or shared experts cannot be packed.
    #[error("cannot pack {tensor} and its neighbours: {source}")]
    Gated {
        /// Name of the up projection.
        tensor: String,
        source: KernelError,
    },
    /// Another matrix cannot be packed.
    #[error("cannot pack {tensor}: {source}")]
    Matrix {
        /// Name of the matrix, or of the first of several.
        tensor: String,
        source: KernelError,
    },
    /// Experts are configured to stay fp8, but the checkpoint stores another type.
    #[error("cannot keep `{tensor}` as fp8: it is stored otherwise; omit --experts-dtype fp8")]
    NotFp8 { tensor: String },
    /// The layer or the expert does not exist.
    #[error("layer {layer} has no routed expert {expert} (it has {experts})")]
    NoSuchExpert {
        layer: usize,
        expert: u32,
        /// Number of routed experts of the layer.
        experts: usize,
    },
    /// A packing thread panicked.
    #[error("a thread that packs experts panicked")]
    Panicked,
}

/// A compute dtype that parses and displays the name that users write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeDtype(pub Dtype);

/// Name that is not a compute dtype.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected float32 or bfloat16, got {0:?}")]
pub struct DtypeError(String);

impl FromStr for ComputeDtype {
    type Err = DtypeError;

    fn from_str(name: &str) -> Result<Self, DtypeError> {
        [Dtype::F32, Dtype::Bf16]
            .into_iter()
            .find(|dtype| dtype.to_string() == name)
            .map(Self)
            .ok_or_else(|| DtypeError(name.to_owned()))
    }
}

impl fmt::Display for ComputeDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Returns [`experts_class`] if the experts of `checkpoint` can be kept in that form.
///
/// # Errors
/// Fails as [`Checkpoint::check_experts_dtype`] does.
pub fn checked_experts_class(
    checkpoint: &Checkpoint,
    dtype: Dtype,
    experts: Option<ExpertsDtype>,
) -> Result<NumericsClass, CheckpointError> {
    let compute_dtype = match dtype {
        Dtype::F32 => remoe_model::StoredDtype::F32,
        Dtype::Bf16 => remoe_model::StoredDtype::Bf16,
    };
    checkpoint.check_experts_dtype(experts, compute_dtype)?;
    Ok(experts_class(dtype, experts))
}

/// Returns the numerics class of experts that are computed in `dtype`, with weights in the format `experts`. `None` stands
/// for weights that are not quantised.
pub fn experts_class(dtype: Dtype, experts: Option<ExpertsDtype>) -> NumericsClass {
    let weights = match experts {
        None => WeightFormat::Plain,
        Some(ExpertsDtype::Int8) => WeightFormat::Int8,
        Some(ExpertsDtype::Int4) => WeightFormat::Int4,
        Some(ExpertsDtype::Mxfp4) => WeightFormat::Mxfp4,
        Some(ExpertsDtype::Fp8) => WeightFormat::Fp8,
    };
    NumericsClass { dtype, weights }
}

/// Returns the default compute dtype of `checkpoint`: its own dtype, but float32 for float16.
pub fn default_dtype(checkpoint: &Checkpoint) -> Dtype {
    match checkpoint.config().dtype {
        remoe_model::StoredDtype::Bf16 => Dtype::Bf16,
        remoe_model::StoredDtype::F32 | remoe_model::StoredDtype::F16 => Dtype::F32,
    }
}

/// Returns the shape of a routed expert of `layer`, for computation in `class`.
///
/// # Errors
/// The layer has no such expert, or its sizes exceed the limits of the kernels.
pub fn expert_shape(
    checkpoint: &Checkpoint,
    layer: usize,
    expert: u32,
    class: impl Into<NumericsClass>,
) -> Result<ExpertShape, LoadError> {
    let config = checkpoint.config();
    let Some(moe) = config.moe(layer).filter(|moe| (expert as usize) < moe.experts) else {
        return Err(LoadError::NoSuchExpert {
            layer,
            expert,
            experts: config.moe(layer).map_or(0, |moe| moe.experts),
        });
    };
    let shape = ExpertShape::new(config.hidden_size, moe.expert_width, class, activation(config.activation))
        .map_err(|source| LoadError::Kernel { layer, expert, source })?;
    let shape = if moe.gated { shape } else { shape.without_gate() };
    Ok(match moe.biases {
        ExpertBiases::None => shape,
        ExpertBiases::Inner => shape.with_inner_biases(),
        ExpertBiases::All => shape.with_biases(),
    })
}

/// Reads expert `expert` of `layer` and packs it for computation in `class`.
///
/// # Errors
/// The layer has no such expert, or its weights cannot be read or packed.
pub fn load_expert(
    checkpoint: &Checkpoint,
    layer: usize,
    expert: u32,
    class: impl Into<NumericsClass>,
) -> Result<PackedExpert, LoadError> {
    let shape = expert_shape(checkpoint, layer, expert, class)?;
    let tensors = checkpoint.expert(layer, expert as usize)?;
    let pack_error = |source| LoadError::Kernel { layer, expert, source };
    pack(checkpoint, shape, &tensors, pack_error)
}

/// Reads a dense layer, or shared experts, and packs it as one expert for computation in `class`.
///
/// # Errors
/// The weights cannot be read or packed.
pub fn load_gated(
    checkpoint: &Checkpoint,
    tensors: &MlpTensors,
    class: impl Into<NumericsClass>,
) -> Result<PackedExpert, LoadError> {
    let pack_error = |source| LoadError::Gated { tensor: tensors.up.weight.name.to_string(), source };
    let width = tensors.up.weight.shape.first().copied().unwrap_or(0);
    let config = checkpoint.config();
    let shape = ExpertShape::new(config.hidden_size, width, class, activation(config.activation))
        .map_err(pack_error)?;
    pack(checkpoint, shape, tensors, pack_error)
}

/// Reads matrices with the same inputs and packs them, stacked, for computation in `class`.
///
/// Besides the packed form, only some rows are in memory at a time. A single large matrix is read by `threads` threads.
///
/// # Errors
/// The weights cannot be read or packed.
pub fn load_matrix(
    checkpoint: &Checkpoint,
    parts: &[&TensorRef],
    class: impl Into<NumericsClass>,
    threads: usize,
) -> Result<PackedMatrix, LoadError> {
    let pack_error = |source| {
        let tensor = parts.first().map(|part| part.name.to_string()).unwrap_or_default();
        LoadError::Matrix { tensor, source }
    };
    let outputs = parts.iter().filter_map(|part| part.shape.first()).sum();
    let inputs = parts.first().and_then(|part| part.shape.last()).copied().unwrap_or(0);
    let mut builder = PackedMatrixBuilder::new(outputs, inputs, class).map_err(pack_error)?;
    match parts {
        [tensor] if tensor.strides.is_none() && tensor.bytes >= 2 * PART_BYTES as u64 && threads > 1 => {
            read_in_parts(checkpoint, tensor, &mut builder, PART_BYTES, threads, pack_error)?;
        }
        _ => {
            let mut reader = TensorReader::new(checkpoint);
            for part in parts {
                let stored = stored_dtype(part.dtype);
                reader.read_rows(part, |_, bytes| builder.push_rows(stored, bytes).map_err(pack_error))?;
            }
        }
    }
    builder.finish().map_err(pack_error)
}

/// Reads a matrix with contiguous rows into `builder`, by `threads` threads that take parts of about `part_bytes` bytes.
fn read_in_parts(
    checkpoint: &Checkpoint,
    tensor: &TensorRef,
    builder: &mut PackedMatrixBuilder,
    part_bytes: usize,
    threads: usize,
    pack_error: impl Fn(KernelError) -> LoadError + Sync,
) -> Result<(), LoadError> {
    let stored = stored_dtype(tensor.dtype);
    let parts: Vec<_> = builder.parts(part_bytes / row_bytes(tensor).max(1)).map(Mutex::new).collect();
    in_parallel(parts.len(), threads, LoadError::Panicked, |index| {
        // Uncontended: each part is taken by one thread.
        let mut part = parts[index].lock().unwrap_or_else(PoisonError::into_inner);
        let rows = part.range();
        let pack = |_, bytes: &[u8]| part.push_rows(stored, bytes).map_err(&pack_error);
        TensorReader::new(checkpoint).read_contiguous(tensor, rows, pack)
    })?;
    Ok(())
}

/// Reads the projections and biases of an expert and packs them.
fn pack(
    checkpoint: &Checkpoint,
    shape: ExpertShape,
    tensors: &MlpTensors,
    pack_error: impl Fn(KernelError) -> LoadError,
) -> Result<PackedExpert, LoadError> {
    let stored = stored_dtype(tensors.up.weight.dtype);
    let mut builder = PackedExpertBuilder::new(shape, stored).map_err(&pack_error)?;
    checkpoint.prefetch(tensors.tensors())?;
    let mut reader = TensorReader::new(checkpoint);
    let linears = || {
        ExpertMatrix::ALL
            .into_iter()
            .zip(tensors.linears())
            .filter_map(|(matrix, linear)| Some((matrix, linear?)))
    };
    for (matrix, linear) in linears() {
        if shape.class().weights == WeightFormat::Fp8 {
            fp8::pack(checkpoint, &linear.weight, matrix, &mut builder, &pack_error)?;
            continue;
        }
        reader.read_rows(&linear.weight, |row, bytes| {
            builder.set_rows(matrix, row, bytes).map_err(&pack_error)
        })?;
    }
    for (matrix, linear) in linears() {
        if let Some(bias) = &linear.bias {
            builder.set_biases(matrix, &load_floats(checkpoint, bias)?).map_err(&pack_error)?;
        }
    }
    builder.finish().map_err(pack_error)
}

/// Converts a checkpoint's element type to that of the kernels.
pub fn stored_dtype(dtype: remoe_model::StoredDtype) -> StoredDtype {
    match dtype {
        remoe_model::StoredDtype::F32 => StoredDtype::F32,
        remoe_model::StoredDtype::Bf16 => StoredDtype::Bf16,
        remoe_model::StoredDtype::F16 => StoredDtype::F16,
    }
}

fn activation(activation: remoe_model::Activation) -> Activation {
    match activation {
        remoe_model::Activation::Silu => Activation::Silu,
        remoe_model::Activation::GeluTanh => Activation::GeluTanh,
        remoe_model::Activation::Relu => Activation::Relu,
        remoe_model::Activation::ClampedSwiglu => Activation::ClampedSwiglu,
    }
}

/// Fetches the bytes of `experts` (layer, expert) in parallel, if the checkpoint's store is remote.
///
/// # Errors
/// An expert does not exist, or its bytes cannot be fetched.
pub fn prefetch_experts(checkpoint: &Checkpoint, experts: &[(usize, u32)]) -> Result<(), LoadError> {
    let tensors = experts
        .iter()
        .map(|&(layer, expert)| checkpoint.expert(layer, expert as usize))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(checkpoint.prefetch(tensors.iter().flat_map(MlpTensors::tensors))?)
}

/// Reads and packs `experts` (layer, expert) on `threads` threads. From a remote store, the bytes of all experts are
/// fetched first: many concurrent requests saturate a network, those of a few packing threads do not.
///
/// # Errors
/// The first expert that cannot be loaded.
pub fn load_experts(
    checkpoint: &Checkpoint,
    experts: &[(usize, u32)],
    class: impl Into<NumericsClass>,
    threads: usize,
) -> Result<Vec<(usize, u32, PackedExpert)>, LoadError> {
    prefetch_experts(checkpoint, experts)?;
    let class = class.into();
    in_parallel(experts.len(), threads, LoadError::Panicked, |index| {
        let (layer, expert) = experts[index];
        Ok((layer, expert, load_expert(checkpoint, layer, expert, class)?))
    })
}

/// Calls `work` with 0 to `count` - 1 on `threads` threads, or on fewer if the system refuses to start more. Returns the
/// results in order.
///
/// # Errors
/// An error of `work`, or `panicked` if `work` panicked.
pub fn in_parallel<T: Send, E: Send>(
    count: usize,
    threads: usize,
    panicked: E,
    work: impl Fn(usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let run_worker = || -> Result<Vec<(usize, T)>, E> {
        let mut results = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return Ok(results);
            }
            results.push((index, work(index)?));
        }
    };
    let mut results = std::thread::scope(|scope| {
        let threads = threads.clamp(1, count.max(1));
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, run_worker).ok();
        let workers: Vec<_> = (0..threads).map_while(spawn).collect();
        let mut results = Vec::with_capacity(count);
        if workers.is_empty() {
            results.extend(run_worker()?);
        }
        for worker in workers {
            match worker.join() {
                Ok(part) => results.extend(part?),
                Err(_) => return Err(panicked),
            }
        }
        Ok(results)
    })?;
    results.sort_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::path::Path;

    #[test]
    fn matrix_read_in_parts_by_threads_equals_the_whole() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let checkpoint = Checkpoint::open(fixtures.join("mixtral-basic")).unwrap();
        let tensor = checkpoint.head();
        let whole = load_matrix(&checkpoint, &[tensor], Dtype::F32, 1).unwrap();
        let (outputs, inputs) = (whole.outputs(), whole.inputs());
        let mut builder = PackedMatrixBuilder::new(outputs, inputs, Dtype::F32).unwrap();
        let pack_error = |source| LoadError::Matrix { tensor: tensor.name.to_string(), source };
        // A panel at a time.
        read_in_parts(&checkpoint, tensor, &mut builder, 1, 3, pack_error).unwrap();
        let parts = builder.finish().unwrap();
        let (mut expected, mut actual) = (vec![0; whole.input_bytes()], vec![0; whole.input_bytes()]);
        assert!(outputs > 64);
        for row in 0..outputs {
            whole.read_row(row, &mut expected).unwrap();
            parts.read_row(row, &mut actual).unwrap();
            assert_eq!(actual, expected, "row {row}");
        }
    }
}
