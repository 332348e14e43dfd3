//! Having the hardware measured where the plan stands on a prior.

use super::{Diff, DiffInput, LATER, SUPPLIED};
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
const UNDERWAY: &str = "measuring the hardware profile";

impl Diff {
    /// The figures of the hardware. A profiler is only started when nothing else starts: it would take
    /// processors from functions.
    pub(super) fn profile(&mut self, scene: DiffInput<'_>) -> Result<(), serde_json::Error> {
        let hardware = scene.resolved.hardware.as_ref();
        if scene.inputs.owner.spec.profile.is_some() && hardware.is_some() {
            self.requeue_within(SUPPLIED);
        }
        self.writes
            .extend(hardware.and_then(|hardware| hardware.shared.clone()).map(Box::new).map(Write::Share));
        self.writes.extend(hardware.and_then(|hardware| hardware.taken_over.clone()).map(Write::Profile));
        let measuring = match &scene.planned.state {
            PlanState::Planned { plan, .. } if plan.profile == ProfileSource::Prior => {
                hardware.and_then(|hardware| Some((hardware, hardware.measuring.as_ref()?)))
            }
            _ => None,
        };
        let useful = measuring.map(|(hardware, measuring)| (hardware.subject.as_str(), &measuring.one_shot));
        let over = obsolete_pods(&scene.inputs.observed.pods, &scene.uid(), Component::Profiler, useful);
        self.writes.extend(over.into_iter().map(Write::Delete));
        if let Some((hardware, measuring)) = measuring {
            self.profiling = Some(self.measure(scene, hardware, measuring)?);
        }
        Ok(())
    }

    /// Moves measuring on. Returns how it stands.
    fn measure(
        &mut self,
        scene: DiffInput<'_>,
        hardware: &HardwareResolution,
        measuring: &HardwareMeasurement,
    ) -> Result<String, serde_json::Error> {
        let at_rest = (self.settled || scene.manifests.target.is_none())
            && scene.scaled.demanded.phase != ScalingPhase::Asleep;
        Ok(match (&measuring.one_shot, &measuring.printed) {
            (OneShotState::Start { .. }, _) if !at_rest => {
                "hardware profile: measured after the rollout".to_owned()
            }
            (OneShotState::Start { incarnation, .. }, _) => {
                self.requeue_within(LATER);
                self.start_profiler(scene, hardware, *incarnation)
            }
            (OneShotState::Waiting { issue }, _) => {
                self.requeue_within(LATER);
                issue.as_ref().map_or_else(|| UNDERWAY.to_owned(), waits)
            }
            (OneShotState::Done { .. }, Some(Ok(profile))) => {
                self.writes.push(Write::Profile(Box::new(record(
                    scene.inputs.owner,
                    &hardware.subject,
                    profile,
                )?)));
                self.say(ClusterEvent::normal(
                    "HardwareMeasured",
                    format!("Measured the hardware profile: MoERecord {}.", hardware.source),
                ));
                self.requeue_within(LATER);
                UNDERWAY.to_owned()
            }
            (OneShotState::Done { .. }, Some(Err(message))) => format!("{NOT_MEASURED}: {message}"),
            (OneShotState::Done { .. }, None) => UNDERWAY.to_owned(),
            (OneShotState::Failed { issue, attempts, .. }, _) if *attempts >= ATTEMPTS => {
                format!("{NOT_MEASURED}: {}; the prior stays in use", issue.message)
            }
            (OneShotState::Failed { issue, retry_at, .. }, _) => {
                self.requeue_at(*retry_at, scene.inputs.observed.now);
                format!("{NOT_MEASURED}: {}; will retry", issue.message)
            }
        })
    }

    fn start_profiler(
        &mut self,
        scene: DiffInput<'_>,
        hardware: &HardwareResolution,
        incarnation: u32,
    ) -> String {
        let PlanState::Planned { plan, .. } = &scene.planned.state else { return String::new() };
        let Some(facts) = scene.resolved.model.facts() else { return String::new() };
        match profiler(
            scene.inputs.owner,
            &hardware.subject,
            incarnation,
            plan,
            facts,
            scene.inputs.environment,
        ) {
            Ok(pod) => {
                let note = format!("Pod {} measures the hardware profile.", pod.name_any());
                self.create(pod, Component::Profiler, ClusterEvent::normal("ProfilerStarted", note));
                UNDERWAY.to_owned()
            }
            Err(error) => format!("{NOT_MEASURED}: {error}"),
        }
    }
}

/// How measuring stands where its pod is kept from running.
pub(crate) fn waits(issue: &StatusIssue) -> String {
    format!("profiler pod cannot start: {}", issue.message)
}
