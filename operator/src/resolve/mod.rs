//! Resolve stage: facts of model and hardware, and the progress of their discovery. Pure.

mod hardware;
mod model;

use super::inputs::Inputs;

pub(crate) use hardware::{HardwareMeasurement, HardwareResolution};
pub(crate) use model::ModelResolution;

/// Output of the resolve stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Resolved {
    /// Facts of the checkpoint.
    pub model: ModelResolution,
    /// Hardware profile; absent before the checkpoint is inspected.
    pub hardware: Option<HardwareResolution>,
}

/// Resolves model and hardware from what is stored about them.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn resolve(inputs: Inputs<'_>) -> Result<Resolved, serde_json::Error> {
    let (owner, records) = (inputs.owner, inputs.observed.records());
    let model = ModelResolution::resolve(owner, records)?;
    let hardware =
        model.facts().map(|facts| HardwareResolution::resolve(owner, facts, records)).transpose()?;
    Ok(Resolved { model, hardware })
}
