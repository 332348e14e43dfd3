//! Packing of fp8 weights: e4m3 codes with a float32 scale for every block of a matrix.
//!
//! A weight is the float32 product of its code and its scale. In bfloat16 the product is rounded once, to nearest, ties
//! to even: as in DeepSeek's `weight_dequant`, and as in a decoded checkpoint. It is decoded at each use, and every sum
//! has the bits of decoded weights.
//!
//! A step of K has 32 codes of each of a panel's 64 columns, `[32][64]` bytes, then 16 float32 scales of four columns
//! each. Stored scales are multiplied by 2^8: a code is decoded by way of binary16, which makes it 2^-8 of its value.
//! The end of a row is padded with codes that change no sum, not even the sign of a zero.

use crate::panels::PanelLayout;
use crate::quantise::GROUP;
use crate::shape::{PANEL, SCALE_COLUMNS, step_words};
use crate::{Dtype, KernelError, WeightFormat};

/// Factor of stored scales: 2^8.
const STORED_SCALE_FACTOR: f32 = 256.0;
/// Smallest scale, 2^-100: its products with codes are normal numbers before they are rounded.
const MIN_SCALE: f32 = f32::from_bits((127 - 100) << 23);
/// Upper bound of scales, 2^119: products with codes, at most 448, stay finite.
const MAX_SCALE: f32 = f32::from_bits((127 + 119) << 23);

/// The scales of a matrix whose weights are fp8.
#[derive(Clone, Debug)]
pub struct Fp8Scales {
    values: Vec<f32>,
    rows: usize,
    columns: usize,
    block: [usize; 2],
}

impl Fp8Scales {
    /// Takes one scale for each block of `block` rows and columns of a `rows` x `columns` matrix, in row-major order.
    /// Blocks at the right and bottom edges may be partial.
    ///
    /// # Errors
    /// [`KernelError::Blocks`] if the block size is not a multiple of 4 rows and 32 columns, if there are not as many
    /// values as blocks, or if the magnitude of a scale is neither zero nor between 2^-100 and 2^119.
    pub fn new(
        values: Vec<f32>,
        rows: usize,
        columns: usize,
        block: [usize; 2],
    ) -> Result<Self, KernelError> {
        let invalid = |why| Err(KernelError::Blocks { block, why });
        let [height, width] = block;
        if height == 0 || width == 0 || !height.is_multiple_of(SCALE_COLUMNS) || !width.is_multiple_of(GROUP)
        {
            return invalid(format!("expected blocks of multiples of {SCALE_COLUMNS} x {GROUP}"));
        }
        let blocks = rows.div_ceil(height) * columns.div_ceil(width);
        if values.len() != blocks {
            return invalid(format!(
                "expected {blocks} scales for a matrix of {rows} x {columns}, got {}",
                values.len()
            ));
        }
        let is_supported = |value: f32| value == 0.0 || (MIN_SCALE..MAX_SCALE).contains(&value.abs());
        if let Some(value) = values.iter().copied().find(|value| !is_supported(*value)) {
            return invalid(format!("unsupported scale {value:e}"));
        }
        Ok(Self { values, rows, columns, block })
    }

    /// Checks that the scales belong to a matrix of `rows` x `columns`.
    ///
    /// # Errors
    /// [`KernelError::Blocks`] if the matrix has another size.
    pub(crate) fn check_size(&self, rows: usize, columns: usize) -> Result<(), KernelError> {
        if (self.rows, self.columns) == (rows, columns) {
            return Ok(());
        }
        let why =
            format!("expected scales of {rows} x {columns} weights, got {} x {}", self.rows, self.columns);
        Err(KernelError::Blocks { block: self.block, why })
    }

    /// Returns the scale of the weight at `row` and `column`.
    fn scale_at(&self, row: usize, column: usize) -> f32 {
        let per_row = self.columns.div_ceil(self.block[1]);
        self.values[row / self.block[0] * per_row + column / self.block[1]]
    }
}

/// Packs whole rows of `columns` codes, from row `first_row` of the matrix on. `packed` begins with the first panel.
pub(crate) fn write(
    packed: &mut [u32],
    panels: PanelLayout,
    first_row: usize,
    columns: usize,
    codes: &[u8],
    scales: &Fp8Scales,
) {
    const WORDS: usize = step_words(Dtype::Bf16, WeightFormat::Fp8);
    const LINE: usize = PANEL / 4;
    let (mut row, mut rest) = (first_row, codes);
    while !rest.is_empty() {
        // Up to four rows become neighbouring columns that share words and scales.
        let position = row % SCALE_COLUMNS;
        let count = (rest.len() / columns).min(SCALE_COLUMNS - position);
        let (group, after) = rest.split_at(count * columns);
        let column = row % panels.columns + panels.first_column;
        let panel = &mut packed[row / panels.columns * panels.panel_words..][..panels.panel_words];
        let written = u32::MAX >> (32 - 8 * count) << (8 * position);
        for (index, step) in panel.chunks_exact_mut(WORDS).enumerate() {
            let first = index * GROUP;
            let scale = scales.scale_at(row, first);
            step[GROUP * LINE + column / SCALE_COLUMNS] = (scale * STORED_SCALE_FACTOR).to_bits();
            // The code whose weight is minus zero: its products with zeros leave every sum as it is.
            let padding = if scale.is_sign_negative() { 0x00 } else { 0x80 };
            for (k, line) in (first..).zip(step.chunks_exact_mut(LINE).take(GROUP)) {
                let mut word = 0;
                for (r, codes) in group.chunks_exact(columns).enumerate() {
                    let code = match codes.get(k) {
                        Some(code) => *code,
                        // Decoded rows of odd length have a plus zero appended.
                        None if k == columns && columns % 2 == 1 => padding ^ 0x80,
                        None => padding,
                    };
                    word |= u32::from(code) << (8 * (position + r));
                }
                let line = &mut line[column / 4];
                *line = *line & !written | word;
            }
        }
        row += count;
        rest = after;
    }
}
