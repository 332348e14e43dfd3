//! Stores of a checkpoint's files: a local folder, or any other [`Store`].

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;

/// The files of a checkpoint, by name. A name may begin with a folder and a slash.
///
/// All reads of a file return bytes of one version: a store that notices a change returns an error.
///
/// # Errors of a store
///
/// An error with an inner error (as created by [`io::Error::new`]) names the file and the remedy. Other errors are those
/// of the operating system. The kind has a meaning:
///
/// - [`ErrorKind::TimedOut`]: the source did not answer; a retry may succeed.
/// - [`ErrorKind::PermissionDenied`]: the source refused the credentials.
/// - [`ErrorKind::HostUnreachable`]: connections to the source are not permitted.
pub trait Store: Debug + Send + Sync {
    /// Returns the name of the store in messages: its folder or URL.
    fn root(&self) -> &Path;

    /// Opens the file `name`, or returns `None` if it does not exist.
    ///
    /// # Errors
    /// The file exists but cannot be opened, or its existence cannot be determined.
    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn StoredFile>>>;

    /// Opens several files, as [`Self::open`] does. A remote store opens them concurrently.
    ///
    /// # Errors
    /// Fails as [`Self::open`] does.
    fn open_all(&self, names: &[&str]) -> io::Result<Vec<Option<Arc<dyn StoredFile>>>> {
        names.iter().map(|name| self.open(name)).collect()
    }

    /// Fetches bytes that will be read, if the store is remote. A local store does nothing.
    ///
    /// # Errors
    /// The bytes cannot be fetched.
    fn prefetch(&self, ranges: &[FileRange<'_>]) -> io::Result<()>;
}

/// A byte range of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRange<'a> {
    /// Name of the file.
    pub file: &'a str,
    /// Positions in the file.
    pub bytes: Range<u64>,
}

/// An open file of a [`Store`].
pub trait StoredFile: Debug + Send + Sync {
    /// Returns the length in bytes when the file was opened.
    fn size(&self) -> u64;

    /// Reads bytes from position `at` on into the start of `target`. Returns their number, which is 0 only at the end of the
    /// file or for an empty `target`.
    ///
    /// # Errors
    /// The bytes cannot be read.
    fn read_at(&self, target: &mut [u8], at: u64) -> io::Result<usize>;

    /// Fills `target` with the bytes from position `at` on.
    ///
    /// # Errors
    /// The bytes cannot be read, or the file ends before ([`ErrorKind::UnexpectedEof`]).
    fn read_exact_at(&self, target: &mut [u8], at: u64) -> io::Result<()> {
        match read_fully_at(self, target, at)? {
            read if read == target.len() => Ok(()),
            _ => Err(ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Reads until `target` is full or the file ends. Returns the number of bytes read.
pub(crate) fn read_fully_at(
    file: &(impl StoredFile + ?Sized),
    target: &mut [u8],
    at: u64,
) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = target.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// A local folder. Replacing a file does not affect files that are already open.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Returns the folder at `path`, which need not exist.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }
}

impl Store for Folder {
    fn root(&self) -> &Path {
        &self.path
    }

    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn StoredFile>>> {
        let path = self.path.join(name);
        // Without this flag, opening a pipe would wait for a writer. It does not affect regular files.
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let file = match OpenOptions::new().read(true).custom_flags(nonblocking).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            let message = format!("{} is not a regular file", path.display());
            return Err(io::Error::new(ErrorKind::InvalidInput, message));
        }
        Ok(Some(Arc::new(LocalFile { file, size: metadata.len() })))
    }

    fn prefetch(&self, _ranges: &[FileRange<'_>]) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct LocalFile {
    file: File,
    size: u64,
}

impl StoredFile for LocalFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, target: &mut [u8], at: u64) -> io::Result<usize> {
        self.file.read_at(target, at)
    }
}
