//! Keys and values of every layer on the device.

use crate::library::{Device, Kind, Tensor};
use main_model_fn::backend::BackendError;
use main_model_fn::backend::PagedLayer;
use remoe_kernels::{AttentionShape, PAGE_POSITIONS};
use std::sync::Arc;

/// Pages of all layers. One that was ever used keeps its memory.
pub struct TorchPages {
    pub(crate) layers: Vec<PlacedLayer>,
    /// By page, then by layer of its table.
    pages: Vec<Vec<LayerPage>>,
    kind: Kind,
    device: Arc<Device>,
}

/// A layer and which of a page's it is.
pub(crate) struct PlacedLayer {
    pub(crate) paged: PagedLayer,
    slot: usize,
}

/// [kv heads, positions, elements] of keys and values.
struct LayerPage {
    keys: Tensor,
    values: Tensor,
}

impl TorchPages {
    pub(crate) fn new(layers: &[PagedLayer], kind: Kind, device: Arc<Device>) -> Self {
        let layers = layers.iter().enumerate().map(|(index, &paged)| {
            let slot = layers[..index].iter().filter(|before| before.table == paged.table).count();
            PlacedLayer { paged, slot }
        });
        Self { layers: layers.collect(), pages: Vec::new(), kind, device }
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.shapes().map(AttentionShape::page_bytes).sum()
    }

    /// Layers of a page: pages of all tables have the same.
    fn shapes(&self) -> impl Iterator<Item = &AttentionShape> {
        self.layers.iter().filter(|layer| layer.paged.table == 0).map(|layer| &layer.paged.shape)
    }

    fn page(&mut self, id: usize) -> Result<&mut Vec<LayerPage>, BackendError> {
        if self.pages.len() <= id {
            self.pages.resize_with(id + 1, Vec::new);
        }
        if self.pages[id].is_empty() {
            let (device, kind) = (self.device.clone(), self.kind);
            let layers = self.shapes().map(|shape| {
                let zeros = |dim: usize| {
                    let size = [shape.kv_heads, PAGE_POSITIONS, dim].map(|size| size as i64);
                    Tensor::zeros(&device, &size, kind)
                };
                Ok(LayerPage { keys: zeros(shape.key_dim)?, values: zeros(shape.stored_values())? })
            });
            self.pages[id] = layers.collect::<Result<_, BackendError>>()?;
        }
        Ok(&mut self.pages[id])
    }

    pub(crate) fn copy(&mut self, from: usize, to: usize) -> Result<(), BackendError> {
        self.page(to)?;
        self.page(from)?;
        for (from, to) in self.pages[from].iter().zip(&self.pages[to]) {
            to.keys.copy_(&from.keys)?;
            to.values.copy_(&from.values)?;
        }
        Ok(())
    }

    /// Writes the keys and values ([kv heads, rows, elements]) of the positions from `past` on to the pages of
    /// `tables` and returns all from position `from` on.
    pub(crate) fn extend(
        &mut self,
        layer: usize,
        tables: &[Vec<usize>],
        past: usize,
        keys: &Tensor,
        values: &Tensor,
        from: usize,
    ) -> Result<(Tensor, Tensor), BackendError> {
        let PlacedLayer { paged: PagedLayer { table, .. }, slot } = self.layers[layer];
        let (ids, rows) = (&tables[table], keys.size()[1] as usize);
        let end = past + rows;
        let mut done = 0;
        while done < rows {
            let (page, at) = ((past + done) / PAGE_POSITIONS, (past + done) % PAGE_POSITIONS);
            let count = (PAGE_POSITIONS - at).min(rows - done);
            let page = &self.page(ids[page])?[slot];
            for (to, new) in [(&page.keys, keys), (&page.values, values)] {
                let new = new.narrow(1, done as i64, count as i64)?;
                to.narrow(1, at as i64, count as i64)?.copy_(&new)?;
            }
            done += count;
        }
        let first = from / PAGE_POSITIONS;
        let mut parts = (Vec::new(), Vec::new());
        for &id in &ids[first..end.div_ceil(PAGE_POSITIONS)] {
            let page = &self.page(id)?[slot];
            parts.0.push(page.keys.alias());
            parts.1.push(page.values.alias());
        }
        let gathered = |parts: &[Tensor]| {
            let skipped = from - first * PAGE_POSITIONS;
            Tensor::cat(&parts.iter().collect::<Vec<_>>(), 1)?.narrow(1, skipped as i64, (end - from) as i64)
        };
        Ok((gathered(&parts.0)?, gathered(&parts.1)?))
    }
}
