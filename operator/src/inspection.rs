//! The pure step for the model's facts: known, or being found out.

use super::facts::{FactsError, ModelFacts};
use super::legacy_records;
use super::one_shot::{OneShotState, UNREADABLE, one_shot};
use super::records::Records;
use super::status_issue::StatusIssue;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use remoe_api::MoEDeployment;

/// How the inspection of a model stands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum InspectionState {
    /// The facts of the model are known.
    Known(Box<ModelFacts>),
    /// A pod is sent to find them out.
    Sent(OneShotState),
}

impl InspectionState {
    /// The errand that is of use still.
    pub(crate) fn one_shot(&self) -> Option<&OneShotState> {
        match self {
            Self::Known(_) => None,
            Self::Sent(one_shot) => Some(one_shot),
        }
    }
}

/// Returns the facts about `subject` that are kept, by this release or an earlier one.
pub(crate) fn kept_facts(owner: &MoEDeployment, records: Records<'_>, subject: &str) -> Option<ModelFacts> {
    let kept = records.model.and_then(|record| ModelFacts::from_record(record, subject));
    kept.or_else(|| legacy_records::facts(owner, records, subject))
}

/// How the inspection of a model by pods at `place` stands, of which `known` is kept.
pub(crate) fn inspection_state(
    known: Option<ModelFacts>,
    pods: &[Pod],
    owner_uid: &str,
    place: &str,
    now: Timestamp,
) -> InspectionState {
    match known {
        Some(facts) => InspectionState::Known(Box::new(facts)),
        None => InspectionState::Sent(one_shot(pods, owner_uid, place, UNREADABLE, now)),
    }
}

impl From<FactsError> for StatusIssue {
    fn from(error: FactsError) -> Self {
        Self::new(UNREADABLE, error.to_string())
    }
}
