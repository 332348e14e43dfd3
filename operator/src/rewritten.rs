//! Fields of pods that are compared with what the operator wrote, by its settings. Pure.

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

/// Fields that are compared. Admission of a cluster may write some otherwise when pods are created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Comparison {
    /// Images must be those that were written from the start. Otherwise an image may be another one until its
    /// container was started again.
    pub exact_images: bool,
    /// Fields that admission rewrites: they are not compared.
    pub rewritten: Vec<PodField>,
}

impl Comparison {
    /// Returns the test for fields of a pod whose container was started again `restarts` times.
    pub(crate) fn of(&self, restarts: i32) -> impl Fn(PodField) -> bool {
        let exact_image = self.exact_images || restarts > 0;
        move |field| !self.rewritten.contains(&field) && (field != PodField::Image || exact_image)
    }
}
