//! Facts that the inspector found out about a checkpoint, and the record that keeps them.

use super::digest::digest;
use super::names;
use super::ownership::owned_meta;
use kube::ResourceExt;
use remoe_api::{MoEDeployment, MoERecord, MoERecordSpec, ModelSpec, RESTARTED_AT, RecordOf};
use remoe_model::Inspection;
use serde::{Deserialize, Serialize};

/// Facts take no more, in bytes.
pub(crate) const MAX_FACTS: usize = 32 << 10;

/// Experts of a layer, and of all layers together: no model has more, and plans take memory for each.
const MAX_EXPERTS: usize = 1 << 16;
const MAX_EXPERTS_OF_ALL: usize = 1 << 18;
/// Layers, and other counts of a model's shape.
const MAX_COUNT: usize = 1 << 30;
/// Bytes of anything: sums of as many as there is room to list stay numbers.
const MAX_BYTES: u64 = 1 << 47;

/// A checkpoint without its weights: what `remoe inspect --json` prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModelFacts {
    /// The checkpoint.
    #[serde(flatten)]
    pub inspection: Inspection,
    /// The commit of an hf:// source when it was inspected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

/// An inspector that said something else.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FactsError {
    /// No line of its output is a JSON object.
    #[error("missing model facts in the output of the inspector")]
    Missing,
    /// They take too much room.
    #[error("model facts too large: {bytes} bytes, limit {MAX_FACTS}")]
    TooLarge {
        /// Size of the facts in bytes.
        bytes: usize,
    },
    /// They are not what this version reads.
    #[error("cannot read the model facts: {0}")]
    Unreadable(String),
}

impl ModelFacts {
    /// Reads the last JSON object among the lines of an inspector's log.
    ///
    /// # Errors
    /// There is none, or it is not the facts of a checkpoint.
    pub(crate) fn from_log(log: &str) -> Result<Self, FactsError> {
        let line = log.lines().rev().find(|line| line.starts_with('{')).ok_or(FactsError::Missing)?;
        Self::from_json(line)
    }

    pub(super) fn from_json(text: &str) -> Result<Self, FactsError> {
        if text.len() > MAX_FACTS {
            return Err(FactsError::TooLarge { bytes: text.len() });
        }
        let facts: Self =
            serde_json::from_str(text).map_err(|error| FactsError::Unreadable(error.to_string()))?;
        facts.check()?;
        Ok(facts)
    }

    /// Checks that the facts are those of a possible model: they come from a pod's log or an object, which others can
    /// write.
    ///
    /// # Errors
    /// The first figure that cannot be.
    pub(super) fn check(&self) -> Result<(), FactsError> {
        Self::check_model(&self.inspection)?;
        // What weights take that are stored in a shorter form is planned with.
        match self.inspection.stored_as {
            Some(_) => Self::check_model(&self.inspection.decoded()),
            None => Ok(()),
        }
    }

    fn check_model(model: &Inspection) -> Result<(), FactsError> {
        let wrong = |field: &str, value: u64, most: u64| {
            Err(FactsError::Unreadable(format!("{field} is {value}, expected at most {most}")))
        };
        for (field, count, most) in [
            ("layers", model.layers, model.non_expert_layer_bytes.len()),
            ("moe_layers", model.moe_layers.len(), model.layers),
            ("moe_layers", model.moe_layers.iter().copied().max().unwrap_or(0), model.layers),
            ("experts", model.experts, MAX_EXPERTS),
            ("experts", model.experts.saturating_mul(model.moe_layers.len()), MAX_EXPERTS_OF_ALL),
            ("top_k", model.top_k, model.experts),
            ("shared_experts", model.shared_experts, MAX_COUNT),
            ("hidden_size", model.hidden_size, MAX_COUNT),
            ("vocab_size", model.vocab_size, MAX_COUNT),
            ("context_length", model.context_length, MAX_COUNT),
            ("kv_windowed.layers", model.kv_windowed.map_or(0, |windowed| windowed.layers), model.layers),
            ("kv_windowed.window", model.kv_windowed.map_or(0, |windowed| windowed.window), MAX_COUNT),
        ] {
            if count > most {
                return wrong(field, count as u64, most as u64);
            }
        }
        for (field, bytes) in [
            ("expert_bytes", model.expert_bytes),
            ("outside_bytes", model.outside_bytes),
            ("kv_bytes_per_token", model.kv_bytes_per_token),
            ("kv_scales_per_token", model.kv_scales_per_token),
            ("token_bytes", model.token_bytes),
            ("total_bytes", model.total_bytes),
            ("non_expert_layer_bytes", model.non_expert_layer_bytes.iter().copied().max().unwrap_or(0)),
        ] {
            if bytes > MAX_BYTES {
                return wrong(field, bytes, MAX_BYTES);
            }
        }
        Ok(())
    }

    /// The facts in `record`, where they are about `subject`.
    pub(crate) fn from_record(record: &MoERecord, subject: &str) -> Option<Self> {
        // Facts that another writer spoiled are found out again.
        Self::from_json(record.spec.json_of(RecordOf::Model, subject)?).ok()
    }

    /// The record that keeps these facts about `subject`.
    ///
    /// # Errors
    /// The facts cannot be written as JSON.
    pub(crate) fn record(
        &self,
        owner: &MoEDeployment,
        subject: &str,
    ) -> Result<MoERecord, serde_json::Error> {
        let Inspection { family, dtype, layers, experts, .. } = &self.inspection;
        let about = format!("{family} in {dtype}, {layers} layers, {experts} experts");
        let spec = MoERecordSpec::found(RecordOf::Model, subject, serde_json::to_string(self)?, &about);
        Ok(MoERecord { metadata: owned_meta(owner, names::model_record), spec })
    }
}

/// Identity of what is to be inspected: facts about another subject are not facts about this one.
/// A restart inspects again, since the contents of a claim can change under the same name.
///
/// # Errors
/// The spec cannot be written as JSON.
pub(crate) fn subject(model: &ModelSpec, restarted_at: Option<&str>) -> Result<String, serde_json::Error> {
    digest(&(&model.source, &model.revision, &model.endpoint, restarted_at))
}

/// Returns the [`subject`] of the model of `owner`.
///
/// # Errors
/// The spec cannot be written as JSON.
pub(crate) fn subject_of(owner: &MoEDeployment) -> Result<String, serde_json::Error> {
    subject(&owner.spec.model, owner.annotations().get(RESTARTED_AT).map(String::as_str))
}
