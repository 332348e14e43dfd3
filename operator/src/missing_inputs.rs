//! Names the inputs that must still be read. Pure: they follow from the resource and from what is stored about its
//! model.

use super::facts::{ModelFacts, subject_of};
use super::inspection::stored_facts;
use super::legacy_records;
use super::manifests::inspector_pod_place;
use super::names::profile_record;
use super::one_shot::{OneShotState, one_shot};
use super::profiling;
use super::records::{Details, Records};
use kube::ResourceExt;
use remoe_api::MoEDeployment;

/// Input that was not read yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MissingInput {
    /// Log of a pod.
    Log(String),
    /// Record of a profile.
    Profile(String),
    /// ConfigMap with a supplied profile, or with data of an earlier release.
    Map(String),
}

/// Returns the next input to read for `owner` beyond `records`; absent if nothing is missing.
///
/// # Errors
/// The spec cannot be written as JSON.
pub(crate) fn missing_input(
    owner: &MoEDeployment,
    records: Records<'_>,
) -> Result<Option<MissingInput>, serde_json::Error> {
    let Details { profiles, maps, logs } = records.details;
    if let Some(name) = legacy_records::missing_input(owner, records) {
        return Ok(Some(MissingInput::Map(name)));
    }
    let unread_log = |place: &str| finished(owner, records, place).filter(|pod| !logs.contains_key(pod));
    let subject = subject_of(owner)?;
    let inspector_place_name = inspector_pod_place(&owner.name_any(), &subject);
    let printed_facts = || {
        let log = logs.get(&finished(owner, records, &inspector_place_name)?)?.as_ref().ok()?;
        ModelFacts::from_log(log).ok()
    };
    let Some(facts) = stored_facts(owner, records, &subject).or_else(printed_facts) else {
        return Ok(unread_log(&inspector_place_name).map(MissingInput::Log));
    };
    if let Some(named) = &owner.spec.profile {
        let name = &named.config_map_name;
        return Ok((!maps.contains_key(name)).then(|| MissingInput::Map(name.clone())));
    }
    let subject = profiling::subject(owner, &facts)?;
    let name = profile_record(&subject);
    let Some(record) = profiles.get(&name) else { return Ok(Some(MissingInput::Profile(name))) };
    let legacy_records =
        if record.is_none() { legacy_records::missing_profile(records, &name) } else { None };
    if let Some(name) = legacy_records {
        return Ok(Some(MissingInput::Map(name)));
    }
    let profile = match record {
        Some(record) => profiling::measured(record, &subject, owner, &facts),
        None => legacy_records::profile(owner, records, &name)
            .and_then(|profile| profiling::of_model(profile, owner, &facts)),
    };
    Ok(if profile.is_some() { None } else { unread_log(&name).map(MissingInput::Log) })
}

/// Returns the completed one-shot pod at `place`.
fn finished(owner: &MoEDeployment, records: Records<'_>, place: &str) -> Option<String> {
    let uid = owner.uid().unwrap_or_default();
    // The reason matters only for failures.
    match one_shot(records.pods, &uid, place, "", records.now) {
        OneShotState::Done { pod } => Some(pod),
        OneShotState::Start { .. } | OneShotState::Waiting { .. } | OneShotState::Failed { .. } => None,
    }
}
