//! Fuzz targets for everything that reads bytes from outside; `docs/fuzzing.md` says how to run them
//! and how to add one.
//!
//! A target is a module with two functions: `run` takes any bytes and panics when a property is
//! broken, `seeds` gives inputs to begin with, made from the fixtures of the tests. Each is a binary of
//! its own, so that a run pays for the coverage counters of its own code only.

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
pub mod tenant;
pub mod told;
pub mod trace;
pub mod wire;

mod bodies;
mod fixtures;
mod memory;
mod scratch;
mod sections;

// What a deployment and its cluster are to the operator's own tests.
#[path = "../../operator/tests/cluster/example.rs"]
#[allow(dead_code)]
mod example;
#[path = "../../operator/tests/cluster/spoiled.rs"]
#[allow(dead_code)]
mod spoiled;
#[path = "../../operator/tests/cluster/world.rs"]
#[allow(dead_code)]
mod world;

#[doc(hidden)]
pub use libfuzzer_sys;

/// Longest message that an error may have, the path of its file and the name of its field included:
/// it goes into logs, terminals and headers.
const MESSAGE_BYTES: usize = 2048;

/// An error is for people: it has a message, on the scale of a page.
fn check_error(message: &str) {
    assert!(!message.is_empty(), "an error without a message");
    assert!(message.len() <= MESSAGE_BYTES, "an error message of {} bytes: {message:.200}…", message.len());
}

/// The binary of a target.
#[macro_export]
macro_rules! target {
    ($module:ident) => {
        $crate::libfuzzer_sys::fuzz_target!(
            init: $crate::start($crate::$module::seeds),
            |data: &[u8]| $crate::$module::run(data)
        );
    };
}

/// What a target does first. With `FUZZ_SEEDS` in the environment, it writes the seeds into that folder
/// and ends.
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
    std::process::exit(0);
}
