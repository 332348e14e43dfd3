//! Products with plain weights: each path, number of threads and batch gives the bits of the reference.

use crate::common;

use common::{Data, SplitMix64, bits, dot, pool, pools, stored_bits, to_bytes};
use proptest::prelude::*;
use remoe_kernels::{
    Activation, Dtype, ExpertJob, ExpertShape, KernelError, MAX_DIMENSION, MAX_OUTPUTS, MatrixProduct,
    PackedExpert, PackedMatrix, Pool, StoredDtype,
};

struct ProductCase {
    matrix: PackedMatrix,
    rows: Vec<u8>,
    expected: Vec<u32>,
}

fn case(
    random: &mut SplitMix64,
    data: Data,
    outputs: usize,
    inputs: usize,
    rows: usize,
    dtype: Dtype,
) -> ProductCase {
    let weights: Vec<Vec<f32>> = (0..outputs).map(|_| data.vector(random, inputs, dtype)).collect();
    let x: Vec<Vec<f32>> = (0..rows).map(|_| data.vector(random, inputs, dtype)).collect();
    let expected = x.iter().flat_map(|x| weights.iter().map(|w| stored_bits(dot(x, w), dtype))).collect();
    let packed = to_bytes(&weights.concat(), dtype);
    ProductCase {
        matrix: PackedMatrix::pack(inputs, dtype, &[(StoredDtype::from(dtype), &packed)]).unwrap(),
        rows: to_bytes(&x.concat(), dtype),
        expected,
    }
}

/// Computes a case on all pools and compares the results with the reference.
fn check(pools: &[Pool], case: &ProductCase) {
    let (dtype, columns) = (case.matrix.dtype(), case.matrix.outputs());
    for pool in pools {
        let mut output = vec![0xaa; case.expected.len() * dtype.bytes()];
        let mut product = [MatrixProduct { matrix: &case.matrix, inputs: &case.rows, output: &mut output }];
        pool.multiply(&mut product).unwrap();
        let actual = bits(&output, dtype);
        if let Some(at) = actual.iter().zip(&case.expected).position(|(a, b)| a != b) {
            panic!(
                "{} with {} threads, {dtype}, {columns} x {}, {} rows: row {} column {}: {:#x}, expected {:#x}",
                pool.paths(dtype),
                pool.threads(),
                case.matrix.inputs(),
                case.expected.len() / columns,
                at / columns,
                at % columns,
                actual[at],
                case.expected[at]
            );
        }
    }
}

#[test]
fn all_paths_and_shapes_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(11);
    for (outputs, inputs) in [(1, 1), (3, 2), (63, 5), (64, 64), (65, 41), (130, 7), (200, 130)] {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            for data in Data::ALL {
                for rows in [0, 1, 2, 6, 7, 13, 40] {
                    let case = case(&mut random, data, outputs, inputs, rows, dtype);
                    check(&pools, &case);
                }
            }
        }
    }
}

/// Chunks are 32 or 64 pairs of K, those of widened weights 32; groups are 48 rows and 192, and bfloat16 is widened from more than 18 on.
#[test]
fn edges_of_blocks_and_chunks_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(14);
    for rows in [6, 7, 8, 12, 13, 18, 19, 47, 48, 49, 97, 191, 192, 193, 384, 385] {
        for inputs in [1, 63, 64, 65, 66, 67, 128, 131] {
            for data in Data::ALL {
                check(&pools, &case(&mut random, data, 3, inputs, rows, Dtype::Bf16));
            }
        }
        check(&pools, &case(&mut random, Data::Ordinary, 3, 131, rows, Dtype::F32));
    }
}

/// Panels of which two exceed a second-level cache are computed in chunks for any number of rows.
#[test]
fn deep_panels_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(15);
    for (dtype, inputs) in [(Dtype::Bf16, 3333), (Dtype::F32, 1667)] {
        for rows in [6, 13, 48, 49, 97] {
            check(&pools, &case(&mut random, Data::Ordinary, 65, inputs, rows, dtype));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_product_gives_the_reference_bits(
        seed in any::<u64>(),
        outputs in 1usize..70,
        inputs in 1usize..200,
        rows in 1usize..400,
        kind in 0usize..4,
        bf16 in any::<bool>(),
    ) {
        let dtype = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
        check(&pools(), &case(&mut SplitMix64(seed), Data::ALL[kind], outputs, inputs, rows, dtype));
    }
}

#[test]
fn products_share_a_call_and_alternate_with_experts() {
    let mut random = SplitMix64(12);
    for threads in 1..=3 {
        let pool = pool(threads, None);
        let cases = [(100, 40, 3, Dtype::Bf16), (33, 41, 9, Dtype::F32), (64, 8, 0, Dtype::Bf16)].map(
            |(outputs, inputs, rows, dtype)| case(&mut random, Data::Wide, outputs, inputs, rows, dtype),
        );
        let shape = ExpertShape::new(64, 32, Dtype::F32, Activation::Silu).unwrap();
        let zeros = vec![0u8; 64 * 32 * 4];
        let expert = PackedExpert::pack(shape, StoredDtype::F32, &zeros, &zeros, &zeros).unwrap();
        for _ in 0..3 {
            let mut outputs: Vec<Vec<u8>> =
                cases.iter().map(|case| vec![0; case.expected.len() * case.matrix.dtype().bytes()]).collect();
            let mut products: Vec<MatrixProduct<'_>> = cases
                .iter()
                .zip(&mut outputs)
                .map(|(case, output)| MatrixProduct { matrix: &case.matrix, inputs: &case.rows, output })
                .collect();
            pool.multiply(&mut products).unwrap();
            for (case, output) in cases.iter().zip(&outputs) {
                assert_eq!(bits(output, case.matrix.dtype()), case.expected);
            }
            let inputs = vec![0u8; 256];
            let mut output = vec![1u8; 256];
            pool.forward(&mut [ExpertJob {
                expert: &expert,
                inputs: &inputs,
                row_index: &[0],
                output: &mut output,
            }])
            .unwrap();
            assert_eq!(output, [0; 256]);
        }
    }
}

#[test]
fn stacked_matrices_equal_a_single_matrix() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let all = case(&mut SplitMix64(13), Data::Ordinary, 100, 33, 5, dtype);
        let mut random = SplitMix64(13);
        let weights: Vec<f32> =
            (0..100).flat_map(|_| Data::Ordinary.vector(&mut random, 33, dtype)).collect();
        let (first, second) = weights.split_at(37 * 33);
        // float32 holds what bfloat16 holds: the parts may be stored differently.
        let first = (StoredDtype::F32, to_bytes(first, Dtype::F32));
        let second = (StoredDtype::from(dtype), to_bytes(second, dtype));
        let parts = [(first.0, first.1.as_slice()), (second.0, second.1.as_slice())];
        let matrix = PackedMatrix::pack(33, dtype, &parts).unwrap();
        let mut output = vec![0; all.expected.len() * dtype.bytes()];
        let mut product = [MatrixProduct { matrix: &matrix, inputs: &all.rows, output: &mut output }];
        pool(2, None).multiply(&mut product).unwrap();
        assert_eq!(bits(&output, dtype), all.expected);
    }
}

#[test]
fn wrong_sizes_are_refused_by_name() {
    let pack = |inputs, bytes| {
        PackedMatrix::pack(inputs, Dtype::Bf16, &[(StoredDtype::Bf16, &vec![0; bytes])]).map(|_| ())
    };
    let dimension = |what, value, max| Err(KernelError::Dimension { what, value, max });
    assert_eq!(pack(0, 4), dimension("inputs", 0, MAX_DIMENSION));
    assert_eq!(pack(MAX_DIMENSION + 1, 0), dimension("inputs", MAX_DIMENSION + 1, MAX_DIMENSION));
    assert_eq!(pack(4, 0), dimension("outputs", 0, MAX_OUTPUTS));
    assert_eq!(pack(1, 2 * MAX_OUTPUTS + 2), dimension("outputs", MAX_OUTPUTS + 1, MAX_OUTPUTS));
    assert_eq!(pack(6, 25), Err(KernelError::WeightLength { actual: 25, row_bytes: 12 }));

    let matrix = PackedMatrix::pack(6, Dtype::F32, &[(StoredDtype::F32, &[0; 96])]).unwrap();
    let pool = pool(1, None);
    let multiply = |inputs: usize, output: usize| {
        let (inputs, mut output) = (vec![0; inputs], vec![0; output]);
        pool.multiply(&mut [MatrixProduct { matrix: &matrix, inputs: &inputs, output: &mut output }])
    };
    assert_eq!(multiply(48, 32), Ok(()));
    let input = KernelError::InputLength { job: 0, actual: 47, hidden: 6, dtype: Dtype::F32 };
    assert_eq!(multiply(47, 32), Err(input));
    assert_eq!(multiply(48, 16), Err(KernelError::OutputLength { job: 0, expected: 32, actual: 16 }));
}
