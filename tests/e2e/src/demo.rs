//! Deployment of the demo model with remote functions, for tests of running deployments.

use crate::deployment::Deployment;
use crate::scene::Scene;
use crate::{claim, figures};
use serde_json::{Value, json};

/// Returns the spec of the demo model in the claim `models`, with the additional fields in `more`.
#[must_use]
pub fn spec(more: &Value) -> Value {
    let mut spec = json!({
        "model": {"source": "pvc://models/demo"},
        "profile": figures::reference(),
        "main": {"memoryMB": {"min": 200, "max": 4000}},
        "remoteExperts": {"mode": "Always", "memoryMB": {"min": 100, "max": 1000}, "maxReplicas": 1},
    });
    for (field, value) in more.as_object().into_iter().flatten() {
        spec[field] = value.clone();
    }
    spec
}

/// Creates the claim and the MoEDeployment `demo`, and waits until it is ready.
pub async fn deploy(scene: &Scene, more: &Value) -> Deployment {
    claim::with_demo_model(scene, "models").await;
    let demo = Deployment::apply(scene, "demo", &spec(more)).await;
    demo.wait_for_condition("Ready", "True").await;
    demo
}
