//! The facts of the checkpoint, or how far their inspection is.

use crate::facts::{ModelFacts, subject_of};
use crate::inspection::{InspectionState, inspection_state, kept_facts};
use crate::manifests::inspector_place;
use crate::one_shot::{OneShotState, UNREADABLE};
use crate::records::Records;
use crate::status_issue::StatusIssue;
use kube::ResourceExt;
use remoe_api::MoEDeployment;

/// State of the checkpoint's facts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelResolution {
    /// Identity of what is to be inspected.
    pub subject: String,
    /// How the inspection stands.
    pub inspection_state: InspectionState,
    /// Output of an inspector that is done.
    printed: Option<Result<ModelFacts, StatusIssue>>,
}

impl ModelResolution {
    pub(super) fn of(owner: &MoEDeployment, records: Records<'_>) -> Result<Self, serde_json::Error> {
        let subject = subject_of(owner)?;
        let place = inspector_place(&owner.name_any(), &subject);
        let uid = owner.uid().unwrap_or_default();
        let known = kept_facts(owner, records, &subject);
        let inspection_state = inspection_state(known, records.pods, &uid, &place, records.now);
        let printed = match &inspection_state {
            InspectionState::Sent(OneShotState::Done { pod }) => {
                records.details.logs.get(pod).map(|log| match log {
                    Ok(log) => ModelFacts::from_log(log).map_err(StatusIssue::from),
                    Err(message) => Err(StatusIssue::new(UNREADABLE, message.clone())),
                })
            }
            InspectionState::Known(_) | InspectionState::Sent(_) => None,
        };
        Ok(Self { subject, inspection_state, printed })
    }

    /// The facts, where they are known.
    pub(crate) fn facts(&self) -> Option<&ModelFacts> {
        match (&self.inspection_state, &self.printed) {
            (InspectionState::Known(facts), _) => Some(facts),
            (InspectionState::Sent(_), Some(Ok(facts))) => Some(facts),
            (InspectionState::Sent(_), _) => None,
        }
    }

    /// Returns the fault of what the inspector printed.
    pub(crate) fn refused(&self) -> Option<&StatusIssue> {
        self.printed.as_ref()?.as_ref().err()
    }
}
