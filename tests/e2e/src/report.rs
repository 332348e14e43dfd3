//! Report of a namespace's state for failed tests.

use crate::release;
use crate::scene::Scene;
use crate::tool;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, ListParams};

/// Number of lines of each log.
const LOG_LINES: &str = "--tail=40";

/// Prints the objects, events and last log lines of the scene's namespace and of the operator's.
///
/// Prints read errors and continues, so that the test's own failure stays visible.
pub async fn print(scene: &Scene) {
    let own = scene.namespace.as_str();
    show(scene, &["get", "all,moerecords,networkpolicies,poddisruptionbudgets", "--namespace", own]).await;
    show(scene, &["get", "moe", "--output", "yaml", "--namespace", own]).await;
    show(scene, &["get", "events.v1.events.k8s.io", "--namespace", own]).await;
    for namespace in [own, release::NAMESPACE] {
        logs(scene, namespace).await;
    }
}

async fn logs(scene: &Scene, namespace: &str) {
    let pods = Api::<Pod>::namespaced(scene.cluster.client.clone(), namespace);
    match pods.list(&ListParams::default()).await {
        Ok(pods) => {
            for pod in pods {
                let name = pod.name_any();
                show(scene, &["describe", "pod", &name, "--namespace", namespace]).await;
                show(scene, &["logs", &name, "--namespace", namespace, "--all-containers", LOG_LINES]).await;
                if restarts(&pod) > 0 {
                    let previous = ["logs", &name, "--namespace", namespace, "--previous", LOG_LINES];
                    show(scene, &previous).await;
                }
            }
        }
        Err(error) => eprintln!("pods of {namespace}: {error}"),
    }
}

fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.iter().filter_map(|status| status.container_statuses.as_ref()).flatten();
    statuses.map(|status| status.restart_count).sum()
}

async fn show(scene: &Scene, arguments: &[&str]) {
    let cluster = &scene.cluster;
    eprintln!("--- kubectl {}", arguments.join(" "));
    match tool::attempt(&cluster.tool("kubectl"), &cluster.kubeconfig, arguments).await {
        Ok(text) | Err(text) => eprintln!("{text}"),
    }
}
