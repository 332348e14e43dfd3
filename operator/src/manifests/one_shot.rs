//! Pods that run to completion, with the same access to the model as functions.

use super::PodExtras;
use super::disk::DiskLimits;
use super::pod::{ModelAccess, Program, pod_spec};
use crate::names::{COMPONENT, Component, PodName, SUBJECT};
use crate::ownership::owned_meta;
use k8s_openapi::api::core::v1::Pod;
use remoe_api::MoEDeployment;

/// Settings of a pod that runs to completion.
pub(super) struct OneShotPod<'a> {
    /// Deployment that owns it.
    pub(super) owner: &'a MoEDeployment,
    /// Component of the pod.
    pub(super) component: Component,
    /// Hash of the inspected or measured subject.
    pub(super) subject: &'a str,
    /// Deadline in seconds.
    pub(super) deadline_seconds: i64,
    /// Limits of its disk usage.
    pub(super) disk: DiskLimits,
    /// Additions to all pods.
    pub(super) extras: &'a PodExtras,
}

impl OneShotPod<'_> {
    /// Returns the pod, scheduled like main functions.
    pub(super) fn pod(&self, name: PodName, program: Program<'_>, access: &ModelAccess) -> Pod {
        let mut spec = pod_spec(program, access, &self.owner.spec.main.template);
        spec.restart_policy = Some("Never".to_owned());
        spec.active_deadline_seconds = Some(self.deadline_seconds);
        self.extras.apply(&mut spec);
        self.disk.apply(&mut spec);
        let mut metadata = owned_meta(self.owner, |_| name.to_string());
        metadata.labels.get_or_insert_default().extend([
            (COMPONENT.to_owned(), self.component.name().to_owned()),
            (SUBJECT.to_owned(), self.subject.to_owned()),
        ]);
        self.extras.add_metadata(&mut metadata);
        Pod { metadata, spec: Some(spec), status: None }
    }
}
