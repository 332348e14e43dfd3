//! Pods that tests create and observe.

use crate::scene::Scene;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{ListParams, LogParams, PostParams};
use remoe_test_support::deadline::{LONG, until};
use serde_json::{Value, json};

/// Label selector of the pods of functions.
pub const FUNCTIONS: &str = "remoe.dev/function";

/// Returns a pod with one container that meets the restricted profile, with the claim `models` at /models.
/// `container` has its image, command and probes.
#[must_use]
pub fn restricted(name: &str, container: &Value) -> Pod {
    let mut merged = json!({
        "name": "main",
        "imagePullPolicy": "IfNotPresent",
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": true}],
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
        },
    });
    for (key, value) in container.as_object().expect("a container is an object") {
        merged[key] = value.clone();
    }
    let pod = json!({
        "metadata": {"name": name},
        "spec": {
            "automountServiceAccountToken": false,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [merged],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": true}}],
        },
    });
    serde_json::from_value(pod).expect("the pod is well formed")
}

/// Creates `pod`.
pub async fn create(scene: &Scene, pod: &Pod) {
    let created = scene.api::<Pod>().create(&PostParams::default(), pod).await;
    created.unwrap_or_else(|error| panic!("pod {}: {error}", pod.name_any()));
}

/// Waits until the pod is ready.
pub async fn wait_until_ready(scene: &Scene, name: &str) -> Pod {
    let what = format!("pod {name} to be ready");
    until(LONG, &what, async || get(scene, name).await.filter(is_ready)).await
}

/// Waits until the pod has completed and returns its log.
pub async fn wait_until_completed(scene: &Scene, name: &str) -> String {
    let what = format!("pod {name} to finish");
    let phase = until(LONG, &what, async || {
        let phase = get(scene, name).await?.status?.phase?;
        matches!(phase.as_str(), "Succeeded" | "Failed").then_some(phase)
    })
    .await;
    let logs = scene.api::<Pod>().logs(name, &LogParams::default()).await.expect("the pod's log can be read");
    assert_eq!(phase, "Succeeded", "pod {name}: {logs}");
    logs
}

/// Returns the pods of `selector` that are not being deleted.
pub async fn list(scene: &Scene, selector: &str) -> Vec<Pod> {
    let pods = scene.api::<Pod>().list(&ListParams::default().labels(selector)).await;
    let pods = pods.expect("pods can be listed");
    pods.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect()
}

/// Returns the process id of the pod's container on this host: the cluster's nodes are processes here.
#[must_use]
pub fn process_id(pod: &Pod) -> Option<u32> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let id = statuses.first()?.container_id.as_ref()?.strip_prefix("containerd://")?;
    let processes = std::fs::read_dir("/proc").expect("/proc can be read").flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // The first process of the container; its children have larger ids.
    let inside = numbers.filter(|number| {
        std::fs::read_to_string(format!("/proc/{number}/cgroup")).is_ok_and(|groups| groups.contains(id))
    });
    inside.min()
}

/// Returns the number of restarts of its containers.
#[must_use]
pub fn restart_count(pod: &Pod) -> i32 {
    let statuses = pod.status.iter().filter_map(|status| status.container_statuses.as_ref()).flatten();
    statuses.map(|status| status.restart_count).sum()
}

/// Returns true if the pod is ready.
#[must_use]
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

async fn get(scene: &Scene, name: &str) -> Option<Pod> {
    scene.api::<Pod>().get_opt(name).await.expect("pods can be read")
}
