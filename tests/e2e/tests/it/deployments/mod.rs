//! Deployments on a cluster with one operator, in every situation that their users bring them into. The
//! tests run beside each other, each in a namespace of its own.

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

/// The demo model in one main function.
pub(crate) fn local() -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "profile": figures::reference(),
        "main": {"memoryMB": {"min": 200, "max": 4000}},
        "remoteExperts": {"mode": "Never"},
    })
}

/// The demo model with its experts in remote functions.
pub(crate) fn remote() -> Value {
    json!({
        "model": {"source": "pvc://models/demo"},
        "profile": figures::reference(),
        "main": {"memoryMB": {"min": 200, "max": 4000}},
        "remoteExperts": {"mode": "Always", "memoryMB": {"min": 100, "max": 1000}, "maxReplicas": 1},
    })
}
