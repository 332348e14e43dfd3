//! What is known of model and hardware, and what is done to know more. Pure.

mod hardware;
mod model;

use super::api::MoEDeployment;
use super::earlier;
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

/// What was not read, though it would say more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Lacking {
    /// The log of a pod.
    Log(String),
    /// The record of a profile.
    Profile(String),
    /// A ConfigMap: figures that somebody supplies, or what an earlier release kept.
    Map(String),
}

/// What `observed` says about model and hardware.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn know(owner: &MoEDeployment, observed: &Observed) -> Result<Known, serde_json::Error> {
    let model = Model::of(owner, observed)?;
    let hardware = model.facts().map(|facts| Hardware::of(owner, facts, observed)).transpose()?;
    Ok(Known { model, hardware })
}

/// What is to be read as well, before this is known.
///
/// # Errors
/// A value cannot be written as JSON.
pub(crate) fn lacking(
    owner: &MoEDeployment,
    observed: &Observed,
) -> Result<Option<Lacking>, serde_json::Error> {
    if let Some(earlier) = earlier::lacking(owner, observed) {
        return Ok(Some(Lacking::Map(earlier)));
    }
    let known = know(owner, observed)?;
    let lacking = known.model.lacking(observed);
    Ok(lacking.or_else(|| known.hardware?.lacking(owner, observed)))
}
