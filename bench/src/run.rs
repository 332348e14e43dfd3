//! A run: the parts one after the other, then the report.

use crate::args::RunArgs;
use crate::context::BenchContext;
use crate::error::{ErrorContext, Result};
use crate::llama::LlamaBench;
use crate::machine::BenchMachine;
use crate::pace::{Interrupt, TimeShare};
use crate::parts::PartName;
use crate::report::Report;
use clap::ValueEnum;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// As shells report a process that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// Measures what `args` ask for. Parts that fail are reported as such, the others still measured.
pub(crate) fn run(args: RunArgs) -> Result<ExitCode> {
    let programs = args.programs.map_or_else(own_folder, Ok)?;
    let llama = args.llama_bench.map(|program| LlamaBench { program, models: args.gguf });
    let context = BenchContext {
        quick: args.quick,
        programs,
        models: args.models,
        python: args.python,
        layers: args.layers,
        llama,
    };
    let names = if args.only.is_empty() { PartName::value_variants() } else { &args.only };
    let interrupt = Interrupt::listen()?;
    let ends = Instant::now() + Duration::from_secs(args.time_limit.into());
    let mut report = Report::new(args.quick, BenchMachine::now());
    println!("{report}");
    for (index, name) in names.iter().enumerate() {
        if interrupt.is_set() {
            break;
        }
        // What a part leaves of its time is for those after it.
        let share = TimeShare::new(ends, interrupt.clone()).first_of(names.len() - index);
        for part in name.measure(&context, &share) {
            println!("{part}");
            report.parts.push(part);
        }
        // A run that is interrupted leaves what it has.
        args.out.iter().try_for_each(|path| write(path, &report))?;
    }
    let complete = report.parts.iter().all(|part| part.failure.is_none());
    Ok(match (interrupt.is_set(), complete) {
        (true, _) => ExitCode::from(INTERRUPTED),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    })
}

fn write(path: &Path, report: &Report) -> Result<()> {
    let writing = || format!("writing {}", path.display());
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).doing(writing)?;
    }
    let text = serde_json::to_string_pretty(report).doing(writing)?;
    std::fs::write(path, text + "\n").doing(writing)
}

fn own_folder() -> Result<PathBuf> {
    let finding = || "finding the folder of this program";
    let own = std::env::current_exe().doing(finding)?;
    own.parent().map(Path::to_owned).doing(finding)
}
