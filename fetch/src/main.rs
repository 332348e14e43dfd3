//! The `remoe-fetch` process: copies a model into a folder, from wherever it is.

use clap::Parser;
use remoe_fetch::ModelArgs;
use remoe_model::FileRange;
use std::collections::BTreeSet;
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Files beside the weights.
const BESIDE: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "additional_chat_templates/rag.jinja",
];
const READ_BYTES: usize = 4 << 20;

/// Copies a model into a folder.
#[derive(Debug, Parser)]
#[command(name = "remoe-fetch", version)]
struct Settings {
    #[command(flatten)]
    source: ModelArgs,
    /// Output folder.
    #[arg(long, value_name = "FOLDER")]
    to: PathBuf,
}

fn main() -> ExitCode {
    match copy(&Settings::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A closed standard error must not change the exit code.
            let _closed = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn copy(settings: &Settings) -> Result<(), Box<dyn Error>> {
    let checkpoint = settings.source.open()?.checkpoint;
    let weights: BTreeSet<String> = checkpoint
        .files()
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    let store = checkpoint.store();
    let mut whole = Vec::new();
    for name in weights.iter().map(String::as_str).chain(BESIDE) {
        if let Some(file) = store.open(name)? {
            whole.push((name, file));
        }
    }
    let ranges: Vec<_> =
        whole.iter().map(|(name, file)| FileRange { file: name, bytes: 0..file.size() }).collect();
    store.prefetch(&ranges)?;
    let mut buffer = vec![0; READ_BYTES];
    for (name, file) in whole {
        let path = settings.to.join(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut copy = File::create(path)?;
        let mut at = 0;
        loop {
            let read = file.read_at(&mut buffer, at)?;
            if read == 0 {
                break;
            }
            copy.write_all(buffer.get(..read).unwrap_or_default())?;
            at += read as u64;
        }
    }
    Ok(())
}
