//! Detection of pods of functions that do not run what the operator wrote. Pure.
//!
//! An account with rights on pods may change the image of a running one, or put another pod under its name. Labels and
//! annotations tell nothing about that, because they can be written as well: the spec itself is compared. Admission adds
//! to specs (sidecars, variables, volumes, tolerations), so additions are no alteration.
//!
//! Admission may also rewrite what was written, and does so to the pod that replaces an altered one. After
//! [`MOST_REPLACEMENTS`] at a place, an altered pod stays and gets no work, until the settings name the field.

use super::drift::covers;
use super::manifests::Revision;
use super::pods::PodView;
use super::rewritten::{Comparison, PodField};
use super::status_issue::StatusIssue;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Volume, VolumeMount};
use kube::ResourceExt;
use remoe_api::MoEDeployment;
use serde::Serialize;
use serde_json::Value;

/// The reason of a pod that is not as it was written.
const ALTERED: &str = "PodAltered";
/// The reason of a pod that is not as it was written although it replaced others that were not.
const REWRITTEN: &str = "PodRewritten";
/// Pods at one place that are replaced before an altered one stays.
const MOST_REPLACEMENTS: u32 = 4;
/// Flag that a main function gets after its identity is fixed: its value may differ from the present plan's.
const DRAIN: &str = "--drain-seconds";

/// Marks those of `views` as faulty whose pods are not as `revision` has them, by `comparison`. Those that replaced
/// [`MOST_REPLACEMENTS`] others stay in trouble instead.
pub(crate) fn mark(
    views: &mut [PodView],
    pods: &[Pod],
    owner: &MoEDeployment,
    revision: &Revision,
    comparison: &Comparison,
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
        let Some(what) = alteration(live, &wanted, &comparison.of(view.restarts)) else { continue };
        // No admission changes an image later.
        let is_later = what.field == Some(PodField::Image) && view.restarts > 0;
        if is_later || view.name.incarnation < MOST_REPLACEMENTS {
            view.fault = Some(StatusIssue::new(ALTERED, format!("{}; replacing the pod", what.message)));
            continue;
        }
        // Accounts that may write pods may choose such a name: neither gateways nor main functions learn its address.
        (view.ready, view.ip) = (false, None);
        view.issue = Some(StatusIssue::new(REWRITTEN, what.advice()));
    }
}

/// A difference from what was written.
struct Alteration {
    /// Field, unless no admission may rewrite it.
    field: Option<PodField>,
    /// Field and values, as a clause.
    message: String,
}

impl Alteration {
    /// One of a field that settings may name.
    fn of(field: PodField, message: impl Into<String>) -> Self {
        Self { field: Some(field), message: message.into() }
    }

    /// Returns what to do once replacing did not help.
    fn advice(&self) -> String {
        let rewritten = self.field.map_or_else(String::new, |field| {
            format!(
                "; if admission of the cluster rewrites this field, have {field} added to \
                 functions.rewrittenFields of the operator's chart"
            )
        });
        format!(
            "{} in {MOST_REPLACEMENTS} pods that were replaced too; the pod gets no requests{rewritten}; else find \
             out who writes pods in the namespace, and delete the pod",
            self.message
        )
    }
}

/// Returns what is otherwise in `live` than in `wanted`, of the fields that `is_compared` names.
fn alteration(
    live: &PodSpec,
    wanted: &PodSpec,
    is_compared: &impl Fn(PodField) -> bool,
) -> Option<Alteration> {
    let host = [live.host_network, live.host_pid, live.host_ipc, live.share_process_namespace];
    let ours = [wanted.host_network, wanted.host_pid, wanted.host_ipc, wanted.share_process_namespace];
    if host.map(Option::unwrap_or_default) != ours.map(Option::unwrap_or_default) {
        return Some(Alteration { field: None, message: "namespaces of the host changed".to_owned() });
    }
    let is_kept = |live: &Option<String>, wanted: &Option<String>| wanted.is_none() || live == wanted;
    let fields = [
        (PodField::ServiceAccountName, is_kept(&live.service_account_name, &wanted.service_account_name)),
        (PodField::RuntimeClassName, is_kept(&live.runtime_class_name, &wanted.runtime_class_name)),
        (
            PodField::AutomountServiceAccountToken,
            live.automount_service_account_token == wanted.automount_service_account_token,
        ),
        (PodField::SecurityContext, says(&live.security_context, &wanted.security_context)),
    ];
    if let Some((field, _)) = fields.iter().find(|(field, kept)| !kept && is_compared(*field)) {
        return Some(Alteration::of(*field, format!("{field} changed")));
    }
    for volume in wanted.volumes.iter().flatten() {
        let found = live.volumes.iter().flatten().find(|live| live.name == volume.name);
        if !found.is_some_and(|live| is_volume(live, volume)) && is_compared(PodField::Volumes) {
            return Some(Alteration::of(PodField::Volumes, format!("volume {} changed", volume.name)));
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
        return Some(Alteration::of(PodField::Image, message));
    }
    let mounts = |container: &Container| container.volume_mounts.clone().unwrap_or_default();
    let variables = |container: &Container| {
        let mut all = container.env.clone().unwrap_or_default();
        // The API server leaves an empty value out.
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
                // The last of several counts.
                named.next_back().is_some_and(|live| says(live, variable))
            }),
        ),
        (
            PodField::EnvFrom,
            wanted
                .env_from
                .iter()
                .flatten()
                .all(|source| live.env_from.iter().flatten().any(|live| says(live, source))),
        ),
        (
            PodField::VolumeMounts,
            mounts(wanted).iter().all(|mount| {
                live_mounts.iter().any(|live| live.mount_path == mount.mount_path && is_mount(live, mount))
            }),
        ),
        (PodField::SecurityContext, says(&live.security_context, &wanted.security_context)),
    ];
    let (field, _) = fields.iter().find(|(field, kept)| !kept && is_compared(*field))?;
    Some(Alteration::of(*field, format!("{field} of container {} changed", wanted.name)))
}

/// The arguments without those that are no part of a function's identity.
fn arguments(container: &Container) -> Vec<&str> {
    let mut all = container.args.iter().flatten().map(String::as_str);
    let mut kept = Vec::new();
    while let Some(argument) = all.next() {
        if argument == DRAIN {
            all.next();
        } else {
            kept.push(argument);
        }
    }
    kept
}

/// Returns whether `live` says all that `wanted` does.
fn says<T: Serialize>(live: &T, wanted: &T) -> bool {
    let (live, wanted) = (serde_json::to_value(live), serde_json::to_value(wanted));
    matches!((live, wanted), (Ok(live), Ok(wanted)) if wanted.is_null() || covers(&live, &wanted))
}

/// Returns whether `live` is the same volume: of one source, and without the limits, which are no part of an identity.
fn is_volume(live: &Volume, wanted: &Volume) -> bool {
    let bare = |volume: &Volume| {
        let mut volume = volume.clone();
        if let Some(folder) = &mut volume.empty_dir {
            folder.size_limit = None;
        }
        // The API server leaves `false` out.
        if let Some(claim) = &mut volume.persistent_volume_claim {
            claim.read_only = claim.read_only.filter(|read_only| *read_only);
        }
        volume
    };
    let sources = |volume: &Volume| match serde_json::to_value(volume) {
        Ok(Value::Object(fields)) => fields.into_iter().map(|(field, _)| field).collect(),
        _ => Vec::new(),
    };
    let (live, wanted) = (bare(live), bare(wanted));
    sources(&live) == sources(&wanted) && says(&live, &wanted)
}

fn is_mount(live: &VolumeMount, wanted: &VolumeMount) -> bool {
    let is_read_only = |mount: &VolumeMount| mount.read_only.unwrap_or_default();
    live.name == wanted.name && is_read_only(live) == is_read_only(wanted) && live.sub_path == wanted.sub_path
}
