//! The operator's role grants what the operator uses, and nothing more.

use crate::facts::subject;
use crate::identity::{gateway_identity, stored_certificate};
use crate::names::DEPLOYMENT;
use crate::testing::example::{deployment, facts};
use crate::testing::world::World;
use crate::tests::api_server::proxy::{Proxy, RequiredPermission};
use crate::tests::api_server::stage::{Budget, Operator, POLL_INTERVAL, run_pods};
use crate::tests::api_server::{Server, eventually, with_server};
use crate::write::Write;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Resource, ResourceExt};
use remoe_api::{MoEDemand, MoEDeployment, MoEPlan, MoERecord};
use remoe_proto::identity::Credentials;
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashSet};
use std::fmt::Debug;
use std::mem::{Discriminant, discriminant};
use std::path::Path;
use tokio::time::sleep;

/// Granted permissions that no test can observe in use, with the reason.
const UNSEEN: [(&str, &str, &str, &str); 1] = [(
    "remoe.dev",
    "moedeployments/finalizers",
    "update",
    "admission asks for it where OwnerReferencesPermissionEnforcement is on, and this API server has it off",
)];

/// Returns the permissions that the chart grants the operator with all settings, except for cert-manager's objects.
fn granted() -> BTreeSet<RequiredPermission> {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/remoe/templates");
    let mut granted = BTreeSet::new();
    for file in ["rbac.yaml", "identity.yaml"] {
        let text = std::fs::read_to_string(chart.join(file)).unwrap();
        for document in without_actions(&text).split("\n---") {
            let object: Value = serde_yaml::from_str(document).unwrap();
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            // These are for users.
            if name.ends_with("-edit") || name.ends_with("-view") {
                continue;
            }
            for rule in object["rules"].as_array().into_iter().flatten() {
                let each =
                    |field: &str| -> Vec<String> { serde_json::from_value(rule[field].clone()).unwrap() };
                for (group, resource) in each("apiGroups")
                    .iter()
                    .flat_map(|group| each("resources").into_iter().map(move |it| (group, it)))
                {
                    let asked =
                        |verb| RequiredPermission { group: group.clone(), resource: resource.clone(), verb };
                    granted.extend(each("verbs").into_iter().map(asked));
                }
            }
        }
    }
    granted.retain(|asked| asked.group != "cert-manager.io");
    assert!(granted.len() > 40, "{granted:?}");
    granted
}

/// A template with all of its branches.
fn without_actions(template: &str) -> String {
    let mut text = String::new();
    let mut rest = template;
    while let Some((before, action)) = rest.split_once("{{") {
        text.push_str(before);
        rest = action.split_once("}}").unwrap().1;
    }
    text + rest
}

/// A role that may write ConfigMaps everywhere may write the cluster's own settings.
#[test]
fn the_role_writes_no_config_map() {
    let of_maps = granted().into_iter().filter(|asked| asked.resource == "configmaps");
    assert_eq!(of_maps.map(|asked| asked.verb).collect::<Vec<_>>(), ["get"]);
    assert!(granted().iter().all(|asked| !asked.verb.contains('*') && !asked.resource.contains('*')));
}

/// Returns the permissions that a write takes, as it is applied: a kept object may have to be made, looked for by name,
/// or replaced as a whole.
fn takes(write: &Write) -> BTreeSet<RequiredPermission> {
    const KEPT: &[&str] = &["get", "create", "patch", "update"];
    let (group, resource, verbs) = match write {
        Write::Service(_) => ("", "services", KEPT),
        Write::Policy(_) => ("networking.k8s.io", "networkpolicies", KEPT),
        Write::Budget(_) => ("policy", "poddisruptionbudgets", KEPT),
        Write::Facts(_) | Write::Routing(_) => ("remoe.dev", "moerecords", KEPT),
        Write::Profile(_) => ("remoe.dev", "moerecords", &["create", "patch"][..]),
        Write::Share(_) => ("remoe.dev", "moerecords", &["update"][..]),
        Write::Demand(_) => ("remoe.dev", "moedemands", &["create", "update"][..]),
        Write::ForgetGateways(_) => ("remoe.dev", "moedemands/status", &["update"][..]),
        Write::Plan(_) => ("remoe.dev", "moeplans", &["create", "get", "patch"][..]),
        Write::DeletePlan(..) => ("remoe.dev", "moeplans", &["delete"][..]),
        Write::DeleteBudget(..) => ("policy", "poddisruptionbudgets", &["delete"][..]),
        Write::Create(_) => ("", "pods", &["create", "get", "patch"][..]),
        Write::Relabel { .. } => ("", "pods", &["patch"][..]),
        Write::Delete(_) => ("", "pods", &["delete"][..]),
    };
    asked(group, resource, verbs).collect()
}

fn asked(group: &str, resource: &str, verbs: &[&str]) -> impl Iterator<Item = RequiredPermission> {
    verbs.iter().map(|verb| RequiredPermission {
        group: group.to_owned(),
        resource: resource.to_owned(),
        verb: (*verb).to_owned(),
    })
}

/// Permissions that the operator needs in addition to the writes of a reconcile.
const BESIDE: [(&str, &str, &[&str]); 15] = [
    // Watches and lists.
    ("remoe.dev", "moedeployments", &["list", "watch"]),
    ("remoe.dev", "moeplans", &["list", "watch"]),
    ("remoe.dev", "moerecords", &["list", "watch"]),
    ("", "pods", &["list", "watch"]),
    ("", "services", &["list", "watch"]),
    ("networking.k8s.io", "networkpolicies", &["list", "watch"]),
    ("policy", "poddisruptionbudgets", &["list", "watch"]),
    ("remoe.dev", "moedemands", &["get", "list", "watch"]),
    ("", "pods/log", &["get"]),
    ("", "configmaps", &["get"]),
    // Status and events.
    ("remoe.dev", "moedeployments/status", &["patch"]),
    ("events.k8s.io", "events", &["create", "patch"]),
    // Certificates are applied, and the authority is created once.
    ("", "secrets", &["get", "create", "patch"]),
    // Leases of leaders and gateways.
    ("coordination.k8s.io", "leases", &["get", "create", "update", "list"]),
    (UNSEEN[0].0, UNSEEN[0].1, &[UNSEEN[0].2]),
];

/// Reconciles `world` until it is settled, and adds the permissions used.
fn settle(
    world: &mut World,
    all: &mut BTreeSet<RequiredPermission>,
    kinds: &mut HashSet<Discriminant<Write>>,
) {
    for _ in 0..60 {
        let (_, diff) = world.reconcile();
        all.extend(diff.writes.iter().flat_map(takes));
        kinds.extend(diff.writes.iter().map(discriminant));
        if diff.settled && diff.writes.is_empty() {
            return;
        }
        world.write(&diff, usize::MAX);
        world.run();
    }
    panic!("not settled");
}

/// Makes every kind of write in a cluster in memory. The permissions of these writes, and of the other calls, are
/// exactly those of the role.
#[test]
fn every_verb_of_the_role_is_used_and_none_is_missing() {
    let (mut all, mut kinds) = (BTreeSet::new(), HashSet::new());
    let mut world = World::with_gateways(json!({"scaling": {"min": 2}}), &["g1"]);
    settle(&mut world, &mut all, &mut kinds);
    // Another writer removes a label, another deployment measures the same, a gateway leaves, and many plans are kept.
    world.observed.pods[0].metadata.labels.as_mut().unwrap().remove("app.kubernetes.io/part-of");
    for record in world.observed.details.profiles.values_mut().flatten() {
        record.owner_references_mut().iter_mut().for_each(|owner| owner.uid = "another".to_owned());
    }
    let gone = json!({"uid": "gone", "pod": "gone", "waiting": 0, "inFlight": 0, "acknowledged": 0,
        "lastActive": "2026-01-01T00:00:00.000000Z", "sequence": 1});
    world.say(serde_json::from_value(gone).unwrap());
    for number in 0..11 {
        let mut plan = world.observed.plans[0].clone();
        plan.metadata.name = Some(format!("demo-{number:010}"));
        plan.spec.inputs = number.to_string();
        world.observed.plans.insert(0, plan);
    }
    settle(&mut world, &mut all, &mut kinds);
    world.owner.spec.scaling.min = 1;
    world.observed.pods.remove(0);
    settle(&mut world, &mut all, &mut kinds);
    assert_eq!(kinds.len(), 15, "a kind of write was not seen: {all:?}");
    all.extend(BESIDE.iter().flat_map(|(group, resource, verbs)| asked(group, resource, verbs)));
    let granted = granted();
    let missing: Vec<&RequiredPermission> = all.difference(&granted).collect();
    assert!(missing.is_empty(), "the role lacks {missing:?}");
    let superfluous: Vec<&RequiredPermission> = granted.difference(&all).collect();
    assert!(superfluous.is_empty(), "nothing that the operator does takes {superfluous:?}");
}

/// Removes the label by which the operator finds the last object of this kind, and adds a foreign owner. For records
/// that is the routing: facts without their label would be inspected again, which needs a node.
async fn meddle<K>(server: &Server)
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug,
    K: serde::de::DeserializeOwned + serde::Serialize,
{
    let api = server.api::<K>();
    let ours = ListParams::default().labels(DEPLOYMENT);
    let object = api.list(&ours).await.unwrap().items.pop().unwrap();
    let name = object.name_any();
    let unlabelled = json!({"metadata": {"labels": {DEPLOYMENT: null}}});
    api.patch(&name, &PatchParams::default(), &Patch::Merge(&unlabelled)).await.unwrap();
    let what = format!("the labels of {} {name}", K::kind(&()));
    eventually(&what, async || {
        run_pods(server).await;
        api.get(&name).await.unwrap().labels().contains_key(DEPLOYMENT)
    })
    .await;
    // Additional owners of plans and pods do not matter.
    if ["MoEPlan", "Pod"].contains(&K::kind(&()).as_ref()) {
        return;
    }
    let account = server.api::<ServiceAccount>().get("default").await.unwrap();
    let mut owners = serde_json::to_value(api.get(&name).await.unwrap().owner_references()).unwrap();
    let stranger =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "name": "default", "uid": account.uid()});
    owners.as_array_mut().unwrap().push(stranger);
    let owned = json!({"metadata": {"ownerReferences": owners}});
    api.patch(&name, &PatchParams::default(), &Patch::Merge(&owned)).await.unwrap();
    eventually(&format!("the owners of {} {name}", K::kind(&())), async || {
        api.get(&name).await.unwrap().owner_references().len() == 1
    })
    .await;
}

/// Makes the operator do everything that it ever does.
async fn everything(server: &Server) {
    let owners = server.api::<MoEDeployment>();
    let mut owner = deployment(json!({"scaling": {"min": 2}}));
    owner.metadata = ObjectMeta { name: Some("demo".to_owned()), ..ObjectMeta::default() };
    let owner = owners.create(&PostParams::default(), &owner).await.unwrap();
    let pods = server.api::<Pod>();
    eventually("an inspector", async || {
        let list = pods.list(&ListParams::default()).await.unwrap();
        let Some(pod) = list.items.first() else { return false };
        // Its log is requested, which does not exist without a node.
        let done = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
        pods.patch_status(&pod.name_any(), &PatchParams::default(), &done).await.is_ok()
    })
    .await;
    sleep(2 * POLL_INTERVAL).await;
    let record = facts().record(&owner, &subject(&owner.spec.model, None).unwrap()).unwrap();
    server.api::<MoERecord>().create(&PostParams::default(), &record).await.unwrap();
    eventually("routing", async || {
        run_pods(server).await;
        crate::tests::api_server::stage::is_routed(server).await
    })
    .await;
    meddle::<Service>(server).await;
    meddle::<NetworkPolicy>(server).await;
    meddle::<PodDisruptionBudget>(server).await;
    meddle::<MoERecord>(server).await;
    meddle::<MoEPlan>(server).await;
    meddle::<Pod>(server).await;
    // Twice, so that events are aggregated.
    for _ in 0..2 {
        let functions = pods.list(&ListParams::default().labels("remoe.dev/function")).await.unwrap().items;
        pods.delete(&functions[0].name_any(), &DeleteParams::default()).await.unwrap();
        eventually("another pod in its place", async || {
            run_pods(server).await;
            pods.list(&ListParams::default().labels("remoe.dev/function")).await.unwrap().items.len()
                == functions.len()
        })
        .await;
    }
    // More plans than are stored.
    let plans = server.api::<MoEPlan>();
    let plan = plans.list(&ListParams::default()).await.unwrap().items.remove(0);
    for number in 0..11 {
        let mut another = plan.clone();
        another.metadata.name = Some(format!("demo-{number:010}"));
        another.metadata.resource_version = None;
        another.spec.inputs = number.to_string();
        plans.create(&PostParams::default(), &another).await.unwrap();
    }
    // A dead gateway, another served name, fewer main functions, and a supplied profile.
    let demands = server.api::<MoEDemand>();
    let gone = json!({"status": {"gateways": [{"uid": "gone", "pod": "gone", "waiting": 0, "inFlight": 0,
        "acknowledged": 0, "lastActive": "2026-01-01T00:00:00.000000Z", "sequence": 1}]}});
    demands.patch_status("demo", &PatchParams::default(), &Patch::Merge(&gone)).await.unwrap();
    for change in [
        json!({"spec": {"servedName": "another", "scaling": {"min": 1}}}),
        json!({"spec": {"profile": {"configMapName": "mine"}}}),
    ] {
        owners.patch("demo", &PatchParams::default(), &Patch::Merge(&change)).await.unwrap();
        sleep(4 * POLL_INTERVAL).await;
        run_pods(server).await;
    }
}

#[test]
fn what_the_operator_asks_for_is_what_its_role_has() {
    with_server(async |server| {
        let proxy = Proxy::start().await;
        let elected = ["--leader-election", "--lease-seconds", "15", "--signer", "operator"];
        let further = [&elected[..], &["--gateway", "gateway.test.svc"]].concat();
        let operator = Operator::start_behind(&server, &proxy, Budget::unlimited(), &further).await;
        everything(&server).await;
        let unseen = |asked: &RequiredPermission| {
            UNSEEN.iter().any(|(group, resource, verb, _why)| {
                (asked.group.as_str(), asked.resource.as_str(), asked.verb.as_str())
                    == (group, resource, verb)
            })
        };
        let granted = granted();
        let mut superfluous = BTreeSet::new();
        for _ in 0..120 {
            let asked = proxy.asked();
            superfluous = granted.iter().filter(|it| !asked.contains(it) && !unseen(it)).cloned().collect();
            if superfluous.is_empty() {
                break;
            }
            run_pods(&server).await;
            sleep(POLL_INTERVAL).await;
        }
        let asked = proxy.asked();
        let missing: Vec<&RequiredPermission> = asked.difference(&granted).collect();
        assert!(missing.is_empty(), "the role lacks {missing:?}");
        assert!(superfluous.is_empty(), "nothing that the operator does takes {superfluous:?}");
        let gateways =
            stored_certificate(&server.api::<Secret>().get("remoe-gateway-identity").await.unwrap());
        let known = Credentials::from_pem(&gateways.certificate, &gateways.key, &gateways.trust_bundle);
        assert_eq!(known.unwrap().identity(), &gateway_identity(&server.namespace));
        operator.kill().await;
    });
}
