//! From jobs to units: which panels there are, and where each finds its rows and puts its results.

use crate::memory::Buffer;
use crate::numerics::from_bf16;
use crate::paths::panel::Panel;
use crate::phase::CallPhase;
use crate::quantise::write_row;
use crate::shape::PANEL;
use crate::{
    Activation, Dtype, KernelError, Matrix, NumericsClass, PackedExpert, PackedMatrix, WeightFormat,
};

/// Most jobs, or products, of one call.
pub const MAX_JOBS: usize = 1 << 14;

/// Most rows of one call, all jobs or products together.
pub const MAX_ROWS: usize = 1 << 20;

/// One expert and the rows it is to compute.
#[derive(Debug)]
pub struct Job<'a> {
    /// The expert.
    pub expert: &'a PackedExpert,
    /// A row-major matrix of input rows, `hidden` little-endian elements of the expert's type each, with any alignment.
    pub inputs: &'a [u8],
    /// Rows of `inputs` to compute, in any order and as often as you like.
    pub row_index: &'a [u32],
    /// Results: one row of `hidden` elements for each row index, in the same order, little-endian, with any alignment.
    pub output: &'a mut [u8],
}

/// One matrix and the rows it is to be multiplied with: `output = inputs matrix^T`.
#[derive(Debug)]
pub struct Product<'a> {
    /// The matrix.
    pub matrix: &'a PackedMatrix,
    /// Row-major rows of [`PackedMatrix::inputs`] little-endian elements of the matrix' type, with any alignment.
    pub inputs: &'a [u8],
    /// One row of [`PackedMatrix::outputs`] elements for each input row, little-endian, with any alignment.
    pub output: &'a mut [u8],
}

/// A validated call. Kept between calls for its memory.
#[derive(Debug)]
pub(crate) struct Plan {
    phases: [PhasePlan; 2],
    /// Intermediate rows, and copies of input rows.
    scratch: Buffer,
    /// For the input rows of a job, and of those after it that share them: their copies, or null.
    copies: Vec<*const u8>,
    /// Task whose units the second phase has, where they are no panels.
    task: Option<Task>,
}

/// Work of another kind than panels: a closure of the caller's, called with each unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    closure: *const (),
    call: unsafe fn(*const (), u32),
}

impl Task {
    fn of<F: Fn(u32) + Sync>(closure: &F) -> Self {
        /// # Safety
        /// `closure` points to a living `F`.
        unsafe fn call<F: Fn(u32)>(closure: *const (), unit: u32) {
            // SAFETY: the caller's promise.
            unsafe { (*closure.cast::<F>())(unit) }
        }
        Self { closure: std::ptr::from_ref(closure).cast(), call: call::<F> }
    }

    /// Does one unit.
    ///
    /// # Safety
    /// The closure lives.
    pub(crate) unsafe fn run(self, unit: u32) {
        // SAFETY: the caller's promise; `of` made both for the same type.
        unsafe { (self.call)(self.closure, unit) }
    }
}

// SAFETY: the pointers are only used during a call, while the caller's borrows of jobs and products are alive; threads
// write to disjoint panels.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

#[derive(Debug, Default)]
struct PhasePlan {
    stages: Vec<Stage>,
    /// Pointers to the rows that stages sum over, in order.
    rows: Vec<*const u8>,
    units: u32,
}

/// A matrix times some rows.
#[derive(Debug)]
struct Stage {
    /// Units of earlier stages.
    before: u32,
    class: NumericsClass,
    activation: Activation,
    gated: bool,
    words: *const u32,
    /// Biases of the columns of all panels, or null.
    biases: *const f32,
    panel_words: usize,
    steps: usize,
    first_row: usize,
    row_count: usize,
    out: *mut u8,
    out_stride: usize,
    /// Results of a row that a panel gives, their bytes, and all of them.
    panel_columns: usize,
    panel_bytes: usize,
    columns: usize,
}

impl PhasePlan {
    fn clear(&mut self) {
        self.stages.clear();
        self.rows.clear();
        self.units = 0;
    }

    /// Adds a stage whose rows are the last `row_count` pointers.
    fn push(&mut self, stage: Stage) {
        // At most MAX_JOBS * MAX_OUTPUTS / 64 = 2^28.
        self.units += stage.columns.div_ceil(stage.panel_columns) as u32;
        self.stages.push(stage);
    }
}

/// Scratch memory that is being given out.
struct Free(*mut u8);

impl Free {
    /// # Safety
    /// The scratch memory has `bytes` left.
    unsafe fn take(&mut self, bytes: usize) -> *mut u8 {
        let taken = self.0;
        // SAFETY: the caller's promise.
        self.0 = unsafe { taken.add(bytes) };
        taken
    }

    /// A pointer to `row` as kernels of `class` read it: itself, or a copy of `bytes` bytes.
    ///
    /// # Safety
    /// The scratch memory has `bytes` left; they are [`crate::shape::row_copy_bytes`].
    unsafe fn readable(&mut self, row: &[u8], class: NumericsClass, bytes: usize) -> *const u8 {
        if bytes == 0 {
            return row.as_ptr();
        }
        // SAFETY: the caller's promise.
        unsafe {
            let copy = self.take(bytes);
            match (class.weights, class.dtype) {
                (WeightFormat::Plain | WeightFormat::Fp8, _) => {
                    copy.copy_from_nonoverlapping(row.as_ptr(), row.len());
                    copy.add(row.len()).write_bytes(0, bytes - row.len());
                }
                (weights, Dtype::F32) => {
                    let (elements, _) = row.as_chunks();
                    write_row(elements.len(), |k| f32::from_le_bytes(elements[k]), weights, copy);
                }
                (weights, Dtype::Bf16) => {
                    let (elements, _) = row.as_chunks();
                    write_row(elements.len(), |k| from_bf16(u16::from_le_bytes(elements[k])), weights, copy);
                }
            }
            copy
        }
    }
}

impl Plan {
    pub(crate) fn new() -> Result<Self, KernelError> {
        Ok(Self { phases: Default::default(), scratch: Buffer::zeroed(0)?, copies: Vec::new(), task: None })
    }

    pub(crate) fn units(&self, phase: CallPhase) -> u32 {
        self.phases[phase as usize].units
    }

    pub(crate) fn scratch_bytes(&self) -> usize {
        self.scratch.len()
    }

    /// Forgets the last call and makes room for the next one's scratch memory.
    fn begin(&mut self, scratch: usize) -> Result<Free, KernelError> {
        self.phases.iter_mut().for_each(PhasePlan::clear);
        self.task = None;
        if self.scratch.len() < scratch {
            // The old one goes first, so that both never exist together.
            self.scratch = Buffer::zeroed(0)?;
            self.scratch = Buffer::zeroed(scratch)?;
        }
        Ok(Free(self.scratch.as_mut_ptr()))
    }

    /// Replaces the plan by that of a call of experts.
    pub(crate) fn prepare_jobs(&mut self, jobs: &mut [Job<'_>]) -> Result<(), KernelError> {
        let mut free = self.begin(validate_jobs(jobs)?)?;
        let [gate_up, down] = &mut self.phases;
        let copies = &mut self.copies;
        // What the copies are of: tokens come to several experts, and are converted once.
        let mut copied = None;
        for job in jobs {
            let shape = *job.expert.shape();
            let row_count = job.row_index.len();
            if row_count == 0 {
                continue;
            }
            let row_bytes = shape.row_bytes();
            // SAFETY: `validate_jobs` summed exactly these sizes; the stride of a row is a multiple of 64.
            let intermediate = unsafe { free.take(row_count * shape.hidden_stride()) };
            let first_row = gate_up.rows.len();
            let these = Some((job.inputs.as_ptr_range(), shape.class(), row_bytes));
            if copied != these {
                copies.clear();
                copies.resize(job.inputs.len() / row_bytes, std::ptr::null());
                copied = these;
            }
            for (r, &index) in job.row_index.iter().enumerate() {
                let copy = &mut copies[index as usize];
                if copy.is_null() {
                    let source = &job.inputs[index as usize * row_bytes..][..row_bytes];
                    // SAFETY: `validate_jobs` counted a copy for every row.
                    *copy = unsafe { free.readable(source, shape.class(), shape.input_copy_bytes()) };
                }
                gate_up.rows.push(*copy);
                // SAFETY: row `r` of the part just taken.
                down.rows.push(unsafe { intermediate.add(r * shape.hidden_stride()) });
            }
            let words = job.expert.words();
            gate_up.push(Stage {
                before: gate_up.units,
                class: shape.class(),
                activation: shape.activation(),
                gated: shape.gated(),
                words,
                biases: job.expert.biases(),
                panel_words: shape.gate_up_panel_words(),
                steps: shape.gate_up_steps(),
                first_row,
                row_count,
                out: intermediate,
                out_stride: shape.hidden_stride(),
                panel_columns: shape.gate_up_columns(),
                panel_bytes: shape.gate_up_bytes(),
                columns: shape.width(),
            });
            down.push(Stage {
                before: down.units,
                class: shape.class(),
                activation: shape.activation(),
                gated: shape.gated(),
                words: words.wrapping_add(shape.down_offset_words()),
                biases: match shape.has_biases(Matrix::Down) {
                    true => job.expert.biases().wrapping_add(shape.gate_up_panels() * PANEL),
                    false => std::ptr::null(),
                },
                panel_words: shape.down_panel_words(),
                steps: shape.down_steps(),
                first_row: down.rows.len() - row_count,
                row_count,
                out: job.output.as_mut_ptr(),
                out_stride: row_bytes,
                panel_columns: PANEL,
                panel_bytes: PANEL * shape.dtype().bytes(),
                columns: shape.hidden(),
            });
        }
        Ok(())
    }

    /// Replaces the plan by that of a call of products, which have the second phase only.
    pub(crate) fn prepare_products(&mut self, products: &mut [Product<'_>]) -> Result<(), KernelError> {
        let mut free = self.begin(validate_products(products)?)?;
        let [_, phase] = &mut self.phases;
        for product in products {
            let matrix = product.matrix;
            let first_row = phase.rows.len();
            for row in product.inputs.chunks_exact(matrix.input_bytes()) {
                // SAFETY: `validate_products` counted a copy for every row.
                phase.rows.push(unsafe { free.readable(row, matrix.class(), matrix.input_copy_bytes()) });
            }
            let row_count = phase.rows.len() - first_row;
            if row_count == 0 {
                continue;
            }
            phase.push(Stage {
                before: phase.units,
                class: matrix.class(),
                // The second phase has neither.
                activation: Activation::Relu,
                gated: false,
                words: matrix.words(),
                biases: std::ptr::null(),
                panel_words: matrix.panel_words(),
                steps: matrix.steps(),
                first_row,
                row_count,
                out: product.output.as_mut_ptr(),
                out_stride: matrix.output_bytes(),
                panel_columns: PANEL,
                panel_bytes: PANEL * matrix.dtype().bytes(),
                columns: matrix.outputs(),
            });
        }
        Ok(())
    }

    /// Replaces the plan by one that calls `closure` with 0 to `units` - 1; it must live as long as the call.
    pub(crate) fn prepare_task<F: Fn(u32) + Sync>(&mut self, closure: &F, units: u32) {
        self.phases.iter_mut().for_each(PhasePlan::clear);
        self.task = Some(Task::of(closure));
        self.phases[CallPhase::Down as usize].units = units;
    }

    /// Returns the task whose units these are, where they are no panels.
    pub(crate) fn task(&self) -> Option<Task> {
        self.task
    }

    /// Class of a unit and its panel; `next` is the panel itself until the caller knows better.
    pub(crate) fn panel(&self, phase: CallPhase, unit: u32) -> Option<(NumericsClass, Panel)> {
        let units = &self.phases[phase as usize];
        let position = units.stages.partition_point(|stage| stage.before <= unit).checked_sub(1)?;
        let stage = units.stages.get(position)?;
        let index = (unit - stage.before) as usize;
        let column = index * stage.panel_columns;
        if column >= stage.columns {
            return None;
        }
        let rows = units.rows.get(stage.first_row..stage.first_row + stage.row_count)?;
        let weights = stage.words.wrapping_add(index * stage.panel_words);
        let panel = Panel {
            weights,
            steps: stage.steps,
            rows: rows.as_ptr(),
            row_count: stage.row_count,
            out: stage.out.wrapping_add(index * stage.panel_bytes),
            out_stride: stage.out_stride,
            columns: stage.panel_columns.min(stage.columns - column),
            phase,
            dtype: stage.class.dtype,
            activation: stage.activation,
            gated: stage.gated,
            biases: match stage.biases.is_null() {
                true => stage.biases,
                false => stage.biases.wrapping_add(index * PANEL),
            },
            next: weights.cast(),
        };
        Some((stage.class, panel))
    }
}

/// Totals of the items of a call, within the limits of one call.
#[derive(Default)]
struct Totals {
    rows: usize,
    scratch: usize,
}

/// One job or product of a call.
struct WorkItem {
    position: usize,
    rows: usize,
    /// Bytes of one row of its output, and of the whole output as it was given.
    output_row_bytes: usize,
    output_bytes: usize,
    scratch_row_bytes: usize,
}

impl Totals {
    fn add(&mut self, item: &WorkItem) -> Result<(), KernelError> {
        self.rows = self.rows.saturating_add(item.rows);
        if self.rows > MAX_ROWS {
            return Err(KernelError::TooMany { what: "rows", actual: self.rows, max: MAX_ROWS });
        }
        let too_large = KernelError::TooLarge { what: "an output" };
        let expected = item.rows.checked_mul(item.output_row_bytes).ok_or(too_large)?;
        if item.output_bytes != expected {
            let (job, actual) = (item.position, item.output_bytes);
            return Err(KernelError::OutputLength { job, expected, actual });
        }
        self.scratch = item
            .scratch_row_bytes
            .checked_mul(item.rows)
            .and_then(|bytes| bytes.checked_add(self.scratch))
            .ok_or(KernelError::TooLarge { what: "the scratch memory of a call" })?;
        Ok(())
    }
}

/// Checks the lengths of products; the scratch bytes they need.
fn validate_products(products: &[Product<'_>]) -> Result<usize, KernelError> {
    if products.len() > MAX_JOBS {
        return Err(KernelError::TooMany { what: "products", actual: products.len(), max: MAX_JOBS });
    }
    let mut totals = Totals::default();
    for (position, product) in products.iter().enumerate() {
        let matrix = product.matrix;
        if !product.inputs.len().is_multiple_of(matrix.input_bytes()) {
            return Err(KernelError::InputLength {
                job: position,
                actual: product.inputs.len(),
                hidden: matrix.inputs(),
                dtype: matrix.dtype(),
            });
        }
        totals.add(&WorkItem {
            position,
            rows: product.inputs.len() / matrix.input_bytes(),
            output_row_bytes: matrix.output_bytes(),
            output_bytes: product.output.len(),
            scratch_row_bytes: matrix.input_copy_bytes(),
        })?;
    }
    Ok(totals.scratch)
}

/// Checks every length and index of a call; the scratch bytes it needs.
fn validate_jobs(jobs: &[Job<'_>]) -> Result<usize, KernelError> {
    if jobs.len() > MAX_JOBS {
        return Err(KernelError::TooMany { what: "jobs", actual: jobs.len(), max: MAX_JOBS });
    }
    let mut totals = Totals::default();
    for (position, job) in jobs.iter().enumerate() {
        let shape = job.expert.shape();
        let row_bytes = shape.row_bytes();
        if !job.inputs.len().is_multiple_of(row_bytes) {
            return Err(KernelError::InputLength {
                job: position,
                actual: job.inputs.len(),
                hidden: shape.hidden(),
                dtype: shape.dtype(),
            });
        }
        let input_rows = job.inputs.len() / row_bytes;
        if let Some(&index) = job.row_index.iter().find(|&&index| index as usize >= input_rows) {
            return Err(KernelError::RowIndex { job: position, index, rows: input_rows });
        }
        totals.add(&WorkItem {
            position,
            rows: job.row_index.len(),
            output_row_bytes: row_bytes,
            output_bytes: job.output.len(),
            scratch_row_bytes: shape.hidden_stride() + shape.input_copy_bytes(),
        })?;
    }
    Ok(totals.scratch)
}
