//! From jobs to units: which panels there are, and where each finds its rows and puts its results.

use crate::memory::Buffer;
use crate::paths::panel::Panel;
use crate::shape::{HALF, PANEL};
use crate::{Dtype, ExpertShape, KernelError, PackedExpert};

/// Most jobs of one call.
pub const MAX_JOBS: usize = 1 << 14;

/// Most rows of one call, all jobs together.
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

/// The two halves of a call: everything of the first is done before anything of the second begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    GateUp,
    Down,
}

impl Phase {
    pub(crate) const ALL: [Self; 2] = [Self::GateUp, Self::Down];
}

/// A validated call. Kept between calls for its memory.
#[derive(Debug)]
pub(crate) struct Plan {
    jobs: Vec<Planned>,
    /// Pointers to input rows and to intermediate rows, of all jobs in order.
    inputs: Vec<*const u8>,
    intermediates: Vec<*const u8>,
    /// Intermediate rows, and input rows that had to be padded.
    scratch: Buffer,
    units: [u32; 2],
}

// SAFETY: the pointers are only used during a call, while the caller's borrows of the jobs are alive; threads write to disjoint panels.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

#[derive(Debug)]
struct Planned {
    /// Units of earlier jobs, by phase.
    before: [u32; 2],
    shape: ExpertShape,
    words: *const u32,
    first_row: usize,
    rows: usize,
    intermediate: *mut u8,
    output: *mut u8,
}

impl Plan {
    pub(crate) fn new() -> Result<Self, KernelError> {
        Ok(Self {
            jobs: Vec::new(),
            inputs: Vec::new(),
            intermediates: Vec::new(),
            scratch: Buffer::zeroed(0)?,
            units: [0; 2],
        })
    }

    pub(crate) fn units(&self, phase: Phase) -> u32 {
        self.units[phase as usize]
    }

    pub(crate) fn scratch_bytes(&self) -> usize {
        self.scratch.len()
    }

    /// Replaces the plan by that of a new call.
    pub(crate) fn prepare(&mut self, jobs: &mut [Job<'_>]) -> Result<(), KernelError> {
        let scratch = validate(jobs)?;
        if self.scratch.len() < scratch {
            // The old one goes first, so that both never exist together.
            self.scratch = Buffer::zeroed(0)?;
            self.scratch = Buffer::zeroed(scratch)?;
        }
        self.jobs.clear();
        self.inputs.clear();
        self.intermediates.clear();
        self.units = [0; 2];
        let mut free = self.scratch.as_mut_ptr();
        for job in jobs {
            let shape = *job.expert.shape();
            let rows = job.row_index.len();
            if rows == 0 {
                continue;
            }
            let first_row = self.inputs.len();
            let row_bytes = shape.row_bytes();
            let intermediate = free;
            // SAFETY: `validate` summed exactly these sizes; the stride of a row is a multiple of 64.
            free = unsafe { free.add(rows * shape.hidden_stride()) };
            for (r, &index) in job.row_index.iter().enumerate() {
                let source = &job.inputs[index as usize * row_bytes..][..row_bytes];
                // SAFETY: row `r` of the part just taken.
                self.intermediates.push(unsafe { intermediate.add(r * shape.hidden_stride()) });
                if shape.hidden() % 2 == 0 {
                    self.inputs.push(source.as_ptr());
                } else {
                    let stride = shape.input_stride();
                    // SAFETY: `validate` counted one padded input row for every row; `row_bytes < stride`.
                    unsafe {
                        free.copy_from_nonoverlapping(source.as_ptr(), row_bytes);
                        free.add(row_bytes).write_bytes(0, stride - row_bytes);
                        self.inputs.push(free);
                        free = free.add(stride);
                    }
                }
            }
            self.jobs.push(Planned {
                before: self.units,
                shape,
                words: job.expert.words(),
                first_row,
                rows,
                intermediate,
                output: job.output.as_mut_ptr(),
            });
            // At most MAX_JOBS * MAX_DIMENSION / 32 = 2^27.
            self.units[Phase::GateUp as usize] += shape.gate_up_panels() as u32;
            self.units[Phase::Down as usize] += shape.down_panels() as u32;
        }
        Ok(())
    }

    /// Element type of a unit and its panel; `next` is the panel itself until the caller knows better.
    pub(crate) fn panel(&self, phase: Phase, unit: u32) -> Option<(Dtype, Panel)> {
        let position = self.jobs.partition_point(|job| job.before[phase as usize] <= unit).checked_sub(1)?;
        let job = self.jobs.get(position)?;
        let shape = job.shape;
        let index = (unit - job.before[phase as usize]) as usize;
        let element = shape.dtype().bytes();
        let (panels, offset, pairs, rows, out, out_stride, width, total) = match phase {
            Phase::GateUp => (
                shape.gate_up_panels(),
                index * shape.gate_up_panel_words(),
                shape.gate_up_pairs(),
                &self.inputs,
                job.intermediate,
                shape.hidden_stride(),
                HALF,
                shape.width(),
            ),
            Phase::Down => (
                shape.down_panels(),
                shape.down_offset_words() + index * shape.down_panel_words(),
                shape.down_pairs(),
                &self.intermediates,
                job.output,
                shape.row_bytes(),
                PANEL,
                shape.hidden(),
            ),
        };
        if index >= panels {
            return None;
        }
        let rows = rows.get(job.first_row..job.first_row + job.rows)?;
        let column = index * width;
        let weights = job.words.wrapping_add(offset);
        let panel = Panel {
            weights,
            pairs,
            rows: rows.as_ptr(),
            row_count: job.rows,
            out: out.wrapping_add(column * element),
            out_stride,
            columns: width.min(total - column),
            activation: shape.activation(),
            next: weights.cast(),
        };
        Some((shape.dtype(), panel))
    }
}

/// Checks every length and index of a call; the scratch bytes it needs.
fn validate(jobs: &[Job<'_>]) -> Result<usize, KernelError> {
    if jobs.len() > MAX_JOBS {
        return Err(KernelError::TooMany { what: "jobs", actual: jobs.len(), max: MAX_JOBS });
    }
    let mut all_rows = 0usize;
    let mut scratch = 0usize;
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
        let rows = job.row_index.len();
        all_rows = all_rows.saturating_add(rows);
        if all_rows > MAX_ROWS {
            return Err(KernelError::TooMany { what: "rows", actual: all_rows, max: MAX_ROWS });
        }
        let input_rows = job.inputs.len() / row_bytes;
        if let Some(&index) = job.row_index.iter().find(|&&index| index as usize >= input_rows) {
            return Err(KernelError::RowIndex { job: position, index, rows: input_rows });
        }
        let too_large = KernelError::TooLarge { what: "an output" };
        let expected = rows.checked_mul(row_bytes).ok_or(too_large)?;
        if job.output.len() != expected {
            return Err(KernelError::OutputLength { job: position, expected, actual: job.output.len() });
        }
        let input_stride = if shape.hidden() % 2 == 1 { shape.input_stride() } else { 0 };
        scratch = (shape.hidden_stride() + input_stride)
            .checked_mul(rows)
            .and_then(|bytes| bytes.checked_add(scratch))
            .ok_or(KernelError::TooLarge { what: "the scratch memory of a call" })?;
    }
    Ok(scratch)
}
