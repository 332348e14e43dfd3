//! Figures of the hardware, or how far measuring them is.

use crate::facts::ModelFacts;
use crate::legacy_records;
use crate::names::profile_record;
use crate::one_shot::{OneShotState, one_shot};
use crate::planning::{KnownProfile, compute_dtype, served};
use crate::profiling::{ATTEMPTS, from_log, measured, of_model, record, shared_with, subject, supplied};
use crate::records::Records;
use crate::status_issue::StatusIssue;
use kube::ResourceExt;
use remoe_api::{Device, MoEDeployment, MoERecord, ProfileSource};
use remoe_hardware::Profile;

/// State of the hardware's figures.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HardwareResolution {
    /// Identity of what a profiler measures.
    pub subject: String,
    /// Name of the object that has its figures, or would have them: a record, or the ConfigMap that the spec names.
    pub source: String,
    /// The figures that plans stand on: those that the spec names, else those that were measured, else the
    /// prior.
    pub profile: Result<KnownProfile, StatusIssue>,
    /// The record of the figures with this deployment among those that it stays for, where it is not yet.
    pub shared: Option<MoERecord>,
    /// The record of figures that an earlier release measured, where there is none yet.
    pub taken_over: Option<Box<MoERecord>>,
    /// How measuring stands, while there is only the prior.
    pub measuring: Option<HardwareMeasurement>,
}

/// How measuring stands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HardwareMeasurement {
    /// The profiler's errand.
    pub one_shot: OneShotState,
    /// Output of a profiler that is done.
    pub printed: Option<Result<Profile, String>>,
}

impl HardwareResolution {
    pub(super) fn of(
        owner: &MoEDeployment,
        facts: &ModelFacts,
        records: Records<'_>,
    ) -> Result<Self, serde_json::Error> {
        let subject = subject(owner, facts)?;
        if let Some(named) = &owner.spec.profile {
            let source = named.config_map_name.clone();
            let profile = supplied(&source, records.details.maps.get(&source).and_then(Option::as_ref));
            return Ok(Self::known(subject, source, profile));
        }
        let source = profile_record(&subject);
        let kept = records.details.profiles.get(&source).and_then(Option::as_ref);
        let found = kept.and_then(|kept| Some((kept, measured(kept, &subject, owner, facts)?)));
        if let Some((kept, known)) = found {
            let shared = shared_with(kept, owner);
            return Ok(Self { shared, ..Self::known(subject, source, Ok(known)) });
        }
        let legacy_records = legacy_records::profile(owner, records, &source).filter(|_| kept.is_none());
        if let Some(known) = legacy_records.and_then(|profile| of_model(profile, owner, facts)) {
            let taken_over = Some(Box::new(record(owner, &subject, &known.profile)?));
            return Ok(Self { taken_over, ..Self::known(subject, source, Ok(known)) });
        }
        let dtype = compute_dtype(&owner.spec, facts);
        let model = served(&owner.spec, facts);
        let profile = match owner.spec.main.device {
            Device::Cpu => Profile::prior(&model, dtype.name()),
            Device::Cuda => Profile::prior_on_gpu(&model, dtype.name()),
        };
        let profile = Ok(KnownProfile { profile, source: ProfileSource::Prior });
        let measuring = Some(HardwareMeasurement::of(owner, &source, records));
        Ok(Self { measuring, ..Self::known(subject, source, profile) })
    }

    /// Figures of which nothing has to be written or measured.
    fn known(subject: String, source: String, profile: Result<KnownProfile, StatusIssue>) -> Self {
        Self { subject, source, profile, shared: None, taken_over: None, measuring: None }
    }
}

impl HardwareMeasurement {
    fn of(owner: &MoEDeployment, place: &str, records: Records<'_>) -> Self {
        let uid = owner.uid().unwrap_or_default();
        let one_shot = match one_shot(records.pods, &uid, place, "ProfilerFailed", records.now) {
            OneShotState::Start { incarnation, after: Some(issue) } if incarnation >= ATTEMPTS => {
                OneShotState::Failed { issue, attempts: incarnation, retry_at: records.now }
            }
            other => other,
        };
        let printed = match &one_shot {
            OneShotState::Done { pod } => records.details.logs.get(pod).map(|log| {
                let log = log.as_ref().map_err(Clone::clone)?;
                from_log(log).ok_or_else(|| format!("missing profile in the output of pod {pod}"))
            }),
            _ => None,
        };
        Self { one_shot, printed }
    }
}
