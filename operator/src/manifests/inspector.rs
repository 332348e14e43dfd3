//! Pod of the inspector, which reads a checkpoint's headers; the operator has no access to volumes and Secrets.

use super::OperatorEnvironment;
use super::disk::DiskLimits;
use super::functions::BuildError;
use super::one_shot::OneShotPod;
use super::pod::{ModelAccess, Program, resources};
use crate::names::{Component, PodName};
use crate::quantity::{megabytes, millicores_for_memory, vcpus};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use remoe_api::{ComputeDtype, Device, MoEDeployment, PlannedModel};

/// Memory of an inspector in MB: headers of the largest checkpoints take some tens of MB.
const MEMORY_MB: u32 = 300;
/// Deadline of an inspector.
const DEADLINE_SECONDS: i64 = 300;

/// Returns the place of the inspectors of `subject`: their pod name without the incarnation.
pub(crate) fn inspector_pod_place(deployment: &str, subject: &str) -> String {
    format!("{deployment}-inspect-{subject}")
}

/// Returns the pod that inspects the model of `owner` with the hash `subject`. It has the functions' volume, Secret
/// and service account.
///
/// # Errors
/// The source is invalid or not allowed.
pub(crate) fn inspector(
    owner: &MoEDeployment,
    subject: &str,
    incarnation: u32,
    environment: &OperatorEnvironment,
) -> Result<Pod, BuildError> {
    let model = &owner.spec.model;
    let planned = PlannedModel {
        source: model.source.clone(),
        revision: model.revision.clone(),
        endpoint: model.endpoint.clone(),
        credentials_secret_name: model.credentials_secret_name.clone(),
        ambient_credentials: model.ambient_credentials,
        cache_claim_name: model.cache_claim_name.clone(),
        // Dtypes do not matter for reading headers.
        dtype: ComputeDtype::Float32,
        experts_dtype: None,
        dense_dtype: None,
        kv_cache_dtype: None,
        max_model_len: None,
        digest: String::new(),
    };
    let access = ModelAccess::new(&planned, &environment.sources)?;
    let mut arguments = vec!["inspect".to_owned()];
    arguments.extend(access.arguments.iter().cloned());
    let program = Program {
        name: "inspector",
        image: environment.main_image(Device::Cpu),
        pull_policy: &environment.pull_policy,
        command: "remoe-agent",
        arguments,
        resources: resources(vcpus(millicores_for_memory(MEMORY_MB)), megabytes(MEMORY_MB)),
    };
    let place = inspector_pod_place(&owner.name_any(), subject);
    let one_shot = OneShotPod {
        owner,
        component: Component::Inspector,
        subject,
        deadline_seconds: DEADLINE_SECONDS,
        disk: DiskLimits::HEADERS,
        extras: &environment.pods,
    };
    Ok(one_shot.pod(PodName { place, incarnation }, program, &access))
}
