use super::*;
use crate::library::{Kind, TorchDevice};
use crate::workspace::{MASK_BYTES, workspace_bytes};
use main_model_fn::backend::{PAGE_POSITIONS, PagedLayer, RowSpan};
use remoe_kernels::{AttentionShape, CacheFormat, Dtype};
use std::sync::Arc;

/// Positions before the first block.
const PAST: usize = 32 << 10;
/// Rows of a block of a prefill.
const ROWS: usize = 512;
/// Blocks whose spans are kept: 4 prefills with 8 blocks each.
const BLOCKS: usize = 32;
const CONTEXT: usize = PAST + BLOCKS * ROWS;

const GROUPED: AttentionShape = AttentionShape {
    dtype: Dtype::F32,
    kv_heads: 2,
    group: 2,
    key_dim: 8,
    value_dim: 8,
    latent: false,
    scale: 0.5,
    window: None,
    cache: CacheFormat::Plain,
};

fn random(device: &Arc<TorchDevice>, size: [usize; 2], seed: u64) -> Tensor {
    let element = |index: u64| {
        let mixed = (index + 1 + (seed << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let elements: Vec<f32> = (0..(size[0] * size[1]) as u64).map(element).collect();
    Tensor::from_slice(device, &elements).unwrap().reshape(&size.map(|size| size as i64)).unwrap()
}

/// Pages of one layer with random keys and values.
fn filled_pages(device: &Arc<TorchDevice>, shape: AttentionShape) -> TorchPages {
    let mut pages = TorchPages::new(&[PagedLayer { shape, page_table: 0 }], Kind::Float, device.clone());
    let count = CONTEXT / PAGE_POSITIONS;
    assert_eq!(pages.reserve(count, CONTEXT).unwrap(), count);
    let (_, slab, widths) = pages.slab(0).unwrap();
    let filled = slab.narrow(0, 0, CONTEXT as i64).unwrap();
    filled.copy_(&random(device, [CONTEXT, widths.iter().sum::<i64>() as usize], 1)).unwrap();
    pages
}

fn span(past: usize, rows: usize) -> RowSpan {
    RowSpan { first_row: 0, rows, past, page_tables: vec![(0..CONTEXT / PAGE_POSITIONS).collect()] }
}

/// Attention of the rows from `first` on that `spans` has.
fn attended(
    pages: &TorchPages,
    rows: [&Tensor; 3],
    [first, count]: [usize; 2],
    sinks: Option<&Tensor>,
    spans: &TorchSpans,
) -> Vec<f32> {
    let part = rows.map(|rows| rows.narrow(0, first as i64, count as i64).unwrap());
    attend_grouped(pages, 0, &part, sinks, spans).unwrap().floats().unwrap()
}

#[test]
fn long_prompts_attend_within_the_workspace() {
    let shared = AttentionShape { kv_heads: 1, group: 4, ..GROUPED };
    let windowed = AttentionShape { window: Some(PAST - 100), ..GROUPED };
    for (shape, has_sinks) in [(GROUPED, false), (shared, false), (windowed, true)] {
        let device = TorchDevice::simulated(4 << 30);
        let pages = filled_pages(&device, shape);
        let width = |heads: usize| random(&device, [ROWS, heads * shape.key_dim], 1 + heads as u64);
        let (query, key, value) = (width(4), width(shape.kv_heads), width(shape.kv_heads));
        let rows = [&query, &key, &value];
        let sinks = has_sinks.then(|| Tensor::from_slice(&device, &[0.5_f32, 1.0, -1.0, 2.0]).unwrap());
        let held = device.recording().held_bytes;
        device.reset_peaks();

        let mut prepared = Vec::new();
        for block in 0..BLOCKS {
            prepared.push(TorchSpans::new(&pages, &[span(PAST + block * ROWS, ROWS)]).unwrap());
        }
        let together = attended(&pages, rows, [0, ROWS], sinks.as_ref(), &prepared[0]);
        let recording = device.recording();
        let workspace = workspace_bytes([shape].iter(), CONTEXT) as u64;
        let taken = recording.peak_bytes - held;
        assert!(taken <= workspace, "{taken} bytes of {workspace}");
        assert!(
            recording.largest_bytes <= MASK_BYTES as u64,
            "a tensor of {} bytes",
            recording.largest_bytes
        );

        let mut apart = Vec::new();
        for first in (0..ROWS).step_by(32) {
            let spans = TorchSpans::new(&pages, &[span(PAST + first, 32)]).unwrap();
            apart.extend(attended(&pages, rows, [first, 32], sinks.as_ref(), &spans));
        }
        assert_eq!(together.len(), apart.len());
        let largest = apart.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let difference = together.iter().zip(&apart).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(difference <= 2e-4 * largest, "{shape:?}: {difference} of {largest}");
    }
}
