//! Deletes a deployment, or its namespace, while the operator works on it.

use crate::tests::api_server::crash::stopped;
use crate::tests::api_server::stage::{Budget, Operator, POLL_INTERVAL, deploy, quiet, run_pods, world};
use crate::tests::api_server::{Server, eventually, with_server, with_servers};
use kube::api::DeleteParams;
use remoe_api::MoEDeployment;
use tokio::time::sleep;

/// Number of writes before the deletion, way of deletion, and whether the operator dies as well.
#[derive(Clone, Debug)]
struct DeletionCase {
    writes: u64,
    deletion: DeleteParams,
    killed: bool,
}

/// Reconciles in which nothing may be recreated.
const LOOKS: u32 = 8;

#[test]
fn deleted_after_any_write_a_deployment_leaves_nothing() {
    let mut writes = 0;
    with_server(async |server| {
        deploy(&server).await;
        let operator = Operator::start(&server, Budget::unlimited()).await;
        writes = quiet(&server, &operator).await;
        operator.kill().await;
    });
    let cases = (1..=writes).flat_map(|writes| {
        let deletions = [DeleteParams::foreground(), DeleteParams::background()];
        let each =
            deletions.into_iter().flat_map(|deletion| [true, false].map(|killed| (deletion.clone(), killed)));
        each.map(move |(deletion, killed)| DeletionCase { writes, deletion, killed })
    });
    with_servers(cases, async |server, case| {
        deploy(&server).await;
        let writes = usize::try_from(case.writes).unwrap();
        let mut operator = Operator::start(&server, Budget::of(writes)).await;
        stopped(&server, &operator).await;
        server.api::<MoEDeployment>().delete("demo", &case.deletion).await.unwrap();
        if case.killed {
            operator.kill().await;
            operator = Operator::start(&server, Budget::unlimited()).await;
        } else {
            // It continues with what it has read.
            operator.budget.open();
        }
        nothing_is_left(&server, &case).await;
        operator.kill().await;
    });
}

async fn nothing_is_left(server: &Server, case: &DeletionCase) {
    let mut looks = 0;
    let mut left = Vec::new();
    let gone = eventually("nothing is left", async || {
        sleep(POLL_INTERVAL).await;
        left = world(server).await;
        let owner = server.api::<MoEDeployment>().get_opt("demo").await.unwrap();
        looks = if left.is_empty() && owner.is_none() { looks + 1 } else { 0 };
        looks >= LOOKS
    });
    gone.await;
    assert!(left.is_empty(), "{case:?}: {left:?}");
}

#[test]
fn a_namespace_that_ends_is_left_alone() {
    with_server(async |server| {
        deploy(&server).await;
        let operator = Operator::start(&server, Budget::unlimited()).await;
        quiet(&server, &operator).await;
        let before = operator.budget.answers().len();
        server.namespaces().delete(&server.namespace, &DeleteParams::default()).await.unwrap();
        eventually("the end of the namespace", async || {
            run_pods(&server).await;
            sleep(POLL_INTERVAL).await;
            server.namespaces().get_opt(&server.namespace).await.unwrap().is_none()
        })
        .await;
        let answers = operator.budget.answers().split_off(before);
        let refused = answers.iter().position(|answer| answer.code == http::StatusCode::FORBIDDEN);
        // Once the API refuses new objects, it creates nothing and reports nothing. Its very last calls fail because
        // the namespace is gone.
        let later_answers = &answers[refused.unwrap_or(answers.len())..];
        let nothing = [http::StatusCode::FORBIDDEN, http::StatusCode::NOT_FOUND];
        let others = later_answers.iter().filter(|answer| !nothing.contains(&answer.code));
        let others: Vec<_> = others.filter(|answer| answer.method != http::Method::DELETE).collect();
        assert!(others.is_empty(), "{others:?}");
        assert!(!later_answers.iter().any(|answer| answer.path.ends_with("/status")), "{later_answers:?}");
        assert!(!later_answers.iter().any(|answer| answer.path.contains("events")), "{later_answers:?}");
        operator.kill().await;
    });
}
