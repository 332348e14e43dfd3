//! From row-major matrices to panels.

use crate::fp8::{self, Fp8Scales};
use crate::memory::Buffer;
use crate::numerics::round_bf16;
use crate::panels::Panels;
use crate::shape::PANEL;
use crate::{Dtype, ExpertShape, KernelError, Matrix, StoredDtype, WeightFormat};

/// An expert's weights in the order in which the kernels read them. Never changes; share it freely between threads.
#[derive(Debug)]
pub struct PackedExpert {
    shape: ExpertShape,
    buffer: Buffer,
    /// Biases of gate-and-up panels, then of down panels, as float32; empty without biases.
    biases: Vec<f32>,
}

impl PackedExpert {
    /// Packs whole matrices, row-major and little-endian as checkpoints store them, with any alignment: `gate` and `up`
    /// are `[width, hidden]`, `down` is `[hidden, width]`, all of element type `stored`; `gate` is empty where the
    /// shape has none. Weights become what the shape's class calls for.
    ///
    /// # Errors
    /// [`KernelError::MatrixLength`] for a matrix of the wrong size, [`KernelError::OutOfMemory`].
    pub fn pack(
        shape: ExpertShape,
        stored: StoredDtype,
        gate: &[u8],
        up: &[u8],
        down: &[u8],
    ) -> Result<Self, KernelError> {
        let matrices = [(Matrix::Gate, gate), (Matrix::Up, up), (Matrix::Down, down)];
        for (matrix, bytes) in matrices {
            let (rows, columns) = shape.matrix(matrix);
            let expected = rows * columns * stored.bytes();
            if bytes.len() != expected {
                return Err(KernelError::MatrixLength {
                    matrix,
                    expected,
                    actual: bytes.len(),
                    rows,
                    columns,
                });
            }
        }
        let mut builder = PackedExpertBuilder::new(shape, stored)?;
        for (matrix, bytes) in matrices {
            builder.rows(matrix, 0, bytes)?;
        }
        builder.finish()
    }

    /// The shape that was packed.
    pub fn shape(&self) -> &ExpertShape {
        &self.shape
    }

    /// Bytes of memory that the weights take: [`ExpertShape::packed_bytes`].
    pub fn bytes(&self) -> usize {
        Buffer::resident_bytes(self.buffer.len()) + self.biases.len() * size_of::<f32>()
    }

    /// The biases of the first gate-and-up panel, those of the others and of the down panels follow; null where there
    /// are none.
    pub(crate) fn biases(&self) -> *const f32 {
        if self.biases.is_empty() { std::ptr::null() } else { self.biases.as_ptr() }
    }

    /// The first gate-and-up panel; the others and the down panels follow.
    pub(crate) fn words(&self) -> *const u32 {
        self.buffer.as_ptr().cast()
    }
}

/// Packs an expert from slabs of rows in any order, so that a loader can read a file through a small scratch buffer.
///
/// Slabs that begin and end at multiples of 16 rows are packed fastest; one row at a time works, slowly. Memory becomes
/// resident as it is filled, by the thread that calls [`rows`](Self::rows).
#[derive(Debug)]
pub struct PackedExpertBuilder {
    shape: ExpertShape,
    stored: StoredDtype,
    buffer: Buffer,
    /// One bit per row that was given, by matrix.
    given: [Vec<u64>; 3],
    biases: Vec<f32>,
    biases_given: [bool; 3],
}

impl PackedExpertBuilder {
    /// Reserves the packed form of `shape`; rows will come with elements of type `stored`.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn new(shape: ExpertShape, stored: StoredDtype) -> Result<Self, KernelError> {
        let buffer = Buffer::for_weights(shape.packed_words() * 4)?;
        let given = Matrix::ALL.map(|matrix| vec![0u64; shape.matrix(matrix).0.div_ceil(64)]);
        let biases = vec![0.0; shape.bias_elements()];
        Ok(Self { shape, stored, buffer, given, biases, biases_given: [false; 3] })
    }

    /// Takes the biases of `matrix`, one for each of its rows, rounded to the shape's element type.
    ///
    /// # Errors
    /// [`KernelError::Length`] where they are not as many, or the projection has none.
    pub fn biases(&mut self, matrix: Matrix, values: &[f32]) -> Result<(), KernelError> {
        let expected = if self.shape.has_biases(matrix) { self.shape.matrix(matrix).0 } else { 0 };
        if values.len() != expected {
            return Err(KernelError::Length { what: "biases", actual: values.len(), expected });
        }
        let inner = self.shape.gate_up_columns();
        let (first, columns, shift) = match matrix {
            Matrix::Gate => (0, inner, 0),
            // Behind the gate's columns, where there are any.
            Matrix::Up => (0, inner, PANEL - inner),
            Matrix::Down => (self.shape.gate_up_panels(), PANEL, 0),
        };
        for (row, &value) in values.iter().enumerate() {
            self.biases[(first + row / columns) * PANEL + row % columns + shift] = match self.shape.dtype() {
                Dtype::F32 => value,
                Dtype::Bf16 => round_bf16(value),
            };
        }
        self.biases_given[matrix as usize] = true;
        Ok(())
    }

    /// Bytes of one row of a matrix as it is stored.
    pub fn row_bytes(&self, matrix: Matrix) -> usize {
        self.shape.matrix(matrix).1 * self.stored.bytes()
    }

    /// Packs the rows of `matrix` from `first_row` on; `bytes` is any whole number of rows. A row that is given again
    /// replaces the earlier one.
    ///
    /// # Errors
    /// [`KernelError::Rows`] where `bytes` is not whole rows or reaches beyond the matrix, [`KernelError::Form`] where
    /// weights stay fp8; nothing is packed then.
    pub fn rows(&mut self, matrix: Matrix, first_row: usize, bytes: &[u8]) -> Result<(), KernelError> {
        let class = self.shape.class();
        if class.weights == WeightFormat::Fp8 {
            return Err(KernelError::Form { class, form: class.weights, given: "elements" });
        }
        let row_bytes = self.row_bytes(matrix);
        let (target, start) = self.target(matrix, first_row, row_bytes, bytes.len())?;
        let packed = &mut self.buffer.words_mut()[start..];
        target.write(packed, self.stored, class, first_row, row_bytes, bytes);
        self.give(matrix, first_row, bytes.len() / row_bytes);
        Ok(())
    }

    /// As [`rows`](Self::rows), for a shape whose weights stay fp8: `codes` is a byte for each weight of any whole
    /// number of rows, none of them 0x7f or 0xff, which are no numbers; `scales` are those of the whole matrix.
    ///
    /// # Errors
    /// As [`rows`](Self::rows), and [`KernelError::Form`] where the weights of the shape do not stay fp8,
    /// [`KernelError::Blocks`] for scales of another matrix.
    pub fn fp8_rows(
        &mut self,
        matrix: Matrix,
        first_row: usize,
        codes: &[u8],
        scales: &Fp8Scales,
    ) -> Result<(), KernelError> {
        let class = self.shape.class();
        if class.weights != WeightFormat::Fp8 {
            return Err(KernelError::Form { class, form: class.weights, given: "fp8" });
        }
        let (rows, columns) = self.shape.matrix(matrix);
        scales.expect(rows, columns)?;
        let (target, start) = self.target(matrix, first_row, columns, codes.len())?;
        let packed = &mut self.buffer.words_mut()[start..];
        fp8::write(packed, target, first_row, columns, codes, scales);
        self.give(matrix, first_row, codes.len() / columns);
        Ok(())
    }

    /// Where rows of `matrix` go, and the word at which its first panel begins.
    fn target(
        &self,
        matrix: Matrix,
        first_row: usize,
        row_bytes: usize,
        actual: usize,
    ) -> Result<(Panels, usize), KernelError> {
        let shape = self.shape;
        let rows = shape.matrix(matrix).0;
        let fits = first_row.checked_add(actual / row_bytes).is_some_and(|end| end <= rows);
        if !fits || !actual.is_multiple_of(row_bytes) {
            return Err(KernelError::Rows { matrix, first_row, actual, row_bytes, rows });
        }
        let inner = shape.gate_up_columns();
        let (panel_words, start, columns, shift) = match matrix {
            Matrix::Gate => (shape.gate_up_panel_words(), 0, inner, 0),
            Matrix::Up => (shape.gate_up_panel_words(), 0, inner, PANEL - inner),
            Matrix::Down => (shape.down_panel_words(), shape.down_offset_words(), PANEL, 0),
        };
        Ok((Panels { panel_words, columns, shift }, start))
    }

    /// Notes that so many rows were given.
    fn give(&mut self, matrix: Matrix, first_row: usize, count: usize) {
        let given = &mut self.given[matrix as usize];
        for row in first_row..first_row + count {
            given[row / 64] |= 1 << (row % 64);
        }
    }

    /// The packed expert.
    ///
    /// # Errors
    /// [`KernelError::Incomplete`] where a row was never given.
    pub fn finish(self) -> Result<PackedExpert, KernelError> {
        for matrix in Matrix::ALL {
            let rows = self.shape.matrix(matrix).0;
            let given = &self.given[matrix as usize];
            let is_missing = |row: &usize| given[row / 64] >> (row % 64) & 1 == 0;
            if let Some(row) = (0..rows).find(is_missing) {
                let missing = (row..rows).filter(is_missing).count();
                return Err(KernelError::Incomplete { matrix, row, missing });
            }
            if self.shape.has_biases(matrix) && !self.biases_given[matrix as usize] {
                return Err(KernelError::Length { what: "biases", actual: 0, expected: rows });
            }
        }
        Ok(PackedExpert { shape: self.shape, buffer: self.buffer, biases: self.biases })
    }
}
