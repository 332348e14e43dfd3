//! Where the files of a checkpoint are: in a folder, or wherever a [`Store`] brings them from.

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;

/// The files of a checkpoint by name; a name may begin with a folder and a slash.
///
/// Reading gives the bytes of one version of each file: a store that notices that a file has changed
/// gives an error. An error with another one inside (as [`io::Error::new`] makes it) names the file and says
/// what to do; one without is the system's. [`ErrorKind::TimedOut`] says that the source did not answer and
/// may do so later, [`ErrorKind::PermissionDenied`] that it refused the credentials, and
/// [`ErrorKind::HostUnreachable`] that it may not be connected to.
pub trait Store: Debug + Send + Sync {
    /// Returns the name of the store in messages: its folder or URL.
    fn root(&self) -> &Path;

    /// Opens the file `name`, `None` where there is none.
    ///
    /// # Errors
    /// The file is there but cannot be opened, or the source does not say whether it is.
    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn StoredFile>>>;

    /// As [`Self::open`] for several files, which a distant store asks for at the same time.
    ///
    /// # Errors
    /// As [`Self::open`].
    fn open_all(&self, names: &[&str]) -> io::Result<Vec<Option<Arc<dyn StoredFile>>>> {
        names.iter().map(|name| self.open(name)).collect()
    }

    /// Brings bytes near that will be read: a hint that costs nothing where they are near already.
    ///
    /// # Errors
    /// They cannot be had.
    fn prefetch(&self, ranges: &[FileRange<'_>]) -> io::Result<()>;
}

/// Bytes of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRange<'a> {
    /// The file's name.
    pub file: &'a str,
    /// Positions in the file.
    pub bytes: Range<u64>,
}

/// An open file of a [`Store`].
pub trait StoredFile: Debug + Send + Sync {
    /// Returns the length in bytes when the file was opened.
    fn size(&self) -> u64;

    /// Reads bytes at position `at` into the start of `target` and returns how many: 0 only at the end of
    /// the file or for an empty `target`.
    ///
    /// # Errors
    /// The bytes cannot be had.
    fn read_at(&self, target: &mut [u8], at: u64) -> io::Result<usize>;

    /// Fills `target` with the bytes at position `at`.
    ///
    /// # Errors
    /// The bytes cannot be had, or the file ends before: [`ErrorKind::UnexpectedEof`].
    fn read_exact_at(&self, target: &mut [u8], at: u64) -> io::Result<()> {
        match read_fully_at(self, target, at)? {
            read if read == target.len() => Ok(()),
            _ => Err(ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Reads until `target` is full or the file ends; returns how many bytes were read.
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

/// A plain folder. Its files stay what they were when they were opened, whatever is put in their place.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// The folder at `path`, which need not exist.
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
        // Opening a pipe would wait for a writer; a regular file opens as ever.
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
