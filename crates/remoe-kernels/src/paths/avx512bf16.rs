//! Steps of K by the bfloat16 instructions of AVX-512.
//!
//! VDPBF16PS computes `acc += odd * odd`, then `acc += even * even`: fused multiply-adds that flush denormals in any
//! float mode. VCVTNEPS2BF16 rounds to nearest even and flushes, too.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::avx512::Avx512;
use super::floats::Floats;
use super::steps::Step;

/// bfloat16 pairs: both multiply-adds in one instruction.
pub(super) struct DotStep;

impl Step for DotStep {
    type F = Avx512;
    type InBf16 = Self;
    const BF16: bool = true;
    const WORDS: usize = 64;

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        acc: &mut [[__m512; C]; R],
        x: &[*const u8; R],
        pair: usize,
        w: *const u32,
        first: usize,
    ) {
        // SAFETY: the CPU has AVX-512 BF16, and rows and weights are valid, by the trait's contract. `__m512bh` and `__m512i` are both 64 bytes without invalid values.
        unsafe {
            let mut weights = [_mm512_setzero_si512(); C];
            for c in 0..C {
                weights[c] = _mm512_loadu_si512(w.add(first + c * Avx512::LANES).cast());
            }
            for r in 0..R {
                let x = _mm512_set1_epi32(x[r].cast::<i32>().add(pair).read_unaligned());
                for c in 0..C {
                    acc[r][c] = _mm512_dpbf16_ps(
                        acc[r][c],
                        transmute::<__m512i, __m512bh>(x),
                        transmute::<__m512i, __m512bh>(weights[c]),
                    );
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn round(v: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512 BF16. `__m256bh` and `__m256i` are both 32 bytes without invalid values.
        unsafe {
            let halves = transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }
    }

    #[inline(always)]
    unsafe fn store_rounded(to: *mut u16, v: __m512) {
        // SAFETY: the CPU has AVX-512 BF16, and `to` is valid for 16 bfloat16. Types as in `round`.
        unsafe {
            let halves = _mm512_cvtneps_pbh(Avx512::canonical(v));
            _mm256_storeu_si256(to.cast(), transmute::<__m256bh, __m256i>(halves));
        }
    }
}

super::entry_points!(@ gate_up_bf16, gate_up, DotStep, "avx512f,avx512bf16");
super::entry_points!(@ down_bf16, down, DotStep, "avx512f,avx512bf16");

pub(super) const BF16: super::Kernels = super::Kernels { gate_up: gate_up_bf16, down: down_bf16 };
