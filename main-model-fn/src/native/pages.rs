//! Keys and values of every layer in the host's memory.

use crate::backend::BackendError;
use remoe_kernels::{AttentionShape, KernelError, KvPage};
use std::ops::Range;

/// Pages of all layers. One that was ever used keeps its memory.
pub struct NativePages {
    layers: Vec<(AttentionShape, Range<usize>)>,
    pages: Vec<Option<KvPage>>,
    pub(super) page_bytes: usize,
}

impl NativePages {
    pub(super) fn new(shapes: &[AttentionShape]) -> Self {
        let mut page_bytes = 0;
        let layers = shapes
            .iter()
            .map(|shape| {
                let first = page_bytes;
                page_bytes += shape.page_bytes();
                (*shape, first..page_bytes)
            })
            .collect();
        Self { layers, pages: Vec::new(), page_bytes }
    }

    /// How `layer` attends and where its part of a page is.
    pub(super) fn layer(&self, layer: usize) -> Result<(AttentionShape, Range<usize>), BackendError> {
        let expected = self.layers.len();
        self.layers.get(layer).cloned().ok_or(BackendError::Shape { what: "layer", actual: layer, expected })
    }

    /// The memory of page `id`.
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

    /// The parts of pages `ids` that lie in `part`; nothing of a page that was never written.
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
        self.pages.get(id).and_then(Option::as_deref)
    }
}
