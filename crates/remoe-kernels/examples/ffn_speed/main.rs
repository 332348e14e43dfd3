//! Instrument for the expert FFN and the two limits of the machine that bound it: read bandwidth at one token, peak
//! arithmetic at 256. `remoe-bench run --only kernels` drives it and measures the compared builds in turn.
//!
//! The first line on standard output describes the instrument, with the paths that the CPU has and those that a pool
//! chooses; then each line on standard input names a measurement and is answered by a line `{"rate": .., "best": ..}`,
//! in GB/s or GFLOP/s: of all calls together, and of the best single call, which disturbances affect least.
//!
//! | | what is measured |
//! | --- | --- |
//! | `read` | memory read, GB/s |
//! | `one`, `eight` | 1 token, 1 or 8 experts per call, GB/s of weights |
//! | `peak` | arithmetic on registers, GFLOP/s |
//! | `many` | 256 tokens, 1 expert per call, GFLOP/s |
//! | `pack` | packing by one thread, GB/s of weights |
//!
//! The name of an instruction path may follow (`many avx512f`). Without it, `one`, `eight` and `many` are by the paths
//! that a pool chooses, and the limits `read` and `peak` are those of the path that has the highest: what the machine
//! can do, not what the chosen instructions can.
//!
//! With int8 and int4, rows are bfloat16, weights count as they are packed, and `peak` is that of bfloat16.
//!
//! Usage:
//! ```sh
//! echo one | cargo run --release -p remoe-kernels --example ffn_speed -- [--threads N] \
//!     [--dtype bf16|f32|int8|int4|mxfp4|fp8] [--hidden N] [--width N]
//! ```

#![allow(clippy::expect_used)]

use std::hint::black_box;
use std::time::Instant;

mod machine;

use machine::{CHUNKS, STREAM_BYTES, arithmetic, read, stream_buffer, together};
use remoe_kernels::{
    Activation, Dtype, ExpertJob, ExpertMatrix, ExpertShape, Fp8Scales, InstructionPath, NumericsClass,
    PackedExpert, PackedExpertBuilder, PathChoice, Pool, PoolConfig, StoredDtype, WeightFormat,
};

/// Bytes of weights that calls cycle through, so that they come from memory rather than from a cache.
const WEIGHT_BYTES: usize = 400 << 20;
const TOKENS: usize = 256;
const TOP_K: usize = 8;
/// Sizes of the trials that determine the path of a limit.
const TRIALS: usize = 5;
const TRIAL_BYTES: usize = 64 << 20;
const TRIAL_STEPS: usize = 20_000;

struct SpeedOptions {
    threads: usize,
    class: NumericsClass,
    hidden: usize,
    width: usize,
}

fn options() -> SpeedOptions {
    let mut options = SpeedOptions {
        threads: PoolConfig::default().threads,
        class: Dtype::Bf16.into(),
        hidden: 2048,
        width: 1408,
    };
    let quantised = |weights| NumericsClass { dtype: Dtype::Bf16, weights };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().unwrap_or_else(|| usage(&argument));
        let number = || value.parse().unwrap_or_else(|_| usage(&argument));
        match argument.as_str() {
            "--threads" => options.threads = number(),
            "--hidden" => options.hidden = number(),
            "--width" => options.width = number(),
            "--dtype" if value == "bf16" => options.class = Dtype::Bf16.into(),
            "--dtype" if value == "f32" => options.class = Dtype::F32.into(),
            "--dtype" if value == "int8" => options.class = quantised(WeightFormat::Int8),
            "--dtype" if value == "int4" => options.class = quantised(WeightFormat::Int4),
            "--dtype" if value == "mxfp4" => options.class = quantised(WeightFormat::Mxfp4),
            "--dtype" if value == "fp8" => options.class = quantised(WeightFormat::Fp8),
            _ => usage(&argument),
        }
    }
    options
}

#[expect(clippy::disallowed_methods, reason = "an example without anything to release")]
fn usage<T>(argument: &str) -> T {
    eprintln!("{argument}: unknown, or without a proper value");
    eprintln!("ffn_speed [--threads N] [--dtype bf16|f32|int8|int4|mxfp4|fp8] [--hidden N] [--width N]");
    std::process::exit(2)
}

/// Packs an expert with random weights of ordinary size, as a loader does.
fn expert(shape: ExpertShape, state: &mut u64) -> PackedExpert {
    let mut builder = PackedExpertBuilder::new(shape, StoredDtype::Bf16).expect("memory");
    for matrix in ExpertMatrix::ALL {
        let (rows, columns) = shape.matrix(matrix);
        let scales = fp8_scales(rows, columns);
        for first in (0..rows).step_by(64) {
            let count = 64.min(rows - first);
            if shape.class().weights == WeightFormat::Fp8 {
                // Random signs, exponents and fractions, except for the highest exponent.
                let code = |_| {
                    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (*state >> 56) as u8 & 0xf7
                };
                let slab: Vec<u8> = (0..count * columns).map(code).collect();
                builder.set_fp8_rows(matrix, first, &slab, &scales).expect("rows of the matrix");
                continue;
            }
            let slab: Vec<u8> = (0..count * columns)
                .flat_map(|_| {
                    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    // A sign, an exponent around 2^-6, seven random bits.
                    ((*state >> 48) as u16 & 0x80ff | 0x3c00).to_le_bytes()
                })
                .collect();
            builder.set_rows(matrix, first, &slab).expect("rows of the matrix");
        }
    }
    builder.finish().expect("all rows")
}

/// Computes all experts once, `per_call` at a time, each with the same `rows` rows. Returns the seconds of all calls and of
/// the shortest one.
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
        let mut jobs: Vec<ExpertJob<'_>> = group
            .iter()
            .zip(outputs.iter_mut())
            .map(|(expert, output)| {
                let bytes = rows * expert.shape().row_bytes();
                ExpertJob { expert, inputs, row_index: &index, output: &mut output[..bytes] }
            })
            .collect();
        let start = Instant::now();
        pool.forward(&mut jobs).expect("a forward call");
        start.elapsed().as_secs_f64()
    };
    experts.chunks(per_call).map(call).fold((0.0, f64::INFINITY), |(sum, best), s| (sum + s, s.min(best)))
}

/// Number of experts that one pass packs.
const EXPERTS_PER_PASS: usize = 8;

/// Returns a scale of 2^-8 for each block of 128 x 128 weights.
fn fp8_scales(rows: usize, columns: usize) -> Fp8Scales {
    let blocks = rows.div_ceil(128) * columns.div_ceil(128);
    Fp8Scales::new(vec![1.0 / 256.0; blocks], rows, columns, [128, 128]).expect("a scale for each block")
}

/// Packs the same matrix as gate, up and down without converting its elements, and drops the result. Returns the seconds of
/// all passes and of the shortest one.
fn pack(shape: ExpertShape, stored: &[u8]) -> (f64, f64) {
    let once = || {
        let start = Instant::now();
        if shape.class().weights == WeightFormat::Fp8 {
            let mut builder = PackedExpertBuilder::new(shape, shape.dtype().into()).expect("room");
            for matrix in ExpertMatrix::ALL {
                let (rows, columns) = shape.matrix(matrix);
                let codes = &stored[..rows * columns];
                builder.set_fp8_rows(matrix, 0, codes, &fp8_scales(rows, columns)).expect("matching lengths");
            }
            black_box(builder.finish()).expect("all rows");
        } else {
            black_box(PackedExpert::pack(shape, shape.dtype().into(), stored, stored, stored))
                .expect("matching lengths");
        }
        start.elapsed().as_secs_f64()
    };
    (0..EXPERTS_PER_PASS).map(|_| once()).fold((0.0, f64::INFINITY), |(sum, best), s| (sum + s, s.min(best)))
}

/// Prints the answer of a measurement of `count` pieces of `work`, from the seconds of all pieces and of the shortest one.
fn answer(work: f64, count: usize, (seconds, shortest): (f64, f64)) {
    let (rate, best) = (work * count as f64 / seconds / 1e9, work / shortest / 1e9);
    println!(r#"{{"rate":{rate:.4},"best":{best:.4}}}"#);
}

/// Returns the path with the highest rate of a limit: work per second of `work`, in the best of several short trials.
fn highest(paths: &[InstructionPath], work: impl Fn(InstructionPath) -> f64) -> InstructionPath {
    let rate = |path| {
        let trial = || {
            let start = Instant::now();
            work(path) / start.elapsed().as_secs_f64()
        };
        (0..TRIALS).map(|_| trial()).fold(0.0, f64::max)
    };
    let rates = paths.iter().map(|&path| (path, rate(path)));
    rates.max_by(|a, b| a.1.total_cmp(&b.1)).expect("the portable path").0
}

fn main() {
    let SpeedOptions { threads, class, hidden, width } = options();
    let dtype = class.dtype;
    let shape = ExpertShape::new(hidden, width, class, Activation::Silu).expect("a legal shape");
    let count = WEIGHT_BYTES.div_ceil(shape.packed_bytes()).next_multiple_of(TOP_K);
    let mut state = 1;
    let experts: Vec<PackedExpert> = (0..count).map(|_| expert(shape, &mut state)).collect();
    let paths = InstructionPath::available();
    let pool = |path| Pool::new(PoolConfig { threads, path, ..PoolConfig::default() }).expect("a pool");
    let chosen = pool(None);
    let pools: Vec<Pool> = paths.iter().map(|&path| pool(Some(path))).collect();
    let buffer = stream_buffer();
    let inputs: Vec<u8> = match dtype {
        Dtype::Bf16 => 0x3c12u16.to_le_bytes().repeat(TOKENS * hidden),
        Dtype::F32 => 0.01f32.to_le_bytes().repeat(TOKENS * hidden),
    };
    let mut outputs = vec![vec![0u8; TOKENS * shape.row_bytes()]; TOP_K];

    let stored = vec![0x11u8; hidden * width * dtype.bytes()];
    let weights = match class.weights {
        WeightFormat::Plain => (3 * stored.len()) as f64,
        WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 | WeightFormat::Fp8 => {
            shape.packed_bytes() as f64
        }
    };
    let operations = (6 * hidden * width * TOKENS) as f64;
    // The long passes use a quarter of the experts.
    let few = &experts[..count.div_ceil(4)];
    // Each measurement reads or computes about as much as a call with one expert.
    let part = (weights as usize / CHUNKS).next_multiple_of(4096).min(STREAM_BYTES / CHUNKS);
    let rounds = STREAM_BYTES / (CHUNKS * part);
    let reader = highest(&paths, |path| {
        read(path, &buffer[..TRIAL_BYTES]);
        TRIAL_BYTES as f64
    });
    let computer = highest(&paths, |path| arithmetic(path, dtype, TRIAL_STEPS));

    let names: Vec<String> = paths.iter().map(|path| format!(r#""{path}""#)).collect();
    println!(
        r#"{{"paths":[{}],"chosen":"{}","read_by":"{reader}","peak_by":"{computer}","threads":{threads},"class":"{class}","hidden":{hidden},"width":{width}}}"#,
        names.join(","),
        PathChoice::measured(class),
    );
    for line in std::io::stdin().lines() {
        let line = line.expect("a line of text");
        let (what, path) = line.split_once(' ').map_or((line.as_str(), None), |(what, name)| {
            let position = paths.iter().position(|path| path.name() == name);
            (what, Some(position.unwrap_or_else(|| usage(name))))
        });
        let pool = path.map_or(&chosen, |position| &pools[position]);
        let limit_of = |highest| path.map_or(highest, |position| paths[position]);
        match what {
            "read" => {
                let path = limit_of(reader);
                let read = |chunk: usize| read(path, &buffer[chunk * part..][..part]);
                answer((part * CHUNKS) as f64, rounds, together(threads, rounds, read));
            }
            "one" => answer(weights, count, cycle(pool, &experts, &inputs, 1, 1, &mut outputs)),
            "eight" => answer(
                weights * TOP_K as f64,
                count / TOP_K,
                cycle(pool, &experts, &inputs, 1, TOP_K, &mut outputs),
            ),
            "peak" => {
                let path = limit_of(computer);
                let per_step = arithmetic(path, dtype, 1);
                let steps = (operations / CHUNKS as f64 / per_step).ceil() as usize;
                let compute = |_| {
                    black_box(arithmetic(path, dtype, steps));
                };
                let work = per_step * (steps * CHUNKS) as f64;
                answer(work, few.len(), together(threads, few.len(), compute));
            }
            "many" => answer(operations, few.len(), cycle(pool, few, &inputs, TOKENS, 1, &mut outputs)),
            "pack" => answer((3 * stored.len()) as f64, EXPERTS_PER_PASS, pack(shape, &stored)),
            other => usage(other),
        }
    }
}
