//! PersistentVolumeClaims with models.

use crate::scene::Scene;
use crate::tool;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use remoe_test_support::binaries::workspace;
use remoe_test_support::deadline::{SOON, until};
use std::fs;
use std::path::PathBuf;

/// Creates a claim `name` with a copy of the demo model in its folder `demo`, `pvc://NAME/demo`, and waits until it
/// is bound. Returns its folder on this host.
pub async fn with_demo_model(scene: &Scene, name: &str) -> PathBuf {
    let model = format!("demo={}", workspace().join("demo/model").display());
    create(scene, name, &["--put", &model]).await
}

/// Creates a bound claim with `contents` (`tests/cluster/cluster.py volume --help`). Every user of a pod may write to
/// it. It is removed with the scene.
pub async fn create(scene: &Scene, name: &str, contents: &[&str]) -> PathBuf {
    let script = workspace().join("tests/cluster/cluster.py");
    let mut arguments =
        vec!["volume", "--name", &scene.cluster.name, "--namespace", &scene.namespace, "--claim", name];
    arguments.extend(contents);
    let folder = tool::run(&script, &scene.cluster.kubeconfig, &arguments).await;
    let claims = scene.api::<PersistentVolumeClaim>();
    until(SOON, "a bound claim", async || {
        let claim = claims.get(name).await.expect("the claim is there");
        claim.status.and_then(|status| status.phase).filter(|phase| phase == "Bound")
    })
    .await;
    folder.trim().into()
}

/// Removes the volumes of all claims in the scene with their contents.
pub async fn remove_volumes(scene: &Scene) {
    let volumes = Api::<PersistentVolume>::all(scene.cluster.client.clone());
    let all = volumes.list(&ListParams::default()).await.expect("volumes can be listed");
    for volume in all {
        let Some(spec) = &volume.spec else { continue };
        let claimed = spec.claim_ref.as_ref().and_then(|claim| claim.namespace.as_deref());
        let (true, Some(host)) = (claimed == Some(&scene.namespace), &spec.host_path) else { continue };
        let deleted = volumes.delete(&volume.name_any(), &DeleteParams::default()).await;
        deleted.unwrap_or_else(|error| panic!("volume {}: {error}", volume.name_any()));
        fs::remove_dir_all(&host.path).unwrap_or_else(|error| panic!("{}: {error}", host.path));
    }
}
