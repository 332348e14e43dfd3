//! Experts of a checkpoint in packed memory, and what is computed like them: where `model` (byte
//! ranges) and `kernels` (packed weights) meet, for both functions.
//!
//! Only the byte ranges of the wanted experts are read, through a small buffer, straight into the
//! packed form.

mod fp8;
mod nodes;
mod quantisation;
mod read;

pub use nodes::spread_over_nodes;
pub use quantisation::{QuantisationError, quantisation_errors};
pub use read::load_floats;
use read::{TensorReader, row_bytes};
use remoe_kernels::{
    Activation, Dtype, ExpertShape, KernelError, Matrix, NumericsClass, PackedExpert, PackedExpertBuilder,
    PackedMatrix, PackedMatrixBuilder, StoredDtype, WeightFormat,
};
use remoe_model::{Checkpoint, CheckpointError, ExpertBiases, ExpertsDtype, MlpTensors, TensorRef};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes of a matrix that a thread packs at a time.
const PART_BYTES: usize = 16 << 20;

/// Why experts could not be brought into memory.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Their bytes cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Their bytes cannot be packed.
    #[error("cannot pack expert {expert} of layer {layer}: {source}")]
    Kernel {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
        /// Why.
        source: KernelError,
    },
    /// The bytes of a dense layer or of shared experts cannot be packed.
    #[error("cannot pack {tensor} and its neighbours: {source}")]
    Gated {
        /// The up projection's name.
        tensor: String,
        /// Why.
        source: KernelError,
    },
    /// The bytes of another matrix cannot be packed.
    #[error("cannot pack {tensor}: {source}")]
    Matrix {
        /// Name of the matrix, or of the first of several.
        tensor: String,
        /// Why.
        source: KernelError,
    },
    /// Experts were to stay fp8, and are stored otherwise.
    #[error("cannot keep `{tensor}` as fp8: it is stored otherwise; omit --experts-dtype fp8")]
    NotFp8 {
        /// The tensor.
        tensor: String,
    },
    /// The layer or the expert does not exist.
    #[error("layer {layer} has no routed expert {expert} (it has {experts})")]
    NoSuchExpert {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
        /// How many routed experts the layer has.
        experts: usize,
    },
    /// A packing thread ended abnormally.
    #[error("a thread that packs experts panicked")]
    Panicked,
}

/// A compute dtype as users name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeDtype(pub Dtype);

/// A name that is no compute dtype.
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

/// [`experts_class`] of the experts of `checkpoint`, which can be kept so.
///
/// # Errors
/// They cannot: [`Checkpoint::check_experts_dtype`].
pub fn checked_experts_class(
    checkpoint: &Checkpoint,
    dtype: Dtype,
    experts: Option<ExpertsDtype>,
) -> Result<NumericsClass, CheckpointError> {
    let computed_in = match dtype {
        Dtype::F32 => remoe_model::StoredDtype::F32,
        Dtype::Bf16 => remoe_model::StoredDtype::Bf16,
    };
    checkpoint.check_experts_dtype(experts, computed_in)?;
    Ok(experts_class(dtype, experts))
}

/// Returns the numerics class of experts: in `dtype`, with weights quantised to `experts` where that is given.
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

/// The dtype to compute `checkpoint` in when nothing else is said: its own, float32 for float16.
pub fn default_dtype(checkpoint: &Checkpoint) -> Dtype {
    match checkpoint.config().dtype {
        remoe_model::StoredDtype::Bf16 => Dtype::Bf16,
        remoe_model::StoredDtype::F32 | remoe_model::StoredDtype::F16 => Dtype::F32,
    }
}

/// The shape of a routed expert of `layer`, computed as `class` says.
///
/// # Errors
/// The layer has no such expert, or its sizes are beyond what the kernels take.
pub fn expert_shape(
    checkpoint: &Checkpoint,
    layer: usize,
    expert: u32,
    class: impl Into<NumericsClass>,
) -> Result<ExpertShape, LoadError> {
    let config = checkpoint.config();
    let facts = config.moe(layer).filter(|moe| (expert as usize) < moe.experts);
    let Some(moe) = facts else {
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

/// Reads expert `expert` of `layer` and packs it for computing as `class` says.
///
/// # Errors
/// There is no such expert, or its weights cannot be read or packed.
pub fn load_expert(
    checkpoint: &Checkpoint,
    layer: usize,
    expert: u32,
    class: impl Into<NumericsClass>,
) -> Result<PackedExpert, LoadError> {
    let shape = expert_shape(checkpoint, layer, expert, class)?;
    let tensors = checkpoint.expert(layer, expert as usize)?;
    let refused = |source| LoadError::Kernel { layer, expert, source };
    pack(checkpoint, shape, &tensors, refused)
}

/// Reads a dense layer or shared experts and packs them as one expert for computing as `class` says.
///
/// # Errors
/// The weights cannot be read or packed.
pub fn load_gated(
    checkpoint: &Checkpoint,
    tensors: &MlpTensors,
    class: impl Into<NumericsClass>,
) -> Result<PackedExpert, LoadError> {
    let refused = |source| LoadError::Gated { tensor: tensors.up.weight.name.to_string(), source };
    let width = tensors.up.weight.shape.first().copied().unwrap_or(0);
    let config = checkpoint.config();
    let shape =
        ExpertShape::new(config.hidden_size, width, class, activation(config.activation)).map_err(refused)?;
    pack(checkpoint, shape, tensors, refused)
}

/// Reads matrices of the same inputs and packs them, one below the other, for computing as `class` says. They go
/// straight into the packed form: beside it there are never more than some rows in memory. A single large one is read
/// by `threads` threads.
///
/// # Errors
/// The weights cannot be read or packed.
pub fn load_matrix(
    checkpoint: &Checkpoint,
    parts: &[&TensorRef],
    class: impl Into<NumericsClass>,
    threads: usize,
) -> Result<PackedMatrix, LoadError> {
    let refused = |source| {
        let tensor = parts.first().map(|part| part.name.to_string()).unwrap_or_default();
        LoadError::Matrix { tensor, source }
    };
    let outputs = parts.iter().filter_map(|part| part.shape.first()).sum();
    let inputs = parts.first().and_then(|part| part.shape.last()).copied().unwrap_or(0);
    let mut builder = PackedMatrixBuilder::new(outputs, inputs, class).map_err(refused)?;
    match parts {
        [tensor] if tensor.strides.is_none() && tensor.bytes >= 2 * PART_BYTES as u64 && threads > 1 => {
            read_in_parts(checkpoint, tensor, &mut builder, PART_BYTES, threads, refused)?;
        }
        _ => {
            let mut reader = TensorReader::new(checkpoint);
            for part in parts {
                let stored = stored_dtype(part.dtype);
                reader.rows(part, |_, bytes| builder.rows(stored, bytes).map_err(refused))?;
            }
        }
    }
    builder.finish().map_err(refused)
}

/// Reads a matrix, whose rows lie one after the other, into `builder`: `threads` threads take parts of about
/// `part_bytes`.
fn read_in_parts(
    checkpoint: &Checkpoint,
    tensor: &TensorRef,
    builder: &mut PackedMatrixBuilder,
    part_bytes: usize,
    threads: usize,
    refused: impl Fn(KernelError) -> LoadError + Sync,
) -> Result<(), LoadError> {
    let stored = stored_dtype(tensor.dtype);
    let parts: Vec<_> = builder.parts(part_bytes / row_bytes(tensor).max(1)).map(Mutex::new).collect();
    in_parallel(parts.len(), threads, LoadError::Panicked, |index| {
        // Each has one thread.
        let mut part = parts[index].lock().unwrap_or_else(PoisonError::into_inner);
        let rows = part.range();
        let take = |_, bytes: &[u8]| part.rows(stored, bytes).map_err(&refused);
        TensorReader::new(checkpoint).in_order(tensor, rows, take)
    })?;
    Ok(())
}

/// Reads the projections and packs them.
fn pack(
    checkpoint: &Checkpoint,
    shape: ExpertShape,
    tensors: &MlpTensors,
    refused: impl Fn(KernelError) -> LoadError,
) -> Result<PackedExpert, LoadError> {
    let stored = stored_dtype(tensors.up.weight.dtype);
    let mut builder = PackedExpertBuilder::new(shape, stored).map_err(&refused)?;
    checkpoint.prefetch(tensors.tensors())?;
    let mut reader = TensorReader::new(checkpoint);
    let linears =
        || Matrix::ALL.into_iter().zip(tensors.linears()).filter_map(|(matrix, l)| Some((matrix, l?)));
    for (matrix, linear) in linears() {
        if shape.class().weights == WeightFormat::Fp8 {
            fp8::pack(checkpoint, &linear.weight, matrix, &mut builder, &refused)?;
            continue;
        }
        reader.rows(&linear.weight, |row, bytes| builder.rows(matrix, row, bytes).map_err(&refused))?;
    }
    for (matrix, linear) in linears() {
        if let Some(bias) = &linear.bias {
            builder.biases(matrix, &load_floats(checkpoint, bias)?).map_err(&refused)?;
        }
    }
    builder.finish().map_err(refused)
}

/// The kernels' name of a checkpoint's element type.
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

/// Brings the bytes of `experts` (layer, expert) near where they are far, all at once.
///
/// # Errors
/// There is no such expert, or its bytes cannot be had.
pub fn prefetch_experts(checkpoint: &Checkpoint, experts: &[(usize, u32)]) -> Result<(), LoadError> {
    let tensors = experts
        .iter()
        .map(|&(layer, expert)| checkpoint.expert(layer, expert as usize))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(checkpoint.prefetch(tensors.iter().flat_map(MlpTensors::tensors))?)
}

/// Reads and packs `experts` (layer, expert) on `threads` threads. Where they come from afar, the bytes of
/// all are fetched first: many requests at a time fill a network, the few of the packing threads do not.
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

/// Does `work` for 0 to `count` - 1 on `threads` threads, or on fewer where the system gives fewer, and
/// returns what came of it, in that order.
///
/// # Errors
/// An error of `work`, or `panicked` where it panicked.
pub fn in_parallel<T: Send, E: Send>(
    count: usize,
    threads: usize,
    panicked: E,
    work: impl Fn(usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let take = || -> Result<Vec<(usize, T)>, E> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return Ok(done);
            }
            done.push((index, work(index)?));
        }
    };
    let mut all = std::thread::scope(|scope| {
        let threads = threads.clamp(1, count.max(1));
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, take).ok();
        let workers: Vec<_> = (0..threads).map_while(spawn).collect();
        let mut all = Vec::with_capacity(count);
        if workers.is_empty() {
            all.extend(take()?);
        }
        for worker in workers {
            match worker.join() {
                Ok(done) => all.extend(done?),
                Err(_) => return Err(panicked),
            }
        }
        Ok(all)
    })?;
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, done)| done).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::path::Path;

    #[test]
    fn a_matrix_that_threads_read_in_parts_is_the_same() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let checkpoint = Checkpoint::open(fixtures.join("mixtral-basic")).unwrap();
        let tensor = checkpoint.head();
        let whole = load_matrix(&checkpoint, &[tensor], Dtype::F32, 1).unwrap();
        let (outputs, inputs) = (whole.outputs(), whole.inputs());
        let mut builder = PackedMatrixBuilder::new(outputs, inputs, Dtype::F32).unwrap();
        let refused = |source| LoadError::Matrix { tensor: tensor.name.to_string(), source };
        // A panel at a time.
        read_in_parts(&checkpoint, tensor, &mut builder, 1, 3, refused).unwrap();
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
