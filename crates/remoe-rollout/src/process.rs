//! Launcher of functions as local processes.

use crate::activity::Activity;
use crate::cgroup::{CgroupError, Cgroups};
mod child;

use self::child::ChildRecord;
use crate::launcher::{FunctionId, FunctionPhase, FunctionSpec, LaunchError, Launcher, ObservedFunction};
use remoe_process::Role;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::process::Command;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

/// Line of a function's log.
#[derive(Debug, Clone, Copy)]
pub struct LogLine<'a> {
    /// Slot of the function.
    pub name: &'a str,
    /// Id of its process.
    pub pid: u32,
    /// Text without the line break.
    pub text: &'a str,
}

/// Receiver of log lines.
pub type LogSink = Arc<dyn Fn(LogLine<'_>) + Send + Sync>;

/// Paths of the function programs.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The main function.
    pub main: PathBuf,
    /// The remote-expert function.
    pub remote: PathBuf,
}

/// Launcher of functions as child processes.
///
/// One thread starts all children and lives as long as the launcher: each child asks the kernel to kill it when the
/// *thread* that started it ends (PR_SET_PDEATHSIG). Children have their own process groups, so that Ctrl-C on the terminal reaches only the launcher,
/// which then drains them.
pub struct ProcessLauncher {
    programs: Programs,
    announce_timeout: Duration,
    sink: LogSink,
    cgroups: Option<Arc<Cgroups>>,
    activity: Activity,
    spawner: std::sync::mpsc::Sender<SpawnJob>,
    /// Number of the next child.
    next_number: AtomicU64,
    shared: Arc<LauncherShared>,
}

struct SpawnJob {
    command: Command,
    reply: oneshot::Sender<std::io::Result<tokio::process::Child>>,
}

/// State that the launcher shares with the watchers of its children.
#[derive(Default)]
pub(crate) struct LauncherShared {
    /// Children by number, in the order of their starts.
    children: Mutex<BTreeMap<u64, ChildRecord>>,
    changed: Notify,
}

impl LauncherShared {
    /// Changes the record of child `number` and wakes the task that waits for changes.
    pub(crate) fn update(&self, number: u64, change: impl FnOnce(&mut ChildRecord)) {
        if let Some(child) = self.children().get_mut(&number) {
            change(child);
        }
        self.changed.notify_one();
    }

    fn children(&self) -> MutexGuard<'_, BTreeMap<u64, ChildRecord>> {
        // Every change is a single assignment: records stay consistent after a panic.
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProcessLauncher {
    /// Creates a launcher of `programs`. A child that does not print its addresses within `announce_timeout`
    /// is killed.
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The spawning thread cannot be started.
    pub fn new(programs: Programs, announce_timeout: Duration, sink: LogSink) -> Result<Self, LaunchError> {
        let (spawner, jobs) = std::sync::mpsc::channel::<SpawnJob>();
        let runtime = Handle::current();
        std::thread::Builder::new()
            .name("spawner".to_owned())
            .spawn(move || {
                let _context = runtime.enter();
                for mut job in jobs {
                    // `kill_on_drop` ends a child whose requester no longer waits.
                    let _unwanted = job.reply.send(job.command.spawn());
                }
            })
            .map_err(|error| LaunchError { message: format!("cannot start the spawning thread: {error}") })?;
        Ok(Self {
            programs,
            announce_timeout,
            sink,
            cgroups: None,
            activity: Activity::default(),
            spawner,
            next_number: AtomicU64::new(0),
            shared: Arc::default(),
        })
    }

    /// Enforces the limits of functions with control groups.
    #[must_use]
    pub fn with_limits(mut self, cgroups: Arc<Cgroups>) -> Self {
        self.cgroups = Some(cgroups);
        self
    }

    /// Extends the announce timeout as long as `activity` notes progress.
    #[must_use]
    pub fn with_activity(mut self, activity: Activity) -> Self {
        self.activity = activity;
        self
    }

    /// Sets a new CPU limit for a running function, in thousandths of a vCPU. Returns false if the function is gone or
    /// was started without limits.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn limit_cpu(&self, id: &FunctionId, millis: u64) -> Result<bool, CgroupError> {
        let children = self.shared.children();
        let child = children.values().find(|child| child.observed.id == *id);
        match child.and_then(|child| child.cgroup.as_ref()) {
            Some(cgroup) => cgroup.limit_cpu(millis).map(|()| true),
            None => Ok(false),
        }
    }

    fn command(&self, spec: &FunctionSpec) -> Command {
        let mut command = Command::new(match spec.role {
            Role::Main => &self.programs.main,
            Role::Remote => &self.programs.remote,
        });
        command.args(&spec.arguments).stdin(Stdio::null());
        match (spec.role, spec.http) {
            (Role::Main, Some(address)) => {
                command.arg("--http-listen").arg(address.to_string());
            }
            (Role::Main, None) => {
                command.arg("--no-http");
            }
            (Role::Remote, _) => {}
        }
        command
            .arg("--launcher-pid")
            .arg(std::process::id().to_string())
            .envs(spec.environment.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        command
    }
}

impl Drop for ProcessLauncher {
    fn drop(&mut self) {
        for child in self.shared.children().values() {
            // A grace period of zero kills the child at once. The channel is closed if the child has ended.
            let _sent = child.stop.try_send(Duration::ZERO);
        }
    }
}

impl Launcher for ProcessLauncher {
    async fn start(&self, spec: &FunctionSpec) -> Result<FunctionId, LaunchError> {
        let command = self.command(spec);
        let cannot_limit =
            |error: CgroupError| LaunchError { message: format!("cannot limit {}: {error}", spec.name) };
        let cgroup = match (&self.cgroups, spec.limits) {
            (Some(cgroups), Some(limits)) => Some(Arc::new(cgroups.group(limits).map_err(cannot_limit)?)),
            _ => None,
        };
        let program = command.as_std().get_program().to_string_lossy().into_owned();
        let cannot_start = |error: &dyn std::fmt::Display| LaunchError {
            message: format!("cannot start {program}: {error}"),
        };
        let (reply, spawned) = oneshot::channel();
        self.spawner
            .send(SpawnJob { command, reply })
            .map_err(|_closed| cannot_start(&"the spawning thread ended"))?;
        let process = spawned
            .await
            .map_err(|_closed| cannot_start(&"the spawning thread ended"))?
            .map_err(|error| cannot_start(&error))?;
        let pid = process.id().ok_or_else(|| cannot_start(&"it exited immediately"))?;
        if let Some(cgroup) = &cgroup {
            cgroup.add(pid).map_err(cannot_limit)?;
        }

        let mut children = self.shared.children();
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let id = FunctionId(format!("{}/{pid}/{number}", spec.name));
        let (stop, stop_requests) = tokio::sync::mpsc::channel(4);
        children.insert(
            number,
            ChildRecord {
                observed: ObservedFunction {
                    id: id.clone(),
                    name: spec.name.clone(),
                    role: spec.role,
                    pid: Some(pid),
                    phase: FunctionPhase::Starting,
                },
                stop,
                cgroup: cgroup.clone(),
            },
        );
        drop(children);
        tokio::spawn(child::watch(child::ChildWatch {
            number,
            name: spec.name.clone(),
            pid,
            process,
            cgroup,
            stop_requests,
            announce_timeout: self.announce_timeout,
            activity: self.activity.clone(),
            sink: self.sink.clone(),
            shared: self.shared.clone(),
        }));
        self.shared.changed.notify_one();
        Ok(id)
    }

    async fn stop(&self, id: &FunctionId, grace: Duration) {
        let mut children = self.shared.children();
        let found = children.iter().find(|(_, child)| child.observed.id == *id);
        let Some(number) = found.map(|(number, _)| *number) else { return };
        if let Some(child) = children.get_mut(&number) {
            if matches!(child.observed.phase, FunctionPhase::Ended(_)) {
                children.remove(&number);
            } else {
                child.observed.phase = FunctionPhase::Stopping;
                // Full: requests are pending already. Closed: the child has ended.
                let _sent = child.stop.try_send(grace);
            }
        }
        drop(children);
        self.shared.changed.notify_one();
    }

    async fn list(&self) -> Vec<ObservedFunction> {
        let children = self.shared.children();
        children.values().map(|child| child.observed.clone()).collect()
    }

    async fn changed(&self) {
        self.shared.changed.notified().await;
    }
}
