//! Softmax attention of a block of query rows over the KV cache pages of one sequence and one KV head.

mod element;
mod int8;
mod score;
mod weighted_values;

use std::ops::Range;

use super::activation::exp;
use super::floats::Floats;
use crate::Dtype;
use crate::attention_shape::AttentionShape;
use crate::elements;
use crate::kv_cache::{CacheFormat, PAGE_POSITIONS};
use element::{Dequantised, Element};
use int8::dequantise_head;
use score::{score_page, softmax_weights};
use weighted_values::{Weights, add_weighted_values};

/// Largest number of query rows of a block. A page is widened once for all of them.
pub(crate) const BLOCK_ROWS: usize = 64;

/// Positions of a part. Each part of a sequence is summed separately, and parts are merged in ascending order, so that
/// threads can share a long context.
pub(crate) const PART_POSITIONS: usize = 32 * PAGE_POSITIONS;

/// Lanes in which the weights of a row are summed, whatever the vector width of the path.
const SUM_LANES: usize = 16;

/// Key elements of a tile of widened keys: 16 KB with all positions, which stay in the first-level cache.
const TILE_DIMS: usize = 128;

/// Vectors of value elements that are summed together.
const TILE_VECTORS: usize = 4;

/// Arguments of an attention kernel: query rows, the positions that they attend to, and their results.
pub(crate) struct AttentionBlock<'a> {
    pub(crate) shape: &'a AttentionShape,
    /// The sequence's KV cache pages of this layer.
    pub(crate) pages: &'a [&'a [u8]],
    /// Positions before the sequence's first row.
    pub(crate) past: usize,
    /// Number of the KV head.
    pub(crate) kv_head: usize,
    /// First query row of the KV head. Rows are numbered by token, then by query head.
    pub(crate) first: usize,
    /// Number of rows, 1 to [`BLOCK_ROWS`].
    pub(crate) count: usize,
    /// Queries of the sequence, `[tokens][query heads][key elements]`.
    pub(crate) query: &'a [u8],
    /// Attention sinks, one for each query head, if the model has them.
    pub(crate) sinks: Option<&'a [f32]>,
    /// Results of the sequence, `[tokens][query heads][value elements]`.
    pub(crate) output: *mut u8,
    pub(crate) step: AttentionStep,
    /// At least [`scratch_floats`] floats with any contents. Fastest if aligned to a cache line.
    pub(crate) scratch: &'a mut [f32],
}

/// Step of attention that a kernel computes for a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AttentionStep {
    /// Computes the results of the rows.
    Whole,
    /// Computes the states of the rows over the positions of one part: `states` is `[rows][state_stride]`.
    Part { part: usize, states: *mut f32 },
    /// Computes the results from the states of all visible parts: `states` is `[parts][rows][state_stride]`.
    Merge { states: *const f32 },
}

/// Floats of a state after the sums of values: sums of weights, the largest score, and padding.
const STATE_TAIL_FLOATS: usize = 3 * SUM_LANES;

/// Returns the floats of a row's state: sums of values, padded to whole vectors, and [`STATE_TAIL_FLOATS`].
///
/// If the values fill an even number of cache lines, a state has an odd number of them, so that the same element of all
/// states uses all sets of the cache.
pub(crate) fn state_stride(shape: &AttentionShape) -> usize {
    shape.value_dim.next_multiple_of(16) + STATE_TAIL_FLOATS
}

/// Returns the parts of the sequence that contain `positions`.
#[inline(always)]
pub(crate) fn parts_of(positions: &Range<usize>) -> Range<usize> {
    positions.start / PART_POSITIONS..positions.end.div_ceil(PART_POSITIONS)
}

/// Returns the floats between widened query rows: whole cache lines.
fn query_stride(shape: &AttentionShape) -> usize {
    shape.key_dim.next_multiple_of(16)
}

/// Returns the floats of scratch memory of a block of at most `rows` rows.
pub(crate) fn scratch_floats(shape: &AttentionShape, rows: usize) -> usize {
    let row = query_stride(shape) + 2 * state_stride(shape) + PAGE_POSITIONS;
    TILE_DIMS * PAGE_POSITIONS + dequantised_floats(shape) + rows * row
}

/// Returns the floats for a head's part of a page that is dequantised before use; 0 for other pages.
fn dequantised_floats(shape: &AttentionShape) -> usize {
    match shape.cache {
        CacheFormat::Plain => 0,
        CacheFormat::Int8 => shape.int8_head().elements(),
    }
}

/// Keys and values of one KV head in a page.
#[derive(Clone, Copy)]
struct PageHead<E> {
    /// `[key elements][positions]`.
    keys: *const E,
    /// `[positions][value elements]`; in a latent cache the same as `keys`.
    values: *const E,
}

impl<E> PageHead<E> {
    /// # Safety
    /// `page` is as long as the shape says.
    #[inline(always)]
    unsafe fn new(shape: &AttentionShape, page: &[u8], kv_head: usize) -> Self {
        let start = page.as_ptr().cast::<E>();
        let key_size = shape.key_dim * PAGE_POSITIONS;
        // SAFETY: `page` has the keys of all KV heads, as the caller guarantees.
        let keys = unsafe { start.add(kv_head * key_size) };
        if shape.latent {
            return Self { keys, values: keys };
        }
        let value_size = shape.value_dim * PAGE_POSITIONS;
        // SAFETY: the values of all KV heads follow the keys, as the caller guarantees.
        Self { keys, values: unsafe { start.add(shape.kv_heads * key_size + kv_head * value_size) } }
    }
}

/// Pointers into the scratch memory of a block.
struct BlockScratch {
    /// Widened query rows, `query_stride` apart.
    query: *mut f32,
    query_stride: usize,
    /// Widened keys or values.
    tile: *mut f32,
    /// Scores, then softmax weights: `[rows][positions of a page]`.
    scores: *mut f32,
    /// States of the rows over the positions so far, [`state_stride`] apart.
    states: *mut f32,
    state_stride: usize,
}

impl BlockScratch {
    /// Returns the state of row `row`, which begins with the sums of weighted values.
    #[inline(always)]
    fn value_sums(&self, row: usize) -> *mut f32 {
        self.states.wrapping_add(row * self.state_stride)
    }

    /// Returns the sums of the weights of row `row`, in [`SUM_LANES`] lanes.
    #[inline(always)]
    fn weight_sums(&self, row: usize) -> *mut f32 {
        self.value_sums(row).wrapping_add(self.state_stride - STATE_TAIL_FLOATS)
    }

    /// Returns the largest score of row `row` so far.
    #[inline(always)]
    fn largest_score(&self, row: usize) -> *mut f32 {
        self.weight_sums(row).wrapping_add(SUM_LANES)
    }
}

/// Computes a block. [`crate::attention`] defines the order of its sums.
///
/// # Safety
/// - The CPU has the features of `F`, and the thread is in its float mode.
/// - `pages` has every position that a row attends to (in the step's part, if it has one). Each page is as long as the
///   shape says.
/// - `query` and `output` have all rows, and `states` is as long as the step says.
/// - No other thread accesses the rows' outputs and states.
#[inline(always)]
pub(crate) unsafe fn attend<F: Floats>(block: &mut AttentionBlock<'_>) {
    let mut visible = [const { 0..0 }; BLOCK_ROWS];
    for r in 0..block.count {
        visible[r] = block.shape.visible(block.past, block.first + r);
    }
    // SAFETY: the function's own contract.
    unsafe {
        if let AttentionStep::Merge { states } = block.step {
            return merge_parts::<F>(block, &visible, states);
        }
        match (block.shape.cache, block.shape.dtype) {
            (CacheFormat::Int8, _) => attend_as::<F, Dequantised>(block, &visible),
            (CacheFormat::Plain, Dtype::F32) => attend_as::<F, f32>(block, &visible),
            (CacheFormat::Plain, Dtype::Bf16) => attend_as::<F, u16>(block, &visible),
        }
    }
}

/// Computes a block in the step [`Whole`](AttentionStep::Whole) or [`Part`](AttentionStep::Part), from pages with
/// elements `E`.
///
/// # Safety
/// As for [`attend`].
#[inline(always)]
unsafe fn attend_as<F: Floats, E: Element>(
    block: &mut AttentionBlock<'_>,
    visible: &[Range<usize>; BLOCK_ROWS],
) {
    let (shape, count) = (block.shape, block.count);
    let (query_stride, stride) = (query_stride(shape), state_stride(shape));
    let scratch = std::mem::take(&mut block.scratch);
    let block = &*block;
    let (tile, rest) = scratch.split_at_mut(TILE_DIMS * PAGE_POSITIONS);
    let (dequantised, rest) = rest.split_at_mut(dequantised_floats(shape));
    let (query, rest) = rest.split_at_mut(query_stride * count);
    let (scores, rest) = rest.split_at_mut(PAGE_POSITIONS * count);
    let (states, rest) = rest.split_at_mut(stride * count);
    let totals = &mut rest[..stride * count];
    for r in 0..count {
        let row = row_of(shape, block.kv_head, block.first + r);
        widen(shape.dtype, block.query, row * shape.key_dim, &mut query[r * query_stride..][..shape.key_dim]);
    }
    let (states, parts) = match block.step {
        AttentionStep::Part { part, states } => (states, part..part + 1),
        _ => (states.as_mut_ptr(), parts_of(&(visible[0].start..visible[count - 1].end))),
    };
    let scratch = BlockScratch {
        query: query.as_mut_ptr(),
        query_stride,
        tile: tile.as_mut_ptr(),
        scores: scores.as_mut_ptr(),
        states,
        state_stride: stride,
    };
    // SAFETY: the contract of `attend`. The scratch memory has room for `count` rows, and states are whole vectors.
    unsafe {
        let is_merged = parts.len() > 1;
        for part in parts {
            attend_part::<F, E>(block, visible, &scratch, part, dequantised);
            if is_merged {
                merge_rows::<F>(shape, visible, count, part, totals.as_mut_ptr(), scratch.states);
            }
        }
        if !matches!(block.step, AttentionStep::Part { .. }) {
            finish_rows::<F>(block, if is_merged { totals.as_mut_ptr() } else { scratch.states });
        }
    }
}

/// Computes the states of the rows over the visible positions of part `part`.
///
/// # Safety
/// As for [`attend`]; `scratch` has room for the block.
#[inline(always)]
unsafe fn attend_part<F: Floats, E: Element>(
    block: &AttentionBlock<'_>,
    visible: &[Range<usize>; BLOCK_ROWS],
    scratch: &BlockScratch,
    part: usize,
    dequantised: &mut [f32],
) {
    let (shape, count) = (block.shape, block.count);
    let positions = part * PART_POSITIONS..(part + 1) * PART_POSITIONS;
    // SAFETY: the contract of `attend`; the scratch memory has room for the block, as the caller guarantees.
    unsafe {
        for r in 0..count {
            std::slice::from_raw_parts_mut(scratch.value_sums(r), scratch.state_stride).fill(0.0);
            *scratch.largest_score(r) = f32::NEG_INFINITY;
            if let Some(sinks) = block.sinks
                && visible[r].start / PART_POSITIONS == part
            {
                let row = row_of(shape, block.kv_head, block.first + r);
                *scratch.largest_score(r) = sinks[row % shape.heads()];
                *scratch.weight_sums(r) = 1.0;
            }
        }
        let first = visible[0].start.max(positions.start) / PAGE_POSITIONS;
        let end = visible[count - 1].end.min(positions.end).div_ceil(PAGE_POSITIONS);
        let last = match block.step {
            AttentionStep::Part { .. } => end - 1,
            // This thread continues with the next part.
            _ => (visible[count - 1].end - 1) / PAGE_POSITIONS,
        };
        for page in first..end {
            let begin = page * PAGE_POSITIONS;
            // Later rows attend to later positions, so that the rows of a page are consecutive.
            let mut rows = 0..count;
            while rows.start < rows.end && visible[rows.start].end <= begin {
                rows.start += 1;
            }
            while rows.start < rows.end && visible[rows.end - 1].start >= begin + PAGE_POSITIONS {
                rows.end -= 1;
            }
            let next = block.pages[(page + 1).min(last)];
            // Keys and values of the page, and the memory to prefetch: first while keys are scored, then while values are summed.
            let (source, ahead) = match shape.cache {
                CacheFormat::Plain => {
                    let head_of = |page| PageHead::<E>::new(shape, page, block.kv_head);
                    let (source, next) = (head_of(block.pages[page]), head_of(next));
                    let first = if shape.latent { next.keys } else { source.values };
                    (source, [first.cast(), next.keys.cast()])
                }
                CacheFormat::Int8 => {
                    let head = shape.int8_head();
                    let part = head.part(block.pages[page], block.kv_head);
                    dequantise_head::<F>(head, part, dequantised);
                    let keys = dequantised.as_ptr().cast::<E>();
                    let values = if shape.latent { keys } else { keys.add(shape.key_dim * PAGE_POSITIONS) };
                    let next = head.part(next, block.kv_head).as_ptr();
                    (PageHead { keys, values }, [next, next.add(shape.key_dim * PAGE_POSITIONS)])
                }
            };
            let mut page_ranges = [(0, PAGE_POSITIONS); BLOCK_ROWS];
            for r in rows.clone() {
                let low = visible[r].start.saturating_sub(begin);
                page_ranges[r] = (low, (visible[r].end - begin).min(PAGE_POSITIONS));
            }
            score_page::<F, E>(shape, scratch, rows.clone(), source.keys, ahead[0]);
            let mut factors = [1.0; BLOCK_ROWS];
            for r in rows.clone() {
                factors[r] = match F::LANES {
                    16 => softmax_weights::<F, 2>(scratch, r, page_ranges[r], shape.scale as f32),
                    8 => softmax_weights::<F, 4>(scratch, r, page_ranges[r], shape.scale as f32),
                    _ => softmax_weights::<F, 8>(scratch, r, page_ranges[r], shape.scale as f32),
                };
            }
            let weights = Weights { scratch, rows, visible: &page_ranges, factors: &factors };
            add_weighted_values::<F, E>(shape, &weights, source.values, ahead[1]);
        }
    }
}

/// Merges the states of all visible parts and writes the rows' results.
///
/// # Safety
/// As for [`attend`].
#[inline(always)]
unsafe fn merge_parts<F: Floats>(
    block: &mut AttentionBlock<'_>,
    visible: &[Range<usize>; BLOCK_ROWS],
    states: *const f32,
) {
    let (shape, count) = (block.shape, block.count);
    let totals = block.scratch.as_mut_ptr();
    let parts = parts_of(&(visible[0].start..visible[count - 1].end));
    // SAFETY: `states` has the states of all parts, and the scratch memory has room for the block, as the caller
    // guarantees.
    unsafe {
        for (index, part) in parts.enumerate() {
            let states = states.add(index * count * state_stride(shape));
            merge_rows::<F>(shape, visible, count, part, totals, states);
        }
        finish_rows::<F>(block, totals);
    }
}

/// Merges the rows' states of part `part` into their totals, which begin with the first visible part of each row.
///
/// # Safety
/// The CPU has the features of `F`; `totals` and `states` have `count` states.
#[inline(always)]
unsafe fn merge_rows<F: Floats>(
    shape: &AttentionShape,
    visible: &[Range<usize>; BLOCK_ROWS],
    count: usize,
    part: usize,
    totals: *mut f32,
    states: *const f32,
) {
    let stride = state_stride(shape);
    for r in 0..count {
        let row_parts = parts_of(&visible[r]);
        // SAFETY: `totals` and `states` have `count` states, as the caller guarantees.
        unsafe {
            let (total, state) = (totals.add(r * stride), states.add(r * stride));
            if part == row_parts.start {
                total.copy_from_nonoverlapping(state, stride);
            } else if row_parts.contains(&part) {
                merge::<F>(stride, total, state);
            }
        }
    }
}

/// Merges a state into a total: `total = total e^(old largest - new) + state e^(largest - new)`, for the sums of values
/// and of weights, where `new` is the larger of the two largest scores.
///
/// # Safety
/// The CPU has the features of `F`; both states are `stride` floats long.
#[inline(always)]
unsafe fn merge<F: Floats>(stride: usize, total: *mut f32, state: *const f32) {
    // The largest score follows the sums of values and of weights.
    let sums = stride - STATE_TAIL_FLOATS + SUM_LANES;
    // SAFETY: both states are `stride` floats long, as the caller guarantees.
    unsafe {
        let (old, largest) = (*total.add(sums), *state.add(sums));
        let new = if largest > old { largest } else { old };
        let [total_factor, state_factor] = [old, largest].map(|score| exp::<F>(F::splat(score - new)));
        for index in (0..sums).step_by(F::LANES) {
            let scaled = F::mul(F::load(total.add(index)), total_factor);
            F::store(total.add(index), F::fma(F::load(state.add(index)), state_factor, scaled));
        }
        *total.add(sums) = new;
    }
}

/// Divides each row's sums of values by its sum of weights and writes the results.
///
/// # Safety
/// As for [`attend`]; `states` has the states of all rows.
#[inline(always)]
unsafe fn finish_rows<F: Floats>(block: &AttentionBlock<'_>, states: *mut f32) {
    let (shape, stride) = (block.shape, state_stride(block.shape));
    for r in 0..block.count {
        // SAFETY: `states` and `output` have all rows, as the caller guarantees.
        unsafe {
            let state = std::slice::from_raw_parts_mut(states.add(r * stride), stride);
            let (value_sums, tail) = state.split_at_mut(stride - STATE_TAIL_FLOATS);
            let element = row_of(shape, block.kv_head, block.first + r) * shape.value_dim;
            let to = block.output.add(element * shape.dtype.bytes());
            finish_row::<F>(shape, value_sums, sum_lanes(&mut tail[..SUM_LANES]), to);
        }
    }
}

/// Returns the index in `[tokens][query heads]` of query row `row` of a KV head.
#[inline(always)]
fn row_of(shape: &AttentionShape, kv_head: usize, row: usize) -> usize {
    let (token, head) = (row / shape.group, row % shape.group);
    (token * shape.kv_heads + kv_head) * shape.group + head
}

/// Widens `to.len()` elements, from element `first` on.
#[inline(always)]
fn widen(dtype: Dtype, from: &[u8], first: usize, to: &mut [f32]) {
    let bytes = dtype.bytes();
    let from = &from[first * bytes..][..to.len() * bytes];
    elements::widen(dtype, from, to);
}

/// Adds up the lanes of a row's sum, by adding the upper half to the lower one repeatedly. Neither weights nor their sums
/// are denormal.
#[inline(always)]
fn sum_lanes(sums: &mut [f32]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
    }
    sums[0]
}

/// Divides a row's sums of values by the sum of its weights, rounds them to the element type and writes them.
///
/// # Safety
/// The CPU has the features of `F`; `value_sums` are whole vectors, and `to` has room for a value.
#[inline(always)]
unsafe fn finish_row<F: Floats>(shape: &AttentionShape, value_sums: &[f32], sum: f32, to: *mut u8) {
    let mut elements = [0_u8; 64];
    let bytes = shape.dtype.bytes();
    // SAFETY: `value_sums` and `to` are long enough, as the caller guarantees; a vector is at most 64 bytes long.
    unsafe {
        for dim in (0..shape.value_dim).step_by(F::LANES) {
            let row = F::div(F::load(value_sums.as_ptr().add(dim)), F::splat(sum));
            match shape.dtype {
                Dtype::F32 => F::store(elements.as_mut_ptr().cast(), F::canonical(row)),
                Dtype::Bf16 => F::store_bf16(elements.as_mut_ptr().cast(), F::round_bf16(row)),
            }
            let count = F::LANES.min(shape.value_dim - dim);
            to.add(dim * bytes).copy_from_nonoverlapping(elements.as_ptr(), count * bytes);
        }
    }
}
