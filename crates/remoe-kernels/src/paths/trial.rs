//! Trials of a path's kernels on a panel of random numbers: compares their bits with the portable path, and times them.

use std::time::{Duration, Instant};

use super::choice::{Measurement, PathKernels, Regime};
use super::chunked::CHUNK_ELEMENTS;
use super::float_mode::FloatMode;
use super::panel::{MAX_BLOCK_ROWS, Panel};
use super::steps::MAX_UNWIDENED_BF16_ROWS;
use super::{InstructionPath, kernels};
use crate::phase::CallPhase;
use crate::quantise::{self, GROUP, quantise_row};
use crate::shape::{HALF_PANEL, PANEL, SCALE_COLUMNS, step_words, steps};
use crate::{Activation, Dtype, NumericsClass, WeightFormat};

/// Row counts of the comparison. They cover blocks of every size, alone and beside others, and enough rows for weights
/// to be widened for all of them. Very deep panels, walked in chunks despite many passes, are only covered by tests.
const COMPARED_ROWS: [usize; MAX_BLOCK_ROWS + 4] =
    [1, 2, 3, 4, 5, MAX_BLOCK_ROWS, MAX_BLOCK_ROWS + 1, MAX_BLOCK_ROWS + 4, 2 * MAX_BLOCK_ROWS, MOST_ROWS];
const MOST_ROWS: usize = MAX_UNWIDENED_BF16_ROWS + MAX_BLOCK_ROWS;
/// Number of different rows in the comparison. It is not a multiple of a block's rows, so that equal rows take different
/// positions in their blocks.
const DISTINCT_ROWS: usize = MAX_BLOCK_ROWS + 1;
/// Elements of K of the comparison: more than one chunk, and not a whole number of chunks of widened weights.
const COMPARED_ELEMENTS: usize = CHUNK_ELEMENTS + 6;
/// Elements of K of the measurement: 64 KB of bfloat16 weights, more than a first-level cache and less than a
/// second-level one.
const MEASURED_ELEMENTS: usize = 512;
/// Number of measurements. The shortest time counts, since disturbances only lengthen times.
const ROUNDS: usize = 8;

/// Bytes between rows of results.
const STRIDE: usize = PANEL * 4;

/// Pseudo-random numbers from a fixed seed (SplitMix64; Steele, Lea and Flood, OOPSLA 2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns the bits of a float32 of either sign with one of `count` biased exponents from `lowest` on. Exponent 0
    /// gives denormals.
    fn float(&mut self, lowest: u32, count: u32) -> u32 {
        let bits = self.bits();
        let sign_and_fraction = (bits >> 32) as u32 & 0x807f_ffff;
        sign_and_fraction | (lowest + bits as u32 % count) << 23
    }

    /// Returns a word of random elements: one float32, or a pair of bfloat16.
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

/// A panel, rows and biases of random numbers.
struct Trial {
    class: NumericsClass,
    weights: Vec<CacheLine>,
    /// Row after row, each of `row_words` words.
    rows: Vec<u32>,
    row_words: usize,
    biases: PanelBiases,
}

/// Biases of a panel's columns, as the bits of float32.
struct PanelBiases([u32; PANEL]);

impl Trial {
    /// Draws numbers for `elements` elements of K. If `has_extremes`, the products of some columns lie around the smallest
    /// normal number, and one row is not finite.
    fn new(class: NumericsClass, elements: usize, rows: usize, has_extremes: bool) -> Self {
        let mut random = SplitMix64(1);
        let words = step_words(class.dtype, class.weights);
        let mut weights = vec![CacheLine([0; 16]); steps(elements, class.weights) * words / 16];
        // Element type of what is drawn as numbers (weights, or scales in the last words of a group), and the number of
        // a step's first words that are integers or codes.
        let (element, integer_words) = match class.weights {
            WeightFormat::Plain => (class.dtype, 0),
            WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 => (Dtype::Bf16, words - PANEL / 2),
            WeightFormat::Fp8 => (Dtype::F32, words - PANEL / SCALE_COLUMNS),
        };
        for (index, word) in weights.iter_mut().flat_map(|line| &mut line.0).enumerate() {
            // Biased exponents: 2^-10 to 2^1, and 2^-127 to 2^-118 in every fourth column.
            let (lowest, count) = if has_extremes && index % 4 == 3 { (0, 10) } else { (117, 12) };
            *word = match index % words < integer_words {
                true if class.weights == WeightFormat::Fp8 => {
                    // Avoids the codes of NaN.
                    let number = |code: u8| if code & 0x7f == 0x7f { code ^ 1 } else { code };
                    u32::from_le_bytes((random.bits() as u32).to_le_bytes().map(number))
                }
                true => random.bits() as u32,
                // One scale for all columns of a step, as in checkpoints, which have blocks wider than a panel. The
                // comparison also has steps with different scales.
                false
                    if class.weights == WeightFormat::Fp8
                        && !(has_extremes && (index / words).is_multiple_of(2)) =>
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
                if has_extremes {
                    // Infinity, or a pair of infinity and zero. Times a weight that is flushed to zero, it gives NaN.
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
                    if has_extremes && index == 1 {
                        numbers[0] = f32::INFINITY;
                    }
                    // SAFETY: `row` has `row_bytes(elements)` bytes.
                    unsafe { quantise_row(elements, |k| numbers[k], class.weights, row.as_mut_ptr().cast()) };
                }
                (words, row_words)
            }
        };
        // Biases are rounded to bfloat16, so that they suit both element types.
        let biases = PanelBiases(std::array::from_fn(|_| random.float(117, 12) & 0xffff_0000));
        Self { class, weights, rows, row_words, biases }
    }

    /// Computes a case for as many rows as `output` has room for, from row `first` on. After the last row the first one
    /// follows again.
    fn run(&self, (path, kernels): PathKernels, case: TrialCase, first: usize, output: &mut [u8]) {
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
            columns: if case.phase == CallPhase::GateUp && case.has_gate { HALF_PANEL } else { PANEL },
            phase: case.phase,
            dtype: self.class.dtype,
            activation: case.activation,
            has_gate: case.has_gate,
            biases: match case.has_biases {
                true => self.biases.0.as_ptr().cast(),
                false => std::ptr::null(),
            },
            next: weights.cast(),
        };
        let _mode = FloatMode::enter(path);
        // SAFETY: the CPU has the path, as all callers check, and its float mode is set. Weights and rows have at least
        // the elements of any case, and the output has [`STRIDE`] bytes for every row.
        unsafe { kernels.for_phase(case.phase)(&panel) };
    }
}

/// One computation of a trial.
#[derive(Clone, Copy)]
struct TrialCase {
    phase: CallPhase,
    /// Elements of K.
    elements: usize,
    activation: Activation,
    has_gate: bool,
    has_biases: bool,
}

impl TrialCase {
    /// Returns a case of the second phase, which ignores the activation.
    const fn down(elements: usize) -> Self {
        Self {
            phase: CallPhase::Down,
            elements,
            activation: Activation::Relu,
            has_gate: true,
            has_biases: false,
        }
    }

    const fn gate_up(elements: usize, activation: Activation) -> Self {
        Self { phase: CallPhase::GateUp, elements, activation, has_gate: true, has_biases: false }
    }
}

/// Cases of the comparison: one with long sums for each phase, and short ones for the activations, gates and biases.
const CASES: [TrialCase; 7] = [
    TrialCase::down(COMPARED_ELEMENTS),
    TrialCase::gate_up(COMPARED_ELEMENTS, Activation::Silu),
    TrialCase::gate_up(2, Activation::GeluTanh),
    TrialCase::gate_up(2, Activation::Relu),
    TrialCase { has_biases: true, ..TrialCase::gate_up(2, Activation::ClampedSwiglu) },
    TrialCase { has_gate: false, has_biases: true, ..TrialCase::gate_up(2, Activation::GeluTanh) },
    TrialCase { has_biases: true, ..TrialCase::down(2) },
];

/// Results of the portable path, with which other paths are compared.
pub(super) struct Reference {
    trial: Trial,
    /// For each of [`CASES`], [`DISTINCT_ROWS`] rows of [`STRIDE`] bytes.
    expected: [Vec<u8>; CASES.len()],
}

impl Reference {
    /// Computes the reference, one row at a time.
    pub(super) fn new(class: NumericsClass) -> Self {
        let trial = Trial::new(class, COMPARED_ELEMENTS, DISTINCT_ROWS, true);
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

    /// Reports if a path gives the same bits for each of [`COMPARED_ROWS`].
    pub(super) fn agrees(&self, candidate: PathKernels) -> bool {
        let mut output = vec![0; MOST_ROWS * STRIDE];
        CASES.into_iter().zip(&self.expected).all(|(case, expected)| {
            COMPARED_ROWS.into_iter().all(|rows| {
                let output = &mut output[..rows * STRIDE];
                output.fill(0);
                self.trial.run(candidate, case, 0, output);
                output.chunks_exact(STRIDE).eq(expected.chunks_exact(STRIDE).cycle().take(rows))
            })
        })
    }
}

/// Measures the times of kernels of a class.
pub(super) struct Timing {
    trial: Trial,
    output: Vec<u8>,
}

impl Timing {
    pub(super) fn new(class: NumericsClass) -> Self {
        let rows = Regime::Many.measured_rows();
        Self { trial: Trial::new(class, MEASURED_ELEMENTS, rows, false), output: vec![0; rows * STRIDE] }
    }

    /// Returns the shortest times of each path. Paths are measured in turns.
    pub(super) fn measure(&mut self, paths: &[PathKernels]) -> Vec<Measurement> {
        let unmeasured = |(path, _): &PathKernels| Measurement { path: *path, times: [Duration::MAX; 3] };
        let mut measurements: Vec<Measurement> = paths.iter().map(unmeasured).collect();
        for _ in 0..ROUNDS {
            for (candidate, measurement) in paths.iter().zip(&mut measurements) {
                for (regime, shortest) in Regime::ALL.into_iter().zip(&mut measurement.times) {
                    let output = &mut self.output[..regime.measured_rows() * STRIDE];
                    let start = Instant::now();
                    self.trial.run(*candidate, TrialCase::down(MEASURED_ELEMENTS), 0, output);
                    *shortest = start.elapsed().min(*shortest);
                }
            }
        }
        measurements
    }
}
