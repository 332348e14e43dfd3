//! The pure step for figures of the hardware: the profile that plans stand on, and whether a pod is to
//! measure it.
//!
//! A measured profile is shared by all deployments of a namespace that would measure the same. It is not
//! shared further: a tenant who can write into a pod could forge it for others.

use super::digest::digest;
use super::facts::ModelFacts;
use super::manifests::measured_vcpus;
use super::names::{self, MANAGER, SUBJECT};
use super::planning::{KnownProfile, compute_dtype, served};
use super::status_issue::StatusIssue;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use remoe_api::{MainSpec, MoEDeployment, MoERecord, MoERecordSpec, PodTemplate, ProfileSource, RecordOf};
use remoe_hardware::{MEASUREMENTS, ModelId, Profile};
use std::collections::BTreeMap;

/// The key of a profile in a ConfigMap that a user supplies.
pub(super) const KEY: &str = "profile.json";
/// A profile takes no more, in bytes of JSON.
const MAX_PROFILE: usize = 128 << 10;

/// Pods that are sent to measure the same before the prior has to do.
pub(crate) const ATTEMPTS: u32 = 3;

/// Identity of what a profiler of `owner` measures: the weights, what they are computed in, by which
/// version of what is measured, with what, and on which nodes. Deployments with the same one share a
/// profile, and an upgrade of the programs alone keeps it.
///
/// Nodes are told apart by what the spec says about them; the operator may not read them. The class of
/// numerics follows from the dtype and the version.
///
/// # Errors
/// The spec cannot be written as JSON.
pub(crate) fn subject(owner: &MoEDeployment, facts: &ModelFacts) -> Result<String, serde_json::Error> {
    // Without `..`: whether a new field matters here is to be decided.
    let MainSpec { device, gpu, memory_mb, cpu, template } = &owner.spec.main;
    let PodTemplate {
        node_selector,
        affinity,
        // Other runtimes take their share of every system call.
        runtime_class_name,
        // Who runs, when and beside whom says nothing about the hardware; nor does a toleration, which
        // chooses no node.
        priority_class_name: _,
        service_account_name: _,
        tolerations: _,
    } = template;
    let nodes = affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let vcpus = measured_vcpus(memory_mb, cpu.as_ref());
    let hardware = (device, gpu, vcpus, node_selector, nodes, runtime_class_name);
    let precision =
        ModelId::of(&served(&owner.spec, facts), compute_dtype(&owner.spec, facts).name()).precision();
    digest(&(&facts.inspection.fingerprint, precision, MEASUREMENTS, hardware))
}

/// Returns the profile that a user supplied in the ConfigMap `name`.
///
/// # Errors
/// A fault that a user must mend.
pub(crate) fn supplied(name: &str, map: Option<&ConfigMap>) -> Result<KnownProfile, StatusIssue> {
    let missing = |message| StatusIssue::new("ProfileMissing", message);
    let map = map.ok_or_else(|| missing(format!("missing ConfigMap {name} (spec.profile.configMapName)")))?;
    let text = map.data.as_ref().and_then(|data| data.get(KEY));
    let text = text.ok_or_else(|| missing(format!("missing key {KEY} in ConfigMap {name}")))?;
    let profile = Profile::from_json(text).map_err(|error| {
        StatusIssue::new("ProfileInvalid", format!("invalid {KEY} in ConfigMap {name}: {error}"))
    })?;
    Ok(KnownProfile { profile, source: ProfileSource::Supplied })
}

/// Returns the profile in `record`, if it is one of this subject and model; one that another writer spoiled is measured
/// again.
pub(crate) fn measured(
    record: &MoERecord,
    subject: &str,
    owner: &MoEDeployment,
    facts: &ModelFacts,
) -> Option<KnownProfile> {
    let profile = Profile::from_json(record.spec.json_of(RecordOf::Profile, subject)?).ok()?;
    of_model(profile, owner, facts)
}

/// `profile` as one that was measured, where it is one of this model.
pub(super) fn of_model(profile: Profile, owner: &MoEDeployment, facts: &ModelFacts) -> Option<KnownProfile> {
    profile.check_model(&served(&owner.spec, facts), compute_dtype(&owner.spec, facts).name()).ok()?;
    Some(KnownProfile { profile, source: ProfileSource::Measured })
}

/// The profile that a profiler printed: the last line of its log that is one.
pub(crate) fn from_log(log: &str) -> Option<Profile> {
    let mut lines = log.lines().rev().filter(|line| line.starts_with('{') && line.len() <= MAX_PROFILE);
    lines.find_map(|line| Profile::from_json(line).ok())
}

/// The record that keeps `profile` for all deployments that measure `subject`, `owner` the first of
/// them. It goes when the last of them has gone.
///
/// # Errors
/// The profile cannot be written as JSON.
pub(crate) fn record(
    owner: &MoEDeployment,
    subject: &str,
    profile: &Profile,
) -> Result<MoERecord, serde_json::Error> {
    let metadata = ObjectMeta {
        name: Some(names::profile_record(subject)),
        namespace: owner.namespace(),
        labels: Some(BTreeMap::from([
            ("app.kubernetes.io/part-of".to_owned(), "remoe".to_owned()),
            ("app.kubernetes.io/managed-by".to_owned(), MANAGER.to_owned()),
            (SUBJECT.to_owned(), subject.to_owned()),
        ])),
        owner_references: owner.owner_ref(&()).map(|reference| vec![reference]),
        ..ObjectMeta::default()
    };
    // Equal classes give equal bits.
    let about = format!("{}, numerics {}", profile.machine.cpu, profile.kernels.numerics_class);
    let spec = MoERecordSpec::found(RecordOf::Profile, subject, serde_json::to_string(profile)?, &about);
    Ok(MoERecord { metadata, spec })
}

/// `record` with `owner` among those that it stays for; none where it is already.
pub(crate) fn shared_with(record: &MoERecord, owner: &MoEDeployment) -> Option<MoERecord> {
    let reference = owner.owner_ref(&())?;
    if record.owner_references().iter().any(|known| known.uid == reference.uid) {
        return None;
    }
    let mut record = record.clone();
    record.owner_references_mut().push(reference);
    Some(record)
}
