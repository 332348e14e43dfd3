//! Softmax attention of a block of query rows over the pages of one sequence and one head of keys and values.

use super::floats::Floats;
use crate::Dtype;
use crate::attention::{AttentionShape, PAGE_POSITIONS};

/// Query rows of a block: what a page is widened for.
pub(crate) const BLOCK_ROWS: usize = 16;

/// Lanes in which the weights of a row are summed, whatever the path's own width is.
const SUM_LANES: usize = 16;

/// Some query rows, what they see and where their results go.
pub(crate) struct Block<'a> {
    pub(crate) shape: &'a AttentionShape,
    /// The sequence's pages of this layer.
    pub(crate) pages: &'a [&'a [u8]],
    /// Positions before the sequence's first row.
    pub(crate) past: usize,
    /// Which head of keys and values.
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
    /// At least [`scratch_floats`], of any content.
    pub(crate) scratch: &'a mut [f32],
}

/// The distance of two rows of widened values: whole vectors, and a cache line more, so that a column of them does not fall into one set of the cache.
fn value_stride(shape: &AttentionShape) -> usize {
    shape.value_dim.next_multiple_of(16) + 16
}

fn key_rows(shape: &AttentionShape) -> usize {
    shape.key_dim.next_multiple_of(2)
}

/// Scratch memory of a block.
pub(crate) fn scratch_floats(shape: &AttentionShape) -> usize {
    let values = value_stride(shape);
    key_rows(shape) * (PAGE_POSITIONS + BLOCK_ROWS)
        + values * (PAGE_POSITIONS + BLOCK_ROWS)
        + BLOCK_ROWS * (PAGE_POSITIONS + SUM_LANES + 1)
}

/// Computes a block, see [`crate::attention`] for the order of its sums.
///
/// # Safety
/// The CPU has the features of `F` and the thread is in its float mode. `pages` hold every position that a row sees, each as long as the shape says, `query` and `output` hold all rows, and nobody else touches the rows' outputs.
#[inline(always)]
pub(crate) unsafe fn attend<F: Floats>(block: &mut Block<'_>) {
    let shape = block.shape;
    let (key_rows, stride) = (key_rows(shape), value_stride(shape));
    let (keys, rest) = block.scratch.split_at_mut(key_rows * PAGE_POSITIONS);
    let (values, rest) = rest.split_at_mut(stride * PAGE_POSITIONS);
    let (query, rest) = rest.split_at_mut(key_rows * BLOCK_ROWS);
    let (mixed, rest) = rest.split_at_mut(stride * BLOCK_ROWS);
    let (scores, rest) = rest.split_at_mut(BLOCK_ROWS * PAGE_POSITIONS);
    let (sums, largest) = rest.split_at_mut(BLOCK_ROWS * SUM_LANES);
    // SAFETY: the caller's promise; the parts of the scratch memory have room for BLOCK_ROWS rows, and rows are padded to whole vectors.
    unsafe {
        for r in 0..block.count {
            let at = row_of(shape, block.kv_head, block.first + r) * shape.key_dim;
            widen(shape.dtype, block.query, at, &mut query[r * key_rows..][..shape.key_dim]);
            query[r * key_rows + shape.key_dim..(r + 1) * key_rows].fill(0.0);
        }
        keys[shape.key_dim * PAGE_POSITIONS..].fill(0.0);
        mixed.fill(0.0);
        sums.fill(0.0);
        largest.fill(f32::NEG_INFINITY);
        if let Some(sinks) = block.sinks {
            for r in 0..block.count {
                let (head, last) = (row_of(shape, block.kv_head, block.first + r), shape.heads());
                largest[r] = sinks[head % last];
                sums[r * SUM_LANES] = 1.0;
            }
        }
        let first = shape.seen(block.past, block.first).start / PAGE_POSITIONS;
        let end = shape.seen(block.past, block.first + block.count - 1).end.div_ceil(PAGE_POSITIONS);
        for page in first..end {
            let begin = page * PAGE_POSITIONS;
            // Rows see the later positions the later they are: those of a page lie together.
            let mut rows = 0..block.count;
            while rows.start < rows.end && shape.seen(block.past, block.first + rows.start).end <= begin {
                rows.start += 1;
            }
            while rows.start < rows.end
                && shape.seen(block.past, block.first + rows.end - 1).start >= begin + PAGE_POSITIONS
            {
                rows.end -= 1;
            }
            load_page(shape, block.pages[page], block.kv_head, keys, values, stride);
            let mut r = rows.start;
            while r < rows.end {
                let (query, to) = (query[r * key_rows..].as_ptr(), scores[r * PAGE_POSITIONS..].as_mut_ptr());
                r += score::<F>(query, key_rows, rows.end - r, keys.as_ptr(), to);
            }
            for r in rows {
                let seen = shape.seen(block.past, block.first + r);
                let low = seen.start.saturating_sub(begin);
                let high = (seen.end - begin).min(PAGE_POSITIONS);
                let scores = &mut scores[r * PAGE_POSITIONS..][..PAGE_POSITIONS];
                let sums = &mut sums[r * SUM_LANES..][..SUM_LANES];
                let factor = weigh::<F>(scores, low, high, shape.scale as f32, &mut largest[r], sums);
                let mixed = &mut mixed[r * stride..][..stride - 16];
                mix::<F>(&scores[low..high], values.as_ptr().add(low * stride), stride, factor, mixed);
            }
        }
        for r in 0..block.count {
            let at = row_of(shape, block.kv_head, block.first + r) * shape.value_dim;
            let to = block.output.add(at * shape.dtype.bytes());
            let sum = total(&mut sums[r * SUM_LANES..][..SUM_LANES]);
            finish::<F>(shape, &mixed[r * stride..], sum, to);
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
    match dtype {
        Dtype::F32 => {
            for (to, from) in to.iter_mut().zip(from.as_chunks().0) {
                *to = f32::from_le_bytes(*from);
            }
        }
        Dtype::Bf16 => {
            for (to, from) in to.iter_mut().zip(from.as_chunks().0) {
                *to = f32::from_bits(u32::from(u16::from_le_bytes(*from)) << 16);
            }
        }
    }
}

/// Widens one head's keys to dim x positions and its values to positions x `stride`.
#[inline(always)]
fn load_page(
    shape: &AttentionShape,
    page: &[u8],
    kv_head: usize,
    keys: &mut [f32],
    values: &mut [f32],
    stride: usize,
) {
    let (key_size, value_size) = (shape.key_dim * PAGE_POSITIONS, shape.stored_values() * PAGE_POSITIONS);
    widen(shape.dtype, page, kv_head * key_size, &mut keys[..key_size]);
    if shape.latent {
        // In tiles, so that what is read and what is written stay in the first cache.
        for tile in (0..shape.value_dim).step_by(16) {
            let dims = tile..(tile + 16).min(shape.value_dim);
            for position in 0..PAGE_POSITIONS {
                for dim in dims.clone() {
                    values[position * stride + dim] = keys[dim * PAGE_POSITIONS + position];
                }
            }
        }
    } else {
        let first = shape.kv_heads * key_size + kv_head * value_size;
        for (position, row) in values.chunks_exact_mut(stride).enumerate() {
            widen(shape.dtype, page, first + position * shape.value_dim, &mut row[..shape.value_dim]);
        }
    }
    for row in values.chunks_exact_mut(stride) {
        row[shape.value_dim..].fill(0.0);
    }
}

/// Products of up to `rows` query rows with the keys of a page; how many rows it took.
#[inline(always)]
unsafe fn score<F: Floats>(
    query: *const f32,
    dims: usize,
    rows: usize,
    keys: *const f32,
    to: *mut f32,
) -> usize {
    // SAFETY: the caller's promise. As many sums as there are registers for.
    unsafe {
        if F::LANES == 16 && rows >= 4 {
            score_rows::<F, 4, 2>(query, dims, keys, to);
            4
        } else if F::LANES == 16 {
            score_rows::<F, 1, 2>(query, dims, keys, to);
            1
        } else if F::LANES == 8 && rows >= 2 {
            score_rows::<F, 2, 4>(query, dims, keys, to);
            2
        } else if F::LANES == 8 {
            score_rows::<F, 1, 4>(query, dims, keys, to);
            1
        } else {
            score_rows::<F, 1, 8>(query, dims, keys, to);
            1
        }
    }
}

#[inline(always)]
unsafe fn score_rows<F: Floats, const R: usize, const C: usize>(
    query: *const f32,
    dims: usize,
    keys: *const f32,
    to: *mut f32,
) {
    // SAFETY: the caller's promise; `C * LANES` is PAGE_POSITIONS.
    unsafe {
        let mut acc = [[F::splat(0.0); C]; R];
        for pair in 0..dims / 2 {
            for dim in [2 * pair + 1, 2 * pair] {
                let mut k = [F::splat(0.0); C];
                for c in 0..C {
                    k[c] = F::load(keys.add(dim * PAGE_POSITIONS + c * F::LANES));
                }
                for r in 0..R {
                    let q = F::splat(*query.add(r * dims + dim));
                    for c in 0..C {
                        acc[r][c] = F::fma(q, k[c], acc[r][c]);
                    }
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                F::store(to.add(r * PAGE_POSITIONS + c * F::LANES), acc[r][c]);
            }
        }
    }
}

/// Turns the scores of the positions from `low` to `high` into weights and adds them to `sums`, the others into none. Returns what earlier sums of the row are to be multiplied with.
#[inline(always)]
unsafe fn weigh<F: Floats>(
    scores: &mut [f32],
    low: usize,
    high: usize,
    scale: f32,
    largest: &mut f32,
    sums: &mut [f32],
) -> f32 {
    let at = scores.as_mut_ptr();
    let mut best = [0.0_f32; SUM_LANES];
    // SAFETY: the caller's promise; LANES divides SUM_LANES, and that PAGE_POSITIONS.
    unsafe {
        for c in (0..PAGE_POSITIONS).step_by(F::LANES) {
            F::store(at.add(c), F::mul(F::load(at.add(c)), F::splat(scale)));
        }
        scores[..low].fill(f32::NEG_INFINITY);
        scores[high..].fill(f32::NEG_INFINITY);
        for lane in (0..SUM_LANES).step_by(F::LANES) {
            let mut most = F::splat(*largest);
            for c in (lane..PAGE_POSITIONS).step_by(SUM_LANES) {
                most = F::at_least(F::load(at.add(c)), most);
            }
            F::store(best.as_mut_ptr().add(lane), most);
        }
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                if best[lane + half] > best[lane] {
                    best[lane] = best[lane + half];
                }
            }
        }
        let mut factor = 1.0;
        if best[0] > *largest {
            factor = first::<F>(super::activation::exp::<F>(F::splat(*largest - best[0])));
            for lane in (0..SUM_LANES).step_by(F::LANES) {
                let sums = sums.as_mut_ptr().add(lane);
                F::store(sums, F::mul(F::load(sums), F::splat(factor)));
            }
            *largest = best[0];
        }
        for lane in (0..SUM_LANES).step_by(F::LANES) {
            let mut sum = F::load(sums.as_ptr().add(lane));
            for c in (lane..PAGE_POSITIONS).step_by(SUM_LANES) {
                let weight = super::activation::exp::<F>(F::add(F::load(at.add(c)), F::splat(-*largest)));
                F::store(at.add(c), weight);
                sum = F::add(sum, weight);
            }
            F::store(sums.as_mut_ptr().add(lane), sum);
        }
        factor
    }
}

/// The first lane.
#[inline(always)]
unsafe fn first<F: Floats>(v: F::V) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: LANES is at most 16.
    unsafe { F::store(lanes.as_mut_ptr(), v) };
    lanes[0]
}

/// `mixed = factor mixed + weights values`, positions ascending.
#[inline(always)]
unsafe fn mix<F: Floats>(weights: &[f32], values: *const f32, stride: usize, factor: f32, mixed: &mut [f32]) {
    let width = mixed.len();
    let mixed = mixed.as_mut_ptr();
    let mut dim = 0;
    // SAFETY: the caller's promise; `width` is a multiple of 16.
    unsafe {
        while dim + 8 * F::LANES <= width {
            mix_columns::<F, 8>(weights, values.add(dim), stride, factor, mixed.add(dim));
            dim += 8 * F::LANES;
        }
        while dim + 4 * F::LANES <= width {
            mix_columns::<F, 4>(weights, values.add(dim), stride, factor, mixed.add(dim));
            dim += 4 * F::LANES;
        }
        while dim < width {
            mix_columns::<F, 1>(weights, values.add(dim), stride, factor, mixed.add(dim));
            dim += F::LANES;
        }
    }
}

#[inline(always)]
unsafe fn mix_columns<F: Floats, const C: usize>(
    weights: &[f32],
    values: *const f32,
    stride: usize,
    factor: f32,
    mixed: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [F::splat(0.0); C];
        for c in 0..C {
            acc[c] = F::mul(F::load(mixed.add(c * F::LANES)), F::splat(factor));
        }
        for position in 0..weights.len() {
            let weight = F::splat(*weights.get_unchecked(position));
            let values = values.add(position * stride);
            for c in 0..C {
                acc[c] = F::fma(weight, F::load(values.add(c * F::LANES)), acc[c]);
            }
        }
        for c in 0..C {
            F::store(mixed.add(c * F::LANES), acc[c]);
        }
    }
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
