//! Dequantisation of int8 keys and values.

use crate::kv_cache::{CACHE_GROUP, Int8HeadLayout, PAGE_POSITIONS};
use crate::numerics::from_bf16;
use crate::paths::floats::Floats;

/// Dequantises a head's part of an int8 page: keys `[key elements][positions]`, then values `[positions][value elements]`.
///
/// # Safety
/// The CPU has the features of `F`. `part` is as long as `head` says, and `to` has room for its elements.
#[inline(always)]
pub(super) unsafe fn dequantise_head<F: Floats>(head: Int8HeadLayout, part: &[u8], to: &mut [f32]) {
    const TILE: usize = CACHE_GROUP * PAGE_POSITIONS;
    let [keys, values, key_scales, value_scales] = head.split(part);
    let (wide_keys, wide_values) = to.split_at_mut(keys.len());
    let tiles = keys.chunks(TILE).zip(wide_keys.chunks_mut(TILE));
    for ((from, to), scales) in tiles.zip(key_scales.chunks_exact(2 * PAGE_POSITIONS)) {
        for first in (0..PAGE_POSITIONS).step_by(F::LANES) {
            // SAFETY: the CPU has the features, as the caller guarantees. LANES divides PAGE_POSITIONS, the length of a row of both tiles.
            unsafe {
                let scale = F::load_bf16(scales.as_ptr().cast::<u16>().add(first));
                for index in (first..from.len()).step_by(PAGE_POSITIONS) {
                    let integers = F::load_i8(from.as_ptr().add(index).cast());
                    F::store(to.as_mut_ptr().add(index), F::mul(integers, scale));
                }
            }
        }
    }
    if head.value_dim == 0 {
        return;
    }
    let groups = head.value_dim.div_ceil(CACHE_GROUP);
    let rows = values.chunks_exact(head.value_dim).zip(wide_values.chunks_exact_mut(head.value_dim));
    for ((from, to), scales) in rows.zip(value_scales.as_chunks::<2>().0.chunks_exact(groups)) {
        for (group, stored) in scales.iter().enumerate() {
            let scale = from_bf16(u16::from_le_bytes(*stored));
            let (mut index, end) = (group * CACHE_GROUP, ((group + 1) * CACHE_GROUP).min(head.value_dim));
            while index + F::LANES <= end {
                // SAFETY: the CPU has the features, as the caller guarantees, and both rows have `end` elements.
                unsafe {
                    let integers = F::load_i8(from.as_ptr().add(index).cast());
                    F::store(to.as_mut_ptr().add(index), F::mul(integers, F::splat(scale)));
                }
                index += F::LANES;
            }
            while index < end {
                to[index] = f32::from(from[index] as i8) * scale;
                index += 1;
            }
        }
    }
}
