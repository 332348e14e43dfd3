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

/// Pages of all layers.
pub struct TorchPages {
    layers: Vec<SlabLayer>,
    /// By [`SlabLayer::slab`].
    slabs: Vec<Tensor>,
    pages: usize,
    /// Most positions of a sequence.
    longest: usize,
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
            let slab: &mut usize = layers_of_table.entry(paged.table).or_insert(0);
            *slab += 1;
            SlabLayer { paged, slab: *slab - 1 }
        });
        Self { layers: layers.collect(), slabs: Vec::new(), pages: 0, longest: 0, kind, device }
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
        self.layers.iter().filter(|layer| layer.paged.table == 0).map(|layer| &layer.paged.shape)
    }

    /// Allocates the slabs of `count` pages, or of as many as the device has room for beside its workspace. Sequences have
    /// up to `positions` positions. Returns how many. Free memory is found by allocation: tch has no call that returns it.
    ///
    /// # Errors
    /// There is no room for one.
    pub(crate) fn reserve(&mut self, count: usize, positions: usize) -> Result<usize, BackendError> {
        self.longest = positions;
        let fits = |pages: usize| -> Result<Option<Vec<Tensor>>, BackendError> {
            match self.allocate(pages) {
                Ok(slabs) => Ok(Some(slabs)),
                Err(BackendError::OutOfMemory { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let (mut most, mut too_many) = (0, count.saturating_add(1));
        let mut next = count;
        while most < next {
            match fits(next)? {
                // Given back before more is tried.
                Some(slabs) => drop(slabs),
                None => too_many = next,
            }
            if next < too_many {
                most = next;
            }
            next = most.midpoint(too_many);
        }
        self.slabs = self.allocate(most.max(1))?;
        self.device.release_unused();
        self.pages = most.max(1);
        Ok(self.pages)
    }

    /// Slabs of `pages` pages, which leave room for the workspace.
    fn allocate(&self, pages: usize) -> Result<Vec<Tensor>, BackendError> {
        // Parts of an earlier attempt that are still cached would count as taken.
        self.device.release_unused();
        let out_of_range = || BackendError::OutOfMemory { message: format!("{pages} pages of the KV cache") };
        let entries = pages.checked_mul(PAGE_POSITIONS).and_then(|entries| i64::try_from(entries + 1).ok());
        let entries = entries.ok_or_else(out_of_range)?;
        let slabs = self.page_shapes().map(|shape| {
            let width = entry_elements(shape).iter().sum::<i64>();
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

    /// Workspace if there are `pages` pages: no sequence has more positions than they hold.
    fn workspace_bytes_with(&self, pages: usize) -> usize {
        let shapes = self.layers.iter().map(|layer| &layer.paged.shape);
        workspace_bytes(shapes, self.longest.min(pages.saturating_mul(PAGE_POSITIONS)))
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
        let placed = self.layers.get(layer).copied();
        let slab = placed.and_then(|placed| self.slabs.get(placed.slab));
        let (placed, slab) = placed.zip(slab).ok_or(missing)?;
        Ok((placed, slab, entry_elements(&placed.paged.shape)))
    }
}
