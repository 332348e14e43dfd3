//! Operations on rows: their results for each element, with any number of threads.

use remoe_kernels::elementwise::{Norm, NormForm, Rotation, RowOperation, narrow, widen};
use remoe_kernels::numerics::round_bf16;
use remoe_kernels::{Dtype, Pool, PoolConfig};

const ROWS: usize = 70;
const WIDTH: usize = 600;

fn pool(threads: usize) -> Pool {
    Pool::new(PoolConfig { threads, ..PoolConfig::default() }).unwrap()
}

/// Returns numbers that `dtype` can represent, among them infinities, NaN and rounding ties if `is_wild`.
fn numbers(dtype: Dtype, count: usize, seed: usize, is_wild: bool) -> Vec<f32> {
    let number = |i: usize| match (is_wild, i % 97) {
        (true, 13) => f32::INFINITY,
        (true, 29) => f32::NAN,
        _ => ((i * 7919 + seed * 104_729) % 65_521) as f32 / 8_000.0 - 4.0,
    };
    (0..count).map(|i| rounded(dtype, number(i))).collect()
}

fn rounded(dtype: Dtype, x: f32) -> f32 {
    if dtype == Dtype::Bf16 { round_bf16(x) } else { x }
}

fn bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.bytes()];
    narrow(dtype, values, &mut bytes);
    bytes
}

/// Applies `operation` with one thread and with three, and compares the result with `expected` for each row and column.
fn check(dtype: Dtype, x: &[f32], operation: &RowOperation<'_>, expected: impl Fn(usize, usize) -> f32) {
    let all: Vec<f32> = (0..ROWS * WIDTH).map(|i| expected(i / WIDTH, i % WIDTH)).collect();
    for threads in [1, 3] {
        let mut rows = bytes(dtype, x);
        pool(threads).apply(operation, dtype, WIDTH, &mut rows).unwrap();
        let mut found = vec![0.0; all.len()];
        widen(dtype, &rows, &mut found);
        for (i, (found, expected)) in found.iter().zip(&all).enumerate() {
            let expected = rounded(dtype, *expected);
            let is_same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
            assert!(is_same, "{operation:?}, {dtype}, element {i}: {found} for {expected}");
        }
    }
}

#[test]
fn simple_operations_act_on_each_element_alone() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let x = numbers(dtype, ROWS * WIDTH, 1, true);
        let y = numbers(dtype, ROWS * WIDTH, 2, true);
        let at = |row: usize, column: usize| x[row * WIDTH + column];
        let others = bytes(dtype, &y);
        check(dtype, &x, &RowOperation::AddRows(&others), |r, c| at(r, c) + y[r * WIDTH + c]);
        check(dtype, &x, &RowOperation::AddRow(&y[..WIDTH]), |r, c| at(r, c) + y[c]);
        check(dtype, &x, &RowOperation::Clamp(1.5), |r, c| at(r, c).clamp(-1.5, 1.5));
        check(dtype, &x, &RowOperation::Scale(0.3), |r, c| at(r, c) * 0.3);
        check(dtype, &x, &RowOperation::ScaleRows(&y[30..30 + ROWS]), |r, c| at(r, c) * y[30 + r]);
    }
}

#[test]
fn rotations_round_products_before_adding_them() {
    let (half, head_dim) = (9, 24);
    for (dtype, products) in [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::Bf16, Dtype::F32)]
    {
        let x = numbers(dtype, ROWS * WIDTH, 1, true);
        let (cos, sin) = (numbers(products, ROWS * half, 3, false), numbers(products, ROWS * half, 4, false));
        for is_interleaved in [false, true] {
            let rotation = Rotation { cos: &cos, sin: &sin, half, head_dim, is_interleaved, dtype: products };
            check(dtype, &x, &RowOperation::Rotate(rotation), |r, c| {
                let Some(place) = (c % head_dim).checked_sub(head_dim - 2 * half) else {
                    return x[r * WIDTH + c];
                };
                let pair = if is_interleaved { place / 2 } else { place % half };
                let is_first = if is_interleaved { place % 2 == 0 } else { place < half };
                let apart = if is_interleaved { 1 } else { half };
                let (cos, sin) = (cos[r * half + pair], sin[r * half + pair]);
                let own = x[r * WIDTH + c];
                let other = if is_first { x[r * WIDTH + c + apart] } else { x[r * WIDTH + c - apart] };
                let turned = if is_first { -other * sin } else { other * sin };
                rounded(products, own * cos) + rounded(products, turned)
            });
        }
    }
}

#[test]
fn norms_sum_squares_in_sixteen_lanes() {
    let width = 200;
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (x, from) = (numbers(dtype, ROWS * WIDTH, 1, false), numbers(dtype, ROWS * WIDTH, 5, false));
        let (weight, bias) = (numbers(dtype, width, 6, false), numbers(dtype, width, 7, false));
        let stored = bytes(dtype, &from);
        let mean = |x: &[f32], middle: f32| {
            let mut lanes = [0.0_f32; 16];
            x.iter().enumerate().for_each(|(i, x)| lanes[i % 16] += (x - middle) * (x - middle));
            for half in [8, 4, 2, 1] {
                (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
            }
            lanes[0] / x.len() as f32
        };
        for form in [NormForm::Rms, NormForm::RmsInFloat32] {
            let norm = Norm { form, weight: &weight, bias: &[], epsilon: 1e-5 };
            check(dtype, &x, &RowOperation::Norm { from: &stored, norm }, |r, c| {
                let part = &from[r * WIDTH + c / width * width..][..width];
                let factor = 1.0 / (mean(part, 0.0) + 1e-5).sqrt();
                let normed = part[c % width] * factor;
                let between = if form == NormForm::Rms { rounded(dtype, normed) } else { normed };
                between * weight[c % width]
            });
        }
        let norm = Norm { form: NormForm::Layer, weight: &weight, bias: &bias, epsilon: 1e-5 };
        let mut rows = bytes(dtype, &x);
        pool(2).apply(&RowOperation::Norm { from: &stored, norm }, dtype, WIDTH, &mut rows).unwrap();
        let mut found = vec![0.0; ROWS * WIDTH];
        widen(dtype, &rows, &mut found);
        for (part, found) in from.chunks(width).zip(found.chunks(width)) {
            let middle = part.iter().sum::<f32>() / width as f32;
            let factor = 1.0 / (mean(part, middle) + 1e-5).sqrt();
            for (i, found) in found.iter().enumerate() {
                let expected = (part[i] - middle) * factor * weight[i] + bias[i];
                assert!((found - expected).abs() <= 0.01 * expected.abs().max(1.0), "{found} for {expected}");
            }
        }
    }
}

#[test]
fn operands_of_wrong_length_are_refused() {
    let row = [0.0; 12];
    let rotation =
        Rotation { cos: &row, sin: &row, half: 6, head_dim: 12, is_interleaved: false, dtype: Dtype::F32 };
    let norm = Norm { form: NormForm::Rms, weight: &row[..5], bias: &[], epsilon: 0.0 };
    let wrong = [
        RowOperation::AddRow(&row[1..]),
        RowOperation::AddRows(&[0; 95]),
        RowOperation::ScaleRows(&row[..1]),
        RowOperation::Norm { from: &[0; 96], norm },
        RowOperation::Norm { from: &[0; 95], norm: Norm { weight: &row, ..norm } },
        RowOperation::Norm { from: &[0; 96], norm: Norm { weight: &row, form: NormForm::Layer, ..norm } },
        RowOperation::Rotate(Rotation { cos: &row[1..], ..rotation }),
        RowOperation::Rotate(Rotation { head_dim: 7, ..rotation }),
        RowOperation::Rotate(Rotation { half: 7, ..rotation }),
    ];
    let pool = pool(1);
    for operation in wrong {
        assert!(pool.apply(&operation, Dtype::F32, 12, &mut [0; 96]).is_err(), "{operation:?}");
    }
    assert!(pool.apply(&RowOperation::Scale(1.0), Dtype::F32, 12, &mut [0; 95]).is_err());
    pool.apply(&RowOperation::Rotate(rotation), Dtype::F32, 12, &mut [0; 96]).unwrap();
    pool.apply(&RowOperation::Scale(1.0), Dtype::F32, 12, &mut []).unwrap();
}
