//! What is known of model and hardware, and what is done to know more. Pure.

mod hardware;
mod model;

use super::api::MoEDeployment;
use super::observed::Observed;

pub(crate) use hardware::{Hardware, Measuring};
pub(crate) use model::Model;

/// What is known of model and hardware.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Known {
    /// The checkpoint.
    pub model: Model,
    /// The hardware, once the checkpoint is known.
    pub hardware: Option<Hardware>,
}

/// What `observed` says about model and hardware.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn know(owner: &MoEDeployment, observed: &Observed) -> Result<Known, serde_json::Error> {
    let records = observed.records();
    let model = Model::of(owner, records)?;
    let hardware = model.facts().map(|facts| Hardware::of(owner, facts, records)).transpose()?;
    Ok(Known { model, hardware })
}
