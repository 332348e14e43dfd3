//! Interface of launchers, which start functions from a specification, stop them with a grace period, and list them.

use crate::cgroup::ResourceLimits;
use remoe_process::Role;
use remoe_proto::v1::LayerExperts;
use std::ffi::OsString;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

/// Id of one started function. A restart gets another id.
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
    /// Slot of the function in the deployment: `main`, `group-0-0`. At most one function fills it at a time.
    pub name: String,
    /// Role, which selects the program.
    pub role: Role,
    /// Arguments, without those of the launcher: addresses and the launcher itself.
    pub arguments: Vec<OsString>,
    /// Additional environment variables, for values that must not appear on a command line.
    pub environment: Vec<(String, String)>,
    /// HTTP address for clients. Absent if it serves none.
    pub http: Option<SocketAddr>,
    /// Remote experts that it hosts. Empty for a main function.
    pub hosted: Vec<LayerExperts>,
    /// Resource limits, if its launcher can enforce them. Absent for no limits.
    pub limits: Option<ResourceLimits>,
}

/// Exit of a function.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ending {
    /// Exit code, if it exited by itself.
    pub code: Option<i32>,
    /// Signal that killed it, if one did.
    pub signal: Option<i32>,
    /// Reason why the launcher killed it, or could not start it.
    pub cause: Option<String>,
    /// Last lines of its log, oldest first.
    pub log: Vec<String>,
}

/// Signals sent by other processes, not caused by a fault of the function: INT, KILL, TERM.
const EXTERNAL_SIGNALS: [i32; 3] = [2, 9, 15];

impl Ending {
    /// Returns the last structured line of the log, as a JSON object.
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
        // After a kill from outside, the log does not explain it.
        let killed_externally =
            self.cause.is_none() && self.signal.is_some_and(|signal| EXTERNAL_SIGNALS.contains(&signal));
        match self.last_words().filter(|_| !killed_externally) {
            Some(words) => write!(f, ": {words}"),
            None => Ok(()),
        }
    }
}

/// Lifecycle phase of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FunctionPhase {
    /// Started, not reachable yet.
    Starting,
    /// Listening on its announced addresses.
    Listening {
        /// gRPC address.
        grpc: SocketAddr,
        /// HTTP address for clients.
        http: Option<SocketAddr>,
        /// Address of `/metrics`.
        metrics: Option<SocketAddr>,
    },
    /// Asked to stop.
    Stopping,
    /// Gone; listed until [`Launcher::stop`] acknowledges it.
    Ended(Ending),
}

/// Function in a launcher's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedFunction {
    /// Id of this start.
    pub id: FunctionId,
    /// Slot of the function.
    pub name: String,
    /// Role of the function.
    pub role: Role,
    /// Process id, if it is a local process.
    pub pid: Option<u32>,
    /// Lifecycle phase.
    pub phase: FunctionPhase,
}

/// Failure to start a function.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct LaunchError {
    /// Operation that failed and its cause.
    pub message: String,
}

/// Starts, stops and lists functions. It makes no decisions about restarts or health.
pub trait Launcher: Send + Sync + 'static {
    /// Starts a function and returns before it listens.
    fn start(&self, spec: &FunctionSpec) -> impl Future<Output = Result<FunctionId, LaunchError>> + Send;

    /// Asks a function to drain, and kills it after `grace`; zero kills it at once. Returns without waiting for its
    /// end. An ended function is forgotten.
    fn stop(&self, id: &FunctionId, grace: Duration) -> impl Future<Output = ()> + Send;

    /// Lists the functions that were started and not forgotten, oldest first.
    fn list(&self) -> impl Future<Output = Vec<ObservedFunction>> + Send;

    /// Waits until the list may have changed since the last call.
    fn changed(&self) -> impl Future<Output = ()> + Send;
}
