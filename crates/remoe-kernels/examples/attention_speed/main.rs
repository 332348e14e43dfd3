//! Instrument for attention and operations on rows: CPU time of one call (or wall time), its rate, and a checksum of the results' bits, so that two builds can be compared in alternating rounds.
//!
//! | argument | what is measured |
//! | --- | --- |
//! | `mla-prefill` | latent attention (16 heads, 512 + 64), a prompt of 2,000 tokens, GFLOP/s |
//! | `mla-decode` | the same, one token after 2,048, GFLOP/s |
//! | `gqa-prefill` | 16 query heads over 4 of 128, a prompt of 4,096 tokens, GFLOP/s |
//! | `gqa-decode-4k`, `gqa-decode-8k` | the same, one token, 24 layers in turn, GB/s of keys and values |
//! | `gqa-decode-8k-int8` | the same with keys and values of int8 |
//! | `mqa-decode-8k`, `mqa-decode-8k-2` | 4 query heads over one of 128, one token after 8,191, 24 layers in turn, by one thread and by two: wall time, GB/s of keys and values |
//! | `norm`, `rotate`, `add` | operations on 512 rows of 2,048 elements, GB/s |
//! | `weights` | product of one row with 400 MB of bfloat16 weights, GB/s |
//! | `products` | product of 512 rows by fused multiply-adds (`avx512f` or `avx2-fma`), GFLOP/s |
//!
//! Usage: `cargo run --release -p remoe-kernels --example attention_speed -- mla-prefill gqa-decode-4k`

#![allow(clippy::expect_used, clippy::panic)]

mod elementwise;

use remoe_kernels::{
    AttentionShape, AttentionSpan, CacheFormat, Dtype, InstructionPath, KvPage, MatrixProduct,
    PAGE_POSITIONS, PackedMatrix, Pool, PoolConfig, StoredDtype,
};

use std::time::Instant;

/// Number of layers, whose keys and values together exceed the caches.
const LAYERS: usize = 24;

fn main() {
    for name in std::env::args().skip(1) {
        let (seconds, amount, unit, sum) = measure(&name);
        let rate = amount / seconds / 1e9;
        println!(
            r#"{{"shape": "{name}", "ms": {:.3}, "rate": {rate:.2}, "unit": "{unit}", "bits": "{sum:016x}"}}"#,
            seconds * 1e3
        );
    }
}

/// Seconds of a call, its operations or bytes, their unit, and the checksum of its results.
fn measure(name: &str) -> (f64, f64, &'static str, u64) {
    let latent = AttentionShape {
        dtype: Dtype::Bf16,
        kv_heads: 1,
        group: 16,
        key_dim: 576,
        value_dim: 512,
        latent: true,
        scale: 0.07,
        window: None,
        cache: CacheFormat::Plain,
    };
    let grouped =
        AttentionShape { kv_heads: 4, group: 4, key_dim: 128, value_dim: 128, latent: false, ..latent };
    let int8 = AttentionShape { cache: CacheFormat::Int8, ..grouped };
    let single = AttentionShape { kv_heads: 1, ..grouped };
    match name {
        "mla-prefill" => attention(&latent, [0, 2000], 1, 1, None),
        "mla-decode" => attention(&latent, [2047, 1], LAYERS, 4, None),
        "gqa-prefill" => attention(&grouped, [0, 4096], 1, 1, None),
        "gqa-decode-4k" => attention(&grouped, [4095, 1], LAYERS, 6, None),
        "gqa-decode-8k" => attention(&grouped, [8191, 1], LAYERS, 3, None),
        "gqa-decode-8k-int8" => attention(&int8, [8191, 1], LAYERS, 3, None),
        "mqa-decode-8k" => attention(&single, [8191, 1], LAYERS, 12, Some(1)),
        "mqa-decode-8k-2" => attention(&single, [8191, 1], LAYERS, 12, Some(2)),
        "norm" | "rotate" | "add" => elementwise::measure(name),
        "weights" => product(None, Dtype::Bf16, 4096, 50_000, 1),
        "products" => product(fused(), Dtype::F32, 2048, 2048, 512),
        _ => panic!("unknown measurement {name}"),
    }
}

/// Returns the widest path with fused multiply-adds.
fn fused() -> Option<InstructionPath> {
    let available = InstructionPath::available();
    [InstructionPath::Avx512F, InstructionPath::Avx2Fma].into_iter().find(|path| available.contains(path))
}

/// Returns numbers between -1 and 1 with 8 significant bits, as bfloat16.
fn numbers(count: usize, seed: u32) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    (0..count).map(move |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        f32::from((state >> 16) as u8) / 128.0 - 1.0
    })
}

fn bytes(dtype: Dtype, values: impl Iterator<Item = f32>) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::Bf16 => values.flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
    }
}

fn pool(path: Option<InstructionPath>) -> Pool {
    Pool::new(PoolConfig { threads: 1, path, ..PoolConfig::default() }).expect("a pool")
}

/// Measures wall time with several `threads`, or CPU time with one.
fn attention(
    shape: &AttentionShape,
    [past, rows]: [usize; 2],
    layers: usize,
    calls: usize,
    threads: Option<usize>,
) -> (f64, f64, &'static str, u64) {
    let layer_bytes = shape.page_bytes();
    let pages: Vec<KvPage> = (0..(past + rows).div_ceil(PAGE_POSITIONS))
        .map(|page| {
            let content = bytes(shape.dtype, numbers(layers * layer_bytes / 2, page as u32 + 7));
            let mut page = KvPage::zeroed(content.len()).expect("memory");
            page.copy_from_slice(&content);
            page
        })
        .collect();
    let layers: Vec<Vec<&[u8]>> = (0..layers)
        .map(|at| pages.iter().map(|page| &page[at * layer_bytes..][..layer_bytes]).collect())
        .collect();
    let query = bytes(shape.dtype, numbers(rows * shape.heads() * shape.key_dim, 3));
    let mut output = vec![0; rows * shape.heads() * shape.value_dim * shape.dtype.bytes()];
    let config = PoolConfig { threads: threads.unwrap_or(1), ..PoolConfig::default() };
    let pool = Pool::new(config).expect("a pool");
    let mut sum = 0xcbf2_9ce4_8422_2325;
    let mut run = |layer: &[&[u8]]| {
        let span = AttentionSpan { pages: layer, past, rows };
        pool.attend(shape, &query, None, &[span], &mut output).expect("attention");
        sum = checksum(sum, &output);
    };
    run(&layers[0]);
    let (start, begin) = (Instant::now(), cpu_seconds());
    for _ in 0..calls {
        layers.iter().for_each(|layer| run(layer));
    }
    let spent = if threads.is_some() { start.elapsed().as_secs_f64() } else { cpu_seconds() - begin };
    let seconds = spent / calls as f64;
    if rows == 1 && !shape.latent {
        let read = layers.len() * (past + rows) * layer_bytes / PAGE_POSITIONS;
        return (seconds, read as f64, "GB/s", sum);
    }
    let seen = rows * past + rows * (rows + 1) / 2;
    let products = layers.len() * seen * shape.heads() * (shape.key_dim + shape.value_dim);
    (seconds, 2.0 * products as f64, "GFLOP/s", sum)
}

fn product(
    path: Option<InstructionPath>,
    dtype: Dtype,
    inputs: usize,
    outputs: usize,
    rows: usize,
) -> (f64, f64, &'static str, u64) {
    let stored = StoredDtype::from(dtype);
    let weights = bytes(dtype, numbers(inputs * outputs, 1));
    let matrix = PackedMatrix::pack(inputs, dtype, &[(stored, &weights)]).expect("a matrix");
    let x = bytes(dtype, numbers(rows * inputs, 2));
    let mut output = vec![0; rows * matrix.output_bytes()];
    let pool = pool(path);
    let mut run = || {
        pool.multiply(&mut [MatrixProduct { matrix: &matrix, inputs: &x, output: &mut output }])
            .expect("a product");
    };
    run();
    let begin = cpu_seconds();
    let calls = 8;
    (0..calls).for_each(|_| run());
    let seconds = (cpu_seconds() - begin) / f64::from(calls);
    let sum = checksum(0, &output);
    match rows {
        1 => (seconds, weights.len() as f64, "GB/s", sum),
        _ => (seconds, 2.0 * (rows * inputs * outputs) as f64, "GFLOP/s", sum),
    }
}

/// Computes an FNV-1a hash of words.
fn checksum(mut sum: u64, bytes: &[u8]) -> u64 {
    for word in bytes.as_chunks::<8>().0 {
        sum = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x0100_0000_01b3);
    }
    sum
}

/// Returns the CPU seconds of this thread, on which a pool of one thread computes.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let time = stat.split(' ').next().expect("a time").parse::<u64>().expect("a number");
    time as f64 / 1e9
}
