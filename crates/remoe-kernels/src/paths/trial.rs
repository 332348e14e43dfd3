//! Trying a path's kernels on a panel of invented numbers: are the bits right, and how long does it take?

use std::time::{Duration, Instant};

use super::choice::{Compiled, Measurement, Regime};
use super::chunked::CHUNK_ELEMENTS;
use super::float_mode::FloatMode;
use super::panel::{Panel, ROWS};
use super::steps::UNWIDENED;
use super::{InstructionPath, kernels};
use crate::phase::CallPhase;
use crate::quantise::{self, GROUP, write_row};
use crate::shape::{HALF, PANEL, SCALE_COLUMNS, step_words, steps};
use crate::{Activation, Dtype, NumericsClass, WeightFormat};

/// Rows of the comparison: every block there is, alone and beside others, and so many that weights are widened for all
/// of them. Deep panels, which alone are walked by chunks where there are many passes, are left to the tests.
const COMPARED_ROWS: [usize; ROWS + 4] = [1, 2, 3, 4, 5, ROWS, ROWS + 1, ROWS + 4, 2 * ROWS, MOST_ROWS];
const MOST_ROWS: usize = UNWIDENED + ROWS;
/// Rows among them that differ: no multiple of a block's, so that none has the place of its like in another one.
const DISTINCT_ROWS: usize = ROWS + 1;
/// Elements of K of the comparison: more than one chunk, whole ones of widened weights and a part of one.
const COMPARED: usize = CHUNK_ELEMENTS + 6;
/// Elements of K of the measurement: 64 KB of bfloat16 weights, more than a first-level cache and less than a
/// second-level one.
const MEASURED: usize = 512;
/// How often everything is timed; the shortest counts, which is what there is between disturbances.
const ROUNDS: usize = 8;

/// Bytes between rows of results.
const STRIDE: usize = PANEL * 4;

/// Numbers from a fixed seed (SplitMix64).
struct SplitMix64(u64);

impl SplitMix64 {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A float32 of either sign with an exponent from `lowest` on, one of `count` powers of two. A biased exponent of 0
    /// gives denormals.
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
struct CacheLine([u32; 16]);

/// A panel, rows for it, and room for their results.
struct Trial {
    class: NumericsClass,
    weights: Vec<CacheLine>,
    /// Row after row, each of `row_words` words.
    rows: Vec<u32>,
    row_words: usize,
    biases: Biases,
}

/// A bias for every column of a panel, as bits.
struct Biases([u32; PANEL]);

impl Trial {
    /// For `elements` of K. `extreme`: with columns whose products lie around the smallest normal number, and a row
    /// that is not finite.
    fn new(class: NumericsClass, elements: usize, rows: usize, extreme: bool) -> Self {
        let mut random = SplitMix64(1);
        let words = step_words(class.dtype, class.weights);
        let mut weights = vec![CacheLine([0; 16]); steps(elements, class.weights) * words / 16];
        // Of weights that are quantised, the scales are elements: the last words of each group, or of codes with
        // theirs.
        let (element, integers) = match class.weights {
            WeightFormat::Plain => (class.dtype, 0),
            WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 => (Dtype::Bf16, words - PANEL / 2),
            WeightFormat::Fp8 => (Dtype::F32, words - PANEL / SCALE_COLUMNS),
        };
        for (index, word) in weights.iter_mut().flat_map(|line| &mut line.0).enumerate() {
            // Biased exponents: 2^-10 to 2^1, and 2^-127 to 2^-118 in every fourth column.
            let (lowest, count) = if extreme && index % 4 == 3 { (0, 10) } else { (117, 12) };
            *word = match index % words < integers {
                true if class.weights == WeightFormat::Fp8 => {
                    // Not those that stand for no number.
                    let number = |code: u8| if code & 0x7f == 0x7f { code ^ 1 } else { code };
                    u32::from_le_bytes((random.bits() as u32).to_le_bytes().map(number))
                }
                true => random.bits() as u32,
                // As in checkpoints, whose blocks are wider than a panel: one scale for all columns of a step. What is
                // compared has others as well.
                false
                    if class.weights == WeightFormat::Fp8
                        && !(extreme && (index / words).is_multiple_of(2)) =>
                {
                    (120 << 23) | ((index / words) as u32 * 0x1_2345)
                }
                false => random.word(element, lowest, count),
            };
        }
        let (rows, row_words) = match class.weights {
            WeightFormat::Plain | WeightFormat::Fp8 => {
                let elements = match class.weights {
                    WeightFormat::Fp8 => elements.next_multiple_of(GROUP),
                    _ => elements,
                };
                let row_words = elements * class.dtype.bytes() / 4;
                let mut words: Vec<u32> =
                    (0..rows * row_words).map(|_| random.word(class.dtype, 117, 12)).collect();
                if extreme {
                    // Infinity, or a pair of it and zero; times a weight that is flushed, NaN.
                    words[row_words] = 0x7f80_0000;
                }
                (words, row_words)
            }
            WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 => {
                let row_words = quantise::row_bytes(elements) / 4;
                let mut words = vec![0u32; rows * row_words];
                for (index, row) in words.chunks_exact_mut(row_words).enumerate() {
                    let mut numbers: Vec<f32> =
                        (0..elements).map(|_| f32::from_bits(random.float(117, 12))).collect();
                    if extreme && index == 1 {
                        numbers[0] = f32::INFINITY;
                    }
                    // SAFETY: `row` has just so many bytes.
                    unsafe { write_row(elements, |k| numbers[k], class.weights, row.as_mut_ptr().cast()) };
                }
                (words, row_words)
            }
        };
        // As if they had been bfloat16.
        let biases = Biases(std::array::from_fn(|_| random.float(117, 12) & 0xffff_0000));
        Self { class, weights, rows, row_words, biases }
    }

    /// Computes a case for the rows from `first` on, and from the beginning behind the last, as many as `output` has
    /// room for.
    fn run(&self, (path, kernels): Compiled, case: TrialCase, first: usize, output: &mut [u8]) {
        let rows: Vec<*const u8> = self
            .rows
            .chunks_exact(self.row_words)
            .cycle()
            .skip(first)
            .take(output.len() / STRIDE)
            .map(|row| row.as_ptr().cast())
            .collect();
        let weights = self.weights.as_ptr().cast::<u32>();
        let panel = Panel {
            weights,
            steps: steps(case.elements, self.class.weights),
            rows: rows.as_ptr(),
            row_count: rows.len(),
            out: output.as_mut_ptr(),
            out_stride: STRIDE,
            columns: if case.phase == CallPhase::GateUp && case.gated { HALF } else { PANEL },
            phase: case.phase,
            dtype: self.class.dtype,
            activation: case.activation,
            gated: case.gated,
            biases: match case.biases {
                true => self.biases.0.as_ptr().cast(),
                false => std::ptr::null(),
            },
            next: weights.cast(),
        };
        let _mode = FloatMode::enter(path);
        // SAFETY: the caller has checked that the CPU has the path, and its float mode is set. Weights and rows have at
        // least the elements of any case, and the output has a stride for every row.
        unsafe { kernels.of(case.phase)(&panel) };
    }
}

/// Computation that is tried.
#[derive(Clone, Copy)]
struct TrialCase {
    phase: CallPhase,
    elements: usize,
    activation: Activation,
    gated: bool,
    biases: bool,
}

impl TrialCase {
    /// The second phase has no activation: any will do.
    const fn down(elements: usize) -> Self {
        Self { phase: CallPhase::Down, elements, activation: Activation::Relu, gated: true, biases: false }
    }

    const fn gate_up(elements: usize, activation: Activation) -> Self {
        Self { phase: CallPhase::GateUp, elements, activation, gated: true, biases: false }
    }
}

/// Compared computations: long sums once for each phase; what follows the sums needs no long ones.
const CASES: [TrialCase; 7] = [
    TrialCase::down(COMPARED),
    TrialCase::gate_up(COMPARED, Activation::Silu),
    TrialCase::gate_up(2, Activation::GeluTanh),
    TrialCase::gate_up(2, Activation::Relu),
    TrialCase { biases: true, ..TrialCase::gate_up(2, Activation::ClampedSwiglu) },
    TrialCase { gated: false, biases: true, ..TrialCase::gate_up(2, Activation::GeluTanh) },
    TrialCase { biases: true, ..TrialCase::down(2) },
];

/// The portable path's results.
pub(super) struct Reference {
    trial: Trial,
    /// For each of [`CASES`], [`DISTINCT_ROWS`] of [`STRIDE`] bytes.
    expected: [Vec<u8>; CASES.len()],
}

impl Reference {
    /// Computes them, one row at a time.
    pub(super) fn new(class: NumericsClass) -> Self {
        let trial = Trial::new(class, COMPARED, DISTINCT_ROWS, true);
        let portable = (InstructionPath::Portable, kernels(InstructionPath::Portable, class));
        let expected = CASES.map(|case| {
            let mut output = vec![0; DISTINCT_ROWS * STRIDE];
            for (first, output) in output.chunks_exact_mut(STRIDE).enumerate() {
                trial.run(portable, case, first, output);
            }
            output
        });
        Self { trial, expected }
    }

    /// Does the path give the same bits for each of [`COMPARED_ROWS`]?
    pub(super) fn agrees(&self, compiled: Compiled) -> bool {
        let mut output = vec![0; MOST_ROWS * STRIDE];
        CASES.into_iter().zip(&self.expected).all(|(case, expected)| {
            COMPARED_ROWS.into_iter().all(|rows| {
                let output = &mut output[..rows * STRIDE];
                output.fill(0);
                self.trial.run(compiled, case, 0, output);
                output.chunks_exact(STRIDE).eq(expected.chunks_exact(STRIDE).cycle().take(rows))
            })
        })
    }
}

/// Times kernels of a class.
pub(super) struct Timing {
    trial: Trial,
    output: Vec<u8>,
}

impl Timing {
    pub(super) fn new(class: NumericsClass) -> Self {
        let rows = Regime::Many.measured_rows();
        Self { trial: Trial::new(class, MEASURED, rows, false), output: vec![0; rows * STRIDE] }
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
                    self.trial.run(*compiled, TrialCase::down(MEASURED), 0, output);
                    *shortest = start.elapsed().min(*shortest);
                }
            }
        }
        measurements
    }
}
