//! Page needs of a loaded model's layers.

use crate::backend::PagedLayer;
use remoe_kernels::AttentionShape;
use remoe_model::kv_pages::{CachedLayer, PageNeeds};

/// Distributes layers of these `shapes` over page tables, so that pages of all tables have the same size.
pub(crate) fn assign_page_tables(shapes: &[AttentionShape]) -> (PageNeeds, Vec<PagedLayer>) {
    let cached =
        |shape: &AttentionShape| CachedLayer { page_bytes: shape.page_bytes(), window: shape.window };
    let (needs, tables) = PageNeeds::of(&shapes.iter().map(cached).collect::<Vec<_>>());
    let layers = shapes.iter().zip(tables).map(|(&shape, page_table)| PagedLayer { shape, page_table });
    (needs, layers.collect())
}
