#![allow(dead_code, reason = "every test binary uses a part of it")]
//! Reference implementation of an expert from the crate's documentation, without panels, vectors or threads, and test
//! data.

use remoe_kernels::activations::{activate, factor};
use remoe_kernels::numerics::{add, flush, fma, from_bf16, mul, round_bf16, to_bf16};
use remoe_kernels::{
    Activation, Dtype, ExpertJob, ExpertMatrix, ExpertShape, InstructionPath, NumericsClass, PackedExpert,
    PackedExpertBuilder, Pool, PoolConfig, WeightFormat,
};

/// Deterministic generator of random numbers (SplitMix64), so that failures are reproducible.
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Draws a number that is uniform in [-1, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Distribution of the numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Data {
    /// Numbers of ordinary size.
    Ordinary,
    /// Products and sums around the smallest normal number, denormals among them.
    Tiny,
    /// Numbers of any exponent, and both zeros.
    Wide,
    /// As `Wide`, with infinities and NaN.
    Special,
}

impl Data {
    pub(crate) const ALL: [Self; 4] = [Self::Ordinary, Self::Tiny, Self::Wide, Self::Special];

    pub(crate) fn number(self, random: &mut SplitMix64) -> f32 {
        let sign = ((random.bits() & 1) as u32) << 31;
        let fraction = (random.bits() & 0x7f_ffff) as u32;
        let with_exponent = |e: usize| f32::from_bits(sign | (e as u32) << 23 | fraction);
        match self {
            Self::Ordinary => random.unit(),
            // Products of two such numbers are around 2^-126.
            Self::Tiny => match random.below(8) {
                0 => with_exponent(0),
                1 => with_exponent(1 + random.below(3)),
                2 => with_exponent(100 + random.below(60)),
                _ => with_exponent(60 + random.below(8)),
            },
            Self::Wide => match random.below(8) {
                0 => f32::from_bits(sign),
                1 => with_exponent(random.below(255)),
                _ => with_exponent(100 + random.below(50)),
            },
            Self::Special => match random.below(40) {
                0 => f32::from_bits(sign | 0x7f80_0000),
                1 => f32::from_bits(sign | 0x7f80_0001 | fraction),
                _ => Self::Wide.number(random),
            },
        }
    }

    pub(crate) fn vector(self, random: &mut SplitMix64, n: usize, dtype: Dtype) -> Vec<f32> {
        (0..n).map(|_| representable(self.number(random), dtype)).collect()
    }
}

/// Returns the number itself, or its upper half for bfloat16: truncated, so that denormals and NaN stay.
fn representable(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => {
            let bits = x.to_bits() & 0xffff_0000;
            from_bf16(((bits | u32::from(x.is_nan()) << 16) >> 16) as u16)
        }
    }
}

pub(crate) fn to_bytes(numbers: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        // The numbers are representable; rounding would lose denormals.
        Dtype::Bf16 => numbers.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
    }
}

/// Expert with its weights as numbers and packed.
pub(crate) struct Expert {
    pub(crate) shape: ExpertShape,
    pub(crate) gate: Vec<f32>,
    pub(crate) up: Vec<f32>,
    pub(crate) down: Vec<f32>,
    /// Biases of gate, up and down; empty if the shape has none.
    pub(crate) biases: [Vec<f32>; 3],
    pub(crate) packed: PackedExpert,
}

impl Expert {
    pub(crate) fn new(
        random: &mut SplitMix64,
        data: Data,
        hidden: usize,
        width: usize,
        class: impl Into<NumericsClass>,
        activation: Activation,
    ) -> Self {
        let shape = ExpertShape::new(hidden, width, class, activation).unwrap();
        let shape = if activation == Activation::ClampedSwiglu { shape.with_biases() } else { shape };
        Self::of_shape(random, data, shape)
    }

    pub(crate) fn of_shape(random: &mut SplitMix64, data: Data, shape: ExpertShape) -> Self {
        let dtype = shape.dtype();
        let biases = ExpertMatrix::ALL.map(|matrix| {
            let count = if shape.has_biases(matrix) { shape.matrix(matrix).0 } else { 0 };
            data.vector(random, count, dtype)
        });
        let [gate, up, down] = ExpertMatrix::ALL.map(|matrix| {
            let (rows, columns) = shape.matrix(matrix);
            data.vector(random, rows * columns, dtype)
        });
        let bytes = |matrix: &[f32]| to_bytes(matrix, dtype);
        let mut builder = PackedExpertBuilder::new(shape, dtype.into()).unwrap();
        for (matrix, weights) in ExpertMatrix::ALL.into_iter().zip([&gate, &up, &down]) {
            builder.set_rows(matrix, 0, &bytes(weights)).unwrap();
            builder.set_biases(matrix, &biases[matrix as usize]).unwrap();
        }
        let packed = builder.finish().unwrap();
        Self { shape, gate, up, down, biases, packed }
    }

    /// Computes a row with the scalar functions that define the results.
    pub(crate) fn row(&self, x: &[f32]) -> Vec<f32> {
        let bf16 = self.shape.dtype() == Dtype::Bf16;
        let (hidden, width) = (self.shape.hidden(), self.shape.width());
        let round = |x: f32| if bf16 { round_bf16(x) } else { x };
        let biased = |matrix: ExpertMatrix, n: usize, sum: f32| match self.biases[matrix as usize].get(n) {
            None => sum,
            Some(bias) => round(add(sum, round(*bias))),
        };
        let activation = self.shape.activation();
        let dot = |x: &[f32], w: &[f32]| dot_in(self.shape.class().weights, x, w);
        let h: Vec<f32> = (0..width)
            .map(|n| {
                let up = biased(ExpertMatrix::Up, n, round(dot(x, &self.up[n * hidden..][..hidden])));
                if !self.shape.has_gate() {
                    return round(activate(activation, up));
                }
                let gate = biased(ExpertMatrix::Gate, n, round(dot(x, &self.gate[n * hidden..][..hidden])));
                round(mul(round(activate(activation, gate)), round(factor(activation, up))))
            })
            .collect();
        (0..hidden)
            .map(|n| biased(ExpertMatrix::Down, n, round(dot(&h, &self.down[n * width..][..width]))))
            .collect()
    }
}

/// Computes a dot product from zero, in ascending pairs of elements, the odd element of a pair first.
pub(crate) fn dot(x: &[f32], w: &[f32]) -> f32 {
    let at = |v: &[f32], k: usize| v.get(k).map_or(0.0, |&x| flush(x));
    (0..x.len().div_ceil(2)).fold(0.0, |acc, p| {
        let acc = fma(at(x, 2 * p + 1), at(w, 2 * p + 1), acc);
        fma(at(x, 2 * p), at(w, 2 * p), acc)
    })
}

/// Computes a dot product with weights in the format `weights`.
pub(crate) fn dot_in(weights: WeightFormat, x: &[f32], w: &[f32]) -> f32 {
    if weights == WeightFormat::Plain {
        return dot(x, w);
    }
    // In ascending groups: an exact sum of integers times both scales, added with one rounding.
    x.chunks(32).zip(w.chunks(32)).fold(0.0, |acc, (x, w)| {
        let (x, x_scale) = integers(x, WeightFormat::Int8, false);
        let (w, w_scale) = integers(w, weights, true);
        let sum: i32 = x.iter().zip(&w).map(|(x, w)| x * w).sum();
        fma(sum as f32, mul(w_scale, x_scale), acc)
    })
}

/// Quantises a group of weights or of a row's elements to integers and their scale, as the crate's documentation says.
pub(crate) fn integers(group: &[f32], format: WeightFormat, weight: bool) -> (Vec<i32>, f32) {
    if group.iter().any(|x| !x.is_finite()) {
        return (vec![0; group.len()], f32::NAN);
    }
    let extreme = group.iter().copied().fold(0.0f32, |most, x| if x.abs() > most.abs() { x } else { most });
    if extreme.abs() < 2f32.powi(-100) {
        return (vec![0; group.len()], 0.0);
    }
    let nearest = |factor: f32, limits: std::ops::RangeInclusive<i32>| -> Vec<i32> {
        let integer = |x: &f32| (x * factor).round_ties_even() as i32;
        group.iter().map(integer).map(|q| q.clamp(*limits.start(), *limits.end())).collect()
    };
    match (format, weight) {
        (_, false) => (nearest(127.0 / extreme.abs(), -127..=127), extreme.abs() / 127.0),
        (WeightFormat::Int4, true) => {
            let reaches = [-8.0, -7.5, -7.0, -8.5, -9.0, 7.0];
            // Errors are compared in units that keep their squares from vanishing.
            let exponent = (extreme.to_bits() >> 23 & 0xff) as i32 - 127;
            let unit = 2f32.powi(-exponent.min(126));
            let tried = reaches.map(|reach| {
                let scale = round_bf16(extreme / reach);
                let integers = nearest(1.0 / scale, -8..=7);
                let of = |(x, q): (&f32, &i32)| ((x * (1.0 / scale) - *q as f32) * (scale * unit)).powi(2);
                let error = group.iter().zip(&integers).map(of).fold(0.0, |sum, e| sum + e);
                (integers, scale, error)
            });
            let best = tried.iter().map(|tried| tried.2).fold(f32::INFINITY, f32::min);
            let (integers, scale, _) = tried.into_iter().find(|tried| tried.2 <= best).unwrap();
            (integers, scale)
        }
        (WeightFormat::Mxfp4, true) => {
            // OCP Microscaling Formats 1.0: the shared exponent is the largest one less 2, that of e2m1's largest.
            let power = 2f64.powi((f64::from(extreme.abs()).log2().floor()) as i32 - 2);
            let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            let nearest = |x: &f32| {
                let x = f64::from(*x) / power;
                let distance = |code: usize| (magnitudes[code] - x.abs()).abs();
                // Ties go to the even code.
                let better =
                    |a: &usize, b: &usize| distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2)));
                let code = (0..8).min_by(better).unwrap();
                (2.0 * magnitudes[code] * x.signum()) as i32
            };
            (group.iter().map(nearest).collect(), (power / 2.0) as f32)
        }
        (_, true) => {
            let scale = round_bf16(extreme.abs() / 127.0);
            (nearest(1.0 / scale, -127..=127), scale)
        }
    }
}

/// Creates a pool with the given path, or with the paths that are measured to be the fastest.
pub(crate) fn pool(threads: usize, path: impl Into<Option<InstructionPath>>) -> Pool {
    Pool::new(PoolConfig { threads, path: path.into(), ..PoolConfig::default() }).unwrap()
}

/// Creates a pool of one thread for each instruction path, and pools of two and three threads with the usual paths.
pub(crate) fn pools() -> Vec<Pool> {
    let mut pools: Vec<Pool> = InstructionPath::available().into_iter().map(|path| pool(1, path)).collect();
    pools.extend([2, 3].map(|threads| pool(threads, None)));
    pools
}

/// Computes `rows` rows of an expert on all pools and compares them with the reference.
pub(crate) fn check(pools: &[Pool], random: &mut SplitMix64, data: Data, expert: &Expert, rows: usize) {
    let (class, dtype, hidden) = (expert.shape.class(), expert.shape.dtype(), expert.shape.hidden());
    let inputs: Vec<Vec<f32>> = (0..rows).map(|_| data.vector(random, hidden, dtype)).collect();
    let bytes = to_bytes(&inputs.concat(), dtype);
    let index: Vec<u32> = (0..rows as u32).rev().collect();
    let expected: Vec<u32> =
        inputs.iter().rev().flat_map(|x| expert.row(x)).map(|x| stored_bits(x, dtype)).collect();
    for pool in pools {
        let actual = bits(&forward(pool, &expert.packed, &bytes, &index), dtype);
        for (at, (found, wanted)) in actual.iter().zip(&expected).enumerate() {
            assert!(
                found == wanted,
                "{} with {} threads, {class}, {:?}, {data:?}, {rows} rows: row {} column {}: {found:#x}, expected {wanted:#x}",
                pool.paths(class),
                pool.threads(),
                expert.shape,
                at / hidden,
                at % hidden,
            );
        }
    }
}

pub(crate) fn forward(pool: &Pool, expert: &PackedExpert, inputs: &[u8], row_index: &[u32]) -> Vec<u8> {
    let mut output = vec![0xaa; row_index.len() * expert.shape().row_bytes()];
    pool.forward(&mut [ExpertJob { expert, inputs, row_index, output: &mut output }]).unwrap();
    output
}

/// Returns the bits that a result with this value has; all NaNs have the same bits.
pub(crate) fn stored_bits(x: f32, dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 if x.is_nan() => 0x7fc0_0000,
        Dtype::F32 => x.to_bits(),
        Dtype::Bf16 => u32::from(to_bf16(x)),
    }
}

pub(crate) fn bits(bytes: &[u8], dtype: Dtype) -> Vec<u32> {
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect(),
    }
}
