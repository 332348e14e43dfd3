//! Quantised weights: each path, number of threads and batch gives the bits of the reference.

use crate::common;

use common::{
    Data, Expert, SplitMix64, bits, check, dot_in, forward, integers, pool, pools, stored_bits, to_bytes,
};
use proptest::prelude::*;
use remoe_kernels::quantise::{GROUP, quantised_weights};
use remoe_kernels::{
    Activation, Dtype, ExpertJob, ExpertMatrix, ExpertShape, KernelError, MatrixProduct, NumericsClass,
    PackedExpertBuilder, PackedMatrix, PackedMatrixBuilder, StoredDtype, WeightFormat,
};

fn classes() -> impl Iterator<Item = NumericsClass> {
    NumericsClass::ALL.into_iter().filter(|class| WeightFormat::QUANTISED.contains(&class.weights))
}

#[test]
fn quantised_experts_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(21);
    let activations = [Activation::Silu, Activation::GeluTanh, Activation::Relu, Activation::ClampedSwiglu];
    for class in classes() {
        for (hidden, width) in [(1, 1), (2, 31), (5, 33), (31, 7), (32, 32), (33, 64), (65, 65), (130, 40)] {
            for data in Data::ALL {
                let activation = activations[random.below(4)];
                let expert = Expert::new(&mut random, data, hidden, width, class, activation);
                let rows = 1 + random.below(14);
                check(&pools, &mut random, data, &expert, rows);
            }
        }
        let expert = Expert::new(&mut random, Data::Ordinary, 512, 96, class, Activation::Silu);
        for rows in [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 40, 48, 49, 97] {
            check(&pools, &mut random, Data::Ordinary, &expert, rows);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_quantised_expert_gives_the_reference_bits(
        seed in any::<u64>(),
        hidden in 1usize..150,
        width in 1usize..100,
        rows in 1usize..30,
        kind in 0usize..4,
        class in 2usize..8,
    ) {
        let mut random = SplitMix64(seed);
        let (data, class) = (Data::ALL[kind], NumericsClass::ALL[class]);
        let expert = Expert::new(&mut random, data, hidden, width, class, Activation::Silu);
        check(&pools(), &mut random, data, &expert, rows);
    }
}

/// Paths with narrow vectors split only panels of this depth into chunks.
#[test]
fn deep_quantised_experts_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(23);
    for class in classes() {
        let expert = Expert::new(&mut random, Data::Ordinary, 11_500, 1, class, Activation::Silu);
        for rows in [3, 4, 5, 6, 13] {
            check(&pools, &mut random, Data::Ordinary, &expert, rows);
        }
    }
}

#[test]
fn quantised_products_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(22);
    for class in classes() {
        for (outputs, inputs, rows) in [(1, 1, 1), (65, 33, 2), (100, 128, 7), (64, 300, 13), (3, 11_500, 49)]
        {
            for data in Data::ALL {
                let dtype = class.dtype;
                let weights: Vec<Vec<f32>> =
                    (0..outputs).map(|_| data.vector(&mut random, inputs, dtype)).collect();
                let x: Vec<Vec<f32>> = (0..rows).map(|_| data.vector(&mut random, inputs, dtype)).collect();
                let dot = |x: &Vec<f32>, w| stored_bits(dot_in(class.weights, x, w), dtype);
                let expected: Vec<u32> = x.iter().flat_map(|x| weights.iter().map(|w| dot(x, w))).collect();
                let packed = to_bytes(&weights.concat(), dtype);
                let matrix = PackedMatrix::pack(inputs, class, &[(dtype.into(), &packed)]).unwrap();
                let x = to_bytes(&x.concat(), dtype);
                for pool in &pools {
                    let mut output = vec![0xaa; expected.len() * dtype.bytes()];
                    let mut product = [MatrixProduct { matrix: &matrix, inputs: &x, output: &mut output }];
                    pool.multiply(&mut product).unwrap();
                    assert_eq!(
                        bits(&output, dtype),
                        expected,
                        "{} {class} {outputs} x {inputs}",
                        pool.paths(class)
                    );
                }
            }
        }
    }
}

/// Several experts of a call share tokens, which come from different buffers.
#[test]
fn jobs_with_shared_and_own_rows_give_the_reference_bits() {
    let mut random = SplitMix64(23);
    for class in classes() {
        let experts: Vec<Expert> = (0..3)
            .map(|_| Expert::new(&mut random, Data::Ordinary, 70, 33, class, Activation::Silu))
            .collect();
        let row = experts[0].shape.row_bytes();
        let inputs =
            [0; 2].map(|_| to_bytes(&Data::Ordinary.vector(&mut random, 70 * 5, class.dtype), class.dtype));
        let pool = pool(2, None);
        let calls: [(usize, usize, &[u32]); 5] =
            [(0, 0, &[0, 1, 4]), (1, 0, &[4, 4, 2]), (2, 1, &[0, 1]), (0, 1, &[3]), (1, 0, &[0])];
        let mut outputs: Vec<Vec<u8>> = calls.iter().map(|call| vec![0; call.2.len() * row]).collect();
        let mut jobs: Vec<ExpertJob<'_>> = calls
            .iter()
            .zip(&mut outputs)
            .map(|(&(expert, source, row_index), output)| ExpertJob {
                expert: &experts[expert].packed,
                inputs: &inputs[source],
                row_index,
                output,
            })
            .collect();
        pool.forward(&mut jobs).unwrap();
        for ((expert, source, row_index), output) in calls.iter().zip(&outputs) {
            assert_eq!(*output, forward(&pool, &experts[*expert].packed, &inputs[*source], row_index));
        }
    }
}

#[test]
fn weights_are_quantised_as_documented_within_half_a_step() {
    let mut random = SplitMix64(24);
    for format in WeightFormat::QUANTISED {
        for data in [Data::Ordinary, Data::Wide] {
            for length in [1, 31, 32, 33, 64, 200] {
                let row = data.vector(&mut random, length, Dtype::F32);
                let kept = quantised_weights(&row, format);
                for (group, kept) in row.chunks(GROUP).zip(kept.chunks(GROUP)) {
                    let (integers, scale) = integers(group, format, true);
                    let values: Vec<f32> = integers.iter().map(|&q| q as f32 * scale).collect();
                    assert_eq!(kept, values);
                    let reach = match format {
                        WeightFormat::Int8 => 127.0,
                        WeightFormat::Int4 | WeightFormat::Plain | WeightFormat::Fp8 => 7.0,
                        // The largest of two neighbours are 4 and 6, and what is almost 8 becomes 6.
                        WeightFormat::Mxfp4 => 3.9,
                    };
                    let most = group.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    for (x, y) in group.iter().zip(kept) {
                        // Rounding the scale moves the ends by less than another half.
                        assert!((x - y).abs() <= most / reach * 1.01, "{format:?} {x:e} {y:e} {most:e}");
                    }
                }
            }
        }
    }
}

/// Covers any scale of a group and any subset of the format's numbers in it.
#[test]
fn mxfp4_weights_keep_their_values() {
    let mut random = SplitMix64(26);
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for exponent in -99..=124 {
        for codes in 1..=8 {
            let mut number = || {
                let magnitude = magnitudes[random.below(codes)] * 2f32.powi(exponent);
                if random.below(2) == 0 { magnitude } else { -magnitude }
            };
            let row: Vec<f32> = (0..GROUP + 5).map(|_| number()).collect();
            assert_eq!(quantised_weights(&row, WeightFormat::Mxfp4), row);
        }
    }
}

/// The rows do not depend on the slabs that the matrix was packed from, and are rounded once to bfloat16.
#[test]
fn read_rows_equal_the_quantised_weights() {
    let mut random = SplitMix64(27);
    for class in NumericsClass::ALL.into_iter().filter(|class| class.weights != WeightFormat::Fp8) {
        for (rows, inputs) in [(1, 1), (3, 31), (65, 33), (130, 64), (70, 97)] {
            let weights: Vec<Vec<f32>> =
                (0..rows).map(|_| Data::Ordinary.vector(&mut random, inputs, class.dtype)).collect();
            let mut builder = PackedMatrixBuilder::new(rows, inputs, class).unwrap();
            for slab in weights.chunks(17) {
                builder.push_rows(class.dtype.into(), &to_bytes(&slab.concat(), class.dtype)).unwrap();
            }
            let matrix = builder.finish().unwrap();
            let mut row = vec![0; matrix.input_bytes()];
            for (index, weights) in weights.iter().enumerate() {
                matrix.read_row(index, &mut row).unwrap();
                let kept = quantised_weights(weights, class.weights);
                let expected: Vec<u32> = kept.into_iter().map(|x| stored_bits(x, class.dtype)).collect();
                assert_eq!(bits(&row, class.dtype), expected, "{class}, row {index} of {rows} x {inputs}");
            }
            let beyond = KernelError::Dimension { what: "row", value: rows, max: rows - 1 };
            assert_eq!(matrix.read_row(rows, &mut row), Err(beyond));
            row.push(0);
            let (actual, expected) = (row.len(), row.len() - 1);
            let length = KernelError::Length { what: "target of a row", actual, expected };
            assert_eq!(matrix.read_row(0, &mut row), Err(length));
        }
    }
}

#[test]
fn matrix_refuses_too_many_and_too_few_rows() {
    let mut builder = PackedMatrixBuilder::new(3, 4, Dtype::F32).unwrap();
    let rows = |actual| KernelError::Length { what: "rows of a matrix", actual, expected: 3 };
    assert_eq!(builder.push_rows(StoredDtype::F32, &[0; 32]), Ok(()));
    let part = KernelError::WeightLength { actual: 17, row_bytes: 16 };
    assert_eq!(builder.push_rows(StoredDtype::F32, &[0; 17]), Err(part));
    assert_eq!(builder.push_rows(StoredDtype::F32, &[0; 32]), Err(rows(4)));
    assert_eq!(builder.finish().unwrap_err(), rows(2));
}

#[test]
fn packing_is_independent_of_slabs_and_stored_types() {
    let mut random = SplitMix64(25);
    for class in classes() {
        let shape = ExpertShape::new(96, 70, class, Activation::Silu).unwrap();
        let matrices = [0; 3].map(|_| Data::Ordinary.vector(&mut random, 96 * 70, Dtype::Bf16));
        let pack = |stored: Dtype, slab: usize| {
            let mut builder = PackedExpertBuilder::new(shape, stored.into()).unwrap();
            for (matrix, weights) in ExpertMatrix::ALL.into_iter().zip(&matrices) {
                let bytes = to_bytes(weights, stored);
                let row = builder.row_bytes(matrix);
                for (index, slab_bytes) in bytes.chunks(slab * row).enumerate() {
                    builder.set_rows(matrix, index * slab, slab_bytes).unwrap();
                }
            }
            builder.finish().unwrap()
        };
        let x = to_bytes(&Data::Ordinary.vector(&mut random, 96 * 3, class.dtype), class.dtype);
        let pool = pool(1, None);
        let whole = forward(&pool, &pack(Dtype::Bf16, 1000), &x, &[0, 1, 2]);
        for (stored, slab) in [(Dtype::Bf16, 1), (Dtype::F32, 16), (Dtype::F32, 7)] {
            assert_eq!(forward(&pool, &pack(stored, slab), &x, &[0, 1, 2]), whole);
        }
        assert_eq!(pack(Dtype::F32, 16).bytes(), shape.packed_bytes());
    }
    let bits_per_weight = |weights| {
        let class = NumericsClass { dtype: Dtype::Bf16, weights };
        let bytes = ExpertShape::new(2048, 1024, class, Activation::Silu).unwrap().packed_bytes();
        bytes as f64 * 8.0 / (3 * 2048 * 1024) as f64
    };
    assert_eq!(bits_per_weight(WeightFormat::Int8), 8.5);
    assert_eq!(bits_per_weight(WeightFormat::Int4), 4.5);
    assert_eq!(bits_per_weight(WeightFormat::Mxfp4), 4.5);
    let f16: Vec<u8> = [0x3c00u16; 64].iter().flat_map(|half| half.to_le_bytes()).collect();
    let class = NumericsClass { dtype: Dtype::F32, weights: WeightFormat::Int8 };
    let matrix = PackedMatrix::pack(64, class, &[(StoredDtype::F16, &f16)]).unwrap();
    let mut output = [0; 4];
    let x = to_bytes(&[0.5; 64], Dtype::F32);
    pool(1, None)
        .multiply(&mut [MatrixProduct { matrix: &matrix, inputs: &x, output: &mut output }])
        .unwrap();
    assert!((f32::from_le_bytes(output) - 32.0).abs() < 0.2, "{output:?}");
}

/// A row with one element of 127 reads one column of the packed weights. The product is exactly 127 times the value that
/// published code gives for the integer and its scale (`tests/fixtures/int4.py`).
#[test]
fn kernels_read_int4_as_published_code_does() {
    #[derive(serde::Deserialize)]
    struct Reference {
        name: String,
        rows: usize,
        columns: usize,
        values: Vec<u32>,
    }
    let references: Vec<Reference> =
        serde_json::from_str(include_str!("../../../../tests/fixtures/int4.json")).unwrap();
    let class = NumericsClass { dtype: Dtype::F32, weights: WeightFormat::Int4 };
    let pools = pools();
    let mut compared = 0;
    for Reference { name, rows, columns, values } in references {
        let values: Vec<f32> = values.into_iter().map(f32::from_bits).collect();
        // Smaller ones are zeros here, and larger ones have no product.
        if values.iter().any(|x| *x != 0.0 && !(1e-25..1e30).contains(&x.abs())) {
            continue;
        }
        let packed =
            PackedMatrix::pack(columns, class, &[(StoredDtype::F32, &to_bytes(&values, Dtype::F32))])
                .unwrap();
        let mut inputs = vec![0.0; columns * columns];
        inputs.iter_mut().step_by(columns + 1).for_each(|x| *x = 127.0);
        let inputs = to_bytes(&inputs, Dtype::F32);
        // Of each column all rows' elements; the sum of a zero is zero, whatever its sign.
        let expected: Vec<f32> = (0..columns)
            .flat_map(|column| (0..rows).map(move |row| row * columns + column))
            .map(|at| 127.0 * values[at])
            .collect();
        for pool in &pools {
            let mut output = vec![0xaa; expected.len() * 4];
            pool.multiply(&mut [MatrixProduct { matrix: &packed, inputs: &inputs, output: &mut output }])
                .unwrap();
            let found: Vec<f32> = bits(&output, Dtype::F32).into_iter().map(f32::from_bits).collect();
            assert_eq!(found, expected, "{name} by {}", pool.paths(class));
        }
        compared += 1;
    }
    assert!(compared >= 12, "{compared}");
}
