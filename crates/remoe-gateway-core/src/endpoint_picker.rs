//! Gauges by which an endpoint picker chooses among gateways: those of the model server protocol of the Gateway API
//! Inference Extension, under their default names.

use crate::model::Model;
use std::fmt::Write;
use std::sync::Arc;

/// Renders the gauges, each summed over `models`. They have no labels, because a picker takes the first series that
/// it finds.
pub(crate) fn gauges(models: &[Arc<Model>]) -> String {
    let (mut waiting, mut in_flight, mut capacity) = (0, 0, 0);
    for model in models {
        let (model_waiting, model_in_flight) = model.load();
        waiting += model_waiting;
        in_flight += model_in_flight;
        capacity += model.capacity();
    }
    // A gateway has no KV cache. The share of used slots plays its part: requests wait when it is 1.
    let used_share = if capacity == 0 { 0.0 } else { (in_flight as f64 / capacity as f64).min(1.0) };
    let mut text = String::new();
    for (name, help, value) in [
        ("vllm:num_requests_waiting", "Waiting requests of all models.", waiting as f64),
        ("vllm:num_requests_running", "Running requests of all models.", in_flight as f64),
        ("vllm:kv_cache_usage_perc", "Share of the main functions' slots in use, 0 to 1.", used_share),
    ] {
        // Writing to a string cannot fail.
        let _written = write!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}\n");
    }
    text
}
