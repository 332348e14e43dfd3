//! 256-bit vectors with fused multiply-add.

use std::arch::x86_64::*;

use super::activation::ROUNDER;
use super::floats::Floats;
use super::steps::{F32Step, WidenedStep};
use crate::numerics::NAN_BITS;

/// Eight lanes.
pub(super) struct Avx2;

impl Floats for Avx2 {
    type V = __m256;
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: the trait's contract.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: the trait's contract.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m256) {
        // SAFETY: the trait's contract.
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the trait's contract.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the trait's contract.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the trait's contract.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the trait's contract.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn at_least(bound: __m256, x: __m256) -> __m256 {
        // SAFETY: the trait's contract. The instruction returns its second operand when one is NaN and when they are equal.
        unsafe { _mm256_max_ps(bound, x) }
    }

    #[inline(always)]
    unsafe fn at_most(bound: __m256, x: __m256) -> __m256 {
        // SAFETY: the trait's contract. As for `at_least`.
        unsafe { _mm256_min_ps(bound, x) }
    }

    #[inline(always)]
    unsafe fn scale(v: __m256, _n: __m256, shifted: __m256) -> __m256 {
        // SAFETY: the trait's contract. Two factors that are normal numbers: only the second product can overflow or be flushed.
        unsafe {
            let n =
                _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(ROUNDER.to_bits() as i32));
            let half = _mm256_srai_epi32::<1>(n);
            let rest = _mm256_sub_epi32(n, half);
            let bias = _mm256_set1_epi32(127);
            let half = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
            let rest = _mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias));
            _mm256_mul_ps(_mm256_mul_ps(v, _mm256_castsi256_ps(half)), _mm256_castsi256_ps(rest))
        }
    }

    #[inline(always)]
    unsafe fn canonical(v: __m256) -> __m256 {
        // SAFETY: the trait's contract.
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v);
            _mm256_blendv_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(NAN_BITS as i32)), nan)
        }
    }

    #[inline(always)]
    unsafe fn round_bf16(v: __m256) -> __m256 {
        // SAFETY: the trait's contract. Arithmetic results are never denormal here, so that there is nothing to flush.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let lowest_kept = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(lowest_kept, _mm256_set1_epi32(0x7fff));
            let rounded =
                _mm256_and_si256(_mm256_add_epi32(bits, bias), _mm256_set1_epi32(0xffff_0000u32 as i32));
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v);
            _mm256_blendv_ps(
                _mm256_castsi256_ps(rounded),
                _mm256_castsi256_ps(_mm256_set1_epi32(NAN_BITS as i32)),
                nan,
            )
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, rounded: __m256) {
        // SAFETY: the trait's contract: 8 elements of 2 bytes.
        unsafe {
            let halves = _mm256_srli_epi32::<16>(_mm256_castps_si256(rounded));
            let packed = _mm256_packus_epi32(halves, halves);
            let ordered = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(ordered));
        }
    }

    #[inline(always)]
    unsafe fn odd(from: *const u32) -> __m256 {
        // SAFETY: the trait's contract.
        unsafe {
            let words = _mm256_loadu_si256(from.cast());
            _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000u32 as i32)))
        }
    }

    #[inline(always)]
    unsafe fn even(from: *const u32) -> __m256 {
        // SAFETY: the trait's contract.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_loadu_si256(from.cast()))) }
    }
}

super::entry_points!(WidenedStep<Avx2>, F32Step<Avx2>, "avx2,fma");
super::attend_entry_point!(Avx2, "avx2,fma");
