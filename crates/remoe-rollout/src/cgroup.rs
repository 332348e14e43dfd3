//! Control groups: limits of memory and CPU time that the kernel enforces.
//!
//! Supports cgroup v1 and v2. Groups are created below the one of this process, and only if the controllers `cpu` and
//! `memory` are really usable, which [`Cgroups::find`] tries.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Period of CPU quotas in microseconds: the default, as in clusters. With a shorter one, a process of several
/// threads would lose time that one of its CPUs was allotted and does not use.
const PERIOD_US: u64 = 100_000;
/// Minimum quota in microseconds that the kernel accepts.
const MIN_QUOTA_US: u64 = 1_000;
/// Prefix of group names, followed by the id of the creating process and a number.
const GROUP_PREFIX: &str = "remoe-";

/// Resource limits of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourceLimits {
    /// CPU limit in thousandths of a vCPU.
    pub cpu_millis: u64,
    /// Memory limit in bytes; the kernel kills a process that exceeds it.
    pub memory_bytes: u64,
}

impl ResourceLimits {
    /// Returns the limits of a function of `memory_bytes`, if one vCPU comes with `bytes_per_vcpu` of memory.
    #[must_use]
    pub fn of_memory(memory_bytes: u64, bytes_per_vcpu: u64) -> Self {
        let millis = (u128::from(memory_bytes) * 1000).div_ceil(u128::from(bytes_per_vcpu.max(1)));
        Self { cpu_millis: u64::try_from(millis).unwrap_or(u64::MAX).max(1), memory_bytes }
    }

    /// Returns the number of threads for these vCPUs on this machine: whole vCPUs only, at least one. Threads wait
    /// for each other by busy polling; an additional one would use up the quota.
    #[must_use]
    pub fn threads(self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        usize::try_from(self.cpu_millis / 1000).unwrap_or(cores).clamp(1, cores)
    }
}

/// Failure to create or change a group.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No hierarchy with a controller is mounted.
    #[error("no control group hierarchy with the controller {0} is mounted")]
    NotMounted(&'static str),
    /// The kernel or the container refuses.
    #[error("cannot write {path}: {source}")]
    Refused {
        /// File or folder that could not be written.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

/// Factory of groups.
#[derive(Debug)]
pub struct Cgroups {
    hierarchy: Hierarchy,
}

/// Number of groups that this process has created.
static CREATED: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
enum Hierarchy {
    /// One folder per controller.
    V1 { cpu: PathBuf, memory: PathBuf },
    /// One folder for all of them.
    V2(PathBuf),
}

/// Group of processes under common limits. Dropping it removes its folders, if its processes have ended.
#[derive(Debug)]
pub struct Cgroup {
    cpu: PathBuf,
    memory: PathBuf,
    unified: bool,
}

impl Cgroups {
    /// Finds where this process may create groups, by creating one.
    ///
    /// # Errors
    /// Groups cannot be created, with the reason.
    pub fn find() -> Result<Arc<Self>, CgroupError> {
        let mounts = read("/proc/self/mountinfo")?;
        let membership = read("/proc/self/cgroup")?;
        let hierarchy = Hierarchy::of(&mounts, &membership)?;
        hierarchy.remove_leftovers();
        let cgroups = Self { hierarchy };
        cgroups.group(ResourceLimits { cpu_millis: 1000, memory_bytes: 1 << 30 })?;
        Ok(Arc::new(cgroups))
    }

    /// Returns `v1` or `v2`.
    #[must_use]
    pub fn version(&self) -> &'static str {
        match self.hierarchy {
            Hierarchy::V1 { .. } => "v1",
            Hierarchy::V2(_) => "v2",
        }
    }

    /// Creates an empty group with `limits`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn group(&self, limits: ResourceLimits) -> Result<Cgroup, CgroupError> {
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
        let name = format!("{GROUP_PREFIX}{}-{number}", std::process::id());
        let group = match &self.hierarchy {
            Hierarchy::V1 { cpu, memory } => {
                Cgroup { cpu: cpu.join(&name), memory: memory.join(&name), unified: false }
            }
            Hierarchy::V2(folder) => {
                Cgroup { cpu: folder.join(&name), memory: folder.join(&name), unified: true }
            }
        };
        let folders = [Some(&group.memory), (!group.unified).then_some(&group.cpu)];
        for folder in folders.into_iter().flatten() {
            let refused = |source| CgroupError::Refused { path: folder.clone(), source };
            fs::create_dir(folder).map_err(refused)?;
        }
        group.limit_cpu(limits.cpu_millis)?;
        let file = if group.unified { "memory.max" } else { "memory.limit_in_bytes" };
        write(&group.memory.join(file), &limits.memory_bytes.to_string())?;
        Ok(group)
    }
}

impl Cgroup {
    /// Moves a process into the group.
    ///
    /// # Errors
    /// The process has ended, or the kernel refuses.
    pub fn add(&self, pid: u32) -> Result<(), CgroupError> {
        let pid = pid.to_string();
        write(&self.memory.join("cgroup.procs"), &pid)?;
        if self.unified { Ok(()) } else { write(&self.cpu.join("cgroup.procs"), &pid) }
    }

    /// Sets a new CPU limit, in thousandths of a vCPU.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn limit_cpu(&self, millis: u64) -> Result<(), CgroupError> {
        let quota = (millis * PERIOD_US / 1000).max(MIN_QUOTA_US);
        if self.unified {
            return write(&self.cpu.join("cpu.max"), &format!("{quota} {PERIOD_US}"));
        }
        write(&self.cpu.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
        write(&self.cpu.join("cpu.cfs_quota_us"), &quota.to_string())
    }

    /// Returns whether the kernel killed a process because the group exceeded its memory limit.
    #[must_use]
    pub fn ran_out_of_memory(&self) -> bool {
        let file = if self.unified { "memory.events" } else { "memory.oom_control" };
        let text = fs::read_to_string(self.memory.join(file)).unwrap_or_default();
        let kills = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        kills.is_some_and(|count| count.trim() != "0")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for folder in [&self.cpu, &self.memory] {
            // It is gone already, or a process is still running; the next launcher removes the folder.
            let _left = fs::remove_dir(folder);
        }
    }
}

impl Hierarchy {
    fn of(mounts: &str, membership: &str) -> Result<Self, CgroupError> {
        let own = |controller: &'static str| {
            mount_of(mounts, controller)
                .map(|mount| below(&mount, membership, Some(controller)))
                .ok_or(CgroupError::NotMounted(controller))
        };
        if let (Ok(cpu), Ok(memory)) = (own("cpu"), own("memory")) {
            return Ok(Self::V1 { cpu, memory });
        }
        let unified = unified_mount(mounts).ok_or(CgroupError::NotMounted("cpu"))?;
        let folder = below(&unified, membership, None);
        let control = folder.join("cgroup.subtree_control");
        let enabled = fs::read_to_string(&control).unwrap_or_default();
        let has = |name| enabled.split_whitespace().any(|controller| controller == name);
        if !(has("cpu") && has("memory")) {
            write(&control, "+cpu +memory")?;
        }
        Ok(Self::V2(folder))
    }

    /// Removes groups of launchers that were killed.
    fn remove_leftovers(&self) {
        let folders = match self {
            Self::V1 { cpu, memory } => vec![cpu, memory],
            Self::V2(folder) => vec![folder],
        };
        for entry in folders.into_iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten() {
            let name = entry.file_name();
            let launcher = name.to_str().and_then(|name| name.strip_prefix(GROUP_PREFIX)?.split('-').next());
            let gone = |pid: &str| !Path::new("/proc").join(pid).exists();
            if launcher.is_some_and(|pid| !pid.is_empty() && gone(pid)) {
                // A group with a running process stays.
                let _busy = fs::remove_dir(entry.path());
            }
        }
    }
}

/// Parses a line of mountinfo (proc(5)): mount point, file system type, and its options.
fn mount(line: &str) -> Option<(&str, &str, &str)> {
    let (before, after) = line.split_once(" - ")?;
    let mut after = after.split(' ');
    Some((before.split(' ').nth(4)?, after.next()?, after.nth(1)?))
}

fn mount_of(mounts: &str, controller: &str) -> Option<PathBuf> {
    mounts.lines().filter_map(mount).find_map(|(point, kind, options)| {
        let has = options.split(',').any(|option| option == controller);
        (kind == "cgroup" && has).then(|| PathBuf::from(point))
    })
}

fn unified_mount(mounts: &str) -> Option<PathBuf> {
    let found = mounts.lines().filter_map(mount).find(|(_, kind, _)| *kind == "cgroup2");
    found.map(|(point, ..)| PathBuf::from(point))
}

/// Returns the folder of this process's own group; the mount itself if that is not visible, as in containers.
fn below(mount: &Path, membership: &str, controller: Option<&str>) -> PathBuf {
    let path = membership.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let matches = match controller {
            Some(name) => controllers.split(',').any(|controller| controller == name),
            None => controllers.is_empty(),
        };
        matches.then_some(path)
    });
    let own = mount.join(path.unwrap_or_default().trim_start_matches('/'));
    if own.is_dir() { own } else { mount.to_owned() }
}

fn read(path: &str) -> Result<String, CgroupError> {
    fs::read_to_string(path).map_err(|source| CgroupError::Refused { path: path.into(), source })
}

fn write(path: &Path, text: &str) -> Result<(), CgroupError> {
    fs::write(path, text).map_err(|source| CgroupError::Refused { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
29 23 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755
30 29 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
33 29 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
35 29 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
";

    #[test]
    fn controllers_are_found_where_they_are_mounted() {
        assert_eq!(mount_of(MOUNTS, "cpu").as_deref(), Some(Path::new("/sys/fs/cgroup/cpu,cpuacct")));
        assert_eq!(mount_of(MOUNTS, "memory").as_deref(), Some(Path::new("/sys/fs/cgroup/memory")));
        assert_eq!(mount_of(MOUNTS, "pids"), None);
        assert_eq!(unified_mount(MOUNTS).as_deref(), Some(Path::new("/sys/fs/cgroup/unified")));
    }

    #[test]
    fn the_own_group_counts_where_it_is_visible() {
        let mount = tempfile::tempdir().unwrap_or_else(|error| unreachable!("{error}"));
        let membership = "4:memory:/inner/one\n3:cpu,cpuacct:/hidden\n0::/inner\n";
        std::fs::create_dir_all(mount.path().join("inner/one")).unwrap_or_default();
        let own = |controller| below(mount.path(), membership, controller);
        assert_eq!(own(Some("memory")), mount.path().join("inner/one"));
        assert_eq!(own(Some("cpu")), mount.path());
        assert_eq!(own(None), mount.path().join("inner"));
    }
}
