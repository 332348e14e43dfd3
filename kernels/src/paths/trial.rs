//! Trying a path's kernels on a panel of invented numbers: are the bits right, and how long does it take?

use std::time::{Duration, Instant};

use super::choice::{Compiled, Measurement, Regime};
use super::float_mode::FloatMode;
use super::panel::{Panel, ROWS};
use super::widened::CHUNK;
use super::{InstructionPath, kernels};
use crate::plan::Phase;
use crate::shape::{HALF, PANEL, pair_words};
use crate::{Activation, Dtype};

/// Rows of the comparison: every block there is, then more than one block, which is where weights are widened for all of them.
const COMPARED_ROWS: usize = ROWS + 1;
/// Pairs of K of the comparison: a whole chunk of widened weights and a part of one.
const COMPARED_PAIRS: usize = CHUNK + 2;
/// Pairs of K of the measurement: 64 KB of bfloat16 weights, more than a first-level cache and less than a second-level one.
const MEASURED_PAIRS: usize = 256;
/// How often everything is timed; the shortest counts, which is what there is between disturbances.
const ROUNDS: usize = 8;

/// Bytes between rows of results.
const STRIDE: usize = PANEL * 4;

/// Numbers from a fixed seed (SplitMix64).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A float32 of either sign with an exponent from `lowest` on, one of `count` powers of two. A biased exponent of 0 gives denormals.
    fn float(&mut self, lowest: u32, count: u32) -> u32 {
        let bits = self.bits();
        let sign_and_fraction = (bits >> 32) as u32 & 0x807f_ffff;
        sign_and_fraction | (lowest + bits as u32 % count) << 23
    }

    /// A word of elements: one float32, or a pair of bfloat16.
    fn word(&mut self, dtype: Dtype, lowest: u32, count: u32) -> u32 {
        match dtype {
            Dtype::F32 => self.float(lowest, count),
            Dtype::Bf16 => self.float(lowest, count) & 0xffff_0000 | self.float(lowest, count) >> 16,
        }
    }
}

/// A cache line of words.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u32; 16]);

/// A panel, rows for it, and room for their results.
struct Trial {
    weights: Vec<Line>,
    /// Row after row, each of `row_words` words.
    rows: Vec<u32>,
    row_words: usize,
    biases: Biases,
}

/// A bias for every column of a panel, as bits.
struct Biases([u32; PANEL]);

impl Trial {
    /// `extreme`: with columns whose products lie around the smallest normal number, and a row that is not finite.
    fn new(dtype: Dtype, pairs: usize, rows: usize, extreme: bool) -> Self {
        let mut random = Random(1);
        let mut weights = vec![Line([0; 16]); pairs * pair_words(dtype) / 16];
        for (index, word) in weights.iter_mut().flat_map(|line| &mut line.0).enumerate() {
            // Biased exponents: 2^-10 to 2^1, and 2^-127 to 2^-118 in every fourth column.
            let (lowest, count) = if extreme && index % 4 == 3 { (0, 10) } else { (117, 12) };
            *word = random.word(dtype, lowest, count);
        }
        let row_words = pairs * dtype.bytes() / 2;
        let mut rows: Vec<u32> = (0..rows * row_words).map(|_| random.word(dtype, 117, 12)).collect();
        if extreme {
            // Infinity, or a pair of it and zero; times a weight that is flushed, NaN.
            rows[row_words] = 0x7f80_0000;
        }
        // As if they had been bfloat16.
        let biases = Biases(std::array::from_fn(|_| random.float(117, 12) & 0xffff_0000));
        Self { weights, rows, row_words, biases }
    }

    /// Computes a case for the rows from `first` on, as many as `output` has room for.
    fn run(&self, (path, kernels): Compiled, case: Case, first: usize, output: &mut [u8]) {
        let rows: Vec<*const u8> = self
            .rows
            .chunks_exact(self.row_words)
            .skip(first)
            .take(output.len() / STRIDE)
            .map(|row| row.as_ptr().cast())
            .collect();
        let weights = self.weights.as_ptr().cast::<u32>();
        let panel = Panel {
            weights,
            pairs: case.pairs,
            rows: rows.as_ptr(),
            row_count: rows.len(),
            out: output.as_mut_ptr(),
            out_stride: STRIDE,
            columns: if case.phase == Phase::GateUp { HALF } else { PANEL },
            activation: case.activation,
            biases: match case.biases {
                true => self.biases.0.as_ptr().cast(),
                false => std::ptr::null(),
            },
            next: weights.cast(),
        };
        let _mode = FloatMode::enter(path);
        // SAFETY: whoever tries a path has seen that the CPU has it, and its float mode is set. Weights and rows have at least the pairs of any case, and the output has a stride for every row.
        unsafe { kernels.of(case.phase)(&panel) };
    }
}

/// What is computed.
#[derive(Clone, Copy)]
struct Case {
    phase: Phase,
    pairs: usize,
    activation: Activation,
    biases: bool,
}

impl Case {
    /// The second phase has no activation: any will do.
    const fn down(pairs: usize) -> Self {
        Self { phase: Phase::Down, pairs, activation: Activation::Relu, biases: false }
    }

    const fn gate_up(pairs: usize, activation: Activation) -> Self {
        Self { phase: Phase::GateUp, pairs, activation, biases: false }
    }
}

/// What is compared: long sums once for each phase; what follows them needs no long ones.
const COMPARED: [Case; 6] = [
    Case::down(COMPARED_PAIRS),
    Case::gate_up(COMPARED_PAIRS, Activation::Silu),
    Case::gate_up(1, Activation::GeluTanh),
    Case::gate_up(1, Activation::Relu),
    Case { biases: true, ..Case::gate_up(1, Activation::ClampedSwiglu) },
    Case { biases: true, ..Case::down(1) },
];

/// The portable path's results.
pub(super) struct Reference {
    trial: Trial,
    /// For each of [`COMPARED`], rows of [`STRIDE`] bytes.
    expected: [Vec<u8>; COMPARED.len()],
}

impl Reference {
    /// Computes them, one row at a time.
    pub(super) fn new(dtype: Dtype) -> Self {
        let trial = Trial::new(dtype, COMPARED_PAIRS, COMPARED_ROWS, true);
        let portable = (InstructionPath::Portable, kernels(InstructionPath::Portable, dtype));
        let expected = COMPARED.map(|case| {
            let mut output = vec![0; COMPARED_ROWS * STRIDE];
            for (first, output) in output.chunks_exact_mut(STRIDE).enumerate() {
                trial.run(portable, case, first, output);
            }
            output
        });
        Self { trial, expected }
    }

    /// Does the path give the same bits, for every number of rows?
    pub(super) fn agrees(&self, compiled: Compiled) -> bool {
        let mut output = vec![0; COMPARED_ROWS * STRIDE];
        COMPARED.into_iter().zip(&self.expected).all(|(case, expected)| {
            (1..=COMPARED_ROWS).all(|rows| {
                let output = &mut output[..rows * STRIDE];
                output.fill(0);
                self.trial.run(compiled, case, 0, output);
                *output == expected[..output.len()]
            })
        })
    }
}

/// Times kernels of an element type.
pub(super) struct Timing {
    trial: Trial,
    output: Vec<u8>,
}

impl Timing {
    pub(super) fn new(dtype: Dtype) -> Self {
        let rows = Regime::Many.measured_rows();
        Self { trial: Trial::new(dtype, MEASURED_PAIRS, rows, false), output: vec![0; rows * STRIDE] }
    }

    /// The shortest times of each path, which are taken in turn.
    pub(super) fn measure(&mut self, paths: &[Compiled]) -> Vec<Measurement> {
        let begin = |(path, _): &Compiled| Measurement { path: *path, times: [Duration::MAX; 3] };
        let mut measurements: Vec<Measurement> = paths.iter().map(begin).collect();
        for _ in 0..ROUNDS {
            for (compiled, measurement) in paths.iter().zip(&mut measurements) {
                for (regime, shortest) in Regime::ALL.into_iter().zip(&mut measurement.times) {
                    let output = &mut self.output[..regime.measured_rows() * STRIDE];
                    let start = Instant::now();
                    self.trial.run(*compiled, Case::down(MEASURED_PAIRS), 0, output);
                    *shortest = start.elapsed().min(*shortest);
                }
            }
        }
        measurements
    }
}
