//! Seeds and kept findings of every fuzz target, replayed without a fuzzer. Those of `tenant` are replayed by the operator's
//! tests, which share its cluster in memory.
#![allow(clippy::expect_used)]

use remoe_fuzz_harness as harness;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The memory oracle counts what the whole process holds, so that inputs run one after another.
static ALONE: Mutex<()> = Mutex::new(());

/// Inputs that once were findings, cut down: `fuzz/regressions/TARGET/`.
fn regressions(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../regressions").join(target);
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("the folder can be listed").path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("a kept finding can be read")).collect()
}

fn replay(target: &str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let seeds = seeds();
    assert!(!seeds.is_empty(), "{target} has no seeds");
    for input in seeds.into_iter().chain(regressions(target)) {
        run(&input);
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                replay(stringify!($name), harness::$name::run, harness::$name::seeds);
            }
        )*
    };
}

targets! { chat completions config folder header listing planning predictor records template told trace wire }
