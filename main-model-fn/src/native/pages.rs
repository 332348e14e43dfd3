//! KV cache on CPUs: keys and values of every layer in the host's memory.

use crate::backend::{BackendError, PagedLayer, RELEASED};
use remoe_kernels::{AttentionShape, KernelError, KvPage};
use std::ops::Range;

/// A layer and the part of its pages that it has.
#[derive(Clone)]
pub(super) struct PagePart {
    pub(super) shape: AttentionShape,
    pub(super) table: usize,
    pub(super) bytes: Range<usize>,
}

/// Pages of all layers. One that was ever used keeps its memory.
pub struct NativePages {
    layers: Vec<PagePart>,
    pages: Vec<Option<KvPage>>,
    pub(super) page_bytes: usize,
}

impl NativePages {
    pub(super) fn new(layers: &[PagedLayer]) -> Self {
        let tables = layers.iter().map(|layer| layer.table + 1).max().unwrap_or(0);
        let mut ends = vec![0; tables];
        let layers = layers
            .iter()
            .map(|&PagedLayer { shape, table }| {
                let first = ends[table];
                ends[table] += shape.page_bytes();
                PagePart { shape, table, bytes: first..ends[table] }
            })
            .collect();
        Self { layers, pages: Vec::new(), page_bytes: ends.into_iter().max().unwrap_or(0) }
    }

    /// How `layer` attends and where its part of a page is.
    pub(super) fn layer(&self, layer: usize) -> Result<PagePart, BackendError> {
        let expected = self.layers.len();
        self.layers.get(layer).cloned().ok_or(BackendError::Shape { what: "layer", actual: layer, expected })
    }

    /// The memory of page `id`, which is not released.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(super) fn page_mut(&mut self, id: usize) -> Result<&mut [u8], KernelError> {
        if self.pages.len() <= id {
            self.pages.resize_with(id + 1, || None);
        }
        match &mut self.pages[id] {
            Some(page) => Ok(page),
            page => Ok(page.insert(KvPage::zeroed(self.page_bytes)?)),
        }
    }

    /// The parts of pages `ids` that lie in `part`; nothing of a page that was never written or is released.
    pub(super) fn parts(&self, ids: &[usize], part: &Range<usize>) -> Vec<&[u8]> {
        ids.iter()
            .map(|&id| self.written(id).and_then(|page| page.get(part.clone())).unwrap_or(&[]))
            .collect()
    }

    /// # Errors
    /// There is no memory for page `to`.
    pub(super) fn copy(&mut self, from: usize, to: usize) -> Result<(), KernelError> {
        if let Some(content) = self.written(from).map(<[u8]>::to_vec) {
            self.page_mut(to)?.copy_from_slice(&content);
        }
        Ok(())
    }

    /// The memory of page `id` if it was ever written.
    fn written(&self, id: usize) -> Option<&[u8]> {
        if id == RELEASED { None } else { self.pages.get(id).and_then(Option::as_deref) }
    }
}
