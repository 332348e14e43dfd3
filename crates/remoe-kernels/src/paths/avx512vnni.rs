//! Dot products of quantised weights by AVX-512 VNNI. VPDPBUSD adds four products of unsigned and signed bytes to a 32-bit sum, without saturation.

use std::arch::x86_64::*;

use super::avx512::Avx512;
use super::integers::{E2M1_WITH_OFFSET, Integers};

impl Integers for Avx512 {
    type I = __m512i;
    const REMOVES_OFFSET: bool = false;

    #[inline(always)]
    unsafe fn splat_integer(x: i32) -> __m512i {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_set1_epi32(x) }
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> __m512i {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn low_nibbles(words: __m512i) -> __m512i {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_and_si512(words, _mm512_set1_epi32(0x0f0f_0f0f)) }
    }

    #[inline(always)]
    unsafe fn high_nibbles(words: __m512i) -> __m512i {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_and_si512(_mm512_srli_epi32::<4>(words), _mm512_set1_epi32(0x0f0f_0f0f)) }
    }

    #[inline(always)]
    unsafe fn e2m1(codes: __m512i) -> __m512i {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(E2M1_WITH_OFFSET.as_ptr().cast()));
            _mm512_shuffle_epi8(table, codes)
        }
    }

    #[inline(always)]
    unsafe fn int8_dot(sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_dpbusd_epi32(sum, w, x) }
    }

    type Partial = __m512i;

    #[inline(always)]
    unsafe fn empty_partial() -> __m512i {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn nibble_dot(partial: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_dpbusd_epi32(partial, w, x) }
    }

    #[inline(always)]
    unsafe fn add_partial(sum: __m512i, partial: __m512i) -> __m512i {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_add_epi32(sum, partial) }
    }

    #[inline(always)]
    unsafe fn to_floats(sums: __m512i) -> __m512 {
        // SAFETY: the CPU has AVX-512 BW and VNNI, and pointers are valid for 16 lanes, by the trait's contract.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
}

super::quantised_entry_points!(Avx512, "avx512f,avx512bw,avx512vnni");
