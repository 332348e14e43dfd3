//! Detects pods of functions whose spec differs from the one that the operator wrote. Pure.
//!
//! An account with rights on pods can change the image of a running pod, or replace a pod under its name. Labels and
//! annotations can be forged too, so the spec itself is compared. Admission adds to specs (sidecars, variables,
//! volumes, tolerations), so additions are no alteration.
//!
//! Admission may also rewrite fields, and would do so again to the replacement. After [`MAX_REPLACEMENTS`]
//! replacements of one replica, an altered pod stays but gets no work, until the settings exempt the field.

use super::drift::includes_all;
use super::manifests::Revision;
use super::pod_comparison::{PodComparison, PodField};
use super::pods::PodView;
use super::status_issue::StatusIssue;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Volume, VolumeMount};
use kube::ResourceExt;
use remoe_api::MoEDeployment;
use serde::Serialize;
use serde_json::Value;

/// Reason of an altered pod.
const ALTERED: &str = "PodAltered";
/// Reason of a pod that is still altered after [`MAX_REPLACEMENTS`] replacements.
const REWRITTEN: &str = "PodRewritten";
/// Replacements of one replica before an altered pod stays.
const MAX_REPLACEMENTS: u32 = 4;
/// Flag outside a function's identity: its value may differ from that of the current plan.
const DRAIN_FLAG: &str = "--drain-seconds";

/// Marks altered pods in `views` as faulty, comparing `pods` with `revision` by `comparison`. After
/// [`MAX_REPLACEMENTS`] replacements a pod gets an issue instead.
pub(crate) fn mark_altered(
    views: &mut [PodView],
    pods: &[Pod],
    owner: &MoEDeployment,
    revision: &Revision,
    comparison: &PodComparison,
) {
    let name = owner.name_any();
    for view in views.iter_mut().filter(|view| view.is_sound()) {
        let function = revision.functions().find(|function| {
            function.identity == view.identity && view.name.place == function.place(&name, view.replica)
        });
        let live = pods.iter().find(|pod| pod.uid().as_ref() == Some(&view.uid));
        let (Some(function), Some(live)) = (function, live.and_then(|pod| pod.spec.as_ref())) else {
            continue;
        };
        let wanted = function.pod(owner, view.replica, view.name.incarnation).spec.unwrap_or_default();
        let Some(alteration) = find_alteration(live, &wanted, &comparison.is_compared(view.restarts)) else {
            continue;
        };
        // Admission does not change images of running pods.
        let is_later = alteration.field == Some(PodField::Image) && view.restarts > 0;
        if is_later || view.name.incarnation < MAX_REPLACEMENTS {
            view.fault =
                Some(StatusIssue::new(ALTERED, format!("{}; replacing the pod", alteration.message)));
            continue;
        }
        // A name with a high incarnation can be forged: neither gateways nor main functions learn its address.
        (view.ready, view.ip) = (false, None);
        view.issue = Some(StatusIssue::new(REWRITTEN, alteration.advice()));
    }
}

/// Difference between a live pod and the desired one.
struct Alteration {
    /// Altered field; absent if admission may never rewrite it.
    field: Option<PodField>,
    /// Description of the difference, as a clause.
    message: String,
}

impl Alteration {
    /// Creates an alteration of a field that settings may exempt.
    fn in_field(field: PodField, message: impl Into<String>) -> Self {
        Self { field: Some(field), message: message.into() }
    }

    /// Returns the advice for users after replacements did not help.
    fn advice(&self) -> String {
        let rewritten = self.field.map_or_else(String::new, |field| {
            format!(
                "; if admission of the cluster rewrites this field, have {field} added to \
                 functions.rewrittenFields of the operator's chart"
            )
        });
        format!(
            "{} in {MAX_REPLACEMENTS} pods that were replaced too; the pod gets no requests{rewritten}; else find \
             out who writes pods in the namespace, and delete the pod",
            self.message
        )
    }
}

/// Returns the first difference of `live` from `wanted`, among the fields for which `is_compared` is true.
fn find_alteration(
    live: &PodSpec,
    wanted: &PodSpec,
    is_compared: &impl Fn(PodField) -> bool,
) -> Option<Alteration> {
    let host = [live.host_network, live.host_pid, live.host_ipc, live.share_process_namespace];
    let ours = [wanted.host_network, wanted.host_pid, wanted.host_ipc, wanted.share_process_namespace];
    if host.map(Option::unwrap_or_default) != ours.map(Option::unwrap_or_default) {
        return Some(Alteration { field: None, message: "namespaces of the host changed".to_owned() });
    }
    let is_unchanged = |live: &Option<String>, wanted: &Option<String>| wanted.is_none() || live == wanted;
    let fields = [
        (
            PodField::ServiceAccountName,
            is_unchanged(&live.service_account_name, &wanted.service_account_name),
        ),
        (PodField::RuntimeClassName, is_unchanged(&live.runtime_class_name, &wanted.runtime_class_name)),
        (
            PodField::AutomountServiceAccountToken,
            live.automount_service_account_token == wanted.automount_service_account_token,
        ),
        (PodField::SecurityContext, includes(&live.security_context, &wanted.security_context)),
    ];
    if let Some((field, _)) = fields.iter().find(|(field, kept)| !kept && is_compared(*field)) {
        return Some(Alteration::in_field(*field, format!("{field} changed")));
    }
    for volume in wanted.volumes.iter().flatten() {
        let found = live.volumes.iter().flatten().find(|live| live.name == volume.name);
        if !found.is_some_and(|live| is_volume(live, volume)) && is_compared(PodField::Volumes) {
            return Some(Alteration::in_field(PodField::Volumes, format!("volume {} changed", volume.name)));
        }
    }
    wanted.containers.iter().find_map(|wanted| {
        match live.containers.iter().find(|live| live.name == wanted.name) {
            Some(live) => altered_container(live, wanted, is_compared),
            None => {
                Some(Alteration { field: None, message: format!("container {} is missing", wanted.name) })
            }
        }
    })
}

fn altered_container(
    live: &Container,
    wanted: &Container,
    is_compared: &impl Fn(PodField) -> bool,
) -> Option<Alteration> {
    if is_compared(PodField::Image) && live.image != wanted.image {
        let shown = |image: &Option<String>| image.clone().unwrap_or_default();
        let message = format!("image changed to {} from {}", shown(&live.image), shown(&wanted.image));
        return Some(Alteration::in_field(PodField::Image, message));
    }
    let mounts = |container: &Container| container.volume_mounts.clone().unwrap_or_default();
    let variables = |container: &Container| {
        let mut all = container.env.clone().unwrap_or_default();
        // The API server drops empty values.
        all.iter_mut()
            .for_each(|variable| variable.value = variable.value.take().filter(|it| !it.is_empty()));
        all
    };
    let (live_mounts, live_variables) = (mounts(live), variables(live));
    let fields = [
        (PodField::Command, live.command == wanted.command),
        (PodField::Args, arguments(live) == arguments(wanted)),
        (
            PodField::Env,
            variables(wanted).iter().all(|variable| {
                let mut named = live_variables.iter().filter(|live| live.name == variable.name);
                // The last variable of a name wins.
                named.next_back().is_some_and(|live| includes(live, variable))
            }),
        ),
        (
            PodField::EnvFrom,
            wanted
                .env_from
                .iter()
                .flatten()
                .all(|source| live.env_from.iter().flatten().any(|live| includes(live, source))),
        ),
        (
            PodField::VolumeMounts,
            mounts(wanted).iter().all(|mount| {
                live_mounts.iter().any(|live| live.mount_path == mount.mount_path && is_mount(live, mount))
            }),
        ),
        (PodField::SecurityContext, includes(&live.security_context, &wanted.security_context)),
    ];
    let (field, _) = fields.iter().find(|(field, kept)| !kept && is_compared(*field))?;
    Some(Alteration::in_field(*field, format!("{field} of container {} changed", wanted.name)))
}

/// Returns the arguments without those outside of a function's identity.
fn arguments(container: &Container) -> Vec<&str> {
    let mut all = container.args.iter().flatten().map(String::as_str);
    let mut arguments = Vec::new();
    while let Some(argument) = all.next() {
        if argument == DRAIN_FLAG {
            all.next();
        } else {
            arguments.push(argument);
        }
    }
    arguments
}

/// Returns whether `live` includes all of `wanted`.
fn includes<T: Serialize>(live: &T, wanted: &T) -> bool {
    let (live, wanted) = (serde_json::to_value(live), serde_json::to_value(wanted));
    matches!((live, wanted), (Ok(live), Ok(wanted)) if wanted.is_null() || includes_all(&live, &wanted))
}

/// Returns whether `live` is the same volume: same source, ignoring size limits, which are not part of the identity.
fn is_volume(live: &Volume, wanted: &Volume) -> bool {
    let normalised = |volume: &Volume| {
        let mut volume = volume.clone();
        if let Some(folder) = &mut volume.empty_dir {
            folder.size_limit = None;
        }
        // The API server drops `false`.
        if let Some(claim) = &mut volume.persistent_volume_claim {
            claim.read_only = claim.read_only.filter(|read_only| *read_only);
        }
        volume
    };
    let sources = |volume: &Volume| match serde_json::to_value(volume) {
        Ok(Value::Object(fields)) => fields.into_iter().map(|(field, _)| field).collect(),
        _ => Vec::new(),
    };
    let (live, wanted) = (normalised(live), normalised(wanted));
    sources(&live) == sources(&wanted) && includes(&live, &wanted)
}

fn is_mount(live: &VolumeMount, wanted: &VolumeMount) -> bool {
    let is_read_only = |mount: &VolumeMount| mount.read_only.unwrap_or_default();
    live.name == wanted.name && is_read_only(live) == is_read_only(wanted) && live.sub_path == wanted.sub_path
}
