//! Operations on the rows of a prompt of 512 tokens.

use super::{bytes, checksum, cpu_seconds, numbers, pool};
use remoe_kernels::Dtype;
use remoe_kernels::elementwise::{Norm, NormForm, Rotation, RowOperation};

const ROWS: usize = 512;
const WIDTH: usize = 2048;
const CALLS: usize = 40;

/// Measures the operation `name`: CPU seconds of a call, bytes that it reads and writes, their unit, and a checksum.
pub(super) fn measure(name: &str) -> (f64, f64, &'static str, u64) {
    let x = bytes(Dtype::Bf16, numbers(ROWS * WIDTH, 1));
    let y = bytes(Dtype::Bf16, numbers(ROWS * WIDTH, 2));
    let weight: Vec<f32> = numbers(WIDTH, 3).collect();
    let (half, head_dim) = (64, 128);
    let (cos, sin): (Vec<f32>, Vec<f32>) =
        (numbers(ROWS * half, 4).collect(), numbers(ROWS * half, 5).collect());
    let operation = match name {
        "norm" => {
            let norm = Norm { form: NormForm::Rms, weight: &weight, bias: &[], epsilon: 1e-5 };
            RowOperation::Norm { from: &y, norm }
        }
        "rotate" => RowOperation::Rotate(Rotation {
            cos: &cos,
            sin: &sin,
            half,
            head_dim,
            is_interleaved: false,
            dtype: Dtype::Bf16,
        }),
        _ => RowOperation::AddRows(&y),
    };
    let pool = pool(None);
    let mut rows = x;
    let begin = cpu_seconds();
    for _ in 0..CALLS {
        pool.apply(&operation, Dtype::Bf16, WIDTH, &mut rows).expect("an operation");
    }
    let seconds = (cpu_seconds() - begin) / CALLS as f64;
    (seconds, 2.0 * rows.len() as f64, "GB/s", checksum(0, &rows))
}
