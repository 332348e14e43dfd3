//! Walks a panel in chunks of K, for more rows than fit the registers with all columns.
//!
//! A chunk stays in the first-level cache while all blocks of a group of rows are multiplied with all its columns. They
//! prefetch the next chunk piece by piece, so that memory is read continuously, and once for each group. Between chunks,
//! sums lie in memory as float32: nothing is rounded and K still ascends, so that the bits are those of one pass. With so
//! many passes that arithmetic takes far longer than reading, the whole panel is one chunk, in the second-level cache.

use super::floats::Floats;
use super::panel::{CACHE_LINE, INTO_L1, INTO_L2, MAX_BLOCK_ROWS, Panel, PanelSums, PanelWalk, prefetch};
use super::steps::Step;
use crate::WeightFormat;
use crate::shape::PANEL;

/// Bytes of a chunk. It shares the smallest first-level cache, 32 KB, with sums and rows. Chunks of 4-bit weights are half
/// as long, because they cover twice as many elements of a row.
const CHUNK_BYTES: usize = 16 << 10;
/// Upper bound of a chunk's elements of K: each takes at least half a byte of every column, of half as many bytes.
pub(super) const CHUNK_ELEMENTS: usize = CHUNK_BYTES / PANEL;
/// Number of passes from which on storing sums between chunks takes longer than reading the panel, which then is one
/// chunk, unless it exceeds [`MAX_WHOLE_BYTES`].
const MIN_WHOLE_PASSES: usize = 8;
/// Largest panel that fits a second-level cache of 1 MB together with the next panel.
const MAX_WHOLE_BYTES: usize = 400 << 10;
/// Largest number of rows that share a chunk. Their sums take 12 KB.
pub(super) const MAX_GROUP_ROWS: usize = 48;

/// The walk in chunks of K.
pub(super) struct Chunked;

/// A chunk of K, and the memory that is prefetched while it is computed.
#[derive(Clone, Copy)]
struct Chunk {
    /// First step of the chunk, and number of steps.
    first: usize,
    count: usize,
    /// Weights of the chunk.
    w: *const u32,
    /// Next address to prefetch.
    ahead: *const u8,
    /// Cache lines to prefetch every [`Step::STEPS_PER_PREFETCH`] steps.
    lines: usize,
    /// End of the memory to prefetch.
    end: *const u8,
    /// Set if memory is prefetched into the second-level cache, not the first-level one.
    is_far: bool,
}

impl PanelWalk for Chunked {
    #[inline(always)]
    unsafe fn sum_group<S: Step>(
        panel: &Panel,
        rows: *const *const u8,
        count: usize,
        after: *const u8,
        sums: *mut PanelSums,
    ) {
        let step_bytes = S::WORDS * 4;
        let blocks = count.div_ceil(max_block_rows::<S>());
        let passes = passes::<S>(count);
        let chunks = chunks::<S>(panel);
        let mut step = 0;
        for chunk in 0..chunks {
            let steps = (panel.steps - step).div_ceil(chunks - chunk);
            let w = panel.weights.wrapping_add(step * S::WORDS);
            // The next chunk has as many steps, or one less.
            let ahead = if chunk + 1 < chunks { w.wrapping_add(steps * S::WORDS).cast() } else { after };
            let mut chunk = Chunk {
                first: step,
                count: steps,
                w,
                ahead,
                lines: (S::STEPS_PER_PREFETCH * step_bytes / CACHE_LINE).div_ceil(passes),
                end: ahead.wrapping_add(steps * step_bytes),
                is_far: passes <= max_memory_bound_passes::<S>(),
            };
            let mut first = 0;
            for block in 0..blocks {
                let block_rows = (count - first).div_ceil(blocks - block);
                // SAFETY: there are `count` rows with room for their sums, as the caller guarantees; blocks have 1 to 6 rows.
                unsafe {
                    let (rows, sums) = (rows.add(first), sums.add(first));
                    match block_rows {
                        1 => sum_block::<S, 1>(&mut chunk, rows, sums),
                        2 => sum_block::<S, 2>(&mut chunk, rows, sums),
                        3 => sum_block::<S, 3>(&mut chunk, rows, sums),
                        4 => sum_block::<S, 4>(&mut chunk, rows, sums),
                        5 => sum_block::<S, 5>(&mut chunk, rows, sums),
                        _ => sum_block::<S, 6>(&mut chunk, rows, sums),
                    }
                }
                first += block_rows;
            }
            step += steps;
        }
    }
}

/// Returns the number of chunks of a panel. Their lengths differ by one step at most.
#[inline(always)]
fn chunks<S: Step>(panel: &Panel) -> usize {
    let groups = panel.row_count.div_ceil(MAX_GROUP_ROWS);
    let passes = groups * passes::<S>(panel.row_count.div_ceil(groups));
    let is_whole = passes >= MIN_WHOLE_PASSES && panel.steps * S::WORDS * 4 <= MAX_WHOLE_BYTES;
    if is_whole { 1 } else { panel.steps.div_ceil(chunk_steps::<S>()) }
}

/// Largest number of passes over a chunk that take less time than reading it. Up to it, chunks are prefetched into the
/// second-level cache, which allows more requests in flight. With more passes, the first-level cache is less work.
const fn max_memory_bound_passes<S: Step>() -> usize {
    match S::WEIGHTS {
        WeightFormat::Plain => 3,
        WeightFormat::Int8 | WeightFormat::Fp8 => 4,
        WeightFormat::Int4 | WeightFormat::Mxfp4 => 0,
    }
}

/// Largest number of steps of a chunk.
const fn chunk_steps<S: Step>() -> usize {
    let bytes = match S::WEIGHTS {
        WeightFormat::Int4 | WeightFormat::Mxfp4 => CHUNK_BYTES / 2,
        _ => CHUNK_BYTES,
    };
    bytes / (S::WORDS * 4)
}

/// Largest number of rows of a block. With 4-bit weights and wide vectors, partial sums take registers of their own.
const fn max_block_rows<S: Step>() -> usize {
    match (S::F::LANES, S::WEIGHTS) {
        (16, WeightFormat::Int4 | WeightFormat::Mxfp4) => MAX_BLOCK_ROWS - 1,
        _ => MAX_BLOCK_ROWS,
    }
}

/// Number of vectors of columns that a block of `rows` rows computes at a time. Accumulators fit the registers, beside
/// sums of integers or scales.
const fn vectors<S: Step>(rows: usize) -> usize {
    match (S::F::LANES == 16, S::WEIGHTS.is_plain(), rows) {
        (true, true, _) | (false, true, 2) | (false, false, 1) => 4,
        (false, true, 1) => 8,
        (true, false, _) | (false, true, _) | (false, false, 2) => 2,
        (false, false, _) => 1,
    }
}

/// Number of passes of a group of `rows` rows over a chunk; a little less than that if its blocks are not even.
const fn passes<S: Step>(rows: usize) -> usize {
    let blocks = rows.div_ceil(max_block_rows::<S>());
    blocks * block_passes::<S>(rows.div_ceil(blocks))
}

/// Number of passes of a block of `rows` rows over a chunk.
const fn block_passes<S: Step>(rows: usize) -> usize {
    PANEL / (vectors::<S>(rows) * S::F::LANES)
}

/// Adds the chunk's products to the sums of `R` rows; the first chunk begins the sums.
#[inline(always)]
unsafe fn sum_block<S: Step, const R: usize>(
    chunk: &mut Chunk,
    rows: *const *const u8,
    sums: *mut PanelSums,
) {
    // SAFETY: there are `R` rows with room for their sums, as the caller guarantees.
    unsafe {
        let mut x = [std::ptr::null(); R];
        for r in 0..R {
            x[r] = *rows.add(r);
        }
        match vectors::<S>(R) {
            8 => sum_columns::<S, R, 8>(chunk, &x, sums),
            4 => sum_columns::<S, R, 4>(chunk, &x, sums),
            2 => sum_columns::<S, R, 2>(chunk, &x, sums),
            _ => sum_columns::<S, R, 1>(chunk, &x, sums),
        }
    }
}

/// Adds the chunk's products, `C` vectors of columns at a time.
#[inline(always)]
unsafe fn sum_columns<S: Step, const R: usize, const C: usize>(
    chunk: &mut Chunk,
    x: &[*const u8; R],
    sums: *mut PanelSums,
) {
    for first in (0..PANEL).step_by(C * S::F::LANES) {
        let lines = if chunk.ahead < chunk.end { chunk.lines } else { 0 };
        // SAFETY: rows, weights and sums are valid for the chunk, as the caller guarantees; `C * LANES` divides PANEL.
        unsafe {
            let mut acc = [[S::F::splat(0.0); C]; R];
            if chunk.first > 0 {
                for r in 0..R {
                    for c in 0..C {
                        acc[r][c] = S::F::load(sums.add(r).cast::<f32>().add(first + c * S::F::LANES));
                    }
                }
            }
            let mut w = chunk.w;
            let mut ahead = chunk.ahead;
            let end = chunk.first + chunk.count;
            for from in (chunk.first..end).step_by(S::STEPS_PER_PREFETCH) {
                if chunk.is_far {
                    prefetch::<INTO_L2>(ahead, lines);
                } else {
                    prefetch::<INTO_L1>(ahead, lines);
                }
                ahead = ahead.wrapping_add(lines * CACHE_LINE);
                for step in from..end.min(from + S::STEPS_PER_PREFETCH) {
                    S::add(&mut acc, x, step, w, first);
                    w = w.wrapping_add(S::WORDS);
                }
            }
            chunk.ahead = ahead;
            for r in 0..R {
                for c in 0..C {
                    S::F::store(sums.add(r).cast::<f32>().add(first + c * S::F::LANES), acc[r][c]);
                }
            }
        }
    }
}
