//! Replays the seeds and kept findings of every fuzz target without a fuzzer. The operator's tests replay those of
//! `tenant`, which needs their in-memory cluster.
#![allow(clippy::expect_used)]

use remoe_fuzz_harness as harness;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Serialises the tests, because the memory oracle counts allocations of the whole process.
static MEMORY_ORACLE: Mutex<()> = Mutex::new(());

/// Folder of the kept findings of all targets.
const REGRESSIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/regressions");

/// Returns the minimised findings in `fuzz/regressions/TARGET/`.
fn regressions(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(REGRESSIONS).join(target);
    if !folder.exists() {
        return Vec::new();
    }
    let entries = std::fs::read_dir(folder).expect("the folder can be listed");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("the folder can be listed").path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("a kept finding can be read")).collect()
}

fn replay(target: &str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) {
    let _lock = MEMORY_ORACLE.lock().unwrap_or_else(PoisonError::into_inner);
    let seeds = seeds();
    assert!(!seeds.is_empty(), "{target} has no seeds");
    for input in seeds.into_iter().chain(regressions(target)) {
        run(&input);
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        const TARGETS: &[&str] = &[$(stringify!($name)),*];

        $(
            #[test]
            fn $name() {
                replay(stringify!($name), harness::$name::run, harness::$name::seeds);
            }
        )*
    };
}

targets! { chat completions config folder header listing planning predictor records template gateway_data trace wire }

/// A target that is renamed takes its findings along.
#[test]
fn every_kept_finding_is_replayed() {
    const ELSEWHERE: &str = "tenant";
    let mut targets = 0;
    for entry in std::fs::read_dir(REGRESSIONS).expect("fuzz/regressions can be listed") {
        let name = entry.expect("the folder can be listed").file_name();
        let name = name.to_str().expect("targets are ASCII");
        assert!(TARGETS.contains(&name) || name == ELSEWHERE, "fuzz/regressions/{name} belongs to no target");
        targets += 1;
    }
    assert!(targets > 0, "the findings are not where they are looked for");
}
