//! Several operators, of which one works.

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

async fn led_by(scene: &Scene, name: &str) -> LeaseSpec {
    until(SOON, &format!("{name} to lead"), async || {
        let lease = lease(scene).await;
        (lease.holder_identity.as_deref() == Some(name)).then_some(lease)
    })
    .await
}

async fn elected(scene: &Scene, alone: &Exclusive, name: &str) -> HostOperator {
    HostOperator::named(&scene.cluster, alone, name, &ELECTED).await
}

/// A claim with no model behind it: everything around pods is made, and a pod that waits.
async fn deploy(scene: &Scene, name: &str) -> Deployment {
    Deployment::apply(scene, name, &json!({"model": {"source": "pvc://none/demo"}})).await
}

async fn has_service(scene: &Scene, name: &str) {
    let services = scene.api::<Service>();
    until(SOON, &format!("service {name}"), async || services.get_opt(name).await.unwrap()).await;
}

/// The leader is killed, and the next one goes on: as soon as the Lease has ended, not before.
#[tokio::test(flavor = "multi_thread")]
async fn one_leads_and_another_takes_over() {
    Scene::run("one_leads_and_another_takes_over", async |scene| {
        let cluster = &scene.cluster;
        let alone = release::exclusive(cluster, 0).await;
        let start = audit::mark(cluster);
        let first = elected(scene, &alone, "first").await;
        led_by(scene, "first").await;
        let second = elected(scene, &alone, "second").await;
        deploy(scene, "one").await;
        has_service(scene, "one").await;
        let led = led_by(scene, "first").await;
        assert!(!first.writes(cluster, start).is_empty());
        assert!(second.writes(cluster, start).is_empty(), "{:?}", second.writes(cluster, start));

        drop(first);
        let taken = led_by(scene, "second").await;
        assert_eq!(taken.lease_transitions, led.lease_transitions.map(|count| count + 1));
        let lasted = |since: &LeaseSpec| since.renew_time.as_ref().expect("a renewed lease").0;
        let taken_at = taken.acquire_time.as_ref().expect("a lease that was taken").0;
        // The dead leader could have written until its Lease ended.
        let seconds = taken_at.duration_since(lasted(&led)).as_secs();
        assert!(seconds >= 2, "taken over {seconds} s after it was seen renewed");
        // It tries eight times in the two seconds of the Lease: another ten are for a host that is busy.
        assert!(seconds <= 12, "taken over only {seconds} s after it was seen renewed");
        deploy(scene, "two").await;
        has_service(scene, "two").await;
        assert!(!second.writes(cluster, start).is_empty());
    })
    .await;
}

/// One that stood still while another took over changes nothing when it goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_stood_still_writes_nothing_more() {
    Scene::run("a_leader_that_stood_still_writes_nothing_more", async |scene| {
        let cluster = &scene.cluster;
        let alone = release::exclusive(cluster, 0).await;
        let mut leader = elected(scene, &alone, "leader-0").await;
        led_by(scene, "leader-0").await;
        for round in 1..=4 {
            let name = format!("leader-{round}");
            let next = elected(scene, &alone, &name).await;
            // It stops in the course of work, elsewhere each time.
            let start = audit::mark(cluster);
            for number in 0..round {
                deploy(scene, &format!("d{round}-{number}")).await;
            }
            until(SOON, "some writes", async || {
                (leader.writes(cluster, start).len() >= 2 * round).then_some(())
            })
            .await;
            leader.process.signal(Signal::STOP);
            led_by(scene, &name).await;
            for number in 0..round {
                has_service(scene, &format!("d{round}-{number}-remote")).await;
            }
            // There is something to do that it has not seen.
            let gone = format!("d{round}-0");
            scene.api::<Service>().delete(&gone, &DeleteParams::default()).await.unwrap();
            has_service(scene, &gone).await;
            let thawed = audit::mark(cluster);
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

/// One of the chart's two operators works; when its pod is gone, the other one goes on.
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
        demo.condition("Planned", "True").await;
        let before = lease(scene).await.lease_transitions;
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        operators.delete(&leader.name_any(), &at_once).await.unwrap();
        let next = until(LONG, "another leader", async || {
            let lease = lease(scene).await;
            lease.holder_identity.filter(|_| lease.lease_transitions > before)
        })
        .await;
        assert_ne!(next, leader.name_any());
        demo.settled().await;
        demo.delete().await;
    })
    .await;
}
