//! Pods that run once: they find something out about a model, with all that its functions have.

use super::PodExtras;
use super::disk::DiskLimits;
use super::pod::{ModelAccess, Program, pod_spec};
use crate::names::{COMPONENT, Component, PodName, SUBJECT};
use crate::ownership::owned_meta;
use k8s_openapi::api::core::v1::Pod;
use remoe_api::MoEDeployment;

/// Description of a pod that is sent on an errand.
pub(super) struct OneShotPod<'a> {
    /// The deployment that it belongs to.
    pub(super) owner: &'a MoEDeployment,
    /// The part that it plays.
    pub(super) component: Component,
    /// Hash of what it is to find out.
    pub(super) subject: &'a str,
    /// One that is not done by then has failed.
    pub(super) deadline_seconds: i64,
    /// Bytes that it may write to the disk of its node.
    pub(super) disk: DiskLimits,
    /// Additions to all pods.
    pub(super) extras: &'a PodExtras,
}

impl OneShotPod<'_> {
    /// The pod, where main functions run.
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
        self.extras.note(&mut metadata);
        Pod { metadata, spec: Some(spec), status: None }
    }
}
