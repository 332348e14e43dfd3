//! Instructions that the engine's thread executes per token, counted by callgrind: free of noise, unlike timings on a
//! shared machine.
//!
//! The kernels use the portable path, because valgrind's fused multiply-add rounds twice and the other paths are
//! disabled. The host's work between products is the same on every path. valgrind presents the same processor on
//! every host, so the counts are the same everywhere. They change with the compiler and with intended changes: then
//! write the new count and the reason.

use remoe_test_support::control::greedy;
use remoe_test_support::deadline::LONG;
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, StartOptions};
use remoe_test_support::process;
use rustix::process::Signal;
use std::collections::HashMap;
use std::process::Command;

/// Compiler of the counts below.
const COMPILER: &str = "rustc 1.95.0";

/// Function whose instructions are counted, with its callees: prefill is not part of an iteration.
const COUNTED: &str = "main_model_fn::engine::thread::Engine::run";

/// Instructions of kernel functions and of all other functions.
#[derive(Debug, Clone, Copy)]
struct InstructionCounts {
    kernels: u64,
    rest: u64,
}

impl InstructionCounts {
    /// Returns the difference to `base` per token of `tokens`.
    fn for_each(self, base: Self, tokens: usize) -> Self {
        let each = |more: u64, base: u64| (more - base) / tokens as u64;
        Self { kernels: each(self.kernels, base.kernels), rest: each(self.rest, base.rest) }
    }
}

/// Configuration of the demo model with its counts.
struct ServingCase {
    name: &'static str,
    options: &'static [(&'static str, &'static str)],
    /// Instructions per further token of an answer.
    decoded: InstructionCounts,
    /// Instructions per further token of a prompt.
    read: InstructionCounts,
}

const CASES: &[ServingCase] = &[
    ServingCase {
        name: "bfloat16",
        options: &[("--dtype", "bfloat16")],
        decoded: InstructionCounts { kernels: 99_167_800, rest: 310_400 },
        read: InstructionCounts { kernels: 66_600_900, rest: 79_600 },
    },
    ServingCase {
        name: "int4",
        options: &[("--experts-dtype", "int4")],
        decoded: InstructionCounts { kernels: 33_070_700, rest: 315_600 },
        read: InstructionCounts { kernels: 26_348_600, rest: 73_400 },
    },
];

/// Counts the instructions of a main function with all experts for a prompt of `prompt` tokens and `answer` further
/// tokens.
async fn count(case: &ServingCase, prompt: usize, answer: u32) -> InstructionCounts {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("callgrind");
    let out = format!("--callgrind-out-file={}", file.display());
    let toggle = format!("--toggle-collect={COUNTED}");
    let under = ["valgrind", "--tool=callgrind", "--quiet", &toggle, &out].map(str::to_owned).to_vec();
    let options = StartOptions { under, ..StartOptions::default() }.with("--instruction-path", "portable");
    let options = case.options.iter().fold(options, |options, (name, value)| options.with(name, value));
    let model = ModelFixture::demo();
    let mut main = MainFunction::start(&model.folder, options).await;
    main.control.route(&[], &[]).await;
    let ids: Vec<u32> = (0..prompt as u32).map(|at| 40 + at * 7 % 400).collect();
    let generated = main.control.begin(greedy(&ids, answer)).await.expect("it is accepted");
    let answered = generated.finish().await.expect("it is answered");
    assert_eq!(answered.finished.tokens.len(), answer as usize);
    process::signal(main.process.pid(), Signal::TERM);
    main.process.end(LONG).await;
    parse(&std::fs::read_to_string(&file).expect("callgrind has written what it counted"))
}

/// Sums the instructions of each function without its callees, from callgrind's output (valgrind's manual, "Callgrind
/// Format Specification"). Names are written once and numbered; the line after a call has the counts of the callee.
fn parse(output: &str) -> InstructionCounts {
    let mut names: HashMap<&str, bool> = HashMap::new();
    let (mut is_kernel, mut is_callees) = (false, false);
    let mut counts = InstructionCounts { kernels: 0, rest: 0 };
    for line in output.lines() {
        if let Some(function) = line.strip_prefix("fn=") {
            let (number, name) = function.split_once(' ').unwrap_or((function, ""));
            is_kernel = *names.entry(number).or_insert(name.contains("remoe_kernels"));
        } else if let Some((key, name)) = line.split_once('=') {
            // A function's name may first occur in a call.
            if key == "cfn"
                && let Some((number, name)) = name.split_once(' ')
            {
                names.entry(number).or_insert(name.contains("remoe_kernels"));
            }
            is_callees = key == "calls";
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let cost = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok());
            let cost = cost.expect("a line has its position and its cost");
            match (std::mem::take(&mut is_callees), is_kernel) {
                (true, _) => {}
                (false, true) => counts.kernels += cost,
                (false, false) => counts.rest += cost,
            }
        }
    }
    counts
}

/// Tolerance of kernel instructions, as a fraction. Their noise is below 0.1 %, but another C library copies memory
/// differently and another compiler generates other code.
fn tolerance() -> f64 {
    let version = Command::new("rustc").arg("--version").output().expect("there is a compiler");
    if String::from_utf8_lossy(&version.stdout).starts_with(COMPILER) { 0.05 } else { 0.25 }
}

/// Tolerance of all other instructions. The engine's loop also polls while it waits, so that runs differ by a tenth.
const TOLERANCE_OF_REST: f64 = 0.25;

#[tokio::test]
#[ignore = "needs valgrind: make instructions"]
async fn token_takes_the_recorded_instructions() {
    const PROMPT: usize = 16;
    const LONGER: usize = 80;
    const ANSWER: u32 = 33;
    let tolerance = tolerance();
    let mut wrong = Vec::new();
    for case in CASES {
        let base = count(case, PROMPT, 1).await;
        assert!(base.kernels > 0, "nothing was counted: is {COUNTED} still the engine's loop?");
        let decoded = count(case, PROMPT, ANSWER).await.for_each(base, ANSWER as usize - 1);
        let read = count(case, LONGER, 1).await.for_each(base, LONGER - PROMPT);
        for (what, found, before) in [("decoded", decoded, case.decoded), ("read", read, case.read)] {
            println!("{}, for each token that is {what}: {found:?}, before: {before:?}", case.name);
            for (found, before, tolerance) in
                [(found.kernels, before.kernels, tolerance), (found.rest, before.rest, TOLERANCE_OF_REST)]
            {
                if (found as f64 / before as f64 - 1.0).abs() > tolerance {
                    wrong.push(format!("{}, {what}: {found} and not {before}", case.name));
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{wrong:?}; where a change means to change them, write the new figures here, lower ones as well"
    );
}
