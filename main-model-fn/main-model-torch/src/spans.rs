//! Prepared attention of an iteration, made once for all layers: where new keys and values are written, which entries
//! are gathered for which rows, and what each row sees.
//!
//! Spans are attended to together, padded to the longest. They are divided into chunks by memory alone: one call has as
//! many spans as its gathered keys and values and its mask have room for, so that the number of calls does not depend
//! on how many spans there are.

use crate::library::Tensor;
use crate::masks::{MaskedRows, Masks};
use crate::pages::TorchPages;
use crate::rows::Rows;
use crate::workspace::{
    DECODE_MASKS_BYTES, GATHERED_BYTES, KERNEL_ROWS, MASK_BYTES, PREFILL_MASKS_BYTES, entry_bytes,
};
use main_model_fn::backend::{BackendError, RELEASED, Span};
use remoe_kernels::{AttentionShape, PAGE_POSITIONS};

/// Positions of a chunk are a multiple of this: kernels take masks so aligned as they are.
const ALIGNED: usize = 32;

/// Prepared spans.
pub struct TorchSpans {
    views: Vec<(Sight, View)>,
}

/// Properties of a layer by which its view of the spans differs from others'.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sight {
    table: usize,
    window: Option<usize>,
    /// Rows of the mask for each row: queries that share keys are rows of one head.
    repeated: usize,
    entry_bytes: usize,
    element_bytes: usize,
}

impl Sight {
    fn of(shape: &AttentionShape, table: usize) -> Self {
        // All heads share the keys of one: these stand for those of each without a copy.
        let repeated = if shape.kv_heads == 1 { 1 } else { shape.group };
        let (entry_bytes, element_bytes) = (entry_bytes(shape), shape.dtype.bytes());
        Self { table, window: shape.window, repeated, entry_bytes, element_bytes }
    }
}

/// The spans as layers of one sight see them.
pub(crate) struct View {
    /// Entries that the rows' keys and values are written to.
    pub(crate) written: Tensor,
    pub(crate) chunks: Vec<Chunk>,
    /// Where each row is in the chunks' outputs, one after the other; `None`: in order.
    pub(crate) order: Option<Tensor>,
}

/// Spans that are attended to together.
pub(crate) struct Chunk {
    pub(crate) spans: i64,
    /// Rows of the longest.
    pub(crate) rows: i64,
    /// Positions of the longest.
    pub(crate) positions: i64,
    /// Their rows, each span's padded to `rows`.
    pub(crate) queries: Rows,
    /// Entries of their positions, each span's padded to `positions`.
    pub(crate) entries: Tensor,
    /// `None`: plain causal attention.
    pub(crate) masks: Option<Masks>,
    /// Padded rows that exist; `None`: all.
    pub(crate) kept: Option<Tensor>,
}

/// A span and the first position that any of its rows sees.
struct Seen<'a> {
    span: &'a Span,
    from: usize,
}

impl Seen<'_> {
    fn positions(&self) -> usize {
        self.span.past + self.span.rows - self.from
    }
}

impl TorchSpans {
    pub(crate) fn new(pages: &TorchPages, spans: &[Span]) -> Result<Self, BackendError> {
        let mut views: Vec<(Sight, View)> = Vec::new();
        let decodes = spans.iter().all(|span| span.rows == 1);
        let mut kept_bytes = if decodes { DECODE_MASKS_BYTES } else { PREFILL_MASKS_BYTES };
        for layer in pages.layers() {
            let sight = Sight::of(&layer.paged.shape, layer.paged.table);
            if !views.iter().any(|(known, _)| *known == sight) {
                views.push((sight, View::new(pages, sight, spans, &mut kept_bytes)?));
            }
        }
        Ok(Self { views })
    }

    /// The view of a layer.
    pub(crate) fn view(&self, shape: &AttentionShape, table: usize) -> Result<&View, BackendError> {
        let sight = Sight::of(shape, table);
        let view = self.views.iter().find(|(known, _)| *known == sight);
        view.map(|(_, view)| view).ok_or(BackendError::Shape {
            what: "view of a layer",
            actual: 0,
            expected: 1,
        })
    }
}

impl View {
    /// Masks that are kept take their bytes off `kept_bytes`.
    fn new(
        pages: &TorchPages,
        sight: Sight,
        spans: &[Span],
        kept_bytes: &mut usize,
    ) -> Result<Self, BackendError> {
        let first_seen =
            |span: &Span| sight.window.map_or(0, |window| (span.past + 1).saturating_sub(window));
        let seen: Vec<Seen<'_>> = spans.iter().map(|span| Seen { span, from: first_seen(span) }).collect();
        let mut written = Vec::new();
        for Seen { span, .. } in &seen {
            for position in span.past..span.past + span.rows {
                written.push(entry(pages, sight, span, position)?);
            }
        }
        let groups = chunks_of(&seen, sight);
        let in_order = groups.len() == 1;
        let mut places = vec![0_i64; written.len()];
        let (mut chunks, mut next) = (Vec::with_capacity(groups.len()), 0);
        for group in &groups {
            for Seen { span, .. } in group {
                for place in places.iter_mut().skip(span.first).take(span.rows) {
                    *place = next;
                    next += 1;
                }
            }
            chunks.push(Chunk::new(pages, sight, group, kept_bytes)?);
        }
        let device = pages.device();
        let order = if in_order { None } else { Some(Tensor::from_slice(device, &places)?) };
        Ok(Self { written: Tensor::from_slice(device, &written)?, chunks, order })
    }
}

/// The entry of a position of `span`.
fn entry(pages: &TorchPages, sight: Sight, span: &Span, position: usize) -> Result<i64, BackendError> {
    let ids = span.table(sight.table);
    let (page, at) = (position / PAGE_POSITIONS, position % PAGE_POSITIONS);
    match ids.get(page) {
        Some(&id) if id != RELEASED && id < pages.count() => Ok(TorchPages::entry(id, at)),
        _ => Err(BackendError::Shape { what: "page", actual: page, expected: ids.len() }),
    }
}

/// Divides spans into chunks: all in one, in order, if memory allows; else the longest first.
fn chunks_of<'a, 'b>(seen: &'b [Seen<'a>], sight: Sight) -> Vec<Vec<&'b Seen<'a>>> {
    let fits = |spans: usize, rows: usize, positions: usize| {
        let positions = spans * positions.next_multiple_of(ALIGNED);
        let masked = if rows == 1 { positions } else { positions * rows * sight.repeated };
        let is_small =
            positions * sight.entry_bytes <= GATHERED_BYTES && masked * sight.element_bytes <= MASK_BYTES;
        spans <= 1 || is_small
    };
    let most = |of: fn(&Seen<'_>) -> usize| seen.iter().map(of).max().unwrap_or(0);
    if fits(seen.len(), most(|seen| seen.span.rows), most(|seen| seen.positions())) {
        return vec![seen.iter().collect()];
    }
    let mut sorted: Vec<&Seen<'_>> = seen.iter().collect();
    sorted.sort_by_key(|seen| std::cmp::Reverse((seen.span.rows, seen.positions())));
    let mut chunks: Vec<Vec<&Seen<'_>>> = Vec::new();
    let (mut rows, mut positions) = (0, 0);
    for seen in sorted {
        let (more_rows, more) = (rows.max(seen.span.rows), positions.max(seen.positions()));
        match chunks.last_mut().filter(|chunk| fits(chunk.len() + 1, more_rows, more)) {
            Some(chunk) => {
                chunk.push(seen);
                (rows, positions) = (more_rows, more);
            }
            None => {
                (rows, positions) = (seen.span.rows, seen.positions());
                chunks.push(vec![seen]);
            }
        }
    }
    chunks
}

impl Chunk {
    fn new(
        pages: &TorchPages,
        sight: Sight,
        seen: &[&Seen<'_>],
        kept_bytes: &mut usize,
    ) -> Result<Self, BackendError> {
        let device = pages.device();
        let longest_rows = seen.iter().map(|seen| seen.span.rows).max().unwrap_or(0);
        let longest = seen.iter().map(|seen| seen.positions()).max().unwrap_or(0);
        // From the beginning on, the rows of one span see what lies before them: no mask, and kernels for that.
        let is_causal = matches!(seen, [one] if one.from == 0 && one.span.past == 0)
            && sight.window.is_none_or(|window| longest <= window);
        let is_lone = !is_causal && longest_rows > 1 && longest_rows % KERNEL_ROWS == 1;
        let rows = longest_rows + usize::from(is_lone);
        let positions = if is_causal { longest } else { longest.next_multiple_of(ALIGNED) };
        let (mut queries, mut entries) = (Vec::new(), Vec::new());
        // For each row the last position that it sees, from the first that its span does.
        let mut last: Vec<i32> = Vec::new();
        let mut kept = Vec::new();
        for Seen { span, from } in seen {
            for row in 0..rows {
                if row < span.rows {
                    kept.push(queries.len() as i64);
                }
                // A row that does not exist computes what nothing reads.
                let row = row.min(span.rows - 1);
                queries.push((span.first + row) as i64);
                last.push((span.past + row - from) as i32);
            }
            for position in *from..span.past + span.rows {
                entries.push(entry(pages, sight, span, position)?);
            }
            let missing = positions - (span.past + span.rows - from);
            entries.extend(std::iter::repeat_n(pages.nowhere(), missing));
        }
        let is_padded = kept.len() < queries.len();
        let (spans, width) = (seen.len() as i64, positions as i64);
        let masks = match is_causal {
            true => None,
            false => {
                let repeated = if spans == 1 || rows == 1 { 1 } else { sight.repeated as i64 };
                let rows = MaskedRows { spans, rows: rows as i64, repeated, positions: width };
                let mut masks = Masks::new(pages.device(), pages.kind(), rows, &last, sight.window)?;
                masks.keep(kept_bytes)?;
                Some(masks)
            }
        };
        Ok(Self {
            spans,
            rows: rows as i64,
            positions: width,
            queries: Rows::new(device, &queries)?,
            entries: Tensor::from_slice(device, &entries)?,
            masks,
            kept: if is_padded { Some(Tensor::from_slice(device, &kept)?) } else { None },
        })
    }
}
