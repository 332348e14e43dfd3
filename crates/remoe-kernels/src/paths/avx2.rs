//! The path for AVX2 with fused multiply-add: 256-bit vectors.

use std::arch::x86_64::*;

use super::activation::ROUNDER;
use super::codes::{Codes, TABLE_VECTORS};
use super::floats::Floats;
use super::integers::{E2M1_WITH_OFFSET, Integers};
use super::steps::{F32Step, WidenedStep};
use crate::numerics::E4M3;
use crate::numerics::NAN_BITS;
use crate::transpose::transposed_half;

/// Vectors of eight lanes.
pub(super) struct Avx2;

impl Floats for Avx2 {
    type V = __m256;
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m256 {
        // SAFETY: by the trait's contract, the CPU has AVX2, and pointers are valid for 8 elements of one byte.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m256 {
        // SAFETY: by the trait's contract, the CPU has AVX2, and pointers are valid for 8 elements of 2 bytes.
        unsafe {
            let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m256) {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn at_least(bound: __m256, x: __m256) -> __m256 {
        // SAFETY: the CPU has AVX2. (The instruction returns its second operand if one is NaN, and if they are equal.)
        unsafe { _mm256_max_ps(bound, x) }
    }

    #[inline(always)]
    unsafe fn at_most(bound: __m256, x: __m256) -> __m256 {
        // SAFETY: the CPU has AVX2. (NaN as in `at_least`.)
        unsafe { _mm256_min_ps(bound, x) }
    }

    #[inline(always)]
    unsafe fn largest(v: __m256) -> f32 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe {
            let quarters = _mm_max_ps(_mm256_extractf128_ps::<1>(v), _mm256_castps256_ps128(v));
            let pairs = _mm_max_ps(_mm_movehl_ps(quarters, quarters), quarters);
            _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(pairs), pairs))
        }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe {
            for (i, column) in columns(from.cast(), stride).into_iter().enumerate() {
                Self::store(to.add(i * to_stride), _mm256_castsi256_ps(column));
            }
        }
    }

    #[inline(always)]
    unsafe fn transpose_pairs(from: *const u32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe {
            for (i, column) in columns(from, stride).into_iter().enumerate() {
                let (load_even, load_odd) = (to.add(2 * i * to_stride), to.add((2 * i + 1) * to_stride));
                let upper = _mm256_and_si256(column, _mm256_set1_epi32(0xffff_0000u32 as i32));
                Self::store(load_even, _mm256_castsi256_ps(_mm256_slli_epi32::<16>(column)));
                Self::store(load_odd, _mm256_castsi256_ps(upper));
            }
        }
    }

    #[inline(always)]
    unsafe fn scale(v: __m256, _n: __m256, shifted: __m256) -> __m256 {
        // SAFETY: the CPU has AVX2. (Two multiplications by normal numbers: only the second product can overflow or be flushed.)
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
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v);
            _mm256_blendv_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(NAN_BITS as i32)), nan)
        }
    }

    #[inline(always)]
    unsafe fn round_bf16(v: __m256) -> __m256 {
        // SAFETY: the CPU has AVX2. (Arithmetic results are never denormal in this float mode, so that none needs flushing.)
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
        // SAFETY: by the trait's contract, the CPU has AVX2, and pointers are valid for 8 elements of 2 bytes.
        unsafe {
            let halves = _mm256_srli_epi32::<16>(_mm256_castps_si256(rounded));
            let packed = _mm256_packus_epi32(halves, halves);
            let ordered = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(ordered));
        }
    }

    #[inline(always)]
    unsafe fn load_odd(from: *const u32) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe {
            let words = _mm256_loadu_si256(from.cast());
            _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000u32 as i32)))
        }
    }

    #[inline(always)]
    unsafe fn load_even(from: *const u32) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_loadu_si256(from.cast()))) }
    }
}

/// Reads eight rows of eight words, `stride` words apart, and returns their columns.
///
/// # Safety
/// The CPU has AVX2; all rows are readable.
#[inline(always)]
unsafe fn columns(from: *const u32, stride: usize) -> [__m256i; 8] {
    // SAFETY: the CPU has AVX2, and pointers are valid, as the caller guarantees.
    unsafe {
        let mut rows = [_mm256_setzero_si256(); 8];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = _mm256_loadu_si256(from.add(r * stride).cast());
        }
        transposed_half(rows)
    }
}

impl Integers for Avx2 {
    type I = __m256i;
    const REMOVES_OFFSET: bool = true;

    #[inline(always)]
    unsafe fn splat_integer(x: i32) -> __m256i {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_set1_epi32(x) }
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> __m256i {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    unsafe fn low_nibbles(words: __m256i) -> __m256i {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_and_si256(words, _mm256_set1_epi8(0x0f)) }
    }

    #[inline(always)]
    unsafe fn high_nibbles(words: __m256i) -> __m256i {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_and_si256(_mm256_srli_epi32::<4>(words), _mm256_set1_epi8(0x0f)) }
    }

    #[inline(always)]
    unsafe fn e2m1(codes: __m256i) -> __m256i {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1_WITH_OFFSET.as_ptr().cast()));
            _mm256_shuffle_epi8(table, codes)
        }
    }

    #[inline(always)]
    unsafe fn int8_dot(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the CPU has AVX2. (Magnitudes are at most 128 and 127, so that the sum of two products is below 2^15: nothing saturates.)
        unsafe {
            let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            Self::add_partial(sum, pairs)
        }
    }

    /// Sums of the even and of the odd pairs of products, 16 bits each.
    type Partial = __m256i;

    #[inline(always)]
    unsafe fn empty_partial() -> __m256i {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn nibble_dot(partial: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the CPU has AVX2. (The trait's contract bounds the sums, so that nothing saturates.)
        unsafe { _mm256_add_epi16(partial, _mm256_maddubs_epi16(w, x)) }
    }

    #[inline(always)]
    unsafe fn add_partial(sum: __m256i, partial: __m256i) -> __m256i {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(partial, _mm256_set1_epi16(1))) }
    }

    #[inline(always)]
    unsafe fn to_floats(sums: __m256i) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe { _mm256_cvtepi32_ps(sums) }
    }
}

impl Codes for Avx2 {
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> __m256 {
        // SAFETY: the CPU has F16C, and `from` is valid for eight codes. (A code becomes a binary16: the sign stays at the
        // top, the other seven bits move to the end of the exponent and the start of the fraction. Denormals of binary16
        // are converted in any float mode.)
        unsafe {
            let codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(from.cast()));
            let halves = _mm_and_si128(_mm_slli_epi16::<7>(codes), _mm_set1_epi16(0xbf80u16 as i16));
            _mm256_cvtph_ps(halves)
        }
    }

    #[inline(always)]
    unsafe fn load_scales(from: *const f32) -> __m256 {
        // SAFETY: by the trait's contract, the CPU has AVX2, and pointers are valid for two elements.
        unsafe {
            let two = _mm256_castpd128_pd256(_mm_load_sd(from.cast()));
            _mm256_permutevar8x32_ps(_mm256_castpd_ps(two), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))
        }
    }

    #[inline(always)]
    unsafe fn round_finite_bf16(v: __m256) -> __m256 {
        // SAFETY: the CPU has AVX2 and FMA, and pointers are valid for eight lanes, by the trait's contract.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let lowest_kept = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(lowest_kept, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_add_epi32(bits, bias);
            _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(0xffff_0000u32 as i32)))
        }
    }

    type Table = E4m3Table;

    #[inline(always)]
    unsafe fn table(scales: *const f32) -> Option<E4m3Table> {
        // SAFETY: the CPU has AVX2, and `scales` is valid for eight scales of four columns each.
        unsafe {
            let scale = scales.read_unaligned();
            let first = _mm256_set1_ps(scale);
            let equal = _mm256_cmp_ps::<_CMP_EQ_OQ>(_mm256_loadu_ps(scales), first);
            if !(scale > 0.0 && _mm256_movemask_ps(equal) == 0xff) {
                return None;
            }
            let denormals = scaled_bf16(E4M3.as_ptr(), first);
            let fractions = scaled_bf16(E4M3_BASE.as_ptr(), first);
            // The pack instructions work within 128-bit halves: the permutations restore the order.
            let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(denormals, fractions));
            let low = _mm256_and_si256(halves, _mm256_set1_epi16(0xff));
            let bytes = _mm256_packus_epi16(low, _mm256_srli_epi16::<8>(halves));
            let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(bytes);
            Some(E4m3Table {
                low: _mm256_permute2x128_si256::<0x00>(bytes, bytes),
                high: _mm256_permute2x128_si256::<0x11>(bytes, bytes),
            })
        }
    }

    #[inline(always)]
    unsafe fn look_up(table: E4m3Table, from: *const u8) -> [__m256; TABLE_VECTORS] {
        // SAFETY: by the trait's contract, the CPU has AVX2, and pointers are valid for 32 codes.
        unsafe {
            // The unpack instructions below work within 128-bit halves. With this order, their columns ascend.
            let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
            let codes = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(from.cast()), order);
            // Index: the code itself below 8 (denormals), else 8 plus the fraction.
            let magnitudes = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
            let fractions =
                _mm256_and_si256(_mm256_or_si256(codes, _mm256_set1_epi8(8)), _mm256_set1_epi8(15));
            let index = _mm256_min_epu8(magnitudes, fractions);
            let low = _mm256_shuffle_epi8(table.low, index);
            let high = _mm256_shuffle_epi8(table.high, index);
            let zero = _mm256_setzero_si256();
            let first = sign_and_exponent(_mm256_unpacklo_epi8(zero, codes));
            let first = _mm256_add_epi16(first, _mm256_unpacklo_epi8(low, high));
            let second = sign_and_exponent(_mm256_unpackhi_epi8(zero, codes));
            let second = _mm256_add_epi16(second, _mm256_unpackhi_epi8(low, high));
            [
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first)),
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, second)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, second)),
            ]
        }
    }
}

/// Multiplies eight numbers by `scale` and rounds them to bfloat16, one in each word.
///
/// # Safety
/// The CPU has AVX2; `from` is valid for eight numbers.
#[inline(always)]
unsafe fn scaled_bf16(from: *const f32, scale: __m256) -> __m256i {
    // SAFETY: the CPU has AVX2, and pointers are valid, as the caller guarantees.
    unsafe {
        let numbers = Avx2::round_finite_bf16(_mm256_mul_ps(_mm256_loadu_ps(from), scale));
        _mm256_srli_epi32::<16>(_mm256_castps_si256(numbers))
    }
}

/// Moves sign and exponent of codes, in the upper bytes of 16-bit words, to their positions in bfloat16: bits 15 and 7.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn sign_and_exponent(codes: __m256i) -> __m256i {
    // SAFETY: the CPU has AVX2, and pointers are valid, as the caller guarantees.
    unsafe { _mm256_and_si256(_mm256_srai_epi16::<4>(codes), _mm256_set1_epi16(0x8780u16 as i16)) }
}

/// Bytes of the bfloat16 weights of load_e4m3 codes under one scale: of the codes below 8 (zero and denormals), then of the
/// eight fractions with exponent 0 as if that were no denormal. A code's exponent is added to these bits.
#[derive(Clone, Copy)]
pub(crate) struct E4m3Table {
    /// Lower bytes of the 16 numbers, in both 128-bit halves.
    low: __m256i,
    /// Upper bytes.
    high: __m256i,
}

/// Numbers with the eight fractions of load_e4m3, with exponent 0 as if it had no denormals. Times 2^-8, as in [`E4M3`].
const E4M3_BASE: [f32; 8] = {
    let mut numbers = [0.0; 8];
    let mut fraction = 0;
    while fraction < 8 {
        numbers[fraction] = f32::from_bits((127 - 7 - 8) << 23 | (fraction as u32) << 20);
        fraction += 1;
    }
    numbers
};

super::entry_points!(WidenedStep<Avx2>, F32Step<Avx2>, "avx2,fma");
super::quantised_entry_points!(Avx2, "avx2,fma");
super::fp8_entry_points!(Avx2, "avx2,fma,f16c");
super::attend_entry_point!(Avx2, "avx2,fma");
