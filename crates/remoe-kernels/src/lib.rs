//! CPU kernels for the experts of Mixture-of-Experts layers, for matrix products, attention and element-wise operations.
//! No I/O.
//!
//! An expert computes `out = (act(x Gate^T) * (x Up^T)) Down^T`, or `out = act(x Up^T) Down^T` without a gate. One call
//! takes one or more experts with one or more tokens each. Products are `out = x W^T`.
//!
//! [`PackedExpert`] and [`PackedMatrix`] hold weights in the order in which kernels read them; [`Pool`] computes. The
//! result for experts is one row per (token, expert), not yet weighted by the router's scores.
//!
//! ```
//! use remoe_kernels::{Activation, Dtype, ExpertJob, ExpertShape, PackedExpert, Pool, PoolConfig, StoredDtype};
//!
//! # fn main() -> Result<(), remoe_kernels::KernelError> {
//! let shape = ExpertShape::new(64, 48, Dtype::F32, Activation::Silu)?;
//! let weights = vec![0u8; 64 * 48 * 4];
//! let expert = PackedExpert::pack(shape, StoredDtype::F32, &weights, &weights, &weights)?;
//! let pool = Pool::new(PoolConfig::default())?;
//! let inputs = vec![0u8; 3 * shape.row_bytes()];
//! let mut output = vec![0u8; 2 * shape.row_bytes()];
//! pool.forward(&mut [ExpertJob { expert: &expert, inputs: &inputs, row_index: &[2, 0], output: &mut output }])?;
//! # Ok(())
//! # }
//! ```
//!
//! # Numerics: within a class, all instruction paths give the same bits
//!
//! A row's result depends only on the row, the weights, the activation and the [`NumericsClass`] (the element type of
//! rows and the format of weights). It does not depend on other rows of the call, the number of threads, the instruction
//! path or how the work is split. [`numerics`] has the scalar definition. K is the dimension that is summed over.
//!
//! 1. Sums are float32 and start at +0. K ascends in pairs, and the odd element of each pair comes first:
//!    `acc = fma(x[2p+1], w[2p+1], acc)`, then `acc = fma(x[2p], w[2p], acc)`. K is never split. If K is odd, a zero
//!    element is appended to both sides.
//! 2. Every operation rounds to nearest even. Denormal operands count as zero, and results that are tiny after rounding
//!    become zero, both with their sign. The bfloat16 dot product of AVX-512 does so by itself; the other vector paths
//!    set the processor's flush modes while they run, and the portable path computes it.
//! 3. `e^x` is one fixed sequence of operations ([`activations::exp`]). The activations use it and IEEE division.
//! 4. In float32, `h = act(gate) * up`, and the sum of the down projection is the result. In bfloat16, these are each
//!    rounded once, to nearest even: the sums of gate and up, the activation, the product `h`, and the sum of the down
//!    projection. A bias is added to the rounded sum, and the sum is rounded again. The factor that a clamped SwiGLU
//!    computes from the up projection is rounded, too. Without a gate, `h = act(up)`, with the same roundings.
//! 5. Every NaN that is stored has the same bits (0x7fc00000, 0x7fc0).
//!
//! With quantised weights ([`WeightFormat::Int8`], [`WeightFormat::Int4`], [`WeightFormat::Mxfp4`]), rows and weights are
//! integers with a scale for every 32 elements of K ([`quantise`]), and another rule replaces rule 1. The products of a
//! group are summed exactly, groups ascend, and `acc = fma(sum, scale of w * scale of x, acc)`; the product of the
//! scales is rounded first. Intermediate rows are quantised after the roundings of rule 4. Results are not quantised.
//!
//! Weights that stay fp8 ([`WeightFormat::Fp8`]) are decoded at each use, to the elements that [`WeightFormat::Plain`]
//! would hold, and summed by rule 1. So their results have the same bits.
//!
//! Since bits do not depend on the path, only speed decides between paths. [`PathChoice`] measures it when a class is
//! first used, and for single rows again during work, on the model's own weights. A path that does not give the portable
//! path's bits on this machine is not used.
//!
//! # Layout
//!
//! Weights are packed in panels of 64 output columns, K ascending. All paths read the same packed form:
//!
//! | weights | layout of a panel |
//! | --- | --- |
//! | bfloat16 | `[K/2][64][2]` |
//! | float32 | `[K/2][2][64]` |
//! | int8 | groups of 32 elements of K with their scales: 2176 bytes for 64 columns |
//! | int4, mxfp4 | the same: 1152 bytes |
//! | fp8 | 32 codes of K with their scales: 2112 bytes |
//!
//! Vector lanes are output columns, so that no sum is spread over lanes. A panel of the gate and up projections holds 32
//! gate columns and the 32 matching up columns, and produces 32 intermediate values. Without a gate it holds 64 up
//! columns and produces 64.
//!
//! # Limits
//!
//! [`MAX_DIMENSION`], [`MAX_JOBS`], [`MAX_ROWS`] and [`MAX_THREADS`]: exceeding one is a typed error.
//! [`ExpertShape::scratch_bytes_per_row`] tells the scratch memory that a call needs.

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
pub use expert_matrix::ExpertMatrix;
pub use fp8::Fp8Scales;
pub use instruction_path::InstructionPath;
pub use kv_cache::{CACHE_GROUP, CacheFormat, PAGE_POSITIONS};
pub use matrix::{MAX_OUTPUTS, MatrixPart, PackedMatrix, PackedMatrixBuilder};
pub use memory::spread_over_nodes;
pub use pack::{PackedExpert, PackedExpertBuilder};
pub use paths::{PathChoice, wrong_paths};
pub use plan::{ExpertJob, MAX_JOBS, MAX_ROWS, MatrixProduct};
pub use pool::{DEFAULT_POLL, MAX_THREADS, Pool, PoolConfig};
pub use shape::{ExpertShape, MAX_DIMENSION};
pub use suspended::SuspendedRows;
pub use vectors::{VectorisedWork, run_vectorised};
