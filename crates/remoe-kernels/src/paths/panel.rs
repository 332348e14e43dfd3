//! Kernels for one panel of 64 output columns and all rows of a job: a thread's unit of work.
//!
//! Rows are summed in blocks of at most six, with all accumulators of a block in registers and K strictly ascending.
//! There are three ways:
//!
//! - If the accumulators of all rows and columns fit the registers, one pass streams the panel from memory. It prefetches
//!   at a fixed distance, and beyond the panel's end in the next panel, unless the processor prefetches by itself
//!   ([`super::streams`]).
//! - With more rows, the panel is walked in chunks of K ([`super::chunked`]).
//! - With many rows and weights that need widening, chunks are widened once for all rows ([`super::widened`]).

use super::activation::{activate, factor};
use super::chunked::{self, Chunked};
use super::floats::Floats;
use super::steps::Step;
use super::streams::prefetcher_keeps_up;
use super::widened::{self, Widened};
use crate::phase::CallPhase;
use crate::quantise::RowGroup;
use crate::shape::{HALF_PANEL, PANEL};
use crate::{Activation, Dtype, WeightFormat};
use std::mem::MaybeUninit;

/// Largest number of rows of a block.
pub(super) const MAX_BLOCK_ROWS: usize = 6;
/// Bytes between the weights in use and the weights that are prefetched.
const PREFETCH_DISTANCE: usize = 8192;
/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

/// Arguments of a kernel. Pointers may have any alignment, except for the weights: 64 bytes.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    /// The packed panel: `steps * Step::WORDS` words.
    pub(crate) weights: *const u32,
    /// Number of steps of K, at least one: pairs, or groups if weights are quantised or fp8.
    pub(crate) steps: usize,
    /// `row_count` pointers to rows of `steps` pairs of elements, or of as many [`RowGroup`]s.
    pub(crate) rows: *const *const u8,
    pub(crate) row_count: usize,
    /// Destination of the first row's result for the panel's first column.
    pub(crate) out: *mut u8,
    /// Bytes between results of consecutive rows.
    pub(crate) out_stride: usize,
    /// Columns of results that exist: at most [`HALF_PANEL`] for gate and up, [`PANEL`] for down and for up without a gate.
    pub(crate) columns: usize,
    /// Decides, with `dtype`, how sums are finished, for kernels that serve both phases and both element types.
    pub(crate) phase: CallPhase,
    pub(crate) dtype: Dtype,
    pub(crate) activation: Activation,
    /// Set if a panel of the first phase has gate columns before its up columns.
    pub(crate) has_gate: bool,
    /// Biases of the panel's [`PANEL`] columns, or null.
    pub(crate) biases: *const f32,
    /// Panel that this thread will probably compute next. It is only prefetched.
    pub(crate) next: *const u8,
}

/// Sums of a row over all columns of a panel.
pub(super) type PanelSums = [f32; PANEL];

/// Uninitialised memory on cache lines of its own, written before it is read.
#[repr(align(64))]
pub(super) struct Aligned<T>(pub(super) MaybeUninit<T>);

impl<T> Aligned<T> {
    #[inline(always)]
    pub(super) const fn new() -> Self {
        Self(MaybeUninit::uninit())
    }
}

/// Last step of a kernel: turns the sums of some rows into results.
pub(super) trait Finish {
    /// Writes the results of the rows from `first` on, computed from their `sums`.
    ///
    /// # Safety
    /// The contract of [`super::Kernel`]; `first + sums.len()` is at most the panel's `row_count`.
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[PanelSums], first: usize);
}

/// Order in which a group of rows is multiplied with a panel.
pub(super) trait PanelWalk {
    /// Sums `count` rows over the whole panel into `sums`. Meanwhile it prefetches the weights at `after`.
    ///
    /// # Safety
    /// The contract of [`super::Kernel`]; there are `count` rows, at least one, and `sums` has room for all of them.
    unsafe fn sum_group<S: Step>(
        panel: &Panel,
        rows: *const *const u8,
        count: usize,
        after: *const u8,
        sums: *mut PanelSums,
    );
}

/// Finishes the first phase: activation, and product with the up projection.
struct GateUp;
/// Finishes the second phase.
struct Down;
/// Finishes either phase, as the panel says.
struct AnyPhase;

/// Computes [`HALF_PANEL`] intermediate columns from gate and up columns, or [`PANEL`] columns from up columns without a gate.
///
/// `out` has room for as many elements in each row, or for as many in [`RowGroup`]s if weights are quantised. Elements
/// beyond `columns` become zero.
///
/// # Safety
/// The contract of [`super::Kernel`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gate_up<S: Step>(panel: &Panel) {
    // SAFETY: the contract of `super::Kernel`, as the caller guarantees.
    unsafe { for_rows::<S, GateUp>(panel) }
}

/// Computes [`PANEL`] columns of the down projection, or of a product, rounded once to the element type.
///
/// # Safety
/// As for [`gate_up`]; `out` has room for `columns` elements in each row.
#[inline(always)]
pub(super) unsafe fn down<S: Step>(panel: &Panel) {
    // SAFETY: the contract of `super::Kernel`, as the caller guarantees.
    unsafe { for_rows::<S, Down>(panel) }
}

/// Computes what [`gate_up`] or [`down`] does, by the panel's phase and element type. One kernel for all of them takes a
/// fraction of the compile time.
///
/// # Safety
/// As for [`gate_up`] or [`down`].
#[inline(always)]
pub(super) unsafe fn any_phase<S: Step>(panel: &Panel) {
    // SAFETY: the contract of `super::Kernel`, as the caller guarantees.
    unsafe { for_rows::<S, AnyPhase>(panel) }
}

impl Finish for AnyPhase {
    #[inline(always)]
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[PanelSums], first: usize) {
        // SAFETY: the contract of `super::Kernel`, as the caller guarantees.
        unsafe {
            match (panel.phase, panel.dtype) {
                (CallPhase::GateUp, Dtype::F32) => GateUp::finish::<S>(panel, sums, first),
                (CallPhase::GateUp, Dtype::Bf16) => GateUp::finish::<S::InBf16>(panel, sums, first),
                (CallPhase::Down, Dtype::F32) => Down::finish::<S>(panel, sums, first),
                (CallPhase::Down, Dtype::Bf16) => Down::finish::<S::InBf16>(panel, sums, first),
            }
        }
    }
}

impl Finish for GateUp {
    #[inline(always)]
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[PanelSums], first: usize) {
        let size = S::ELEMENT_BYTES;
        let columns = if panel.has_gate { HALF_PANEL } else { PANEL };
        for (r, sums) in sums.iter().enumerate() {
            for half in (0..columns).step_by(HALF_PANEL) {
                // Values that are quantised together.
                let mut group = [0.0; HALF_PANEL];
                // Columns of this half that exist; the others are padding.
                let existing = panel.columns.saturating_sub(half).min(HALF_PANEL);
                // SAFETY: every row of `out` has room for `columns` elements, or for groups of as many, as the caller
                // guarantees.
                unsafe {
                    let out = panel.out.add((first + r) * panel.out_stride);
                    for c in (0..HALF_PANEL).step_by(S::F::LANES) {
                        let column = half + c;
                        let value = if panel.has_gate {
                            let gate = activated::<S>(panel, inner_sum::<S>(panel, sums, column));
                            let up = inner_sum::<S>(panel, sums, HALF_PANEL + column);
                            let mut factor = factor::<S::F>(panel.activation, up);
                            if S::BF16 {
                                factor = S::round(factor);
                            }
                            S::F::mul(gate, factor)
                        } else {
                            activated::<S>(panel, inner_sum::<S>(panel, sums, column))
                        };
                        if S::WEIGHTS.has_integers() {
                            let value = if S::BF16 { S::round(value) } else { value };
                            S::F::store(group.as_mut_ptr().add(c), value);
                        } else if S::BF16 {
                            S::store_rounded(out.add(column * size).cast(), value);
                        } else {
                            S::F::store(out.add(column * size).cast(), value);
                        }
                    }
                    // Padding columns are sums of x * 0, which is NaN if x is not finite. The down projection needs
                    // zeros.
                    if !S::WEIGHTS.has_integers() {
                        out.add((half + existing) * size).write_bytes(0, (HALF_PANEL - existing) * size);
                    } else {
                        group[existing..].fill(0.0);
                        let to = out.cast::<RowGroup>().add(half / HALF_PANEL);
                        to.write_unaligned(RowGroup::quantise(&group, S::WEIGHTS));
                    }
                }
            }
        }
    }
}

/// Returns the sums of the first phase from `column` on, with their biases, rounded to the element type.
///
/// # Safety
/// The contract of [`super::Kernel`]; a whole vector begins at `column`.
#[inline(always)]
unsafe fn inner_sum<S: Step>(panel: &Panel, sums: &PanelSums, column: usize) -> <S::F as Floats>::V {
    // SAFETY: the contract of `super::Kernel`, as the caller guarantees.
    unsafe {
        let mut sum = S::F::load(sums.as_ptr().add(column));
        if S::BF16 {
            sum = S::round(sum);
        }
        if !panel.biases.is_null() {
            sum = S::F::add(sum, S::F::load(panel.biases.add(column)));
            if S::BF16 {
                sum = S::round(sum);
            }
        }
        sum
    }
}

/// Returns the activation of sums, rounded to the element type.
///
/// # Safety
/// The contract of [`super::Kernel`].
#[inline(always)]
unsafe fn activated<S: Step>(panel: &Panel, sum: <S::F as Floats>::V) -> <S::F as Floats>::V {
    // SAFETY: the contract of `super::Kernel`, as the caller guarantees.
    unsafe {
        let activated = activate::<S::F>(panel.activation, sum);
        if S::BF16 { S::round(activated) } else { activated }
    }
}

impl Finish for Down {
    #[inline(always)]
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[PanelSums], first: usize) {
        let size = S::ELEMENT_BYTES;
        // The last panel may be partial: its rows are written to a buffer for a whole row, and copied from there.
        let mut whole_row = [0u8; PANEL * 4];
        let is_partial = panel.columns < PANEL;
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: every row of `out` has room for `columns` elements, as the caller guarantees.
            unsafe {
                let out = panel.out.add((first + r) * panel.out_stride);
                let target = if is_partial { whole_row.as_mut_ptr() } else { out };
                for c in (0..PANEL).step_by(S::F::LANES) {
                    let mut sum = S::F::load(sums.as_ptr().add(c));
                    if !panel.biases.is_null() {
                        if S::BF16 {
                            sum = S::round(sum);
                        }
                        sum = S::F::add(sum, S::F::load(panel.biases.add(c)));
                    }
                    let to = target.add(c * size);
                    if S::BF16 {
                        S::store_rounded(to.cast(), sum);
                    } else {
                        S::F::store(to.cast(), S::F::canonical(sum));
                    }
                }
                if is_partial {
                    out.copy_from_nonoverlapping(target, panel.columns * size);
                }
            }
        }
    }
}

/// Computes all rows of a panel, in the fastest of the three ways (see the module documentation).
///
/// # Safety
/// The contract of [`super::Kernel`].
#[inline(always)]
unsafe fn for_rows<S: Step, E: Finish>(panel: &Panel) {
    if panel.row_count == 0 {
        return;
    }
    debug_assert!(panel.steps > 0, "sums are written in the first step");
    // SAFETY: the contract of `super::Kernel`, as the caller guarantees.
    unsafe {
        if panel.row_count <= max_streamed_rows::<S>() {
            stream::<S, E>(panel);
        } else if panel.row_count > S::MAX_UNWIDENED_ROWS {
            for_groups::<S, E, Widened, { widened::MAX_GROUP_ROWS }>(panel);
        } else {
            for_groups::<S, E, Chunked, { chunked::MAX_GROUP_ROWS }>(panel);
        }
    }
}

/// Splits the rows into groups of at most `MAX_GROUP_ROWS`, as even as possible, and sums and finishes each group.
///
/// # Safety
/// The contract of [`super::Kernel`].
#[inline(always)]
unsafe fn for_groups<S: Step, E: Finish, W: PanelWalk, const MAX_GROUP_ROWS: usize>(panel: &Panel) {
    let mut sums = Aligned::<[PanelSums; MAX_GROUP_ROWS]>::new();
    let sums = sums.0.as_mut_ptr().cast::<PanelSums>();
    let groups = panel.row_count.div_ceil(MAX_GROUP_ROWS);
    let mut first = 0;
    for group in 0..groups {
        let count = (panel.row_count - first).div_ceil(groups - group);
        let after = if group + 1 == groups { panel.next } else { panel.weights.cast() };
        // SAFETY: `count <= MAX_GROUP_ROWS` and `first + count <= row_count`. There is at least one step, so that `sum_group`
        // writes the sums of `count` rows before they are finished.
        unsafe {
            W::sum_group::<S>(panel, panel.rows.add(first), count, after, sums);
            E::finish::<S>(panel, std::slice::from_raw_parts(sums, count), first);
        }
        first += count;
    }
}

/// Largest number of rows whose accumulators for all columns fit the registers. With quantised weights these are the
/// accumulators of one step; the sums over all steps may lie in memory.
const fn max_streamed_rows<S: Step>() -> usize {
    match (S::F::LANES, S::WEIGHTS) {
        (16, WeightFormat::Plain | WeightFormat::Int8) => MAX_BLOCK_ROWS,
        (16, WeightFormat::Int4 | WeightFormat::Mxfp4) => MAX_BLOCK_ROWS - 1,
        (16, WeightFormat::Fp8) => MAX_BLOCK_ROWS / 2,
        (8, _) => 1,
        _ => 0,
    }
}

/// Sums all rows in one pass over the panel and finishes them.
///
/// # Safety
/// The contract of [`super::Kernel`]; the panel has at most [`max_streamed_rows`].
#[inline(always)]
unsafe fn stream<S: Step, E: Finish>(panel: &Panel) {
    let mut sums = Aligned::<[PanelSums; MAX_BLOCK_ROWS]>::new();
    let sums = sums.0.as_mut_ptr().cast::<PanelSums>();
    // SAFETY: `row_count` is at most `max_streamed_rows`, so that `stream_columns` writes the sums of every row and
    // column before they are finished.
    unsafe {
        if S::F::LANES == 16 {
            match panel.row_count {
                1 => stream_columns::<S, 1, 4, 1>(panel, sums),
                2 => stream_columns::<S, 2, 4, 1>(panel, sums),
                3 => stream_columns::<S, 3, 4, 1>(panel, sums),
                4 => stream_columns::<S, 4, 4, 1>(panel, sums),
                5 => stream_columns::<S, 5, 4, 1>(panel, sums),
                _ => stream_columns::<S, 6, 4, 1>(panel, sums),
            }
        } else if S::WEIGHTS.is_plain() {
            stream_columns::<S, 1, 8, 1>(panel, sums);
        } else {
            stream_columns::<S, 1, 4, 2>(panel, sums);
        }
        E::finish::<S>(panel, std::slice::from_raw_parts(sums, panel.row_count), 0);
    }
}

/// Sums `R` rows by `G` groups of `C` vectors of columns, which are all columns of the panel. With more than one group,
/// all weights of a step are used when they arrive from memory, so that memory is read continuously.
///
/// # Safety
/// The contract of [`super::Kernel`]; the panel has `R` rows, and `sums` has room for them.
#[inline(always)]
unsafe fn stream_columns<S: Step, const R: usize, const C: usize, const G: usize>(
    panel: &Panel,
    sums: *mut PanelSums,
) {
    debug_assert_eq!(G * C * S::F::LANES, PANEL, "all columns");
    let step_bytes = S::WORDS * 4;
    let near_end = panel.steps.saturating_sub(PREFETCH_DISTANCE / step_bytes);
    let prefetches = !(!S::WEIGHTS.is_plain() && S::F::LANES == 16 && prefetcher_keeps_up());
    // float32 needs twice the bytes for the same arithmetic. The second-level cache allows more requests in flight.
    let prefetches_far = R > 1 && S::WEIGHTS.is_plain() && !S::BF16;
    let mut w = panel.weights;
    let mut after = panel.next;
    // SAFETY: the contract of `super::Kernel`, as the caller guarantees.
    unsafe {
        let mut acc = [[[S::F::splat(0.0); C]; R]; G];
        let mut x = [std::ptr::null(); R];
        for r in 0..R {
            x[r] = *panel.rows.add(r);
        }
        for step in 0..near_end {
            let ahead = w.cast::<u8>().wrapping_add(PREFETCH_DISTANCE);
            if prefetches_far {
                prefetch::<INTO_L2>(ahead, step_bytes / CACHE_LINE);
            } else if prefetches {
                prefetch::<INTO_L1>(ahead, step_bytes / CACHE_LINE);
            }
            add_groups::<S, R, C, G>(&mut acc, &x, step, w, 0);
            w = w.wrapping_add(S::WORDS);
        }
        for step in near_end..panel.steps {
            prefetch::<INTO_L1>(after, step_bytes / CACHE_LINE);
            add_groups::<S, R, C, G>(&mut acc, &x, step, w, 0);
            after = after.wrapping_add(step_bytes);
            w = w.wrapping_add(S::WORDS);
        }
        for g in 0..G {
            for r in 0..R {
                for c in 0..C {
                    let column = (g * C + c) * S::F::LANES;
                    S::F::store(sums.add(r).cast::<f32>().add(column), acc[g][r][c]);
                }
            }
        }
    }
}

/// Calls [`Step::add`] for each group of columns.
///
/// # Safety
/// As for [`Step::add`], with the columns of all groups.
#[inline(always)]
unsafe fn add_groups<S: Step, const R: usize, const C: usize, const G: usize>(
    acc: &mut [[[<S::F as Floats>::V; C]; R]; G],
    x: &[*const u8; R],
    step: usize,
    w: *const u32,
    first: usize,
) {
    for g in 0..G {
        // SAFETY: the contract of `super::Kernel`, as the caller guarantees.
        unsafe { S::add(&mut acc[g], x, step, w, first + g * C * S::F::LANES) };
    }
}

/// Hint of [`prefetch`]: into the first-level cache.
pub(super) const INTO_L1: i32 = 3;
/// Hint of [`prefetch`]: into the second-level cache.
pub(super) const INTO_L2: i32 = 2;

/// Prefetches `lines` cache lines from `from` on, which may be any address.
#[inline(always)]
pub(super) fn prefetch<const TO: i32>(from: *const u8, lines: usize) {
    let mut line = from;
    for _ in 0..lines {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::_mm_prefetch;
            // SAFETY: every x86-64 processor has the instruction, and it never faults.
            unsafe { _mm_prefetch::<TO>(line.cast()) };
        }
        line = line.wrapping_add(CACHE_LINE);
    }
}
