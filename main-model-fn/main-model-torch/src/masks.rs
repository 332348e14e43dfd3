//! Masks of attention: terms that are added to scores, so that rows see no position that they must not.

use crate::library::{Kind, Tensor, TorchDevice};
use crate::workspace::{KERNEL_ROWS, MASK_BYTES};
use main_model_fn::backend::BackendError;
use std::ops::Range;
use std::sync::Arc;

/// Term that is added to the score of a position that a row does not see. Finite, so that no sum becomes NaN.
const UNSEEN: f64 = -1e30;

/// Sizes of the scores of one chunk of spans.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaskedRows {
    pub(crate) spans: i64,
    /// Rows of each span.
    pub(crate) rows: i64,
    /// Repetitions of each row, one after the other: queries that share keys are rows of one head.
    pub(crate) repeated: i64,
    pub(crate) positions: i64,
}

/// The mask of one chunk of spans, in blocks of rows so that none has more than [`MASK_BYTES`] or [`KERNEL_ROWS`] rows.
///
/// Several spans have one block. Blocks are kept for all layers while the iteration has memory for them. Others are made
/// again for each layer: a few calls that write as many bytes, beside attention that reads each of them for every head.
pub(crate) struct Masks {
    sizes: MaskedRows,
    kind: Kind,
    /// Last position that each row sees, from the first that its span does: spans x 1 x rows x 1, 32 bits.
    last: Tensor,
    /// First position that each row sees, where layers have a window.
    first: Option<Tensor>,
    /// Positions from 0 on.
    positions: Tensor,
    blocks: Vec<MaskBlock>,
}

struct MaskBlock {
    rows: Range<i64>,
    kept: Option<Tensor>,
}

impl Masks {
    /// `last` has the last position that each row sees, from the first that its span does. Nothing is kept yet.
    pub(crate) fn new(
        device: &Arc<TorchDevice>,
        kind: Kind,
        sizes: MaskedRows,
        last: &[i32],
        window: Option<usize>,
    ) -> Result<Self, BackendError> {
        let last = Tensor::from_slice(device, last)?.reshape(&[sizes.spans, 1, sizes.rows, 1])?;
        let first = window.map(|window| last.add_whole(1 - window as i64)).transpose()?;
        let positions = Tensor::arange(device, sizes.positions)?;
        let row_bytes = (sizes.positions as usize * kind.elt_size_in_bytes()).max(1);
        let most_rows = (MASK_BYTES / row_bytes / KERNEL_ROWS * KERNEL_ROWS).max(KERNEL_ROWS) as i64;
        let step = if sizes.spans == 1 { most_rows } else { sizes.rows };
        let starts = (0..sizes.rows).step_by(step as usize);
        let blocks = starts.map(|start| MaskBlock { rows: start..sizes.rows.min(start + step), kept: None });
        Ok(Self { sizes, kind, last, first, positions, blocks: blocks.collect() })
    }

    /// Makes the masks that fit in `bytes`, keeps them and takes their bytes off.
    pub(crate) fn keep(&mut self, bytes: &mut usize) -> Result<(), BackendError> {
        for index in 0..self.blocks.len() {
            let rows = &self.blocks[index].rows;
            let elements =
                self.sizes.spans * (rows.end - rows.start) * self.sizes.repeated * self.sizes.positions;
            if let Some(left) = bytes.checked_sub(elements as usize * self.kind.elt_size_in_bytes()) {
                self.blocks[index].kept = Some(self.made(rows)?);
                *bytes = left;
            }
        }
        Ok(())
    }

    /// Blocks of rows, in order.
    pub(crate) fn blocks(&self) -> impl ExactSizeIterator<Item = (usize, &Range<i64>)> {
        self.blocks.iter().map(|block| &block.rows).enumerate()
    }

    /// Returns the mask of block `index`: spans x 1 x (rows x repetitions) x positions.
    pub(crate) fn mask(&self, index: usize) -> Result<Tensor, BackendError> {
        let block = self.blocks.get(index);
        let block =
            block.ok_or(BackendError::Shape { what: "mask", actual: index, expected: self.blocks.len() })?;
        match &block.kept {
            Some(mask) => Ok(mask.alias()),
            None => self.made(&block.rows),
        }
    }

    fn made(&self, rows: &Range<i64>) -> Result<Tensor, BackendError> {
        let MaskedRows { spans, repeated, positions, .. } = self.sizes;
        let count = rows.end - rows.start;
        let of_rows = |all: &Tensor| all.narrow(2, rows.start, count);
        let unseen = self.positions.greater(&of_rows(&self.last)?)?;
        if let Some(first) = &self.first {
            unseen.logical_or_(&self.positions.less(&of_rows(first)?)?)?;
        }
        let mask = unseen.to_kind(self.kind)?;
        drop(unseen);
        mask.mul_scalar_(UNSEEN)?;
        if repeated == 1 {
            return Ok(mask);
        }
        let size = [spans, 1, count, repeated, positions];
        mask.unsqueeze(3)?.expand(&size)?.reshape(&[spans, 1, count * repeated, positions])
    }
}
