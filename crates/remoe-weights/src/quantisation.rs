//! Quantisation errors: compares quantised experts with those that a checkpoint stores.

use crate::{LoadError, expert_shape, experts_class, load_expert, load_floats};
use remoe_kernels::quantise::quantised_weights;
use remoe_kernels::{Dtype, ExpertJob, PackedExpert, Pool};
use remoe_model::{Checkpoint, ExpertsDtype};

/// Relative errors: the root mean square of the differences, divided by that of the values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantisationError {
    /// Error of the weights of the projections.
    pub weights: f64,
    /// Error of the outputs of experts.
    pub outputs: f64,
}

/// Sums of squares of differences, and of values.
#[derive(Default)]
struct Squares {
    differences: f64,
    values: f64,
}

impl Squares {
    fn add(&mut self, values: &[f32], quantised: &[f32]) {
        for (value, quantised) in values.iter().zip(quantised) {
            self.differences += (f64::from(*value) - f64::from(*quantised)).powi(2);
            self.values += f64::from(*value).powi(2);
        }
    }

    /// Returns the relative error, or 0 if all values are zero.
    fn relative_error(&self) -> f64 {
        if self.values > 0.0 { (self.differences / self.values).sqrt() } else { 0.0 }
    }
}

/// Quantises `experts` of `layer` to each of `formats`, and compares weights and outputs with the unquantised experts.
///
/// Outputs are computed in float32 for `rows` rows of pseudo-random numbers from a standard normal distribution, the same
/// in every call.
///
/// # Errors
/// The experts cannot be read or computed.
pub fn quantisation_errors<const N: usize>(
    checkpoint: &Checkpoint,
    layer: usize,
    experts: &[u32],
    formats: [ExpertsDtype; N],
    rows: usize,
    pool: &Pool,
) -> Result<[QuantisationError; N], LoadError> {
    let mut comparisons = formats
        .map(|format| (experts_class(Dtype::F32, Some(format)), Squares::default(), Squares::default()));
    for &expert in experts {
        let tensors = checkpoint.expert(layer, expert as usize)?;
        for tensor in tensors.linears().into_iter().flatten().map(|linear| &linear.weight) {
            let floats = load_floats(checkpoint, tensor)?;
            let columns = tensor.shape.last().copied().unwrap_or(1).max(1);
            for row in floats.chunks(columns) {
                for (class, weights, _) in &mut comparisons {
                    weights.add(row, &quantised_weights(row, class.weights));
                }
            }
        }
        let hidden = expert_shape(checkpoint, layer, expert, Dtype::F32)?.hidden();
        let inputs = normal_rows(rows * hidden);
        let compute = |packed: &PackedExpert| {
            let row_index: Vec<u32> = (0..).take(rows).collect();
            let mut output = vec![0; inputs.len()];
            let job =
                ExpertJob { expert: packed, inputs: &inputs, row_index: &row_index, output: &mut output };
            pool.forward(&mut [job]).map_err(|source| LoadError::Kernel { layer, expert, source })?;
            Ok::<Vec<f32>, LoadError>(output.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect())
        };
        let exact = compute(&load_expert(checkpoint, layer, expert, Dtype::F32)?)?;
        for (class, _, outputs) in &mut comparisons {
            outputs.add(&exact, &compute(&load_expert(checkpoint, layer, expert, *class)?)?);
        }
    }
    Ok(comparisons.map(|(_, weights, outputs)| QuantisationError {
        weights: weights.relative_error(),
        outputs: outputs.relative_error(),
    }))
}

/// Returns the bytes of `count` float32 that are nearly normally distributed: sums of twelve uniform numbers.
fn normal_rows(count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..count).flat_map(|_| ((0..12).map(|_| uniform()).sum::<f32>() - 6.0).to_le_bytes()).collect()
}
