//! KV cache of the CPU backend: keys and values of every layer in the host's memory.

use crate::backend::{BackendError, PagedLayer, RELEASED_PAGE};
use remoe_kernels::{AttentionShape, KernelError, KvPage};
use std::ops::Range;

/// One layer's attention and its part of each page.
#[derive(Clone)]
pub(super) struct PagePart {
    pub(super) shape: AttentionShape,
    /// Index of the page table.
    pub(super) page_table: usize,
    /// Range of the layer's keys and values within a page.
    pub(super) bytes: Range<usize>,
}

/// Pages of all layers. A page's memory is allocated on its first write and kept.
pub struct NativePages {
    layers: Vec<PagePart>,
    pages: Vec<Option<KvPage>>,
    pub(super) page_bytes: usize,
}

impl NativePages {
    /// Lays out the layers of each page table one after the other within a page.
    pub(super) fn new(layers: &[PagedLayer]) -> Self {
        let page_tables = layers.iter().map(|layer| layer.page_table + 1).max().unwrap_or(0);
        let mut ends = vec![0; page_tables];
        let layers = layers
            .iter()
            .map(|&PagedLayer { shape, page_table }| {
                let first = ends[page_table];
                ends[page_table] += shape.page_bytes();
                PagePart { shape, page_table, bytes: first..ends[page_table] }
            })
            .collect();
        Self { layers, pages: Vec::new(), page_bytes: ends.into_iter().max().unwrap_or(0) }
    }

    /// Returns the attention shape of `layer` and its part of a page.
    pub(super) fn layer(&self, layer: usize) -> Result<PagePart, BackendError> {
        let expected = self.layers.len();
        self.layers.get(layer).cloned().ok_or(BackendError::Shape { what: "layer", actual: layer, expected })
    }

    /// Returns the memory of page `id`, allocating it on first use. `id` must not be [`RELEASED_PAGE`].
    ///
    /// # Errors
    /// Fails if memory cannot be allocated.
    pub(super) fn page_mut(&mut self, id: usize) -> Result<&mut [u8], KernelError> {
        if self.pages.len() <= id {
            self.pages.resize_with(id + 1, || None);
        }
        match &mut self.pages[id] {
            Some(page) => Ok(page),
            page => Ok(page.insert(KvPage::zeroed(self.page_bytes)?)),
        }
    }

    /// Returns the range `part` of each page in `ids`; empty for a page that was never written or is released.
    pub(super) fn parts(&self, ids: &[usize], part: &Range<usize>) -> Vec<&[u8]> {
        ids.iter()
            .map(|&id| self.written(id).and_then(|page| page.get(part.clone())).unwrap_or(&[]))
            .collect()
    }

    /// Copies page `from` to page `to`.
    ///
    /// # Errors
    /// Fails if memory for page `to` cannot be allocated.
    pub(super) fn copy(&mut self, from: usize, to: usize) -> Result<(), KernelError> {
        if let Some(content) = self.written(from).map(<[u8]>::to_vec) {
            self.page_mut(to)?.copy_from_slice(&content);
        }
        Ok(())
    }

    /// Returns the memory of page `id` if it was ever written.
    fn written(&self, id: usize) -> Option<&[u8]> {
        if id == RELEASED_PAGE { None } else { self.pages.get(id).and_then(Option::as_deref) }
    }
}
