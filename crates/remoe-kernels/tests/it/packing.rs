//! Packing: sizes, slabs, conversions and refusals.

use crate::common;

use common::{Data, SplitMix64, forward, pool, to_bytes};
use proptest::prelude::*;
use remoe_kernels::numerics::{from_bf16, from_f16, round_bf16};
use remoe_kernels::{
    Activation, Dtype, ExpertMatrix, ExpertShape, InstructionPath, KernelError, MAX_DIMENSION, NumericsClass,
    PackedExpert, PackedExpertBuilder, PackedMatrix, PackedMatrixBuilder, StoredDtype, WeightFormat,
};

fn shape(hidden: usize, width: usize, dtype: Dtype) -> ExpertShape {
    ExpertShape::new(hidden, width, dtype, Activation::Silu).unwrap()
}

/// Returns the outputs of an expert for a few rows: a fingerprint of its weights.
fn fingerprint(packed: &PackedExpert) -> Vec<u8> {
    let mut random = SplitMix64(31);
    let shape = packed.shape();
    let inputs = Data::Ordinary.vector(&mut random, shape.hidden() * 5, shape.dtype());
    forward(&pool(1, None), packed, &to_bytes(&inputs, shape.dtype()), &[0, 1, 2, 3, 4])
}

fn random_bytes(random: &mut SplitMix64, n: usize, stored: StoredDtype) -> Vec<u8> {
    match stored {
        StoredDtype::F32 => to_bytes(&Data::Ordinary.vector(random, n, Dtype::F32), Dtype::F32),
        StoredDtype::Bf16 => to_bytes(&Data::Ordinary.vector(random, n, Dtype::Bf16), Dtype::Bf16),
        // Exponents of ordinary size, and some denormals.
        StoredDtype::F16 => (0..n)
            .flat_map(|_| ((random.bits() as u16 & 0x83ff) | (random.below(15) as u16) << 10).to_le_bytes())
            .collect(),
    }
}

#[test]
fn stored_types_convert_at_packing() {
    let mut random = SplitMix64(32);
    for stored in [StoredDtype::F32, StoredDtype::Bf16, StoredDtype::F16] {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for (hidden, width) in [(40, 48), (41, 7), (1, 1), (5, 33)] {
                let matrices = [0; 3].map(|_| random_bytes(&mut random, hidden * width, stored));
                let converted = matrices.each_ref().map(|bytes| {
                    let widened: Vec<f32> = match stored {
                        StoredDtype::F32 => bytes
                            .chunks_exact(4)
                            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                            .collect(),
                        StoredDtype::Bf16 => bytes
                            .chunks_exact(2)
                            .map(|b| from_bf16(u16::from_le_bytes([b[0], b[1]])))
                            .collect(),
                        StoredDtype::F16 => bytes
                            .chunks_exact(2)
                            .map(|b| from_f16(u16::from_le_bytes([b[0], b[1]])))
                            .collect(),
                    };
                    let rounded: Vec<f32> = widened
                        .into_iter()
                        .map(|x| if dtype == Dtype::Bf16 { round_bf16(x) } else { x })
                        .collect();
                    to_bytes(&rounded, dtype)
                });
                let shape = shape(hidden, width, dtype);
                let [gate, up, down] = &matrices;
                let direct = PackedExpert::pack(shape, stored, gate, up, down).unwrap();
                let [gate, up, down] = &converted;
                let before = PackedExpert::pack(shape, dtype.into(), gate, up, down).unwrap();
                assert_eq!(fingerprint(&direct), fingerprint(&before), "{stored:?} {dtype} {hidden}x{width}");
            }
        }
    }
}

#[test]
fn inputs_need_no_alignment() {
    let mut random = SplitMix64(33);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let shape = shape(70, 40, dtype);
        let matrices = [0; 3].map(|_| random_bytes(&mut random, 70 * 40, dtype.into()));
        let inputs = to_bytes(&Data::Ordinary.vector(&mut random, 70 * 3, dtype), dtype);
        let mut results = Vec::new();
        for shift in 0..4 {
            let shifted = |bytes: &[u8]| [vec![0; shift], bytes.to_vec()].concat();
            let moved = matrices.each_ref().map(|m| shifted(m));
            let [gate, up, down] = moved.each_ref().map(|m| &m[shift..]);
            let packed = PackedExpert::pack(shape, dtype.into(), gate, up, down).unwrap();
            let inputs = shifted(&inputs);
            for path in InstructionPath::available() {
                let mut output = vec![0; shift + 3 * shape.row_bytes()];
                let mut jobs = [remoe_kernels::ExpertJob {
                    expert: &packed,
                    inputs: &inputs[shift..],
                    row_index: &[2, 0, 1],
                    output: &mut output[shift..],
                }];
                pool(1, path).forward(&mut jobs).unwrap();
                results.push(output[shift..].to_vec());
            }
        }
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn wrong_lengths_are_refused_with_the_expected_ones() {
    let shape = shape(5, 7, Dtype::Bf16);
    let good = vec![0u8; 70];
    for (position, matrix) in ExpertMatrix::ALL.into_iter().enumerate() {
        for length in [0, 69, 71, 140] {
            let bad = vec![0u8; length];
            let mut given = [&good, &good, &good];
            given[position] = &bad;
            let error =
                PackedExpert::pack(shape, StoredDtype::Bf16, given[0], given[1], given[2]).unwrap_err();
            let (rows, columns) = shape.matrix(matrix);
            assert_eq!(
                error,
                KernelError::MatrixLength { matrix, expected: 70, actual: length, rows, columns }
            );
            assert!(error.to_string().contains("expected 70"), "{error}");
        }
    }
}

#[test]
fn illegal_dimensions_are_refused() {
    for (hidden, width) in [(0, 1), (1, 0), (MAX_DIMENSION + 1, 1), (1, usize::MAX)] {
        let error = ExpertShape::new(hidden, width, Dtype::F32, Activation::Relu).unwrap_err();
        assert!(matches!(error, KernelError::Dimension { .. }), "{error}");
    }
    assert!(ExpertShape::new(MAX_DIMENSION, MAX_DIMENSION, Dtype::F32, Activation::Relu).is_ok());
}

#[test]
fn builder_accepts_any_order_and_reports_missing_rows() {
    let mut random = SplitMix64(34);
    let shape = shape(41, 50, Dtype::Bf16);
    let matrices = [0; 3].map(|_| random_bytes(&mut random, 41 * 50, StoredDtype::Bf16));
    let [gate, up, down] = &matrices;
    let whole = PackedExpert::pack(shape, StoredDtype::Bf16, gate, up, down).unwrap();
    let mut builder = PackedExpertBuilder::new(shape, StoredDtype::Bf16).unwrap();
    let mut slabs = Vec::new();
    for (matrix, bytes) in ExpertMatrix::ALL.into_iter().zip(&matrices) {
        let row_bytes = builder.row_bytes(matrix);
        let rows = shape.matrix(matrix).0;
        let mut first = 0;
        while first < rows {
            let count = (1 + random.below(20)).min(rows - first);
            slabs.push((matrix, first, &bytes[first * row_bytes..][..count * row_bytes]));
            first += count;
        }
    }
    while !slabs.is_empty() {
        let (matrix, first, bytes) = slabs.swap_remove(random.below(slabs.len()));
        builder.set_rows(matrix, first, bytes).unwrap();
    }
    assert_eq!(fingerprint(&builder.finish().unwrap()), fingerprint(&whole));

    let mut builder = PackedExpertBuilder::new(shape, StoredDtype::Bf16).unwrap();
    builder.set_rows(ExpertMatrix::Gate, 0, gate).unwrap();
    builder.set_rows(ExpertMatrix::Up, 0, &up[..10 * 82]).unwrap();
    builder.set_rows(ExpertMatrix::Up, 12, &up[12 * 82..]).unwrap();
    builder.set_rows(ExpertMatrix::Down, 0, down).unwrap();
    let error = builder.finish().unwrap_err();
    assert_eq!(error, KernelError::Incomplete { matrix: ExpertMatrix::Up, row: 10, missing: 2 });

    let mut builder = PackedExpertBuilder::new(shape, StoredDtype::Bf16).unwrap();
    for (first, length) in [(0, 81), (50, 82), (49, 164), (usize::MAX, 82)] {
        let error = builder.set_rows(ExpertMatrix::Gate, first, &vec![0; length]).unwrap_err();
        assert!(matches!(error, KernelError::Rows { .. }), "{error}");
    }
    builder.set_rows(ExpertMatrix::Gate, 50, &[]).unwrap();
}

#[test]
fn packed_bytes_are_known_before_packing() {
    // 44 + 32 panels without padding: three matrices of 2048 * 1408 elements.
    assert_eq!(shape(2048, 1408, Dtype::Bf16).packed_bytes(), 3 * 2048 * 1408 * 2);
    assert_eq!(shape(2048, 1408, Dtype::F32).packed_bytes(), 3 * 2048 * 1408 * 4);
    for (hidden, width) in [(1, 1), (5, 7), (640, 1000)] {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let shape = shape(hidden, width, dtype);
            let zeros = vec![0u8; hidden * width * dtype.bytes()];
            let packed = PackedExpert::pack(shape, dtype.into(), &zeros, &zeros, &zeros).unwrap();
            assert_eq!(packed.bytes(), shape.packed_bytes());
        }
    }
}

/// Returns the values of every row of a matrix.
fn rows_of(matrix: &PackedMatrix) -> Vec<u8> {
    let mut rows = vec![0; matrix.outputs() * matrix.input_bytes()];
    for (row, to) in rows.chunks_exact_mut(matrix.input_bytes()).enumerate() {
        matrix.read_row(row, to).unwrap();
    }
    rows
}

#[test]
fn parts_of_a_matrix_accept_only_their_own_rows() {
    let mut builder = PackedMatrixBuilder::new(130, 2, Dtype::F32).unwrap();
    let ranges: Vec<_> = builder.parts(65).map(|part| part.range()).collect();
    // Whole panels.
    assert_eq!(ranges, [0..128, 128..130]);
    let row = [0; 8];
    let mut last = builder.parts(128).last().unwrap();
    last.push_rows(StoredDtype::F32, &row).unwrap();
    let two = last.push_rows(StoredDtype::F32, &[row, row].concat()).unwrap_err();
    assert!(matches!(two, KernelError::Length { actual: 3, expected: 2, .. }), "{two}");
    let half = last.push_rows(StoredDtype::F32, &row[1..]).unwrap_err();
    assert!(matches!(half, KernelError::WeightLength { actual: 7, row_bytes: 8 }), "{half}");
    let missing = builder.finish().unwrap_err();
    assert!(matches!(missing, KernelError::Length { actual: 1, expected: 130, .. }), "{missing}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn parts_packed_by_threads_equal_the_whole_matrix(
        outputs in 1usize..300,
        inputs in 1usize..130,
        rows in 0usize..400,
        slab in 1usize..40,
        weights in prop_oneof![Just(WeightFormat::Plain), Just(WeightFormat::Int8), Just(WeightFormat::Int4)],
        seed in any::<u64>(),
    ) {
        let class = NumericsClass { dtype: Dtype::Bf16, weights };
        let bytes = random_bytes(&mut SplitMix64(seed), outputs * inputs, StoredDtype::Bf16);
        let whole = PackedMatrix::pack(inputs, class, &[(StoredDtype::Bf16, &bytes)]).unwrap();
        let mut builder = PackedMatrixBuilder::new(outputs, inputs, class).unwrap();
        std::thread::scope(|scope| {
            for mut part in builder.parts(rows) {
                let bytes = &bytes[part.range().start * inputs * 2..part.range().end * inputs * 2];
                scope.spawn(move || {
                    for slab in bytes.chunks(slab * inputs * 2) {
                        part.push_rows(StoredDtype::Bf16, slab).unwrap();
                    }
                });
            }
        });
        prop_assert_eq!(rows_of(&builder.finish().unwrap()), rows_of(&whole));
    }

    #[test]
    fn any_length_is_accepted_or_refused(
        hidden in 1usize..40,
        width in 1usize..40,
        lengths in prop::array::uniform3(0usize..4000),
        first in any::<usize>(),
    ) {
        let shape = shape(hidden, width, Dtype::Bf16);
        let data = vec![0u8; 4000];
        let expected = hidden * width * 2;
        let result = PackedExpert::pack(shape, StoredDtype::Bf16, &data[..lengths[0]], &data[..lengths[1]], &data[..lengths[2]]);
        prop_assert_eq!(result.is_ok(), lengths.iter().all(|&n| n == expected));
        let mut builder = PackedExpertBuilder::new(shape, StoredDtype::Bf16).unwrap();
        let rows = lengths[0] / (hidden * 2);
        let whole = lengths[0] % (hidden * 2) == 0;
        let legal = whole && first.checked_add(rows).is_some_and(|end| end <= width);
        prop_assert_eq!(builder.set_rows(ExpertMatrix::Up, first, &data[..lengths[0]]).is_ok(), legal);
    }
}
