//! Hardware profiles: where they are stored, and what they depend on. Pure.
//!
//! All deployments of a namespace that would measure the same share a profile. It is not shared across namespaces: a
//! tenant who can write into a pod could forge it for others.

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

/// Key of the profile in a ConfigMap that a user supplies.
pub(super) const KEY: &str = "profile.json";
/// Maximum bytes of a profile in JSON.
const MAX_PROFILE: usize = 128 << 10;

/// Maximum profiler pods before the prior stays in use.
pub(crate) const ATTEMPTS: u32 = 3;

/// Returns the hash of everything that a measurement depends on: weights, precision, version of the measured code,
/// hardware, and nodes. Deployments with the same hash share a profile. An upgrade that leaves the measured code
/// unchanged keeps it.
///
/// Nodes are identified only by the spec's scheduling constraints; the operator may not read Node objects. The
/// numerics class follows from the dtype and the version.
///
/// # Errors
/// The spec cannot be written as JSON.
pub(crate) fn subject(owner: &MoEDeployment, facts: &ModelFacts) -> Result<String, serde_json::Error> {
    // No `..` in the pattern: a new field must be considered here.
    let MainSpec { device, gpu, memory_mb, cpu, template } = &owner.spec.main;
    let PodTemplate {
        node_selector,
        affinity,
        // Another runtime makes system calls slower.
        runtime_class_name,
        // Account, priority and tolerations select no hardware.
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
/// The ConfigMap or its profile is missing or invalid, which a user must fix.
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

/// Returns the profile in `record`, if it is valid for this subject and model. A corrupted one is measured again.
pub(crate) fn measured(
    record: &MoERecord,
    subject: &str,
    owner: &MoEDeployment,
    facts: &ModelFacts,
) -> Option<KnownProfile> {
    let profile = Profile::from_json(record.spec.json_of(RecordOf::Profile, subject)?).ok()?;
    of_model(profile, owner, facts)
}

/// Returns `profile` as a measured profile, if it is for this model.
pub(super) fn of_model(profile: Profile, owner: &MoEDeployment, facts: &ModelFacts) -> Option<KnownProfile> {
    profile.check_model(&served(&owner.spec, facts), compute_dtype(&owner.spec, facts).name()).ok()?;
    Some(KnownProfile { profile, source: ProfileSource::Measured })
}

/// Returns the profile that a profiler printed: the last valid line of its log.
pub(crate) fn from_log(log: &str) -> Option<Profile> {
    let mut lines = log.lines().rev().filter(|line| line.starts_with('{') && line.len() <= MAX_PROFILE);
    lines.find_map(|line| Profile::from_json(line).ok())
}

/// Returns the record that stores `profile` for all deployments with the same `subject`; `owner` is its first owner.
/// It is garbage-collected with the last owner.
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
    // Machines of equal numerics class compute identical results.
    let about = format!("{}, numerics {}", profile.machine.cpu, profile.kernels.numerics_class);
    let spec = MoERecordSpec::found(RecordOf::Profile, subject, serde_json::to_string(profile)?, &about);
    Ok(MoERecord { metadata, spec })
}

/// Returns `record` with `owner` added to its owners; absent if it is one already.
pub(crate) fn with_added_owner(record: &MoERecord, owner: &MoEDeployment) -> Option<MoERecord> {
    let reference = owner.owner_ref(&())?;
    if record.owner_references().iter().any(|known| known.uid == reference.uid) {
        return None;
    }
    let mut record = record.clone();
    record.owner_references_mut().push(reference);
    Some(record)
}
