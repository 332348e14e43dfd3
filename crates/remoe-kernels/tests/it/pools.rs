//! Pools: refusals, reuse of memory, concurrent callers, shutdown.

use crate::common;

use std::time::Duration;

use common::{Data, Expert, SplitMix64, forward, pool, to_bytes};
use remoe_kernels::{
    Activation, Dtype, ExpertJob, InstructionPath, KernelError, MAX_ROWS, MAX_THREADS, PathChoice, Pool,
    PoolConfig, SuspendedRows,
};

fn expert(random: &mut SplitMix64) -> Expert {
    Expert::new(random, Data::Ordinary, 40, 48, Dtype::Bf16, Activation::Silu)
}

#[test]
fn illegal_configurations_are_refused() {
    for threads in [0, MAX_THREADS + 1] {
        let error = Pool::new(PoolConfig { threads, ..PoolConfig::default() }).unwrap_err();
        assert_eq!(error, KernelError::Threads { actual: threads, max: MAX_THREADS });
    }
    for path in InstructionPath::ALL {
        let result = Pool::new(PoolConfig { threads: 1, path: Some(path), ..PoolConfig::default() });
        assert_eq!(result.is_ok(), path.is_available(), "{path}");
        assert_eq!(path.to_string().parse::<InstructionPath>().unwrap(), path);
    }
    let measured = pool(1, None);
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for rows in [2, 300] {
            assert_eq!(measured.paths(dtype).of_rows(rows), PathChoice::measured(dtype).of_rows(rows));
        }
        for path in InstructionPath::available() {
            assert_eq!(pool(1, path).paths(dtype), PathChoice::only(path));
        }
    }
    let error = "sse9".parse::<InstructionPath>().unwrap_err();
    assert!(error.to_string().contains("portable"), "{error}");
}

#[test]
fn illegal_jobs_are_refused_and_change_nothing() {
    let mut random = SplitMix64(41);
    let expert = expert(&mut random);
    let row = expert.shape.row_bytes();
    let pool = pool(2, None);
    let inputs = vec![0u8; 3 * row];
    let call = |inputs: &[u8], row_index: &[u32], length: usize| {
        let mut output = vec![0x55u8; length];
        let mut first = vec![0u8; row];
        let legal = ExpertJob { expert: &expert.packed, inputs, row_index: &[0], output: &mut first };
        let job = ExpertJob { expert: &expert.packed, inputs, row_index, output: &mut output };
        let result = pool.forward(&mut [legal, job]);
        assert!(result.is_ok() || output.iter().all(|&b| b == 0x55));
        result
    };
    assert_eq!(call(&inputs, &[0, 2], 2 * row), Ok(()));
    assert_eq!(call(&inputs, &[0, 3], 2 * row), Err(KernelError::RowIndex { job: 1, index: 3, rows: 3 }));
    assert_eq!(
        call(&inputs, &[0], 2 * row),
        Err(KernelError::OutputLength { job: 1, expected: row, actual: 2 * row })
    );
    assert_eq!(call(&inputs, &[], 1), Err(KernelError::OutputLength { job: 1, expected: 0, actual: 1 }));
    assert!(matches!(call(&inputs[..row + 1], &[0], row), Err(KernelError::InputLength { job: 0, .. })));
    let many = vec![0u32; MAX_ROWS];
    assert!(matches!(call(&inputs, &many, 0), Err(KernelError::TooMany { what: "rows", .. })));
    // The pool still works.
    assert_eq!(call(&inputs, &[0, 2], 2 * row), Ok(()));
}

#[test]
fn calls_without_rows_succeed() {
    let mut random = SplitMix64(42);
    let expert = expert(&mut random);
    let pool = pool(2, None);
    pool.forward(&mut []).unwrap();
    let mut nothing = [];
    pool.forward(&mut [ExpertJob {
        expert: &expert.packed,
        inputs: &[],
        row_index: &[],
        output: &mut nothing,
    }])
    .unwrap();
}

#[test]
fn scratch_memory_is_reused_and_as_large_as_reported() {
    let mut random = SplitMix64(43);
    for hidden in [40, 41] {
        let expert = Expert::new(&mut random, Data::Ordinary, hidden, 50, Dtype::F32, Activation::Silu);
        let pool = pool(2, None);
        let inputs = to_bytes(&Data::Ordinary.vector(&mut random, hidden * 30, Dtype::F32), Dtype::F32);
        let index: Vec<u32> = (0..30).collect();
        let first = forward(&pool, &expert.packed, &inputs, &index);
        let held = pool.scratch_bytes();
        assert!(held > 0 && held <= 30 * expert.shape.scratch_bytes_per_row());
        for rows in [1, 7, 30, 2, 30] {
            let again = forward(&pool, &expert.packed, &inputs, &index[..rows]);
            assert_eq!(again, first[..rows * expert.shape.row_bytes()]);
        }
        assert_eq!(pool.scratch_bytes(), held);
    }
}

#[test]
fn concurrent_small_calls_give_the_results_of_single_ones() {
    let mut random = SplitMix64(44);
    let experts: Vec<Expert> = (0..3).map(|_| expert(&mut random)).collect();
    let inputs = to_bytes(&Data::Ordinary.vector(&mut random, 40 * 8, Dtype::Bf16), Dtype::Bf16);
    let index = [3u32, 1, 7];
    for (threads, poll) in
        [(2, Duration::from_micros(50)), (2, Duration::ZERO), (4, Duration::from_micros(50))]
    {
        let pool = Pool::new(PoolConfig { threads, poll, ..PoolConfig::default() }).unwrap();
        let expected: Vec<Vec<u8>> =
            experts.iter().map(|e| forward(&pool, &e.packed, &inputs, &index)).collect();
        std::thread::scope(|scope| {
            for caller in 0..2 {
                let (pool, experts, expected, inputs) = (&pool, &experts, &expected, &inputs);
                scope.spawn(move || {
                    for turn in 0..2000 {
                        let which = (turn + caller) % experts.len();
                        assert_eq!(forward(pool, &experts[which].packed, inputs, &index), expected[which]);
                        if turn % 500 == 0 {
                            // Long enough for workers to fall asleep.
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn pools_can_be_created_and_dropped_repeatedly() {
    let mut random = SplitMix64(45);
    let expert = expert(&mut random);
    let inputs = vec![0u8; expert.shape.row_bytes()];
    for turn in 0..200 {
        let pool = Pool::new(PoolConfig { threads: 1 + turn % 4, ..PoolConfig::default() }).unwrap();
        if turn % 3 > 0 {
            forward(&pool, &expert.packed, &inputs, &[0]);
        }
    }
}

#[test]
fn float_mode_of_the_caller_is_unchanged() {
    let mut random = SplitMix64(46);
    let expert = expert(&mut random);
    let inputs = vec![0u8; expert.shape.row_bytes()];
    let denormal = std::hint::black_box(f32::from_bits(7));
    for path in InstructionPath::available() {
        forward(&pool(1, path), &expert.packed, &inputs, &[0]);
        assert_eq!((denormal * std::hint::black_box(3.0)).to_bits(), 21, "{path}");
    }
}

#[test]
fn each_item_is_processed_once() {
    for threads in [1, 2, 3] {
        let pool = Pool::new(PoolConfig { threads, ..PoolConfig::default() }).unwrap();
        for count in [0_usize, 1, 2, 7, 1000] {
            let mut items: Vec<usize> = (0..count).collect();
            pool.each(&mut items, |item| *item = *item * 2 + 1).unwrap();
            assert!(
                items.iter().enumerate().all(|(index, &item)| item == 2 * index + 1),
                "{threads} {count}"
            );
        }
        // One that panics takes nothing from the others, nor from later calls.
        let mut items: Vec<u32> = (0..50).collect();
        let outcome = pool.each(&mut items, |item| {
            assert!(*item != 13, "an item that panics");
            *item = 100;
        });
        assert_eq!(outcome, Err(KernelError::Panicked));
        assert_eq!(items.iter().filter(|&&item| item == 100).count(), 49);
        assert_eq!(pool.each(&mut items, |item| *item = 1), Ok(()));
    }
}

/// Only the kernels flush denormals; other work on the pool's threads keeps them.
#[test]
fn items_are_computed_with_denormals() {
    let pool = Pool::new(PoolConfig { threads: 2, ..PoolConfig::default() }).unwrap();
    let mut items = vec![f32::MIN_POSITIVE; 64];
    pool.each(&mut items, |item| *item = std::hint::black_box(*item) / 4.0).unwrap();
    assert!(items.iter().all(|&item| item == f32::from_bits(0x0020_0000)), "{items:?}");
}

/// Rows may be suspended after any number of panels, with other calls and other suspended rows in between, for any format
/// of the weights and number of threads.
#[test]
fn suspended_rows_equal_those_of_one_call() {
    let mut random = SplitMix64(77);
    for threads in [1, 2, 3] {
        let pool = pool(threads, None);
        for dtype in [Dtype::Bf16, Dtype::F32] {
            for _ in 0..6 {
                let width = 64 + random.below(300);
                let expert = Expert::new(&mut random, Data::Ordinary, 200, width, dtype, Activation::Silu);
                let row = expert.shape.row_bytes();
                let numbers: Vec<f32> = (0..23 * 200).map(|_| random.unit()).collect();
                let inputs = to_bytes(&numbers, dtype);
                let packed = std::sync::Arc::new(expert.packed);
                // Two jobs, of the first index and of the others.
                let begin = |indices: &[u32]| {
                    let (first, others) = indices.split_at(1);
                    let jobs = vec![(packed.clone(), first.to_vec()), (packed.clone(), others.to_vec())];
                    SuspendedRows::new(jobs, inputs.as_slice().into())
                };
                let indices: [Vec<u32>; 2] = [(0..23).rev().collect(), vec![3; 1 + random.below(9)]];
                let mut both = indices.each_ref().map(|indices| (begin(indices), false));
                let mut parts = 0;
                while both.iter().any(|(_, done)| !done) {
                    for (rows, done) in &mut both {
                        let mut left = random.below(4);
                        let mut until = || {
                            left = left.saturating_sub(1);
                            left == 0
                        };
                        *done = pool.advance(rows, &mut until).unwrap();
                        parts += 1;
                    }
                    // The pool computes something else meanwhile.
                    forward(&pool, &packed, &inputs[..row], &[0]);
                }
                assert!(parts >= 2, "{parts} parts");
                for ((rows, _), indices) in both.into_iter().zip(&indices) {
                    assert!(rows.into_output() == forward(&pool, &packed, &inputs, indices));
                }
            }
        }
    }
}

#[test]
fn illegal_suspended_rows_are_refused() {
    let mut random = SplitMix64(78);
    let expert = expert(&mut random);
    let inputs = vec![0u8; 2 * expert.shape.row_bytes()];
    let (packed, inputs) = (std::sync::Arc::new(expert.packed), std::sync::Arc::<[u8]>::from(inputs));
    let begin = |row: u32| SuspendedRows::new(vec![(packed.clone(), vec![row; 20])], inputs.clone());
    let mut rows = begin(2);
    let error = pool(2, None).advance(&mut rows, &mut || false).unwrap_err();
    assert_eq!(error, KernelError::RowIndex { job: 0, index: 2, rows: 2 });
    // Suspended rows can only be continued on the pool that suspended them.
    let (one, two) = (pool(1, None), pool(2, None));
    let mut rows = begin(1);
    assert_eq!(one.advance(&mut rows, &mut || true), Ok(false));
    assert_eq!(two.advance(&mut rows, &mut || false), Err(KernelError::OtherPool));
}
