//! Errors of the kernels; every variant carries the numbers that explain it.

use std::str::FromStr;

use crate::{Dtype, ExpertMatrix, InstructionPath, NumericsClass, WeightFormat};

/// Failure of packing, of starting a pool or of a call. Except for [`KernelError::Panicked`], nothing has been computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A dimension is zero or above [`crate::MAX_DIMENSION`].
    #[error("invalid {what}: expected 1 to {max}, got {value}")]
    Dimension {
        /// Name of the dimension.
        what: &'static str,
        /// Requested size.
        value: usize,
        /// The largest legal value.
        max: usize,
    },
    /// A size does not fit the address space.
    #[error("cannot allocate {what}: its size exceeds the address space")]
    TooLarge {
        /// Name of the object to allocate.
        what: &'static str,
    },
    /// The operating system has no memory left.
    #[error("cannot allocate {bytes} bytes: out of memory")]
    OutOfMemory {
        /// Requested bytes.
        bytes: usize,
    },
    /// A matrix has the wrong number of bytes.
    #[error("{matrix:?} matrix: {actual} bytes, expected {expected} ({rows} rows of {columns} elements)")]
    MatrixLength {
        /// Matrix with the wrong length.
        matrix: ExpertMatrix,
        /// Bytes that follow from the shape and the stored element type.
        expected: usize,
        /// Bytes that were given.
        actual: usize,
        /// Rows of the matrix.
        rows: usize,
        /// Elements of a row.
        columns: usize,
    },
    /// Weights are not whole rows.
    #[error("{actual} bytes of weights are not whole rows of {row_bytes} bytes")]
    WeightLength {
        /// Bytes that were given.
        actual: usize,
        /// Bytes of one stored row.
        row_bytes: usize,
    },
    /// Weights were given in the wrong format. A class with fp8 weights takes codes with scales; any other class takes
    /// elements.
    #[error("cannot pack weights of class {class}: expected {form}, got {given}")]
    Form {
        /// Class of the weights to pack.
        class: NumericsClass,
        /// Weight format of the class.
        form: WeightFormat,
        /// Format that was given.
        given: &'static str,
    },
    /// Kernels do not support the block size or the scales of fp8 weights.
    #[error("fp8 weights in blocks of {} x {}: {why}", .block[0], .block[1])]
    Blocks {
        /// Rows and columns of a block.
        block: [usize; 2],
        /// Cause of the refusal.
        why: String,
    },
    /// A slab of rows is not a whole number of rows, or reaches beyond the matrix.
    #[error(
        "{matrix:?} matrix: {actual} bytes from row {first_row} on are not whole rows of {row_bytes} bytes within {rows} rows"
    )]
    Rows {
        /// Matrix that the slab belongs to.
        matrix: ExpertMatrix,
        /// First row of the slab.
        first_row: usize,
        /// Bytes that were given.
        actual: usize,
        /// Bytes of one stored row.
        row_bytes: usize,
        /// Rows of the matrix.
        rows: usize,
    },
    /// A builder was finished before every row had been given.
    #[error("{matrix:?} matrix: row {row} was never given ({missing} rows missing)")]
    Incomplete {
        /// The first matrix with a gap.
        matrix: ExpertMatrix,
        /// First missing row of the matrix.
        row: usize,
        /// Number of missing rows of the matrix.
        missing: usize,
    },
    /// A call has more jobs or rows than [`crate::MAX_JOBS`] or [`crate::MAX_ROWS`].
    #[error("too many {what} in one call: expected at most {max}, got {actual}")]
    TooMany {
        /// `jobs`, `products` or `rows`.
        what: &'static str,
        /// Number that was given.
        actual: usize,
        /// The limit.
        max: usize,
    },
    /// The input matrix of a job or product is not a whole number of rows.
    #[error("job {job}: {actual} input bytes are not whole rows of {hidden} {dtype} elements")]
    InputLength {
        /// Position in the call.
        job: usize,
        /// Bytes that were given.
        actual: usize,
        /// Elements of a row.
        hidden: usize,
        /// Element type.
        dtype: Dtype,
    },
    /// A row index lies outside the job's input matrix.
    #[error("job {job}: invalid row index {index}: the input matrix has {rows} rows")]
    RowIndex {
        /// Position in the call.
        job: usize,
        /// The offending index.
        index: u32,
        /// Rows of the input matrix.
        rows: usize,
    },
    /// The output of a job or product has the wrong number of bytes.
    #[error("job {job}: {actual} output bytes, expected {expected}")]
    OutputLength {
        /// Position in the call.
        job: usize,
        /// Bytes that the row indices call for.
        expected: usize,
        /// Bytes that were given.
        actual: usize,
    },
    /// An operand (queries, pages, biases, rows, ..) does not have the length that follows from the shape.
    #[error("{what}: expected a length of {expected}, got {actual}")]
    Length {
        /// Name of the operand.
        what: &'static str,
        /// Length that was given.
        actual: usize,
        /// Length that follows from the shape.
        expected: usize,
    },
    /// The number of threads is zero or above [`crate::MAX_THREADS`].
    #[error("invalid number of threads: expected 1 to {max}, the caller included, got {actual}")]
    Threads {
        /// Requested number of threads.
        actual: usize,
        /// The limit.
        max: usize,
    },
    /// The operating system refused to start a thread.
    #[error("cannot start a worker thread: {reason}")]
    Spawn {
        /// Error of the operating system.
        reason: String,
    },
    /// This CPU lacks the instructions of the requested path.
    #[error("unsupported instruction path {path}: this CPU has {}", .available.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Unavailable {
        /// Requested path.
        path: InstructionPath,
        /// Paths that this CPU has.
        available: Vec<InstructionPath>,
    },
    /// On this CPU the path's results differ from those of the portable path.
    #[error(
        "instruction path {path} gives wrong results of class {class} on this CPU; omit --instruction-path, or use \
         portable"
    )]
    WrongBits {
        /// Requested path.
        path: InstructionPath,
        /// Class with wrong results.
        class: NumericsClass,
    },
    /// An instruction path's name is unknown.
    #[error("expected avx512-bf16, avx512-vnni, avx512f, avx2-fma or portable, got {name:?}")]
    UnknownPath {
        /// The name that was given.
        name: String,
    },
    /// A thread panicked during the call. The outputs are undefined; the pool stays usable.
    #[error("a kernel thread panicked: the outputs of this call are undefined")]
    Panicked,
    /// Suspended rows were passed to another pool than the one that had begun them.
    #[error("suspended rows were begun by another pool")]
    OtherPool,
}

impl FromStr for InstructionPath {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Self, KernelError> {
        Self::ALL
            .into_iter()
            .find(|path| path.name() == name)
            .ok_or_else(|| KernelError::UnknownPath { name: name.to_owned() })
    }
}
