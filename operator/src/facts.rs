//! Facts of a checkpoint that an inspector found, and the record that stores them.

use super::digest::digest;
use super::names;
use super::ownership::owned_meta;
use kube::ResourceExt;
use remoe_api::{MoEDeployment, MoERecord, MoERecordSpec, ModelSpec, RESTARTED_AT, RecordOf};
use remoe_model::Inspection;
use serde::{Deserialize, Serialize};

/// Maximum bytes of the facts in JSON.
pub(crate) const MAX_FACTS_BYTES: usize = 32 << 10;

/// Maximum experts of one layer, and of all layers together. No known model has more, and plans need memory for each.
const MAX_EXPERTS_PER_LAYER: usize = 1 << 16;
const MAX_TOTAL_EXPERTS: usize = 1 << 18;
/// Maximum of all other counts of a model's shape.
const MAX_COUNT: usize = 1 << 30;
/// Maximum of any size in bytes, so that sums over a whole model do not overflow.
const MAX_BYTES: u64 = 1 << 47;

/// Description of a checkpoint without its weights, as `remoe inspect --json` prints it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModelFacts {
    /// Inspection of the checkpoint.
    #[serde(flatten)]
    pub inspection: Inspection,
    /// Commit of an `hf://` source at the time of the inspection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

/// Invalid facts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FactsError {
    /// No line of its output is a JSON object.
    #[error("missing model facts in the output of the inspector")]
    Missing,
    /// The facts exceed the size limit.
    #[error("model facts too large: {bytes} bytes, limit {MAX_FACTS_BYTES}")]
    TooLarge {
        /// Size of the facts in bytes.
        bytes: usize,
    },
    /// This version cannot read the facts.
    #[error("cannot read the model facts: {0}")]
    Unreadable(String),
}

impl ModelFacts {
    /// Reads the last JSON object among the lines of an inspector's log.
    ///
    /// # Errors
    /// There is no such line, or it is not valid.
    pub(crate) fn from_log(log: &str) -> Result<Self, FactsError> {
        let line = log.lines().rev().find(|line| line.starts_with('{')).ok_or(FactsError::Missing)?;
        Self::from_json(line)
    }

    pub(super) fn from_json(text: &str) -> Result<Self, FactsError> {
        if text.len() > MAX_FACTS_BYTES {
            return Err(FactsError::TooLarge { bytes: text.len() });
        }
        let facts: Self =
            serde_json::from_str(text).map_err(|error| FactsError::Unreadable(error.to_string()))?;
        facts.check()?;
        Ok(facts)
    }

    /// Checks the facts against their bounds: they come from a pod's log or an object, which others can write.
    ///
    /// # Errors
    /// Names the first value out of bounds.
    pub(super) fn check(&self) -> Result<(), FactsError> {
        Self::check_model(&self.inspection)?;
        // Weights stored in a compressed form must also be within bounds when decoded.
        match self.inspection.stored_as {
            Some(_) => Self::check_model(&self.inspection.decoded()),
            None => Ok(()),
        }
    }

    fn check_model(model: &Inspection) -> Result<(), FactsError> {
        let out_of_bounds = |field: &str, value: u64, max: u64| {
            Err(FactsError::Unreadable(format!("{field} is {value}, expected at most {max}")))
        };
        for (field, count, max) in [
            ("layers", model.layers, model.non_expert_layer_bytes.len()),
            ("moe_layers", model.moe_layers.len(), model.layers),
            ("moe_layers", model.moe_layers.iter().copied().max().unwrap_or(0), model.layers),
            ("experts", model.experts, MAX_EXPERTS_PER_LAYER),
            ("experts", model.experts.saturating_mul(model.moe_layers.len()), MAX_TOTAL_EXPERTS),
            ("top_k", model.top_k, model.experts),
            ("shared_experts", model.shared_experts, MAX_COUNT),
            ("hidden_size", model.hidden_size, MAX_COUNT),
            ("vocab_size", model.vocab_size, MAX_COUNT),
            ("context_length", model.context_length, MAX_COUNT),
            ("kv_windowed.layers", model.kv_windowed.map_or(0, |windowed| windowed.layers), model.layers),
            ("kv_windowed.window", model.kv_windowed.map_or(0, |windowed| windowed.window), MAX_COUNT),
        ] {
            if count > max {
                return out_of_bounds(field, count as u64, max as u64);
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
                return out_of_bounds(field, bytes, MAX_BYTES);
            }
        }
        Ok(())
    }

    /// Returns the facts in `record` if they are about `subject`.
    pub(crate) fn from_record(record: &MoERecord, subject: &str) -> Option<Self> {
        // Corrupted facts are inspected again.
        Self::from_json(record.spec.json_of(RecordOf::Model, subject)?).ok()
    }

    /// Returns the record that stores these facts about `subject`.
    ///
    /// # Errors
    /// The facts cannot be written as JSON.
    pub(crate) fn record(
        &self,
        owner: &MoEDeployment,
        subject: &str,
    ) -> Result<MoERecord, serde_json::Error> {
        let Inspection { family, dtype, layers, experts, .. } = &self.inspection;
        let summary = format!("{family} in {dtype}, {layers} layers, {experts} experts");
        let spec = MoERecordSpec::found(RecordOf::Model, subject, serde_json::to_string(self)?, &summary);
        Ok(MoERecord { metadata: owned_meta(owner, names::model_record), spec })
    }
}

/// Returns the hash of everything that an inspection depends on. A restart inspects again, since the content of a
/// claim can change.
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
