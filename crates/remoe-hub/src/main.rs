//! `remoe-fetch`: copies a model from its location into a folder.

use clap::Parser;
use remoe_hub::{ModelArgs, WholeModel};
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

const BUFFER_BYTES: usize = 4 << 20;

/// Copies a model into a folder.
#[derive(Debug, Parser)]
#[command(name = "remoe-fetch", version)]
struct DownloadArgs {
    #[command(flatten)]
    source: ModelArgs,
    /// Output folder.
    #[arg(long, value_name = "FOLDER")]
    to: PathBuf,
}

fn main() -> ExitCode {
    match copy(&DownloadArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A closed standard error must not change the exit code.
            let _closed = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn copy(settings: &DownloadArgs) -> Result<(), Box<dyn Error>> {
    let model = WholeModel::open(settings.source.open()?.checkpoint)?;
    model.fetch()?;
    let mut buffer = vec![0; BUFFER_BYTES];
    for (name, file) in model.files() {
        let path = settings.to.join(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut copy = File::create(path)?;
        let mut offset = 0;
        loop {
            let read = file.read_at(&mut buffer, offset)?;
            if read == 0 {
                break;
            }
            copy.write_all(buffer.get(..read).unwrap_or_default())?;
            offset += read as u64;
        }
    }
    Ok(())
}
