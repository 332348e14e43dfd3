//! JSON on standard output.

use crate::exit::CliError;
use serde::Serialize;
use std::io::{self, Write};

/// Prints `value` as one line.
pub(crate) fn print(value: &impl Serialize) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Prints the error object.
pub(crate) fn print_error(error: &CliError) {
    #[derive(Serialize)]
    struct ErrorObject<'a> {
        error: &'a CliError,
    }
    // If the output is closed, only the exit code tells.
    let _closed = print(&ErrorObject { error });
}
