//! Prometheus metrics of the plan's expectations and of measurements: sums, of which dashboards show means.

use prometheus::{CounterVec, IntCounter, Opts, Registry};
use remoe_plan::Comparison;

/// Sums over all requests that ran under a planned placement.
#[derive(Clone)]
pub(super) struct PlanMetrics {
    requests: IntCounter,
    ttft: CounterVec,
    tpot: CounterVec,
    cost: CounterVec,
}

impl PlanMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// Fails if the name of a metric is taken in `registry`.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let sums = |name: &str, help: &str| {
            let sums = CounterVec::new(Opts::new(name, help), &["of"])?;
            registry.register(Box::new(sums.clone())).map(|()| sums)
        };
        let requests = IntCounter::new(
            "remoe_plan_compared_requests_total",
            "Requests under a placement that the planner made.",
        )?;
        registry.register(Box::new(requests.clone()))?;
        Ok(Self {
            requests,
            ttft: sums(
                "remoe_plan_time_to_first_token_seconds_total",
                "Sum of the times to first token of compared requests, expected by the plan or measured.",
            )?,
            tpot: sums(
                "remoe_plan_time_per_output_token_seconds_total",
                "Sum of the times per output token of compared requests, expected by the plan or measured.",
            )?,
            cost: sums(
                "remoe_plan_cost_dollars_total",
                "Sum of the costs of compared requests, expected by the plan or measured.",
            )?,
        })
    }

    /// Adds the comparison of a finished request.
    pub(super) fn add(&self, comparison: &Comparison) {
        self.requests.inc();
        for (of, outcome) in [("expected", &comparison.expected), ("measured", &comparison.measured)] {
            let figures = [
                (&self.ttft, outcome.ttft_seconds),
                (&self.tpot, outcome.tpot_seconds),
                (&self.cost, outcome.cost),
            ];
            for (sum, figure) in figures {
                // A counter rejects negative numbers, and a NaN would make it NaN for ever.
                if figure.is_finite() && figure > 0.0 {
                    sum.with_label_values(&[of]).inc_by(figure);
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use remoe_plan::Outcome;

    #[test]
    fn expected_and_measured_values_are_summed() {
        let registry = Registry::new();
        let metrics = PlanMetrics::new(&registry).unwrap();
        let outcome = |ttft_seconds, cost| Outcome { ttft_seconds, tpot_seconds: 0.0, cost };
        for _ in 0..2 {
            let comparison = Comparison { expected: outcome(0.5, 0.25), measured: outcome(2.0, f64::NAN) };
            metrics.add(&comparison);
        }
        let page = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        let shown = |line: &str| page.lines().any(|shown| shown == line);
        assert!(shown("remoe_plan_compared_requests_total 2"), "{page}");
        assert!(shown("remoe_plan_time_to_first_token_seconds_total{of=\"expected\"} 1"), "{page}");
        assert!(shown("remoe_plan_time_to_first_token_seconds_total{of=\"measured\"} 4"), "{page}");
        assert!(shown("remoe_plan_cost_dollars_total{of=\"expected\"} 0.5"), "{page}");
        assert!(!page.contains("NaN"), "{page}");
    }
}
