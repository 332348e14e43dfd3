//! View of a pod's status: if it lives, if it works, and what is wrong with it. Pure.

use super::identity::knows_gateways;
use super::names::{self, COMPONENT, Component, FUNCTION, IDENTITY, PodName, REPLICA};
use super::ownership::is_owned_by;
use super::ports::EXPERT_PORT;
use super::routing::{Generation, MOST_GENERATIONS};
use super::status_issue::{FOREIGN_ROUTING, NOT_READY, StatusIssue};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodCondition, PodStatus};
use kube::ResourceExt;
use std::net::{IpAddr, SocketAddr};

/// A function that was ready and is not for this long is replaced. Its node is faster where it can tell: it
/// restarts a container that hangs after 40 seconds, and pods of a node that is lost are evicted.
const UNREADY: SignedDuration = SignedDuration::from_secs(90);

/// Between the first look of a node at a pod and its first condition: both are whole seconds.
const FIRST_LOOK: SignedDuration = SignedDuration::from_secs(1);

/// A container of a function: its pod's uid, and how often it was started again. What one said is not the next one's word.
pub(crate) type ContainerRun = (String, i32);

/// A pod of a function.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PodView {
    /// Name of the pod, parsed.
    pub name: PodName,
    /// UID of the pod.
    pub uid: String,
    /// Set if it belongs to the deployment, and not to an earlier one of the same name.
    pub owned: bool,
    /// Set if it is a main function.
    pub is_main: bool,
    /// Set if it takes requests from gateways alone, which know it by its certificate.
    pub knows_gateways: bool,
    /// Which function.
    pub function: String,
    /// Which shape of the function.
    pub identity: String,
    /// Which of the function's replicas.
    pub replica: u32,
    /// When it was made.
    pub created: Timestamp,
    /// Set when it was asked to end: when it must have ended.
    pub ends_by: Option<Timestamp>,
    /// Where it is reached.
    pub ip: Option<IpAddr>,
    /// Set if it is ready by its own account.
    pub ready: bool,
    /// Set if its container runs, or will for the first time, and has not been ready yet, as far as its node knows.
    pub starting: bool,
    /// How often its container was started again.
    pub restarts: i32,
    /// When it becomes faulty if nothing changes.
    pub faulty_at: Option<Timestamp>,
    /// Fault that calls for another pod in its place.
    pub fault: Option<StatusIssue>,
    /// Trouble that keeps it from working, and that may pass or that a user must mend.
    pub issue: Option<StatusIssue>,
    /// The generation that a main function has in force; none: it did not answer.
    pub in_force: Option<u64>,
    /// Digest of its placement; empty if no generation is in force.
    pub placement: String,
}

impl PodView {
    /// Where main functions reach it, as host:port; none where it is a main function, or has no address yet.
    pub(crate) fn expert_address(&self) -> Option<String> {
        self.ip.filter(|_| !self.is_main).map(expert_address)
    }

    /// Returns the view of `pod` at `now`; absent if it is not the pod of a function.
    pub(crate) fn of(pod: &Pod, owner_uid: &str, now: Timestamp) -> Option<Self> {
        let meta = &pod.metadata;
        let component = names::label(meta, COMPONENT);
        let is_main = component == Component::Main.name();
        if !is_main && component != Component::RemoteExpert.name() {
            return None;
        }
        let status = pod.status.clone().unwrap_or_default();
        let ready = condition(&status, "Ready").is_some_and(|ready| ready.status == "True");
        let unready = unready_since(&status).and_then(|since| since.checked_add(UNREADY).ok());
        let lost = unready
            .filter(|at| *at <= now)
            .map(|_| StatusIssue::new(NOT_READY, format!("not ready for {} s", UNREADY.as_secs())));
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

    /// Reports if it is there to stay, and has no fault that calls for another pod.
    pub(crate) fn is_sound(&self) -> bool {
        self.owned && self.ends_by.is_none() && self.fault.is_none() && self.name.is_counted()
    }

    /// Returns the present run of its container.
    pub(crate) fn run(&self) -> ContainerRun {
        (self.uid.clone(), self.restarts)
    }

    /// Reports if exactly `generation` is in force: not another one that has the same number.
    pub(crate) fn acts_on(&self, generation: &Generation) -> bool {
        self.in_force == Some(generation.number)
            && generation.placement().is_ok_and(|it| it == self.placement)
    }

    /// Takes note of the generation that a main function says it has in force; absent if it said nothing. One far from
    /// the `newest` that was told is another writer's, and before long no later one could follow it.
    pub(crate) fn note_in_force(&mut self, generation: Option<u64>, newest: u64) {
        self.in_force = generation.filter(|number| *number <= newest.max(MOST_GENERATIONS / 2));
        if let (Some(number), None) = (generation, self.in_force) {
            let message = format!("reports unknown routing generation {number}; replacing the pod");
            self.fault.get_or_insert(StatusIssue::new(FOREIGN_ROUTING, message));
        }
    }
}

/// Where main functions reach the remote function at `ip`, as host:port.
pub(super) fn expert_address(ip: IpAddr) -> String {
    SocketAddr::new(ip, EXPERT_PORT).to_string()
}

/// A pod that the cluster is about to end: evicted, preempted, or on a node that is lost.
fn disrupted(status: &PodStatus) -> Option<StatusIssue> {
    if status.reason.as_deref() == Some("NodeLost") {
        return Some(StatusIssue::new("NodeLost", "node lost"));
    }
    let disrupted = condition(status, "DisruptionTarget").filter(|target| target.status == "True")?;
    let message =
        disrupted.message.clone().unwrap_or_else(|| "evicted or preempted by the cluster".to_owned());
    Some(StatusIssue::new("Disrupted", message))
}

/// Where a pod is reached.
pub(super) fn address(status: &PodStatus) -> Option<IpAddr> {
    status.pod_ip.as_deref()?.parse().ok()
}

pub(super) fn condition<'a>(status: &'a PodStatus, of: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == of)
}

/// Since when a pod that was ready has not been. The condition's time only moves when its status
/// changes: one that moved after the node's first look at the pod was true in between. A container that
/// ended is started again by its node, which bounds the time that it loads.
fn unready_since(status: &PodStatus) -> Option<Timestamp> {
    if container(status)?.started != Some(true) {
        return None;
    }
    let ready = condition(status, "Ready").filter(|ready| ready.status != "True")?;
    let since = ready.last_transition_time.as_ref()?.0;
    let first_look = status.start_time.as_ref()?.0;
    (since.duration_since(first_look) > FIRST_LOOK).then_some(since)
}

/// Pods that are restarted for ever do not end by themselves: they were evicted, or the node was lost.
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

/// Reports if the container ended, and has not been started again.
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
    let words = ended.and_then(|ended| ended.message.as_deref()).map_or("", last_words);
    let killed = ended.and_then(|ended| ended.reason.as_deref()) == Some("OOMKilled");
    Some(if killed {
        StatusIssue::new("OutOfMemory", "killed: exceeded its memory limit")
    } else {
        StatusIssue::new("CrashLooping", format!("exited with code {code}: {words}"))
    })
}

/// The last line of a log.
fn last_words(log: &str) -> &str {
    log.trim_end().lines().next_back().unwrap_or_default()
}

/// Returns the trouble that keeps a pod from starting, and that another pod in its place would meet as well.
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

/// How a pod that runs once stands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PodOutcome {
    /// It has not ended.
    Running {
        /// Trouble that keeps it from working.
        issue: Option<StatusIssue>,
    },
    /// It did what it was to do.
    Succeeded,
    /// It did not.
    Failed {
        /// Last words of the pod.
        issue: StatusIssue,
        /// When it ended, where that is known.
        at: Option<Timestamp>,
    },
}

/// How `pod`, which is to run once, stands.
pub(crate) fn outcome(pod: &Pod) -> PodOutcome {
    let status = pod.status.clone().unwrap_or_default();
    match status.phase.as_deref() {
        Some("Succeeded") => PodOutcome::Succeeded,
        Some("Failed") => {
            let ended =
                container(&status).and_then(|container| container.state.as_ref()?.terminated.as_ref());
            let said = ended.and_then(|ended| ended.message.clone());
            let message = said
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
