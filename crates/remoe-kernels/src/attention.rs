//! Softmax attention over keys and values in pages.
//!
//! A page holds the keys and values of [`PAGE_POSITIONS`] positions: of every head of keys `[key elements][positions]`, so that lanes are positions while scores are summed, then of every head of values `[positions][value elements]`. In a latent cache ([`AttentionShape::latent`]) the values are the first elements of the keys and not stored again. Pages of int8 lie otherwise ([`crate::kv_cache`]).
//!
//! # Numerics
//!
//! As for products (see the crate documentation), a row's result depends on its query and on the positions that it sees, on nothing else. Scores are sums over key elements in pairs, the odd one first, then multiplied by the scale. Pages are taken in the order of their positions, beginning at position 0 of the sequence: where a page has a larger score than all before it, what was summed so far is multiplied by e^(old - new). Weights e^(score - largest) stay float32; they are summed in 16 lanes, position `i` in lane `i mod 16`, and the lanes by halves. Values are summed by fused multiply-adds, positions ascending. One division, one rounding to the element type. Where heads have sinks, a row begins as if it had seen one position before all others, whose score is the sink and whose value is zero.

use std::cell::RefCell;

use crate::attention_shape::AttentionShape;
use crate::kv_cache::PAGE_POSITIONS;
use crate::memory::Buffer;
use crate::paths::attend::{BLOCK_ROWS, Block, scratch_floats};
use crate::paths::{self, float_mode::FloatMode};
use crate::{KernelError, MAX_ROWS, Pool};

/// Multiply-adds that are worth handing to another thread.
const PART: usize = 1 << 15;

/// Blocks of rows per thread from which on threads end at about the same time.
const EVEN: usize = 4;

/// Elements of float32 of a cache line.
const LINE: usize = 16;

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
}

/// The part of a block that differs from block to block.
struct Unit<'a> {
    span: &'a AttentionSpan<'a>,
    kv_head: usize,
    first: usize,
    count: usize,
    query: &'a [u8],
    output: usize,
}

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
        let bytes = shape.dtype.bytes();
        let (query_row, output_row) =
            (shape.heads() * shape.key_dim * bytes, shape.heads() * shape.value_dim * bytes);
        let rows: usize = spans.iter().map(|span| span.rows * shape.group).sum();
        // Few rows are spread more thinly; the result does not depend on it.
        let mut block = BLOCK_ROWS;
        let units = |block: usize| rows.div_ceil(block) * shape.kv_heads;
        while (block > 4 && units(block) < self.threads())
            || (block > 16 && units(block) < EVEN * self.threads())
        {
            block /= 2;
        }
        let mut units = Vec::new();
        let (mut first_token, mut work) = (0, 0);
        for span in spans {
            for kv_head in 0..shape.kv_heads {
                let rows = span.rows * shape.group;
                units.extend((0..rows).step_by(block).map(|first| Unit {
                    span,
                    kv_head,
                    first,
                    count: block.min(rows - first),
                    query: &query[first_token * query_row..][..span.rows * query_row],
                    output: first_token * output_row,
                }));
            }
            work += span.rows * (span.past + span.rows);
            first_token += span.rows;
        }
        // The longest first: what is left at the end is short.
        units.sort_by_key(|unit| std::cmp::Reverse(unit.span.past + unit.first / shape.group));
        let path = self.attending(shape.dtype);
        let kernel = paths::attend_kernel(path);
        let output = Output(output.as_mut_ptr());
        let compute = |unit: &mut Unit<'_>| {
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.resize(scratch_floats(shape, block) + LINE, 0.0);
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
                    scratch: &mut scratch[skip..],
                };
                let _mode = FloatMode::enter(path);
                // SAFETY: the pool checked that the path is available, and its float mode is set. Lengths were validated; units differ in sequence, head or rows, and so in what they write.
                unsafe { kernel(&mut block) };
            });
        };
        if work * shape.heads() * (shape.key_dim + shape.value_dim) < PART {
            units.iter_mut().for_each(compute);
            return Ok(());
        }
        units.chunks_mut(MAX_ROWS).try_for_each(|units| self.each(units, compute))
    }
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
