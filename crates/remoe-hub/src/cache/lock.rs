//! Locks on bytes of files, between processes: open file description locks, which the kernel frees when
//! the process that holds them ends, however it does.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, flock};
use std::fs::File;
use std::io;
use std::ops::Range;

/// Locks `bytes` of `file` unless another open file holds some of them; returns whether it did.
///
/// # Errors
/// The file system has no such locks.
pub(super) fn try_lock(file: &File, bytes: &Range<u64>) -> io::Result<bool> {
    match set(file, bytes, libc::F_WRLCK) {
        Ok(()) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Frees `bytes` of `file`.
///
/// # Errors
/// The file system refuses.
pub(super) fn unlock(file: &File, bytes: &Range<u64>) -> io::Result<()> {
    Ok(set(file, bytes, libc::F_UNLCK)?)
}

fn set(file: &File, bytes: &Range<u64>, kind: libc::c_int) -> Result<(), Errno> {
    let offset = |position: u64| libc::off_t::try_from(position).map_err(|_| Errno::EOVERFLOW);
    let lock = flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset(bytes.start)?,
        l_len: offset(bytes.end - bytes.start)?,
        // As open file description locks require.
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).map(|_| ())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_bytes_have_one_holder() {
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
