//! Fields of pods that are compared with their desired values. Pure.

use clap::ValueEnum;
use std::fmt;

/// Field of a pod or its container that is compared, by its name in the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "camelCase")]
pub enum PodField {
    /// Image of a container.
    Image,
    /// Command of a container.
    Command,
    /// Arguments of a container.
    Args,
    /// Variables of a container.
    Env,
    /// Sources of variables of a container.
    EnvFrom,
    /// Volumes of the pod.
    Volumes,
    /// Mounts of a container.
    VolumeMounts,
    /// Security contexts of pod and container.
    SecurityContext,
    /// Service account.
    ServiceAccountName,
    /// RuntimeClass.
    RuntimeClassName,
    /// Mount of the service account's token.
    AutomountServiceAccountToken,
}

impl fmt::Display for PodField {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        formatter.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// Settings of the comparison. A cluster's admission may rewrite some fields when pods are created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodComparison {
    /// Set if the image must be the written one from the start. Otherwise admission may have changed it until the
    /// container is restarted.
    pub exact_images: bool,
    /// Fields that admission rewrites; they are not compared.
    pub rewritten: Vec<PodField>,
}

impl PodComparison {
    /// Returns a predicate for the fields to compare, of a pod whose container restarted `restarts` times.
    pub(crate) fn is_compared(&self, restarts: i32) -> impl Fn(PodField) -> bool {
        let exact_image = self.exact_images || restarts > 0;
        move |field| !self.rewritten.contains(&field) && (field != PodField::Image || exact_image)
    }
}
