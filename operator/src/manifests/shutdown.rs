//! Graceful termination of functions.

use super::pod::LOST_NODE;
use k8s_openapi::api::core::v1::PodSpec;
use remoe_api::MoEPlanSpec;

/// Delay in seconds between the removal from Services and SIGTERM, so that clients notice the removal.
pub(super) const DEREGISTRATION_SECONDS: i64 = 5;
/// Time in seconds after the drain, for errors to reach clients and for the process to exit.
const EXIT_SECONDS: u32 = 10;
/// Drain time of a remote function in seconds: its work is one layer of one iteration.
const MIN_DRAIN_SECONDS: u32 = 30;
/// Maximum drain time in seconds, so that node drains and scaling are not blocked.
const MAX_DRAIN_SECONDS: u32 = 1800;
/// Time in seconds for which a function stays on an unreachable node. It may still work and become reachable again.
/// Until then replacements run beside it, within limits (`replacement.rs`).
const LOST_NODE_SECONDS: i64 = 300;
/// Safety factor: concurrent requests slow each other down, and a plan is an estimate.
const DRAIN_SAFETY_FACTOR: f64 = 2.0;

/// Termination settings of a function. They are not part of its identity: a plan with other expected times keeps the
/// pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PodShutdown {
    drain_seconds: u32,
    is_main: bool,
}

impl PodShutdown {
    /// Settings of remote functions.
    pub(super) const REMOTE: Self = Self { drain_seconds: MIN_DRAIN_SECONDS, is_main: false };

    /// Returns the settings of main functions of `plan`, whose drain covers the longest answer of the workload at the
    /// planned speed.
    pub(super) fn of_main(plan: &MoEPlanSpec) -> Self {
        let (workload, times) = (&plan.workload, &plan.numbers.times);
        let prompts = f64::from(workload.max_input_tokens) / f64::from(workload.typical_input_tokens.max(1));
        let prefill = times.prefill_seconds.max(0.0) * prompts;
        let decode = times.tpot_seconds.max(0.0) * f64::from(workload.max_output_tokens);
        let seconds = ((prefill + decode) * DRAIN_SAFETY_FACTOR).ceil();
        // Plans are read from the API, so no figure is trusted; the conversion saturates.
        Self { drain_seconds: (seconds as u32).clamp(MIN_DRAIN_SECONDS, MAX_DRAIN_SECONDS), is_main: true }
    }

    /// Applies the settings to `spec`.
    pub(super) fn apply(self, spec: &mut PodSpec) {
        let drain = i64::from(self.drain_seconds);
        spec.termination_grace_period_seconds =
            Some(DEREGISTRATION_SECONDS + drain + i64::from(EXIT_SECONDS));
        // The first two tolerations are the operator's; those of the template follow.
        for toleration in spec.tolerations.iter_mut().flatten().take(LOST_NODE.len()) {
            toleration.toleration_seconds = Some(LOST_NODE_SECONDS);
        }
        if let (true, Some(container)) = (self.is_main, spec.containers.first_mut()) {
            let flag = ["--drain-seconds".to_owned(), self.drain_seconds.to_string()];
            container.args.get_or_insert_default().extend(flag);
        }
    }
}
