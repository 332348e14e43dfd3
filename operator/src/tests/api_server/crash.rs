//! Kills the operator after every write; another one continues.

use crate::tests::api_server::stage::{
    Budget, Operator, POLL_INTERVAL, deploy, is_routed, quiet, run_pods, status_of, world,
};
use crate::tests::api_server::{Server, eventually, with_server, with_servers};
use kube::api::{Patch, PatchParams};
use remoe_api::MoEDeployment;
use serde_json::json;
use tokio::time::sleep;

#[test]
fn killed_after_any_write_the_operator_ends_at_the_same_state() {
    let mut reference = None;
    with_server(async |server| {
        deploy(&server).await;
        let operator = Operator::start(&server, Budget::unlimited()).await;
        let writes = quiet(&server, &operator).await;
        reference = Some((world(&server).await, status_of(&server).await, writes));
        operator.kill().await;
    });
    let Some((objects, status, writes)) = reference else { return };
    assert!(objects.len() > 10, "{objects:?}");
    with_servers(1..writes, async |server, crash| {
        deploy(&server).await;
        let operator = Operator::start(&server, Budget::of(usize::try_from(crash).unwrap())).await;
        stopped(&server, &operator).await;
        operator.kill().await;
        let operator = Operator::start(&server, Budget::unlimited()).await;
        quiet(&server, &operator).await;
        assert_eq!(world(&server).await, objects, "after {crash} writes");
        assert_eq!(status_of(&server).await["plan"], status["plan"], "after {crash} writes");
        operator.kill().await;
    });
}

/// Waits until the operator's next write is held back, or until there is none. The number of status writes differs
/// between runs.
pub async fn stopped(server: &Server, operator: &Operator) {
    let mut quiet = 0;
    let mut seen = 0;
    eventually("the last write", async || {
        run_pods(server).await;
        sleep(POLL_INTERVAL / 5).await;
        let made = operator.budget.made();
        quiet = if made == seen { quiet + 1 } else { 0 };
        seen = made;
        operator.budget.is_spent() || (quiet >= 60 && is_routed(server).await)
    })
    .await;
}

#[test]
fn a_settled_deployment_is_not_written() {
    with_server(async |server| {
        deploy(&server).await;
        let operator = Operator::start(&server, Budget::unlimited()).await;
        let before = quiet(&server, &operator).await;
        // A change of a foreign object triggers a reconcile.
        let owners = server.api::<MoEDeployment>();
        for reconcile in 0..3 {
            let note = json!({"metadata": {"annotations": {"test/look": reconcile.to_string()}}});
            owners.patch("demo", &PatchParams::default(), &Patch::Merge(&note)).await.unwrap();
            sleep(2 * POLL_INTERVAL).await;
        }
        assert_eq!(operator.budget.made(), before);
        operator.kill().await;
    });
}
