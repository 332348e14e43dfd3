//! The operator's account, and the operator as a process that can be killed.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use remoe_e2e::host_operator::{HostOperator, kubeconfig};
use remoe_e2e::scene::Scene;
use remoe_e2e::{audit, release, tool};

/// What the chart's role does not have is denied, and tests that look for denials see it.
#[tokio::test(flavor = "multi_thread")]
async fn the_account_reads_no_secret_and_no_claim() {
    Scene::run("the_account_reads_no_secret_and_no_claim", async |scene| {
        let cluster = &scene.cluster;
        let _alone = release::exclusive(cluster, 0).await;
        let as_operator = kubeconfig(cluster, None).await;
        let kubectl = cluster.tool("kubectl");
        let start = audit::mark(cluster);
        for kind in ["secrets", "persistentvolumeclaims", "nodes"] {
            let arguments = ["get", kind, "--namespace", &scene.namespace];
            let refused = tool::attempt(&kubectl, as_operator.path(), &arguments).await.expect_err(kind);
            assert!(refused.contains("forbidden"), "{refused}");
        }
        let allowed = ["get", "pods,configmaps,moedeployments", "--namespace", &scene.namespace];
        tool::run(&kubectl, as_operator.path(), &allowed).await;
        let asked = audit::since(cluster, start).into_iter().filter(|each| each.user() == release::ACCOUNT);
        let (denied, granted): (Vec<_>, Vec<_>) = asked.partition(audit::Request::denied);
        let kinds = |requests: &[audit::Request]| -> Vec<String> {
            requests
                .iter()
                .map(audit::Request::resource)
                .filter(|kind| !kind.is_empty())
                .map(str::to_owned)
                .collect()
        };
        assert_eq!(kinds(&denied), ["secrets", "persistentvolumeclaims", "nodes"]);
        for kind in ["pods", "configmaps", "moedeployments"] {
            assert!(kinds(&granted).iter().any(|each| each == kind), "{kind}: {granted:?}");
        }
    })
    .await;
}

/// Killed at any time, it starts again beside what it left.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_runs_beside_the_cluster() {
    Scene::run("an_operator_runs_beside_the_cluster", async |scene| {
        let cluster = &scene.cluster;
        let alone = release::exclusive(cluster, 0).await;
        let start = audit::mark(cluster);
        for _life in 0..2 {
            let operator = HostOperator::start(cluster, &alone, None).await;
            drop(operator);
        }
        let asked = audit::since(cluster, start);
        assert!(
            asked.iter().any(|each| each.user() == release::ACCOUNT && each.resource() == "moedeployments")
        );
    })
    .await;
}
