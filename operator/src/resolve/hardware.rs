//! Resolves the hardware profile, or the progress of its measurement.

use crate::facts::ModelFacts;
use crate::legacy_records;
use crate::names::profile_record;
use crate::one_shot::{OneShotState, one_shot};
use crate::planning::{KnownProfile, compute_dtype, served};
use crate::profiling::{ATTEMPTS, from_log, measured, of_model, record, subject, supplied, with_added_owner};
use crate::records::Records;
use crate::status_issue::StatusIssue;
use kube::ResourceExt;
use remoe_api::{Device, MoEDeployment, MoERecord, ProfileSource};
use remoe_hardware::Profile;

/// Hardware profile, or the progress of its measurement.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HardwareResolution {
    /// Hash of everything that the measurement depends on.
    pub subject: String,
    /// Name of the object that holds the profile or will hold it: a record, or the ConfigMap named in the spec.
    pub source: String,
    /// Profile that plans use: the one named in the spec, else the measured one, else the prior.
    pub profile: Result<KnownProfile, StatusIssue>,
    /// Profile record with this deployment added to its owners; absent if it is an owner already.
    pub with_owner: Option<MoERecord>,
    /// New record of a profile that an earlier release measured; absent if a record exists.
    pub migrated: Option<Box<MoERecord>>,
    /// Progress of the measurement; absent if a profile is known.
    pub measurement: Option<HardwareMeasurement>,
}

/// Progress of a hardware measurement.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HardwareMeasurement {
    /// State of the profiler pod.
    pub one_shot: OneShotState,
    /// Output of a completed profiler.
    pub output: Option<Result<Profile, String>>,
}

impl HardwareResolution {
    pub(super) fn resolve(
        owner: &MoEDeployment,
        facts: &ModelFacts,
        records: Records<'_>,
    ) -> Result<Self, serde_json::Error> {
        let subject = subject(owner, facts)?;
        if let Some(supplied_profile) = &owner.spec.profile {
            let source = supplied_profile.config_map_name.clone();
            let profile = supplied(&source, records.details.maps.get(&source).and_then(Option::as_ref));
            return Ok(Self::known(subject, source, profile));
        }
        let source = profile_record(&subject);
        let stored = records.details.profiles.get(&source).and_then(Option::as_ref);
        let measured_profile =
            stored.and_then(|stored| Some((stored, measured(stored, &subject, owner, facts)?)));
        if let Some((stored, known)) = measured_profile {
            let with_owner = with_added_owner(stored, owner);
            return Ok(Self { with_owner, ..Self::known(subject, source, Ok(known)) });
        }
        let legacy = legacy_records::profile(owner, records, &source).filter(|_| stored.is_none());
        if let Some(known) = legacy.and_then(|profile| of_model(profile, owner, facts)) {
            let migrated = Some(Box::new(record(owner, &subject, &known.profile)?));
            return Ok(Self { migrated, ..Self::known(subject, source, Ok(known)) });
        }
        let dtype = compute_dtype(&owner.spec, facts);
        let model = served(&owner.spec, facts);
        let profile = match owner.spec.main.device {
            Device::Cpu => Profile::prior(&model, dtype.name()),
            Device::Cuda => Profile::prior_on_gpu(&model, dtype.name()),
        };
        let profile = Ok(KnownProfile { profile, source: ProfileSource::Prior });
        let measurement = Some(HardwareMeasurement::observe(owner, &source, records));
        Ok(Self { measurement, ..Self::known(subject, source, profile) })
    }

    /// Creates the resolution of a known profile, with nothing to write or measure.
    fn known(subject: String, source: String, profile: Result<KnownProfile, StatusIssue>) -> Self {
        Self { subject, source, profile, with_owner: None, migrated: None, measurement: None }
    }
}

impl HardwareMeasurement {
    fn observe(owner: &MoEDeployment, pod_place: &str, records: Records<'_>) -> Self {
        let uid = owner.uid().unwrap_or_default();
        let one_shot = match one_shot(records.pods, &uid, pod_place, "ProfilerFailed", records.now) {
            OneShotState::Start { incarnation, after: Some(issue) } if incarnation >= ATTEMPTS => {
                OneShotState::Failed { issue, attempts: incarnation, retry_at: records.now }
            }
            other => other,
        };
        let output = match &one_shot {
            OneShotState::Done { pod } => records.details.logs.get(pod).map(|log| {
                let log = log.as_ref().map_err(Clone::clone)?;
                from_log(log).ok_or_else(|| format!("missing profile in the output of pod {pod}"))
            }),
            _ => None,
        };
        Self { one_shot, output }
    }
}
