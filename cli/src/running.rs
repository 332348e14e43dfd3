//! Commands that run on this machine for this user: a file for each command that keeps functions, named after its
//! process, so that `remoe ps` and `remoe stop` find it.
//!
//! A file says when its process began, as the kernel counts it: a process that was given the same number later is
//! another one. The file of a process that is gone is removed by the first command that finds it.

use crate::exit::CliError;
use crate::machine;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// No file is longer: it has a name for each model.
const FILE_LIMIT: u64 = 1 << 20;

/// A command that keeps functions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunningCommand {
    pub(crate) pid: u32,
    /// When its process began, in the kernel's clock ticks since the machine's start.
    began: u64,
    /// `up` or `run`.
    pub(crate) command: String,
    /// The models by the names that they are served under.
    pub(crate) models: Vec<String>,
    /// Where they are served, where they are.
    pub(crate) endpoint: Option<String>,
    /// As RFC 3339 in UTC.
    pub(crate) since: String,
}

/// The file of this process, until it is dropped.
pub(crate) struct Registered {
    path: PathBuf,
}

impl Drop for Registered {
    fn drop(&mut self) {
        // If this fails, the next command that reads the folder removes it.
        let _left = fs::remove_file(&self.path);
    }
}

/// Says that this process runs `command` for `models`, reached at `endpoint`.
pub(crate) fn register(
    command: &str,
    models: Vec<String>,
    endpoint: Option<String>,
) -> Result<Registered, CliError> {
    let folder = folder()?;
    let pid = std::process::id();
    let running = RunningCommand {
        pid,
        began: began(pid).unwrap_or_default(),
        command: command.to_owned(),
        models,
        endpoint,
        since: machine::now(),
    };
    let path = folder.join(format!("{pid}.json"));
    let written = serde_json::to_vec(&running).map_err(io::Error::from).and_then(|text| {
        // Whole or not at all: others may read at any time.
        let new = folder.join(format!("{pid}.new"));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        fs::rename(&new, &path)
    });
    written.map_err(|error| of_path(&path, "write", &error))?;
    Ok(Registered { path })
}

/// All that run, by their numbers. Files of those that are gone are removed.
pub(crate) fn all() -> Result<Vec<RunningCommand>, CliError> {
    let folder = folder()?;
    let entries = fs::read_dir(&folder).map_err(|error| of_path(&folder, "read", &error))?;
    let mut found = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        match read(&path) {
            Some(running) if running.lives() => found.push(running),
            // Gone, or never whole.
            _ => drop(fs::remove_file(&path)),
        }
    }
    found.sort_by_key(|running| running.pid);
    Ok(found)
}

impl RunningCommand {
    fn lives(&self) -> bool {
        began(self.pid) == Some(self.began)
    }

    /// Asks it to end; becomes readable when it has. `None` where it has ended already.
    pub(crate) fn ask_to_end(&self) -> Result<Option<OwnedFd>, CliError> {
        let gone = |error| match error {
            rustix::io::Errno::SRCH => Ok(None),
            error => Err(CliError::runtime(format!("cannot stop process {}: {error}", self.pid))),
        };
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => process,
            Err(error) => return gone(error),
        };
        // Looked at after it is held: the number cannot go to another process any more.
        if !self.lives() {
            return Ok(None);
        }
        match pidfd_send_signal(&process, Signal::TERM) {
            Ok(()) => Ok(Some(process)),
            Err(error) => gone(error),
        }
    }
}

fn read(path: &Path) -> Option<RunningCommand> {
    let mut text = String::new();
    File::open(path).ok()?.take(FILE_LIMIT).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// When a process began, in the kernel's clock ticks; `None` where there is none, or only what its parent has
/// not noticed yet.
fn began(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before the bracket may have anything in it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // Field 22; the state is field 3.
    let began = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(began)
}

/// Returns the folder of this user's files, made if it is missing. No other user may write into it.
fn folder() -> Result<PathBuf, CliError> {
    let uid = rustix::process::getuid().as_raw();
    let folder =
        match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute()) {
            Some(runtime) => runtime.join("remoe"),
            None => PathBuf::from(format!("/tmp/remoe-{uid}")),
        };
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(of_path(&folder, "create", &error));
        }
        _ => {}
    }
    let facts = fs::symlink_metadata(&folder).map_err(|error| of_path(&folder, "read", &error))?;
    if !facts.is_dir() || facts.uid() != uid || facts.mode() & 0o077 != 0 {
        let message = format!(
            "cannot use runtime folder {}: it is not private to this user; remove it, or set XDG_RUNTIME_DIR",
            folder.display()
        );
        return Err(CliError { path: Some(folder), ..CliError::runtime(message) });
    }
    Ok(folder)
}

fn of_path(path: &Path, what: &str, error: &dyn std::error::Error) -> CliError {
    CliError {
        path: Some(path.to_owned()),
        ..CliError::runtime(format!("cannot {what} {}: {error}", path.display()))
    }
}
