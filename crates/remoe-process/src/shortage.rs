use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};
use std::io;
use std::os::unix::net::UnixStream;

/// Returns the address space that a limit of this process (`RLIMIT_AS`, `ulimit -v`) leaves, in bytes; `None` if there
/// is no limit. Beyond it allocations fail wherever they are, most of them with the end of the process: a caller that
/// knows what it will take asks before.
pub fn address_space_left() -> Option<u64> {
    let limit = getrlimit(Resource::As).current?;
    // The first field is the size of the whole, in pages (proc(5)).
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split(' ').next()?.parse().ok()?;
    Some(limit.saturating_sub(pages * page_size() as u64))
}

/// Checks that there are descriptors for a runtime, which takes five at once and panics if the last two are missing.
///
/// # Errors
/// There are too few descriptors.
pub fn descriptors_for_runtime() -> io::Result<()> {
    // All held until the last one is there.
    let pairs: io::Result<Vec<_>> = (0..3).map(|_| UnixStream::pair()).collect();
    pairs.map(drop).map_err(|error| {
        let message =
            format!("cannot start: {error}; raise the limit of open files of this process (ulimit -n)");
        io::Error::new(error.kind(), message)
    })
}
