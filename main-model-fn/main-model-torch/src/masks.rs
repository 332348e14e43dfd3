//! Masks of attention: terms that are added to scores, so that a row attends to the positions before it alone.

use crate::library::{Kind, Tensor, TorchDevice};
use crate::workspace::{KERNEL_ROWS, MASK_BYTES};
use main_model_fn::backend::BackendError;
use std::ops::Range;
use std::sync::Arc;

/// Term that is added to the score of a masked position. Finite, so that no sum becomes NaN.
const MASKED_SCORE: f64 = -1e30;

/// Sizes of the scores of one attention call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaskSizes {
    pub(crate) spans: i64,
    /// Rows of each span, padding included.
    pub(crate) rows: i64,
    /// Consecutive repetitions of each row: queries that share keys are rows of one head.
    pub(crate) repeats: i64,
    pub(crate) positions: i64,
}

/// Mask of one attention call, in blocks of rows. A block has at most [`MASK_BYTES`], or [`KERNEL_ROWS`] rows.
///
/// A call with several spans has one block. Blocks are kept for all layers within the memory that [`Masks::keep_within`] is
/// given. Each layer makes the others again, which takes little beside attention: that reads a mask once for every head.
pub(crate) struct Masks {
    sizes: MaskSizes,
    kind: Kind,
    /// Last position that each row attends to, counted from its span's first: spans x 1 x rows x 1, 32 bits.
    last_positions: Tensor,
    /// First position that each row attends to, if layers have a window. Sizes as of `last_positions`.
    first_positions: Option<Tensor>,
    /// Numbers of the positions, from 0 on.
    positions: Tensor,
    blocks: Vec<MaskBlock>,
}

struct MaskBlock {
    rows: Range<i64>,
    kept: Option<Tensor>,
}

impl Masks {
    /// `last_positions` has the last position that each row attends to, counted from its span's first. No block is made yet.
    pub(crate) fn new(
        device: &Arc<TorchDevice>,
        kind: Kind,
        sizes: MaskSizes,
        last_positions: &[i32],
        window: Option<usize>,
    ) -> Result<Self, BackendError> {
        let size = [sizes.spans, 1, sizes.rows, 1];
        let last_positions = Tensor::from_slice(device, last_positions)?.reshape(&size)?;
        let first_positions =
            window.map(|window| last_positions.add_integer(1 - window as i64)).transpose()?;
        let positions = Tensor::arange(device, sizes.positions)?;
        let row_bytes = (sizes.positions as usize * kind.elt_size_in_bytes()).max(1);
        let block_rows = (MASK_BYTES / row_bytes / KERNEL_ROWS * KERNEL_ROWS).max(KERNEL_ROWS) as i64;
        let step = if sizes.spans == 1 { block_rows } else { sizes.rows };
        let starts = (0..sizes.rows).step_by(step as usize);
        let blocks = starts.map(|start| MaskBlock { rows: start..sizes.rows.min(start + step), kept: None });
        Ok(Self { sizes, kind, last_positions, first_positions, positions, blocks: blocks.collect() })
    }

    /// Makes and keeps blocks that fit in `bytes`, and subtracts their bytes.
    pub(crate) fn keep_within(&mut self, bytes: &mut usize) -> Result<(), BackendError> {
        for index in 0..self.blocks.len() {
            let rows = &self.blocks[index].rows;
            let elements =
                self.sizes.spans * (rows.end - rows.start) * self.sizes.repeats * self.sizes.positions;
            if let Some(left) = bytes.checked_sub(elements as usize * self.kind.elt_size_in_bytes()) {
                self.blocks[index].kept = Some(self.make(rows)?);
                *bytes = left;
            }
        }
        Ok(())
    }

    /// Returns the index and rows of each block, in order.
    pub(crate) fn blocks(&self) -> impl ExactSizeIterator<Item = (usize, &Range<i64>)> {
        self.blocks.iter().map(|block| &block.rows).enumerate()
    }

    /// Returns the mask of block `index`: spans x 1 x (rows x repeats) x positions, in the compute dtype.
    pub(crate) fn mask(&self, index: usize) -> Result<Tensor, BackendError> {
        let block = self.blocks.get(index);
        let block =
            block.ok_or(BackendError::Shape { what: "mask", actual: index, expected: self.blocks.len() })?;
        match &block.kept {
            Some(mask) => Ok(mask.alias()),
            None => self.make(&block.rows),
        }
    }

    fn make(&self, rows: &Range<i64>) -> Result<Tensor, BackendError> {
        let MaskSizes { spans, repeats, positions, .. } = self.sizes;
        let count = rows.end - rows.start;
        let of_block = |rows_of_call: &Tensor| rows_of_call.narrow(2, rows.start, count);
        let is_masked = self.positions.greater(&of_block(&self.last_positions)?)?;
        if let Some(first) = &self.first_positions {
            is_masked.logical_or_(&self.positions.less(&of_block(first)?)?)?;
        }
        let mask = is_masked.to_kind(self.kind)?;
        drop(is_masked);
        mask.mul_scalar_(MASKED_SCORE)?;
        if repeats == 1 {
            return Ok(mask);
        }
        let size = [spans, 1, count, repeats, positions];
        mask.unsqueeze(3)?.expand(&size)?.reshape(&[spans, 1, count * repeats, positions])
    }
}
