//! Fuzz targets for all code that parses untrusted bytes. `docs/fuzzing.md` describes how to run and add one.
//!
//! A target is a module with two functions. `run` takes any bytes, and panics if a property is violated. `seeds` returns
//! initial inputs, made from test fixtures. Each target is a separate libFuzzer program in `fuzz/targets/`, so that it
//! contains coverage counters of its own code only. The tests of this crate replay the seeds without a fuzzer.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs, unreachable_pub)]

pub mod chat;
pub mod completions;
pub mod config;
pub mod folder;
pub mod gateway_data;
pub mod header;
pub mod listing;
pub mod planning;
pub mod predictor;
pub mod records;
pub mod template;
#[cfg(fuzzing)]
pub mod tenant;
pub mod trace;
pub mod wire;

mod bodies;
mod fixtures;
mod memory;
mod scratch;
mod sections;

/// Limit of the length of an error message, in bytes, including the path of the file and the name of the field.
/// Messages end up in logs, terminals and headers.
const MESSAGE_BYTES_LIMIT: usize = 2048;

/// Asserts that an error message is not empty, and not longer than [`MESSAGE_BYTES_LIMIT`].
fn check_error(message: &str) {
    assert!(!message.is_empty(), "an error without a message");
    assert!(
        message.len() <= MESSAGE_BYTES_LIMIT,
        "an error message of {} bytes: {message:.200}…",
        message.len()
    );
}

/// Initialises a target. If `FUZZ_SEEDS` names a folder, writes the seeds into it, and exits.
pub fn start(seeds: fn() -> Vec<Vec<u8>>) {
    // Removes the memory limit, because reporting a finding allocates.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        memory::remove_limit();
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
