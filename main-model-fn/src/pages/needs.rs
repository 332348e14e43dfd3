//! Pages that the layers of a loaded model take.

use crate::backend::PagedLayer;
use remoe_kernels::AttentionShape;
use remoe_model::kv_pages::{CachedLayer, PageNeeds};

/// Divides layers of these `shapes` into pages of equal size.
pub(crate) fn paged(shapes: &[AttentionShape]) -> (PageNeeds, Vec<PagedLayer>) {
    let cached =
        |shape: &AttentionShape| CachedLayer { page_bytes: shape.page_bytes(), window: shape.window };
    let (needs, tables) = PageNeeds::of(&shapes.iter().map(cached).collect::<Vec<_>>());
    let layers = shapes.iter().zip(tables).map(|(&shape, table)| PagedLayer { shape, table });
    (needs, layers.collect())
}
