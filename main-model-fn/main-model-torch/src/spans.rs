//! Prepared attention of an iteration, made once for all layers: entries of the KV cache that the iteration writes,
//! entries that each attention call gathers, and masks.
//!
//! Spans of several sequences are attended to in one call, padded to the longest. Memory alone bounds a call: its gathered
//! keys and values and its mask. So the number of calls does not depend on the number of sequences.

use crate::library::Tensor;
use crate::masks::{MaskSizes, Masks};
use crate::pages::TorchPages;
use crate::rows::RowSelection;
use crate::workspace::{
    DECODE_MASKS_BYTES, GATHERED_BYTES, KERNEL_ROWS, MASK_BYTES, PREFILL_MASKS_BYTES, entry_bytes,
};
use main_model_fn::backend::{BackendError, RELEASED_PAGE, RowSpan};
use remoe_kernels::{AttentionShape, PAGE_POSITIONS};

/// Padded positions are a multiple of this. LibTorch's kernels take a mask with aligned rows without copying it.
const ALIGNED_POSITIONS: usize = 32;

/// Prepared attention of the spans of an iteration.
pub struct TorchSpans {
    plans: Vec<(PlanKey, AttentionPlan)>,
}

/// Properties of a layer that its attention plan depends on. Layers with the same properties share a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PlanKey {
    page_table: usize,
    window: Option<usize>,
    /// Mask rows for each row of a span: queries that share keys are rows of one head.
    mask_repeats: usize,
    entry_bytes: usize,
    element_bytes: usize,
}

impl PlanKey {
    fn new(shape: &AttentionShape, page_table: usize) -> Self {
        // With one head of keys, each query head has a mask of its own, which is a view.
        let mask_repeats = if shape.kv_heads == 1 { 1 } else { shape.group };
        let (entry_bytes, element_bytes) = (entry_bytes(shape), shape.dtype.bytes());
        Self { page_table, window: shape.window, mask_repeats, entry_bytes, element_bytes }
    }
}

/// Attention calls of one layer.
pub(crate) struct AttentionPlan {
    /// KV cache entries of the iteration's rows, in order.
    pub(crate) written_entries: Tensor,
    pub(crate) calls: Vec<AttentionCall>,
    /// Index of each row in the joined outputs of `calls`. `None`: the outputs are in the order of the rows.
    pub(crate) output_order: Option<Tensor>,
}

/// Spans of one attention call, padded to equal numbers of rows and positions.
pub(crate) struct AttentionCall {
    pub(crate) spans: i64,
    /// Rows of each span, padding included.
    pub(crate) rows: i64,
    /// Positions of each span, padding included.
    pub(crate) positions: i64,
    /// Rows of the queries: spans x `rows`.
    pub(crate) query_rows: RowSelection,
    /// KV cache entries to gather: spans x `positions`.
    pub(crate) gathered_entries: Tensor,
    /// `None`: causal attention from the first position on.
    pub(crate) masks: Option<Masks>,
    /// Indices of output rows that are not padding. `None`: all rows.
    pub(crate) valid_rows: Option<Tensor>,
}

/// A span with the positions that its rows attend to.
struct AttendedSpan<'a> {
    span: &'a RowSpan,
    /// First position that any row attends to.
    first_position: usize,
}

impl<'a> AttendedSpan<'a> {
    fn new(span: &'a RowSpan, window: Option<usize>) -> Self {
        let first_position = window.map_or(0, |window| (span.past + 1).saturating_sub(window));
        Self { span, first_position }
    }

    /// Number of positions that the rows attend to.
    fn positions(&self) -> usize {
        self.span.past + self.span.rows - self.first_position
    }
}

impl TorchSpans {
    pub(crate) fn new(pages: &TorchPages, spans: &[RowSpan]) -> Result<Self, BackendError> {
        let mut plans: Vec<(PlanKey, AttentionPlan)> = Vec::new();
        let decodes = spans.iter().all(|span| span.rows == 1);
        let mut mask_bytes_left = if decodes { DECODE_MASKS_BYTES } else { PREFILL_MASKS_BYTES };
        for layer in pages.layers() {
            let key = PlanKey::new(&layer.paged.shape, layer.paged.page_table);
            if !plans.iter().any(|(planned, _)| *planned == key) {
                plans.push((key, AttentionPlan::new(pages, key, spans, &mut mask_bytes_left)?));
            }
        }
        Ok(Self { plans })
    }

    /// Returns the plan of a layer with this `shape` and page table.
    pub(crate) fn plan(
        &self,
        shape: &AttentionShape,
        page_table: usize,
    ) -> Result<&AttentionPlan, BackendError> {
        let key = PlanKey::new(shape, page_table);
        let plan = self.plans.iter().find(|(planned, _)| *planned == key);
        plan.map(|(_, plan)| plan).ok_or(BackendError::Shape {
            what: "attention plan of a layer",
            actual: 0,
            expected: 1,
        })
    }
}

impl AttentionPlan {
    /// Plans the attention of `spans`. Subtracts the bytes of masks that are kept from `mask_bytes_left`.
    fn new(
        pages: &TorchPages,
        key: PlanKey,
        spans: &[RowSpan],
        mask_bytes_left: &mut usize,
    ) -> Result<Self, BackendError> {
        let attended: Vec<AttendedSpan<'_>> =
            spans.iter().map(|span| AttendedSpan::new(span, key.window)).collect();
        let mut written = Vec::new();
        for span in spans {
            for position in span.past..span.past + span.rows {
                written.push(entry_index(pages, key, span, position)?);
            }
        }
        let groups = divide_into_calls(&attended, key);
        let is_in_order = groups.len() == 1;
        let mut output_order = vec![0_i64; written.len()];
        let (mut calls, mut next_output) = (Vec::with_capacity(groups.len()), 0);
        for group in &groups {
            for AttendedSpan { span, .. } in group {
                for output in output_order.iter_mut().skip(span.first_row).take(span.rows) {
                    *output = next_output;
                    next_output += 1;
                }
            }
            calls.push(AttentionCall::new(pages, key, group, mask_bytes_left)?);
        }
        let device = pages.device();
        let output_order = if is_in_order { None } else { Some(Tensor::from_slice(device, &output_order)?) };
        Ok(Self { written_entries: Tensor::from_slice(device, &written)?, calls, output_order })
    }
}

/// Returns the KV cache entry of `position` of `span`.
fn entry_index(
    pages: &TorchPages,
    key: PlanKey,
    span: &RowSpan,
    position: usize,
) -> Result<i64, BackendError> {
    let page_ids = span.page_table(key.page_table);
    let (page, offset) = (position / PAGE_POSITIONS, position % PAGE_POSITIONS);
    match page_ids.get(page) {
        Some(&id) if id != RELEASED_PAGE && id < pages.count() => Ok(TorchPages::entry_index(id, offset)),
        _ => Err(BackendError::Shape { what: "page", actual: page, expected: page_ids.len() }),
    }
}

/// Divides spans into attention calls. If memory allows, all spans are in one call, in their order. Otherwise spans are
/// sorted by their length, so that padding is short.
fn divide_into_calls<'a, 'b>(
    attended: &'b [AttendedSpan<'a>],
    key: PlanKey,
) -> Vec<Vec<&'b AttendedSpan<'a>>> {
    let fits = |spans: usize, rows: usize, positions: usize| {
        let positions = spans * positions.next_multiple_of(ALIGNED_POSITIONS);
        let mask_elements = if rows == 1 { positions } else { positions * rows * key.mask_repeats };
        let is_small =
            positions * key.entry_bytes <= GATHERED_BYTES && mask_elements * key.element_bytes <= MASK_BYTES;
        // One span is a call of its own, whatever it takes: the workspace has memory for the longest.
        spans <= 1 || is_small
    };
    let most = |size: fn(&AttendedSpan<'_>) -> usize| attended.iter().map(size).max().unwrap_or(0);
    if fits(attended.len(), most(|attended| attended.span.rows), most(|attended| attended.positions())) {
        return vec![attended.iter().collect()];
    }
    let mut sorted: Vec<&AttendedSpan<'_>> = attended.iter().collect();
    sorted.sort_by_key(|attended| std::cmp::Reverse((attended.span.rows, attended.positions())));
    let mut calls: Vec<Vec<&AttendedSpan<'_>>> = Vec::new();
    let (mut rows, mut positions) = (0, 0);
    for attended in sorted {
        let (padded_rows, padded_positions) =
            (rows.max(attended.span.rows), positions.max(attended.positions()));
        match calls.last_mut().filter(|call| fits(call.len() + 1, padded_rows, padded_positions)) {
            Some(call) => {
                call.push(attended);
                (rows, positions) = (padded_rows, padded_positions);
            }
            None => {
                (rows, positions) = (attended.span.rows, attended.positions());
                calls.push(vec![attended]);
            }
        }
    }
    calls
}

impl AttentionCall {
    fn new(
        pages: &TorchPages,
        key: PlanKey,
        attended: &[&AttendedSpan<'_>],
        mask_bytes_left: &mut usize,
    ) -> Result<Self, BackendError> {
        let device = pages.device();
        let most_rows = attended.iter().map(|attended| attended.span.rows).max().unwrap_or(0);
        let most_positions = attended.iter().map(|attended| attended.positions()).max().unwrap_or(0);
        // A prompt from its first position on needs no mask: kernels have a causal mode.
        let is_causal = matches!(attended, [one] if one.first_position == 0 && one.span.past == 0)
            && key.window.is_none_or(|window| most_positions <= window);
        // See `KERNEL_ROWS`.
        let has_lone_row = !is_causal && most_rows > 1 && most_rows % KERNEL_ROWS == 1;
        let rows = most_rows + usize::from(has_lone_row);
        let positions =
            if is_causal { most_positions } else { most_positions.next_multiple_of(ALIGNED_POSITIONS) };
        let (mut query_rows, mut gathered) = (Vec::new(), Vec::new());
        // Last position that each row attends to, counted from the span's first.
        let mut last_positions: Vec<i32> = Vec::new();
        let mut valid_rows = Vec::new();
        for AttendedSpan { span, first_position } in attended {
            for row in 0..rows {
                if row < span.rows {
                    valid_rows.push(query_rows.len() as i64);
                }
                // Padding repeats the last row. Its output is dropped.
                let row = row.min(span.rows - 1);
                query_rows.push((span.first_row + row) as i64);
                last_positions.push((span.past + row - first_position) as i32);
            }
            for position in *first_position..span.past + span.rows {
                gathered.push(entry_index(pages, key, span, position)?);
            }
            let padding = positions - (span.past + span.rows - first_position);
            gathered.extend(std::iter::repeat_n(pages.padding_entry(), padding));
        }
        let is_padded = valid_rows.len() < query_rows.len();
        let (spans, rows, positions) = (attended.len() as i64, rows as i64, positions as i64);
        let masks = match is_causal {
            true => None,
            false => {
                let repeats = if spans == 1 || rows == 1 { 1 } else { key.mask_repeats as i64 };
                let sizes = MaskSizes { spans, rows, repeats, positions };
                let mut masks = Masks::new(device, pages.kind(), sizes, &last_positions, key.window)?;
                masks.keep_within(mask_bytes_left)?;
                Some(masks)
            }
        };
        Ok(Self {
            spans,
            rows,
            positions,
            query_rows: RowSelection::new(device, &query_rows)?,
            gathered_entries: Tensor::from_slice(device, &gathered)?,
            masks,
            valid_rows: if is_padded { Some(Tensor::from_slice(device, &valid_rows)?) } else { None },
        })
    }
}
