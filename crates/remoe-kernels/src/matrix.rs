//! Weight matrices in panels, outside of experts.

use crate::memory::Buffer;
use crate::panels::Panels;
use crate::quantise::{GROUP, WeightGroup};
use crate::shape::{PANEL, row_copy_bytes, step_words, steps};
use crate::{Dtype, KernelError, MAX_DIMENSION, NumericsClass, StoredDtype, WeightFormat};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Largest legal number of outputs; vocabularies are the largest there are.
pub const MAX_OUTPUTS: usize = 1 << 20;

/// A weight matrix `[outputs, inputs]` in the order in which the kernels read it, laid out like an expert's down
/// projection. Never changes; share it freely between threads.
#[derive(Debug)]
pub struct PackedMatrix {
    outputs: usize,
    inputs: usize,
    class: NumericsClass,
    buffer: Buffer,
}

/// Packs a matrix from slabs of rows, the first ones first, so that a loader can read a file through a small buffer; or
/// part by part, by several threads.
#[derive(Debug)]
pub struct PackedMatrixBuilder {
    matrix: PackedMatrix,
    /// Rows that were given, to whatever part.
    given: AtomicUsize,
}

impl PackedMatrixBuilder {
    /// Reserves the packed form of `outputs` rows of `inputs` weights, which become what `class`, or a [`Dtype`], calls
    /// for.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] for 0 and above [`MAX_OUTPUTS`] or [`MAX_DIMENSION`], [`KernelError::OutOfMemory`].
    pub fn new(outputs: usize, inputs: usize, class: impl Into<NumericsClass>) -> Result<Self, KernelError> {
        let class = class.into();
        let within = |what, value, max| match value {
            0 => Err(KernelError::Dimension { what, value, max }),
            _ if value > max => Err(KernelError::Dimension { what, value, max }),
            _ => Ok(()),
        };
        within("inputs", inputs, MAX_DIMENSION)?;
        within("outputs", outputs, MAX_OUTPUTS)?;
        let panel_words = steps(inputs, class.weights) * step_words(class.dtype, class.weights);
        let buffer = Buffer::for_weights(outputs.div_ceil(PANEL) * panel_words * 4)?;
        Ok(Self { matrix: PackedMatrix { outputs, inputs, class, buffer }, given: AtomicUsize::new(0) })
    }

    /// Packs the rows that follow those given before: whole rows, little-endian as checkpoints store them, with any
    /// alignment. Slabs of a multiple of 16 rows are packed fastest.
    ///
    /// # Errors
    /// [`KernelError::WeightLength`] where they are not whole rows, [`KernelError::Length`] where they are more than
    /// the matrix has, [`KernelError::Form`] where the class has fp8 weights, which only experts can have; nothing is
    /// packed then.
    pub fn rows(&mut self, stored: StoredDtype, bytes: &[u8]) -> Result<(), KernelError> {
        let next = *self.given.get_mut();
        let all = self.matrix.outputs;
        self.parts(all).try_for_each(|mut part| {
            part.next = next;
            part.rows(stored, bytes)
        })
    }

    /// Parts of so many rows, rounded up to whole panels, from the first on. Each may be filled by a thread of its own,
    /// once, instead of by [`rows`](Self::rows).
    pub fn parts(&mut self, rows: usize) -> impl Iterator<Item = MatrixPart<'_>> {
        let panel_words = self.matrix.panel_words();
        let PackedMatrix { outputs, inputs, class, ref mut buffer } = self.matrix;
        let panels = rows.clamp(1, outputs).div_ceil(PANEL);
        let words = buffer.words_mut().chunks_mut(panels * panel_words);
        let given = &self.given;
        words.enumerate().map(move |(index, words)| {
            let first = index * panels * PANEL;
            let end = outputs.min(first + panels * PANEL);
            MatrixPart { words, panel_words, inputs, class, first, end, next: 0, given }
        })
    }

    /// The packed matrix.
    ///
    /// # Errors
    /// [`KernelError::Length`] where rows were never given.
    pub fn finish(self) -> Result<PackedMatrix, KernelError> {
        let (actual, expected) = (self.given.into_inner(), self.matrix.outputs);
        if actual != expected {
            return Err(KernelError::Length { what: "rows of a matrix", actual, expected });
        }
        Ok(self.matrix)
    }
}

/// Some rows of a matrix that is being packed.
#[derive(Debug)]
pub struct MatrixPart<'a> {
    words: &'a mut [u32],
    panel_words: usize,
    inputs: usize,
    class: NumericsClass,
    first: usize,
    end: usize,
    /// Rows of it that were given.
    next: usize,
    /// Rows that were given to all parts.
    given: &'a AtomicUsize,
}

impl MatrixPart<'_> {
    /// Which rows of the matrix they are.
    pub fn range(&self) -> Range<usize> {
        self.first..self.end
    }

    /// As [`PackedMatrixBuilder::rows`], of the rows of this part.
    ///
    /// # Errors
    /// As for [`PackedMatrixBuilder::rows`].
    pub fn rows(&mut self, stored: StoredDtype, bytes: &[u8]) -> Result<(), KernelError> {
        let class = self.class;
        if class.weights == WeightFormat::Fp8 {
            return Err(KernelError::Form { class, form: class.weights, given: "elements" });
        }
        let row_bytes = self.inputs * stored.bytes();
        if !bytes.len().is_multiple_of(row_bytes) {
            return Err(KernelError::WeightLength { actual: bytes.len(), row_bytes });
        }
        let rows = bytes.len() / row_bytes;
        let (actual, expected) = (self.next + rows, self.end - self.first);
        if actual > expected {
            return Err(KernelError::Length { what: "rows of a matrix", actual, expected });
        }
        let panels = Panels { panel_words: self.panel_words, columns: PANEL, shift: 0 };
        panels.write(self.words, stored, class, self.next, row_bytes, bytes);
        self.next = actual;
        self.given.fetch_add(rows, Ordering::Relaxed);
        Ok(())
    }
}

impl PackedMatrix {
    /// Packs matrices of the same number of `inputs`, one below the other: products with all of them are one product
    /// then. `parts` are row-major and little-endian as checkpoints store them, with any alignment. Weights become what
    /// `class`, or a [`Dtype`], calls for.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] for 0 and above [`MAX_OUTPUTS`] or [`MAX_DIMENSION`], [`KernelError::WeightLength`]
    /// for a part that is not whole rows, [`KernelError::OutOfMemory`].
    pub fn pack(
        inputs: usize,
        class: impl Into<NumericsClass>,
        parts: &[(StoredDtype, &[u8])],
    ) -> Result<Self, KernelError> {
        if inputs == 0 {
            return Err(KernelError::Dimension { what: "inputs", value: 0, max: MAX_DIMENSION });
        }
        let mut outputs = 0;
        for (stored, weights) in parts {
            let row_bytes = inputs * stored.bytes();
            if !weights.len().is_multiple_of(row_bytes) {
                return Err(KernelError::WeightLength { actual: weights.len(), row_bytes });
            }
            outputs += weights.len() / row_bytes;
        }
        let mut builder = PackedMatrixBuilder::new(outputs, inputs, class)?;
        for (stored, weights) in parts {
            builder.rows(*stored, weights)?;
        }
        builder.finish()
    }

    /// Elements of a result's row.
    pub const fn outputs(&self) -> usize {
        self.outputs
    }

    /// Elements of an input row.
    pub const fn inputs(&self) -> usize {
        self.inputs
    }

    /// Element type of inputs and results.
    pub const fn dtype(&self) -> Dtype {
        self.class.dtype
    }

    /// Returns the numerics class, which decides the bits of results.
    pub const fn class(&self) -> NumericsClass {
        self.class
    }

    /// Bytes of an input row.
    pub const fn input_bytes(&self) -> usize {
        self.inputs * self.class.dtype.bytes()
    }

    /// Bytes of a result's row.
    pub const fn output_bytes(&self) -> usize {
        self.outputs * self.class.dtype.bytes()
    }

    /// Bytes of memory that the weights take.
    pub fn bytes(&self) -> usize {
        Buffer::resident_bytes(self.buffer.len())
    }

    /// Writes to `to` what the weights of row `row` stand for, as little-endian elements of [`dtype`](Self::dtype),
    /// each rounded once: a look-up in a table of rows, the same bits on every machine.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] where there is no such row, [`KernelError::Length`] where `to` is not
    /// [`input_bytes`](Self::input_bytes) long.
    pub fn read_row(&self, row: usize, to: &mut [u8]) -> Result<(), KernelError> {
        if row >= self.outputs {
            return Err(KernelError::Dimension { what: "row", value: row, max: self.outputs - 1 });
        }
        if to.len() != self.input_bytes() {
            let (actual, expected) = (to.len(), self.input_bytes());
            return Err(KernelError::Length { what: "target of a row", actual, expected });
        }
        let column = row % PANEL;
        let panel = &self.buffer.words()[row / PANEL * self.panel_words()..][..self.panel_words()];
        let lines = step_words(self.class.dtype, self.class.weights) / PANEL;
        let word = |line: usize| panel[line * PANEL + column];
        match (self.class.weights, self.class.dtype) {
            (WeightFormat::Plain, Dtype::Bf16) => {
                for (pair, to) in to.chunks_mut(4).enumerate() {
                    to.copy_from_slice(&word(pair).to_le_bytes()[..to.len()]);
                }
            }
            (WeightFormat::Plain, Dtype::F32) => {
                for (element, to) in to.chunks_mut(4).enumerate() {
                    to.copy_from_slice(&word(element).to_le_bytes());
                }
            }
            (format, dtype) => {
                let step_words = step_words(dtype, format);
                let groups = panel.chunks_exact(step_words).zip(to.chunks_mut(GROUP * dtype.bytes()));
                for (group, to) in groups {
                    let scale = group[lines * PANEL + column / 2] >> (16 * (column % 2));
                    let words = std::array::from_fn(|line| match line < lines {
                        true => group[line * PANEL + column],
                        false => 0,
                    });
                    WeightGroup::of_stored(words, scale as u16, format).write(dtype, to);
                }
            }
        }
        Ok(())
    }

    pub(crate) const fn input_copy_bytes(&self) -> usize {
        row_copy_bytes(self.inputs, self.class)
    }

    pub(crate) const fn steps(&self) -> usize {
        steps(self.inputs, self.class.weights)
    }

    pub(crate) const fn panel_words(&self) -> usize {
        self.steps() * step_words(self.class.dtype, self.class.weights)
    }

    /// The first panel; the others follow.
    pub(crate) fn words(&self) -> *const u32 {
        self.buffer.as_ptr().cast()
    }
}
