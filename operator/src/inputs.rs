//! Input of the pure stages of one reconcile.

use super::manifests::OperatorEnvironment;
use super::observed::Observed;
use super::soft_state::SoftStateView;
use remoe_api::MoEDeployment;

/// Everything that a reconcile decides from. It holds no decisions and does not change after the read stage.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// Deployment, with the prices that apply to it.
    pub owner: &'a MoEDeployment,
    /// Set if the platform's prices apply and differ from those of the spec.
    pub repriced: bool,
    /// Settings of the operator.
    pub environment: &'a OperatorEnvironment,
    /// Objects in the cluster, and answers of functions.
    pub observed: &'a Observed,
    /// Soft state.
    pub soft_state: &'a SoftStateView,
    /// Set if a main function that starts now finds its certificate, or needs none.
    pub main_certificate_ready: bool,
}
