//! Stored hardware profiles for deployments that must not measure: no profiler starts and no new plan follows.

use crate::scene::Scene;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, PostParams};
use remoe_hardware::Profile;
use remoe_model::Checkpoint;
use remoe_test_support::binaries::workspace;
use serde_json::{Value, json};
use std::path::Path;

const NAME: &str = "figures";

/// Returns the field `profile` of a spec for the demo model's profile.
#[must_use]
pub fn reference() -> Value {
    reference_to(NAME)
}

/// Returns the field `profile` of a spec for the profile in the ConfigMap `name`.
#[must_use]
pub fn reference_to(name: &str) -> Value {
    json!({"configMapName": name})
}

/// Creates the ConfigMap of the demo model.
pub(crate) async fn create(scene: &Scene) {
    create_for(scene, NAME, &workspace().join("demo/model")).await;
}

/// Creates the ConfigMap `name` for the checkpoint in `folder`.
pub async fn create_for(scene: &Scene, name: &str, folder: &Path) {
    let checkpoint = Checkpoint::open(folder).expect("the model can be opened");
    let facts = checkpoint.inspect().expect("the model can be read");
    let text = serde_json::to_string(&Profile::prior(&facts, &facts.dtype)).expect("a profile is JSON");
    let map = ConfigMap {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        data: Some([("profile.json".to_owned(), text)].into()),
        ..ConfigMap::default()
    };
    let made = scene.api::<ConfigMap>().create(&PostParams::default(), &map).await;
    made.unwrap_or_else(|error| panic!("ConfigMap {name}: {error}"));
}
