//! Locks on byte ranges of files, between processes. They are open file description locks (`fcntl(2)`): the kernel
//! releases them when their process exits or crashes.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, flock};
use std::fs::File;
use std::io;
use std::ops::Range;

/// Tries to lock `bytes` of `file`. Returns `false` if another open file description holds some of them.
///
/// # Errors
/// The file system does not support such locks.
pub(super) fn try_lock(file: &File, bytes: &Range<u64>) -> io::Result<bool> {
    match set_lock(file, bytes, libc::F_WRLCK) {
        Ok(()) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Unlocks `bytes` of `file`.
///
/// # Errors
/// The file system does not support such locks.
pub(super) fn unlock(file: &File, bytes: &Range<u64>) -> io::Result<()> {
    Ok(set_lock(file, bytes, libc::F_UNLCK)?)
}

fn set_lock(file: &File, bytes: &Range<u64>, kind: libc::c_int) -> Result<(), Errno> {
    let offset = |position: u64| libc::off_t::try_from(position).map_err(|_| Errno::EOVERFLOW);
    let lock = flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset(bytes.start)?,
        l_len: offset(bytes.end - bytes.start)?,
        // Open file description locks require 0.
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).map(|_| ())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_have_one_holder() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let (one, other) = (open(), open());
        assert!(try_lock(&one, &(0..100)).unwrap());
        assert!(!try_lock(&other, &(99..200)).unwrap());
        assert!(try_lock(&other, &(100..200)).unwrap());
        unlock(&one, &(50..100)).unwrap();
        assert!(try_lock(&other, &(50..100)).unwrap());
        assert!(!try_lock(&other, &(0..10)).unwrap());
        drop(one);
        assert!(try_lock(&other, &(0..10)).unwrap());
    }
}
