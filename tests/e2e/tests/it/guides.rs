//! Commands of README.md and of the guides that need a cluster, run as written.

use remoe_e2e::cluster::Cluster;
use remoe_e2e::{release, tool};
use remoe_test_support::binaries::workspace;
use remoe_test_support::guide::{Block, blocks, run_in_cluster, script};

/// Namespace of the guides' deployments.
const NAMESPACE: &str = "default";

/// Runs the blocks of `page` that need a cluster and that `chosen` accepts.
async fn run_page(cluster: &Cluster, page: &str, chosen: impl Fn(&Block) -> bool) {
    let text = std::fs::read_to_string(workspace().join(page)).unwrap();
    // Commands after a cluster's block on the page, such as `curl`, use that cluster.
    let first = blocks(&text).into_iter().find(Block::is_for_cluster).map_or(usize::MAX, |block| block.line);
    let taken = |block: &Block| {
        let asks = block.text.starts_with("curl") && block.line > first;
        (block.is_for_cluster() || asks) && chosen(block)
    };
    let script = script(&text, taken);
    assert!(script.contains("=== line"), "{page}: no command runs");
    let tools = cluster.tool("kubectl");
    run_in_cluster(page, &script, tools.parent().unwrap(), &cluster.kubeconfig).await;
}

/// Removes the release and all deployments.
async fn clean(cluster: &Cluster) {
    let _none = tool::attempt(
        &cluster.tool("kubectl"),
        &cluster.kubeconfig,
        &["delete", "moed", "--all", "--namespace", NAMESPACE, "--timeout=2m"],
    )
    .await;
    let _none = tool::attempt(
        &cluster.tool("helm"),
        &cluster.kubeconfig,
        &["uninstall", release::NAME, "--namespace", release::NAMESPACE, "--wait"],
    )
    .await;
}

/// A single test, because the pages share the release, the claim and the deployment `demo`.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_commands_of_guides_run() {
    let Some(cluster) = Cluster::find("cluster_commands_of_guides_run").await else { return };
    let on_one_host = |block: &Block| block.text.contains("cluster.py");
    clean(&cluster).await;
    // This page creates the claim with the weights.
    run_page(&cluster, "docs/guides/first-cluster.md", on_one_host).await;
    clean(&cluster).await;
    run_page(&cluster, "README.md", |_| true).await;
    clean(&cluster).await;
    run_page(&cluster, "docs/guides/first-cluster.md", |block| !on_one_host(block)).await;
    for page in ["docs/kubernetes.md", "docs/guides/scale-to-zero.md", "docs/guides/identity-and-keys.md"] {
        run_page(&cluster, page, |_| true).await;
    }
    clean(&cluster).await;
}
