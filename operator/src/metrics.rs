//! Metrics of the operator.

use super::decide::Effects;
use super::names::Component;
use super::scale::{GroupTransition, PhaseChange, ReplicaChange};
use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, core::Collector,
};
use remoe_api::MixOf;
use remoe_autoscale::scale_to_zero::ScalingPhase;

/// Values of the label `cause`.
const WAKE: &str = "wake";
const DRIFT: &str = "drift";
/// Values of the label `direction`.
const UP: &str = "up";
const DOWN: &str = "down";

/// Metrics of the operator.
#[derive(Clone)]
pub(super) struct Metrics {
    /// Reconciles.
    pub(super) reconciliations: IntCounter,
    /// Failed reconciles by kind of error.
    pub(super) errors: IntCounterVec,
    /// Durations of reconciles in seconds.
    pub(super) duration: Histogram,
    /// API calls that change objects, by verb and kind.
    pub(super) writes: IntCounterVec,
    /// Wakes: functions were started because of a request. Times to readiness in seconds.
    pub(super) wakes: IntCounter,
    pub(super) wake_seconds: Histogram,
    /// Scale-downs to zero.
    pub(super) sleeps: IntCounter,
    /// Plans made for changed expert usage, by cause.
    replans: IntCounterVec,
    /// Changes of replica counts because of load, by component and direction.
    scalings: IntCounterVec,
    /// Sleeps and wakes of remote functions while main functions ran, by cause.
    group_turns: IntCounterVec,
    /// Set to 1 while this operator leads.
    pub(super) leads: IntGauge,
}

impl Metrics {
    /// Registers the metrics in `registry`.
    ///
    /// # Errors
    /// A metric of the same name is registered.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            reconciliations: IntCounter::new(
                "remoe_operator_reconciliations_total",
                "Reconciliations of deployments.",
            )?,
            errors: IntCounterVec::new(
                Opts::new(
                    "remoe_operator_reconciliation_errors_total",
                    "Failed reconciliations of deployments.",
                ),
                &["error"],
            )?,
            duration: Histogram::with_opts(
                HistogramOpts::new(
                    "remoe_operator_reconcile_duration_seconds",
                    "Duration of a reconciliation.",
                )
                .buckets(vec![0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]),
            )?,
            writes: IntCounterVec::new(
                Opts::new("remoe_operator_api_writes_total", "API calls that change objects."),
                &["verb", "kind"],
            )?,
            wakes: IntCounter::new("remoe_operator_wakes_total", "Wakes of deployments.")?,
            wake_seconds: Histogram::with_opts(
                HistogramOpts::new(
                    "remoe_operator_wake_seconds",
                    "Time from a wake to a ready main function.",
                )
                .buckets(vec![0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0]),
            )?,
            sleeps: IntCounter::new("remoe_operator_sleeps_total", "Scale-downs of deployments to zero.")?,
            replans: IntCounterVec::new(
                Opts::new(
                    "remoe_operator_replans_total",
                    "Plans made for changed expert usage, by cause: wake (for the waiting requests) or drift.",
                ),
                &["cause"],
            )?,
            scalings: IntCounterVec::new(
                Opts::new(
                    "remoe_operator_scalings_total",
                    "Changes of the number of replicas of a function because of load.",
                ),
                &["component", "direction"],
            )?,
            group_turns: IntCounterVec::new(
                Opts::new(
                    "remoe_operator_group_turns_total",
                    "Sleeps and wakes of remote functions while main functions run, by cause of the wake: asked (their \
                     experts were used) or predicted.",
                ),
                &["turn"],
            )?,
            leads: IntGauge::new("remoe_operator_leader", "1 if this operator leads, else 0.")?,
        };
        let all: [Box<dyn Collector>; 11] = [
            Box::new(metrics.reconciliations.clone()),
            Box::new(metrics.errors.clone()),
            Box::new(metrics.duration.clone()),
            Box::new(metrics.writes.clone()),
            Box::new(metrics.wakes.clone()),
            Box::new(metrics.wake_seconds.clone()),
            Box::new(metrics.sleeps.clone()),
            Box::new(metrics.replans.clone()),
            Box::new(metrics.scalings.clone()),
            Box::new(metrics.group_turns.clone()),
            Box::new(metrics.leads.clone()),
        ];
        all.into_iter().try_for_each(|metric| registry.register(metric))?;
        // Series exist from the start, so that their first increase is visible.
        for cause in [WAKE, DRIFT] {
            metrics.replans.with_label_values(&[cause]);
        }
        for to in [GroupTransition::Sleeps, GroupTransition::Asked, GroupTransition::Predicted] {
            metrics.group_turns.with_label_values(&[transition_name(to)]);
        }
        for component in [Component::Main, Component::RemoteExpert] {
            for direction in [UP, DOWN] {
                metrics.scalings.with_label_values(&[component.name(), direction]);
            }
        }
        Ok(metrics)
    }

    /// Counts the effects of a reconcile.
    pub(super) fn count(&self, effects: &Effects) {
        effects.replanned.into_iter().for_each(|source| self.replanned(source));
        effects.phase.into_iter().for_each(|change| self.changed(change));
        effects.scaled.iter().for_each(|change| self.scaled(change));
        effects.groups.iter().for_each(|change| self.group_turned(change.to));
    }

    /// Counts a plan made for the usage of these requests.
    fn replanned(&self, source: MixOf) {
        let cause = match source {
            MixOf::Waiting => WAKE,
            MixOf::Answered => DRIFT,
        };
        self.replans.with_label_values(&[cause]).inc();
    }

    /// Counts a sleep or wake of a remote function.
    fn group_turned(&self, to: GroupTransition) {
        self.group_turns.with_label_values(&[transition_name(to)]).inc();
    }

    /// Counts a function whose replicas change because of load.
    fn scaled(&self, change: &ReplicaChange) {
        let direction = if change.to > change.from { UP } else { DOWN };
        self.scalings.with_label_values(&[change.component.name(), direction]).inc();
    }

    /// Counts a change of the phase of a deployment that can scale to zero.
    fn changed(&self, PhaseChange { from, to, lasted }: PhaseChange) {
        match (from, to) {
            (ScalingPhase::Asleep, ScalingPhase::Waking) => self.wakes.inc(),
            (ScalingPhase::Waking, ScalingPhase::Active) => self.wake_seconds.observe(lasted.as_secs_f64()),
            (_, ScalingPhase::Asleep) => self.sleeps.inc(),
            _ => {}
        }
    }
}

fn transition_name(to: GroupTransition) -> &'static str {
    match to {
        GroupTransition::Sleeps => "asleep",
        GroupTransition::Asked => "asked",
        GroupTransition::Predicted => "predicted",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_counted_is_there_before_the_first_time() {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).unwrap();
        let series = |name: &str| -> Vec<(Vec<String>, f64)> {
            let families = registry.gather();
            let family = families.iter().find(|family| family.name() == name).unwrap();
            let source = |metric: &prometheus::proto::Metric| {
                let labels = metric.get_label().iter().map(|label| label.value().to_owned());
                (labels.collect(), metric.get_counter().get_value())
            };
            family.get_metric().iter().map(source).collect()
        };
        let named = |labels: [&str; 2], value| (labels.map(str::to_owned).to_vec(), value);
        let scalings = || series("remoe_operator_scalings_total");
        let none = [
            named(["main", "down"], 0.0),
            named(["main", "up"], 0.0),
            named(["remote-expert", "down"], 0.0),
            named(["remote-expert", "up"], 0.0),
        ];
        assert_eq!(scalings(), none);
        assert_eq!(series("remoe_operator_replans_total").len(), 2);
        let function = "g0".to_owned();
        metrics.scaled(&ReplicaChange { component: Component::RemoteExpert, function, from: 1, to: 2 });
        assert_eq!(scalings()[3], named(["remote-expert", "up"], 1.0));
        assert_eq!(scalings()[..3], none[..3], "the same series go on");
    }
}
