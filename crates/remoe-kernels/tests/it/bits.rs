//! Experts: each path, number of threads and batch gives the bits of the reference.

use crate::common;

use common::{Data, Expert, SplitMix64, bits, check, forward, pool, pools, stored_bits, to_bytes};
use proptest::prelude::*;
use remoe_kernels::{
    Activation, Dtype, ExpertJob, ExpertMatrix, ExpertShape, InstructionPath, KernelError, NumericsClass,
    PackedExpert, WeightFormat,
};

const ACTIVATIONS: [Activation; 4] =
    [Activation::Silu, Activation::GeluTanh, Activation::Relu, Activation::ClampedSwiglu];
const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F32];

#[test]
fn odd_and_tiny_shapes_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(1);
    for hidden in [1, 2, 5, 40, 41, 63, 64, 65, 130] {
        for width in [1, 2, 7, 31, 32, 33, 48, 65] {
            for dtype in DTYPES {
                for data in Data::ALL {
                    let activation = ACTIVATIONS[random.below(4)];
                    let expert = Expert::new(&mut random, data, hidden, width, dtype, activation);
                    let rows = 1 + random.below(14);
                    check(&pools, &mut random, data, &expert, rows);
                }
            }
        }
    }
}

#[test]
fn every_row_count_gives_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(2);
    for dtype in DTYPES {
        for activation in ACTIVATIONS {
            for data in Data::ALL {
                let expert = Expert::new(&mut random, data, 48, 41, dtype, activation);
                for rows in (1..=20).chain([256]) {
                    check(&pools, &mut random, data, &expert, rows);
                }
            }
        }
    }
}

/// Covers all classes, widths around one and two panels, and no, inner or all biases.
#[test]
fn experts_without_a_gate_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(8);
    let all = [|shape: ExpertShape| shape, ExpertShape::with_inner_biases, ExpertShape::with_biases];
    // `fp8.rs` tests fp8, whose experts are built from codes rather than from numbers.
    for class in NumericsClass::ALL.into_iter().filter(|class| class.weights != WeightFormat::Fp8) {
        for (hidden, width) in [(1, 1), (5, 31), (64, 33), (41, 63), (48, 64), (130, 65), (33, 130)] {
            for data in Data::ALL {
                let activation = ACTIVATIONS[random.below(3)];
                let shape = ExpertShape::new(hidden, width, class, activation).unwrap().without_gate();
                let shape = all[random.below(3)](shape);
                let expert = Expert::of_shape(&mut random, data, shape);
                assert_eq!(expert.packed.bytes(), expert.shape.packed_bytes());
                for rows in [1 + random.below(6), 7 + random.below(8)] {
                    check(&pools, &mut random, data, &expert, rows);
                }
            }
        }
    }
    let shape = ExpertShape::new(2048, 1408, Dtype::Bf16, Activation::GeluTanh).unwrap().without_gate();
    assert_eq!(shape.packed_bytes(), 2 * 2048 * 1408 * 2);
    let refused = PackedExpert::pack(shape, Dtype::Bf16.into(), &[0; 2], &[], &[]).unwrap_err();
    assert!(matches!(refused, KernelError::MatrixLength { matrix: ExpertMatrix::Gate, expected: 0, .. }));
}

/// Covers two chunks and a part of one in both phases, with rows of one block, of two, and of more than one group.
#[test]
fn widened_weights_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(6);
    for data in Data::ALL {
        let expert = Expert::new(&mut random, data, 131, 130, Dtype::Bf16, Activation::Silu);
        for rows in [6, 7, 13, 193] {
            check(&pools, &mut random, data, &expert, rows);
        }
    }
}

#[test]
fn deep_sums_give_the_reference_bits() {
    let pools = pools();
    let mut random = SplitMix64(3);
    for dtype in DTYPES {
        for data in [Data::Ordinary, Data::Tiny, Data::Wide] {
            let expert = Expert::new(&mut random, data, 1500, 333, dtype, Activation::Silu);
            for rows in [1, 8] {
                check(&pools, &mut random, data, &expert, rows);
            }
        }
    }
}

#[test]
fn row_result_is_independent_of_its_neighbours() {
    let mut random = SplitMix64(4);
    for path in InstructionPath::available() {
        let pool = pool(2, path);
        for dtype in DTYPES {
            let expert = Expert::new(&mut random, Data::Special, 70, 50, dtype, Activation::Silu);
            let inputs = to_bytes(&Data::Special.vector(&mut random, 70 * 33, dtype), dtype);
            let all: Vec<u32> = (0..33).collect();
            let together = forward(&pool, &expert.packed, &inputs, &all);
            let row_bytes = expert.shape.row_bytes();
            for row in 0..33u32 {
                let alone = forward(&pool, &expert.packed, &inputs, &[row]);
                assert_eq!(alone, together[row as usize * row_bytes..][..row_bytes], "{path} {dtype} {row}");
            }
            // In any order and with repetitions.
            let shuffled: Vec<u32> = (0..50).map(|_| random.below(33) as u32).collect();
            let gathered = forward(&pool, &expert.packed, &inputs, &shuffled);
            for (result, &row) in gathered.chunks_exact(row_bytes).zip(&shuffled) {
                assert_eq!(
                    result,
                    &together[row as usize * row_bytes..][..row_bytes],
                    "{path} {dtype} {row}"
                );
            }
        }
    }
}

#[test]
fn jobs_of_different_shapes_share_a_call() {
    let mut random = SplitMix64(5);
    let specs = [
        (40, 32, Dtype::Bf16, 3),
        (64, 100, Dtype::F32, 1),
        (5, 7, Dtype::Bf16, 0),
        (41, 64, Dtype::F32, 9),
        (256, 48, Dtype::Bf16, 17),
    ];
    for path in InstructionPath::available() {
        for threads in 1..=3 {
            let pool = pool(threads, path);
            let experts: Vec<Expert> = specs
                .iter()
                .map(|&(h, w, d, _)| Expert::new(&mut random, Data::Wide, h, w, d, Activation::GeluTanh))
                .collect();
            let inputs: Vec<Vec<u8>> = specs
                .iter()
                .map(|&(h, _, d, _)| to_bytes(&Data::Wide.vector(&mut random, h * 20, d), d))
                .collect();
            let index: Vec<Vec<u32>> =
                specs.iter().map(|s| (0..s.3).map(|_| random.below(20) as u32).collect()).collect();
            let mut outputs: Vec<Vec<u8>> =
                specs.iter().map(|&(h, _, d, n)| vec![0; n * h * d.bytes()]).collect();
            let mut jobs: Vec<ExpertJob<'_>> = experts
                .iter()
                .zip(&inputs)
                .zip(&index)
                .zip(&mut outputs)
                .map(|(((expert, inputs), row_index), output)| ExpertJob {
                    expert: &expert.packed,
                    inputs,
                    row_index,
                    output,
                })
                .collect();
            pool.forward(&mut jobs).unwrap();
            for (((expert, inputs), index), output) in experts.iter().zip(&inputs).zip(&index).zip(&outputs) {
                assert_eq!(*output, forward(&pool, &expert.packed, inputs, index), "{path} {threads}");
            }
        }
    }
}

/// Padded columns are sums of x * 0, which is NaN for an infinite x; the result must not be.
#[test]
fn padding_stays_zero_when_an_input_is_infinite() {
    for path in InstructionPath::available() {
        let pool = pool(1, path);
        for dtype in DTYPES {
            for (hidden, width) in [(1, 1), (5, 7), (64, 33), (41, 64)] {
                let shape = ExpertShape::new(hidden, width, dtype, Activation::Silu).unwrap();
                let half = to_bytes(&vec![0.5; hidden * width], dtype);
                let packed = PackedExpert::pack(shape, dtype.into(), &half, &half, &half).unwrap();
                let mut x = vec![1.0; 2 * hidden];
                x[hidden / 2] = f32::INFINITY;
                let output = bits(&forward(&pool, &packed, &to_bytes(&x, dtype), &[0, 1]), dtype);
                let infinity = stored_bits(f32::INFINITY, dtype);
                assert!(output[..hidden].iter().all(|&b| b == infinity), "{path} {shape:?}");
                assert!(output[hidden..].iter().all(|&b| b < infinity), "{path} {shape:?}");
            }
        }
    }
}

/// Activations of single values, by way of an expert that passes them through: x = (v, 1), gate = (1, 0), up = (0, 1).
#[test]
fn activations_agree_over_their_whole_range() {
    let pools = pools();
    for activation in ACTIVATIONS {
        for dtype in DTYPES {
            let shape = ExpertShape::new(2, 1, dtype, activation).unwrap();
            let pack = |m: &[f32]| to_bytes(m, dtype);
            let packed = PackedExpert::pack(
                shape,
                dtype.into(),
                &pack(&[1.0, 0.0]),
                &pack(&[0.0, 1.0]),
                &pack(&[1.0, 0.0]),
            )
            .unwrap();
            let step = if dtype == Dtype::Bf16 { 1 << 16 } else { 99_991 };
            let values: Vec<f32> = (0..=u32::MAX).step_by(step).map(f32::from_bits).collect();
            let rows: Vec<f32> = values.iter().flat_map(|&v| [v, 1.0]).collect();
            let index: Vec<u32> = (0..values.len() as u32).collect();
            let inputs = to_bytes(&rows, dtype);
            for pool in &pools {
                let output = bits(&forward(pool, &packed, &inputs, &index), dtype);
                for (&v, out) in values.iter().zip(output.chunks_exact(2)) {
                    let round = |x: f32| {
                        f32::from_bits(stored_bits(x, dtype) << if dtype == Dtype::Bf16 { 16 } else { 0 })
                    };
                    // The gate sum is v * 1 + (1 * 0 + 0): -0 and infinities need the rules, not intuition.
                    let gate = round(common::dot(&[v, 1.0], &[1.0, 0.0]));
                    let up = round(common::dot(&[v, 1.0], &[0.0, 1.0]));
                    let h = round(remoe_kernels::numerics::mul(
                        round(remoe_kernels::activations::activate(activation, gate)),
                        round(remoe_kernels::activations::factor(activation, up)),
                    ));
                    let expected = stored_bits(common::dot(&[h], &[1.0]), dtype);
                    assert_eq!(out[0], expected, "{} {activation:?} {dtype} {v:e}", pool.paths(dtype));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_expert_gives_the_reference_bits(
        seed in any::<u64>(),
        hidden in 1usize..150,
        width in 1usize..100,
        rows in 1usize..30,
        kind in 0usize..4,
        activation in 0usize..4,
        bf16 in any::<bool>(),
    ) {
        let mut random = SplitMix64(seed);
        let data = Data::ALL[kind];
        let dtype = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let expert = Expert::new(&mut random, data, hidden, width, dtype, ACTIVATIONS[activation]);
        check(&pools(), &mut random, data, &expert, rows);
    }
}
