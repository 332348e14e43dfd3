//! The facts of the checkpoint, or how far their inspection is.

use super::Lacking;
use crate::api::{MoEDeployment, RESTARTED_AT};
use crate::build::inspector_place;
use crate::earlier;
use crate::errand::{Errand, UNREADABLE};
use crate::facts::{ModelFacts, subject};
use crate::inspection::{Inspecting, inspecting};
use crate::observed::Observed;
use crate::pods::Trouble;
use kube::ResourceExt;

/// What is known of the checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Model {
    /// Identity of what is to be inspected.
    pub subject: String,
    /// How the inspection stands.
    pub inspecting: Inspecting,
    /// What an inspector that is done printed.
    printed: Option<Result<ModelFacts, Trouble>>,
}

impl Model {
    pub(super) fn of(owner: &MoEDeployment, observed: &Observed) -> Result<Self, serde_json::Error> {
        let restarted_at = owner.annotations().get(RESTARTED_AT).map(String::as_str);
        let subject = subject(&owner.spec.model, restarted_at)?;
        let place = inspector_place(&owner.name_any(), &subject);
        let uid = owner.uid().unwrap_or_default();
        let kept = observed.model.as_ref().and_then(|record| ModelFacts::from_record(record, &subject));
        let known = kept.or_else(|| earlier::facts(owner, observed, &subject));
        let inspecting = inspecting(known, &observed.pods, &uid, &place, observed.now);
        let printed = match &inspecting {
            Inspecting::Sent(Errand::Done { pod }) => observed.logs.get(pod).map(|log| match log {
                Ok(log) => ModelFacts::from_log(log).map_err(Trouble::from),
                Err(message) => Err(Trouble::new(UNREADABLE, message.clone())),
            }),
            Inspecting::Known(_) | Inspecting::Sent(_) => None,
        };
        Ok(Self { subject, inspecting, printed })
    }

    /// The facts, where they are known.
    pub(crate) fn facts(&self) -> Option<&ModelFacts> {
        match (&self.inspecting, &self.printed) {
            (Inspecting::Known(facts), _) => Some(facts),
            (Inspecting::Sent(_), Some(Ok(facts))) => Some(facts),
            (Inspecting::Sent(_), _) => None,
        }
    }

    /// What is wrong with what the inspector printed.
    pub(crate) fn refused(&self) -> Option<&Trouble> {
        self.printed.as_ref()?.as_ref().err()
    }

    pub(super) fn lacking(&self, observed: &Observed) -> Option<Lacking> {
        match &self.inspecting {
            Inspecting::Sent(Errand::Done { pod }) if !observed.logs.contains_key(pod) => {
                Some(Lacking::Log(pod.clone()))
            }
            Inspecting::Known(_) | Inspecting::Sent(_) => None,
        }
    }
}
