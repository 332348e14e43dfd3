//! Packing of experts: from row-major matrices to panels.

use crate::fp8::{self, Fp8Scales};
use crate::memory::Buffer;
use crate::numerics::round_bf16;
use crate::panels::PanelLayout;
use crate::shape::PANEL;
use crate::{Dtype, ExpertMatrix, ExpertShape, KernelError, StoredDtype, WeightFormat};

/// An expert's weights in the order in which the kernels read them. Immutable, so threads can share it.
#[derive(Debug)]
pub struct PackedExpert {
    shape: ExpertShape,
    buffer: Buffer,
    /// Biases of the gate-and-up panels, then of the down panels; empty without biases.
    biases: Vec<f32>,
}

impl PackedExpert {
    /// Packs whole matrices, and converts their weights to the format of the shape's class.
    ///
    /// `gate` and `up` are `[width, hidden]`, `down` is `[hidden, width]`; `gate` is empty if the shape has none. They
    /// are row-major and little-endian as in checkpoints, of element type `stored`, with any alignment.
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
        let matrices = [(ExpertMatrix::Gate, gate), (ExpertMatrix::Up, up), (ExpertMatrix::Down, down)];
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
            builder.set_rows(matrix, 0, bytes)?;
        }
        builder.finish()
    }

    /// Returns the expert's shape.
    pub fn shape(&self) -> &ExpertShape {
        &self.shape
    }

    /// Returns the bytes of memory that the weights take: [`ExpertShape::packed_bytes`].
    pub fn bytes(&self) -> usize {
        Buffer::resident_bytes(self.buffer.len()) + self.biases.len() * size_of::<f32>()
    }

    /// Returns a pointer to the biases of the first gate-and-up panel, or null without biases. Those of the other panels
    /// and of the down panels follow.
    pub(crate) fn biases(&self) -> *const f32 {
        if self.biases.is_empty() { std::ptr::null() } else { self.biases.as_ptr() }
    }

    /// Returns a pointer to the first gate-and-up panel; the others and the down panels follow.
    pub(crate) fn words(&self) -> *const u32 {
        self.buffer.as_ptr().cast()
    }
}

/// Packs an expert from slabs of rows in any order, so that a loader can read a file through a small scratch buffer.
///
/// Slabs that begin and end at multiples of 16 rows are packed fastest; single rows work, but slowly. Memory becomes
/// resident as it is filled, by the thread that calls [`set_rows`](Self::set_rows).
#[derive(Debug)]
pub struct PackedExpertBuilder {
    shape: ExpertShape,
    stored: StoredDtype,
    buffer: Buffer,
    /// One bit per packed row, for each matrix.
    packed_rows: [Vec<u64>; 3],
    biases: Vec<f32>,
    has_biases: [bool; 3],
}

impl PackedExpertBuilder {
    /// Allocates the packed form of `shape`. Rows will have elements of type `stored`.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn new(shape: ExpertShape, stored: StoredDtype) -> Result<Self, KernelError> {
        let buffer = Buffer::for_weights(shape.packed_words() * 4)?;
        let packed_rows = ExpertMatrix::ALL.map(|matrix| vec![0u64; shape.matrix(matrix).0.div_ceil(64)]);
        let biases = vec![0.0; shape.bias_elements()];
        Ok(Self { shape, stored, buffer, packed_rows, biases, has_biases: [false; 3] })
    }

    /// Sets the biases of `matrix`, one for each of its rows, and rounds them to the shape's element type.
    ///
    /// # Errors
    /// [`KernelError::Length`] if there are not as many biases as rows, or the projection has none.
    pub fn set_biases(&mut self, matrix: ExpertMatrix, values: &[f32]) -> Result<(), KernelError> {
        let expected = if self.shape.has_biases(matrix) { self.shape.matrix(matrix).0 } else { 0 };
        if values.len() != expected {
            return Err(KernelError::Length { what: "biases", actual: values.len(), expected });
        }
        let gate_up_columns = self.shape.gate_up_columns();
        let (first_panel, columns, first_column) = match matrix {
            ExpertMatrix::Gate => (0, gate_up_columns, 0),
            // Behind the gate's columns, if there are any.
            ExpertMatrix::Up => (0, gate_up_columns, PANEL - gate_up_columns),
            ExpertMatrix::Down => (self.shape.gate_up_panels(), PANEL, 0),
        };
        for (row, &value) in values.iter().enumerate() {
            let column = row % columns + first_column;
            self.biases[(first_panel + row / columns) * PANEL + column] = match self.shape.dtype() {
                Dtype::F32 => value,
                Dtype::Bf16 => round_bf16(value),
            };
        }
        self.has_biases[matrix as usize] = true;
        Ok(())
    }

    /// Returns the bytes of one row of a matrix as it is stored in the checkpoint.
    pub fn row_bytes(&self, matrix: ExpertMatrix) -> usize {
        self.shape.matrix(matrix).1 * self.stored.bytes()
    }

    /// Packs rows of `matrix` from `first_row` on; `bytes` is any whole number of rows. Setting a row again replaces it.
    ///
    /// # Errors
    /// [`KernelError::Rows`] if `bytes` is not whole rows or reaches beyond the matrix, [`KernelError::Form`] if the
    /// shape's weights stay fp8. Nothing is packed then.
    pub fn set_rows(
        &mut self,
        matrix: ExpertMatrix,
        first_row: usize,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        let class = self.shape.class();
        if class.weights == WeightFormat::Fp8 {
            return Err(KernelError::Form { class, form: class.weights, given: "elements" });
        }
        let row_bytes = self.row_bytes(matrix);
        let (target, start) = self.target(matrix, first_row, row_bytes, bytes.len())?;
        let packed = &mut self.buffer.words_mut()[start..];
        target.write(packed, self.stored, class, first_row, row_bytes, bytes);
        self.mark_packed(matrix, first_row, bytes.len() / row_bytes);
        Ok(())
    }

    /// Packs rows as [`set_rows`](Self::set_rows) does, for a shape whose weights stay fp8.
    ///
    /// `codes` has a byte for each weight of a whole number of rows; none may be 0x7f or 0xff, the codes of NaN. `scales`
    /// are those of the whole matrix.
    ///
    /// # Errors
    /// [`KernelError::Rows`] as for [`set_rows`](Self::set_rows), [`KernelError::Form`] if the shape's weights do not
    /// stay fp8, [`KernelError::Blocks`] for scales of another matrix.
    pub fn set_fp8_rows(
        &mut self,
        matrix: ExpertMatrix,
        first_row: usize,
        codes: &[u8],
        scales: &Fp8Scales,
    ) -> Result<(), KernelError> {
        let class = self.shape.class();
        if class.weights != WeightFormat::Fp8 {
            return Err(KernelError::Form { class, form: class.weights, given: "fp8" });
        }
        let (rows, columns) = self.shape.matrix(matrix);
        scales.check_size(rows, columns)?;
        let (target, start) = self.target(matrix, first_row, columns, codes.len())?;
        let packed = &mut self.buffer.words_mut()[start..];
        fp8::write(packed, target, first_row, columns, codes, scales);
        self.mark_packed(matrix, first_row, codes.len() / columns);
        Ok(())
    }

    /// Checks a slab of rows of `matrix`. Returns the layout of the matrix's panels and the word at which the first one
    /// begins. `actual` is the slab's length in bytes.
    fn target(
        &self,
        matrix: ExpertMatrix,
        first_row: usize,
        row_bytes: usize,
        actual: usize,
    ) -> Result<(PanelLayout, usize), KernelError> {
        let shape = self.shape;
        let rows = shape.matrix(matrix).0;
        let fits = first_row.checked_add(actual / row_bytes).is_some_and(|end| end <= rows);
        if !fits || !actual.is_multiple_of(row_bytes) {
            return Err(KernelError::Rows { matrix, first_row, actual, row_bytes, rows });
        }
        let gate_up = shape.gate_up_columns();
        let (panel_words, start, columns, first_column) = match matrix {
            ExpertMatrix::Gate => (shape.gate_up_panel_words(), 0, gate_up, 0),
            ExpertMatrix::Up => (shape.gate_up_panel_words(), 0, gate_up, PANEL - gate_up),
            ExpertMatrix::Down => (shape.down_panel_words(), shape.down_offset_words(), PANEL, 0),
        };
        Ok((PanelLayout { panel_words, columns, first_column }, start))
    }

    /// Marks `count` rows as packed.
    fn mark_packed(&mut self, matrix: ExpertMatrix, first_row: usize, count: usize) {
        let packed = &mut self.packed_rows[matrix as usize];
        for row in first_row..first_row + count {
            packed[row / 64] |= 1 << (row % 64);
        }
    }

    /// Returns the packed expert.
    ///
    /// # Errors
    /// [`KernelError::Incomplete`] if a row was never set, [`KernelError::Length`] if biases were never set.
    pub fn finish(self) -> Result<PackedExpert, KernelError> {
        for matrix in ExpertMatrix::ALL {
            let rows = self.shape.matrix(matrix).0;
            let packed = &self.packed_rows[matrix as usize];
            let is_missing = |row: &usize| packed[row / 64] >> (row % 64) & 1 == 0;
            if let Some(row) = (0..rows).find(is_missing) {
                let missing = (row..rows).filter(is_missing).count();
                return Err(KernelError::Incomplete { matrix, row, missing });
            }
            if self.shape.has_biases(matrix) && !self.has_biases[matrix as usize] {
                return Err(KernelError::Length { what: "biases", actual: 0, expected: rows });
            }
        }
        Ok(PackedExpert { shape: self.shape, buffer: self.buffer, biases: self.biases })
    }
}
