//! Hardware measurement, while the plan uses a prior.

use super::{Diff, DiffInput, PROGRESS_INTERVAL, SUPPLIED_PROFILE_INTERVAL};
use crate::events::ClusterEvent;
use crate::manifests::profiler;
use crate::names::Component;
use crate::one_shot::{OneShotState, obsolete_pods};
use crate::plan::PlanState;
use crate::profiling::{ATTEMPTS, record};
use crate::resolve::{HardwareMeasurement, HardwareResolution};
use crate::status_issue::StatusIssue;
use crate::write::Write;
use kube::ResourceExt;
use remoe_api::ProfileSource;
use remoe_autoscale::scale_to_zero::ScalingPhase;

const NOT_MEASURED: &str = "cannot measure the hardware profile";
const MEASURING: &str = "measuring the hardware profile";

impl Diff {
    /// Writes hardware profiles and runs the profiler. A profiler starts only if no function is starting, since it
    /// would compete for processors.
    pub(super) fn write_profile(&mut self, stages: DiffInput<'_>) -> Result<(), serde_json::Error> {
        let hardware = stages.resolved.hardware.as_ref();
        if stages.inputs.owner.spec.profile.is_some() && hardware.is_some() {
            self.requeue_within(SUPPLIED_PROFILE_INTERVAL);
        }
        self.writes.extend(
            hardware.and_then(|hardware| hardware.with_owner.clone()).map(Box::new).map(Write::Share),
        );
        self.writes.extend(hardware.and_then(|hardware| hardware.migrated.clone()).map(Write::Profile));
        let measurement = match &stages.planned.state {
            PlanState::Planned { plan, .. } if plan.profile == ProfileSource::Prior => {
                hardware.and_then(|hardware| Some((hardware, hardware.measurement.as_ref()?)))
            }
            _ => None,
        };
        let useful =
            measurement.map(|(hardware, measurement)| (hardware.subject.as_str(), &measurement.one_shot));
        let obsolete =
            obsolete_pods(&stages.inputs.observed.pods, &stages.uid(), Component::Profiler, useful);
        self.writes.extend(obsolete.into_iter().map(Write::Delete));
        if let Some((hardware, measurement)) = measurement {
            self.profiling = Some(self.advance_measurement(stages, hardware, measurement)?);
        }
        Ok(())
    }

    /// Takes the next step of the measurement. Returns its progress.
    fn advance_measurement(
        &mut self,
        stages: DiffInput<'_>,
        hardware: &HardwareResolution,
        measurement: &HardwareMeasurement,
    ) -> Result<String, serde_json::Error> {
        let is_idle = (self.settled || stages.manifests.target.is_none())
            && stages.scaled.demanded.phase != ScalingPhase::Asleep;
        Ok(match (&measurement.one_shot, &measurement.output) {
            (OneShotState::Start { .. }, _) if !is_idle => {
                "hardware profile: measured after the rollout".to_owned()
            }
            (OneShotState::Start { incarnation, .. }, _) => {
                self.requeue_within(PROGRESS_INTERVAL);
                self.start_profiler(stages, hardware, *incarnation)
            }
            (OneShotState::Waiting { issue }, _) => {
                self.requeue_within(PROGRESS_INTERVAL);
                issue.as_ref().map_or_else(|| MEASURING.to_owned(), profiler_blocked)
            }
            (OneShotState::Done { .. }, Some(Ok(profile))) => {
                self.writes.push(Write::Profile(Box::new(record(
                    stages.inputs.owner,
                    &hardware.subject,
                    profile,
                )?)));
                self.add_event(ClusterEvent::normal(
                    "HardwareMeasured",
                    format!("Measured the hardware profile: MoERecord {}.", hardware.source),
                ));
                self.requeue_within(PROGRESS_INTERVAL);
                MEASURING.to_owned()
            }
            (OneShotState::Done { .. }, Some(Err(message))) => format!("{NOT_MEASURED}: {message}"),
            (OneShotState::Done { .. }, None) => MEASURING.to_owned(),
            (OneShotState::Failed { issue, attempts, .. }, _) if *attempts >= ATTEMPTS => {
                format!("{NOT_MEASURED}: {}; the prior stays in use", issue.message)
            }
            (OneShotState::Failed { issue, retry_at, .. }, _) => {
                self.requeue_at(*retry_at, stages.inputs.observed.now);
                format!("{NOT_MEASURED}: {}; will retry", issue.message)
            }
        })
    }

    fn start_profiler(
        &mut self,
        stages: DiffInput<'_>,
        hardware: &HardwareResolution,
        incarnation: u32,
    ) -> String {
        let PlanState::Planned { plan, .. } = &stages.planned.state else { return String::new() };
        let Some(facts) = stages.resolved.model.facts() else { return String::new() };
        match profiler(
            stages.inputs.owner,
            &hardware.subject,
            incarnation,
            plan,
            facts,
            stages.inputs.environment,
        ) {
            Ok(pod) => {
                let note = format!("Pod {} measures the hardware profile.", pod.name_any());
                self.create(pod, Component::Profiler, ClusterEvent::normal("ProfilerStarted", note));
                MEASURING.to_owned()
            }
            Err(error) => format!("{NOT_MEASURED}: {error}"),
        }
    }
}

/// Describes a profiler pod that cannot start.
pub(crate) fn profiler_blocked(issue: &StatusIssue) -> String {
    format!("profiler pod cannot start: {}", issue.message)
}
