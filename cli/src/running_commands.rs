//! Registry of the user's running commands, for `remoe ps` and `remoe stop`: a file for each command that runs
//! functions, named after its process id.
//!
//! A file contains the start time of its process, in the kernel's clock ticks, because process ids are reused. The next
//! command that reads the registry removes files of processes that have ended.

use crate::exit::CliError;
use crate::machine;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Size limit of a file, in bytes.
const FILE_BYTES_LIMIT: u64 = 1 << 20;

/// Running command with functions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunningCommand {
    pub(crate) pid: u32,
    /// Start time of the process, in the kernel's clock ticks since boot.
    #[serde(rename = "began")]
    start_ticks: u64,
    /// `up` or `run`.
    pub(crate) command: String,
    /// Names under which the models are served.
    pub(crate) models: Vec<String>,
    /// URL of the gateway. `None` for a command without one.
    pub(crate) endpoint: Option<String>,
    /// Time of registration, as RFC 3339 in UTC.
    pub(crate) since: String,
}

/// Registration of this process. Dropping it removes the file.
pub(crate) struct Registration {
    path: PathBuf,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // If this fails, the next command that reads the registry removes the file.
        let _left = fs::remove_file(&self.path);
    }
}

/// Registers this process as `command` for `models` at `endpoint`.
pub(crate) fn register(
    command: &str,
    models: Vec<String>,
    endpoint: Option<String>,
) -> Result<Registration, CliError> {
    let folder = folder()?;
    let pid = std::process::id();
    let running = RunningCommand {
        pid,
        start_ticks: process_start_ticks(pid).unwrap_or_default(),
        command: command.to_owned(),
        models,
        endpoint,
        since: machine::now(),
    };
    let path = folder.join(format!("{pid}.json"));
    let written = serde_json::to_vec(&running).map_err(io::Error::from).and_then(|text| {
        // Renamed into place, because other processes may read the file at any time.
        let new = folder.join(format!("{pid}.new"));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        fs::rename(&new, &path)
    });
    written.map_err(|error| path_error(&path, "write", &error))?;
    Ok(Registration { path })
}

/// Returns the running commands by process id. Removes files of ended processes.
pub(crate) fn list() -> Result<Vec<RunningCommand>, CliError> {
    let folder = folder()?;
    let entries = fs::read_dir(&folder).map_err(|error| path_error(&folder, "read", &error))?;
    let mut found = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        match read(&path) {
            Some(running) if running.is_running() => found.push(running),
            // Ended, or damaged.
            _ => drop(fs::remove_file(&path)),
        }
    }
    found.sort_by_key(|running| running.pid);
    Ok(found)
}

impl RunningCommand {
    fn is_running(&self) -> bool {
        process_start_ticks(self.pid) == Some(self.start_ticks)
    }

    /// Sends SIGTERM. Returns a pidfd that becomes readable when the process ends, or `None` if it has ended already.
    pub(crate) fn terminate(&self) -> Result<Option<OwnedFd>, CliError> {
        let none_if_ended = |error| match error {
            rustix::io::Errno::SRCH => Ok(None),
            error => Err(CliError::runtime(format!("cannot stop process {}: {error}", self.pid))),
        };
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => process,
            Err(error) => return none_if_ended(error),
        };
        // Checked after opening the pidfd, which keeps referring to this process even if the id is reused.
        if !self.is_running() {
            return Ok(None);
        }
        match pidfd_send_signal(&process, Signal::TERM) {
            Ok(()) => Ok(Some(process)),
            Err(error) => none_if_ended(error),
        }
    }
}

fn read(path: &Path) -> Option<RunningCommand> {
    let mut text = String::new();
    File::open(path).ok()?.take(FILE_BYTES_LIMIT).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Returns the start time of a process, in the kernel's clock ticks. Returns `None` if there is none, or it is a zombie.
fn process_start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before the last bracket may contain any characters.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // Field 22; the state is field 3.
    let start_ticks = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(start_ticks)
}

/// Returns the registry's folder, and creates it if necessary. It must be private to the user.
fn folder() -> Result<PathBuf, CliError> {
    let uid = rustix::process::getuid().as_raw();
    let folder =
        match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute()) {
            Some(runtime) => runtime.join("remoe"),
            None => PathBuf::from(format!("/tmp/remoe-{uid}")),
        };
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(path_error(&folder, "create", &error));
        }
        _ => {}
    }
    let metadata = fs::symlink_metadata(&folder).map_err(|error| path_error(&folder, "read", &error))?;
    if !metadata.is_dir() || metadata.uid() != uid || metadata.mode() & 0o077 != 0 {
        let message = format!(
            "cannot use runtime folder {}: it is not private to this user; remove it, or set XDG_RUNTIME_DIR",
            folder.display()
        );
        return Err(CliError { path: Some(folder), ..CliError::runtime(message) });
    }
    Ok(folder)
}

fn path_error(path: &Path, verb: &str, error: &dyn std::error::Error) -> CliError {
    CliError {
        path: Some(path.to_owned()),
        ..CliError::runtime(format!("cannot {verb} {}: {error}", path.display()))
    }
}
