//! Figures of the hardware for deployments that are not to measure: nothing starts beside them, and no other plan follows.

use crate::scene::Scene;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, PostParams};
use remoe_hardware::Profile;
use remoe_model::Checkpoint;
use remoe_test_support::binaries::workspace;
use serde_json::{Value, json};
use std::path::Path;

const NAME: &str = "figures";

/// Returns the value of `profile` in a spec that uses those of the demo model.
#[must_use]
pub fn reference() -> Value {
    reference_to(NAME)
}

/// Returns the value of `profile` in a spec that uses those of the ConfigMap `name`.
#[must_use]
pub fn reference_to(name: &str) -> Value {
    json!({"configMapName": name})
}

/// Makes the ConfigMap for the demo model.
pub(crate) async fn supply(scene: &Scene) {
    supply_of(scene, NAME, &workspace().join("demo/model")).await;
}

/// Makes the ConfigMap `name` for the checkpoint in `folder`.
pub async fn supply_of(scene: &Scene, name: &str, folder: &Path) {
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
