//! Deployments on a cluster with one operator, in all situations of users. The tests run concurrently, each in its
//! own namespace.

mod advisory;
mod gpu;
mod groups;
mod healing;
mod objects;
mod steady;
mod transitions;
mod troubles;

use remoe_e2e::figures;
use serde_json::{Value, json};

/// Returns the spec of the demo model in one main function.
pub(crate) fn local() -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "profile": figures::reference(),
        "main": {"memoryMB": {"min": 200, "max": 4000}},
        "remoteExperts": {"mode": "Never"},
    })
}

/// Returns the spec of the demo model with remote experts.
pub(crate) fn remote() -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "profile": figures::reference(),
        "main": {"memoryMB": {"min": 200, "max": 4000}},
        "remoteExperts": {"mode": "Always", "memoryMB": {"min": 100, "max": 1000}, "maxReplicas": 1},
    })
}
