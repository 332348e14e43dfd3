//! A small model, deployments of it and their plans.

use remoe_operator::cluster::api::{MoEDeployment, MoEPlanSpec, ProfileSource};
use remoe_operator::cluster::build::{Revision, Surroundings, revision};
use remoe_operator::cluster::digest::digest;
use remoe_operator::cluster::facts::ModelFacts;
use remoe_operator::cluster::planning::{KnownProfile, Planning};
use remoe_profile::Profile;
use serde_json::{Value, json};

pub fn around() -> Surroundings {
    Surroundings {
        main_image: "main:1".to_owned(),
        remote_image: "remote:1".to_owned(),
        pull_policy: "Never".to_owned(),
        operator_namespace: "remoe-system".to_owned(),
        metrics_namespace: "monitoring".to_owned(),
    }
}

/// A deployment with `spec` merged over one that has all experts remote, as the API would return it.
pub fn deployment(spec: Value) -> MoEDeployment {
    let mut object = json!({
        "apiVersion": "remoe.dev/v1alpha1",
        "kind": "MoEDeployment",
        "metadata": {"name": "demo", "namespace": "test", "uid": "uid-1", "generation": 1},
        "spec": {
            "model": {"source": "pvc://models/demo"},
            "main": {"memoryMB": {"min": 200, "max": 4000, "step": 100}},
            "remoteExperts": {"mode": "Always", "memoryMB": {"min": 200, "max": 1000, "step": 100}},
        },
    });
    merge(&mut object["spec"], spec);
    serde_json::from_value(object).unwrap()
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

/// Four layers, of which the last three have eight experts.
pub fn facts() -> ModelFacts {
    serde_json::from_value(json!({
        "fingerprint": "f00d", "family": "mixtral", "dtype": "bfloat16", "layers": 4,
        "moe_layers": [1, 2, 3], "experts": 8, "top_k": 2, "shared_experts": 0, "hidden_size": 128,
        "vocab_size": 4096, "context_length": 1024, "expert_bytes": 98304,
        "non_expert_layer_bytes": [102912, 102912, 102912, 102912], "outside_bytes": 1048832,
        "kv_bytes_per_token": 1536, "token_bytes": 256, "total_bytes": 4000000,
    }))
    .unwrap()
}

pub fn prior() -> KnownProfile {
    KnownProfile { profile: Profile::prior(&facts().inspection, "bfloat16"), source: ProfileSource::Prior }
}

pub fn plan(owner: &MoEDeployment) -> MoEPlanSpec {
    Planning::new("demo", &owner.spec, &facts(), &prior()).unwrap().solve(None).unwrap()
}

/// The functions of a plan.
pub fn built(owner: &MoEDeployment, plan: &MoEPlanSpec) -> Revision {
    revision(owner, &digest(plan).unwrap(), plan, &around()).unwrap()
}
