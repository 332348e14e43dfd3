//! How close the expert FFN comes to what the machine can do, and torch's packed bfloat16 beside it.
//!
//! Two instruments, crates/remoe-kernels/examples/ffn_speed and torch_expert.py, are asked in turn: every figure
//! stands between two measurements of its limit, and torch's next to ours. Ours are by the instruction
//! paths that a pool chooses; what each path of the CPU gives stands below them.

use crate::context::BenchContext;
use crate::error::{ErrorContext, Result};
use crate::machine::cores;
use crate::pace::TimeShare;
use crate::process::ChildProcess;
use crate::report::{Bar, BenchSection};
use crate::series::Series;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

/// DeepSeek-V2-Lite's experts, whose width is no power of two.
const HIDDEN: usize = 2048;
const WIDTH: usize = 1408;
const ROUNDS: usize = 7;
/// Threads of the one who was asked before poll for a while before they sleep.
const PAUSE: Duration = Duration::from_millis(10);

const TORCH_EXPERT: &str = include_str!("../../torch_expert.py");

/// How experts are computed, as ffn_speed names it.
const FORMS: [&str; 6] = ["bf16", "f32", "int8", "int4", "mxfp4", "fp8"];
/// Forms with a bar: it is decided whether they reach the machine's limits. For integer weights only the share of the
/// limits that is used is reported: reading less, they are bound by arithmetic sooner.
const WITH_BARS: [&str; 2] = ["bf16", "f32"];

/// Shares of the machine's limits.
const ONE_TOKEN_BAR: Bar = Bar::AtLeast(0.9);
const MANY_TOKENS_BAR: Bar = Bar::AtLeast(0.85);
/// Ours over torch's at 256 tokens.
const TORCH_BAR: Bar = Bar::AtLeast(1.2);

pub(super) fn measure(context: &BenchContext, share: &TimeShare) -> Result<Vec<BenchSection>> {
    let mut threads = vec![1, cores()];
    threads.dedup();
    let cases: Vec<_> = FORMS.iter().flat_map(|dtype| threads.iter().map(move |t| (*dtype, *t))).collect();
    let mut parts = Vec::new();
    for (index, &(dtype, threads)) in cases.iter().enumerate() {
        parts.push(measure_one(context, &share.first_of(cases.len() - index), dtype, threads)?);
    }
    Ok(parts)
}

fn measure_one(
    context: &BenchContext,
    share: &TimeShare,
    dtype: &str,
    threads: usize,
) -> Result<BenchSection> {
    let name = format!("Expert FFN, {dtype}, {threads} {}", if threads == 1 { "thread" } else { "threads" });
    let (mut ours, description) = start_ours(context, dtype, threads)?;
    let paths = vector_paths(&description);
    // Torch is a peer in bfloat16 only.
    let mut torch = (dtype == "bf16").then(|| start_torch(context, threads));
    let mut figures = Figures::default();
    let ending = share.rounds(&name, context.rounds(ROUNDS), |round| {
        let mut ask = |of: Instrument, name: &str| -> Result<()> {
            let process = match (of, &mut torch) {
                (Instrument::Ours, _) => &mut ours,
                (Instrument::Torch, Some(Ok((process, _)))) => process,
                (Instrument::Torch, _) => return Ok(()),
            };
            std::thread::sleep(PAUSE);
            let answer = process.ask(name)?;
            let answer = serde_json::from_str(&answer).doing(|| format!("reading the answer {answer:?}"))?;
            // The first round warms up.
            if round > 0 {
                figures.push(of, name, answer);
            }
            Ok(())
        };
        use Instrument::{Ours, Torch};
        ask(Ours, "read")?;
        ask(Ours, "one")?;
        ask(Torch, "one")?;
        ask(Ours, "eight")?;
        ask(Ours, "read")?;
        ask(Torch, "one_plain")?;
        ask(Ours, "peak")?;
        ask(Ours, "many")?;
        ask(Torch, "many")?;
        ask(Ours, "peak")?;
        ask(Ours, "pack")?;
        paths.iter().try_for_each(|path| {
            ask(Ours, &by("eight", path))?;
            ask(Ours, &by("many", path))
        })
    });
    let torch_description = match &torch {
        Some(Ok((_, description))) => description.clone(),
        _ => Value::Null,
    };
    let settings = json!({"rounds": ending.done, "ours": description, "torch": torch_description});
    let mut part = BenchSection::new(name, settings);
    figures.report(&mut part, &paths, WITH_BARS.contains(&dtype));
    part.conclude(ending);
    if let Some(Err(why)) = torch {
        let python = context.python.display();
        part.note(format!("skipped torch: cannot use it with REMOE_BENCH_PYTHON={python}: {why}"));
    }
    Ok(part)
}

/// Starts the instrument for the FFN and the machine's limits; returns it with its description of itself.
pub(super) fn start_ours(
    context: &BenchContext,
    dtype: &str,
    threads: usize,
) -> Result<(ChildProcess, Value)> {
    let mut command = Command::new(context.program("examples/ffn_speed")?);
    command.args(["--dtype", dtype, "--threads", &threads.to_string()]);
    command.args(["--hidden", &HIDDEN.to_string(), "--width", &WIDTH.to_string()]);
    start("ffn_speed", command)
}

/// The instruction paths that the CPU has, but for the portable one, which would take minutes.
fn vector_paths(description: &Value) -> Vec<String> {
    let paths = description["paths"].as_array().map_or(&[][..], Vec::as_slice);
    paths.iter().filter_map(Value::as_str).filter(|path| *path != "portable").map(str::to_owned).collect()
}

/// A measurement by one path, as ffn_speed is asked for it.
fn by(what: &str, path: &str) -> String {
    format!("{what} {path}")
}

fn start_torch(context: &BenchContext, threads: usize) -> Result<(ChildProcess, Value)> {
    let mut command = Command::new(&context.python);
    command.args(["-c", TORCH_EXPERT]);
    command.args([threads, HIDDEN, WIDTH].map(|number| number.to_string()));
    start("torch_expert.py", command)
}

/// Starts an instrument; returns it with its description of itself.
fn start(name: &str, command: Command) -> Result<(ChildProcess, Value)> {
    let mut process = ChildProcess::start(name, command)?;
    let line = process.line()?;
    let description = serde_json::from_str(&line).doing(|| format!("reading the description {line:?}"))?;
    Ok((process, description))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Instrument {
    Ours,
    Torch,
}

/// GB/s or GFLOP/s.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Throughput {
    /// Rate of all calls together.
    pub(super) rate: f64,
    /// Rate of the best single call.
    best: f64,
}

/// Answers by what was asked, in the order in which they came.
#[derive(Debug, Default)]
struct Figures(BTreeMap<(Instrument, String), Vec<Throughput>>);

impl Figures {
    fn push(&mut self, of: Instrument, name: &str, answer: Throughput) {
        self.0.entry((of, name.to_owned())).or_default().push(answer);
    }

    /// One value per round: the mean of those that were taken in it.
    fn series(&self, of: Instrument, name: &str, per_round: usize, what: fn(&Throughput) -> f64) -> Series {
        let answers = self.0.get(&(of, name.to_owned())).map_or(&[][..], Vec::as_slice);
        let mean = |round: &[Throughput]| round.iter().map(what).sum::<f64>() / round.len() as f64;
        answers.chunks(per_round).map(mean).collect()
    }

    fn report(&self, part: &mut BenchSection, paths: &[String], bars: bool) {
        use Instrument::{Ours, Torch};
        let rate = |of, name: &str| self.series(of, name, 1, |answer| answer.rate);
        // Limits are taken twice a round.
        let limit = |name| self.series(Ours, name, 2, |answer| answer.rate);
        let best_over = |name, limit| {
            let best: fn(&Throughput) -> f64 = |answer| answer.best;
            self.series(Ours, name, 1, best).over(&self.series(Ours, limit, 2, best))
        };
        let (memory, peak) = (limit("read"), limit("peak"));
        let (one, eight, many) = (rate(Ours, "one"), rate(Ours, "eight"), rate(Ours, "many"));
        part.add("limit: memory read", "GB/s", &memory);
        part.add("1 token, 1 expert per call", "GB/s", &one);
        part.add("1 token, 8 experts per call", "GB/s", &eight);
        // Integers have a peak of their own, which is not measured: theirs is beside that of bfloat16.
        let peak_name = if bars { "arithmetic peak" } else { "arithmetic peak of bfloat16" };
        let share = |part: &mut BenchSection, name: &str, series: &Series, bar| match bars {
            true => part.add_with_bar(name, "", series, bar),
            false => part.add(name, "", series),
        };
        share(part, "1 token, 1 expert / memory read", &one.over(&memory), ONE_TOKEN_BAR);
        share(part, "1 token, 8 experts / memory read", &eight.over(&memory), ONE_TOKEN_BAR);
        part.add("the same, best call / best read", "", &best_over("eight", "read"));
        part.add(format!("limit: {peak_name}"), "GFLOP/s", &peak);
        part.add("256 tokens, 1 expert per call", "GFLOP/s", &many);
        share(part, &format!("256 tokens / {peak_name}"), &many.over(&peak), MANY_TOKENS_BAR);
        part.add("the same, best call / best peak", "", &best_over("many", "peak"));
        part.add("packing by one thread", "GB/s", &rate(Ours, "pack"));
        for path in paths {
            part.add(format!("1 token, 8 experts, by {path}"), "GB/s", &rate(Ours, &by("eight", path)));
            part.add(format!("256 tokens, by {path}"), "GFLOP/s", &rate(Ours, &by("many", path)));
        }
        let (torch_one, torch_many) = (rate(Torch, "one"), rate(Torch, "many"));
        part.add("torch, packed: 1 token", "GB/s", &torch_one);
        part.add("torch, not packed: 1 token", "GB/s", &rate(Torch, "one_plain"));
        part.add("torch, packed: 256 tokens", "GFLOP/s", &torch_many);
        part.add("1 token: ours, 1 expert per call / torch, packed", "", &one.over(&torch_one));
        part.add_with_bar("256 tokens: ours / torch, packed", "", &many.over(&torch_many), TORCH_BAR);
    }
}
