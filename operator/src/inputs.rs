//! Input of the pure stages of one reconcile.

use super::manifests::OperatorEnvironment;
use super::observed::Observed;
use super::soft_state::SoftStateView;
use remoe_api::MoEDeployment;

/// Everything that a reconcile decides from. Nothing in it is a decision, and nothing of it changes after the read stage.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// The resource, with the prices that apply.
    pub owner: &'a MoEDeployment,
    /// Prices of the platform apply, and differ from those of the spec.
    pub repriced: bool,
    /// Settings of the operator.
    pub environment: &'a OperatorEnvironment,
    /// Objects in the cluster, and answers of functions.
    pub observed: &'a Observed,
    /// Soft state.
    pub soft_state: &'a SoftStateView,
    /// Main functions that start now find their certificates, or need none.
    pub main_certificate_ready: bool,
}
