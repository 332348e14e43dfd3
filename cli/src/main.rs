//! The `remoe` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    remoe::main(std::env::args_os().collect())
}
