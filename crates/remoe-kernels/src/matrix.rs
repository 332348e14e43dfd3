//! Packed weight matrices that do not belong to an expert: attention, router, embedding, head.

use crate::memory::Buffer;
use crate::panels::PanelLayout;
use crate::quantise::{GROUP, WeightGroup};
use crate::shape::{PANEL, row_copy_bytes, step_words, steps};
use crate::{Dtype, KernelError, MAX_DIMENSION, NumericsClass, StoredDtype, WeightFormat};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Largest legal number of outputs. The output projection has one for each token of the vocabulary.
pub const MAX_OUTPUTS: usize = 1 << 20;

/// A weight matrix `[outputs, inputs]` in the order in which the kernels read it, laid out like an expert's down
/// projection. Immutable, so threads can share it.
#[derive(Debug)]
pub struct PackedMatrix {
    outputs: usize,
    inputs: usize,
    class: NumericsClass,
    buffer: Buffer,
}

/// Packs a matrix from slabs of rows, so that a loader can read a file through a small buffer. Either one thread packs
/// the slabs in ascending order ([`push_rows`](Self::push_rows)), or several threads pack a part each
/// ([`parts`](Self::parts)).
#[derive(Debug)]
pub struct PackedMatrixBuilder {
    matrix: PackedMatrix,
    /// Rows that were packed, of all parts.
    packed_rows: AtomicUsize,
}

impl PackedMatrixBuilder {
    /// Allocates the packed form of `outputs` rows of `inputs` weights each, in the weight format of `class`. A
    /// [`Dtype`] stands for the class of unquantised weights.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] for 0 and above [`MAX_OUTPUTS`] or [`MAX_DIMENSION`], [`KernelError::OutOfMemory`].
    pub fn new(outputs: usize, inputs: usize, class: impl Into<NumericsClass>) -> Result<Self, KernelError> {
        let class = class.into();
        let check_dimension = |what, value, max| match value {
            0 => Err(KernelError::Dimension { what, value, max }),
            _ if value > max => Err(KernelError::Dimension { what, value, max }),
            _ => Ok(()),
        };
        check_dimension("inputs", inputs, MAX_DIMENSION)?;
        check_dimension("outputs", outputs, MAX_OUTPUTS)?;
        let panel_words = steps(inputs, class.weights) * step_words(class.dtype, class.weights);
        let buffer = Buffer::for_weights(outputs.div_ceil(PANEL) * panel_words * 4)?;
        Ok(Self { matrix: PackedMatrix { outputs, inputs, class, buffer }, packed_rows: AtomicUsize::new(0) })
    }

    /// Packs the rows that follow those packed before. `bytes` are whole rows, little-endian as in checkpoints, with any
    /// alignment. Slabs of a multiple of 16 rows are packed fastest.
    ///
    /// # Errors
    /// [`KernelError::WeightLength`] if they are not whole rows, [`KernelError::Length`] if the matrix has fewer rows,
    /// [`KernelError::Form`] if the class has fp8 weights, which only experts support. Nothing is packed then.
    pub fn push_rows(&mut self, stored: StoredDtype, bytes: &[u8]) -> Result<(), KernelError> {
        let next = *self.packed_rows.get_mut();
        let all = self.matrix.outputs;
        self.parts(all).try_for_each(|mut part| {
            part.next = next;
            part.push_rows(stored, bytes)
        })
    }

    /// Splits the matrix into parts of `rows` rows, rounded up to whole panels. Each part may be packed by its own
    /// thread, once, instead of calling [`push_rows`](Self::push_rows).
    pub fn parts(&mut self, rows: usize) -> impl Iterator<Item = MatrixPart<'_>> {
        let panel_words = self.matrix.panel_words();
        let PackedMatrix { outputs, inputs, class, ref mut buffer } = self.matrix;
        let panels = rows.clamp(1, outputs).div_ceil(PANEL);
        let words = buffer.words_mut().chunks_mut(panels * panel_words);
        let packed_rows = &self.packed_rows;
        words.enumerate().map(move |(index, words)| {
            let first = index * panels * PANEL;
            let end = outputs.min(first + panels * PANEL);
            MatrixPart { words, panel_words, inputs, class, first, end, next: 0, packed_rows }
        })
    }

    /// Returns the packed matrix.
    ///
    /// # Errors
    /// [`KernelError::Length`] if rows are missing.
    pub fn finish(self) -> Result<PackedMatrix, KernelError> {
        let (actual, expected) = (self.packed_rows.into_inner(), self.matrix.outputs);
        if actual != expected {
            return Err(KernelError::Length { what: "rows of a matrix", actual, expected });
        }
        Ok(self.matrix)
    }
}

/// Consecutive rows of a matrix that is being packed, for one thread.
#[derive(Debug)]
pub struct MatrixPart<'a> {
    words: &'a mut [u32],
    panel_words: usize,
    inputs: usize,
    class: NumericsClass,
    /// First row of the part, and the row after its last one.
    first: usize,
    end: usize,
    /// Rows of the part that were packed.
    next: usize,
    /// Rows of all parts that were packed.
    packed_rows: &'a AtomicUsize,
}

impl MatrixPart<'_> {
    /// Returns the rows of the matrix that belong to the part.
    pub fn range(&self) -> Range<usize> {
        self.first..self.end
    }

    /// Packs the next rows of the part, as [`PackedMatrixBuilder::push_rows`] does.
    ///
    /// # Errors
    /// As for [`PackedMatrixBuilder::push_rows`].
    pub fn push_rows(&mut self, stored: StoredDtype, bytes: &[u8]) -> Result<(), KernelError> {
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
        let panels = PanelLayout { panel_words: self.panel_words, columns: PANEL, first_column: 0 };
        panels.write(self.words, stored, class, self.next, row_bytes, bytes);
        self.next = actual;
        self.packed_rows.fetch_add(rows, Ordering::Relaxed);
        Ok(())
    }
}

impl PackedMatrix {
    /// Packs several matrices with the same number of `inputs`, stacked: one product computes all of them.
    ///
    /// `parts` are row-major and little-endian as in checkpoints, with any alignment. Weights are converted to the format
    /// of `class`; a [`Dtype`] stands for the class of unquantised weights.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] for 0 and above [`MAX_OUTPUTS`] or [`MAX_DIMENSION`], [`KernelError::WeightLength`]
    /// if a part is not whole rows, [`KernelError::OutOfMemory`].
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
            builder.push_rows(*stored, weights)?;
        }
        builder.finish()
    }

    /// Elements of an output row.
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

    /// Bytes of an output row.
    pub const fn output_bytes(&self) -> usize {
        self.outputs * self.class.dtype.bytes()
    }

    /// Bytes of memory that the weights take.
    pub fn bytes(&self) -> usize {
        Buffer::resident_bytes(self.buffer.len())
    }

    /// Writes the weights of row `row` to `to`, dequantised, as little-endian elements of [`dtype`](Self::dtype), each
    /// rounded once. This is how embeddings are looked up; it gives the same bits on every machine.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] if the matrix has fewer rows, [`KernelError::Length`] if `to` is not
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
                    WeightGroup::from_stored(words, scale as u16, format).write(dtype, to);
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

    /// Returns a pointer to the first panel; the others follow.
    pub(crate) fn words(&self) -> *const u32 {
        self.buffer.as_ptr().cast()
    }
}
