//! Softmax attention over keys and values in pages.
//!
//! # Layout of a KV cache page
//!
//! A page holds the keys and values of [`PAGE_POSITIONS`] positions. First come the keys of every KV head,
//! `[key elements][positions]`, so that vector lanes are positions while scores are summed. Then come the values of
//! every KV head, `[positions][value elements]`. In a latent cache ([`AttentionShape::latent`]) the values are the
//! first elements of the keys and are not stored twice. For the layout of int8 pages see [`crate::kv_cache`].
//!
//! # Numerics
//!
//! As for matrix products (see the crate documentation), a row's result depends only on its query and on the positions
//! that it attends to.
//!
//! - Scores are sums over key elements in pairs, the odd one first, then multiplied by the scale.
//! - The softmax is computed online (Milakov and Gimelshein, arXiv 1805.02867), page after page from position 0 of the
//!   sequence. If a page raises the largest score from `old` to `new`, all sums so far are multiplied by e^(old - new).
//! - Weights e^(score - largest) stay float32. They are summed in 16 lanes, position `i` in lane `i mod 16`; the lanes
//!   are then added by halves.
//! - Values are summed by fused multiply-adds, positions ascending. There is one division and one rounding to the
//!   element type.
//!
//! A sequence is cut into parts of 1,024 positions, and each part is summed separately in this way. The sums of values
//! and of weights of the first visible part are then merged with those of each later part, in ascending order. With
//! `new` as the larger of the two largest scores: `sum = fma(part sum, e^(part largest - new), sum * e^(largest - new))`.
//! So threads can share a long context, and no result depends on the number of threads.
//!
//! If heads have attention sinks, a row begins as if it had seen one position before all others, with the sink as its
//! score and zero as its value.

use std::cell::RefCell;
use std::ops::Range;

use crate::attention_shape::AttentionShape;
use crate::kv_cache::PAGE_POSITIONS;
use crate::memory::Buffer;
use crate::paths::attend::{
    AttentionBlock, AttentionStep, BLOCK_ROWS, PART_POSITIONS, parts_of, scratch_floats, state_stride,
};
use crate::paths::{self, float_mode::FloatMode};
use crate::{KernelError, MAX_ROWS, Pool};

/// Smallest number of multiply-adds that is worth handing to another thread.
const MIN_PARALLEL_WORK: usize = 1 << 15;

/// Blocks of rows per thread that balance the load: with at least as many, threads end at about the same time.
const BALANCED_BLOCKS_PER_THREAD: usize = 4;

/// float32 elements of a cache line.
const CACHE_LINE_FLOATS: usize = 16;

/// Upper bound of the memory for [`STATES`], in floats.
const MAX_STATE_FLOATS: usize = 1 << 22;

/// Memory of one page of the KV cache: zeroed, and aligned to cache lines. Large pages share huge pages of the
/// operating system.
#[derive(Debug)]
pub struct KvPage(Buffer);

impl KvPage {
    /// Allocates `bytes` zero bytes.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`], [`KernelError::TooLarge`].
    pub fn zeroed(bytes: usize) -> Result<Self, KernelError> {
        Buffer::zeroed(bytes).map(Self)
    }
}

impl std::ops::Deref for KvPage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl std::ops::DerefMut for KvPage {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

/// The rows of one sequence in a call of [`Pool::attend`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpan<'a> {
    /// The sequence's KV cache pages of this layer, in order. Pages outside of every row's window may be empty.
    pub pages: &'a [&'a [u8]],
    /// Number of positions before the first row. Row `i` attends to positions up to `past + i`, the last of which must
    /// have been written to its page.
    pub past: usize,
    /// Number of query rows (tokens).
    pub rows: usize,
}

thread_local! {
    /// Widened pages and unfinished sums of one block. Kept between calls, which all need the same size.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Softmax states of rows over single parts of their positions. Other threads merge them.
    static STATES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// One unit of work for a thread: a block of query rows of one KV head, in one step.
#[derive(Clone, Copy)]
struct AttentionUnit<'a> {
    span: &'a AttentionSpan<'a>,
    kv_head: usize,
    /// First query row of the block, and how many rows it has.
    first: usize,
    count: usize,
    query: &'a [u8],
    /// Byte offset of the span's results in the call's output.
    output_offset: usize,
    /// Number of positions that the unit reads, as an estimate of its cost.
    positions: usize,
    step: AttentionStep,
}

// SAFETY: `Pool::attend` runs the units that merge states only after the units that wrote them.
unsafe impl Send for AttentionUnit<'_> {}

/// Start of a call's output, shared by all threads.
struct Output(*mut u8);

// SAFETY: `Pool::attend` gives each unit rows or heads of its own to write.
unsafe impl Sync for Output {}

impl Output {
    fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

impl Pool {
    /// Computes softmax attention for the rows of all `spans`, one span after the other.
    ///
    /// `query` is `[tokens][query heads][key elements]` and `output` is `[tokens][query heads][value elements]`.
    /// `sinks` has one element for each query head. Sequences, heads and long contexts are spread over the threads.
    ///
    /// # Errors
    /// [`KernelError::Length`] if a length contradicts the shape or the spans, [`KernelError::TooMany`],
    /// [`KernelError::Panicked`].
    pub fn attend(
        &self,
        shape: &AttentionShape,
        query: &[u8],
        sinks: Option<&[f32]>,
        spans: &[AttentionSpan<'_>],
        output: &mut [u8],
    ) -> Result<(), KernelError> {
        validate(shape, query, spans, output)?;
        let expected = shape.heads();
        if let Some(actual) = sinks.map(<[f32]>::len).filter(|&actual| actual != expected) {
            return Err(KernelError::Length { what: "sinks", actual, expected });
        }
        let positions: usize = spans.iter().map(|span| span.rows * (span.past + span.rows)).sum();
        let work = positions * shape.heads() * (shape.key_dim + shape.value_dim);
        let rows: usize = spans.iter().map(|span| span.rows * shape.group).sum();
        let threads = if work < MIN_PARALLEL_WORK { 1 } else { self.threads() };
        let blocks = |block_rows: usize| rows.div_ceil(block_rows) * shape.kv_heads;
        let balanced = BALANCED_BLOCKS_PER_THREAD * threads;
        // Too few rows for all threads: parts of the positions are computed in parallel if there is memory for their
        // states, else blocks become smaller. Neither changes the result.
        let floats =
            if threads > 1 && blocks(BLOCK_ROWS) < balanced { state_floats(shape, spans) } else { 0 };
        let floats = if floats > MAX_STATE_FLOATS { 0 } else { floats };
        let mut block_rows = BLOCK_ROWS;
        while (block_rows > 4 && blocks(block_rows) < threads)
            || (block_rows > 16 && blocks(block_rows) < balanced)
        {
            block_rows /= 2;
        }
        let path = self.attention_path(shape.dtype);
        let kernel = paths::attend_kernel(path);
        let output = Output(output.as_mut_ptr());
        let compute = |unit: &mut AttentionUnit<'_>| {
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.resize(scratch_floats(shape, BLOCK_ROWS) + CACHE_LINE_FLOATS, 0.0);
                let line_bytes = CACHE_LINE_FLOATS * size_of::<f32>();
                let skip = scratch.as_ptr().align_offset(line_bytes).min(CACHE_LINE_FLOATS);
                let mut block = AttentionBlock {
                    shape,
                    pages: unit.span.pages,
                    past: unit.span.past,
                    kv_head: unit.kv_head,
                    first: unit.first,
                    count: unit.count,
                    query: unit.query,
                    sinks,
                    output: output.at(unit.output_offset),
                    step: unit.step,
                    scratch: &mut scratch[skip..],
                };
                let _mode = FloatMode::enter(path);
                // SAFETY: the pool checked that the path is available, and its float mode is set. Lengths were
                // validated. Units differ in sequence, head, rows or part, and so in what they write. States are
                // complete before units merge them.
                unsafe { kernel(&mut block) };
            });
        };
        let run = |units: &mut [AttentionUnit<'_>], work: usize| {
            if work < MIN_PARALLEL_WORK {
                units.iter_mut().for_each(compute);
                return Ok(());
            }
            units.chunks_mut(MAX_ROWS).try_for_each(|units| self.each(units, compute))
        };
        STATES.with_borrow_mut(|states| {
            if states.len() < floats {
                states.resize(floats, 0.0);
            }
            let [mut units, mut merging] = units(shape, query, spans, block_rows, &mut states[..floats]);
            // The longest first, so that threads end at about the same time.
            units.sort_by_key(|unit| std::cmp::Reverse(unit.positions));
            run(&mut units, work)?;
            run(&mut merging, floats)
        })
    }
}

/// Counts the floats for the states of all rows of those spans that have several parts.
fn state_floats(shape: &AttentionShape, spans: &[AttentionSpan<'_>]) -> usize {
    let states =
        |span: &AttentionSpan<'_>| match parts_of_rows(shape, span.past, 0..span.rows * shape.group).len() {
            0 | 1 => 0,
            parts => parts.saturating_mul(span.rows * shape.heads()),
        };
    spans.iter().map(states).fold(0, usize::saturating_add).saturating_mul(state_stride(shape))
}

/// Returns the parts of the sequence that query rows `rows` of a head attend to.
fn parts_of_rows(shape: &AttentionShape, past: usize, rows: Range<usize>) -> Range<usize> {
    match rows.is_empty() {
        true => 0..0,
        false => parts_of(&(shape.visible(past, rows.start).start..shape.visible(past, rows.end - 1).end)),
    }
}

/// Returns the units of blocks of `block_rows` rows, and the units that then merge the contents of `states`. If there
/// is memory for states, long sequences get blocks of [`BLOCK_ROWS`] rows and one unit for each part.
fn units<'a>(
    shape: &AttentionShape,
    query: &'a [u8],
    spans: &'a [AttentionSpan<'a>],
    block_rows: usize,
    states: &mut [f32],
) -> [Vec<AttentionUnit<'a>>; 2] {
    let bytes = shape.dtype.bytes();
    let (query_row, output_row) =
        (shape.heads() * shape.key_dim * bytes, shape.heads() * shape.value_dim * bytes);
    let (has_states, mut next_states) = (!states.is_empty(), states.as_mut_ptr());
    let (mut units, mut merging, mut first_token) = (Vec::new(), Vec::new(), 0);
    for span in spans {
        let rows = span.rows * shape.group;
        let is_in_parts = has_states && parts_of_rows(shape, span.past, 0..rows).len() > 1;
        let block_rows = if is_in_parts { BLOCK_ROWS } else { block_rows };
        for kv_head in 0..shape.kv_heads {
            for first in (0..rows).step_by(block_rows) {
                let count = block_rows.min(rows - first);
                let end = shape.visible(span.past, first + count - 1).end;
                let unit = AttentionUnit {
                    span,
                    kv_head,
                    first,
                    count,
                    query: &query[first_token * query_row..][..span.rows * query_row],
                    output_offset: first_token * output_row,
                    positions: end - shape.visible(span.past, first).start,
                    step: AttentionStep::Whole,
                };
                if !is_in_parts {
                    units.push(unit);
                    continue;
                }
                merging.push(AttentionUnit { step: AttentionStep::Merge { states: next_states }, ..unit });
                for part in parts_of_rows(shape, span.past, first..first + count) {
                    let positions = PART_POSITIONS.min(end - part * PART_POSITIONS);
                    units.push(AttentionUnit {
                        positions,
                        step: AttentionStep::Part { part, states: next_states },
                        ..unit
                    });
                    next_states = next_states.wrapping_add(count * state_stride(shape));
                }
            }
        }
        first_token += span.rows;
    }
    [units, merging]
}

fn validate(
    shape: &AttentionShape,
    query: &[u8],
    spans: &[AttentionSpan<'_>],
    output: &[u8],
) -> Result<(), KernelError> {
    let dims = [
        ("kv heads", shape.kv_heads),
        ("query heads per kv head", shape.group),
        ("key elements", shape.key_dim),
        ("value elements", shape.value_dim),
    ];
    for (what, value) in dims {
        if value == 0 || value > crate::MAX_DIMENSION {
            return Err(KernelError::Dimension { what, value, max: crate::MAX_DIMENSION });
        }
    }
    if shape.latent && shape.value_dim > shape.key_dim {
        return Err(KernelError::Dimension {
            what: "latent value elements",
            value: shape.value_dim,
            max: shape.key_dim,
        });
    }
    let expect = |what, actual, expected| match actual == expected {
        true => Ok(()),
        false => Err(KernelError::Length { what, actual, expected }),
    };
    let rows: usize = spans.iter().map(|span| span.rows).sum();
    if rows > MAX_ROWS {
        return Err(KernelError::TooMany { what: "rows", actual: rows, max: MAX_ROWS });
    }
    let row = rows * shape.heads() * shape.dtype.bytes();
    expect("query", query.len(), row * shape.key_dim)?;
    expect("output", output.len(), row * shape.value_dim)?;
    for span in spans.iter().filter(|span| span.rows > 0) {
        let first = shape.visible(span.past, 0).start / PAGE_POSITIONS;
        let end = (span.past + span.rows).div_ceil(PAGE_POSITIONS);
        if span.pages.len() < end {
            return Err(KernelError::Length { what: "pages", actual: span.pages.len(), expected: end });
        }
        for page in &span.pages[first..end] {
            expect("page", page.len(), shape.page_bytes())?;
        }
    }
    Ok(())
}
