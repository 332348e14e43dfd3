//! Facts, profiles and routing that earlier releases stored in ConfigMaps. Pure.
//!
//! They are read if no record exists, converted to a record, and never changed: the operator may only read
//! ConfigMaps. Others can write them, so they are trusted only as far as the deployment's status and plans, which
//! only the operator writes, confirm them.

use super::facts::ModelFacts;
use super::names::{self, SUBJECT};
use super::ownership::is_owned_by;
use super::profiling;
use super::records::Records;
use super::routing::RoutingTable;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use remoe_api::{MoEDeployment, ProfileSource};
use remoe_hardware::Profile;

/// Key of the facts in their ConfigMap.
const FACTS: &str = "model.json";

/// Returns the name of the ConfigMap that must still be read for the model or routing of `owner`, if any.
pub(super) fn missing_input(owner: &MoEDeployment, records: Records<'_>) -> Option<String> {
    let name = owner.name_any();
    let model = had_facts(owner).is_some() && records.model.is_none();
    let routing = had_plan(owner) && records.routing.is_none();
    let missing = [(model, names::model_record(&name)), (routing, names::routing_record(&name))];
    let mut missing = missing.into_iter().filter(|(missing, _)| *missing).map(|(_, name)| name);
    missing.find(|name| !records.details.maps.contains_key(name))
}

/// Returns the name of the ConfigMap that must still be read for the hardware profile `name`, if any.
pub(super) fn missing_profile(records: Records<'_>, name: &str) -> Option<String> {
    let measured = records.plans.iter().any(|plan| plan.spec.profile == ProfileSource::Measured);
    (measured && !records.details.maps.contains_key(name)).then(|| name.to_owned())
}

/// Returns the facts about `subject`, if they match the digest in the status.
pub(super) fn facts(owner: &MoEDeployment, records: Records<'_>, subject: &str) -> Option<ModelFacts> {
    let digest = had_facts(owner).filter(|_| records.model.is_none())?;
    let map = owned(owner, records, &names::model_record(&owner.name_any()))?;
    if names::label(&map.metadata, SUBJECT) != subject {
        return None;
    }
    let facts = ModelFacts::from_json(map.data.as_ref()?.get(FACTS)?).ok()?;
    (facts.inspection.fingerprint == digest).then_some(facts)
}

/// Returns the routing table, if a plan ran.
pub(super) fn routing(owner: &MoEDeployment, records: Records<'_>) -> Option<RoutingTable> {
    if !had_plan(owner) || records.routing.is_some() {
        return None;
    }
    let map = owned(owner, records, &names::routing_record(&owner.name_any()))?;
    let entries = map.data.iter().flatten();
    let entries =
        entries.filter_map(|(key, text)| Some((key.strip_suffix(".json")?, serde_json::from_str(text).ok())));
    Some(RoutingTable::valid_entries(entries))
}

/// Returns the hardware profile `name`, if `owner` is among its owners.
pub(super) fn profile(owner: &MoEDeployment, records: Records<'_>, name: &str) -> Option<Profile> {
    let uid = owner.uid()?;
    let map = records.details.maps.get(name)?.as_ref()?;
    let is_owner = map.owner_references().iter().any(|reference| reference.uid == uid);
    let text = map.data.as_ref()?.get(profiling::KEY).filter(|_| is_owner)?;
    Profile::from_json(text).ok()
}

/// Returns the digest of the weights from the status, if the facts were known.
fn had_facts(owner: &MoEDeployment) -> Option<&str> {
    Some(owner.status.as_ref()?.model.as_ref()?.digest.as_str())
}

/// Returns whether a plan ever ran.
fn had_plan(owner: &MoEDeployment) -> bool {
    owner.status.as_ref().is_some_and(|status| status.plan.is_some())
}

fn owned<'a>(owner: &MoEDeployment, records: Records<'a>, name: &str) -> Option<&'a ConfigMap> {
    let map = records.details.maps.get(name)?.as_ref()?;
    is_owned_by(map, &owner.uid()?).then_some(map)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::records::Details;
    use super::*;
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
    use kube::api::ObjectMeta;
    use serde_json::{Value, json};

    fn owner(status: Value) -> MoEDeployment {
        serde_json::from_value(json!({
            "apiVersion": "remoe.dev/v1alpha1", "kind": "MoEDeployment",
            "metadata": {"name": "demo", "namespace": "test", "uid": "uid-1"},
            "spec": {"model": {"source": "pvc://models/demo"}}, "status": status,
        }))
        .unwrap()
    }

    fn records(details: &Details) -> Records<'_> {
        let now = Timestamp::UNIX_EPOCH;
        Records { pods: &[], plans: &[], model: None, routing: None, details, now }
    }

    fn details(uid: &str) -> Details {
        let generation = json!({"number": 7, "plan": "p", "revision": "r", "remote": "", "endpoints": []});
        let data = [("a.json", generation.to_string()), ("b.json", "{".to_owned())];
        let owner =
            OwnerReference { uid: uid.to_owned(), controller: Some(true), ..OwnerReference::default() };
        let map = ConfigMap {
            metadata: ObjectMeta { owner_references: Some(vec![owner]), ..ObjectMeta::default() },
            data: Some(data.map(|(key, text)| (key.to_owned(), text)).into()),
            ..ConfigMap::default()
        };
        let maps = [("demo-routing".to_owned(), Some(map))].into();
        Details { maps, ..Details::default() }
    }

    #[test]
    fn nothing_is_read_of_a_deployment_that_never_ran() {
        assert_eq!(missing_input(&owner(json!(null)), records(&Details::default())), None);
        let had = owner(json!({"plan": "p", "model": {"source": "s", "digest": "f00d"}}));
        assert_eq!(missing_input(&had, records(&Details::default())).as_deref(), Some("demo-model"));
        assert_eq!(routing(&owner(json!(null)), records(&details("uid-1"))), None);
    }

    #[test]
    fn foreign_routing_is_ignored_and_corruption_reported() {
        let had = owner(json!({"plan": "p"}));
        let table = routing(&had, records(&details("uid-1"))).unwrap();
        assert_eq!((table.newest(), table.corrupted), (7, true));
        assert_eq!(routing(&had, records(&details("uid-2"))), None);
    }
}
