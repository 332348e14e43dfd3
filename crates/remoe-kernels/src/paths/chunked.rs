//! More rows than accumulators for a whole panel fit the registers: by chunks of K.
//!
//! All blocks of a group of rows, and all their columns, go over a chunk that stays in the first-level cache before the next one begins, and fetch that
//! one bit by bit: memory is read all the time, and once for each group. Between chunks sums lie in memory as float32, so that nothing is rounded on the
//! way and K still ascends: the bits are those of one pass. Where there are so many passes that arithmetic takes far longer than reading, the panel is one chunk, of the
//! second-level cache.

use super::floats::Floats;
use super::panel::{FAR, LINE, NEAR, Panel, PanelSums, PanelWalk, ROWS, prefetch};
use super::steps::Step;
use crate::WeightFormat;
use crate::shape::PANEL;

/// Bytes of a chunk, which shares the smallest first-level cache there is, 32 KB, with sums and rows. Half of it by nibbles, which stand for twice as much of a row.
const CHUNK_BYTES: usize = 16 << 10;
/// Elements of K of a chunk, at most: each takes a byte of every column, or half of one.
pub(super) const CHUNK_ELEMENTS: usize = CHUNK_BYTES / PANEL;
/// From so many passes over a panel on, even what sums between chunks take is more than reading it: the panel is one chunk ..
const WHOLE_PASSES: usize = 8;
/// .. where it and the one that follows stay in a second-level cache of 1 MB.
const WHOLE_BYTES: usize = 400 << 10;
/// Most rows that go over a chunk together; their sums are 12 KB.
pub(super) const GROUP: usize = 48;

/// By chunks.
pub(super) struct Chunked;

/// Steps of a chunk, whose weights are at `w`, and what is fetched meanwhile.
#[derive(Clone, Copy)]
struct Chunk {
    first: usize,
    count: usize,
    w: *const u32,
    /// From here on ..
    ahead: *const u8,
    /// .. so many lines with every [`Step::ASKING`] steps ..
    lines: usize,
    /// .. up to here, ..
    end: *const u8,
    /// .. into the second-level cache.
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
        let blocks = count.div_ceil(most_block_rows::<S>());
        let passes = passes::<S>(count);
        let chunks = chunks::<S>(panel);
        let mut step = 0;
        for chunk in 0..chunks {
            let steps = (panel.steps - step).div_ceil(chunks - chunk);
            let w = panel.weights.wrapping_add(step * S::WORDS);
            // The one that follows has as many steps, but for one.
            let ahead = if chunk + 1 < chunks { w.wrapping_add(steps * S::WORDS).cast() } else { after };
            let mut chunk = Chunk {
                first: step,
                count: steps,
                w,
                ahead,
                lines: (S::ASKING * step_bytes / LINE).div_ceil(passes),
                end: ahead.wrapping_add(steps * step_bytes),
                is_far: passes <= most_bound_by_reading::<S>(),
            };
            let mut first = 0;
            for block in 0..blocks {
                let block_rows = (count - first).div_ceil(blocks - block);
                // SAFETY: the caller's promise; blocks have between 1 and ROWS rows.
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

/// How many chunks a panel is walked in, as even as possible.
#[inline(always)]
fn chunks<S: Step>(panel: &Panel) -> usize {
    let groups = panel.row_count.div_ceil(GROUP);
    let passes = groups * passes::<S>(panel.row_count.div_ceil(groups));
    let is_whole = passes >= WHOLE_PASSES && panel.steps * S::WORDS * 4 <= WHOLE_BYTES;
    if is_whole { 1 } else { panel.steps.div_ceil(chunk_steps::<S>()) }
}

/// Passes over a chunk up to which reading it takes longer than they do. More requests are under way then if it is fetched into the second-level
/// cache; with more passes fetching it all the way is less work.
const fn most_bound_by_reading<S: Step>() -> usize {
    match S::WEIGHTS {
        WeightFormat::Plain => 3,
        WeightFormat::Int8 | WeightFormat::Fp8 => 4,
        WeightFormat::Int4 | WeightFormat::Mxfp4 => 0,
    }
}

/// Most steps of a chunk.
const fn chunk_steps<S: Step>() -> usize {
    let bytes = match S::WEIGHTS {
        WeightFormat::Int4 | WeightFormat::Mxfp4 => CHUNK_BYTES / 2,
        _ => CHUNK_BYTES,
    };
    bytes / (S::WORDS * 4)
}

/// Most rows of a block: beside two wide vectors of columns, sums of nibbles take registers of their own.
const fn most_block_rows<S: Step>() -> usize {
    match (S::F::LANES, S::WEIGHTS) {
        (16, WeightFormat::Int4 | WeightFormat::Mxfp4) => ROWS - 1,
        _ => ROWS,
    }
}

/// Vectors of columns that `rows` rows take at a time, so that accumulators fit the registers beside sums of integers or scales.
const fn vectors<S: Step>(rows: usize) -> usize {
    match (S::F::LANES == 16, S::WEIGHTS.is_plain(), rows) {
        (true, true, _) | (false, true, 2) | (false, false, 1) => 4,
        (false, true, 1) => 8,
        (true, false, _) | (false, true, _) | (false, false, 2) => 2,
        (false, false, _) => 1,
    }
}

/// How often a group of `rows` rows goes over a chunk, or a little less where its blocks are not even.
const fn passes<S: Step>(rows: usize) -> usize {
    let blocks = rows.div_ceil(most_block_rows::<S>());
    blocks * passes_of::<S>(rows.div_ceil(blocks))
}

/// How often a block of `rows` rows does.
const fn passes_of<S: Step>(rows: usize) -> usize {
    PANEL / (vectors::<S>(rows) * S::F::LANES)
}

/// Adds the chunk to the sums of `R` rows, or begins them.
#[inline(always)]
unsafe fn sum_block<S: Step, const R: usize>(
    chunk: &mut Chunk,
    rows: *const *const u8,
    sums: *mut PanelSums,
) {
    // SAFETY: the caller's promise.
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

/// By `C` vectors of columns at a time.
#[inline(always)]
unsafe fn sum_columns<S: Step, const R: usize, const C: usize>(
    chunk: &mut Chunk,
    x: &[*const u8; R],
    sums: *mut PanelSums,
) {
    for first in (0..PANEL).step_by(C * S::F::LANES) {
        let lines = if chunk.ahead < chunk.end { chunk.lines } else { 0 };
        // SAFETY: the caller's promise; `C * LANES` divides PANEL.
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
            for from in (chunk.first..end).step_by(S::ASKING) {
                if chunk.is_far {
                    prefetch::<FAR>(ahead, lines);
                } else {
                    prefetch::<NEAR>(ahead, lines);
                }
                ahead = ahead.wrapping_add(lines * LINE);
                for step in from..end.min(from + S::ASKING) {
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
