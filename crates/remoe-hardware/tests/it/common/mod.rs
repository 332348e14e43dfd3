//! Inputs of the tests of profiles: a model, its profile, and the wishes for it.

use remoe_hardware::{DeploymentRequirements, Origin, Prices, Profile};
use remoe_model::Inspection;
use remoe_planner::{Limits, Request, SizeRange, Slo, Specs};
use serde_json::json;

/// A model of four layers, the first of which is dense.
pub(crate) fn model() -> Inspection {
    serde_json::from_value(json!({
        "fingerprint": "ab".repeat(32), "family": "deepseek_v2", "dtype": "bfloat16", "layers": 4,
        "moe_layers": [1, 2, 3], "experts": 8, "top_k": 2, "shared_experts": 0, "hidden_size": 1024,
        "vocab_size": 1000, "context_length": 4096, "expert_bytes": 10_000_000,
        "non_expert_layer_bytes": [7_000_000, 1_000_000, 2_000_000, 3_000_000], "outside_bytes": 5_000_000,
        "kv_bytes_per_token": 4000, "token_bytes": 2048, "total_bytes": 258_000_000,
    }))
    .unwrap()
}

pub(crate) fn measured() -> Profile {
    Profile { origin: Origin::Measured, ..Profile::prior(&model(), "bfloat16") }
}

pub(crate) fn wishes() -> DeploymentRequirements {
    DeploymentRequirements {
        request: Request {
            input_tokens: 100.0,
            output_tokens: 50.0,
            max_input_tokens: None,
            max_output_tokens: None,
            concurrency: 1,
        },
        slo: Slo::new(10.0, 1.0),
        pricing: Prices::default().pricing().unwrap(),
        specs: Specs::new(
            SizeRange { min_bytes: 1e8, max_bytes: 5e9, step_bytes: 1e8 },
            SizeRange { min_bytes: 1e8, max_bytes: 1e9, step_bytes: 1e8 },
        ),
        limits: Limits { payload_bytes: None, max_replicas: 2, max_groups: None, gpu_bytes: None },
        prediction: None,
        arrivals: None,
        remote_idle_seconds: None,
        prediction_p95: None,
        fallback_bytes: 4e7,
        cold_start_seconds: 0.0,
    }
}
