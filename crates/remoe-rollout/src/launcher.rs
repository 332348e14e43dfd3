//! Interface of launchers. Processes and pods alike are started from a specification, stopped with a grace period, and
//! listed.

use crate::cgroup::ResourceLimits;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::ffi::OsString;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

/// One started function. A restart is another one, with another id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FunctionId(pub String);

impl fmt::Display for FunctionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Specification of a function to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionSpec {
    /// The place in the deployment that the function fills: `main`, `group-0-0`. At most one function
    /// fills it at a time.
    pub name: String,
    /// Program, or image, to run.
    pub role: Role,
    /// Command line, without what depends on the launcher: addresses and the launcher itself.
    pub arguments: Vec<OsString>,
    /// Environment variables beside the launcher's own, for what must not stand on a command line.
    pub environment: Vec<(String, String)>,
    /// Address at which users reach it over HTTP. Absent if they do not.
    pub http: Option<SocketAddr>,
    /// Remote experts that it hosts. Empty for a main function.
    pub hosted: Vec<LayerExperts>,
    /// Resource limits, if its launcher can enforce them. Absent for no limits.
    pub limits: Option<ResourceLimits>,
}

/// How a function ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ending {
    /// Exit code, if it exited by itself.
    pub code: Option<i32>,
    /// Signal that ended it, if one did.
    pub signal: Option<i32>,
    /// Reason why the launcher itself ended it, or could not start it.
    pub cause: Option<String>,
    /// Last lines of its log, oldest first.
    pub log: Vec<String>,
}

/// Signals that come from other processes and not from a fault of the function: INT, KILL, TERM.
const OUTSIDE: [i32; 3] = [2, 9, 15];

impl Ending {
    /// The last structured line of the log, as a JSON object.
    pub fn last_record(&self) -> Option<serde_json::Map<String, serde_json::Value>> {
        self.log.iter().rev().find_map(|line| match serde_json::from_str(line) {
            Ok(serde_json::Value::Object(record)) if record.contains_key("message") => Some(record),
            _ => None,
        })
    }

    /// Returns the message of the last structured log line, otherwise the last log lines.
    pub fn last_words(&self) -> Option<String> {
        let message =
            self.last_record().and_then(|record| record.get("message")?.as_str().map(str::to_owned));
        message.or_else(|| (!self.log.is_empty()).then(|| self.log.join("\n")))
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.cause, self.code, self.signal) {
            (Some(cause), _, _) => f.write_str(cause)?,
            (None, Some(code), _) => write!(f, "exited with code {code}")?,
            (None, None, Some(signal)) => write!(f, "was killed by signal {signal}")?,
            (None, None, None) => f.write_str("ended")?,
        }
        // What is killed from outside says nothing about it.
        let unaware = self.cause.is_none() && self.signal.is_some_and(|signal| OUTSIDE.contains(&signal));
        match self.last_words().filter(|_| !unaware) {
            Some(words) => write!(f, ": {words}"),
            None => Ok(()),
        }
    }
}

/// Where a function is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FunctionPhase {
    /// Started, not reachable yet.
    Starting,
    /// It said where it listens.
    Listening {
        /// Where it speaks gRPC.
        grpc: SocketAddr,
        /// Where it speaks HTTP to users.
        http: Option<SocketAddr>,
        /// Where it serves `/metrics`.
        metrics: Option<SocketAddr>,
    },
    /// Asked to stop.
    Stopping,
    /// Gone; listed until [`Launcher::stop`] acknowledges it.
    Ended(Ending),
}

/// One function as its launcher sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedFunction {
    /// Id of this start of the function.
    pub id: FunctionId,
    /// Place that it fills.
    pub name: String,
    /// Role of the function.
    pub role: Role,
    /// Process id, if the launcher's functions are processes of this machine.
    pub pid: Option<u32>,
    /// Phase of its life.
    pub phase: FunctionPhase,
}

/// Why a function could not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct LaunchError {
    /// Operation that failed and its cause.
    pub message: String,
}

/// Starts, stops and lists functions. It decides nothing: no restart, no health.
pub trait Launcher: Send + Sync + 'static {
    /// Starts a function and returns before it listens.
    fn start(&self, spec: &FunctionSpec) -> impl Future<Output = Result<FunctionId, LaunchError>> + Send;

    /// Asks a function to drain and ends it after `grace`; zero ends it at once. Returns without
    /// waiting for the end. A function that has ended is forgotten.
    fn stop(&self, id: &FunctionId, grace: Duration) -> impl Future<Output = ()> + Send;

    /// Every function that was started and not forgotten, oldest first.
    fn list(&self) -> impl Future<Output = Vec<ObservedFunction>> + Send;

    /// Returns when the list may have changed since this was last called.
    fn changed(&self) -> impl Future<Output = ()> + Send;
}
