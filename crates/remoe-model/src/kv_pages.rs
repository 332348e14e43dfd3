//! Pages of the KV cache: which layers share a page, and how many pages the positions of a sequence need.
//!
//! Layers that attend to a window let go of pages that no later position sees. So they have pages of their own, and
//! all pages have the same size: as many layers as divide both kinds evenly. A model of 12 layers of each kind
//! (gpt-oss) has two pages for 32 positions, one of either kind.
//!
//! The engine admits requests by this rule, and plans count memory by it.

use crate::config::ModelConfig;

/// Positions of a page.
pub const PAGE_POSITIONS: usize = 32;

/// Most rows of a prompt that go through the layers together by default.
pub const PREFILL_ROWS: usize = 2048;

/// Memory of the rows of a prefill between the layers, and of what their experts give.
const PREFILL_BYTES: usize = 96 << 20;

/// Rows of a prompt, `most` at most, whose hidden states of `hidden` elements of `element_bytes` fit in 96 MiB beside
/// those that `top_k` experts give.
#[must_use]
pub fn prefill_rows(hidden: usize, element_bytes: usize, top_k: usize, most: usize) -> usize {
    // Hidden states, the experts' inputs, what shared experts give, and a row of each expert.
    let row_bytes = hidden.saturating_mul(element_bytes).saturating_mul(top_k.saturating_add(3));
    (PREFILL_BYTES / row_bytes.max(1)).clamp(1, most.max(1))
}

/// Pages that hold `positions` in one page table.
#[must_use]
pub fn pages_of(positions: usize) -> usize {
    positions.div_ceil(PAGE_POSITIONS)
}

/// One layer's part of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedLayer {
    /// Bytes of [`PAGE_POSITIONS`] positions, or another measure of them that is the same for all layers.
    pub page_bytes: usize,
    /// Positions that a token sees, itself included; all before it where absent.
    pub window: Option<usize>,
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
    /// Divides `layers` into pages of equal size, and returns the page table of each layer. Layers whose pages differ in
    /// size share one page, and their windows are not released.
    #[must_use]
    pub fn of(layers: &[CachedLayer]) -> (Self, Vec<usize>) {
        let windowed = layers.iter().filter(|layer| layer.window.is_some()).count();
        let is_even = layers.windows(2).all(|pair| pair[0].page_bytes == pair[1].page_bytes);
        if windowed == 0 || !is_even {
            return (Self::default(), vec![0; layers.len()]);
        }
        let whole = layers.len() - windowed;
        let layers_of_page = greatest_divisor(whole, windowed);
        let needs = Self {
            whole: whole / layers_of_page,
            windowed: windowed / layers_of_page,
            window: layers.iter().filter_map(|layer| layer.window).max().unwrap_or(0),
        };
        // Layers of each kind so far.
        let mut placed = [0, 0];
        let tables = layers.iter().map(|layer| {
            let is_windowed = layer.window.is_some();
            let placed = &mut placed[usize::from(is_windowed)];
            let first = if is_windowed { needs.whole } else { 0 };
            let table = first + *placed / layers_of_page;
            *placed += 1;
            table
        });
        (needs, tables.collect())
    }

    /// Pages of [`PAGE_POSITIONS`] positions in all layers.
    #[must_use]
    pub fn of_block(&self) -> usize {
        self.whole + self.windowed
    }

    /// Most pages that a sequence of `positions` holds at a time if `rows` of it at most are forwarded together.
    #[must_use]
    pub fn pages(&self, positions: usize, rows: usize) -> usize {
        let blocks = pages_of(positions);
        let windowed = blocks.min(self.blocks_in_window(rows));
        blocks.saturating_mul(self.whole).saturating_add(windowed.saturating_mul(self.windowed))
    }

    /// Positions of the longest sequence that never holds more than `pages`.
    #[must_use]
    pub fn positions(&self, pages: usize, rows: usize) -> usize {
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
    #[must_use]
    pub fn first_seen(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window) / PAGE_POSITIONS
    }
}

fn greatest_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}

/// Layers of a model that release positions of the KV cache behind their window. All layers have as many bytes per
/// position then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WindowedLayers {
    /// Number of layers.
    pub layers: usize,
    /// Positions of the largest window, the own one included.
    pub window: usize,
}

impl WindowedLayers {
    /// Returns those of `layers`, by the rule of [`PageNeeds::of`].
    #[must_use]
    pub fn of(layers: &[CachedLayer]) -> Option<Self> {
        let (needs, _) = PageNeeds::of(layers);
        let windowed = layers.iter().filter(|layer| layer.window.is_some()).count();
        (needs.windowed > 0).then_some(Self { layers: windowed, window: needs.window })
    }

    pub(crate) fn of_config(config: &ModelConfig) -> Option<Self> {
        let layers = config.layers.iter().map(|layer| CachedLayer {
            page_bytes: layer.attention.cache_elements(),
            window: layer.attention.window(),
        });
        Self::of(&layers.collect::<Vec<_>>())
    }

    /// Most positions of a sequence that these layers hold at a time if `rows` of it at most are forwarded together.
    #[must_use]
    pub fn most_positions(&self, rows: usize) -> usize {
        let needs = PageNeeds { window: self.window, ..PageNeeds::default() };
        needs.blocks_in_window(rows).saturating_mul(PAGE_POSITIONS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(windows: &[Option<usize>]) -> Vec<CachedLayer> {
        windows.iter().map(|&window| CachedLayer { page_bytes: 64, window }).collect()
    }

    #[test]
    fn layers_of_a_kind_share_pages_of_one_size() {
        let (wide, narrow) = (None, Some(128));
        let tables = |windows: &[Option<usize>]| PageNeeds::of(&layers(windows));
        assert_eq!(tables(&[wide; 3]), (PageNeeds::default(), vec![0; 3]));
        let half = PageNeeds { whole: 1, windowed: 1, window: 128 };
        assert_eq!(tables(&[narrow, wide, narrow, wide]), (half, vec![1, 0, 1, 0]));
        let odd = PageNeeds { whole: 1, windowed: 2, window: 128 };
        assert_eq!(tables(&[narrow, wide, narrow]), (odd, vec![1, 0, 2]));
        let all = PageNeeds { whole: 0, windowed: 1, window: 128 };
        assert_eq!(tables(&[narrow; 2]), (all, vec![0; 2]));
        let mut uneven = layers(&[narrow, wide]);
        uneven[1].page_bytes = 96;
        assert_eq!(PageNeeds::of(&uneven).0, PageNeeds::default());
        assert_eq!(WindowedLayers::of(&uneven), None);
    }

    /// 12 layers of each kind, a window of 128.
    #[test]
    fn windowed_positions_of_gpt_oss_are_those_of_its_pages() {
        let gpt_oss: Vec<_> = [Some(128), None].repeat(12);
        let (needs, _) = PageNeeds::of(&layers(&gpt_oss));
        let windowed = WindowedLayers { layers: 12, window: 128 };
        assert_eq!(WindowedLayers::of(&layers(&gpt_oss)), Some(windowed));
        for rows in [1, 24, 2048] {
            for positions in [32, 96, 1024, 4096, 131_072] {
                let held = positions.min(windowed.most_positions(rows));
                assert_eq!(needs.pages(positions, rows), pages_of(positions) + pages_of(held));
            }
        }
        assert_eq!(prefill_rows(2880, 2, 4, PREFILL_ROWS), 2048, "as many as by default");
        assert_eq!(prefill_rows(7168, 2, 8, PREFILL_ROWS), 638, "what fits in 96 MiB");
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
