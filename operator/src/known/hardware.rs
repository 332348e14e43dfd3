//! Figures of the hardware, or how far measuring them is.

use super::Lacking;
use crate::api::{Device, MoEDeployment, ProfileSource};
use crate::errand::{Errand, errand};
use crate::facts::ModelFacts;
use crate::names::profile_config_map;
use crate::observed::Observed;
use crate::planning::{KnownProfile, compute_dtype, served};
use crate::pods::Trouble;
use crate::profiling::{ATTEMPTS, from_log, measured, shared_with, subject, supplied};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use remoe_profile::Profile;

/// What is known of the hardware.
#[derive(Debug, Clone, PartialEq)]
pub struct Hardware {
    /// Identity of what a profiler measures.
    pub subject: String,
    /// The ConfigMap that has its figures, or would have them.
    pub source: String,
    /// The figures that plans stand on: those that the spec names, else those that were measured, else the
    /// prior.
    pub profile: Result<KnownProfile, Trouble>,
    /// The measured profile with this deployment among those that it stays for, where it is not yet.
    pub shared: Option<ConfigMap>,
    /// How measuring stands, while there is only the prior.
    pub measuring: Option<Measuring>,
}

/// How measuring stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Measuring {
    /// The profiler's errand.
    pub errand: Errand,
    /// What a profiler that is done printed.
    pub printed: Option<Result<Profile, String>>,
}

impl Hardware {
    pub(super) fn of(
        owner: &MoEDeployment,
        facts: &ModelFacts,
        observed: &Observed,
    ) -> Result<Self, serde_json::Error> {
        let subject = subject(owner, facts)?;
        let read = |name: &String| observed.profiles.get(name).and_then(Option::as_ref);
        if let Some(named) = &owner.spec.profile {
            let source = named.config_map_name.clone();
            let profile = supplied(&source, read(&source));
            return Ok(Self { subject, source, profile, shared: None, measuring: None });
        }
        let source = profile_config_map(&subject);
        let found = read(&source).and_then(|map| Some((map, measured(map, owner, facts)?)));
        if let Some((map, known)) = found {
            let shared = shared_with(map, owner);
            return Ok(Self { subject, source, profile: Ok(known), shared, measuring: None });
        }
        let dtype = compute_dtype(&owner.spec, facts);
        let model = served(&owner.spec, facts);
        let profile = match owner.spec.main.device {
            Device::Cpu => Profile::prior(&model, dtype.name()),
            Device::Cuda => Profile::prior_on_gpu(&model, dtype.name()),
        };
        let profile = Ok(KnownProfile { profile, source: ProfileSource::Prior });
        let measuring = Some(Measuring::of(owner, &source, observed));
        Ok(Self { subject, source, profile, shared: None, measuring })
    }

    pub(super) fn lacking(&self, observed: &Observed) -> Option<Lacking> {
        if !observed.profiles.contains_key(&self.source) {
            return Some(Lacking::Profile(self.source.clone()));
        }
        match &self.measuring.as_ref()?.errand {
            Errand::Done { pod } if !observed.logs.contains_key(pod) => Some(Lacking::Log(pod.clone())),
            _ => None,
        }
    }
}

impl Measuring {
    fn of(owner: &MoEDeployment, place: &str, observed: &Observed) -> Self {
        let uid = owner.uid().unwrap_or_default();
        let errand = match errand(&observed.pods, &uid, place, "ProfilerFailed", observed.now) {
            Errand::Start { incarnation, after: Some(trouble) } if incarnation >= ATTEMPTS => {
                Errand::Failed { trouble, attempts: incarnation, retry_at: observed.now }
            }
            other => other,
        };
        let printed = match &errand {
            Errand::Done { pod } => observed.logs.get(pod).map(|log| {
                let log = log.as_ref().map_err(Clone::clone)?;
                from_log(log).ok_or_else(|| format!("pod {pod} printed no profile"))
            }),
            _ => None,
        };
        Self { errand, printed }
    }
}
