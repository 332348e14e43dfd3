//! Memory limit and memory use of this process.

use std::fs;
use std::path::{Path, PathBuf};

/// Mount point of control groups.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// Returns the memory limit of the process in bytes: the smallest of `configured`, the limits of its control groups, and
/// the machine's memory and swap. Returns `None` if none of these is known.
pub(crate) fn limit(configured: Option<u64>) -> Option<u64> {
    let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let machine = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine = kilobytes(&machine, "MemTotal:").map(|total| {
        let swap = kilobytes(&machine, "SwapTotal:").unwrap_or(0);
        total.saturating_add(swap)
    });
    let group = group_limit(Path::new(CONTROL_GROUPS), &membership);
    [configured, machine, group].into_iter().flatten().min()
}

/// Returns the bytes in use that the kernel cannot drop; pages of files do not count.
pub(crate) fn used() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    kilobytes(&status, "RssAnon:").unwrap_or(0)
}

/// Returns the smallest memory limit of the groups in `membership` (a `/proc/PID/cgroup`) and their parents.
///
/// A container's own group is mounted as the root, and folders of its path do not exist.
fn group_limit(mounts: &Path, membership: &str) -> Option<u64> {
    let mut limits = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (roots, file): (Vec<PathBuf>, _) = match controllers {
            "" => (vec![mounts.to_owned(), mounts.join("unified")], "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (vec![mounts.join("memory")], "memory.limit_in_bytes")
            }
            _ => continue,
        };
        for root in roots {
            for folder in Path::new(path.trim_start_matches('/')).ancestors() {
                // "max" means no limit.
                let limit = fs::read_to_string(root.join(folder).join(file)).ok();
                limits.extend(limit.and_then(|limit| limit.trim().parse::<u64>().ok()));
            }
        }
    }
    limits.into_iter().min()
}

/// Returns the value of the line that begins with `name`, converted from kilobytes to bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn smallest_limit_of_a_group_and_its_parents_counts() {
        let mounts = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = mounts.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let limit = |membership| group_limit(mounts.path(), membership);
        assert_eq!(limit("0::/a/b\n"), None);
        write("a/b/memory.max", "max\n");
        assert_eq!(limit("0::/a/b\n"), None);
        write("a/memory.max", "3000000\n");
        assert_eq!(limit("0::/a/b\n"), Some(3_000_000));
        write("memory/x/memory.limit_in_bytes", "2000000\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit("7:cpu,memory:/x\n3:cpuset:/\n0::/a/b\n"), Some(2_000_000));
        // A container's own group is the root.
        assert_eq!(limit("4:memory:/outside/y\n"), Some(9_223_372_036_854_771_712));
    }

    #[test]
    fn memory_use_grows_with_allocations_below_the_limit() {
        // Other tests allocate and free memory at the same time.
        let grows = |_| {
            let before = used();
            let taken = std::hint::black_box(vec![1_u8; 64 << 20]);
            used() >= before + (taken.len() as u64) / 2
        };
        assert!((0..10).any(grows));
        assert_eq!(limit(Some(1)), Some(1));
        assert!(limit(None).unwrap() > used());
    }
}
