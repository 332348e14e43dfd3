//! Limits of the machine: bandwidth of memory reads and rate of arithmetic, without other work.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use remoe_kernels::{Dtype, InstructionPath};

/// Bytes that each bandwidth pass reads.
pub(crate) const STREAM_BYTES: usize = 1 << 30;

/// Chunks of a measurement. Threads take them one by one, as a pool's threads do, so that a disturbed thread does not
/// delay the others.
pub(crate) const CHUNKS: usize = 64;

/// Calls `work(chunk)` for the numbers below `rounds * CHUNKS` on several threads. Returns the seconds of all calls, and
/// the least seconds of `CHUNKS` consecutive ones, from the start of the first to the end of the last.
pub(crate) fn together(threads: usize, rounds: usize, work: impl Fn(usize) + Sync) -> (f64, f64) {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut spans = Vec::with_capacity(rounds * CHUNKS);
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= rounds * CHUNKS {
                return spans;
            }
            let start = Instant::now();
            work(chunk);
            spans.push((chunk / CHUNKS, start, Instant::now()));
        }
    };
    let spans: Vec<(usize, Instant, Instant)> = std::thread::scope(|scope| {
        let spawned: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        spawned.into_iter().flat_map(|s| s.join().expect("a measuring thread")).collect()
    });
    let mut bounds = vec![None; rounds];
    for &(round, start, end) in &spans {
        let (first, last) = bounds[round].unwrap_or((start, end));
        bounds[round] = Some((start.min(first), end.max(last)));
    }
    let bounds: Vec<(Instant, Instant)> = bounds.into_iter().flatten().collect();
    let best = bounds.iter().map(|(start, end)| (*end - *start).as_secs_f64());
    let start = bounds.iter().map(|b| b.0).min().expect("a round");
    let end = bounds.iter().map(|b| b.1).max().expect("a round");
    ((end - start).as_secs_f64(), best.fold(f64::INFINITY, f64::min))
}

/// Large buffer on huge pages, written once.
pub(crate) fn stream_buffer() -> Vec<u8> {
    let mut buffer: Vec<u8> = Vec::with_capacity(STREAM_BYTES);
    #[cfg(target_os = "linux")]
    {
        let huge = 2 << 20;
        let skip = buffer.as_ptr().align_offset(huge);
        // SAFETY: whole huge pages inside the reserved capacity; the advice does not change contents.
        let _ = unsafe {
            rustix::mm::madvise(
                buffer.as_mut_ptr().add(skip).cast(),
                (STREAM_BYTES - skip) & !(huge - 1),
                rustix::mm::Advice::LinuxHugepage,
            )
        };
    }
    buffer.resize(STREAM_BYTES, 1);
    buffer
}

/// Reads memory with the widest loads of the path.
pub(crate) fn read(path: InstructionPath, bytes: &[u8]) {
    match path {
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx512Bf16 | InstructionPath::Avx512F => {
            // SAFETY: the path is available.
            unsafe { x86::read_512(bytes) }
        }
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx2Fma => {
            // SAFETY: the path is available.
            unsafe { x86::read_256(bytes) }
        }
        _ => {
            let words = bytes
                .chunks_exact(8)
                .map(|b| u64::from_ne_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]));
            black_box(words.fold(0, |sum, word| sum ^ word));
        }
    }
}

/// Runs the path's arithmetic on registers and returns the number of floating-point operations.
pub(crate) fn arithmetic(path: InstructionPath, dtype: Dtype, steps: usize) -> f64 {
    match (path, dtype) {
        #[cfg(target_arch = "x86_64")]
        (InstructionPath::Avx512Bf16, Dtype::Bf16) => {
            // SAFETY: the path is available.
            unsafe { x86::dot_512(steps) }
        }
        #[cfg(target_arch = "x86_64")]
        (InstructionPath::Avx512Bf16 | InstructionPath::Avx512F, _) => {
            // SAFETY: the path is available.
            unsafe { x86::fma_512(steps) }
        }
        #[cfg(target_arch = "x86_64")]
        (InstructionPath::Avx2Fma, _) => {
            // SAFETY: the path is available.
            unsafe { x86::fma_256(steps) }
        }
        _ => {
            let mut sums = [1.0f32; 16];
            for _ in 0..steps {
                for sum in &mut sums {
                    *sum = *sum * black_box(0.999) + 0.001;
                }
            }
            black_box(sums);
            steps as f64 * 32.0
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    macro_rules! reader {
        ($name:ident, $feature:literal, $bytes:literal, $zero:ident, $load:ident, $xor:ident) => {
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(bytes: &[u8]) {
                let mut sums = [$zero(); 4];
                for block in bytes.chunks_exact(4 * $bytes) {
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let at = block.as_ptr().wrapping_add(i * $bytes);
                        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(8192).cast());
                        // SAFETY: inside the block.
                        *sum = $xor(*sum, unsafe { $load(at.cast()) });
                    }
                }
                black_box(sums);
            }
        };
    }
    reader!(read_512, "avx512f", 64, _mm512_setzero_si512, _mm512_loadu_si512, _mm512_xor_si512);
    reader!(read_256, "avx2", 32, _mm256_setzero_si256, _mm256_loadu_si256, _mm256_xor_si256);

    macro_rules! peak {
        ($name:ident, $features:literal, $registers:literal, $flops:literal, $zero:ident, |$sum:ident, $x:ident| $step:expr, $operand:expr) => {
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(rounds: usize) -> f64 {
                let mut sums = [$zero(); $registers];
                let $x = black_box($operand);
                for _ in 0..rounds {
                    for $sum in &mut sums {
                        *$sum = $step;
                    }
                }
                black_box(sums);
                rounds as f64 * $registers as f64 * $flops as f64
            }
        };
    }
    peak!(dot_512, "avx512f,avx512bf16", 24, 64, _mm512_setzero_ps, |sum, x| _mm512_dpbf16_ps(*sum, x, x), {
        // SAFETY: both are 64 bytes without invalid values.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(0x3c00_3c00)) }
    });
    peak!(
        fma_512,
        "avx512f",
        24,
        32,
        _mm512_setzero_ps,
        |sum, x| _mm512_fmadd_ps(x, x, *sum),
        _mm512_set1_ps(0.01)
    );
    peak!(
        fma_256,
        "avx2,fma",
        12,
        16,
        _mm256_setzero_ps,
        |sum, x| _mm256_fmadd_ps(x, x, *sum),
        _mm256_set1_ps(0.01)
    );
}
