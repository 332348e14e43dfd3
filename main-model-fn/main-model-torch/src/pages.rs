//! Keys and values of every layer on the device.
//!
//! A page has a layer of every page table at each of its places, so there is one slab of memory for each place: with one
//! page table, one for each layer. A slab has an entry for each position of every page, and behind them one of zeros,
//! which stands for positions that do not exist. Slabs are made once; nothing of the cache is allocated later.

use crate::library::{Kind, Tensor, TorchDevice};
use main_model_fn::backend::{BackendError, PagedLayer};
use remoe_kernels::{AttentionShape, PAGE_POSITIONS};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory of the device that pages leave to an iteration: gathered keys and values, masks, hidden states and logits.
pub(crate) const WORKSPACE_BYTES: usize = 512 << 20;

/// Pages of all layers.
pub struct TorchPages {
    layers: Vec<PlacedLayer>,
    /// By place within a page.
    slabs: Vec<Tensor>,
    pages: usize,
    kind: Kind,
    device: Arc<TorchDevice>,
}

/// A layer and which of a page's it is.
#[derive(Clone, Copy)]
pub(crate) struct PlacedLayer {
    pub(crate) paged: PagedLayer,
    place: usize,
}

/// Elements of an entry of a slab that are keys, and those that are values.
fn elements(shape: &AttentionShape) -> [i64; 2] {
    [shape.kv_heads * shape.key_dim, shape.kv_heads * shape.stored_values()].map(|count| count as i64)
}

impl TorchPages {
    /// No pages.
    pub(crate) fn new(layers: &[PagedLayer], kind: Kind, device: Arc<TorchDevice>) -> Self {
        let mut places = BTreeMap::new();
        let layers = layers.iter().map(|&paged| {
            let next = places.entry(paged.page_table).or_insert(0);
            *next += 1;
            PlacedLayer { paged, place: *next - 1 }
        });
        Self { layers: layers.collect(), slabs: Vec::new(), pages: 0, kind, device }
    }

    pub(crate) fn device(&self) -> &Arc<TorchDevice> {
        &self.device
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn layers(&self) -> &[PlacedLayer] {
        &self.layers
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.shapes().map(AttentionShape::page_bytes).sum()
    }

    /// Layers of a page: pages of all tables have the same.
    fn shapes(&self) -> impl Iterator<Item = &AttentionShape> {
        self.layers.iter().filter(|layer| layer.paged.page_table == 0).map(|layer| &layer.paged.shape)
    }

    /// Allocates the slabs of `count` pages, or of as many as the device has room for beside its workspace. Returns how
    /// many. Free memory is found by allocation, which is what counts: tch has no question for it.
    ///
    /// # Errors
    /// There is no room for one.
    pub(crate) fn reserve(&mut self, count: usize) -> Result<usize, BackendError> {
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
        let slabs = self.shapes().map(|shape| {
            let width = elements(shape).iter().sum::<i64>();
            entries.checked_mul(width * 8).ok_or_else(out_of_range)?;
            let slab = Tensor::empty(&self.device, &[entries, width], self.kind)?;
            slab.narrow(0, entries - 1, 1)?.zero_()?;
            Ok(slab)
        });
        let slabs = slabs.collect::<Result<Vec<_>, BackendError>>()?;
        let workspace = Tensor::empty(&self.device, &[WORKSPACE_BYTES as i64], Kind::Uint8)?;
        let libraries = Tensor::empty(&self.device, &[self.device.library_bytes()], Kind::Uint8)?;
        drop((workspace, libraries));
        Ok(slabs)
    }

    /// The entry of a position in page `page`.
    pub(crate) fn entry(page: usize, at: usize) -> i64 {
        (page * PAGE_POSITIONS + at) as i64
    }

    /// The entry of positions that do not exist.
    pub(crate) fn nowhere(&self) -> i64 {
        Self::entry(self.pages, 0)
    }

    /// Number of pages that there are.
    pub(crate) fn count(&self) -> usize {
        self.pages
    }

    pub(crate) fn copy(&self, from: usize, to: usize) -> Result<(), BackendError> {
        for slab in &self.slabs {
            let page = |id| slab.narrow(0, Self::entry(id, 0), PAGE_POSITIONS as i64);
            page(to)?.copy_(&page(from)?)?;
        }
        Ok(())
    }

    /// The entries of `layer`, entries x (keys, then values), and the elements of its keys and values.
    pub(crate) fn slab(&self, layer: usize) -> Result<(PlacedLayer, &Tensor, [i64; 2]), BackendError> {
        let missing =
            BackendError::Shape { what: "layer of the KV cache", actual: layer, expected: self.layers.len() };
        let placed = self.layers.get(layer).copied();
        let slab = placed.and_then(|placed| self.slabs.get(placed.place));
        let (placed, slab) = placed.zip(slab).ok_or(missing)?;
        Ok((placed, slab, elements(&placed.paged.shape)))
    }
}
