//! KV cache of every layer on the device.
//!
//! A page holds as many layers as its page table has. The n-th layers of all page tables share the n-th slab of memory: with
//! one page table there is one slab for each layer. A slab has an entry for each position of every page, and behind them
//! one entry of zeros for padding. Slabs are allocated once at the start.

use crate::library::{Kind, Tensor, TorchDevice};
use crate::workspace::workspace_bytes;
use main_model_fn::backend::{BackendError, PagedLayer};
use remoe_kernels::{AttentionShape, PAGE_POSITIONS};
use std::collections::BTreeMap;
use std::sync::Arc;

/// KV cache pages of all layers.
pub struct TorchPages {
    layers: Vec<SlabLayer>,
    /// By [`SlabLayer::slab`].
    slabs: Vec<Tensor>,
    pages: usize,
    /// Most positions of a sequence.
    longest_sequence: usize,
    kind: Kind,
    device: Arc<TorchDevice>,
}

/// A layer and the index of its slab.
#[derive(Clone, Copy)]
pub(crate) struct SlabLayer {
    pub(crate) paged: PagedLayer,
    slab: usize,
}

/// Returns the numbers of key and value elements of an entry.
fn entry_elements(shape: &AttentionShape) -> [i64; 2] {
    [shape.kv_heads * shape.key_dim, shape.kv_heads * shape.stored_values()].map(|count| count as i64)
}

impl TorchPages {
    /// A KV cache without pages.
    pub(crate) fn new(layers: &[PagedLayer], kind: Kind, device: Arc<TorchDevice>) -> Self {
        let mut layers_of_table = BTreeMap::new();
        let layers = layers.iter().map(|&paged| {
            let slab: &mut usize = layers_of_table.entry(paged.page_table).or_insert(0);
            *slab += 1;
            SlabLayer { paged, slab: *slab - 1 }
        });
        Self { layers: layers.collect(), slabs: Vec::new(), pages: 0, longest_sequence: 0, kind, device }
    }

    pub(crate) fn device(&self) -> &Arc<TorchDevice> {
        &self.device
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn layers(&self) -> &[SlabLayer] {
        &self.layers
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.page_shapes().map(AttentionShape::page_bytes).sum()
    }

    /// Returns the attention shapes of a page's layers, which are the same for all page tables.
    fn page_shapes(&self) -> impl Iterator<Item = &AttentionShape> {
        self.layers.iter().filter(|layer| layer.paged.page_table == 0).map(|layer| &layer.paged.shape)
    }

    /// Allocates slabs of `count` pages, or of as many as fit on the device beside the workspace, and returns their number.
    /// Sequences have up to `positions` positions. Free memory is found by trial allocations: tch has no call for it.
    ///
    /// # Errors
    /// The device has no memory for one page.
    pub(crate) fn reserve(&mut self, count: usize, positions: usize) -> Result<usize, BackendError> {
        self.longest_sequence = positions;
        let try_allocate = |pages: usize| -> Result<Option<Vec<Tensor>>, BackendError> {
            match self.allocate(pages) {
                Ok(slabs) => Ok(Some(slabs)),
                Err(BackendError::OutOfMemory { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        // Bisection between numbers of pages that fit and that do not, from `count` on.
        let (mut fitting, mut too_many) = (0, count.saturating_add(1));
        let mut attempt = count;
        while fitting < attempt {
            match try_allocate(attempt)? {
                // Freed before the next attempt.
                Some(slabs) => drop(slabs),
                None => too_many = attempt,
            }
            if attempt < too_many {
                fitting = attempt;
            }
            attempt = fitting.midpoint(too_many);
        }
        self.pages = fitting.max(1);
        self.slabs = self.allocate(self.pages)?;
        self.device.release_unused();
        Ok(self.pages)
    }

    /// Allocates slabs of `pages` pages together with the workspace, and frees the workspace.
    fn allocate(&self, pages: usize) -> Result<Vec<Tensor>, BackendError> {
        // LibTorch may still cache memory of an earlier attempt.
        self.device.release_unused();
        let out_of_range = || BackendError::OutOfMemory { message: format!("{pages} pages of the KV cache") };
        let entries = pages.checked_mul(PAGE_POSITIONS).and_then(|entries| i64::try_from(entries + 1).ok());
        let entries = entries.ok_or_else(out_of_range)?;
        let slabs = self.page_shapes().map(|shape| {
            let width = entry_elements(shape).iter().sum::<i64>();
            // No element has more than 8 bytes.
            entries.checked_mul(width * 8).ok_or_else(out_of_range)?;
            let slab = Tensor::empty(&self.device, &[entries, width], self.kind)?;
            slab.narrow(0, entries - 1, 1)?.zero_()?;
            Ok(slab)
        });
        let slabs = slabs.collect::<Result<Vec<_>, BackendError>>()?;
        let workspace = Tensor::empty(&self.device, &[self.workspace_bytes_with(pages) as i64], Kind::Uint8)?;
        let libraries = Tensor::empty(&self.device, &[self.device.library_bytes()], Kind::Uint8)?;
        drop((workspace, libraries));
        Ok(slabs)
    }

    /// Returns the bytes of device memory that an iteration may take.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace_bytes_with(self.pages)
    }

    /// Returns the workspace for `pages` pages: no sequence has more positions than they hold.
    fn workspace_bytes_with(&self, pages: usize) -> usize {
        let shapes = self.layers.iter().map(|layer| &layer.paged.shape);
        workspace_bytes(shapes, self.longest_sequence.min(pages.saturating_mul(PAGE_POSITIONS)))
    }

    /// Returns the entry of position `offset` in page `page`.
    pub(crate) fn entry_index(page: usize, offset: usize) -> i64 {
        (page * PAGE_POSITIONS + offset) as i64
    }

    /// Returns the entry of zeros for padding.
    pub(crate) fn padding_entry(&self) -> i64 {
        Self::entry_index(self.pages, 0)
    }

    /// Number of pages.
    pub(crate) fn count(&self) -> usize {
        self.pages
    }

    /// Copies page `from` to page `to`.
    pub(crate) fn copy(&self, from: usize, to: usize) -> Result<(), BackendError> {
        for slab in &self.slabs {
            let page = |id| slab.narrow(0, Self::entry_index(id, 0), PAGE_POSITIONS as i64);
            page(to)?.copy_(&page(from)?)?;
        }
        Ok(())
    }

    /// Returns `layer`, its slab (entries x (keys, then values)), and the numbers of key and value elements.
    pub(crate) fn slab(&self, layer: usize) -> Result<(SlabLayer, &Tensor, [i64; 2]), BackendError> {
        let missing =
            BackendError::Shape { what: "layer of the KV cache", actual: layer, expected: self.layers.len() };
        let layer = self.layers.get(layer).copied();
        let slab = layer.and_then(|layer| self.slabs.get(layer.slab));
        let (layer, slab) = layer.zip(slab).ok_or(missing)?;
        Ok((layer, slab, entry_elements(&layer.paged.shape)))
    }
}
