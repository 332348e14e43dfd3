//! Facts that every part of a run needs.

use crate::checkpoint::{self, ModelShape};
use crate::error::{BenchError, ErrorContext, Result};
use crate::llama::LlamaBench;
use std::path::{Path, PathBuf};

/// Programs, folders and how thorough to be.
#[derive(Debug)]
pub(crate) struct BenchContext {
    /// Fewer and shorter rounds.
    pub(crate) quick: bool,
    /// Folder of the programs under measurement.
    pub(crate) programs: PathBuf,
    /// Folder that generated checkpoints are kept in.
    pub(crate) models: PathBuf,
    /// Interpreter for the peers that speak Python.
    pub(crate) python: PathBuf,
    /// Layers of the whole model.
    pub(crate) layers: usize,
    /// A peer for the whole model.
    pub(crate) llama: Option<LlamaBench>,
}

impl BenchContext {
    /// `thorough` rounds, or few for a quick run.
    pub(crate) fn rounds(&self, thorough: usize) -> usize {
        if self.quick { thorough.div_ceil(5) } else { thorough }
    }

    /// The program `name`, or what to do about its absence.
    pub(crate) fn program(&self, name: &str) -> Result<PathBuf> {
        let path = self.programs.join(name);
        if path.is_file() {
            return Ok(path);
        }
        let why = format!("not in {}; run `make bench`", self.programs.display());
        Err(BenchError::new(format!("finding {name}"), why))
    }

    /// A checkpoint of `shape`, written when it is not there from an earlier run.
    pub(crate) fn model(&self, name: &str, shape: &ModelShape) -> Result<PathBuf> {
        let folder = self.models.join(name);
        // A config is written last, and that of another shape differs.
        if checkpoint::is_of(shape, &folder) {
            return Ok(folder);
        }
        eprintln!("writing the checkpoint {}", folder.display());
        checkpoint::write(shape, 0, SHARD_BYTES, &folder)?;
        Ok(folder)
    }
}

/// Shards as large as the libraries that publish models make them.
const SHARD_BYTES: u64 = 2_000_000_000;

/// Reads every file of `folder` once, so that the page cache holds it; returns the bytes.
pub(crate) fn warm(folder: &Path) -> Result<u64> {
    let reading = || format!("reading {}", folder.display());
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder).doing(reading)? {
        let path = entry.doing(reading)?.path();
        let mut file = std::fs::File::open(&path).doing(reading)?;
        bytes += std::io::copy(&mut file, &mut std::io::sink()).doing(reading)?;
    }
    Ok(bytes)
}
