//! The path for AVX-512F: 512-bit vectors. It needs no other extension, so that every AVX-512 processor has it.

use std::arch::x86_64::*;

use super::codes::{Codes, TABLE_VECTORS};
use super::floats::Floats;
use super::steps::{F32Step, WidenedStep};
use crate::numerics::NAN_BITS;
use crate::transpose::transposed;

/// Vectors of sixteen lanes.
pub(super) struct Avx512;

impl Floats for Avx512 {
    type V = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        // SAFETY: by the trait's contract, the CPU has AVX-512F, and pointers are valid for 16 elements of one byte.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        // SAFETY: by the trait's contract, the CPU has AVX-512F, and pointers are valid for 16 elements of 2 bytes.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn at_least(bound: __m512, x: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F. (The instruction returns its second operand if one is NaN, and if they are equal.)
        unsafe { _mm512_max_ps(bound, x) }
    }

    #[inline(always)]
    unsafe fn at_most(bound: __m512, x: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F. (NaN as in `at_least`.)
        unsafe { _mm512_min_ps(bound, x) }
    }

    #[inline(always)]
    unsafe fn largest(v: __m512) -> f32 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe {
            let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            let halves = _mm256_max_ps(upper, _mm512_castps512_ps256(v));
            let quarters = _mm_max_ps(_mm256_extractf128_ps::<1>(halves), _mm256_castps256_ps128(halves));
            let pairs = _mm_max_ps(_mm_movehl_ps(quarters, quarters), quarters);
            _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(pairs), pairs))
        }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe {
            for (i, column) in columns(from.cast(), stride).into_iter().enumerate() {
                Self::store(to.add(i * to_stride), _mm512_castsi512_ps(column));
            }
        }
    }

    #[inline(always)]
    unsafe fn transpose_pairs(from: *const u32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe {
            for (i, column) in columns(from, stride).into_iter().enumerate() {
                let (load_even, load_odd) = (to.add(2 * i * to_stride), to.add((2 * i + 1) * to_stride));
                let upper = _mm512_and_si512(column, _mm512_set1_epi32(0xffff_0000u32 as i32));
                Self::store(load_even, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(column)));
                Self::store(load_odd, _mm512_castsi512_ps(upper));
            }
        }
    }

    #[inline(always)]
    unsafe fn scale(v: __m512, n: __m512, _shifted: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_scalef_ps(v, n) }
    }

    #[inline(always)]
    unsafe fn canonical(v: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            _mm512_mask_mov_ps(v, nan, _mm512_castsi512_ps(_mm512_set1_epi32(NAN_BITS as i32)))
        }
    }

    #[inline(always)]
    unsafe fn round_bf16(v: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F. (Arithmetic results are never denormal in this float mode, so that none needs flushing.)
        unsafe {
            let bits = _mm512_castps_si512(v);
            let lowest_kept = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(lowest_kept, _mm512_set1_epi32(0x7fff));
            let rounded =
                _mm512_and_si512(_mm512_add_epi32(bits, bias), _mm512_set1_epi32(0xffff_0000u32 as i32));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            _mm512_castsi512_ps(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(NAN_BITS as i32)))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, rounded: __m512) {
        // SAFETY: by the trait's contract, the CPU has AVX-512F, and pointers are valid for 16 elements of 2 bytes.
        unsafe {
            let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(rounded)));
            _mm256_storeu_si256(to.cast(), halves);
        }
    }

    #[inline(always)]
    unsafe fn load_odd(from: *const u32) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe {
            let words = _mm512_loadu_si512(from.cast());
            _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000u32 as i32)))
        }
    }

    #[inline(always)]
    unsafe fn load_even(from: *const u32) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_loadu_si512(from.cast()))) }
    }
}

/// Reads sixteen rows of sixteen words, `stride` words apart, and returns their columns.
///
/// # Safety
/// The CPU has AVX-512F; all rows are readable.
#[inline(always)]
unsafe fn columns(from: *const u32, stride: usize) -> [__m512i; 16] {
    // SAFETY: the CPU has AVX-512F, and all rows are readable, as the caller guarantees.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); 16];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = _mm512_loadu_si512(from.add(r * stride).cast());
        }
        transposed(rows)
    }
}

impl Codes for Avx512 {
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> __m512 {
        // SAFETY: the CPU has AVX-512F and so AVX2, and `from` is valid for 16 codes. (A code becomes a binary16: the sign
        // stays at the top, the other seven bits move to the end of the exponent and the start of the fraction. Denormals
        // of binary16 are converted in any float mode.)
        unsafe {
            let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()));
            let halves = _mm256_and_si256(_mm256_slli_epi16::<7>(codes), _mm256_set1_epi16(0xbf80u16 as i16));
            _mm512_cvtph_ps(halves)
        }
    }

    #[inline(always)]
    unsafe fn load_scales(from: *const f32) -> __m512 {
        // SAFETY: by the trait's contract, the CPU has AVX-512F, and pointers are valid for four elements.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_loadu_ps(from)))
        }
    }

    #[inline(always)]
    unsafe fn round_finite_bf16(v: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let lowest_kept = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(lowest_kept, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_add_epi32(bits, bias);
            _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000u32 as i32)))
        }
    }

    type Table = std::convert::Infallible;

    #[inline(always)]
    unsafe fn table(_scales: *const f32) -> Option<Self::Table> {
        None
    }

    #[inline(always)]
    unsafe fn look_up(table: Self::Table, _from: *const u8) -> [__m512; TABLE_VECTORS] {
        match table {}
    }
}

super::entry_points!(WidenedStep<Avx512>, F32Step<Avx512>, "avx512f");
super::fp8_entry_points!(Avx512, "avx512f");
super::attend_entry_point!(Avx512, "avx512f");
