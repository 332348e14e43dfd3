//! One panel of 64 output columns for all rows of a job: what a thread takes at a time.
//!
//! A panel is walked once per block of at most six rows, with all accumulators of the block in registers and K strictly ascending. While the first block streams the panel from memory it prefetches a fixed distance ahead, unless the processor does so by itself ([`super::streams`]), and where the panel ends it goes on in the panel that follows. With more than one block the
//! panel stays in the second-level cache, and the later blocks fetch the following panel bit by bit. Where bfloat16 has to be widened, more than one block goes by way of [`super::widened`].

use super::activation::{activate, factor};
use super::floats::Floats;
use super::steps::Step;
use super::streams::follows_groups;
use super::widened;
use crate::plan::Phase;
use crate::quantise::RowGroup;
use crate::shape::{HALF, PANEL};
use crate::{Activation, Dtype, WeightFormat};

/// Most rows of a block.
pub(super) const ROWS: usize = 6;
/// How far ahead of use weights are asked for, in bytes.
const AHEAD: usize = 8192;
pub(super) const LINE: usize = 64;
/// Two panels above this do not stay in a second-level cache of 1 MB, so that fetching the next early would evict the present one.
const EARLY: usize = 400 << 10;

/// The work on one panel. Pointers have no alignment, except for the weights' 64 bytes.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    /// The packed panel: `steps * Step::WORDS` words.
    pub(crate) weights: *const u32,
    /// Steps of K: pairs, or groups where weights are quantised.
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
    /// What becomes of the sums, for kernels that serve both phases and both types.
    pub(crate) phase: Phase,
    pub(crate) dtype: Dtype,
    pub(crate) activation: Activation,
    /// Whether the first phase has columns of a gate before those of the up projection.
    pub(crate) gated: bool,
    /// What is added to the sums: an element for each of the panel's [`PANEL`] columns, or null.
    pub(crate) biases: *const f32,
    /// The panel that this thread will probably take next; only prefetched.
    pub(crate) next: *const u8,
}

/// Sums of a row over all columns of a panel.
pub(super) type Sums = [f32; PANEL];

/// Sums of a block of rows.
#[repr(align(64))]
struct Block([Sums; ROWS]);

/// What becomes of the sums of some rows.
pub(super) trait Finish {
    /// Writes the results of the rows from `first` on, whose sums these are.
    ///
    /// # Safety
    /// As for the kernels; `first + sums.len()` is at most the panel's `row_count`.
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[Sums], first: usize);
}

struct GateUp;
struct Down;
struct Either;

/// Gate, up, activation and product for [`HALF`] intermediate columns, or up and activation for [`PANEL`] where there is no gate. `out` has room for as many elements in every row, or for [`RowGroup`]s of as many where weights are quantised; those beyond `columns` become zero.
///
/// # Safety
/// The CPU has the features of `S`, denormals are flushed, the panel's pointers are valid, and no other thread touches its part of the output.
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

/// What the panel's phase and type call for. One kernel for all of them is compiled in a fraction of the time.
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
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[Sums], first: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match (panel.phase, panel.dtype) {
                (Phase::GateUp, Dtype::F32) => GateUp::finish::<S>(panel, sums, first),
                (Phase::GateUp, Dtype::Bf16) => GateUp::finish::<S::InBf16>(panel, sums, first),
                (Phase::Down, Dtype::F32) => Down::finish::<S>(panel, sums, first),
                (Phase::Down, Dtype::Bf16) => Down::finish::<S::InBf16>(panel, sums, first),
            }
        }
    }
}

impl Finish for GateUp {
    #[inline(always)]
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[Sums], first: usize) {
        let size = S::ELEMENT;
        let columns = if panel.gated { HALF } else { PANEL };
        for (r, sums) in sums.iter().enumerate() {
            for half in (0..columns).step_by(HALF) {
                // What becomes a group of integers.
                let mut group = [0.0; HALF];
                // Columns of it that exist.
                let there = panel.columns.saturating_sub(half).min(HALF);
                // SAFETY: the caller's promise: every row of `out` has room for `columns` elements, or for groups of as many.
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
                    // The padded columns are sums of x * 0, which is NaN where x is not finite; the down projection must see zero.
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
unsafe fn inner_sum<S: Step>(panel: &Panel, sums: &Sums, column: usize) -> <S::F as Floats>::V {
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

/// What the activation makes of sums, rounded to the element type.
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
    unsafe fn finish<S: Step>(panel: &Panel, sums: &[Sums], first: usize) {
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

/// By blocks of packed weights, or of weights that are widened for all blocks together.
#[inline(always)]
unsafe fn for_rows<S: Step, E: Finish>(panel: &Panel) {
    // SAFETY: the caller's promise.
    unsafe {
        if S::WIDENS && panel.row_count > ROWS {
            widened::for_groups::<S, E>(panel);
        } else {
            for_blocks::<S, E>(panel);
        }
    }
}

/// Splits the rows into blocks as even as possible, sums each and finishes it.
#[inline(always)]
unsafe fn for_blocks<S: Step, E: Finish>(panel: &Panel) {
    let mut sums = Block([[0.0; PANEL]; ROWS]);
    let blocks = panel.row_count.div_ceil(ROWS);
    let panel_bytes = panel.steps * S::WORDS * 4;
    let chunks = blocks.saturating_sub(1) * panel.steps.div_ceil(S::CHUNK);
    let lines_per_chunk =
        if chunks > 0 && panel_bytes <= EARLY { (panel_bytes / LINE).div_ceil(chunks) } else { 0 };
    let mut early = panel.next;
    let mut first = 0;
    for block in 0..blocks {
        let count = (panel.row_count - first).div_ceil(blocks - block);
        let fetch = if block == 0 {
            Fetch::Stream { after: if blocks == 1 { panel.next } else { panel.weights.cast() } }
        } else {
            Fetch::Early { from: early, lines_per_chunk }
        };
        // SAFETY: `count <= ROWS`, `first + count <= row_count`, and the caller's promise.
        unsafe {
            let rows = panel.rows.add(first);
            match count {
                1 => sum_block::<S, 1>(panel, rows, fetch, &mut sums),
                2 => sum_block::<S, 2>(panel, rows, fetch, &mut sums),
                3 => sum_block::<S, 3>(panel, rows, fetch, &mut sums),
                4 => sum_block::<S, 4>(panel, rows, fetch, &mut sums),
                5 => sum_block::<S, 5>(panel, rows, fetch, &mut sums),
                _ => sum_block::<S, 6>(panel, rows, fetch, &mut sums),
            }
            E::finish::<S>(panel, sums.0.get_unchecked(..count), first);
        }
        if block > 0 {
            early = early.wrapping_add(lines_per_chunk * LINE * panel.steps.div_ceil(S::CHUNK));
        }
        first += count;
    }
}

/// What a block prefetches.
#[derive(Clone, Copy)]
enum Fetch {
    /// Its own panel, [`AHEAD`] bytes ahead, and at its end the beginning of `after`.
    Stream { after: *const u8 },
    /// Some lines of the following panel every [`Step::CHUNK`] steps.
    Early { from: *const u8, lines_per_chunk: usize },
}

/// Sums `R` rows over the whole panel. Narrow vectors take fewer columns at a time, so that accumulators fit the sixteen registers there are.
#[inline(always)]
unsafe fn sum_block<S: Step, const R: usize>(
    panel: &Panel,
    rows: *const *const u8,
    fetch: Fetch,
    sums: &mut Block,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = [std::ptr::null(); R];
        for r in 0..R {
            x[r] = *rows.add(r);
        }
        // Integers have sums of their own beside the accumulators, fp8 has scales.
        let crowded = S::WEIGHTS != WeightFormat::Plain;
        if S::F::LANES == 16 {
            if crowded && R > 3 {
                sum_columns::<S, R, 2, 1>(panel, &x, fetch, sums);
            } else {
                sum_columns::<S, R, 4, 1>(panel, &x, fetch, sums);
            }
        } else if crowded {
            if R == 1 {
                sum_columns::<S, R, 4, 2>(panel, &x, fetch, sums);
            } else if R == 2 {
                sum_columns::<S, R, 2, 1>(panel, &x, fetch, sums);
            } else {
                sum_columns::<S, R, 1, 1>(panel, &x, fetch, sums);
            }
        } else if R == 1 {
            sum_columns::<S, R, 8, 1>(panel, &x, fetch, sums);
        } else if R == 2 {
            sum_columns::<S, R, 4, 1>(panel, &x, fetch, sums);
        } else {
            sum_columns::<S, R, 2, 1>(panel, &x, fetch, sums);
        }
    }
}

/// By `G` times `C` vectors of columns at a time. With more than one group of them a step's weights are all used when they come from memory, so that it is read all the time and not
/// during the first pass alone.
#[inline(always)]
unsafe fn sum_columns<S: Step, const R: usize, const C: usize, const G: usize>(
    panel: &Panel,
    x: &[*const u8; R],
    fetch: Fetch,
    sums: &mut Block,
) {
    let step_bytes = S::WORDS * 4;
    let is_grouped = S::WEIGHTS != WeightFormat::Plain;
    for first in (0..PANEL).step_by(G * C * S::F::LANES) {
        // SAFETY: the caller's promise; `first + G * C * LANES <= PANEL`, and `G * C * LANES` divides it.
        unsafe {
            let mut acc = [[[S::F::splat(0.0); C]; R]; G];
            let mut w = panel.weights;
            match fetch {
                // Columns after the first group find the panel in the cache.
                Fetch::Stream { after } if first == 0 => {
                    let near_end = panel.steps.saturating_sub(AHEAD / step_bytes);
                    let asks = !(R == 1 && is_grouped && S::F::LANES == 16 && follows_groups());
                    for step in 0..near_end {
                        if asks {
                            prefetch(w.cast::<u8>().wrapping_add(AHEAD), step_bytes / LINE);
                        }
                        add_groups::<S, R, C, G>(&mut acc, x, step, w, first);
                        w = w.wrapping_add(S::WORDS);
                    }
                    let mut after = after;
                    for step in near_end..panel.steps {
                        prefetch(after, step_bytes / LINE);
                        add_groups::<S, R, C, G>(&mut acc, x, step, w, first);
                        after = after.wrapping_add(step_bytes);
                        w = w.wrapping_add(S::WORDS);
                    }
                }
                Fetch::Early { from, lines_per_chunk } if first == 0 => {
                    let mut from = from;
                    for chunk in (0..panel.steps).step_by(S::CHUNK) {
                        prefetch(from, lines_per_chunk);
                        from = from.wrapping_add(lines_per_chunk * LINE);
                        for step in chunk..panel.steps.min(chunk + S::CHUNK) {
                            add_groups::<S, R, C, G>(&mut acc, x, step, w, first);
                            w = w.wrapping_add(S::WORDS);
                        }
                    }
                }
                _ => {
                    for step in 0..panel.steps {
                        add_groups::<S, R, C, G>(&mut acc, x, step, w, first);
                        w = w.wrapping_add(S::WORDS);
                    }
                }
            }
            for g in 0..G {
                for r in 0..R {
                    for c in 0..C {
                        let column = first + (g * C + c) * S::F::LANES;
                        S::F::store(sums.0[r].as_mut_ptr().add(column), acc[g][r][c]);
                    }
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

/// Asks for so many cache lines from `from` on, which may be any address.
#[inline(always)]
pub(super) fn prefetch(from: *const u8, lines: usize) {
    let mut line = from;
    for _ in 0..lines {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: every x86-64 processor has the instruction, and it never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
        }
        line = line.wrapping_add(LINE);
    }
}
