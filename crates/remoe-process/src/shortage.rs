//! Checks of resource limits of this process.

use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};
use std::io;
use std::os::unix::net::UnixStream;

/// Returns the bytes left of the address space limit of this process (`RLIMIT_AS`, `ulimit -v`); `None` without a
/// limit. Beyond the limit allocations fail anywhere, and most failures abort the process. So callers with a known
/// demand check first.
pub fn address_space_left() -> Option<u64> {
    let limit = getrlimit(Resource::As).current?;
    // The first field is the total size in pages (proc(5)).
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split(' ').next()?.parse().ok()?;
    Some(limit.saturating_sub(pages * page_size() as u64))
}

/// Checks that enough file descriptors are left for a tokio runtime, which opens five and panics if the last two
/// fail.
///
/// # Errors
/// There are too few descriptors.
pub fn descriptors_for_runtime() -> io::Result<()> {
    // All are kept open until the last one exists.
    let pairs: io::Result<Vec<_>> = (0..3).map(|_| UnixStream::pair()).collect();
    pairs.map(drop).map_err(|error| {
        let message =
            format!("cannot start: {error}; raise the limit of open files of this process (ulimit -n)");
        io::Error::new(error.kind(), message)
    })
}
