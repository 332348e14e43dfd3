//! Softmax attention over keys and values in pages.
//!
//! A page holds the keys and values of [`PAGE_POSITIONS`] positions: of every head of keys `[key elements][positions]`, so that lanes are positions while scores are summed, then of every head of values `[positions][value elements]`. In a latent cache ([`AttentionShape::latent`]) the values are the first elements of the keys and not stored again. Pages of int8 lie otherwise ([`crate::kv_cache`]).
//!
//! # Numerics
//!
//! As for products (see the crate documentation), a row's result depends on its query and on the positions that it sees, on nothing else. Scores are sums over key elements in pairs, the odd one first, then multiplied by the scale. Pages are taken in the order of their positions, beginning at position 0 of the sequence: where a page has a larger score than all before it, what was summed so far is multiplied by e^(old - new). Weights e^(score - largest) stay float32; they are summed in 16 lanes, position `i` in lane `i mod 16`, and the lanes by halves. Values are summed by fused multiply-adds, positions ascending. One division, one rounding to the element type.
//!
//! Positions are summed in parts of 1,024, by their number in the sequence: part by part in the same way, each from nothing. The sums of the first part that a row sees, of values and of weights, are merged with those of each later one, ascending: where `new` is the larger one of both largest scores, `sum = fma(sum of the part, e^(its largest - new), sum * e^(largest - new))`. So threads share a long context, and no result depends on how many there are.
//!
//! Where heads have sinks, a row begins as if it had seen one position before all others, whose score is the sink and whose value is zero.

use std::cell::RefCell;
use std::ops::Range;

use crate::attention_shape::AttentionShape;
use crate::kv_cache::PAGE_POSITIONS;
use crate::memory::Buffer;
use crate::paths::attend::{BLOCK_ROWS, Block, PART_POSITIONS, Step, parts_of, scratch_floats, state_stride};
use crate::paths::{self, float_mode::FloatMode};
use crate::{KernelError, MAX_ROWS, Pool};

/// Multiply-adds that are worth handing to another thread.
const PART: usize = 1 << 15;

/// Blocks of rows per thread from which on threads end at about the same time.
const EVEN: usize = 4;

/// Elements of float32 of a cache line.
const LINE: usize = 16;

/// Most floats of states that units leave for each other.
const MAX_STATES: usize = 1 << 22;

/// Memory of a page of the KV cache, zeroed at first: aligned to cache lines, and side by side with others on huge pages where it is not small.
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
    /// The layer's part of the sequence's pages, in order. Those that no row sees may be empty.
    pub pages: &'a [&'a [u8]],
    /// Positions before the first row. Row `i` sees up to position `past + i`, whose key and value are written.
    pub past: usize,
    /// How many rows.
    pub rows: usize,
}

thread_local! {
    /// Widened pages and unfinished sums; kept, because it is the same size in every call.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// States of rows over parts of their positions, which other threads merge.
    static STATES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The part of a block that differs from block to block.
#[derive(Clone, Copy)]
struct Unit<'a> {
    span: &'a AttentionSpan<'a>,
    kv_head: usize,
    first: usize,
    count: usize,
    query: &'a [u8],
    output: usize,
    /// Positions that its last row sees in this step.
    positions: usize,
    step: Step,
}

// SAFETY: a step's states are written by one unit and read by others after it, see `Pool::attend`.
unsafe impl Send for Unit<'_> {}

/// Where a call writes.
struct Output(*mut u8);

// SAFETY: units write to different rows, see `Pool::attend`.
unsafe impl Sync for Output {}

impl Output {
    fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

impl Pool {
    /// Attention of the rows of all `spans`: `query` and `output` hold tokens x heads x key and value elements, the spans' rows one after the other; `sinks` has one for each query head. Heads, sequences and long prompts are spread over the threads.
    ///
    /// # Errors
    /// [`KernelError::Length`] where a length is not what shape and spans say, [`KernelError::TooMany`]; [`KernelError::Panicked`].
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
        let threads = if work < PART { 1 } else { self.threads() };
        let blocks = |block: usize| rows.div_ceil(block) * shape.kv_heads;
        // Few rows are spread over threads by parts of their positions, as far as there is memory for states, or more thinly; the result does not depend on it.
        let floats =
            if threads > 1 && blocks(BLOCK_ROWS) < EVEN * threads { state_floats(shape, spans) } else { 0 };
        let floats = if floats > MAX_STATES { 0 } else { floats };
        let mut block = BLOCK_ROWS;
        while (block > 4 && blocks(block) < threads) || (block > 16 && blocks(block) < EVEN * threads) {
            block /= 2;
        }
        let path = self.attending(shape.dtype);
        let kernel = paths::attend_kernel(path);
        let output = Output(output.as_mut_ptr());
        let compute = |unit: &mut Unit<'_>| {
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.resize(scratch_floats(shape, BLOCK_ROWS) + LINE, 0.0);
                let skip = scratch.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
                let mut block = Block {
                    shape,
                    pages: unit.span.pages,
                    past: unit.span.past,
                    kv_head: unit.kv_head,
                    first: unit.first,
                    count: unit.count,
                    query: unit.query,
                    sinks,
                    output: output.at(unit.output),
                    step: unit.step,
                    scratch: &mut scratch[skip..],
                };
                let _mode = FloatMode::enter(path);
                // SAFETY: the pool checked that the path is available, and its float mode is set. Lengths were validated; units of a call differ in sequence, head, rows or part, and so in what they write. States are complete before units merge them.
                unsafe { kernel(&mut block) };
            });
        };
        let run = |units: &mut [Unit<'_>], work: usize| {
            if work < PART {
                units.iter_mut().for_each(compute);
                return Ok(());
            }
            units.chunks_mut(MAX_ROWS).try_for_each(|units| self.each(units, compute))
        };
        STATES.with_borrow_mut(|states| {
            if states.len() < floats {
                states.resize(floats, 0.0);
            }
            let [mut units, mut merging] = units(shape, query, spans, block, &mut states[..floats]);
            // The longest first: what is left at the end is short.
            units.sort_by_key(|unit| std::cmp::Reverse(unit.positions));
            run(&mut units, work)?;
            run(&mut merging, floats)
        })
    }
}

/// Floats for the states of all rows over the parts of their positions, of spans with several parts.
fn state_floats(shape: &AttentionShape, spans: &[AttentionSpan<'_>]) -> usize {
    let states =
        |span: &AttentionSpan<'_>| match parts_of_rows(shape, span.past, 0..span.rows * shape.group).len() {
            0 | 1 => 0,
            parts => parts.saturating_mul(span.rows * shape.heads()),
        };
    spans.iter().map(states).fold(0, usize::saturating_add).saturating_mul(state_stride(shape))
}

/// Parts of the positions that query rows `rows` of a head see.
fn parts_of_rows(shape: &AttentionShape, past: usize, rows: Range<usize>) -> Range<usize> {
    match rows.is_empty() {
        true => 0..0,
        false => parts_of(&(shape.seen(past, rows.start).start..shape.seen(past, rows.end - 1).end)),
    }
}

/// Units of blocks of `block` rows, and those that merge what some of the first leave in `states`. With room for states, blocks are larger and cut into parts instead.
fn units<'a>(
    shape: &AttentionShape,
    query: &'a [u8],
    spans: &'a [AttentionSpan<'a>],
    block: usize,
    states: &mut [f32],
) -> [Vec<Unit<'a>>; 2] {
    let bytes = shape.dtype.bytes();
    let (query_row, output_row) =
        (shape.heads() * shape.key_dim * bytes, shape.heads() * shape.value_dim * bytes);
    let (has_states, mut free) = (!states.is_empty(), states.as_mut_ptr());
    let (mut units, mut merging, mut first_token) = (Vec::new(), Vec::new(), 0);
    for span in spans {
        let rows = span.rows * shape.group;
        let is_cut = has_states && parts_of_rows(shape, span.past, 0..rows).len() > 1;
        let block = if is_cut { BLOCK_ROWS } else { block };
        for kv_head in 0..shape.kv_heads {
            for first in (0..rows).step_by(block) {
                let count = block.min(rows - first);
                let end = shape.seen(span.past, first + count - 1).end;
                let unit = Unit {
                    span,
                    kv_head,
                    first,
                    count,
                    query: &query[first_token * query_row..][..span.rows * query_row],
                    output: first_token * output_row,
                    positions: end - shape.seen(span.past, first).start,
                    step: Step::Whole,
                };
                if !is_cut {
                    units.push(unit);
                    continue;
                }
                merging.push(Unit { step: Step::Merge { states: free }, ..unit });
                for part in parts_of_rows(shape, span.past, first..first + count) {
                    let positions = PART_POSITIONS.min(end - part * PART_POSITIONS);
                    units.push(Unit { positions, step: Step::Part { part, states: free }, ..unit });
                    free = free.wrapping_add(count * state_stride(shape));
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
        let first = shape.seen(span.past, 0).start / PAGE_POSITIONS;
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
