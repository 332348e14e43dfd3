//! Gauges by which an endpoint picker chooses among gateways: those of the Gateway API Inference Extension's model
//! server protocol, under the names that pickers look for by default.

use crate::model::Model;
use std::fmt::Write;
use std::sync::Arc;

/// The gauges of `models` all together. Without labels: a picker takes the first series that it finds.
pub(crate) fn gauges(models: &[Arc<Model>]) -> String {
    let (mut waiting, mut in_flight, mut capacity) = (0, 0, 0);
    for model in models {
        let (waits, runs) = model.load();
        (waiting, in_flight, capacity) = (waiting + waits, in_flight + runs, capacity + model.capacity());
    }
    // Gateways have no cache of keys and values. What is full like one is the room of main functions.
    let used = if capacity == 0 { 0.0 } else { (in_flight as f64 / capacity as f64).min(1.0) };
    let mut text = String::new();
    for (name, help, value) in [
        ("vllm:num_requests_waiting", "Waiting requests of all models.", waiting as f64),
        ("vllm:num_requests_running", "Running requests of all models.", in_flight as f64),
        ("vllm:kv_cache_usage_perc", "Share of the main functions' slots in use, 0 to 1.", used),
    ] {
        // Writing to a string cannot fail.
        let _written = write!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}\n");
    }
    text
}
