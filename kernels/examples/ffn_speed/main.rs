//! How close the expert FFN comes to what the machine can do: its read bandwidth at one token, its peak arithmetic at 256 tokens. All figures come from alternating passes of one run, with the same number of threads.
//!
//! `cargo run --release -p remoe-kernels --example ffn_speed -- [--json] [--threads N] [--path NAME] [--dtype bf16|f32] [--hidden N] [--width N] [--passes N]`

#![allow(clippy::expect_used)]

use std::hint::black_box;
use std::time::Instant;

mod machine;

use machine::{CHUNKS, STREAM_BYTES, arithmetic, read, stream_buffer, together};
use remoe_kernels::{
    Activation, Dtype, ExpertShape, InstructionPath, Job, Matrix, PackedExpert, PackedExpertBuilder, Pool,
    PoolConfig, StoredDtype,
};

/// Weights that are cycled through, so that they come from memory and not from a cache.
const WEIGHT_BYTES: usize = 400 << 20;
const TOKENS: usize = 256;
const TOP_K: usize = 8;

struct Options {
    json: bool,
    threads: usize,
    path: InstructionPath,
    dtype: Dtype,
    hidden: usize,
    width: usize,
    passes: usize,
}

fn options() -> Options {
    let mut options = Options {
        json: false,
        threads: PoolConfig::default().threads,
        path: InstructionPath::detect(),
        dtype: Dtype::Bf16,
        hidden: 2048,
        width: 1408,
        passes: 7,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--json" {
            options.json = true;
            continue;
        }
        let value = arguments.next().unwrap_or_else(|| usage(&argument));
        let number = || value.parse().unwrap_or_else(|_| usage(&argument));
        match argument.as_str() {
            "--threads" => options.threads = number(),
            "--hidden" => options.hidden = number(),
            "--width" => options.width = number(),
            "--passes" => options.passes = number().max(1),
            "--path" => options.path = value.parse().unwrap_or_else(|_| usage(&argument)),
            "--dtype" if value == "bf16" => options.dtype = Dtype::Bf16,
            "--dtype" if value == "f32" => options.dtype = Dtype::F32,
            _ => usage(&argument),
        }
    }
    options
}

fn usage<T>(argument: &str) -> T {
    eprintln!("{argument}: unknown, or without a proper value");
    eprintln!(
        "ffn_speed [--json] [--threads N] [--path NAME] [--dtype bf16|f32] [--hidden N] [--width N] [--passes N]"
    );
    std::process::exit(2)
}

/// An expert with random weights of ordinary size, packed as a loader would.
fn expert(shape: ExpertShape, state: &mut u64) -> PackedExpert {
    let mut builder = PackedExpertBuilder::new(shape, StoredDtype::Bf16).expect("memory");
    for matrix in Matrix::ALL {
        let (rows, columns) = shape.matrix(matrix);
        for first in (0..rows).step_by(64) {
            let count = 64.min(rows - first);
            let slab: Vec<u8> = (0..count * columns)
                .flat_map(|_| {
                    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    // A sign, an exponent around 2^-6, seven random bits.
                    ((*state >> 48) as u16 & 0x80ff | 0x3c00).to_le_bytes()
                })
                .collect();
            builder.rows(matrix, first, &slab).expect("rows of the matrix");
        }
    }
    builder.finish().expect("all rows")
}

/// All experts once, `per_call` at a time, each with the same `rows` rows. Seconds of all calls together and of the shortest one.
fn cycle(
    pool: &Pool,
    experts: &[PackedExpert],
    inputs: &[u8],
    rows: usize,
    per_call: usize,
    outputs: &mut [Vec<u8>],
) -> (f64, f64) {
    let index: Vec<u32> = (0..rows as u32).collect();
    let call = |group: &[PackedExpert]| {
        let mut jobs: Vec<Job<'_>> = group
            .iter()
            .zip(outputs.iter_mut())
            .map(|(expert, output)| {
                let bytes = rows * expert.shape().row_bytes();
                Job { expert, inputs, row_index: &index, output: &mut output[..bytes] }
            })
            .collect();
        let start = Instant::now();
        pool.forward(&mut jobs).expect("a forward call");
        start.elapsed().as_secs_f64()
    };
    experts.chunks(per_call).map(call).fold((0.0, f64::INFINITY), |(sum, best), s| (sum + s, s.min(best)))
}

/// Experts that one pass packs.
const PACKED: usize = 8;

/// Packs the same matrix as gate, up and down, the element type unchanged, and lets go of it again. Seconds in all and of the shortest.
fn pack(shape: ExpertShape, stored: &[u8]) -> (f64, f64) {
    let once = || {
        let start = Instant::now();
        black_box(PackedExpert::pack(shape, shape.dtype().into(), stored, stored, stored))
            .expect("matching lengths");
        start.elapsed().as_secs_f64()
    };
    (0..PACKED).map(|_| once()).fold((0.0, f64::INFINITY), |(sum, best), s| (sum + s, s.min(best)))
}

/// Figures of all passes under one name.
struct Series {
    name: &'static str,
    unit: &'static str,
    passes: Vec<f64>,
    /// The best single measurement, as short for the kernels as for what they are compared with: what there is between disturbances.
    best: f64,
}

impl Series {
    fn new(name: &'static str, unit: &'static str) -> Self {
        Self { name, unit, passes: Vec::new(), best: 0.0 }
    }

    /// Adds a measurement of `count` pieces of `work`: seconds in all and of the shortest piece.
    fn add(&mut self, work: f64, count: usize, (seconds, shortest): (f64, f64)) {
        self.passes.push(work * count as f64 / seconds / 1e9);
        self.best = self.best.max(work / shortest / 1e9);
    }

    fn ratio(name: &'static str, of: &Self, to: &Self) -> Self {
        let passes = of.passes.iter().zip(&to.passes).map(|(a, b)| a / b).collect();
        Self { name, unit: "", passes, best: of.best / to.best }
    }

    /// Minimum, median, maximum over the passes, and the best single measurement.
    fn figures(&self) -> [f64; 4] {
        let mut sorted = self.passes.clone();
        sorted.sort_by(f64::total_cmp);
        [sorted[0], sorted[sorted.len() / 2], sorted[sorted.len() - 1], self.best]
    }
}

fn main() {
    let options = options();
    let shape = ExpertShape::new(options.hidden, options.width, options.dtype, Activation::Silu)
        .expect("a legal shape");
    let count = WEIGHT_BYTES.div_ceil(shape.packed_bytes()).next_multiple_of(TOP_K);
    let mut state = 1;
    let experts: Vec<PackedExpert> = (0..count).map(|_| expert(shape, &mut state)).collect();
    let pool =
        Pool::new(PoolConfig { threads: options.threads, path: Some(options.path), ..PoolConfig::default() })
            .expect("a pool");
    let threads = options.threads;
    let buffer = stream_buffer();
    let inputs: Vec<u8> = match options.dtype {
        Dtype::Bf16 => 0x3c12u16.to_le_bytes().repeat(TOKENS * options.hidden),
        Dtype::F32 => 0.01f32.to_le_bytes().repeat(TOKENS * options.hidden),
    };
    let mut outputs = vec![vec![0u8; TOKENS * shape.row_bytes()]; TOP_K];

    let weights = (3 * options.hidden * options.width * options.dtype.bytes()) as f64;
    let operations = (6 * options.hidden * options.width * TOKENS) as f64;
    // A quarter of the experts for the long passes.
    let few = &experts[..count.div_ceil(4)];
    // Every measurement reads or computes about as much as a call with one expert does.
    let part = (weights as usize / CHUNKS).next_multiple_of(4096).min(STREAM_BYTES / CHUNKS);
    let rounds = STREAM_BYTES / (CHUNKS * part);
    let per_step = arithmetic(options.path, options.dtype, 1);
    let steps = (operations / CHUNKS as f64 / per_step).ceil() as usize;

    let mut memory = Series::new("memory read", "GB/s");
    let mut one = Series::new("1 token, 1 expert per call", "GB/s");
    let mut eight = Series::new("1 token, 8 experts per call", "GB/s");
    let mut peak = Series::new("arithmetic peak", "GFLOP/s");
    let mut many = Series::new("256 tokens, 1 expert per call", "GFLOP/s");
    let mut packing = Series::new("packing, by one thread", "GB/s");
    let stored = vec![0x11u8; weights as usize / 3];
    for pass in 0..=options.passes {
        let read_pieces =
            || together(threads, rounds, |chunk| read(options.path, &buffer[chunk * part..][..part]));
        let compute = || {
            together(threads, few.len(), |_| {
                black_box(arithmetic(options.path, options.dtype, steps));
            })
        };
        // Each figure between two of what it is compared with: the machine's speed drifts.
        let read_before = read_pieces();
        let ones = cycle(&pool, &experts, &inputs, 1, 1, &mut outputs);
        let eights = cycle(&pool, &experts, &inputs, 1, TOP_K, &mut outputs);
        let read_after = read_pieces();
        let packed = pack(shape, &stored);
        let compute_before = compute();
        let manies = cycle(&pool, few, &inputs, TOKENS, 1, &mut outputs);
        let compute_after = compute();
        if pass == 0 {
            continue; // warms up
        }
        let both = |a: (f64, f64), b: (f64, f64)| (a.0 + b.0, a.1.min(b.1));
        memory.add((part * CHUNKS) as f64, 2 * rounds, both(read_before, read_after));
        one.add(weights, count, ones);
        eight.add(weights * TOP_K as f64, count / TOP_K, eights);
        peak.add(per_step * (steps * CHUNKS) as f64, 2 * few.len(), both(compute_before, compute_after));
        many.add(operations, few.len(), manies);
        packing.add(weights, PACKED, packed);
    }
    let ratios = [
        Series::ratio("1 token, 1 expert / memory read", &one, &memory),
        Series::ratio("1 token, 8 experts / memory read", &eight, &memory),
        Series::ratio("256 tokens / arithmetic peak", &many, &peak),
    ];
    let all: Vec<Series> = [memory, one, eight, peak, many, packing].into_iter().chain(ratios).collect();
    print(&options, &all);
}

fn print(options: &Options, all: &[Series]) {
    let Options { hidden, width, dtype, path, threads, passes, .. } = options;
    if options.json {
        let figures: Vec<String> = all
            .iter()
            .map(|s| {
                let [min, median, max, best] = s.figures();
                format!(
                    r#"{{"name":"{}","unit":"{}","min":{min:.4},"median":{median:.4},"max":{max:.4},"best":{best:.4}}}"#,
                    s.name, s.unit
                )
            })
            .collect();
        println!(
            r#"{{"hidden":{hidden},"width":{width},"dtype":"{dtype}","path":"{path}","threads":{threads},"passes":{passes},"figures":[{}]}}"#,
            figures.join(",")
        );
        return;
    }
    println!("{hidden}x{width} {dtype}, {path}, {threads} threads, {passes} passes; best: of single calls");
    println!("{:<34}{:>9}{:>9}{:>9}{:>9}", "", "min", "median", "max", "best");
    for s in all {
        let digits = if s.unit.is_empty() { 3 } else { 1 };
        let [min, median, max, best] = s.figures();
        println!(
            "{:<34}{min:>9.digits$}{median:>9.digits$}{max:>9.digits$}{best:>9.digits$} {}",
            s.name, s.unit
        );
    }
}
