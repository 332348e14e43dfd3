//! Transposes tiles of 16 x 16 words by vector instructions, to pack weights that keep their stored type.
//!
//! A line of 16 columns is written with non-temporal stores, past the caches. The packing thread does not compute with
//! it, and a line that is written as a whole need not be read first.

use crate::shape::PANEL;

/// Rows of a tile, and words of each: a cache line in both directions.
pub(crate) const TILE: usize = 16;

/// Writes 16 rows of `row_bytes` bytes to 16 neighbouring columns of a panel: word `m` of row `r` to
/// `panel[m * PANEL + r]`.
///
/// Only whole tiles are written. Returns the number of words written of each row: 0 if the processor lacks AVX2, or the
/// columns do not begin at a cache line.
pub(crate) fn transpose_tiles(rows: &[u8], row_bytes: usize, panel: &mut [u32]) -> usize {
    let words = (row_bytes / 4).min(panel.len().div_ceil(PANEL)) / TILE * TILE;
    // The last line of a panel ends with its sixteenth column.
    let fits = rows.len() >= TILE * row_bytes && panel.len() + PANEL - TILE >= words * PANEL;
    if !fits || panel.as_ptr().align_offset(TILE * size_of::<u32>()) != 0 {
        return 0;
    }
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512F. There are sixteen rows of at least `words` words, and as many lines of
            // the panel, which is aligned to a cache line.
            unsafe { x86::tiles_avx512(rows.as_ptr(), row_bytes, panel.as_mut_ptr(), words) };
            return words;
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2; otherwise as above.
            unsafe { x86::tiles_avx2(rows.as_ptr(), row_bytes, panel.as_mut_ptr(), words) };
            return words;
        }
    }
    0
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{transposed, transposed_half};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::TILE;
    use crate::shape::PANEL;
    use std::arch::x86_64::*;

    /// Transposes tiles with AVX-512.
    ///
    /// # Safety
    /// The CPU has AVX-512F. `rows` points to 16 rows of `row_bytes` bytes, each of at least `words` words, a multiple
    /// of 16. `panel` is aligned to a cache line and has `words` lines of [`PANEL`] words; the last needs only 16.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn tiles_avx512(rows: *const u8, row_bytes: usize, panel: *mut u32, words: usize) {
        for first in (0..words).step_by(TILE) {
            let mut lines = [_mm512_setzero_si512(); TILE];
            for (row, line) in lines.iter_mut().enumerate() {
                // SAFETY: the row has words `first..first + 16`.
                *line = unsafe { _mm512_loadu_si512(rows.add(row * row_bytes + first * 4).cast()) };
            }
            for (word, line) in transposed(lines).into_iter().enumerate() {
                // SAFETY: the panel has line `first + word`, and lines are a multiple of 64 bytes apart, so that each
                // is aligned.
                unsafe { _mm512_stream_si512(panel.add((first + word) * PANEL).cast(), line) };
            }
        }
        // Non-temporal stores become visible to other threads before anything written later.
        _mm_sfence();
    }

    /// Transposes 16 x 16 words: returns the columns of `rows`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn transposed(rows: [__m512i; TILE]) -> [__m512i; TILE] {
        let mut pairs = rows;
        for two in 0..8 {
            let (a, b) = (rows[2 * two], rows[2 * two + 1]);
            pairs[2 * two] = _mm512_unpacklo_epi32(a, b);
            pairs[2 * two + 1] = _mm512_unpackhi_epi32(a, b);
        }
        // 128-bit part L of `fours[4 * i + j]` has column 4 * L + j of rows 4 * i to 4 * i + 3.
        let mut fours = pairs;
        for four in 0..4 {
            let of = |k: usize| pairs[4 * four + k];
            fours[4 * four] = _mm512_unpacklo_epi64(of(0), of(2));
            fours[4 * four + 1] = _mm512_unpackhi_epi64(of(0), of(2));
            fours[4 * four + 2] = _mm512_unpacklo_epi64(of(1), of(3));
            fours[4 * four + 3] = _mm512_unpackhi_epi64(of(1), of(3));
        }
        let mut columns = fours;
        for j in 0..4 {
            const EVEN: i32 = 0b10_00_10_00;
            const ODD: i32 = 0b11_01_11_01;
            let (a, b, c, d) = (fours[j], fours[4 + j], fours[8 + j], fours[12 + j]);
            let (upper, lower) = (_mm512_shuffle_i32x4::<EVEN>(a, b), _mm512_shuffle_i32x4::<EVEN>(c, d));
            columns[j] = _mm512_shuffle_i32x4::<EVEN>(upper, lower);
            columns[8 + j] = _mm512_shuffle_i32x4::<ODD>(upper, lower);
            let (upper, lower) = (_mm512_shuffle_i32x4::<ODD>(a, b), _mm512_shuffle_i32x4::<ODD>(c, d));
            columns[4 + j] = _mm512_shuffle_i32x4::<EVEN>(upper, lower);
            columns[12 + j] = _mm512_shuffle_i32x4::<ODD>(upper, lower);
        }
        columns
    }

    /// Transposes tiles with AVX2.
    ///
    /// # Safety
    /// As for [`tiles_avx512`], with AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn tiles_avx2(rows: *const u8, row_bytes: usize, panel: *mut u32, words: usize) {
        const HALF: usize = TILE / 2;
        for first in (0..words).step_by(HALF) {
            // Both halves of a line are stored one after the other, so that it is written to memory as a whole.
            let mut halves = [[_mm256_setzero_si256(); HALF]; 2];
            for (half, columns) in halves.iter_mut().enumerate() {
                let mut lines = [_mm256_setzero_si256(); HALF];
                for (row, line) in lines.iter_mut().enumerate() {
                    let row = half * HALF + row;
                    // SAFETY: the row has words `first..first + 8`.
                    *line = unsafe { _mm256_loadu_si256(rows.add(row * row_bytes + first * 4).cast()) };
                }
                *columns = transposed_half(lines);
            }
            for word in 0..HALF {
                for (half, columns) in halves.iter().enumerate() {
                    // SAFETY: as in `tiles_avx512`.
                    unsafe {
                        let target = panel.add((first + word) * PANEL + half * HALF);
                        _mm256_stream_si256(target.cast(), columns[word]);
                    }
                }
            }
        }
        _mm_sfence();
    }

    /// Transposes 8 x 8 words: returns the columns of `rows`.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(crate) fn transposed_half(rows: [__m256i; 8]) -> [__m256i; 8] {
        let mut pairs = rows;
        for two in 0..4 {
            let (a, b) = (rows[2 * two], rows[2 * two + 1]);
            pairs[2 * two] = _mm256_unpacklo_epi32(a, b);
            pairs[2 * two + 1] = _mm256_unpackhi_epi32(a, b);
        }
        // 128-bit part L of `fours[4 * i + j]` has column 4 * L + j of rows 4 * i to 4 * i + 3.
        let mut fours = pairs;
        for four in 0..2 {
            let of = |k: usize| pairs[4 * four + k];
            fours[4 * four] = _mm256_unpacklo_epi64(of(0), of(2));
            fours[4 * four + 1] = _mm256_unpackhi_epi64(of(0), of(2));
            fours[4 * four + 2] = _mm256_unpacklo_epi64(of(1), of(3));
            fours[4 * four + 3] = _mm256_unpackhi_epi64(of(1), of(3));
        }
        let mut columns = fours;
        for j in 0..4 {
            columns[j] = _mm256_permute2x128_si256::<0x20>(fours[j], fours[4 + j]);
            columns[4 + j] = _mm256_permute2x128_si256::<0x31>(fours[j], fours[4 + j]);
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A panel whose first column is at a cache line.
    #[repr(align(64))]
    struct Aligned([u32; 40 * PANEL]);

    /// Word `m` of row `r`, different from all others.
    fn word(m: usize, r: usize) -> u32 {
        (m * 100 + r) as u32 + 1
    }

    fn rows(words: usize) -> Vec<u8> {
        (0..TILE).flat_map(|r| (0..words).flat_map(move |m| word(m, r).to_le_bytes())).collect()
    }

    fn check(words: usize, write: impl Fn(&[u8], usize, &mut [u32]) -> usize) {
        for column in [0, 16, 32, 48] {
            let mut panel = Aligned([0; 40 * PANEL]);
            let done = write(&rows(words), words * 4, &mut panel.0[column..]);
            for m in 0..40 {
                for c in 0..PANEL {
                    let is_written = m < done && (column..column + TILE).contains(&c);
                    let expected = if is_written { word(m, c - column) } else { 0 };
                    assert_eq!(panel.0[m * PANEL + c], expected, "{words} words, {m}, {c} from {column}");
                }
            }
            assert!(done <= words && done.is_multiple_of(TILE), "{done} of {words}");
        }
    }

    #[test]
    fn words_of_rows_become_lines_of_panels() {
        for words in [1, 15, 16, 17, 32, 39, 40] {
            check(words, transpose_tiles);
        }
    }

    /// Each way by itself, on whatever processor has it.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn all_transpositions_write_the_same() {
        if is_x86_feature_detected!("avx2") {
            check(32, |rows, row_bytes, panel| {
                // SAFETY: as in `transpose_tiles`, for 32 words of 40 lines.
                unsafe { x86::tiles_avx2(rows.as_ptr(), row_bytes, panel.as_mut_ptr(), 32) };
                32
            });
        }
        if is_x86_feature_detected!("avx512f") {
            check(32, |rows, row_bytes, panel| {
                // SAFETY: as above.
                unsafe { x86::tiles_avx512(rows.as_ptr(), row_bytes, panel.as_mut_ptr(), 32) };
                32
            });
        }
    }

    #[test]
    fn misaligned_or_short_panels_are_left_unchanged() {
        let mut panel = Aligned([0; 40 * PANEL]);
        assert_eq!(transpose_tiles(&rows(32), 128, &mut panel.0[1..]), 0);
        assert_eq!(transpose_tiles(&rows(32)[1..], 128, &mut panel.0), 0);
        assert_eq!(transpose_tiles(&rows(64), 256, &mut panel.0[..16 * PANEL]) % TILE, 0);
        assert!(panel.0[16 * PANEL..].iter().all(|&word| word == 0));
    }
}
