//! `remoe completions` and `remoe man`: what shells and `man` know of the command line.

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::exit::CliError;
use clap::CommandFactory;
use std::io::Write;

/// Prints the completion script of a shell.
pub(crate) fn run(args: &CompletionsArgs) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "remoe", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}

/// Writes a page for every command into a folder.
pub(crate) fn man(args: &ManArgs) -> Result<(), CliError> {
    let failed = |error: std::io::Error| CliError {
        path: Some(args.folder.clone()),
        ..CliError::arguments(
            "DIR",
            format!("cannot write manual pages to {}: {error}", args.folder.display()),
        )
    };
    std::fs::create_dir_all(&args.folder).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), &args.folder).map_err(failed)
}
