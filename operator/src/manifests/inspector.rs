//! The pod that reads a checkpoint's headers: the operator itself sees neither volumes nor Secrets.

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

/// Memory of an inspector, in MB: the headers of the largest checkpoints take some tens.
const MEMORY_MB: u32 = 300;
/// An inspector that is not done by then has failed.
const DEADLINE_SECONDS: i64 = 300;

/// Where the inspectors of `subject` are, whatever their incarnation.
pub(crate) fn inspector_place(deployment: &str, subject: &str) -> String {
    format!("{deployment}-inspect-{subject}")
}

/// The pod that inspects the model of `owner`, which is `subject`, with the functions' volume, Secret and
/// service account.
///
/// # Errors
/// The source cannot be read, or is not allowed.
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
        // None is asked for when headers are read.
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
    let place = inspector_place(&owner.name_any(), subject);
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
