//! The `remoe-bench` command: checkpoints of any shape, and measurements of Remoe's parts.

mod args;
mod certificates;
mod checkpoint;
mod context;
mod device;
mod error;
mod llama;
mod load;
mod machine;
mod pace;
mod parts;
mod process;
mod remote;
mod report;
mod run;
mod series;

use args::{CheckpointArgs, Cli, Command};
use clap::Parser;
use error::Result;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Checkpoint(args) => write_checkpoint(&args).map(|()| ExitCode::SUCCESS),
        Command::Run(args) => run::run(args),
        Command::Device(args) => device::run(args),
    };
    done.unwrap_or_else(|error| {
        eprintln!("remoe-bench: {error}");
        ExitCode::FAILURE
    })
}

fn write_checkpoint(args: &CheckpointArgs) -> Result<()> {
    let started = Instant::now();
    let bytes = checkpoint::write(&args.shape, args.seed, args.shard_bytes, &args.out)?;
    let seconds = started.elapsed().as_secs_f64();
    eprintln!("{}: {:.2} GB in {seconds:.1} s", args.out.display(), bytes as f64 / 1e9);
    Ok(())
}
