//! CPU kernels for one expert of a Mixture-of-Experts layer: `out = (act(x Gate^T) * (x Up^T)) Down^T`, or `out = act(x Up^T) Down^T` where it has no gate, for one token or many, for one expert or many in one call; and for plain products `out = x W^T`. No I/O.
//!
//! [`PackedExpert`] and [`PackedMatrix`] hold weights in the order in which they are read; [`Pool`] computes. What comes back of experts is one row per (token, expert), unweighted.
//!
//! ```
//! use remoe_kernels::{Activation, Dtype, ExpertShape, Job, PackedExpert, Pool, PoolConfig, StoredDtype};
//!
//! # fn main() -> Result<(), remoe_kernels::KernelError> {
//! let shape = ExpertShape::new(64, 48, Dtype::F32, Activation::Silu)?;
//! let weights = vec![0u8; 64 * 48 * 4];
//! let expert = PackedExpert::pack(shape, StoredDtype::F32, &weights, &weights, &weights)?;
//! let pool = Pool::new(PoolConfig::default())?;
//! let inputs = vec![0u8; 3 * shape.row_bytes()];
//! let mut output = vec![0u8; 2 * shape.row_bytes()];
//! pool.forward(&mut [Job { expert: &expert, inputs: &inputs, row_index: &[2, 0], output: &mut output }])?;
//! # Ok(())
//! # }
//! ```
//!
//! # Numerics: within a class, every path the same bits
//!
//! The result of a row is a function of the row, the weights, the activation and the [`NumericsClass`], which is the type of rows and the form of weights, alone. It depends on no other row of the call, nor on the number of threads, the instruction path or how the work was split. A scalar definition is in [`numerics`]:
//!
//! 1. Sums are float32 and start at +0. K ascends in pairs; of each pair the odd element comes first: `acc = fma(x[2p+1], w[2p+1], acc)`, then `acc = fma(x[2p], w[2p], acc)`. K is never split; where it is odd, a zero element is appended to both sides.
//! 2. Every operation rounds to nearest even. Denormal operands count as zero, and results that are tiny after rounding become zero, both with their sign. That is what the bfloat16 dot product of AVX-512 does; the other vector paths set the processor's flush modes while they run, and the portable path computes it.
//! 3. `e^x` is computed by this crate, by one sequence of operations ([`activations::exp`]); the activations are built on it, with IEEE division.
//! 4. In float32, `h = act(gate) * up`, and the sum of the down projection is the result. In bfloat16, the sums of gate and up are rounded to bfloat16, then the activation, then the product `h`, then the sum of the down projection: each once, to nearest even. A bias is added to a sum after it was rounded, and rounded again; what a clamped SwiGLU makes of the up projection is rounded, too. Where there is no gate, `h = act(up)`, rounded alike.
//! 5. Every NaN that is stored is the same one (0x7fc00000, 0x7fc0).
//!
//! Where weights are quantised ([`WeightFormat::Int8`], [`WeightFormat::Int4`], [`WeightFormat::Mxfp4`]), rows and weights are integers with a scale for every 32 elements of K ([`quantise`]), and rule 1 is another one: the products of a group are summed exactly, groups ascend, and `acc = fma(sum, scale of w * scale of x, acc)`, the product of the scales rounded
//! by itself. Rows of intermediate values become integers after the roundings of rule 4; results are elements as ever.
//!
//! Weights that stay fp8 ([`WeightFormat::Fp8`]) are decoded where they are used, to what [`WeightFormat::Plain`] holds of them, and summed by rule 1: they are of the same class as those.
//!
//! Because the bits do not depend on the path, the path is a matter of speed alone: [`PathChoice`] measures it at the start, and for one row again at work, in the weights that are used. A path that does not give the portable path's bits on the machine at hand is not used.
//!
//! # Layout
//!
//! Weights are packed in panels of 64 output columns, K ascending: for bfloat16 `[K/2][64][2]`, for float32 `[K/2][2][64]`, for integers groups of 32 with their scales (int8: 2176 bytes a group of 64 columns, int4 and mxfp4: 1152), for fp8 32 codes of K with their scales (2112 bytes). Lanes are output columns, so that no sum is ever spread over lanes. A panel of the first phase holds 32 gate columns and the
//! 32 up columns that belong to them, and produces 32 finished intermediate values; without a gate it holds 64 up columns and produces as many. All paths read the same packed form.
//!
//! # Limits
//!
//! [`MAX_DIMENSION`], [`MAX_JOBS`], [`MAX_ROWS`], [`MAX_THREADS`]; everything beyond is a typed error. Scratch memory follows from [`ExpertShape::scratch_bytes_per_row`].

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

#[cfg(not(target_endian = "little"))]
compile_error!("weights and rows are little-endian and used in place");

pub mod activations;
mod attention;
mod attention_shape;
mod class;
#[cfg(target_os = "linux")]
mod cores;
mod dtype;
mod elements;
pub mod elementwise;
mod error;
mod expert_matrix;
mod fp8;
mod instruction_path;
mod kv_cache;
mod matrix;
mod memory;
pub mod numerics;
mod pack;
mod panels;
mod paths;
mod phase;
mod plan;
mod pool;
pub mod quantise;
mod shape;
mod signal;
mod suspended;
mod threads;
mod transpose;
mod vectors;

pub use attention::{AttentionSpan, KvPage};
pub use attention_shape::AttentionShape;
pub use class::{NumericsClass, WeightFormat};
pub use dtype::{Activation, Dtype, StoredDtype};
pub use error::KernelError;
pub use expert_matrix::Matrix;
pub use fp8::Fp8Scales;
pub use instruction_path::InstructionPath;
pub use kv_cache::{CACHE_GROUP, CacheFormat, PAGE_POSITIONS};
pub use matrix::{MAX_OUTPUTS, MatrixPart, PackedMatrix, PackedMatrixBuilder};
pub use memory::spread_over_nodes;
pub use pack::{PackedExpert, PackedExpertBuilder};
pub use paths::{PathChoice, wrong_paths};
pub use plan::{Job, MAX_JOBS, MAX_ROWS, Product};
pub use pool::{DEFAULT_POLL, MAX_THREADS, Pool, PoolConfig};
pub use shape::{ExpertShape, MAX_DIMENSION};
pub use suspended::SuspendedRows;
pub use vectors::{Loops, by_vectors};
