//! Fuzz targets for everything that reads bytes from outside; `docs/fuzzing.md` says how to run them
//! and how to add one.
//!
//! A target is a module with two functions: `run` takes any bytes and panics when a property is
//! broken, `seeds` gives inputs to begin with, made from the fixtures of the tests. Each is a libFuzzer program of
//! its own in `fuzz/targets/`, so that a run pays for the coverage counters of its own code only. The tests of this
//! crate replay seeds and kept findings without a fuzzer.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs, unreachable_pub)]

pub mod chat;
pub mod completions;
pub mod config;
pub mod folder;
pub mod header;
pub mod listing;
pub mod planning;
pub mod predictor;
pub mod records;
pub mod template;
#[cfg(fuzzing)]
pub mod tenant;
pub mod told;
pub mod trace;
pub mod wire;

mod bodies;
mod fixtures;
mod memory;
mod scratch;
mod sections;

/// Longest message that an error may have, the path of its file and the name of its field included:
/// it goes into logs, terminals and headers.
const MESSAGE_BYTES: usize = 2048;

/// An error is for people: it has a message, on the scale of a page.
fn check_error(message: &str) {
    assert!(!message.is_empty(), "an error without a message");
    assert!(message.len() <= MESSAGE_BYTES, "an error message of {} bytes: {message:.200}…", message.len());
}

/// Begins a target. With `FUZZ_SEEDS` in the environment, it writes the seeds into that folder and ends
/// the process.
pub fn start(seeds: fn() -> Vec<Vec<u8>>) {
    // Reporting a finding takes memory.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        memory::lift();
        report(panic);
    }));
    let Some(folder) = std::env::var_os("FUZZ_SEEDS") else {
        return;
    };
    let folder = std::path::PathBuf::from(folder);
    std::fs::create_dir_all(&folder).expect("the folder of the seeds can be made");
    for (number, seed) in seeds().into_iter().enumerate() {
        std::fs::write(folder.join(format!("seed-{number:03}")), seed).expect("a seed can be written");
    }
    #[expect(clippy::disallowed_methods, reason = "libFuzzer would go on to fuzz")]
    std::process::exit(0);
}
