//! `remoe pull`, `list` and `rm`: management of models in the cache.

use crate::exit::CliError;
use crate::flags::default_dtype;
use crate::machine;
use crate::output::{json, table};
use clap::Args;
use remoe_hub::ModelArgs;
use remoe_hub::{
    CachedSource, ModelLocation, WholeModel, allocated_bytes, cache_folder, list_cached_sources,
};
use remoe_model::{ExpertsDtype, Inspection};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    #[command(flatten)]
    pub(crate) source: ModelArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Cache folder of fetched models [env: REMOE_MODEL_CACHE] [default: remoe/models in the user's cache folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) model_cache: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Model as `remoe list` shows it, with or without @REVISION; without it, all revisions
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// Cache folder of fetched models [env: REMOE_MODEL_CACHE] [default: remoe/models in the user's cache folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) model_cache: Option<PathBuf>,
}

/// Dtypes of experts whose memory is shown, in addition to the checkpoint's.
const COMPARED_DTYPES: [ExpertsDtype; 2] = [ExpertsDtype::Int8, ExpertsDtype::Int4];

#[derive(Serialize)]
struct ModelRow {
    model: Option<String>,
    folder: PathBuf,
    bytes: u64,
}

impl From<CachedSource> for ModelRow {
    fn from(source: CachedSource) -> Self {
        Self { model: source.location, folder: source.folder, bytes: source.bytes }
    }
}

/// Fetches a whole model into the cache, if the disk has enough free space.
pub(crate) fn pull(args: &PullArgs, as_json: bool) -> Result<(), CliError> {
    let opened = args.source.open()?;
    let source = args.source.pinned(&opened);
    let Some(folder) = opened.cache.filter(|_| !matches!(source.model, ModelLocation::Folder(_))) else {
        let message =
            format!("cannot pull {}: it is a folder of this machine; use it as it is", source.model);
        return Err(CliError::arguments("--model", message));
    };
    let inspection = opened.checkpoint.inspect()?;
    let failed =
        |error: &dyn std::fmt::Display| CliError::runtime(format!("cannot pull {}: {error}", source.model));
    let model = WholeModel::open(opened.checkpoint).map_err(|error| failed(&error))?;
    let missing = model.bytes().saturating_sub(allocated_bytes(&folder).map_err(|error| failed(&error))?);
    let free = free_bytes(&folder).map_err(|error| failed(&error))?;
    if missing > free {
        return Err(failed(&format!(
            "{} are still to be fetched, {} are free in {}; free some, or set --model-cache",
            table::bytes(missing),
            table::bytes(free),
            folder.display()
        )));
    }
    print_stderr(&memory_summary(&inspection, machine::memory_bytes()));
    model.fetch().map_err(|error| failed(&error))?;
    let line = ModelRow {
        model: Some(source.model.to_string()),
        bytes: allocated_bytes(&folder).map_err(|error| failed(&error))?,
        folder,
    };
    match as_json {
        true => json::print(&line)?,
        false => writeln!(
            anstream::stdout().lock(),
            "{} is complete: {} in {}",
            source.model,
            table::bytes(line.bytes),
            line.folder.display()
        )?,
    }
    Ok(())
}

/// Formats the memory that the model needs with each dtype of experts, and the machine's memory.
fn memory_summary(inspection: &Inspection, machine_bytes: u64) -> String {
    let dtype = default_dtype(inspection);
    let needs = |name: &str, inspection: &Inspection| {
        format!("{name} needs {}", table::bytes(inspection.resident_total_bytes(dtype)))
    };
    let own = needs(dtype, &inspection.clone().kept_as(None, None, "cpu"));
    let others =
        COMPARED_DTYPES.map(|form| needs(form.name(), &inspection.clone().kept_as(Some(form), None, "cpu")));
    let all: Vec<String> = std::iter::once(own).chain(others).collect();
    format!("memory: {}; this machine has {}", all.join(", "), table::bytes(machine_bytes))
}

fn print_stderr(text: &str) {
    // A closed standard error must not end the command.
    let _closed = writeln!(anstream::stderr().lock(), "{text}");
}

fn free_bytes(folder: &Path) -> std::io::Result<u64> {
    let disk = rustix::fs::statvfs(folder)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Returns the location of a model, or the name of its cache folder if the location is unknown.
fn display_name(source: &CachedSource) -> String {
    let folder = || source.folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    source.location.clone().unwrap_or_else(folder)
}

/// Lists the models in the cache.
pub(crate) fn list(args: &ListArgs, as_json: bool) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct ModelList {
        cache: PathBuf,
        models: Vec<ModelRow>,
    }
    let (cache, sources) = cached_sources(args.model_cache.as_deref())?;
    if as_json {
        return Ok(json::print(&ModelList {
            cache,
            models: sources.into_iter().map(ModelRow::from).collect(),
        })?);
    }
    let mut out = anstream::stdout().lock();
    if sources.is_empty() {
        writeln!(out, "no models in {}; fetch one with `remoe pull MODEL`", cache.display())?;
        return Ok(());
    }
    let total = sources.iter().map(|source| source.bytes).sum();
    let row = |source: &CachedSource| vec![display_name(source), table::bytes(source.bytes)];
    let mut rows: Vec<Vec<String>> = sources.iter().map(row).collect();
    rows.push(vec![format!("total in {}", cache.display()), table::bytes(total)]);
    writeln!(out, "{}", table::with_header(&["model", "disk"], rows))?;
    Ok(())
}

/// Removes models from the cache.
pub(crate) fn remove(args: &RmArgs, as_json: bool) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct Removed {
        removed: Vec<ModelRow>,
    }
    let (cache, sources) = cached_sources(args.model_cache.as_deref())?;
    let named: Vec<CachedSource> =
        sources.into_iter().filter(|source| source.is_named(&args.model)).collect();
    if named.is_empty() {
        let message = format!(
            "cannot remove {}: it is not in {}; `remoe list` shows what is",
            args.model,
            cache.display()
        );
        return Err(CliError::arguments("MODEL", message));
    }
    for source in &named {
        source.remove().map_err(|error| CliError::runtime(error.to_string()))?;
    }
    if as_json {
        return Ok(json::print(&Removed { removed: named.into_iter().map(ModelRow::from).collect() })?);
    }
    let mut out = anstream::stdout().lock();
    for source in &named {
        writeln!(out, "removed {}: {}", display_name(source), table::bytes(source.bytes))?;
    }
    Ok(())
}

fn cached_sources(given: Option<&Path>) -> Result<(PathBuf, Vec<CachedSource>), CliError> {
    let failed = |error: &dyn std::fmt::Display| CliError::runtime(error.to_string());
    let cache = cache_folder(given).map_err(|error| failed(&error))?;
    let sources = list_cached_sources(&cache).map_err(|error| failed(&error))?;
    Ok((cache, sources))
}
