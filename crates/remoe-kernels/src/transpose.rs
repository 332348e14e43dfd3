//! Words of sixteen rows to the order of panels, by vectors: what packing weights that stay as they are stored consists
//! of.
//!
//! A line of sixteen columns is written past the caches. The thread that packs does not compute with it, and a line
//! that is written whole need not be read first.

use crate::shape::PANEL;

/// Rows that are transposed together, and words of each of them at a time: a cache line either way.
pub(crate) const TILE: usize = 16;

/// Writes the words of sixteen rows of `row_bytes` bytes to sixteen neighbouring columns of a panel that begins at
/// `panel`, from its first column on: word `m` of row `r` to `panel[m * PANEL + r]`. Only whole tiles of words are
/// written; returns how many words of each row that was, which is none where the processor has no such instructions or
/// the columns do not begin at a cache line.
pub(crate) fn tiles(rows: &[u8], row_bytes: usize, panel: &mut [u32]) -> usize {
    let words = (row_bytes / 4).min(panel.len().div_ceil(PANEL)) / TILE * TILE;
    // The last line of a panel ends with its sixteenth column.
    let fits = rows.len() >= TILE * row_bytes && panel.len() + PANEL - TILE >= words * PANEL;
    if !fits || panel.as_ptr().align_offset(TILE * size_of::<u32>()) != 0 {
        return 0;
    }
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the instructions; there are sixteen rows, `words` words in each of them, and as
            // many lines of the panel.
            unsafe { x86::tiles_avx512(rows.as_ptr(), row_bytes, panel.as_mut_ptr(), words) };
            return words;
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
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

    /// # Safety
    /// AVX-512; sixteen rows of `row_bytes` bytes at `rows` with at least `words` words each; sixteen words at every
    /// `PANEL` words from `panel` on, `words` times, which is aligned to a cache line; `words` is a multiple of
    /// sixteen.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn tiles_avx512(rows: *const u8, row_bytes: usize, panel: *mut u32, words: usize) {
        for first in (0..words).step_by(TILE) {
            let mut lines = [_mm512_setzero_si512(); TILE];
            for (row, line) in lines.iter_mut().enumerate() {
                // SAFETY: words `first..first + 16` of this row are there.
                *line = unsafe { _mm512_loadu_si512(rows.add(row * row_bytes + first * 4).cast()) };
            }
            for (word, line) in transposed(lines).into_iter().enumerate() {
                // SAFETY: line `first + word` of the panel is there, and lines are as many bytes apart as keep them
                // aligned.
                unsafe { _mm512_stream_si512(panel.add((first + word) * PANEL).cast(), line) };
            }
        }
        // What was written past the caches is there for others once they are told of it.
        _mm_sfence();
    }

    /// Columns of a matrix of 16 x 16 words.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn transposed(rows: [__m512i; TILE]) -> [__m512i; TILE] {
        let mut pairs = rows;
        for two in 0..8 {
            let (a, b) = (rows[2 * two], rows[2 * two + 1]);
            pairs[2 * two] = _mm512_unpacklo_epi32(a, b);
            pairs[2 * two + 1] = _mm512_unpackhi_epi32(a, b);
        }
        // Part L of `fours[4 * i + j]` has column 4 * L + j of rows 4 * i to 4 * i + 3.
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

    /// # Safety
    /// As [`tiles_avx512`], with AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn tiles_avx2(rows: *const u8, row_bytes: usize, panel: *mut u32, words: usize) {
        const HALF: usize = TILE / 2;
        for first in (0..words).step_by(HALF) {
            // Both halves of a line one after the other: it leaves for memory as a whole.
            let mut halves = [[_mm256_setzero_si256(); HALF]; 2];
            for (half, columns) in halves.iter_mut().enumerate() {
                let mut lines = [_mm256_setzero_si256(); HALF];
                for (row, line) in lines.iter_mut().enumerate() {
                    let row = half * HALF + row;
                    // SAFETY: words `first..first + 8` of this row are there.
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

    /// Columns of a matrix of 8 x 8 words.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(crate) fn transposed_half(rows: [__m256i; 8]) -> [__m256i; 8] {
        let mut pairs = rows;
        for two in 0..4 {
            let (a, b) = (rows[2 * two], rows[2 * two + 1]);
            pairs[2 * two] = _mm256_unpacklo_epi32(a, b);
            pairs[2 * two + 1] = _mm256_unpackhi_epi32(a, b);
        }
        // Part L of `fours[4 * i + j]` has column 4 * L + j of rows 4 * i to 4 * i + 3.
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
            check(words, tiles);
        }
    }

    /// Each way by itself, on whatever processor has it.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_way_writes_the_same() {
        if is_x86_feature_detected!("avx2") {
            check(32, |rows, row_bytes, panel| {
                // SAFETY: as in `tiles`, for 32 words of 40 lines.
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
    fn what_does_not_fit_or_is_not_aligned_is_left_alone() {
        let mut panel = Aligned([0; 40 * PANEL]);
        assert_eq!(tiles(&rows(32), 128, &mut panel.0[1..]), 0);
        assert_eq!(tiles(&rows(32)[1..], 128, &mut panel.0), 0);
        assert_eq!(tiles(&rows(64), 256, &mut panel.0[..16 * PANEL]) % TILE, 0);
        assert!(panel.0[16 * PANEL..].iter().all(|&word| word == 0));
    }
}
