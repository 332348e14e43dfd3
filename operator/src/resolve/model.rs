//! Resolves the facts of the checkpoint, or the progress of its inspection.

use crate::facts::{ModelFacts, subject_of};
use crate::inspection::{InspectionState, inspection_state, stored_facts};
use crate::manifests::inspector_pod_place;
use crate::one_shot::{OneShotState, UNREADABLE};
use crate::records::Records;
use crate::status_issue::StatusIssue;
use kube::ResourceExt;
use remoe_api::MoEDeployment;

/// Facts of the checkpoint, or the progress of its inspection.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelResolution {
    /// Hash of the inspected source and settings.
    pub subject: String,
    /// Progress of the inspection.
    pub inspection_state: InspectionState,
    /// Output of a completed inspector.
    output: Option<Result<ModelFacts, StatusIssue>>,
}

impl ModelResolution {
    pub(super) fn resolve(owner: &MoEDeployment, records: Records<'_>) -> Result<Self, serde_json::Error> {
        let subject = subject_of(owner)?;
        let pod_place = inspector_pod_place(&owner.name_any(), &subject);
        let uid = owner.uid().unwrap_or_default();
        let known = stored_facts(owner, records, &subject);
        let inspection_state = inspection_state(known, records.pods, &uid, &pod_place, records.now);
        let output = match &inspection_state {
            InspectionState::Inspecting(OneShotState::Done { pod }) => {
                records.details.logs.get(pod).map(|log| match log {
                    Ok(log) => ModelFacts::from_log(log).map_err(StatusIssue::from),
                    Err(message) => Err(StatusIssue::new(UNREADABLE, message.clone())),
                })
            }
            InspectionState::Known(_) | InspectionState::Inspecting(_) => None,
        };
        Ok(Self { subject, inspection_state, output })
    }

    /// Returns the facts if they are known.
    pub(crate) fn facts(&self) -> Option<&ModelFacts> {
        match (&self.inspection_state, &self.output) {
            (InspectionState::Known(facts), _) => Some(facts),
            (InspectionState::Inspecting(_), Some(Ok(facts))) => Some(facts),
            (InspectionState::Inspecting(_), _) => None,
        }
    }

    /// Returns why the inspector's output is invalid, if it is.
    pub(crate) fn invalid_output(&self) -> Option<&StatusIssue> {
        self.output.as_ref()?.as_ref().err()
    }
}
