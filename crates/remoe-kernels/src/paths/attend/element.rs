//! Elements of keys and values, from which attention reads vectors of float32.

use crate::paths::floats::Floats;

/// Elements of a page as they are stored.
pub(super) trait Element: Copy {
    /// Bytes of an element in the cache.
    const CACHED: usize;

    /// Reads `LANES` elements and widens them.
    unsafe fn load<F: Floats>(from: *const Self) -> F::V;
    /// Reads one element, of any alignment, and widens it.
    unsafe fn widened(from: *const Self) -> f32;
    /// Transposes a square: `LANES` rows, `stride` elements apart, of as many words as a vector has lanes. Rows of `to` are `to_stride` apart.
    unsafe fn transpose<F: Floats>(from: *const Self, stride: usize, to: *mut f32, to_stride: usize);
}

impl Element for f32 {
    const CACHED: usize = 4;

    #[inline(always)]
    unsafe fn load<F: Floats>(from: *const f32) -> F::V {
        // SAFETY: the caller's promise.
        unsafe { F::load(from) }
    }

    #[inline(always)]
    unsafe fn widened(from: *const f32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { from.read_unaligned() }
    }

    #[inline(always)]
    unsafe fn transpose<F: Floats>(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { F::transpose(from, stride, to, to_stride) }
    }
}

/// bfloat16.
impl Element for u16 {
    const CACHED: usize = 2;

    #[inline(always)]
    unsafe fn load<F: Floats>(from: *const u16) -> F::V {
        // SAFETY: the caller's promise.
        unsafe { F::load_bf16(from) }
    }

    #[inline(always)]
    unsafe fn widened(from: *const u16) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { from.read_unaligned() }) << 16)
    }

    #[inline(always)]
    unsafe fn transpose<F: Floats>(from: *const u16, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller's promise; a word is two elements.
        unsafe { F::transpose_pairs(from.cast(), stride / 2, to, to_stride) }
    }
}

/// An int8 element, widened.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Widened(f32);

impl Element for Widened {
    const CACHED: usize = 1;

    #[inline(always)]
    unsafe fn load<F: Floats>(from: *const Self) -> F::V {
        // SAFETY: the caller's promise.
        unsafe { F::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn widened(from: *const Self) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<f32>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn transpose<F: Floats>(from: *const Self, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { F::transpose(from.cast(), stride, to, to_stride) }
    }
}
