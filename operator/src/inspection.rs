//! Inspection of the model: its facts, or the progress of finding them. Pure.

use super::facts::{FactsError, ModelFacts};
use super::legacy_records;
use super::one_shot::{OneShotState, UNREADABLE, one_shot};
use super::records::Records;
use super::status_issue::StatusIssue;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use remoe_api::MoEDeployment;

/// Progress of a model's inspection.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum InspectionState {
    /// The facts of the model are known.
    Known(Box<ModelFacts>),
    /// A pod inspects the model.
    Inspecting(OneShotState),
}

impl InspectionState {
    /// Returns the state of the inspector pod; absent if the facts are known.
    pub(crate) fn one_shot(&self) -> Option<&OneShotState> {
        match self {
            Self::Known(_) => None,
            Self::Inspecting(one_shot) => Some(one_shot),
        }
    }
}

/// Returns the facts about `subject` that this release or an earlier one stored.
pub(crate) fn stored_facts(owner: &MoEDeployment, records: Records<'_>, subject: &str) -> Option<ModelFacts> {
    let stored = records.model.and_then(|record| ModelFacts::from_record(record, subject));
    stored.or_else(|| legacy_records::facts(owner, records, subject))
}

/// Returns the progress of the inspection by pods named `place`, given the stored facts `known`.
pub(crate) fn inspection_state(
    known: Option<ModelFacts>,
    pods: &[Pod],
    owner_uid: &str,
    place: &str,
    now: Timestamp,
) -> InspectionState {
    match known {
        Some(facts) => InspectionState::Known(Box::new(facts)),
        None => InspectionState::Inspecting(one_shot(pods, owner_uid, place, UNREADABLE, now)),
    }
}

impl From<FactsError> for StatusIssue {
    fn from(error: FactsError) -> Self {
        Self::new(UNREADABLE, error.to_string())
    }
}
