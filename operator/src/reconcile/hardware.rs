//! Figures of the hardware, and the profiler that measures them.

use super::{LATER, ReconcileError, Run, SOON};
use crate::api::{Device, ProfileSource};
use crate::apply::{Made, NAME_TAKEN};
use crate::build::profiler;
use crate::errand::{Errand, errand, useless};
use crate::events::Happening;
use crate::facts::ModelFacts;
use crate::names::{Component, profile_config_map};
use crate::planning::{KnownProfile, compute_dtype};
use crate::pods::Trouble;
use crate::profiling::{ATTEMPTS, config_map, from_log, measured, shared_with, subject, supplied};
use crate::status::PlanState;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use remoe_profile::Profile;
use std::time::Duration;

/// Changes of a profile that somebody supplied are seen by looking: it is not ours to be watched.
const SUPPLIED: Duration = Duration::from_secs(30);

const MEASURING: &str = "the hardware is being measured";

impl Run<'_> {
    /// Figures of the hardware: those that the spec names, else those that were measured, else the prior.
    pub(super) async fn profile(
        &mut self,
        facts: &ModelFacts,
    ) -> Result<Result<KnownProfile, Trouble>, ReconcileError> {
        if let Some(named) = &self.owner.spec.profile {
            self.look_soon(SUPPLIED);
            let map = self.calls.get::<ConfigMap>(&named.config_map_name).await?;
            return Ok(supplied(&named.config_map_name, map.as_ref()));
        }
        let subject = subject(self.owner, facts)?;
        if let Some(map) = self.calls.get::<ConfigMap>(&profile_config_map(&subject)).await?
            && let Some(known) = measured(&map, self.owner, facts)
        {
            if let Some(map) = shared_with(&map, self.owner) {
                self.calls.replace(&map).await?;
            }
            return Ok(Ok(known));
        }
        let dtype = compute_dtype(&self.owner.spec, facts);
        let profile = match self.owner.spec.main.device {
            Device::Cpu => Profile::prior(&facts.inspection, dtype.name()),
            Device::Cuda => Profile::prior_on_gpu(&facts.inspection, dtype.name()),
        };
        Ok(Ok(KnownProfile { profile, source: ProfileSource::Prior }))
    }

    /// Has the hardware measured where the plan stands on a prior; returns how that stands. A profiler is
    /// only started `at_rest`: it would take processors from functions that start.
    pub(super) async fn profiling(
        &mut self,
        facts: Option<&ModelFacts>,
        planning: &PlanState,
        at_rest: bool,
    ) -> Result<Option<String>, ReconcileError> {
        let uid = self.owner.uid().unwrap_or_default();
        let on_prior = match planning {
            PlanState::Planned { plan, .. } if plan.profile == ProfileSource::Prior => facts.zip(Some(plan)),
            _ => None,
        };
        let Some((facts, plan)) = on_prior else {
            let over = useless(&self.there.pods, &uid, Component::Profiler, None);
            self.applier.delete(&over).await?;
            return Ok(None);
        };
        let subject = subject(self.owner, facts)?;
        let place = profile_config_map(&subject);
        let state = errand(&self.there.pods, &uid, &place, "ProfilerFailed", self.now);
        let state = match state {
            Errand::Start { incarnation, after: Some(trouble) } if incarnation >= ATTEMPTS => {
                Errand::Failed { trouble, attempts: incarnation, retry_at: self.now }
            }
            other => other,
        };
        let over = useless(&self.there.pods, &uid, Component::Profiler, Some((&subject, &state)));
        self.applier.delete(&over).await?;
        let note = match state {
            Errand::Start { .. } if !at_rest => "the hardware is measured once everything runs".to_owned(),
            Errand::Start { incarnation, .. } => {
                let around = &self.context.around;
                match profiler(self.owner, &subject, incarnation, plan, facts, around) {
                    Ok(pod) => self.measure(pod).await?,
                    Err(error) => format!("the hardware cannot be measured: {error}"),
                }
            }
            Errand::Waiting { trouble } => {
                self.look_soon(LATER);
                trouble.map_or_else(|| MEASURING.to_owned(), |trouble| waits(&trouble))
            }
            Errand::Done { pod } => match from_log(&self.calls.log(&pod).await?) {
                Some(profile) => {
                    self.applier.profile(&config_map(self.owner, &subject, &profile)?).await?;
                    self.happenings.push(Happening::normal("HardwareMeasured", place));
                    self.look_soon(SOON);
                    MEASURING.to_owned()
                }
                None => format!("pod {pod} printed no profile"),
            },
            Errand::Failed { trouble, attempts, .. } if attempts >= ATTEMPTS => {
                format!("the hardware could not be measured: {}", trouble.message)
            }
            Errand::Failed { trouble, retry_at, .. } => {
                self.look_at(retry_at);
                format!("measuring the hardware failed and is tried again: {}", trouble.message)
            }
        };
        Ok(Some(note))
    }

    async fn measure(&mut self, pod: Pod) -> Result<String, ReconcileError> {
        self.look_soon(LATER);
        Ok(match self.applier.pod(pod).await? {
            Made::Created(pod) => {
                let note = format!("{pod} measures the hardware");
                self.happenings.push(Happening::normal("ProfilerStarted", note));
                MEASURING.to_owned()
            }
            // Another deployment that measures the same was first.
            Made::Refused(trouble) if trouble.reason == NAME_TAKEN => MEASURING.to_owned(),
            Made::Refused(trouble) => waits(&trouble),
        })
    }
}

fn waits(trouble: &Trouble) -> String {
    format!("measuring the hardware waits: {}", trouble.message)
}
