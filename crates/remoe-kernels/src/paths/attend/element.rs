//! Element types of keys and values in a page, from which attention loads float32 vectors.

use crate::paths::floats::Floats;

/// An element of a page.
///
/// # Safety
/// The CPU has the features of `F`. Pointers are valid for the elements that a method reads or writes, with any
/// alignment.
pub(super) trait Element: Copy {
    /// Bytes of an element in the KV cache.
    const CACHED_BYTES: usize;

    /// Reads `LANES` elements and widens them.
    unsafe fn load<F: Floats>(from: *const Self) -> F::V;
    /// Reads one element and widens it.
    unsafe fn load_one(from: *const Self) -> f32;
    /// Transposes and widens `LANES` rows of `LANES` 32-bit words. Rows are `stride` elements apart in `from`, and
    /// `to_stride` in `to`.
    unsafe fn transpose<F: Floats>(from: *const Self, stride: usize, to: *mut f32, to_stride: usize);
}

impl Element for f32 {
    const CACHED_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<F: Floats>(from: *const f32) -> F::V {
        // SAFETY: the trait's contract is that of the vector operation, or of an unaligned read.
        unsafe { F::load(from) }
    }

    #[inline(always)]
    unsafe fn load_one(from: *const f32) -> f32 {
        // SAFETY: the trait's contract is that of the vector operation, or of an unaligned read.
        unsafe { from.read_unaligned() }
    }

    #[inline(always)]
    unsafe fn transpose<F: Floats>(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the trait's contract is that of the vector operation, or of an unaligned read.
        unsafe { F::transpose(from, stride, to, to_stride) }
    }
}

/// Elements are bfloat16.
impl Element for u16 {
    const CACHED_BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<F: Floats>(from: *const u16) -> F::V {
        // SAFETY: the trait's contract is that of the vector operation, or of an unaligned read.
        unsafe { F::load_bf16(from) }
    }

    #[inline(always)]
    unsafe fn load_one(from: *const u16) -> f32 {
        // SAFETY: the trait's contract is that of the vector operation, or of an unaligned read.
        f32::from_bits(u32::from(unsafe { from.read_unaligned() }) << 16)
    }

    #[inline(always)]
    unsafe fn transpose<F: Floats>(from: *const u16, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the trait's contract, of pointers to words: a word is two elements.
        unsafe { F::transpose_pairs(from.cast(), stride / 2, to, to_stride) }
    }
}

/// An int8 element, already dequantised to float32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Dequantised(f32);

impl Element for Dequantised {
    const CACHED_BYTES: usize = 1;

    #[inline(always)]
    unsafe fn load<F: Floats>(from: *const Self) -> F::V {
        // SAFETY: the trait's contract is that of the vector operation, or of an unaligned read.
        unsafe { F::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn load_one(from: *const Self) -> f32 {
        // SAFETY: the trait's contract is that of the vector operation, or of an unaligned read.
        unsafe { from.cast::<f32>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn transpose<F: Floats>(from: *const Self, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the trait's contract is that of the vector operation, or of an unaligned read.
        unsafe { F::transpose(from.cast(), stride, to, to_stride) }
    }
}
