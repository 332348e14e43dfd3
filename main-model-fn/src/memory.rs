//! Memory that this process may take, and memory that it takes.

use std::fs;
use std::path::{Path, PathBuf};

/// Where control groups are mounted.
const GROUPS: &str = "/sys/fs/cgroup";

/// Bytes that the process may take at most: `given`, its control groups' limits, or the machine's memory and
/// swap, whichever is least; none where nothing of that is known.
pub(crate) fn limit(given: Option<u64>) -> Option<u64> {
    let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let machine = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine = kilobytes(&machine, "MemTotal:").map(|total| {
        let swap = kilobytes(&machine, "SwapTotal:").unwrap_or(0);
        total.saturating_add(swap)
    });
    let group = group_limit(Path::new(GROUPS), &membership);
    [given, machine, group].into_iter().flatten().min()
}

/// Bytes that the process takes and that the kernel could not drop: pages of files do not count.
pub(crate) fn used() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    kilobytes(&status, "RssAnon:").unwrap_or(0)
}

/// The least memory limit of the groups in `membership` (a `/proc/PID/cgroup`) and those above them. In a
/// container, whose own group is mounted as the root, the folders below it are not there.
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
                // "max" is no number and no limit.
                let limit = fs::read_to_string(root.join(folder).join(file)).ok();
                limits.extend(limit.and_then(|limit| limit.trim().parse::<u64>().ok()));
            }
        }
    }
    limits.into_iter().min()
}

/// The value of the line that begins with `name`, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_on_the_way_up_counts() {
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
        // A container sees its own group as the root.
        assert_eq!(limit("4:memory:/outside/y\n"), Some(9_223_372_036_854_771_712));
    }

    #[test]
    fn this_process_takes_memory_within_its_limit() {
        // Other tests take and free memory meanwhile.
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
