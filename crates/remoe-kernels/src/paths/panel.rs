//! One panel of 64 output columns for all rows of a job: what a thread takes at a time.
//!
//! Rows are summed in blocks of at most six, with all accumulators of a block in registers and K strictly ascending.
//! One block whose accumulators for all columns fit there streams the panel from memory: it prefetches a fixed distance
//! ahead, unless the processor does so by itself ([`super::streams`]), and where the panel ends it goes on in the panel
//! that follows. More rows, or more columns than fit, go by way of [`super::chunked`]; where weights have to be
//! widened, many rows go by way of [`super::widened`].

use super::activation::{activate, factor};
use super::chunked::{self, Chunked};
use super::floats::Floats;
use super::steps::Step;
use super::streams::follows_groups;
use super::widened::{self, Widened};
use crate::phase::CallPhase;
use crate::quantise::RowGroup;
use crate::shape::{HALF, PANEL};
use crate::{Activation, Dtype, WeightFormat};
use std::mem::MaybeUninit;

/// Most rows of a block.
pub(super) const ROWS: usize = 6;
/// How far ahead of use weights are asked for, in bytes.
const AHEAD: usize = 8192;
pub(super) const LINE: usize = 64;

/// The work on one panel. Pointers have no alignment, except for the weights' 64 bytes.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    /// The packed panel: `steps * Step::WORDS` words.
    pub(crate) weights: *const u32,
    /// Steps of K, at least one: pairs, or groups where weights are quantised.
    pub(crate) steps: usize,
    /// `row_count` pointers to rows of `steps` pairs of elements, or of as many [`RowGroup`]s.
    pub(crate) rows: *const *const u8,
    pub(crate) row_count: usize,
    /// Where the first row's result for the panel's first column goes.
    pub(crate) out: *mut u8,
    /// Bytes between results of consecutive rows.
    pub(crate) out_stride: usize,
    /// Columns of results that exist: at most [`HALF`] for gate and up, [`PANEL`] for down and for up without a gate.
    pub(crate) columns: usize,
    /// Phase, which decides how sums are finished, for kernels that serve both phases and both types.
    pub(crate) phase: CallPhase,
    pub(crate) dtype: Dtype,
    pub(crate) activation: Activation,
    /// Set if the first phase has columns of a gate before those of the up projection.
    pub(crate) gated: bool,
    /// Biases that are added to the sums: an element for each of the panel's [`PANEL`] columns, or null.
    pub(crate) biases: *const f32,
    /// The panel that this thread will probably take next; only prefetched.
    pub(crate) next: *const u8,
}

/// Sums of a row over all columns of a panel.
pub(super) type PanelSums = [f32; PANEL];

/// Memory that is written before it is read, on cache lines of its own.
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
    /// Writes the results of the rows from `first` on, whose sums these are.
    ///
    /// # Safety
    /// As for the kernels; `first + sums.len()` is at most the panel's `row_count`.
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[PanelSums], first: usize);
}

/// How a group of rows goes over a panel.
pub(super) trait PanelWalk {
    /// Sums `count` rows over the whole panel into `sums`, and fetches what is at `after` meanwhile.
    ///
    /// # Safety
    /// As for the kernels; there are `count` rows, at least one, and room for the sums of each.
    unsafe fn sum_group<S: Step>(
        panel: &Panel,
        rows: *const *const u8,
        count: usize,
        after: *const u8,
        sums: *mut PanelSums,
    );
}

struct GateUp;
struct Down;
struct Either;

/// Gate, up, activation and product for [`HALF`] intermediate columns, or up and activation for [`PANEL`] where there
/// is no gate. `out` has room for as many elements in every row, or for [`RowGroup`]s of as many where weights are
/// quantised; those beyond `columns` become zero.
///
/// # Safety
/// The CPU has the features of `S`, denormals are flushed, the panel's pointers are valid, and no other thread touches
/// its part of the output.
#[inline(always)]
pub(super) unsafe fn gate_up<S: Step>(panel: &Panel) {
    // SAFETY: the caller's promise.
    unsafe { for_rows::<S, GateUp>(panel) }
}

/// [`PANEL`] columns of the down projection, rounded once to the element type.
///
/// # Safety
/// As for [`gate_up`]; `out` has room for `columns` elements in every row.
#[inline(always)]
pub(super) unsafe fn down<S: Step>(panel: &Panel) {
    // SAFETY: the caller's promise.
    unsafe { for_rows::<S, Down>(panel) }
}

/// As [`gate_up`] or [`down`], by the panel's phase and type. One kernel for all of them is compiled in a fraction of
/// the time.
///
/// # Safety
/// As for [`gate_up`] or [`down`].
#[inline(always)]
pub(super) unsafe fn either<S: Step>(panel: &Panel) {
    // SAFETY: the caller's promise.
    unsafe { for_rows::<S, Either>(panel) }
}

impl Finish for Either {
    #[inline(always)]
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[PanelSums], first: usize) {
        // SAFETY: the caller's promise.
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
        let size = S::ELEMENT;
        let columns = if panel.gated { HALF } else { PANEL };
        for (r, sums) in sums.iter().enumerate() {
            for half in (0..columns).step_by(HALF) {
                // What becomes a group of integers.
                let mut group = [0.0; HALF];
                // Columns of it that exist.
                let there = panel.columns.saturating_sub(half).min(HALF);
                // SAFETY: the caller's promise: every row of `out` has room for `columns` elements, or for groups of as
                // many.
                unsafe {
                    let out = panel.out.add((first + r) * panel.out_stride);
                    for c in (0..HALF).step_by(S::F::LANES) {
                        let column = half + c;
                        let value = if panel.gated {
                            let gate = activated::<S>(panel, inner_sum::<S>(panel, sums, column));
                            let up = inner_sum::<S>(panel, sums, HALF + column);
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
                    // The padded columns are sums of x * 0, which is NaN where x is not finite; the down projection
                    // must see zero.
                    if !S::WEIGHTS.has_integers() {
                        out.add((half + there) * size).write_bytes(0, (HALF - there) * size);
                    } else {
                        group[there..].fill(0.0);
                        let to = out.cast::<RowGroup>().add(half / HALF);
                        to.write_unaligned(RowGroup::of(&group, S::WEIGHTS));
                    }
                }
            }
        }
    }
}

/// Sums of the first phase from `column` on, with their biases.
///
/// # Safety
/// As for the kernels; `column` is that of a whole vector.
#[inline(always)]
unsafe fn inner_sum<S: Step>(panel: &Panel, sums: &PanelSums, column: usize) -> <S::F as Floats>::V {
    // SAFETY: the caller's promise.
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
/// As for the kernels.
#[inline(always)]
unsafe fn activated<S: Step>(panel: &Panel, sum: <S::F as Floats>::V) -> <S::F as Floats>::V {
    // SAFETY: the caller's promise.
    unsafe {
        let activated = activate::<S::F>(panel.activation, sum);
        if S::BF16 { S::round(activated) } else { activated }
    }
}

impl Finish for Down {
    #[inline(always)]
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[PanelSums], first: usize) {
        let size = S::ELEMENT;
        // The last panel may be partial; it is stored by way of a whole one.
        let mut whole = [0u8; PANEL * 4];
        let partial = panel.columns < PANEL;
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: the caller's promise: every row of `out` has room for `columns` elements.
            unsafe {
                let out = panel.out.add((first + r) * panel.out_stride);
                let target = if partial { whole.as_mut_ptr() } else { out };
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
                if partial {
                    out.copy_from_nonoverlapping(target, panel.columns * size);
                }
            }
        }
    }
}

/// By one pass over the panel, or by chunks of it, of weights as they are packed or widened for all blocks together.
#[inline(always)]
unsafe fn for_rows<S: Step, E: Finish>(panel: &Panel) {
    if panel.row_count == 0 {
        return;
    }
    debug_assert!(panel.steps > 0, "sums that are finished have begun");
    // SAFETY: the caller's promise.
    unsafe {
        if panel.row_count <= rows_at_once::<S>() {
            stream::<S, E>(panel);
        } else if panel.row_count > S::MOST_UNWIDENED {
            for_groups::<S, E, Widened, { widened::GROUP }>(panel);
        } else {
            for_groups::<S, E, Chunked, { chunked::GROUP }>(panel);
        }
    }
}

/// Splits the rows into groups of at most `GROUP`, as even as possible, sums each and finishes it.
#[inline(always)]
unsafe fn for_groups<S: Step, E: Finish, W: PanelWalk, const GROUP: usize>(panel: &Panel) {
    let mut sums = Aligned::<[PanelSums; GROUP]>::new();
    let sums = sums.0.as_mut_ptr().cast::<PanelSums>();
    let groups = panel.row_count.div_ceil(GROUP);
    let mut first = 0;
    for group in 0..groups {
        let count = (panel.row_count - first).div_ceil(groups - group);
        let after = if group + 1 == groups { panel.next } else { panel.weights.cast() };
        // SAFETY: `count <= GROUP` and `first + count <= row_count`; there is at least one step, so that `sum_group`
        // has written the sums of `count` rows when they are finished.
        unsafe {
            W::sum_group::<S>(panel, panel.rows.add(first), count, after, sums);
            E::finish::<S>(panel, std::slice::from_raw_parts(sums, count), first);
        }
        first += count;
    }
}

/// Most rows whose sums over all columns fit the registers, of one step where weights are integers: what they add up to
/// may lie in memory then.
const fn rows_at_once<S: Step>() -> usize {
    match (S::F::LANES, S::WEIGHTS) {
        (16, WeightFormat::Plain | WeightFormat::Int8) => ROWS,
        (16, WeightFormat::Int4 | WeightFormat::Mxfp4) => ROWS - 1,
        (16, WeightFormat::Fp8) => ROWS / 2,
        (8, _) => 1,
        _ => 0,
    }
}

/// Sums all rows in one pass over the panel and finishes them.
#[inline(always)]
unsafe fn stream<S: Step, E: Finish>(panel: &Panel) {
    let mut sums = Aligned::<[PanelSums; ROWS]>::new();
    let sums = sums.0.as_mut_ptr().cast::<PanelSums>();
    // SAFETY: the caller's promise; `row_count` is at most `rows_at_once`, so that one group of columns is all of them
    // and the sums of every row have been written when they are finished.
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

/// By `G` times `C` vectors of columns, which are all of them. With more than one group a step's weights are all used
/// when they come from memory, so that it is read all the time and not during a first pass alone.
#[inline(always)]
unsafe fn stream_columns<S: Step, const R: usize, const C: usize, const G: usize>(
    panel: &Panel,
    sums: *mut PanelSums,
) {
    debug_assert_eq!(G * C * S::F::LANES, PANEL, "all columns");
    let step_bytes = S::WORDS * 4;
    let near_end = panel.steps.saturating_sub(AHEAD / step_bytes);
    let asks = !(!S::WEIGHTS.is_plain() && S::F::LANES == 16 && follows_groups());
    // Twice the bytes for the same arithmetic: more of them have to be under way.
    let far = R > 1 && S::WEIGHTS.is_plain() && !S::BF16;
    let mut w = panel.weights;
    let mut after = panel.next;
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[[S::F::splat(0.0); C]; R]; G];
        let mut x = [std::ptr::null(); R];
        for r in 0..R {
            x[r] = *panel.rows.add(r);
        }
        for step in 0..near_end {
            let ahead = w.cast::<u8>().wrapping_add(AHEAD);
            if far {
                prefetch::<FAR>(ahead, step_bytes / LINE);
            } else if asks {
                prefetch::<NEAR>(ahead, step_bytes / LINE);
            }
            add_groups::<S, R, C, G>(&mut acc, &x, step, w, 0);
            w = w.wrapping_add(S::WORDS);
        }
        for step in near_end..panel.steps {
            prefetch::<NEAR>(after, step_bytes / LINE);
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

/// [`Step::add`] for one group of columns after the other.
#[inline(always)]
unsafe fn add_groups<S: Step, const R: usize, const C: usize, const G: usize>(
    acc: &mut [[[<S::F as Floats>::V; C]; R]; G],
    x: &[*const u8; R],
    step: usize,
    w: *const u32,
    first: usize,
) {
    for g in 0..G {
        // SAFETY: the caller's promise.
        unsafe { S::add(&mut acc[g], x, step, w, first + g * C * S::F::LANES) };
    }
}

/// Into the first-level cache.
pub(super) const NEAR: i32 = 3;
/// Into the second-level cache.
pub(super) const FAR: i32 = 2;

/// Asks for so many cache lines from `from` on, which may be any address.
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
        line = line.wrapping_add(LINE);
    }
}
