//! The resolve stage: what is known of model and hardware, and what is done to know more. Pure.

mod hardware;
mod model;

use super::inputs::Inputs;

pub(crate) use hardware::{HardwareMeasurement, HardwareResolution};
pub(crate) use model::ModelResolution;

/// Output of the resolve stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Resolved {
    /// Checkpoint.
    pub model: ModelResolution,
    /// Hardware, once the checkpoint is known.
    pub hardware: Option<HardwareResolution>,
}

/// Resolves model and hardware from what is stored about them.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn resolve(inputs: Inputs<'_>) -> Result<Resolved, serde_json::Error> {
    let (owner, records) = (inputs.owner, inputs.observed.records());
    let model = ModelResolution::of(owner, records)?;
    let hardware = model.facts().map(|facts| HardwareResolution::of(owner, facts, records)).transpose()?;
    Ok(Resolved { model, hardware })
}
