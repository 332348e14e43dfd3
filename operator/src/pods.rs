//! Views of pods of functions: liveness, readiness and faults. Pure.

use super::identity::knows_gateways;
use super::names::{self, COMPONENT, Component, FUNCTION, IDENTITY, PodName, REPLICA};
use super::ownership::is_owned_by;
use super::ports::EXPERT_PORT;
use super::routing::{Generation, MAX_GENERATION};
use super::status_issue::{FOREIGN_ROUTING, NOT_READY, StatusIssue};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodCondition, PodStatus};
use kube::ResourceExt;
use std::net::{IpAddr, SocketAddr};

/// Time after which a function that was ready and no longer is gets replaced. The kubelet is faster if it can tell:
/// it restarts a hung container after 40 seconds, and pods of a lost node are evicted.
const UNREADY_LIMIT: SignedDuration = SignedDuration::from_secs(90);

/// Maximum time between a pod's start time and its first condition; both are rounded to seconds.
const FIRST_CONDITION_DELAY: SignedDuration = SignedDuration::from_secs(1);

/// One run of a function's container: UID of the pod, and restart count. Answers of one run say nothing about the
/// next.
pub(crate) type ContainerRun = (String, i32);

/// View of a function's pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PodView {
    /// Name of the pod, parsed.
    pub name: PodName,
    /// UID of the pod.
    pub uid: String,
    /// Set if the deployment owns it; unset if a deleted deployment of the same name does.
    pub owned: bool,
    /// Set if it is a main function.
    pub is_main: bool,
    /// Set if it accepts requests only from gateways, identified by certificate.
    pub knows_gateways: bool,
    /// Name of the function.
    pub function: String,
    /// Hash of the function's specification.
    pub identity: String,
    /// Index of the replica.
    pub replica: u32,
    /// Creation time.
    pub created: Timestamp,
    /// Deadline of its termination; absent if it is not terminating.
    pub ends_by: Option<Timestamp>,
    /// IP address, if it has one.
    pub ip: Option<IpAddr>,
    /// Set if its condition Ready is true.
    pub ready: bool,
    /// Set if its container starts or runs and has not been ready yet, as far as the kubelet reports.
    pub starting: bool,
    /// Restart count of its container.
    pub restarts: i32,
    /// Time at which it becomes faulty if nothing changes.
    pub faulty_at: Option<Timestamp>,
    /// Fault that requires a replacement.
    pub fault: Option<StatusIssue>,
    /// Issue that keeps it from working, and that may pass or that a user must fix.
    pub issue: Option<StatusIssue>,
    /// Routing generation that the main function has in force; absent if it did not answer.
    pub in_force: Option<u64>,
    /// Digest of its placement; empty if no generation is in force.
    pub placement: String,
}

impl PodView {
    /// Returns the host:port at which main functions reach it; absent for a main function or without an address.
    pub(crate) fn expert_address(&self) -> Option<String> {
        self.ip.filter(|_| !self.is_main).map(expert_address)
    }

    /// Returns the view of `pod` at `now`; absent if it is not the pod of a function.
    pub(crate) fn from_pod(pod: &Pod, owner_uid: &str, now: Timestamp) -> Option<Self> {
        let meta = &pod.metadata;
        let component = names::label(meta, COMPONENT);
        let is_main = component == Component::Main.name();
        if !is_main && component != Component::RemoteExpert.name() {
            return None;
        }
        let status = pod.status.clone().unwrap_or_default();
        let ready = condition(&status, "Ready").is_some_and(|ready| ready.status == "True");
        let unready = unready_since(&status).and_then(|since| since.checked_add(UNREADY_LIMIT).ok());
        let lost = unready
            .filter(|at| *at <= now)
            .map(|_| StatusIssue::new(NOT_READY, format!("not ready for {} s", UNREADY_LIMIT.as_secs())));
        Some(Self {
            name: PodName::parse(&pod.name_any())?,
            uid: pod.uid()?,
            owned: is_owned_by(pod, owner_uid),
            is_main,
            knows_gateways: knows_gateways(pod),
            function: names::label(meta, FUNCTION).to_owned(),
            identity: names::label(meta, IDENTITY).to_owned(),
            replica: names::label(meta, REPLICA).parse().ok()?,
            created: meta.creation_timestamp.as_ref()?.0,
            ends_by: meta.deletion_timestamp.as_ref().map(|time| time.0),
            ip: address(&status),
            ready,
            starting: !ready && unready.is_none() && !is_between_runs(&status),
            restarts: container(&status).map_or(0, |container| container.restart_count),
            faulty_at: unready.filter(|at| *at > now),
            fault: ended(&status).or_else(|| crash_looping(&status)).or_else(|| disrupted(&status)).or(lost),
            issue: issue(&status),
            in_force: None,
            placement: String::new(),
        })
    }

    /// Returns whether it is owned, not terminating and without a fault.
    pub(crate) fn is_sound(&self) -> bool {
        self.owned && self.ends_by.is_none() && self.fault.is_none() && self.name.is_counted()
    }

    /// Returns the current run of its container.
    pub(crate) fn run(&self) -> ContainerRun {
        (self.uid.clone(), self.restarts)
    }

    /// Returns whether exactly `generation` is in force, not another one of the same number.
    pub(crate) fn acts_on(&self, generation: &Generation) -> bool {
        self.in_force == Some(generation.number)
            && generation.placement().is_ok_and(|it| it == self.placement)
    }

    /// Records the generation that the main function reported; absent if it did not answer. A number far above the
    /// `newest` sent one comes from another writer: soon no higher number would be left.
    pub(crate) fn note_in_force(&mut self, generation: Option<u64>, newest: u64) {
        self.in_force = generation.filter(|number| *number <= newest.max(MAX_GENERATION / 2));
        if let (Some(number), None) = (generation, self.in_force) {
            let message = format!("reports unknown routing generation {number}; replacing the pod");
            self.fault.get_or_insert(StatusIssue::new(FOREIGN_ROUTING, message));
        }
    }
}

/// Returns the host:port of the remote function at `ip`.
pub(super) fn expert_address(ip: IpAddr) -> String {
    SocketAddr::new(ip, EXPERT_PORT).to_string()
}

/// Returns the fault of a pod that the cluster is about to terminate: evicted, preempted, or on a lost node.
fn disrupted(status: &PodStatus) -> Option<StatusIssue> {
    if status.reason.as_deref() == Some("NodeLost") {
        return Some(StatusIssue::new("NodeLost", "node lost"));
    }
    let disrupted = condition(status, "DisruptionTarget").filter(|target| target.status == "True")?;
    let message =
        disrupted.message.clone().unwrap_or_else(|| "evicted or preempted by the cluster".to_owned());
    Some(StatusIssue::new("Disrupted", message))
}

/// Returns the IP address of a pod.
pub(super) fn address(status: &PodStatus) -> Option<IpAddr> {
    status.pod_ip.as_deref()?.parse().ok()
}

pub(super) fn condition<'a>(status: &'a PodStatus, of: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == of)
}

/// Returns since when a pod that was ready is no longer. The transition time changes only with the status: if it is
/// later than the kubelet's first update, the pod was ready in between. Containers that terminated are excluded: the
/// kubelet restarts them and bounds their loading time.
fn unready_since(status: &PodStatus) -> Option<Timestamp> {
    if container(status)?.started != Some(true) {
        return None;
    }
    let ready = condition(status, "Ready").filter(|ready| ready.status != "True")?;
    let since = ready.last_transition_time.as_ref()?.0;
    let first_look = status.start_time.as_ref()?.0;
    (since.duration_since(first_look) > FIRST_CONDITION_DELAY).then_some(since)
}

/// Returns the fault of a completed pod. Pods with restart policy Always complete only if evicted or if their node
/// was lost.
fn ended(status: &PodStatus) -> Option<StatusIssue> {
    match status.phase.as_deref() {
        Some("Failed" | "Succeeded") => {
            let reason = if status.reason.as_deref() == Some("Evicted") { "Evicted" } else { "PodFailed" };
            Some(StatusIssue::new(
                reason,
                status.message.clone().unwrap_or_else(|| "pod ended without a message".to_owned()),
            ))
        }
        _ => None,
    }
}

pub(super) fn container(status: &PodStatus) -> Option<&ContainerStatus> {
    status.container_statuses.iter().flatten().next()
}

/// Returns whether the container terminated and was not restarted yet.
fn is_between_runs(status: &PodStatus) -> bool {
    container(status).is_some_and(|container| {
        let ended =
            |state: &Option<ContainerState>| state.as_ref().is_some_and(|state| state.terminated.is_some());
        ended(&container.state) || (waiting(status).is_some() && ended(&container.last_state))
    })
}

fn waiting(status: &PodStatus) -> Option<(&str, &str)> {
    let waiting = container(status)?.state.as_ref()?.waiting.as_ref()?;
    Some((waiting.reason.as_deref()?, waiting.message.as_deref().unwrap_or_default()))
}

fn crash_looping(status: &PodStatus) -> Option<StatusIssue> {
    waiting(status).filter(|(reason, _)| *reason == "CrashLoopBackOff")?;
    let ended = container(status)?.last_state.as_ref()?.terminated.as_ref();
    let code = ended.map_or(0, |ended| ended.exit_code);
    let last_log_line = ended.and_then(|ended| ended.message.as_deref()).map_or("", last_line);
    let killed = ended.and_then(|ended| ended.reason.as_deref()) == Some("OOMKilled");
    Some(if killed {
        StatusIssue::new("OutOfMemory", "killed: exceeded its memory limit")
    } else {
        StatusIssue::new("CrashLooping", format!("exited with code {code}: {last_log_line}"))
    })
}

/// Returns the last line of a log.
fn last_line(log: &str) -> &str {
    log.trim_end().lines().next_back().unwrap_or_default()
}

/// Returns the issue that keeps a pod from starting and that a replacement would meet as well.
fn issue(status: &PodStatus) -> Option<StatusIssue> {
    let unscheduled = condition(status, "PodScheduled").filter(|scheduled| scheduled.status == "False");
    if let Some(message) = unscheduled.and_then(|scheduled| scheduled.message.as_deref()) {
        let missing = message.contains("persistentvolumeclaim") && message.contains("not found");
        return Some(StatusIssue::new(if missing { "ClaimMissing" } else { "Unschedulable" }, message));
    }
    let (reason, message) = waiting(status)?;
    let reason = match reason {
        "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull" | "InvalidImageName" => "ImageUnavailable",
        "CreateContainerConfigError" if message.contains("secret") => "CredentialsMissing",
        "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => "ContainerFailed",
        _ => return None,
    };
    Some(StatusIssue::new(reason, message))
}

/// State of a pod that runs to completion.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PodOutcome {
    /// It has not completed.
    Running {
        /// Issue that keeps it from working.
        issue: Option<StatusIssue>,
    },
    /// It succeeded.
    Succeeded,
    /// It failed.
    Failed {
        /// Termination message.
        issue: StatusIssue,
        /// Time of completion, if known.
        at: Option<Timestamp>,
    },
}

/// Returns the state of `pod`, which runs to completion.
pub(crate) fn outcome(pod: &Pod) -> PodOutcome {
    let status = pod.status.clone().unwrap_or_default();
    match status.phase.as_deref() {
        Some("Succeeded") => PodOutcome::Succeeded,
        Some("Failed") => {
            let ended =
                container(&status).and_then(|container| container.state.as_ref()?.terminated.as_ref());
            let message = ended.and_then(|ended| ended.message.clone());
            let message = message
                .or_else(|| status.message.clone())
                .unwrap_or_else(|| "pod failed without a message".to_owned());
            let reason = match status.reason.as_deref() {
                Some("DeadlineExceeded") => "DeadlineExceeded",
                _ => "PodFailed",
            };
            PodOutcome::Failed {
                issue: StatusIssue::new(reason, message),
                at: ended.and_then(|ended| ended.finished_at.as_ref()).map(|time| time.0),
            }
        }
        _ => PodOutcome::Running { issue: issue(&status).or_else(|| crash_looping(&status)) },
    }
}
