//! Extreme numbers written by others: the operator continues for all deployments.

use crate::routing::{MAX_GENERATION, RoutingTable};
use crate::tests::api_server::stage::{Budget, Operator, POLL_INTERVAL, deploy, quiet, run_pods};
use crate::tests::api_server::{Server, eventually, with_server};
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use remoe_api::{MoEDeployment, MoERecord};
use serde_json::json;
use tokio::time::sleep;

/// Pods at the places of the first main function and of the inspector, with the highest number that a name can have.
/// `owned` ones claim to belong to the deployment.
async fn strangers(server: &Server, owned: bool) {
    let pods = server.api::<Pod>();
    let list = pods.list(&ListParams::default()).await.unwrap();
    let main = list.items.iter().find(|pod| pod.name_any().starts_with("demo-main-")).unwrap();
    let place = main.name_any().rsplit_once('-').unwrap().0.to_owned();
    let mut stranger = main.clone();
    stranger.metadata.name = Some(format!("{place}-{}", if owned { u32::MAX } else { u32::MAX - 1 }));
    stranger.metadata.resource_version = None;
    stranger.metadata.uid = None;
    if !owned {
        stranger.metadata.owner_references = None;
    }
    pods.create(&PostParams::default(), &stranger).await.unwrap();
}

#[test]
fn an_operator_outlives_numbers_that_overflow() {
    with_server(async |server| {
        deploy(&server).await;
        let operator = Operator::start(&server, Budget::unlimited()).await;
        quiet(&server, &operator).await;
        let records = server.api::<MoERecord>();
        let mut poisoned = records.get("demo-routing").await.unwrap();
        let owner = server.api::<MoEDeployment>().get("demo").await.unwrap();
        for number in [u64::MAX, MAX_GENERATION + 1, MAX_GENERATION] {
            for generation in poisoned.spec.generations.values_mut() {
                generation.number = number;
                generation.revision = "another".to_owned();
            }
            let change = json!({"spec": {"generations": poisoned.spec.generations}});
            let written =
                records.patch("demo-routing", &PatchParams::default(), &Patch::Merge(&change)).await;
            // The API server refuses invalid records.
            assert_eq!(written.is_ok(), number == MAX_GENERATION, "{number}: {written:?}");
        }
        strangers(&server, false).await;
        strangers(&server, true).await;
        eventually("the routing to be healed", async || {
            run_pods(&server).await;
            sleep(POLL_INTERVAL).await;
            let table = RoutingTable::from_record(&records.get("demo-routing").await.unwrap());
            !table.corrupted && !table.entries.is_empty() && table.newest() < MAX_GENERATION
        })
        .await;
        let gone = format!("-{}", u32::MAX);
        eventually("the end of the pod that pretends to be the deployment's", async || {
            sleep(POLL_INTERVAL).await;
            let list = server.api::<Pod>().list(&ListParams::default()).await.unwrap();
            list.items.iter().all(|pod| !pod.name_any().ends_with(&gone))
        })
        .await;
        // Other deployments are served as before.
        let mut other = owner.clone();
        other.metadata = kube::api::ObjectMeta { name: Some("other".to_owned()), ..Default::default() };
        server.api::<MoEDeployment>().create(&PostParams::default(), &other).await.unwrap();
        eventually("the other deployment's Service", async || {
            sleep(POLL_INTERVAL).await;
            server.api::<Service>().get_opt("other").await.unwrap().is_some()
        })
        .await;
        operator.kill().await;
    });
}

#[test]
fn a_plan_of_no_possible_size_is_refused() {
    use crate::manifests::plan_object;
    use crate::testing::example::{deployment, plan, plan_of_groups};
    use remoe_api::MoEPlan;

    with_server(async |server| {
        let mut owner = deployment(json!({}));
        owner.metadata.uid = None;
        owner.metadata.namespace = Some(server.namespace.clone());
        let (_, object) = plan_object(&owner, plan(&owner)).unwrap();
        let api = server.api::<MoEPlan>();
        for (field, change) in [("replicas", u32::MAX), ("memoryMB", u32::MAX), ("layer", u32::MAX)] {
            let mut object = serde_json::to_value(&object).unwrap();
            object["spec"]["remote"][0][field] = json!(change);
            let object: MoEPlan = serde_json::from_value(object).unwrap();
            let refusal = api.create(&PostParams::default(), &object).await.unwrap_err().to_string();
            assert!(refusal.contains(field), "{refusal}");
        }
        let (_, grouped) = plan_object(&owner, plan_of_groups(&owner, 2)).unwrap();
        let grouped = serde_json::to_value(&grouped).unwrap();
        for (field, change) in [
            ("replicas", json!(u32::MAX)),
            ("memoryMB", json!(u32::MAX)),
            ("cpuMillicores", json!(0)),
            ("cpuMillicores", json!(u32::MAX)),
            ("experts", json!("1:0,".repeat(1 << 15))),
        ] {
            let mut object = grouped.clone();
            object["spec"]["groups"][0][field] = change;
            let object: MoEPlan = serde_json::from_value(object).unwrap();
            let refusal = api.create(&PostParams::default(), &object).await.unwrap_err().to_string();
            assert!(refusal.contains(field), "{refusal}");
        }
        let mut many = grouped;
        many["spec"]["groups"] = json!(vec![many["spec"]["groups"][0].clone(); 4000]);
        let many: MoEPlan = serde_json::from_value(many).unwrap();
        let refusal = api.create(&PostParams::default(), &many).await.unwrap_err().to_string();
        assert!(refusal.contains("spec.groups"), "{refusal}");
    });
}
