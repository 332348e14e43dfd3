//! Prepared attention of an iteration, made once for all layers: where new keys and values are written, which entries
//! are gathered for which rows, and what each row sees.
//!
//! Spans are attended to together, padded to the longest. They are divided into chunks by memory alone: one call has as
//! many spans as its gathered keys and values and its mask have room for, so that the number of calls does not depend
//! on how many spans there are.

use crate::library::Tensor;
use crate::pages::TorchPages;
use crate::rows::Rows;
use main_model_fn::backend::{BackendError, RELEASED_PAGE, RowSpan};
use remoe_kernels::{AttentionShape, PAGE_POSITIONS};

/// Most bytes that are gathered of the cache for a chunk of several spans.
const GATHERED_BYTES: usize = 128 << 20;
/// Most elements of the mask of a chunk of several spans.
const MASKED: usize = 32 << 20;
/// Positions of a chunk are a multiple of this: kernels take masks so aligned as they are.
const ALIGNED: usize = 32;
/// Term that is added to the score of a position that a row does not see. Finite, so that no sum becomes NaN.
const UNSEEN: f64 = -1e30;

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
}

impl Sight {
    fn of(shape: &AttentionShape, table: usize) -> Self {
        // All heads share the keys of one: these stand for those of each without a copy.
        let repeated = if shape.kv_heads == 1 { 1 } else { shape.group };
        Self { table, window: shape.window, repeated, entry_bytes: shape.page_bytes() / PAGE_POSITIONS }
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
    /// spans x 1 x rows (or 1) x positions, in the compute dtype; each row is repeated as the layer's sight says if there
    /// are several spans. `None`: plain causal attention.
    pub(crate) mask: Option<Tensor>,
    /// Padded rows that exist; `None`: all.
    pub(crate) kept: Option<Tensor>,
}

/// A span and the first position that any of its rows sees.
struct Seen<'a> {
    span: &'a RowSpan,
    from: usize,
}

impl Seen<'_> {
    fn positions(&self) -> usize {
        self.span.past + self.span.rows - self.from
    }
}

impl TorchSpans {
    pub(crate) fn new(pages: &TorchPages, spans: &[RowSpan]) -> Result<Self, BackendError> {
        let mut views: Vec<(Sight, View)> = Vec::new();
        for layer in pages.layers() {
            let sight = Sight::of(&layer.paged.shape, layer.paged.page_table);
            if !views.iter().any(|(known, _)| *known == sight) {
                views.push((sight, View::new(pages, sight, spans)?));
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
    fn new(pages: &TorchPages, sight: Sight, spans: &[RowSpan]) -> Result<Self, BackendError> {
        let first_seen =
            |span: &RowSpan| sight.window.map_or(0, |window| (span.past + 1).saturating_sub(window));
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
                for place in places.iter_mut().skip(span.first_row).take(span.rows) {
                    *place = next;
                    next += 1;
                }
            }
            chunks.push(Chunk::new(pages, sight, group)?);
        }
        let device = pages.device();
        let order = if in_order { None } else { Some(Tensor::from_slice(device, &places)?) };
        Ok(Self { written: Tensor::from_slice(device, &written)?, chunks, order })
    }
}

/// The entry of a position of `span`.
fn entry(pages: &TorchPages, sight: Sight, span: &RowSpan, position: usize) -> Result<i64, BackendError> {
    let ids = span.page_table(sight.table);
    let (page, at) = (position / PAGE_POSITIONS, position % PAGE_POSITIONS);
    match ids.get(page) {
        Some(&id) if id != RELEASED_PAGE && id < pages.count() => Ok(TorchPages::entry(id, at)),
        _ => Err(BackendError::Shape { what: "page", actual: page, expected: ids.len() }),
    }
}

/// Divides spans into chunks: all in one, in order, if memory allows; else the longest first.
fn chunks_of<'a, 'b>(seen: &'b [Seen<'a>], sight: Sight) -> Vec<Vec<&'b Seen<'a>>> {
    let fits = |spans: usize, rows: usize, positions: usize| {
        let positions = spans * positions.next_multiple_of(ALIGNED);
        let masked = if rows == 1 { positions } else { positions * rows * sight.repeated };
        spans <= 1 || (positions * sight.entry_bytes <= GATHERED_BYTES && masked <= MASKED)
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

/// Rows of a block of LibTorch's memory-efficient attention divide by this. A lone row in the last block reads a wrong
/// mask where heads share keys (pytorch issue 191937, fixed after 2.11).
const KERNEL_ROWS: usize = 32;

impl Chunk {
    fn new(pages: &TorchPages, sight: Sight, seen: &[&Seen<'_>]) -> Result<Self, BackendError> {
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
                queries.push((span.first_row + row) as i64);
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
        let mask = match is_causal {
            true => None,
            false => Some(mask(pages, sight, [spans, rows as i64, width], &last)?),
        };
        Ok(Self {
            spans,
            rows: rows as i64,
            positions: width,
            queries: Rows::new(device, &queries)?,
            entries: Tensor::from_slice(device, &entries)?,
            mask,
            kept: if is_padded { Some(Tensor::from_slice(device, &kept)?) } else { None },
        })
    }
}

/// Terms that are added to scores: spans x 1 x rows x positions, each row repeated if there are several of several spans.
fn mask(
    pages: &TorchPages,
    sight: Sight,
    [spans, rows, positions]: [i64; 3],
    last: &[i32],
) -> Result<Tensor, BackendError> {
    let device = pages.device();
    let last = Tensor::from_slice(device, last)?.reshape(&[spans, 1, rows, 1])?;
    let each = Tensor::arange(device, positions)?;
    let mut unseen = each.greater(&last)?;
    if let Some(window) = sight.window {
        let before = each.less(&last.add_whole(1 - window as i64)?)?;
        unseen = unseen.logical_or(&before)?;
    }
    let mask = unseen.to_kind(pages.kind())?.mul_scalar(UNSEEN)?;
    let repeated = sight.repeated as i64;
    if spans == 1 || rows == 1 || repeated == 1 {
        return Ok(mask);
    }
    let size = [spans, 1, rows, repeated, positions];
    mask.unsqueeze(3)?.expand(&size)?.reshape(&[spans, 1, rows * repeated, positions])
}
