//! Turns a call into units of work for threads: panels, with pointers to their weights, rows and results.

use crate::memory::Buffer;
use crate::numerics::from_bf16;
use crate::paths::panel::Panel;
use crate::phase::CallPhase;
use crate::quantise::quantise_row;
use crate::shape::PANEL;
use crate::{
    Activation, Dtype, ExpertMatrix, KernelError, NumericsClass, PackedExpert, PackedMatrix, WeightFormat,
};

/// Most jobs, or products, of one call.
pub const MAX_JOBS: usize = 1 << 14;

/// Most rows of one call, all jobs or products together.
pub const MAX_ROWS: usize = 1 << 20;

/// An expert and the rows that it computes in a call.
#[derive(Debug)]
pub struct ExpertJob<'a> {
    /// Weights of the expert.
    pub expert: &'a PackedExpert,
    /// A row-major matrix of input rows, `hidden` little-endian elements of the expert's type each, with any alignment.
    pub inputs: &'a [u8],
    /// Numbers of the rows of `inputs` to compute, in any order; repetitions are legal.
    pub row_index: &'a [u32],
    /// Results: one row of `hidden` elements for each row index, in the same order, little-endian, with any alignment.
    pub output: &'a mut [u8],
}

/// A matrix and the rows that it is multiplied with: `output = inputs matrix^T`.
#[derive(Debug)]
pub struct MatrixProduct<'a> {
    /// Weights of the matrix.
    pub matrix: &'a PackedMatrix,
    /// Row-major rows of [`PackedMatrix::inputs`] little-endian elements of the matrix' type, with any alignment.
    pub inputs: &'a [u8],
    /// One row of [`PackedMatrix::outputs`] elements for each input row, little-endian, with any alignment.
    pub output: &'a mut [u8],
}

/// The units of a validated call. Reused for later calls, to keep its memory.
#[derive(Debug)]
pub(crate) struct CallPlan {
    phases: [PhasePlan; 2],
    /// Intermediate rows, and copies of input rows.
    scratch: Buffer,
    /// Copies of the current job's input rows as kernels read them; null for rows not copied yet. Consecutive jobs with
    /// the same inputs share them.
    copies: Vec<*const u8>,
    /// If set, the units of the second phase are units of this task instead of panels.
    task: Option<Task>,
}

/// A type-erased closure of the caller's that is called with the number of each unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    closure: *const (),
    call: unsafe fn(*const (), u32),
}

impl Task {
    fn new<F: Fn(u32) + Sync>(closure: &F) -> Self {
        /// # Safety
        /// `closure` points to a living `F`.
        unsafe fn call<F: Fn(u32)>(closure: *const (), unit: u32) {
            // SAFETY: `closure` points to a living `F`, as the caller guarantees.
            unsafe { (*closure.cast::<F>())(unit) }
        }
        Self { closure: std::ptr::from_ref(closure).cast(), call: call::<F> }
    }

    /// Calls the closure for one unit.
    ///
    /// # Safety
    /// The closure is still alive.
    pub(crate) unsafe fn run(self, unit: u32) {
        // SAFETY: the closure is alive, as the caller guarantees, and `new` made both pointers for the same type.
        unsafe { (self.call)(self.closure, unit) }
    }
}

// SAFETY: the pointers are only used during a call, while the caller's borrows of jobs and products are alive. Threads
// write to disjoint panels.
unsafe impl Send for CallPlan {}
// SAFETY: as for `Send`.
unsafe impl Sync for CallPlan {}

/// Units of one phase: the panels of all its stages.
#[derive(Debug, Default)]
struct PhasePlan {
    stages: Vec<Stage>,
    /// Pointers to the input rows of all stages, in order.
    rows: Vec<*const u8>,
    units: u32,
}

/// Product of a packed matrix with some rows. Each of its panels is one unit.
#[derive(Debug)]
struct Stage {
    /// Number of units of earlier stages.
    units_before: u32,
    class: NumericsClass,
    activation: Activation,
    has_gate: bool,
    words: *const u32,
    /// Biases of the columns of all panels, or null.
    biases: *const f32,
    panel_words: usize,
    steps: usize,
    first_row: usize,
    row_count: usize,
    out: *mut u8,
    out_stride: usize,
    /// Result columns of a panel, and their bytes in a row.
    panel_columns: usize,
    panel_bytes: usize,
    /// Result columns of all panels.
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
        // Cannot overflow: at most MAX_JOBS * MAX_OUTPUTS / 64 = 2^28 units.
        self.units += stage.columns.div_ceil(stage.panel_columns) as u32;
        self.stages.push(stage);
    }
}

/// Bump allocator of a call's scratch memory: points to the first free byte.
struct ScratchAllocator(*mut u8);

impl ScratchAllocator {
    /// Allocates `bytes` bytes.
    ///
    /// # Safety
    /// The scratch memory has `bytes` left.
    unsafe fn allocate(&mut self, bytes: usize) -> *mut u8 {
        let allocated = self.0;
        // SAFETY: the scratch memory has `bytes` left, as the caller guarantees.
        self.0 = unsafe { allocated.add(bytes) };
        allocated
    }

    /// Returns a pointer to `row` as kernels of `class` read it: to the row itself, or to a padded or quantised copy of
    /// `bytes` bytes.
    ///
    /// # Safety
    /// The scratch memory has `bytes` left, and `bytes` is [`crate::shape::row_copy_bytes`] of the row.
    unsafe fn kernel_row(&mut self, row: &[u8], class: NumericsClass, bytes: usize) -> *const u8 {
        if bytes == 0 {
            return row.as_ptr();
        }
        // SAFETY: the scratch memory has `bytes` left, which is enough for the copy, as the caller guarantees.
        unsafe {
            let copy = self.allocate(bytes);
            match (class.weights, class.dtype) {
                (WeightFormat::Plain | WeightFormat::Fp8, _) => {
                    copy.copy_from_nonoverlapping(row.as_ptr(), row.len());
                    copy.add(row.len()).write_bytes(0, bytes - row.len());
                }
                (weights, Dtype::F32) => {
                    let (elements, _) = row.as_chunks();
                    quantise_row(elements.len(), |k| f32::from_le_bytes(elements[k]), weights, copy);
                }
                (weights, Dtype::Bf16) => {
                    let (elements, _) = row.as_chunks();
                    quantise_row(
                        elements.len(),
                        |k| from_bf16(u16::from_le_bytes(elements[k])),
                        weights,
                        copy,
                    );
                }
            }
            copy
        }
    }
}

impl CallPlan {
    pub(crate) fn new() -> Result<Self, KernelError> {
        Ok(Self { phases: Default::default(), scratch: Buffer::zeroed(0)?, copies: Vec::new(), task: None })
    }

    pub(crate) fn units(&self, phase: CallPhase) -> u32 {
        self.phases[phase as usize].units
    }

    pub(crate) fn scratch_bytes(&self) -> usize {
        self.scratch.len()
    }

    /// Clears the last call's plan and ensures that there are `scratch_bytes` of scratch memory.
    fn begin(&mut self, scratch_bytes: usize) -> Result<ScratchAllocator, KernelError> {
        self.phases.iter_mut().for_each(PhasePlan::clear);
        self.task = None;
        if self.scratch.len() < scratch_bytes {
            // The old buffer is dropped first, so that both never exist together.
            self.scratch = Buffer::zeroed(0)?;
            self.scratch = Buffer::zeroed(scratch_bytes)?;
        }
        Ok(ScratchAllocator(self.scratch.as_mut_ptr()))
    }

    /// Replaces the plan by the plan of a call of experts.
    pub(crate) fn prepare_jobs(&mut self, jobs: &mut [ExpertJob<'_>]) -> Result<(), KernelError> {
        let mut scratch = self.begin(validate_jobs(jobs)?)?;
        let [gate_up, down] = &mut self.phases;
        let copies = &mut self.copies;
        // Source of the rows in `copies`. A token is routed to several experts, but copied only once.
        let mut copied_source = None;
        for job in jobs {
            let shape = *job.expert.shape();
            let row_count = job.row_index.len();
            if row_count == 0 {
                continue;
            }
            let row_bytes = shape.row_bytes();
            // SAFETY: `validate_jobs` counted these bytes, and the stride of a row is a multiple of 64.
            let intermediate = unsafe { scratch.allocate(row_count * shape.intermediate_stride()) };
            let first_row = gate_up.rows.len();
            let source = Some((job.inputs.as_ptr_range(), shape.class(), row_bytes));
            if copied_source != source {
                copies.clear();
                copies.resize(job.inputs.len() / row_bytes, std::ptr::null());
                copied_source = source;
            }
            for (r, &index) in job.row_index.iter().enumerate() {
                let copy = &mut copies[index as usize];
                if copy.is_null() {
                    let row = &job.inputs[index as usize * row_bytes..][..row_bytes];
                    // SAFETY: `validate_jobs` counted a copy for every row.
                    *copy = unsafe { scratch.kernel_row(row, shape.class(), shape.input_copy_bytes()) };
                }
                gate_up.rows.push(*copy);
                // SAFETY: `intermediate` was just allocated for `row_count` rows.
                down.rows.push(unsafe { intermediate.add(r * shape.intermediate_stride()) });
            }
            let words = job.expert.words();
            gate_up.push(Stage {
                units_before: gate_up.units,
                class: shape.class(),
                activation: shape.activation(),
                has_gate: shape.has_gate(),
                words,
                biases: job.expert.biases(),
                panel_words: shape.gate_up_panel_words(),
                steps: shape.gate_up_steps(),
                first_row,
                row_count,
                out: intermediate,
                out_stride: shape.intermediate_stride(),
                panel_columns: shape.gate_up_columns(),
                panel_bytes: shape.gate_up_output_bytes(),
                columns: shape.width(),
            });
            down.push(Stage {
                units_before: down.units,
                class: shape.class(),
                activation: shape.activation(),
                has_gate: shape.has_gate(),
                words: words.wrapping_add(shape.down_offset_words()),
                biases: match shape.has_biases(ExpertMatrix::Down) {
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

    /// Replaces the plan by the plan of a call of products, which only have the second phase.
    pub(crate) fn prepare_products(&mut self, products: &mut [MatrixProduct<'_>]) -> Result<(), KernelError> {
        let mut scratch = self.begin(validate_products(products)?)?;
        let [_, phase] = &mut self.phases;
        for product in products {
            let matrix = product.matrix;
            let first_row = phase.rows.len();
            for row in product.inputs.chunks_exact(matrix.input_bytes()) {
                // SAFETY: `validate_products` counted a copy for every row.
                let row = unsafe { scratch.kernel_row(row, matrix.class(), matrix.input_copy_bytes()) };
                phase.rows.push(row);
            }
            let row_count = phase.rows.len() - first_row;
            if row_count == 0 {
                continue;
            }
            phase.push(Stage {
                units_before: phase.units,
                class: matrix.class(),
                // Not used in the second phase.
                activation: Activation::Relu,
                has_gate: false,
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

    /// Replaces the plan by one that calls `closure` with 0 to `units` - 1. The closure must outlive the call.
    pub(crate) fn prepare_task<F: Fn(u32) + Sync>(&mut self, closure: &F, units: u32) {
        self.phases.iter_mut().for_each(PhasePlan::clear);
        self.task = Some(Task::new(closure));
        self.phases[CallPhase::Down as usize].units = units;
    }

    /// Returns the task if the units are its units; `None` if they are panels.
    pub(crate) fn task(&self) -> Option<Task> {
        self.task
    }

    /// Returns the class and the panel of a unit. `next` of the panel points to the panel itself; the caller may change it.
    pub(crate) fn panel(&self, phase: CallPhase, unit: u32) -> Option<(NumericsClass, Panel)> {
        let phase_plan = &self.phases[phase as usize];
        let position =
            phase_plan.stages.partition_point(|stage| stage.units_before <= unit).checked_sub(1)?;
        let stage = phase_plan.stages.get(position)?;
        let index = (unit - stage.units_before) as usize;
        let column = index * stage.panel_columns;
        if column >= stage.columns {
            return None;
        }
        let rows = phase_plan.rows.get(stage.first_row..stage.first_row + stage.row_count)?;
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
            has_gate: stage.has_gate,
            biases: match stage.biases.is_null() {
                true => stage.biases,
                false => stage.biases.wrapping_add(index * PANEL),
            },
            next: weights.cast(),
        };
        Some((stage.class, panel))
    }
}

/// Totals of a call, checked against the limits of one call.
#[derive(Default)]
struct Totals {
    rows: usize,
    scratch_bytes: usize,
}

/// Sizes of one job or product of a call.
struct WorkItem {
    /// Position in the call, for errors.
    position: usize,
    rows: usize,
    output_row_bytes: usize,
    /// Length of the caller's output.
    output_bytes: usize,
    scratch_row_bytes: usize,
}

impl Totals {
    /// Checks the limits and the output's length of an item, and adds it.
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
        self.scratch_bytes = item
            .scratch_row_bytes
            .checked_mul(item.rows)
            .and_then(|bytes| bytes.checked_add(self.scratch_bytes))
            .ok_or(KernelError::TooLarge { what: "the scratch memory of a call" })?;
        Ok(())
    }
}

/// Checks the lengths of products. Returns the bytes of scratch memory that they need.
fn validate_products(products: &[MatrixProduct<'_>]) -> Result<usize, KernelError> {
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
    Ok(totals.scratch_bytes)
}

/// Checks all lengths and row indices of jobs. Returns the bytes of scratch memory that they need.
fn validate_jobs(jobs: &[ExpertJob<'_>]) -> Result<usize, KernelError> {
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
            scratch_row_bytes: shape.intermediate_stride() + shape.input_copy_bytes(),
        })?;
    }
    Ok(totals.scratch_bytes)
}
