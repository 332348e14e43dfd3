//! Leader election among several operators.

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use remoe_e2e::deployment::Deployment;
use remoe_e2e::host_operator::HostOperator;
use remoe_e2e::release::{self, Exclusive};
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, claim, figures};
use remoe_test_support::deadline::{LONG, SOON, until};
use rustix::process::Signal;
use serde_json::json;

const LEASE: &str = "remoe-operator";
const ELECTED: [&str; 2] = ["--leader-election", "--lease-seconds=2"];

fn leases(scene: &Scene) -> Api<Lease> {
    Api::namespaced(scene.cluster.client.clone(), release::NAMESPACE)
}

async fn lease(scene: &Scene) -> LeaseSpec {
    let lease = leases(scene).get_opt(LEASE).await.expect("leases can be read");
    lease.and_then(|lease| lease.spec).unwrap_or_default()
}

async fn wait_for_leader(scene: &Scene, name: &str) -> LeaseSpec {
    until(SOON, &format!("{name} to lead"), async || {
        let lease = lease(scene).await;
        (lease.holder_identity.as_deref() == Some(name)).then_some(lease)
    })
    .await
}

async fn start_leader(scene: &Scene, alone: &Exclusive, name: &str) -> HostOperator {
    HostOperator::start_named(&scene.cluster, alone, name, &ELECTED).await
}

/// Deployment of a claim without a model: all objects are created, and a pod that waits.
async fn deploy(scene: &Scene, name: &str) -> Deployment {
    Deployment::apply(scene, name, &json!({"model": {"source": "pvc://none/demo"}})).await
}

async fn wait_for_service(scene: &Scene, name: &str) {
    let services = scene.api::<Service>();
    until(SOON, &format!("service {name}"), async || services.get_opt(name).await.unwrap()).await;
}

/// After the leader is killed, the next one takes over when the Lease expires, not before.
#[tokio::test(flavor = "multi_thread")]
async fn leader_dies_and_another_takes_over() {
    Scene::run("leader_dies_and_another_takes_over", async |scene| {
        let cluster = &scene.cluster;
        let alone = release::exclusive(cluster, 0).await;
        let start = audit::position(cluster);
        let first = start_leader(scene, &alone, "first").await;
        wait_for_leader(scene, "first").await;
        let second = start_leader(scene, &alone, "second").await;
        deploy(scene, "one").await;
        wait_for_service(scene, "one").await;
        let led = wait_for_leader(scene, "first").await;
        assert!(!first.writes(cluster, start).is_empty());
        assert!(second.writes(cluster, start).is_empty(), "{:?}", second.writes(cluster, start));

        drop(first);
        let taken = wait_for_leader(scene, "second").await;
        assert_eq!(taken.lease_transitions, led.lease_transitions.map(|count| count + 1));
        let lasted = |since: &LeaseSpec| since.renew_time.as_ref().expect("a renewed lease").0;
        let taken_at = taken.acquire_time.as_ref().expect("a lease that was taken").0;
        // The dead leader could have written until its Lease expired.
        let seconds = taken_at.duration_since(lasted(&led)).as_secs();
        assert!(seconds >= 2, "taken over {seconds} s after it was seen renewed");
        // It retries eight times within the two seconds of the Lease; ten more are a margin for a busy host.
        assert!(seconds <= 12, "taken over only {seconds} s after it was seen renewed");
        deploy(scene, "two").await;
        wait_for_service(scene, "two").await;
        assert!(!second.writes(cluster, start).is_empty());
    })
    .await;
}

/// A paused leader that lost its Lease writes nothing when it resumes.
#[tokio::test(flavor = "multi_thread")]
async fn paused_leader_without_lease_writes_nothing() {
    Scene::run("paused_leader_without_lease_writes_nothing", async |scene| {
        let cluster = &scene.cluster;
        let alone = release::exclusive(cluster, 0).await;
        let mut leader = start_leader(scene, &alone, "leader-0").await;
        wait_for_leader(scene, "leader-0").await;
        for round in 1..=4 {
            let name = format!("leader-{round}");
            let next = start_leader(scene, &alone, &name).await;
            // It is paused during work, at a different point each time.
            let start = audit::position(cluster);
            for number in 0..round {
                deploy(scene, &format!("d{round}-{number}")).await;
            }
            until(SOON, "some writes", async || {
                (leader.writes(cluster, start).len() >= 2 * round).then_some(())
            })
            .await;
            leader.process.signal(Signal::STOP);
            wait_for_leader(scene, &name).await;
            for number in 0..round {
                wait_for_service(scene, &format!("d{round}-{number}-remote")).await;
            }
            // There is a change that it has not seen.
            let gone = format!("d{round}-0");
            scene.api::<Service>().delete(&gone, &DeleteParams::default()).await.unwrap();
            wait_for_service(scene, &gone).await;
            let thawed = audit::position(cluster);
            leader.process.signal(Signal::CONT);
            let end = leader.process.end(SOON).await;
            assert!(!end.success(), "one that lost the lease ends with a failure");
            let late = leader.writes(cluster, thawed);
            assert!(late.is_empty(), "round {round}: {late:?}");
            leader = next;
        }
    })
    .await;
}

/// One of the chart's two operators leads. When its pod is deleted, the other takes over.
#[tokio::test(flavor = "multi_thread")]
async fn two_operators_of_the_chart_share_one_lease() {
    Scene::run("two_operators_of_the_chart_share_one_lease", async |scene| {
        let cluster = &scene.cluster;
        let _alone = release::exclusive(cluster, 2).await;
        claim::with_demo_model(scene, "models").await;
        let operators = Api::<Pod>::namespaced(cluster.client.clone(), release::NAMESPACE);
        let selector = ListParams::default().labels("app.kubernetes.io/component=operator");
        let pods = operators.list(&selector).await.unwrap().items;
        let pods: Vec<_> = pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect();
        assert_eq!(pods.len(), 2, "{:?}", pods.iter().map(ResourceExt::name_any).collect::<Vec<_>>());
        let leading =
            |holder: Option<String>| pods.iter().find(|pod| Some(pod.name_any()) == holder).cloned();
        let leader = until(LONG, "a leader", async || leading(lease(scene).await.holder_identity)).await;
        let demo = Deployment::apply(
            scene,
            "demo",
            &json!({
                "model": {"source": "pvc://models/demo"},
                "profile": figures::reference(),
                "main": {"memoryMB": {"min": 200, "max": 4000}},
                "remoteExperts": {"mode": "Never"},
            }),
        )
        .await;
        demo.wait_for_condition("Planned", "True").await;
        let before = lease(scene).await.lease_transitions;
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        operators.delete(&leader.name_any(), &at_once).await.unwrap();
        let next = until(LONG, "another leader", async || {
            let lease = lease(scene).await;
            lease.holder_identity.filter(|_| lease.lease_transitions > before)
        })
        .await;
        assert_ne!(next, leader.name_any());
        demo.wait_until_settled().await;
        demo.delete().await;
    })
    .await;
}
