//! Malicious writes of a tenant through a real API server. None makes the operator panic, and another tenant's
//! deployment is reconciled as always. `tenants.rs` tests their effects in memory.

use crate::names::DEPLOYMENT;
use crate::testing::corrupted::SeededChoices;
use crate::tests::api_server::stage::{Budget, Operator, deploy_as, quiet, run_pods};
use crate::tests::api_server::{Server, eventually, with_server};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Resource, ResourceExt};
use remoe_api::{MoEDeployment, MoEPlan, MoERecord};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Number of attempted writes.
const OBJECTS: usize = 400;
/// Number of writes after which the other deployment loses a pod.
const AT_ONCE: usize = 20;

/// Writes a corrupted object of the deployment `demo`, in place or beside it under the labels of `other`. Returns
/// whether the API server accepted it; absent if there was no object.
async fn corrupt<K>(server: &Server, dice: &mut SeededChoices<'_>) -> Option<bool>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned,
{
    let api = server.api::<K>();
    let list = api.list(&ListParams::default()).await.unwrap().items;
    let theirs = |object: &K| object.name_any().starts_with("other");
    let ours: Vec<K> = list.into_iter().filter(|object| !theirs(object)).collect();
    let object = ours.get(dice.below(ours.len()))?;
    let mut corrupted = dice.corrupted(object)?;
    let meta = corrupted.meta_mut();
    meta.managed_fields = None;
    if dice.below(2) == 0 {
        meta.resource_version = None;
        return Some(api.replace(&object.name_any(), &PostParams::default(), &corrupted).await.is_ok());
    }
    (meta.uid, meta.resource_version, meta.creation_timestamp) = (None, None, None);
    let place = object.name_any();
    let place = place.rsplit_once('-').map_or(place.as_str(), |(place, _)| place);
    let number = [dice.below(1000), u32::MAX as usize][dice.below(2)];
    meta.name = Some(format!("{place}-{number}"));
    if dice.below(2) == 0 {
        corrupted.labels_mut().insert(DEPLOYMENT.to_owned(), "other".to_owned());
    }
    Some(api.create(&PostParams::default(), &corrupted).await.is_ok())
}

/// Sets an arbitrary pod status, as nodes could.
async fn spoil_status(server: &Server, dice: &mut SeededChoices<'_>) -> Option<bool> {
    let api = server.api::<Pod>();
    let list = api.list(&ListParams::default().labels("remoe.dev/deployment=demo")).await.unwrap().items;
    let ours: Vec<Pod> = list.into_iter().filter(|pod| !pod.name_any().starts_with("other")).collect();
    let pod = ours.get(dice.below(ours.len()))?;
    let corrupted = dice.corrupted(pod)?;
    let change = Patch::Merge(json!({ "status": corrupted.status }));
    Some(api.patch_status(&pod.name_any(), &PatchParams::default(), &change).await.is_ok())
}

/// Deletes a pod of `other` and waits for its replacement. Returns the time.
async fn heal(server: &Server, turn: usize) -> Duration {
    let pods = server.api::<Pod>();
    let selector = ListParams::default().labels("remoe.dev/deployment=other,remoe.dev/function");
    let ours = async || {
        let list = pods.list(&selector).await.unwrap().items;
        list.into_iter().filter(|pod| pod.name_any().starts_with("other-")).collect::<Vec<_>>()
    };
    let before = ours().await;
    let lost = &before[turn % before.len()];
    let place = |pod: &Pod| pod.name_any().rsplit_once('-').map(|(place, _)| place.to_owned());
    let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    pods.delete(&lost.name_any(), &at_once).await.unwrap();
    let begun = Instant::now();
    eventually("another pod in the place of one that was lost", async || {
        ours().await.iter().any(|pod| place(pod) == place(lost) && pod.uid() != lost.uid())
    })
    .await;
    let took = begun.elapsed();
    run_pods(server).await;
    took
}

#[test]
fn hostile_objects_cause_no_panic_and_others_are_reconciled() {
    with_server(async |server| {
        deploy_as(&server, "demo").await;
        deploy_as(&server, "other").await;
        let operator = Operator::start(&server, Budget::unlimited()).await;
        quiet(&server, &operator).await;
        let mut dice = SeededChoices::Thrown(11);
        let (mut taken, mut refused, mut slowest) = (0, 0, Duration::ZERO);
        while taken + refused < OBJECTS {
            let written = match dice.below(10) {
                0 | 1 => corrupt::<Pod>(&server, &mut dice).await,
                2 => corrupt::<Service>(&server, &mut dice).await,
                3 => corrupt::<NetworkPolicy>(&server, &mut dice).await,
                4 => corrupt::<PodDisruptionBudget>(&server, &mut dice).await,
                5 => corrupt::<MoEPlan>(&server, &mut dice).await,
                6 => corrupt::<MoERecord>(&server, &mut dice).await,
                7 => corrupt::<Secret>(&server, &mut dice).await,
                8 => corrupt::<MoEDeployment>(&server, &mut dice).await,
                _ => spoil_status(&server, &mut dice).await,
            };
            match written {
                Some(true) => taken += 1,
                Some(false) => refused += 1,
                None => continue,
            }
            if (taken + refused) % AT_ONCE == 0 {
                let took = heal(&server, (taken + refused) / AT_ONCE).await;
                slowest = slowest.max(took);
            }
        }
        println!(
            "{taken} hostile objects taken, {refused} refused; the other deployment healed in {slowest:?} at most"
        );
        assert!(taken > OBJECTS / 10, "{taken} of {OBJECTS} were taken");
        assert!(!operator.counts().await.contains("kind=\"panic\""), "{}", operator.counts().await);
        operator.kill().await;
    });
}
