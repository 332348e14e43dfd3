//! How long a function has to end.

use super::pod::LOST_NODE;
use k8s_openapi::api::core::v1::PodSpec;
use remoe_api::MoEPlanSpec;

/// Between the removal from Services and the order to end: time for clients to hear of it.
pub(super) const LEAVE_SECONDS: i64 = 5;
/// After the drain, for errors to reach clients and for the process to end.
const LAST_WORDS_SECONDS: u32 = 10;
/// Drain time of a remote function, in seconds: its work is one layer of one iteration.
const SHORTEST_DRAIN: u32 = 30;
/// No longer, whatever the workload says: nodes are drained, and clusters grow and shrink.
const LONGEST_DRAIN: u32 = 1800;
/// How long a function stays on a node that is not heard. It may be at work there all the same, and be heard again; until then
/// others replace it beside it, within limits (`replacement.rs`).
const LOST_NODE_SECONDS: i64 = 300;
/// Requests that run beside each other slow each other down, and a plan is an estimate.
const MARGIN: f64 = 2.0;

/// How a function ends. It is no part of its identity: a plan that only expects other times keeps the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PodShutdown {
    drain_seconds: u32,
    is_main: bool,
}

impl PodShutdown {
    /// Ending of a remote function.
    pub(super) const REMOTE: Self = Self { drain_seconds: SHORTEST_DRAIN, is_main: false };

    /// Returns the ending of a main function of `plan`: it finishes the longest answer that the workload has, at the
    /// pace that the plan expects.
    pub(super) fn of_main(plan: &MoEPlanSpec) -> Self {
        let (workload, times) = (&plan.workload, &plan.numbers.times);
        let prompts = f64::from(workload.max_input_tokens) / f64::from(workload.typical_input_tokens.max(1));
        let prefill = times.prefill_seconds.max(0.0) * prompts;
        let decode = times.tpot_seconds.max(0.0) * f64::from(workload.max_output_tokens);
        let seconds = ((prefill + decode) * MARGIN).ceil();
        // A plan is read from the API: no figure of it is taken for granted. Beyond the range it saturates.
        Self { drain_seconds: (seconds as u32).clamp(SHORTEST_DRAIN, LONGEST_DRAIN), is_main: true }
    }

    /// Makes a pod of `spec` end so.
    pub(super) fn apply(self, spec: &mut PodSpec) {
        let drain = i64::from(self.drain_seconds);
        spec.termination_grace_period_seconds = Some(LEAVE_SECONDS + drain + i64::from(LAST_WORDS_SECONDS));
        // The first two are its own, those of its template follow.
        for toleration in spec.tolerations.iter_mut().flatten().take(LOST_NODE.len()) {
            toleration.toleration_seconds = Some(LOST_NODE_SECONDS);
        }
        if let (true, Some(container)) = (self.is_main, spec.containers.first_mut()) {
            let flag = ["--drain-seconds".to_owned(), self.drain_seconds.to_string()];
            container.args.get_or_insert_default().extend(flag);
        }
    }
}
