#![allow(dead_code, reason = "every test binary uses a part of it")]
//! An expert written down naively from the crate's documentation, without panels, vectors or threads, and data to try it on.

use remoe_kernels::numerics::{activate, add, factor, flush, fma, from_bf16, mul, round_bf16, to_bf16};
use remoe_kernels::{
    Activation, Dtype, ExpertShape, InstructionPath, Job, Matrix, PackedExpert, PackedExpertBuilder, Pool,
    PoolConfig,
};

/// A small generator of numbers (SplitMix64), so that every failure can be repeated.
pub(crate) struct Random(pub(crate) u64);

impl Random {
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

    /// Uniform in [-1, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// What the numbers are like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Data {
    /// Of ordinary size.
    Ordinary,
    /// Products and sums around the smallest normal number, denormals among them.
    Tiny,
    /// Any exponent, both zeros.
    Wide,
    /// As `Wide`, with infinities and NaN.
    Special,
}

impl Data {
    pub(crate) const ALL: [Self; 4] = [Self::Ordinary, Self::Tiny, Self::Wide, Self::Special];

    pub(crate) fn number(self, random: &mut Random) -> f32 {
        let sign = ((random.bits() & 1) as u32) << 31;
        let fraction = (random.bits() & 0x7f_ffff) as u32;
        let with_exponent = |e: usize| f32::from_bits(sign | (e as u32) << 23 | fraction);
        match self {
            Self::Ordinary => random.unit(),
            // Products of two such are around 2^-126.
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

    pub(crate) fn vector(self, random: &mut Random, n: usize, dtype: Dtype) -> Vec<f32> {
        (0..n).map(|_| representable(self.number(random), dtype)).collect()
    }
}

/// The number itself, or its upper half: without rounding, so that denormals and NaN survive.
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

/// An expert in both forms.
pub(crate) struct Expert {
    pub(crate) shape: ExpertShape,
    pub(crate) gate: Vec<f32>,
    pub(crate) up: Vec<f32>,
    pub(crate) down: Vec<f32>,
    /// Of gate, up and down, where the shape has them.
    pub(crate) biases: Option<[Vec<f32>; 3]>,
    pub(crate) packed: PackedExpert,
}

impl Expert {
    pub(crate) fn new(
        random: &mut Random,
        data: Data,
        hidden: usize,
        width: usize,
        dtype: Dtype,
        activation: Activation,
    ) -> Self {
        let mut shape = ExpertShape::new(hidden, width, dtype, activation).unwrap();
        let biases = (activation == Activation::ClampedSwiglu).then(|| {
            shape = shape.with_biases();
            Matrix::ALL.map(|matrix| data.vector(random, shape.matrix(matrix).0, dtype))
        });
        let [gate, up, down] = [0; 3].map(|_| data.vector(random, hidden * width, dtype));
        let bytes = |matrix: &[f32]| to_bytes(matrix, dtype);
        let mut builder = PackedExpertBuilder::new(shape, dtype.into()).unwrap();
        for (matrix, weights) in Matrix::ALL.into_iter().zip([&gate, &up, &down]) {
            builder.rows(matrix, 0, &bytes(weights)).unwrap();
            if let Some(biases) = &biases {
                builder.biases(matrix, &biases[matrix as usize]).unwrap();
            }
        }
        let packed = builder.finish().unwrap();
        Self { shape, gate, up, down, biases, packed }
    }

    /// One row, by the rules, in the scalar functions that define them.
    pub(crate) fn row(&self, x: &[f32]) -> Vec<f32> {
        let bf16 = self.shape.dtype() == Dtype::Bf16;
        let (hidden, width) = (self.shape.hidden(), self.shape.width());
        let round = |x: f32| if bf16 { round_bf16(x) } else { x };
        let biased = |matrix: Matrix, n: usize, sum: f32| match &self.biases {
            None => sum,
            Some(biases) => round(add(sum, round(biases[matrix as usize][n]))),
        };
        let activation = self.shape.activation();
        let h: Vec<f32> = (0..width)
            .map(|n| {
                let gate = biased(Matrix::Gate, n, round(dot(x, &self.gate[n * hidden..][..hidden])));
                let up = biased(Matrix::Up, n, round(dot(x, &self.up[n * hidden..][..hidden])));
                round(mul(round(activate(activation, gate)), round(factor(activation, up))))
            })
            .collect();
        (0..hidden)
            .map(|n| biased(Matrix::Down, n, round(dot(&h, &self.down[n * width..][..width]))))
            .collect()
    }
}

/// From zero, K ascending in pairs, the odd element first.
pub(crate) fn dot(x: &[f32], w: &[f32]) -> f32 {
    let at = |v: &[f32], k: usize| v.get(k).map_or(0.0, |&x| flush(x));
    (0..x.len().div_ceil(2)).fold(0.0, |acc, p| {
        let acc = fma(at(x, 2 * p + 1), at(w, 2 * p + 1), acc);
        fma(at(x, 2 * p), at(w, 2 * p), acc)
    })
}

/// A pool with a path, or with those that are measured fastest.
pub(crate) fn pool(threads: usize, path: impl Into<Option<InstructionPath>>) -> Pool {
    Pool::new(PoolConfig { threads, path: path.into(), ..PoolConfig::default() }).unwrap()
}

pub(crate) fn forward(pool: &Pool, expert: &PackedExpert, inputs: &[u8], row_index: &[u32]) -> Vec<u8> {
    let mut output = vec![0xaa; row_index.len() * expert.shape().row_bytes()];
    pool.forward(&mut [Job { expert, inputs, row_index, output: &mut output }]).unwrap();
    output
}

/// The bits that must come out for a number: every NaN is the same one.
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
