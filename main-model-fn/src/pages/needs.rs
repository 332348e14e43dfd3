//! Pages that the layers of a model take: which layers share a page, and how many pages positions need.
//!
//! Layers that attend to a window let go of pages that no later position sees. So they have pages of their own, and
//! all pages have the same size: as many layers as divide both kinds evenly. A model of 12 layers of each kind
//! (gpt-oss) has two pages for 32 positions, one of either kind.

use crate::backend::{PAGE_POSITIONS, PagedLayer};
use remoe_kernels::AttentionShape;

/// Pages that hold `positions` in one page table.
pub(crate) fn pages_of(positions: usize) -> usize {
    positions.div_ceil(PAGE_POSITIONS)
}

/// Pages that sequences need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageNeeds {
    /// Pages of [`PAGE_POSITIONS`] positions in the layers that attend to all of them.
    pub whole: usize,
    /// Pages of as many positions in layers that attend to a window.
    pub windowed: usize,
    /// Positions of the largest window, the own one included; 0 without windowed layers.
    pub window: usize,
}

impl Default for PageNeeds {
    /// Needs of a model without windows.
    fn default() -> Self {
        Self { whole: 1, windowed: 0, window: 0 }
    }
}

impl PageNeeds {
    /// Divides layers of these `shapes` into pages of equal size. Layers whose pages differ in size share one page, and
    /// their windows are not released.
    pub(crate) fn of(shapes: &[AttentionShape]) -> (Self, Vec<PagedLayer>) {
        let size = |shape: &AttentionShape| shape.page_bytes();
        let windowed = shapes.iter().filter(|shape| shape.window.is_some()).count();
        let is_even = shapes.windows(2).all(|pair| size(&pair[0]) == size(&pair[1]));
        if windowed == 0 || !is_even {
            let layers = shapes.iter().map(|&shape| PagedLayer { shape, table: 0 });
            return (Self::default(), layers.collect());
        }
        let whole = shapes.len() - windowed;
        let layers_of_page = greatest_divisor(whole, windowed);
        let needs = Self {
            whole: whole / layers_of_page,
            windowed: windowed / layers_of_page,
            window: shapes.iter().filter_map(|shape| shape.window).max().unwrap_or(0),
        };
        // Layers of each kind so far.
        let mut placed = [0, 0];
        let layers = shapes.iter().map(|&shape| {
            let is_windowed = shape.window.is_some();
            let placed = &mut placed[usize::from(is_windowed)];
            let first = if is_windowed { needs.whole } else { 0 };
            let table = first + *placed / layers_of_page;
            *placed += 1;
            PagedLayer { shape, table }
        });
        (needs, layers.collect())
    }

    /// Pages of [`PAGE_POSITIONS`] positions in all layers.
    pub(crate) fn of_block(&self) -> usize {
        self.whole + self.windowed
    }

    /// Most pages that a sequence of `positions` holds at a time if `rows` of it at most are forwarded together.
    pub(crate) fn pages(&self, positions: usize, rows: usize) -> usize {
        let blocks = pages_of(positions);
        let windowed = blocks.min(self.blocks_in_window(rows));
        blocks.saturating_mul(self.whole).saturating_add(windowed.saturating_mul(self.windowed))
    }

    /// Positions of the longest sequence that never holds more than `pages`.
    pub(crate) fn positions(&self, pages: usize, rows: usize) -> usize {
        let in_window = self.blocks_in_window(rows);
        let blocks = match pages / self.of_block() {
            blocks if blocks < in_window || self.windowed == 0 => blocks,
            _ => (pages - in_window * self.windowed).checked_div(self.whole).unwrap_or(usize::MAX),
        };
        blocks.saturating_mul(PAGE_POSITIONS)
    }

    /// Most blocks that a window and `rows` after it lie in.
    fn blocks_in_window(&self, rows: usize) -> usize {
        pages_of(self.window.saturating_add(rows)).saturating_add(1)
    }

    /// First block that position `position` sees in windowed layers.
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window) / PAGE_POSITIONS
    }
}

fn greatest_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoe_kernels::{CacheFormat, Dtype};

    fn shapes(windows: &[Option<usize>]) -> Vec<AttentionShape> {
        let shape = |&window| AttentionShape {
            dtype: Dtype::Bf16,
            kv_heads: 2,
            group: 2,
            key_dim: 4,
            value_dim: 4,
            latent: false,
            scale: 1.0,
            window,
            cache: CacheFormat::Plain,
        };
        windows.iter().map(shape).collect()
    }

    #[test]
    fn layers_of_a_kind_share_pages_of_one_size() {
        let (wide, narrow) = (None, Some(128));
        let tables = |windows: &[Option<usize>]| {
            let (needs, layers) = PageNeeds::of(&shapes(windows));
            (needs, layers.iter().map(|layer| layer.table).collect::<Vec<_>>())
        };
        assert_eq!(tables(&[wide; 3]), (PageNeeds::default(), vec![0; 3]));
        let half = PageNeeds { whole: 1, windowed: 1, window: 128 };
        assert_eq!(tables(&[narrow, wide, narrow, wide]), (half, vec![1, 0, 1, 0]));
        let odd = PageNeeds { whole: 1, windowed: 2, window: 128 };
        assert_eq!(tables(&[narrow, wide, narrow]), (odd, vec![1, 0, 2]));
        let all = PageNeeds { whole: 0, windowed: 1, window: 128 };
        assert_eq!(tables(&[narrow; 2]), (all, vec![0; 2]));
        let mut uneven = shapes(&[narrow, wide]);
        uneven[1].value_dim = 8;
        assert_eq!(PageNeeds::of(&uneven).0, PageNeeds::default());
    }

    #[test]
    fn longest_sequence_of_some_pages_needs_no_more() {
        for (whole, windowed, window) in [(1, 0, 0), (1, 1, 128), (1, 2, 8), (3, 1, 4096)] {
            let needs = PageNeeds { whole, windowed, window };
            for (pages, rows) in [(1, 1), (7, 24), (40, 24), (1000, 2048), (5000, 1)] {
                let most = needs.positions(pages, rows);
                assert!(needs.pages(most, rows) <= pages, "{needs:?} {pages} {rows}");
                assert!(needs.pages(most + 1, rows) > pages, "{needs:?} {pages} {rows}");
            }
        }
        let unbounded = PageNeeds { whole: 0, windowed: 1, window: 8 };
        assert_eq!(unbounded.positions(4, 8), usize::MAX);
    }

    /// A row at the end of a block still sees `window` - 1 positions before it.
    #[test]
    fn blocks_are_seen_until_the_window_has_passed() {
        let needs = PageNeeds { whole: 1, windowed: 1, window: 8 };
        assert_eq!([0, 7, 31, 38].map(|position| needs.first_seen(position)), [0; 4]);
        assert_eq!(needs.first_seen(39), 1);
    }
}
