//! Weights as fp8 e4m3 with a scale for every block of a matrix: codes in the order in which the kernels read them.
//!
//! A weight is the float32 product of its code and its scale, in bfloat16 rounded once to that, to nearest, ties to
//! even: as DeepSeek's `weight_dequant` computes it, and as a decoded checkpoint holds it. It is decoded at each use;
//! every sum has the bits of decoded weights.
//!
//! A step of K has 32 codes of each of a panel's 64 columns, `[32][64]` bytes, then 16 float32: the scales of four
//! columns each, times 2^8, because a code becomes a number by way of binary16, in whose exponent it means 2^-8 of
//! itself. The end of a row is filled up with codes that add nothing to a sum, not even to the sign of a zero.

use crate::panels::Panels;
use crate::quantise::GROUP;
use crate::shape::{PANEL, SCALE_COLUMNS, step_words};
use crate::{Dtype, KernelError, WeightFormat};

/// Factor of stored scales: 2^8.
const UNIT: f32 = 256.0;
/// Scales from here on have no product that is tiny before it is rounded: 2^-100.
const LEAST: f32 = f32::from_bits((127 - 100) << 23);
/// Scales below this have no product that is too large: 2^119, as codes reach 448.
const LARGEST: f32 = f32::from_bits((127 + 119) << 23);

/// The scales of a matrix whose weights are fp8.
#[derive(Clone, Debug)]
pub struct Fp8Scales {
    values: Vec<f32>,
    rows: usize,
    columns: usize,
    block: [usize; 2],
}

impl Fp8Scales {
    /// `values` has one for each block of `block` rows and columns, row after row of blocks, the last ones of either
    /// cut off by a matrix of `rows` x `columns`.
    ///
    /// # Errors
    /// [`KernelError::Blocks`] for blocks that are no multiples of 4 rows and 32 columns, for values that are not as
    /// many as blocks, and for one that is not a number between 2^-100 and 2^119, or zero, of either sign.
    pub fn new(
        values: Vec<f32>,
        rows: usize,
        columns: usize,
        block: [usize; 2],
    ) -> Result<Self, KernelError> {
        let refused = |why| Err(KernelError::Blocks { block, why });
        let [height, width] = block;
        if height == 0 || width == 0 || !height.is_multiple_of(SCALE_COLUMNS) || !width.is_multiple_of(GROUP)
        {
            return refused(format!("expected blocks of multiples of {SCALE_COLUMNS} x {GROUP}"));
        }
        let blocks = rows.div_ceil(height) * columns.div_ceil(width);
        if values.len() != blocks {
            return refused(format!(
                "expected {blocks} scales for a matrix of {rows} x {columns}, got {}",
                values.len()
            ));
        }
        let is_sound = |value: f32| value == 0.0 || (LEAST..LARGEST).contains(&value.abs());
        if let Some(value) = values.iter().copied().find(|value| !is_sound(*value)) {
            return refused(format!("unsupported scale {value:e}"));
        }
        Ok(Self { values, rows, columns, block })
    }

    /// # Errors
    /// [`KernelError::Blocks`] where they are of a matrix of another size.
    pub(crate) fn expect(&self, rows: usize, columns: usize) -> Result<(), KernelError> {
        if (self.rows, self.columns) == (rows, columns) {
            return Ok(());
        }
        let why =
            format!("expected scales of {rows} x {columns} weights, got {} x {}", self.rows, self.columns);
        Err(KernelError::Blocks { block: self.block, why })
    }

    fn of(&self, row: usize, column: usize) -> f32 {
        let per_row = self.columns.div_ceil(self.block[1]);
        self.values[row / self.block[0] * per_row + column / self.block[1]]
    }
}

/// Writes whole rows of `columns` codes from `first_row` on into `packed`, which begins with the first panel.
pub(crate) fn write(
    packed: &mut [u32],
    panels: Panels,
    first_row: usize,
    columns: usize,
    codes: &[u8],
    scales: &Fp8Scales,
) {
    const WORDS: usize = step_words(Dtype::Bf16, WeightFormat::Fp8);
    const LINE: usize = PANEL / 4;
    let (mut row, mut rest) = (first_row, codes);
    while !rest.is_empty() {
        // Columns whose codes share words, and scales.
        let at = row % SCALE_COLUMNS;
        let count = (rest.len() / columns).min(SCALE_COLUMNS - at);
        let (group, after) = rest.split_at(count * columns);
        let column = row % panels.columns + panels.shift;
        let panel = &mut packed[row / panels.columns * panels.panel_words..][..panels.panel_words];
        let given = u32::MAX >> (32 - 8 * count) << (8 * at);
        for (index, step) in panel.chunks_exact_mut(WORDS).enumerate() {
            let first = index * GROUP;
            let scale = scales.of(row, first);
            step[GROUP * LINE + column / SCALE_COLUMNS] = (scale * UNIT).to_bits();
            // Minus zero, whose products with zeros leave every sum as it is.
            let nothing = if scale.is_sign_negative() { 0x00 } else { 0x80 };
            for (k, line) in (first..).zip(step.chunks_exact_mut(LINE).take(GROUP)) {
                let mut word = 0;
                for (r, codes) in group.chunks_exact(columns).enumerate() {
                    let code = match codes.get(k) {
                        Some(code) => *code,
                        // The zero that decoded rows of odd length have appended, too.
                        None if k == columns && columns % 2 == 1 => nothing ^ 0x80,
                        None => nothing,
                    };
                    word |= u32::from(code) << (8 * (at + r));
                }
                let line = &mut line[column / 4];
                *line = *line & !given | word;
            }
        }
        row += count;
        rest = after;
    }
}
