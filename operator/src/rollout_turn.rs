//! Turns for rollouts that no user requested. A new version of the operator, or a new plan for an unchanged resource,
//! changes the functions of many deployments at once.
//!
//! A few deployments roll out at a time ([`soft_state`](super::soft_state)), so that nodes have room for both sets of
//! functions, and a fault of the new ones affects few deployments. Rollouts requested by a user, and repairs, do not
//! wait.

use super::manifests::{Function, Revision};
use super::pods::PodView;
use super::routing::{RoutedPod, RoutingTable};
use remoe_api::MoEDeployment;

/// Returns whether the step to `target` needs a turn. It does if no user requested it, if it replaces all main
/// functions or all remote ones, if it has not begun, and if all current functions work.
pub(crate) fn needs_turn(
    owner: &MoEDeployment,
    pods: &[PodView],
    table: &RoutingTable,
    target: &Revision,
) -> bool {
    let observed_generation = owner.status.as_ref().and_then(|status| status.observed_generation);
    if observed_generation.is_none() || observed_generation != owner.metadata.generation {
        return false;
    }
    let staying = || pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none());
    let mut routed = table.entries.values().flat_map(|generation| &generation.endpoints);
    let exists = |endpoint: &RoutedPod| staying().any(|pod| pod.name.to_string() == endpoint.pod);
    let all_present =
        staying().filter(|pod| pod.is_main).count() >= target.main.replicas as usize && routed.all(exists);
    if !all_present || !staying().all(|pod| pod.is_sound() && pod.ready) {
        return false;
    }
    let has_begun = |function: &Function| staying().any(|pod| pod.identity == function.identity);
    let mains = staying().any(|pod| pod.is_main) && !has_begun(&target.main);
    let remotes = staying().any(|pod| !pod.is_main) && !target.remote.is_empty();
    mains || (remotes && !target.remote.iter().any(has_begun))
}
