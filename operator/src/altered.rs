//! Detection of pods of functions that do not run what the operator wrote. Pure.
//!
//! An account with rights on pods may change the image of a running one, or put another pod under its name. Labels and
//! annotations tell nothing about that, because they can be written as well: the spec itself is compared. Admission adds
//! to specs (sidecars, variables, volumes, tolerations), so additions are no alteration.

use super::api::MoEDeployment;
use super::drift::covers;
use super::manifests::Revision;
use super::pods::PodView;
use super::trouble::Trouble;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Volume, VolumeMount};
use kube::ResourceExt;
use serde::Serialize;
use serde_json::Value;

/// The reason of a pod that is not as it was written.
const ALTERED: &str = "PodAltered";
/// Flag that a main function gets after its identity is fixed: its value may differ from the present plan's.
const DRAIN: &str = "--drain-seconds";

/// Marks those of `views` as faulty whose pods are not as `revision` has them. With `exact_images` an image must be the
/// one that was written from the start. Without, it may be another one until its container was started again:
/// admission of a cluster may name images otherwise when pods are created.
pub(crate) fn mark(
    views: &mut [PodView],
    pods: &[Pod],
    owner: &MoEDeployment,
    revision: &Revision,
    exact_images: bool,
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
        let exact_image = exact_images || view.restarts > 0;
        if let Some(what) = alteration(live, &wanted, exact_image) {
            view.fault = Some(Trouble::new(ALTERED, format!("{what}; replacing the pod")));
        }
    }
}

/// Returns what is otherwise in `live` than in `wanted`.
fn alteration(live: &PodSpec, wanted: &PodSpec, exact_image: bool) -> Option<String> {
    let host = [live.host_network, live.host_pid, live.host_ipc, live.share_process_namespace];
    let ours = [wanted.host_network, wanted.host_pid, wanted.host_ipc, wanted.share_process_namespace];
    if host.map(Option::unwrap_or_default) != ours.map(Option::unwrap_or_default) {
        return Some("namespaces of the host changed".to_owned());
    }
    let is_kept = |live: &Option<String>, wanted: &Option<String>| wanted.is_none() || live == wanted;
    let fields = [
        ("serviceAccountName", is_kept(&live.service_account_name, &wanted.service_account_name)),
        ("runtimeClassName", is_kept(&live.runtime_class_name, &wanted.runtime_class_name)),
        (
            "automountServiceAccountToken",
            live.automount_service_account_token == wanted.automount_service_account_token,
        ),
        ("securityContext", says(&live.security_context, &wanted.security_context)),
    ];
    if let Some((field, _)) = fields.iter().find(|(_, kept)| !kept) {
        return Some(format!("{field} changed"));
    }
    for volume in wanted.volumes.iter().flatten() {
        let found = live.volumes.iter().flatten().find(|live| live.name == volume.name);
        if !found.is_some_and(|live| is_volume(live, volume)) {
            return Some(format!("volume {} changed", volume.name));
        }
    }
    wanted.containers.iter().find_map(|wanted| {
        match live.containers.iter().find(|live| live.name == wanted.name) {
            Some(live) => altered_container(live, wanted, exact_image),
            None => Some(format!("container {} is missing", wanted.name)),
        }
    })
}

fn altered_container(live: &Container, wanted: &Container, exact_image: bool) -> Option<String> {
    if exact_image && live.image != wanted.image {
        let shown = |image: &Option<String>| image.clone().unwrap_or_default();
        return Some(format!("image changed to {} from {}", shown(&live.image), shown(&wanted.image)));
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
        ("command", live.command == wanted.command),
        ("args", arguments(live) == arguments(wanted)),
        (
            "env",
            variables(wanted).iter().all(|variable| {
                let mut named = live_variables.iter().filter(|live| live.name == variable.name);
                // The last of several counts.
                named.next_back().is_some_and(|live| says(live, variable))
            }),
        ),
        (
            "envFrom",
            wanted
                .env_from
                .iter()
                .flatten()
                .all(|source| live.env_from.iter().flatten().any(|live| says(live, source))),
        ),
        (
            "volumeMounts",
            mounts(wanted).iter().all(|mount| {
                live_mounts.iter().any(|live| live.mount_path == mount.mount_path && is_mount(live, mount))
            }),
        ),
        ("securityContext", says(&live.security_context, &wanted.security_context)),
    ];
    let (field, _) = fields.iter().find(|(_, kept)| !kept)?;
    Some(format!("{field} of container {} changed", wanted.name))
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
