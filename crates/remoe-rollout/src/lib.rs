//! Rollout of deployments: placement of experts, launchers that start and stop functions, and the loop that compares
//! the desired state with the observed one.
//!
//! [`placement`] and [`mod@step`] are pure. The step decides for processes, whose input is built in [`decide`], and
//! for the operator's pods. [`supervise`] observes, calls `decide` and acts through a [`Launcher`]; [`process`] is
//! the launcher of local processes.

pub mod action;
mod activity;
pub mod backoff;
mod cgroup;
pub mod control;
pub mod decide;
mod event;
pub mod functions;
pub mod groups;
pub mod launcher;
mod lines;
pub mod memory;
pub mod need;
pub mod placement;
mod probe;
pub mod process;
pub mod status;
pub mod step;
pub mod step_types;
pub mod supervise;
pub mod time;

pub use activity::Activity;
pub use cgroup::{Cgroup, CgroupError, Cgroups, ResourceLimits};
pub use event::{EventSink, RolloutEvent};
pub use functions::ModelOptions;
pub use launcher::{
    Ending, FunctionId, FunctionPhase, FunctionSpec, LaunchError, Launcher, ObservedFunction,
};
pub use placement::{MoeLayer, Placement, PlacementError};
pub use process::{LogLine, ProcessLauncher};
pub use status::{FunctionState, FunctionStatus, StartFailure, Status};
pub use supervise::{NotReady, Supervisor};
