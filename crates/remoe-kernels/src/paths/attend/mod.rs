//! Softmax attention of a block of query rows over the pages of one sequence and one head of keys and values.

mod element;
mod int8;
mod mix;
mod score;

use std::ops::Range;

use super::activation::exp;
use super::floats::Floats;
use crate::Dtype;
use crate::attention_shape::AttentionShape;
use crate::elements;
use crate::kv_cache::{CacheFormat, PAGE_POSITIONS};
use element::{Element, Widened};
use int8::widen_head;
use mix::{Weights, mix_page};
use score::{score_page, weigh};

/// Most query rows of a block, for which each page is widened once.
pub(crate) const BLOCK_ROWS: usize = 64;

/// Positions of a part. A row's positions are summed part by part, and the parts merged in their order, so that threads can share a long context.
pub(crate) const PART_POSITIONS: usize = 32 * PAGE_POSITIONS;

/// Lanes in which the weights of a row are summed, independent of the path's own width.
const SUM_LANES: usize = 16;

/// Key elements that are widened together: 16 KB with all positions, so that they stay in the first-level cache.
const TILE_DIMS: usize = 128;

/// Vectors of value elements that are summed together.
const TILE_VECTORS: usize = 4;

/// Query rows, the positions that they see, and the place of their results.
pub(crate) struct Block<'a> {
    pub(crate) shape: &'a AttentionShape,
    /// The sequence's pages of this layer.
    pub(crate) pages: &'a [&'a [u8]],
    /// Positions before the sequence's first row.
    pub(crate) past: usize,
    /// Index of the head of keys and values.
    pub(crate) kv_head: usize,
    /// The first query row and how many there are, 1 to [`BLOCK_ROWS`]: the heads that share keys count up first, then the tokens.
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// The sequence's tokens x heads x key elements.
    pub(crate) query: &'a [u8],
    /// One for each query head, if there are any.
    pub(crate) sinks: Option<&'a [f32]>,
    /// The sequence's tokens x heads x value elements.
    pub(crate) output: *mut u8,
    pub(crate) step: Step,
    /// At least [`scratch_floats`], of any content; fastest if aligned to a cache line.
    pub(crate) scratch: &'a mut [f32],
}

/// Step of attention that a block takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Results of the rows.
    Whole,
    /// States of the rows over the positions of one part, at `states`: rows x [`state_stride`].
    Part { part: usize, states: *mut f32 },
    /// Results from the states of all parts that the rows see: parts x rows x [`state_stride`].
    Merge { states: *const f32 },
}

/// Floats of a state behind the values: sums of weights, the largest score, and up to two cache lines.
const STATE_BESIDE: usize = 3 * SUM_LANES;

/// Floats of a row's state: unfinished values, whole vectors of them, and what is beside. With values of whole pairs of cache lines it is an odd number of lines, so that a column of states falls into all sets of the cache.
pub(crate) fn state_stride(shape: &AttentionShape) -> usize {
    shape.value_dim.next_multiple_of(16) + STATE_BESIDE
}

/// Parts in which `positions` lie.
#[inline(always)]
pub(crate) fn parts_of(positions: &Range<usize>) -> Range<usize> {
    positions.start / PART_POSITIONS..positions.end.div_ceil(PART_POSITIONS)
}

/// The distance of two widened query rows: whole cache lines.
fn query_stride(shape: &AttentionShape) -> usize {
    shape.key_dim.next_multiple_of(16)
}

/// Scratch memory of a block of at most `rows` rows.
pub(crate) fn scratch_floats(shape: &AttentionShape, rows: usize) -> usize {
    let row = query_stride(shape) + 2 * state_stride(shape) + PAGE_POSITIONS;
    TILE_DIMS * PAGE_POSITIONS + widened_floats(shape) + rows * row
}

/// Floats of a head's part of a page that is widened before it is used.
fn widened_floats(shape: &AttentionShape) -> usize {
    match shape.cache {
        CacheFormat::Plain => 0,
        CacheFormat::Int8 => shape.int8_head().floats(),
    }
}

/// One head's part of a page.
#[derive(Clone, Copy)]
struct PageHead<E> {
    /// Key elements x positions.
    keys: *const E,
    /// Positions x value elements; in a latent cache the keys.
    values: *const E,
}

impl<E> PageHead<E> {
    /// # Safety
    /// `page` is as long as the shape says.
    #[inline(always)]
    unsafe fn new(shape: &AttentionShape, page: &[u8], kv_head: usize) -> Self {
        let start = page.as_ptr().cast::<E>();
        let key_size = shape.key_dim * PAGE_POSITIONS;
        // SAFETY: the caller's promise.
        let keys = unsafe { start.add(kv_head * key_size) };
        if shape.latent {
            return Self { keys, values: keys };
        }
        let value_size = shape.value_dim * PAGE_POSITIONS;
        // SAFETY: the caller's promise.
        Self { keys, values: unsafe { start.add(shape.kv_heads * key_size + kv_head * value_size) } }
    }
}

/// Pointers into the scratch memory of a block.
struct BlockScratch {
    /// Widened rows.
    query: *mut f32,
    query_stride: usize,
    /// Widened keys or values.
    tile: *mut f32,
    /// Rows x positions of a page.
    scores: *mut f32,
    /// States of the rows over the positions so far ([`state_stride`]).
    states: *mut f32,
    /// Distance of two states.
    stride: usize,
}

impl BlockScratch {
    /// Unfinished values of row `row`.
    #[inline(always)]
    fn mixed(&self, row: usize) -> *mut f32 {
        self.states.wrapping_add(row * self.stride)
    }

    /// Sums of the weights of row `row`.
    #[inline(always)]
    fn sums(&self, row: usize) -> *mut f32 {
        self.mixed(row).wrapping_add(self.stride - STATE_BESIDE)
    }

    /// Largest score of row `row`.
    #[inline(always)]
    fn largest(&self, row: usize) -> *mut f32 {
        self.sums(row).wrapping_add(SUM_LANES)
    }
}

/// Computes a block, see [`crate::attention`] for the order of its sums.
///
/// # Safety
/// The CPU has the features of `F` and the thread is in its float mode. `pages` hold every position that a row sees (in the part of the step, if it has one), each as long as the shape says, `query` and `output` hold all rows, states are those of the step, and no other thread touches the rows' outputs and states.
#[inline(always)]
pub(crate) unsafe fn attend<F: Floats>(block: &mut Block<'_>) {
    let mut seen = [const { 0..0 }; BLOCK_ROWS];
    for r in 0..block.count {
        seen[r] = block.shape.seen(block.past, block.first + r);
    }
    // SAFETY: the caller's promise.
    unsafe {
        if let Step::Merge { states } = block.step {
            return merge_parts::<F>(block, &seen, states);
        }
        match (block.shape.cache, block.shape.dtype) {
            (CacheFormat::Int8, _) => attend_as::<F, Widened>(block, &seen),
            (CacheFormat::Plain, Dtype::F32) => attend_as::<F, f32>(block, &seen),
            (CacheFormat::Plain, Dtype::Bf16) => attend_as::<F, u16>(block, &seen),
        }
    }
}

#[inline(always)]
unsafe fn attend_as<F: Floats, E: Element>(block: &mut Block<'_>, seen: &[Range<usize>; BLOCK_ROWS]) {
    let (shape, count) = (block.shape, block.count);
    let (query_stride, stride) = (query_stride(shape), state_stride(shape));
    let scratch = std::mem::take(&mut block.scratch);
    let block = &*block;
    let (tile, rest) = scratch.split_at_mut(TILE_DIMS * PAGE_POSITIONS);
    let (wide, rest) = rest.split_at_mut(widened_floats(shape));
    let (query, rest) = rest.split_at_mut(query_stride * count);
    let (scores, rest) = rest.split_at_mut(PAGE_POSITIONS * count);
    let (states, rest) = rest.split_at_mut(stride * count);
    let totals = &mut rest[..stride * count];
    for r in 0..count {
        let row = row_of(shape, block.kv_head, block.first + r);
        widen(shape.dtype, block.query, row * shape.key_dim, &mut query[r * query_stride..][..shape.key_dim]);
    }
    let (states, of_step) = match block.step {
        Step::Part { part, states } => (states, part..part + 1),
        _ => (states.as_mut_ptr(), parts_of(&(seen[0].start..seen[count - 1].end))),
    };
    let parts = BlockScratch {
        query: query.as_mut_ptr(),
        query_stride,
        tile: tile.as_mut_ptr(),
        scores: scores.as_mut_ptr(),
        states,
        stride,
    };
    // SAFETY: the caller's promise; the parts of the scratch memory have room for `count` rows, and unfinished rows are whole vectors.
    unsafe {
        let is_merged = of_step.len() > 1;
        for part in of_step {
            attend_part::<F, E>(block, seen, &parts, part, wide);
            if is_merged {
                merge_rows::<F>(shape, seen, count, part, totals.as_mut_ptr(), parts.states);
            }
        }
        if !matches!(block.step, Step::Part { .. }) {
            finish_rows::<F>(block, if is_merged { totals.as_mut_ptr() } else { parts.states });
        }
    }
}

/// Computes the states of the rows over the positions of part `part` that they see.
#[inline(always)]
unsafe fn attend_part<F: Floats, E: Element>(
    block: &Block<'_>,
    seen: &[Range<usize>; BLOCK_ROWS],
    parts: &BlockScratch,
    part: usize,
    wide: &mut [f32],
) {
    let (shape, count) = (block.shape, block.count);
    let positions = part * PART_POSITIONS..(part + 1) * PART_POSITIONS;
    // SAFETY: the caller's promise.
    unsafe {
        for r in 0..count {
            std::slice::from_raw_parts_mut(parts.mixed(r), parts.stride).fill(0.0);
            *parts.largest(r) = f32::NEG_INFINITY;
            if let Some(sinks) = block.sinks
                && seen[r].start / PART_POSITIONS == part
            {
                let row = row_of(shape, block.kv_head, block.first + r);
                *parts.largest(r) = sinks[row % shape.heads()];
                *parts.sums(r) = 1.0;
            }
        }
        let first = seen[0].start.max(positions.start) / PAGE_POSITIONS;
        let end = seen[count - 1].end.min(positions.end).div_ceil(PAGE_POSITIONS);
        let last = match block.step {
            Step::Part { .. } => end - 1,
            // The next part follows.
            _ => (seen[count - 1].end - 1) / PAGE_POSITIONS,
        };
        for page in first..end {
            let begin = page * PAGE_POSITIONS;
            // Rows see the later positions the later they are: those of a page lie together.
            let mut rows = 0..count;
            while rows.start < rows.end && seen[rows.start].end <= begin {
                rows.start += 1;
            }
            while rows.start < rows.end && seen[rows.end - 1].start >= begin + PAGE_POSITIONS {
                rows.end -= 1;
            }
            let next = block.pages[(page + 1).min(last)];
            // Memory to prefetch while keys are scored and while values are summed.
            let (source, asked) = match shape.cache {
                CacheFormat::Plain => {
                    let of = |page| PageHead::<E>::new(shape, page, block.kv_head);
                    let (source, next) = (of(block.pages[page]), of(next));
                    let first = if shape.latent { next.keys } else { source.values };
                    (source, [first.cast(), next.keys.cast()])
                }
                CacheFormat::Int8 => {
                    let head = shape.int8_head();
                    widen_head::<F>(head, head.part(block.pages[page], block.kv_head), wide);
                    let keys = wide.as_ptr().cast::<E>();
                    let values = if shape.latent { keys } else { keys.add(shape.key_dim * PAGE_POSITIONS) };
                    let next = head.part(next, block.kv_head).as_ptr();
                    (PageHead { keys, values }, [next, next.add(shape.key_dim * PAGE_POSITIONS)])
                }
            };
            let mut visible = [(0, PAGE_POSITIONS); BLOCK_ROWS];
            for r in rows.clone() {
                let low = seen[r].start.saturating_sub(begin);
                visible[r] = (low, (seen[r].end - begin).min(PAGE_POSITIONS));
            }
            score_page::<F, E>(shape, parts, rows.clone(), source.keys, asked[0]);
            let mut factors = [1.0; BLOCK_ROWS];
            for r in rows.clone() {
                factors[r] = match F::LANES {
                    16 => weigh::<F, 2>(parts, r, visible[r], shape.scale as f32),
                    8 => weigh::<F, 4>(parts, r, visible[r], shape.scale as f32),
                    _ => weigh::<F, 8>(parts, r, visible[r], shape.scale as f32),
                };
            }
            let weights = Weights { parts, rows, visible: &visible, factors: &factors };
            mix_page::<F, E>(shape, &weights, source.values, asked[1]);
        }
    }
}

/// Merges the states of all parts, of each `count` rows, and computes the rows' results.
#[inline(always)]
unsafe fn merge_parts<F: Floats>(
    block: &mut Block<'_>,
    seen: &[Range<usize>; BLOCK_ROWS],
    states: *const f32,
) {
    let (shape, count) = (block.shape, block.count);
    let totals = block.scratch.as_mut_ptr();
    let all = parts_of(&(seen[0].start..seen[count - 1].end));
    // SAFETY: the caller's promise.
    unsafe {
        for (at, part) in all.enumerate() {
            let states = states.add(at * count * state_stride(shape));
            merge_rows::<F>(shape, seen, count, part, totals, states);
        }
        finish_rows::<F>(block, totals);
    }
}

/// Merges the states of part `part` into the rows' totals, which begin with the first part that a row sees.
#[inline(always)]
unsafe fn merge_rows<F: Floats>(
    shape: &AttentionShape,
    seen: &[Range<usize>; BLOCK_ROWS],
    count: usize,
    part: usize,
    totals: *mut f32,
    states: *const f32,
) {
    let stride = state_stride(shape);
    for r in 0..count {
        let of_row = parts_of(&seen[r]);
        // SAFETY: the caller's promise.
        unsafe {
            let (total, state) = (totals.add(r * stride), states.add(r * stride));
            if part == of_row.start {
                total.copy_from_nonoverlapping(state, stride);
            } else if of_row.contains(&part) {
                merge::<F>(stride, total, state);
            }
        }
    }
}

/// `total = total e^(old - new) + state e^(its own - new)`, values and sums of weights alike.
#[inline(always)]
unsafe fn merge<F: Floats>(stride: usize, total: *mut f32, state: *const f32) {
    let sums = stride - STATE_BESIDE + SUM_LANES;
    // SAFETY: the caller's promise; the largest score is behind the sums.
    unsafe {
        let (old, own) = (*total.add(sums), *state.add(sums));
        let new = if own > old { own } else { old };
        let [before, factor] = [old, own].map(|largest| exp::<F>(F::splat(largest - new)));
        for at in (0..sums).step_by(F::LANES) {
            let scaled = F::mul(F::load(total.add(at)), before);
            F::store(total.add(at), F::fma(F::load(state.add(at)), factor, scaled));
        }
        *total.add(sums) = new;
    }
}

/// Divides each row's values by its sum and writes them.
#[inline(always)]
unsafe fn finish_rows<F: Floats>(block: &Block<'_>, states: *mut f32) {
    let (shape, stride) = (block.shape, state_stride(block.shape));
    for r in 0..block.count {
        // SAFETY: the caller's promise.
        unsafe {
            let state = std::slice::from_raw_parts_mut(states.add(r * stride), stride);
            let (mixed, beside) = state.split_at_mut(stride - STATE_BESIDE);
            let at = row_of(shape, block.kv_head, block.first + r) * shape.value_dim;
            let to = block.output.add(at * shape.dtype.bytes());
            finish::<F>(shape, mixed, total(&mut beside[..SUM_LANES]), to);
        }
    }
}

/// The row among tokens x heads of query row `row` of a head of keys.
#[inline(always)]
fn row_of(shape: &AttentionShape, kv_head: usize, row: usize) -> usize {
    let (token, head) = (row / shape.group, row % shape.group);
    (token * shape.kv_heads + kv_head) * shape.group + head
}

/// Reads `to.len()` elements, from element `at` on.
#[inline(always)]
fn widen(dtype: Dtype, from: &[u8], at: usize, to: &mut [f32]) {
    let bytes = dtype.bytes();
    let from = &from[at * bytes..][..to.len() * bytes];
    elements::widen(dtype, from, to);
}

/// The sum of a row's lanes, halves added to halves. Weights are no denormals, nor are their sums.
#[inline(always)]
fn total(sums: &mut [f32]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
    }
    sums[0]
}

/// Divides by the sum of the weights and writes a row.
#[inline(always)]
unsafe fn finish<F: Floats>(shape: &AttentionShape, mixed: &[f32], sum: f32, to: *mut u8) {
    let mut elements = [0_u8; 64];
    let bytes = shape.dtype.bytes();
    // SAFETY: the caller's promise; a vector has at most 16 elements of 4 bytes.
    unsafe {
        for dim in (0..shape.value_dim).step_by(F::LANES) {
            let row = F::div(F::load(mixed.as_ptr().add(dim)), F::splat(sum));
            match shape.dtype {
                Dtype::F32 => F::store(elements.as_mut_ptr().cast(), F::canonical(row)),
                Dtype::Bf16 => F::store_bf16(elements.as_mut_ptr().cast(), F::round_bf16(row)),
            }
            let count = F::LANES.min(shape.value_dim - dim);
            to.add(dim * bytes).copy_from_nonoverlapping(elements.as_ptr(), count * bytes);
        }
    }
}
