//! Division of the KV cache into pages: the layers that share a page, and the pages that a sequence needs.
//!
//! Layers with a sliding window release pages that no later position attends to. So their pages are separate from those of
//! other layers. All pages have the same size: the number of layers per page divides the layers of both kinds. A model with
//! 12 layers of each kind (gpt-oss) has two pages for 32 positions, one of each kind.
//!
//! Both the engine's admission and the planner count memory by this rule.

use crate::config::ModelConfig;

/// Positions of a page.
pub const PAGE_POSITIONS: usize = 32;

/// Default limit of the rows of a prompt that are forwarded together (chunked prefill).
pub const PREFILL_ROWS: usize = 2048;

/// Memory for the hidden states of a prefill and for the results of its experts.
const PREFILL_BYTES: usize = 96 << 20;

/// Returns the number of rows of a prompt that are forwarded together: as many as fit in 96 MiB with the results of
/// `top_k` experts, but at most `max_rows`. A row has `hidden` elements of `element_bytes` bytes.
#[must_use]
pub fn prefill_rows(hidden: usize, element_bytes: usize, top_k: usize, max_rows: usize) -> usize {
    // Hidden states, inputs of experts, results of shared experts, and one result for each routed expert.
    let row_bytes = hidden.saturating_mul(element_bytes).saturating_mul(top_k.saturating_add(3));
    (PREFILL_BYTES / row_bytes.max(1)).clamp(1, max_rows.max(1))
}

/// Returns the number of pages for `positions` positions in one page table.
#[must_use]
pub fn pages_of(positions: usize) -> usize {
    positions.div_ceil(PAGE_POSITIONS)
}

/// A layer's share of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedLayer {
    /// Size of [`PAGE_POSITIONS`] positions, in bytes or any other unit that is the same for all layers.
    pub page_bytes: usize,
    /// Positions of the sliding window, the token's own included. `None` if the layer attends to all positions.
    pub window: Option<usize>,
}

/// Pages that a block of [`PAGE_POSITIONS`] positions needs, in layers without and with a sliding window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageNeeds {
    /// Pages of a block in the layers that attend to all positions.
    pub whole: usize,
    /// Pages of a block in the layers with a sliding window.
    pub windowed: usize,
    /// Positions of the largest window, the token's own included; 0 without windows.
    pub window: usize,
}

impl Default for PageNeeds {
    /// Needs of a model without windows.
    fn default() -> Self {
        Self { whole: 1, windowed: 0, window: 0 }
    }
}

impl PageNeeds {
    /// Divides `layers` into pages of equal size, and returns the index of each layer's page table. If layers differ in
    /// size, all share one page, and windows release nothing.
    #[must_use]
    pub fn of(layers: &[CachedLayer]) -> (Self, Vec<usize>) {
        let windowed = layers.iter().filter(|layer| layer.window.is_some()).count();
        let is_even = layers.windows(2).all(|pair| pair[0].page_bytes == pair[1].page_bytes);
        if windowed == 0 || !is_even {
            return (Self::default(), vec![0; layers.len()]);
        }
        let whole = layers.len() - windowed;
        let layers_of_page = greatest_common_divisor(whole, windowed);
        let needs = Self {
            whole: whole / layers_of_page,
            windowed: windowed / layers_of_page,
            window: layers.iter().filter_map(|layer| layer.window).max().unwrap_or(0),
        };
        // Layers of each kind that have been assigned to page tables.
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

    /// Returns the pages of a block of [`PAGE_POSITIONS`] positions in all layers.
    #[must_use]
    pub fn of_block(&self) -> usize {
        self.whole + self.windowed
    }

    /// Returns the largest number of pages that a sequence of `positions` holds at a time, if at most `rows` rows are forwarded together.
    #[must_use]
    pub fn pages(&self, positions: usize, rows: usize) -> usize {
        let blocks = pages_of(positions);
        let windowed = blocks.min(self.blocks_in_window(rows));
        blocks.saturating_mul(self.whole).saturating_add(windowed.saturating_mul(self.windowed))
    }

    /// Returns the positions of the longest sequence that never holds more than `pages` pages.
    #[must_use]
    pub fn positions(&self, pages: usize, rows: usize) -> usize {
        let in_window = self.blocks_in_window(rows);
        let blocks = match pages / self.of_block() {
            blocks if blocks < in_window || self.windowed == 0 => blocks,
            _ => (pages - in_window * self.windowed).checked_div(self.whole).unwrap_or(usize::MAX),
        };
        blocks.saturating_mul(PAGE_POSITIONS)
    }

    /// Returns the largest number of blocks that a window and the `rows` rows after it intersect.
    fn blocks_in_window(&self, rows: usize) -> usize {
        pages_of(self.window.saturating_add(rows)).saturating_add(1)
    }

    /// Returns the first block that `position` attends to in layers with a window.
    #[must_use]
    pub fn first_seen(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window) / PAGE_POSITIONS
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Layers of a model with a sliding window, which release older positions of the KV cache. All layers of the model then
/// have the same number of bytes per position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WindowedLayers {
    /// Number of layers with a window.
    pub layers: usize,
    /// Positions of the largest window, the token's own included.
    pub window: usize,
}

impl WindowedLayers {
    /// Returns the layers of `layers` that release positions, by the rule of [`PageNeeds::of`], if any.
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

    /// Returns the largest number of a sequence's positions that these layers hold at a time, if at most `rows` rows are forwarded together.
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
    fn windowed_positions_of_gpt_oss_equal_those_of_its_pages() {
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
    fn longest_sequence_fits_into_its_pages() {
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
    fn blocks_are_visible_until_the_window_has_passed() {
        let needs = PageNeeds { whole: 1, windowed: 1, window: 8 };
        assert_eq!([0, 7, 31, 38].map(|position| needs.first_seen(position)), [0; 4]);
        assert_eq!(needs.first_seen(39), 1);
    }
}
