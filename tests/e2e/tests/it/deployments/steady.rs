//! Nothing is written about a deployment that is as it is to be.

use crate::deployments::remote;
use remoe_e2e::deployment::Deployment;
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, claim, release};
use serde_json::json;
use std::time::Duration;
use tokio::time::sleep;

/// Longer than anything that the operator looks at again by itself.
const QUIET: Duration = Duration::from_secs(60);

/// Requests of a look: six lists, two Secrets, the figures that the spec names, and what gateways are told (docs/kubernetes.md).
const OF_A_LOOK: usize = 10;

/// An event that is not published by then is given up.
const LAST_EVENTS: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn a_settled_deployment_costs_no_write() {
    Scene::run("a_settled_deployment_costs_no_write", async |scene| {
        let cluster = &scene.cluster;
        let _operator = release::shared(cluster).await;
        claim::with_demo_model(scene, "models").await;
        let mut spec = remote();
        spec["replicas"] = json!(2);
        let demo = Deployment::apply(scene, "demo", &spec).await;
        demo.settled().await;
        // Events of the run that said so come after the status.
        sleep(LAST_EVENTS).await;
        let settled = audit::mark(cluster);
        // A look at it changes nothing either.
        demo.patch(&json!({"metadata": {"annotations": {"test/look": "1"}}})).await;
        sleep(QUIET).await;
        let asked: Vec<_> = audit::since(cluster, settled)
            .into_iter()
            .filter(|each| each.user() == release::ACCOUNT && each.namespace() == scene.namespace)
            .collect();
        // Watches are written down when they end.
        let read: Vec<_> = asked.iter().filter(|each| each.verb != "watch").collect();
        let looks = read.iter().filter(|each| each.verb == "list" && each.resource() == "pods").count();
        println!("{looks} looks and {} requests in {QUIET:?}", read.len());
        assert!(looks > 0, "it was looked at: {asked:?}");
        // One may have begun before, or not be over.
        assert!(read.len().abs_diff(looks * OF_A_LOOK) < OF_A_LOOK, "{read:?}");
        let writes: Vec<_> = asked.iter().filter(|each| each.writes()).collect();
        assert!(writes.is_empty(), "{writes:?}");
    })
    .await;
}
