//! Weights that stay fp8: each path, number of threads and number of rows gives the bits of decoded weights.

use crate::common;

use common::{Data, SplitMix64, forward, pool, pools, to_bytes};
use proptest::prelude::*;
use remoe_kernels::numerics::round_bf16;
use remoe_kernels::{
    Activation, Dtype, ExpertMatrix, ExpertShape, Fp8Scales, KernelError, NumericsClass, PackedExpert,
    PackedExpertBuilder, PackedMatrixBuilder, Pool, StoredDtype, WeightFormat,
};

/// Matrix of fp8 codes and block scales, as a checkpoint stores it.
struct Fp8Matrix {
    codes: Vec<u8>,
    scales: Vec<f32>,
    rows: usize,
    columns: usize,
    block: [usize; 2],
}

impl Fp8Matrix {
    fn new(random: &mut SplitMix64, (rows, columns): (usize, usize), block: [usize; 2]) -> Self {
        let code = |random: &mut SplitMix64| match random.below(256) as u8 {
            code if code & 0x7f == 0x7f => 0,
            code => code,
        };
        let codes = (0..rows * columns).map(|_| code(random)).collect();
        let scale = |random: &mut SplitMix64| {
            // Powers of two, whose products often lie halfway between two bfloat16 numbers, and others, of either sign.
            let power = 2f32.powi(random.below(12) as i32 - 14);
            if random.below(16) == 0 {
                // Very small and very large scales.
                return [2f32.powi(-100), 2f32.powi(118) * 1.75][random.below(2)];
            }
            let scale =
                if random.below(2) == 0 { power } else { power * (1.0 + random.below(1000) as f32 / 1000.0) };
            if random.below(8) == 0 { -scale } else { scale }
        };
        let blocks = rows.div_ceil(block[0]) * columns.div_ceil(block[1]);
        Self { codes, scales: (0..blocks).map(|_| scale(random)).collect(), rows, columns, block }
    }

    /// Decodes the matrix in float64 by the definition of the format.
    fn decoded(&self, dtype: Dtype) -> Vec<f32> {
        let per_row = self.columns.div_ceil(self.block[1]);
        let weight = |(at, &code): (usize, &u8)| {
            let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let magnitude = match exponent {
                0 => fraction / 8.0 * 2f64.powi(-6),
                _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
            };
            let number = if code < 128 { magnitude } else { -magnitude };
            let (row, column) = (at / self.columns, at % self.columns);
            let scale = self.scales[row / self.block[0] * per_row + column / self.block[1]];
            let product = (number * f64::from(scale)) as f32;
            if dtype == Dtype::Bf16 { round_bf16(product) } else { product }
        };
        self.codes.iter().enumerate().map(weight).collect()
    }

    fn scales(&self) -> Fp8Scales {
        Fp8Scales::new(self.scales.clone(), self.rows, self.columns, self.block).unwrap()
    }
}

/// Expert that stays fp8, packed from slabs of rows, and the same expert decoded.
struct Fp8Pair {
    fp8: PackedExpert,
    decoded: PackedExpert,
}

impl Fp8Pair {
    fn new(random: &mut SplitMix64, shape: ExpertShape, block: [usize; 2], slab: usize) -> Self {
        let plain =
            ExpertShape::new(shape.hidden(), shape.width(), shape.dtype(), shape.activation()).unwrap();
        let mut fp8 = PackedExpertBuilder::new(shape, StoredDtype::F32).unwrap();
        let mut decoded = PackedExpertBuilder::new(plain, shape.dtype().into()).unwrap();
        for matrix in ExpertMatrix::ALL {
            let stored = Fp8Matrix::new(random, shape.matrix(matrix), block);
            for (index, codes) in stored.codes.chunks(slab * stored.columns).enumerate() {
                fp8.set_fp8_rows(matrix, index * slab, codes, &stored.scales()).unwrap();
            }
            let weights = to_bytes(&stored.decoded(shape.dtype()), shape.dtype());
            decoded.set_rows(matrix, 0, &weights).unwrap();
        }
        Self { fp8: fp8.finish().unwrap(), decoded: decoded.finish().unwrap() }
    }

    fn agree(&self, pools: &[Pool], random: &mut SplitMix64, data: Data, rows: usize) {
        let shape = *self.fp8.shape();
        let inputs = to_bytes(&data.vector(random, rows * shape.hidden(), shape.dtype()), shape.dtype());
        let index: Vec<u32> = (0..rows as u32).rev().collect();
        let expected = forward(&pool(1, None), &self.decoded, &inputs, &index);
        for pool in pools {
            let actual = forward(pool, &self.fp8, &inputs, &index);
            let (paths, threads) = (pool.paths(shape.class()), pool.threads());
            assert!(actual == expected, "{paths} with {threads} threads, {shape:?}, {data:?}, {rows} rows");
        }
    }
}

fn classes() -> [NumericsClass; 2] {
    [Dtype::Bf16, Dtype::F32].map(|dtype| NumericsClass { dtype, weights: WeightFormat::Fp8 })
}

#[test]
fn fp8_weights_give_the_bits_of_decoded_weights() {
    let pools = pools();
    let mut random = SplitMix64(41);
    for class in classes() {
        for (hidden, width) in [(1, 1), (2, 31), (5, 33), (31, 7), (32, 32), (33, 64), (136, 20), (130, 140)]
        {
            for block in [[128, 128], [4, 32], [64, 96]] {
                for data in Data::ALL {
                    let shape = ExpertShape::new(hidden, width, class, Activation::Silu).unwrap();
                    let (slab, rows) = (1 + random.below(70), 1 + random.below(14));
                    let both = Fp8Pair::new(&mut random, shape, block, slab);
                    both.agree(&pools, &mut random, data, rows);
                }
            }
        }
        let shape = ExpertShape::new(512, 160, class, Activation::GeluTanh).unwrap();
        let both = Fp8Pair::new(&mut random, shape, [128, 128], 1000);
        for rows in [1, 2, 3, 4, 5, 6, 7, 12, 13, 40, 191, 193] {
            both.agree(&pools, &mut random, Data::Ordinary, rows);
        }
        // Paths with narrow vectors split only panels of this depth into chunks.
        let deep = ExpertShape::new(6400, 32, class, Activation::Silu).unwrap();
        let both = Fp8Pair::new(&mut random, deep, [128, 128], 1000);
        for rows in [3, 4, 5, 6] {
            both.agree(&pools, &mut random, Data::Ordinary, rows);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_fp8_expert_gives_the_bits_of_its_decoded_form(
        seed in any::<u64>(),
        hidden in 1usize..300,
        width in 1usize..200,
        rows in 1usize..30,
        height in 1usize..40,
        across in 1usize..6,
        kind in 0usize..4,
        class in 0usize..2,
    ) {
        let mut random = SplitMix64(seed);
        let shape = ExpertShape::new(hidden, width, classes()[class], Activation::Silu).unwrap();
        let both = Fp8Pair::new(&mut random, shape, [4 * height, 32 * across], 64);
        both.agree(&pools(), &mut random, Data::ALL[kind], rows);
    }
}

#[test]
fn fp8_weight_takes_eight_and_a_quarter_bits() {
    for class in classes() {
        let shape = ExpertShape::new(2048, 1024, class, Activation::Silu).unwrap();
        assert_eq!(shape.packed_bytes() as f64 * 8.0 / (3 * 2048 * 1024) as f64, 8.25);
        let plain = NumericsClass::from(class.dtype);
        assert_eq!(class.name(), plain.name(), "the same bits");
        assert_ne!(class, plain);
    }
}

#[test]
fn other_blocks_scales_and_forms_are_refused() {
    let blocks = |block, values: Vec<f32>| {
        Fp8Scales::new(values, 130, 70, block).map(|_| ()).map_err(|error| error.to_string())
    };
    let refused = |block: [usize; 2], why: &str| {
        Err(format!("fp8 weights in blocks of {} x {}: {why}", block[0], block[1]))
    };
    assert_eq!(blocks([128, 128], vec![1.0; 2]), Ok(()));
    assert_eq!(blocks([4, 32], vec![-0.0; 33 * 3]), Ok(()));
    for block in [[6, 32], [128, 48], [0, 128], [128, 0]] {
        assert_eq!(blocks(block, vec![1.0; 2]), refused(block, "expected blocks of multiples of 4 x 32"));
    }
    let few = "expected 2 scales for a matrix of 130 x 70, got 1";
    assert_eq!(blocks([128, 128], vec![1.0]), refused([128, 128], few));
    for value in [f32::NAN, f32::INFINITY, 2f32.powi(119), 2f32.powi(-101)] {
        let why = format!("unsupported scale {value:e}");
        assert_eq!(blocks([128, 128], vec![1.0, value]), refused([128, 128], &why));
    }

    let [class, _] = classes();
    let shape = ExpertShape::new(70, 130, class, Activation::Silu).unwrap();
    let mut builder = PackedExpertBuilder::new(shape, StoredDtype::Bf16).unwrap();
    let form = |form, given| KernelError::Form { class, form, given };
    assert_eq!(builder.set_rows(ExpertMatrix::Up, 0, &[0; 140]), Err(form(WeightFormat::Fp8, "elements")));
    let scales = Fp8Scales::new(vec![1.0; 2], 130, 70, [128, 128]).unwrap();
    assert!(matches!(
        builder.set_fp8_rows(ExpertMatrix::Down, 0, &[0; 130], &scales),
        Err(KernelError::Blocks { .. })
    ));
    let rows =
        KernelError::Rows { matrix: ExpertMatrix::Up, first_row: 129, actual: 140, row_bytes: 70, rows: 130 };
    assert_eq!(builder.set_fp8_rows(ExpertMatrix::Up, 129, &[0; 140], &scales), Err(rows));
    assert_eq!(builder.set_fp8_rows(ExpertMatrix::Up, 0, &[0; 130 * 70], &scales), Ok(()));
    let mut matrix = PackedMatrixBuilder::new(2, 70, class).unwrap();
    assert_eq!(matrix.push_rows(StoredDtype::Bf16, &[0; 140]), Err(form(WeightFormat::Fp8, "elements")));
    let plain = ExpertShape::new(70, 130, Dtype::Bf16, Activation::Silu).unwrap();
    let mut builder = PackedExpertBuilder::new(plain, StoredDtype::Bf16).unwrap();
    let error = builder.set_fp8_rows(ExpertMatrix::Up, 0, &[0; 70], &scales).unwrap_err();
    assert!(error.to_string().ends_with("expected plain, got fp8"), "{error}");
}
