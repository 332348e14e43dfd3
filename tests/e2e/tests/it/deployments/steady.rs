//! The operator writes nothing for a deployment in its desired state.

use crate::deployments::remote;
use remoe_e2e::deployment::Deployment;
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, claim, release};
use serde_json::json;
use std::time::Duration;
use tokio::time::sleep;

/// Longer than the operator's own reconcile intervals.
const QUIET: Duration = Duration::from_secs(60);

/// Requests per reconcile: six lists, two Secrets, the profile of the spec, and the demand of gateways
/// (docs/kubernetes.md).
const OF_A_LOOK: usize = 10;

/// Timeout of publishing an event.
const LAST_EVENTS: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn settled_deployment_causes_no_write() {
    Scene::run("settled_deployment_causes_no_write", async |scene| {
        let cluster = &scene.cluster;
        let _operator = release::shared(cluster).await;
        claim::with_demo_model(scene, "models").await;
        let mut spec = remote();
        spec["replicas"] = json!(2);
        let demo = Deployment::apply(scene, "demo", &spec).await;
        demo.wait_until_settled().await;
        // Events of a reconcile are published after the status.
        sleep(LAST_EVENTS).await;
        let settled = audit::position(cluster);
        // A reconcile changes nothing either.
        demo.patch(&json!({"metadata": {"annotations": {"test/look": "1"}}})).await;
        sleep(QUIET).await;
        let asked: Vec<_> = audit::entries_since(cluster, settled)
            .into_iter()
            .filter(|each| each.user() == release::ACCOUNT && each.namespace() == scene.namespace)
            .collect();
        // Watches are logged when they end.
        let read: Vec<_> = asked.iter().filter(|each| each.verb != "watch").collect();
        let looks = read.iter().filter(|each| each.verb == "list" && each.resource() == "pods").count();
        println!("{looks} looks and {} requests in {QUIET:?}", read.len());
        assert!(looks > 0, "it was looked at: {asked:?}");
        // One reconcile may have started before or not be complete.
        assert!(read.len().abs_diff(looks * OF_A_LOOK) < OF_A_LOOK, "{read:?}");
        let writes: Vec<_> = asked.iter().filter(|each| each.writes()).collect();
        assert!(writes.is_empty(), "{writes:?}");
    })
    .await;
}
