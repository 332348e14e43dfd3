//! Packing of unquantised and quantised weights: rows of a matrix become columns of panels.

use crate::numerics::{from_bf16, from_f16, to_bf16};
use crate::quantise::{GROUP, WeightGroup};
use crate::shape::{PANEL, step_words};
use crate::transpose::{TILE, transpose_tiles};
use crate::{Dtype, NumericsClass, StoredDtype, WeightFormat};

/// Placement of a matrix's rows in panels: each row becomes a column of one panel.
#[derive(Clone, Copy)]
pub(crate) struct PanelLayout {
    /// 32-bit words of a panel.
    pub(crate) panel_words: usize,
    /// Rows of the matrix that a panel holds.
    pub(crate) columns: usize,
    /// Column of the panel at which these rows begin.
    pub(crate) first_column: usize,
}

impl PanelLayout {
    /// Packs whole rows of `row_bytes` bytes, from row `first_row` of the matrix on. `packed` begins with the first panel.
    pub(crate) fn write(
        self,
        packed: &mut [u32],
        stored: StoredDtype,
        class: NumericsClass,
        first_row: usize,
        row_bytes: usize,
        bytes: &[u8],
    ) {
        let rows = StoredRows { first: first_row, row_bytes, bytes };
        if class.weights.has_integers() {
            let words = step_words(class.dtype, class.weights);
            return match stored {
                StoredDtype::F32 => self.quantise(packed, rows, class.weights, words, f32::from_le_bytes),
                StoredDtype::Bf16 => {
                    let decode = |half| from_bf16(u16::from_le_bytes(half));
                    self.quantise(packed, rows, class.weights, words, decode);
                }
                StoredDtype::F16 => {
                    let decode = |half| from_f16(u16::from_le_bytes(half));
                    self.quantise(packed, rows, class.weights, words, decode);
                }
            };
        }
        // A separate loop for each pair of types, so that the conversion is chosen outside of the loop.
        match (stored, class.dtype) {
            (StoredDtype::Bf16, Dtype::Bf16) => self.transpose(packed, rows, transpose_tiles, read_pair),
            (StoredDtype::F32, Dtype::F32) => self.transpose(packed, rows, transpose_tiles, read_word),
            (StoredDtype::F32, Dtype::Bf16) => {
                let decode = |row: &[u8], m| round_pair(m, |k| f32::from_bits(read_word(row, k)));
                self.transpose(packed, rows, no_tiles, decode);
            }
            (StoredDtype::F16, Dtype::Bf16) => {
                let decode = |row: &[u8], m| round_pair(m, |k| from_f16(read_half(row, k)));
                self.transpose(packed, rows, no_tiles, decode);
            }
            (StoredDtype::Bf16, Dtype::F32) => {
                self.transpose(packed, rows, no_tiles, |row, m| from_bf16(read_half(row, m)).to_bits());
            }
            (StoredDtype::F16, Dtype::F32) => {
                self.transpose(packed, rows, no_tiles, |row, m| from_f16(read_half(row, m)).to_bits());
            }
        }
    }

    /// Packs unquantised rows. `decode(row, m)` returns word `m` of a packed column: a pair of bfloat16, or one float32;
    /// zero beyond the row's end. `write_tiles` packs the first words of [`TILE`] rows faster, and returns how many.
    fn transpose(
        self,
        packed: &mut [u32],
        rows: StoredRows<'_>,
        write_tiles: impl Fn(&[u8], usize, &mut [u32]) -> usize,
        decode: impl Fn(&[u8], usize) -> u32,
    ) {
        let Self { panel_words, columns, first_column } = self;
        let words = panel_words / PANEL;
        let row_bytes = rows.row_bytes;
        let mut row = rows.first;
        let mut rest = rows.bytes;
        while !rest.is_empty() {
            // Up to the next multiple of TILE rows: such a group never crosses a panel's edge.
            let count = (rest.len() / row_bytes).min(TILE - row % TILE);
            let (group, after) = rest.split_at(count * row_bytes);
            let column = row % columns + first_column;
            let panel = &mut packed[row / columns * panel_words..][..panel_words];
            let done = if count == TILE { write_tiles(group, row_bytes, &mut panel[column..]) } else { 0 };
            for first_word in (done..words).step_by(TILE) {
                let mut tile = [[0u32; TILE]; TILE];
                for (source, target) in group.chunks_exact(row_bytes).zip(&mut tile) {
                    for (m, word) in target.iter_mut().enumerate() {
                        *word = decode(source, first_word + m);
                    }
                }
                for m in 0..TILE.min(words - first_word) {
                    let line = &mut panel[(first_word + m) * PANEL + column..][..count];
                    for (word, source) in line.iter_mut().zip(&tile) {
                        *word = source[m];
                    }
                }
            }
            row += count;
            rest = after;
        }
    }
}

impl PanelLayout {
    /// Quantises and packs rows. A panel has `step_words` words for each group of K. `decode` converts the bytes of a
    /// stored element to float32.
    fn quantise<const BYTES: usize>(
        self,
        packed: &mut [u32],
        rows: StoredRows<'_>,
        format: WeightFormat,
        step_words: usize,
        decode: impl Fn([u8; BYTES]) -> f32,
    ) {
        let lines = step_words / PANEL;
        for (row, source) in (rows.first..).zip(rows.bytes.chunks_exact(rows.row_bytes)) {
            let column = row % self.columns + self.first_column;
            let panel = &mut packed[row / self.columns * self.panel_words..][..self.panel_words];
            let (elements, _) = source.as_chunks::<BYTES>();
            for (step, elements) in panel.chunks_exact_mut(step_words).zip(elements.chunks(GROUP)) {
                let group = match <&[[u8; BYTES]; GROUP]>::try_from(elements) {
                    Ok(whole) => whole.map(&decode),
                    // The end of a row is padded with zeros.
                    Err(_) => {
                        std::array::from_fn(|k| elements.get(k).map_or(0.0, |element| decode(*element)))
                    }
                };
                let group = WeightGroup::quantise(&group, format);
                let (quads, scales) = step.split_at_mut(lines * PANEL);
                for (words, word) in quads.chunks_exact_mut(PANEL).zip(group.stored(format)) {
                    words[column] = word;
                }
                let shift = column % 2 * 16;
                let pair = &mut scales[column / 2];
                *pair = *pair & !(0xffff << shift) | u32::from(group.scale) << shift;
            }
        }
    }
}

/// Rows as they are stored in a checkpoint.
#[derive(Clone, Copy)]
struct StoredRows<'a> {
    first: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

/// Packs no tiles: every word is decoded.
fn no_tiles(_rows: &[u8], _row_bytes: usize, _panel: &mut [u32]) -> usize {
    0
}

/// Reads the two bytes of element `k`, or returns zero beyond the row's end.
#[inline(always)]
fn read_half(row: &[u8], k: usize) -> u16 {
    row.get(2 * k..2 * k + 2).map_or(0, |b| u16::from_le_bytes([b[0], b[1]]))
}

/// Reads the four bytes of element `k`, or returns zero beyond the row's end.
#[inline(always)]
fn read_word(row: &[u8], k: usize) -> u32 {
    row.get(4 * k..4 * k + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

/// Reads pair `m` of stored bfloat16; the even one is in the lower half of the word.
#[inline(always)]
fn read_pair(row: &[u8], m: usize) -> u32 {
    u32::from(read_half(row, 2 * m)) | u32::from(read_half(row, 2 * m + 1)) << 16
}

/// Rounds pair `m` of elements to bfloat16; the even one is in the lower half of the word.
#[inline(always)]
fn round_pair(m: usize, element: impl Fn(usize) -> f32) -> u32 {
    u32::from(to_bf16(element(2 * m))) | u32::from(to_bf16(element(2 * m + 1))) << 16
}
