//! Figures of the hardware for deployments of the demo model that are not to measure: nothing starts beside
//! them, and no other plan follows.

use crate::scene::Scene;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, PostParams};
use remoe_model::Checkpoint;
use remoe_profile::Profile;
use remoe_test_support::binaries::workspace;
use serde_json::{Value, json};

const NAME: &str = "figures";

/// What a spec says to use them, as `profile`.
#[must_use]
pub fn reference() -> Value {
    json!({"configMapName": NAME})
}

/// Makes their ConfigMap.
pub(crate) async fn supply(scene: &Scene) {
    let checkpoint = Checkpoint::open(workspace().join("demo/model")).expect("the demo model can be opened");
    let facts = checkpoint.inspect().expect("the demo model can be read");
    let text = serde_json::to_string(&Profile::prior(&facts, &facts.dtype)).expect("a profile is JSON");
    let map = ConfigMap {
        metadata: ObjectMeta { name: Some(NAME.to_owned()), ..ObjectMeta::default() },
        data: Some([("profile.json".to_owned(), text)].into()),
        ..ConfigMap::default()
    };
    let made = scene.api::<ConfigMap>().create(&PostParams::default(), &map).await;
    made.unwrap_or_else(|error| panic!("ConfigMap {NAME}: {error}"));
}
