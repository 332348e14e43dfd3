//! Softmax attention of a block of query rows over the pages of one sequence and one head of keys and values.

mod mix;
mod score;

use super::floats::Floats;
use crate::Dtype;
use crate::attention_shape::AttentionShape;
use crate::elements;
use crate::kv_cache::{CacheFormat, PAGE_POSITIONS};
use mix::{Weights, mix_page};
use score::{score_page, weigh};

/// Most query rows of a block, for which each page is widened once.
pub(crate) const BLOCK_ROWS: usize = 64;

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
    /// At least [`scratch_floats`], of any content; fastest if aligned to a cache line.
    pub(crate) scratch: &'a mut [f32],
}

/// The distance of two rows of unfinished values: whole vectors, and a cache line more, so that a column of them does not fall into one set of the cache.
fn value_stride(shape: &AttentionShape) -> usize {
    shape.value_dim.next_multiple_of(16) + 16
}

/// The distance of two widened query rows: whole cache lines.
fn query_stride(shape: &AttentionShape) -> usize {
    shape.key_dim.next_multiple_of(16)
}

/// Scratch memory of a block of at most `rows` rows.
pub(crate) fn scratch_floats(shape: &AttentionShape, rows: usize) -> usize {
    let row = query_stride(shape) + value_stride(shape) + PAGE_POSITIONS + SUM_LANES + 1;
    TILE_DIMS * PAGE_POSITIONS + widened_floats(shape) + rows * row
}

/// Floats of a head's part of a page that is widened before it is used.
fn widened_floats(shape: &AttentionShape) -> usize {
    match shape.cache {
        CacheFormat::Plain => 0,
        CacheFormat::Int8 => shape.int8_head().floats(),
    }
}

/// Elements of a page as they are stored.
trait Element: Copy {
    /// Bytes of an element in the cache.
    const CACHED: usize;

    /// Reads `LANES` elements and widens them.
    unsafe fn load<F: Floats>(from: *const Self) -> F::V;
    /// Reads one element, of any alignment, and widens it.
    unsafe fn widened(from: *const Self) -> f32;
    /// Transposes a square: `LANES` rows, `stride` elements apart, of as many words as a vector has lanes. Rows of `to` are `to_stride` apart.
    unsafe fn transpose<F: Floats>(from: *const Self, stride: usize, to: *mut f32, to_stride: usize);
}

impl Element for f32 {
    const CACHED: usize = 4;

    #[inline(always)]
    unsafe fn load<F: Floats>(from: *const f32) -> F::V {
        // SAFETY: the caller's promise.
        unsafe { F::load(from) }
    }

    #[inline(always)]
    unsafe fn widened(from: *const f32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { from.read_unaligned() }
    }

    #[inline(always)]
    unsafe fn transpose<F: Floats>(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { F::transpose(from, stride, to, to_stride) }
    }
}

/// bfloat16.
impl Element for u16 {
    const CACHED: usize = 2;

    #[inline(always)]
    unsafe fn load<F: Floats>(from: *const u16) -> F::V {
        // SAFETY: the caller's promise.
        unsafe { F::load_bf16(from) }
    }

    #[inline(always)]
    unsafe fn widened(from: *const u16) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { from.read_unaligned() }) << 16)
    }

    #[inline(always)]
    unsafe fn transpose<F: Floats>(from: *const u16, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller's promise; a word is two elements.
        unsafe { F::transpose_pairs(from.cast(), stride / 2, to, to_stride) }
    }
}

/// An int8 element, widened.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Widened(f32);

impl Element for Widened {
    const CACHED: usize = 1;

    #[inline(always)]
    unsafe fn load<F: Floats>(from: *const Self) -> F::V {
        // SAFETY: the caller's promise.
        unsafe { F::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn widened(from: *const Self) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<f32>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn transpose<F: Floats>(from: *const Self, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { F::transpose(from.cast(), stride, to, to_stride) }
    }
}

/// One head's part of a page.
#[derive(Clone, Copy)]
struct Source<E> {
    /// Key elements x positions.
    keys: *const E,
    /// Positions x value elements; in a latent cache the keys.
    values: *const E,
}

impl<E> Source<E> {
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

/// The scratch memory of a block in parts.
struct Parts {
    /// Widened rows.
    query: *mut f32,
    query_stride: usize,
    /// Widened keys or values.
    tile: *mut f32,
    /// Unfinished values.
    mixed: *mut f32,
    stride: usize,
    /// Rows x positions of a page.
    scores: *mut f32,
    sums: *mut f32,
    largest: *mut f32,
}

/// Computes a block, see [`crate::attention`] for the order of its sums.
///
/// # Safety
/// The CPU has the features of `F` and the thread is in its float mode. `pages` hold every position that a row sees, each as long as the shape says, `query` and `output` hold all rows, and no other thread touches the rows' outputs.
#[inline(always)]
pub(crate) unsafe fn attend<F: Floats>(block: &mut Block<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match (block.shape.cache, block.shape.dtype) {
            (CacheFormat::Int8, _) => attend_as::<F, Widened>(block),
            (CacheFormat::Plain, Dtype::F32) => attend_as::<F, f32>(block),
            (CacheFormat::Plain, Dtype::Bf16) => attend_as::<F, u16>(block),
        }
    }
}

#[inline(always)]
unsafe fn attend_as<F: Floats, E: Element>(block: &mut Block<'_>) {
    let shape = block.shape;
    let (query_stride, stride) = (query_stride(shape), value_stride(shape));
    let (tile, rest) = block.scratch.split_at_mut(TILE_DIMS * PAGE_POSITIONS);
    let (wide, rest) = rest.split_at_mut(widened_floats(shape));
    let (query, rest) = rest.split_at_mut(query_stride * block.count);
    let (mixed, rest) = rest.split_at_mut(stride * block.count);
    let (scores, rest) = rest.split_at_mut(PAGE_POSITIONS * block.count);
    let (sums, rest) = rest.split_at_mut(SUM_LANES * block.count);
    let largest = &mut rest[..block.count];
    mixed.fill(0.0);
    sums.fill(0.0);
    largest.fill(f32::NEG_INFINITY);
    let mut seen = [const { 0..0 }; BLOCK_ROWS];
    for r in 0..block.count {
        seen[r] = shape.seen(block.past, block.first + r);
        let row = row_of(shape, block.kv_head, block.first + r);
        widen(shape.dtype, block.query, row * shape.key_dim, &mut query[r * query_stride..][..shape.key_dim]);
        if let Some(sinks) = block.sinks {
            largest[r] = sinks[row % shape.heads()];
            sums[r * SUM_LANES] = 1.0;
        }
    }
    let parts = Parts {
        query: query.as_mut_ptr(),
        query_stride,
        tile: tile.as_mut_ptr(),
        mixed: mixed.as_mut_ptr(),
        stride,
        scores: scores.as_mut_ptr(),
        sums: sums.as_mut_ptr(),
        largest: largest.as_mut_ptr(),
    };
    // SAFETY: the caller's promise; the parts of the scratch memory have room for `count` rows, and unfinished rows are whole vectors.
    unsafe {
        let pages = seen[0].start / PAGE_POSITIONS..seen[block.count - 1].end.div_ceil(PAGE_POSITIONS);
        for page in pages.clone() {
            let begin = page * PAGE_POSITIONS;
            // Rows see the later positions the later they are: those of a page lie together.
            let mut rows = 0..block.count;
            while rows.start < rows.end && seen[rows.start].end <= begin {
                rows.start += 1;
            }
            while rows.start < rows.end && seen[rows.end - 1].start >= begin + PAGE_POSITIONS {
                rows.end -= 1;
            }
            let next = block.pages[(page + 1).min(pages.end - 1)];
            // Memory to prefetch while keys are scored and while values are summed.
            let (source, asked) = match shape.cache {
                CacheFormat::Plain => {
                    let of = |page| Source::<E>::new(shape, page, block.kv_head);
                    let (source, next) = (of(block.pages[page]), of(next));
                    let first = if shape.latent { next.keys } else { source.values };
                    (source, [first.cast(), next.keys.cast()])
                }
                CacheFormat::Int8 => {
                    let head = shape.int8_head();
                    head.widen(head.part(block.pages[page], block.kv_head), wide);
                    let keys = wide.as_ptr().cast::<E>();
                    let values = if shape.latent { keys } else { keys.add(shape.key_dim * PAGE_POSITIONS) };
                    let next = head.part(next, block.kv_head).as_ptr();
                    (Source { keys, values }, [next, next.add(shape.key_dim * PAGE_POSITIONS)])
                }
            };
            let mut visible = [(0, PAGE_POSITIONS); BLOCK_ROWS];
            for r in rows.clone() {
                let low = seen[r].start.saturating_sub(begin);
                visible[r] = (low, (seen[r].end - begin).min(PAGE_POSITIONS));
            }
            score_page::<F, E>(shape, &parts, rows.clone(), source.keys, asked[0]);
            let mut factors = [1.0; BLOCK_ROWS];
            for r in rows.clone() {
                factors[r] = match F::LANES {
                    16 => weigh::<F, 2>(&parts, r, visible[r], shape.scale as f32),
                    8 => weigh::<F, 4>(&parts, r, visible[r], shape.scale as f32),
                    _ => weigh::<F, 8>(&parts, r, visible[r], shape.scale as f32),
                };
            }
            let weights = Weights { parts: &parts, rows, visible: &visible, factors: &factors };
            mix_page::<F, E>(shape, &weights, source.values, asked[1]);
        }
        for r in 0..block.count {
            let at = row_of(shape, block.kv_head, block.first + r) * shape.value_dim;
            let to = block.output.add(at * shape.dtype.bytes());
            let sum = total(&mut sums[r * SUM_LANES..][..SUM_LANES]);
            finish::<F>(shape, &mixed[r * stride..][..stride], sum, to);
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
