//! Rollouts that no user asked for. Another version of the operator, or another plan for the same resource, changes the
//! functions of many deployments at once.
//!
//! Such deployments take turns, a few at a time ([`memory`](super::soft_state)): nodes have room for both sets of functions, and
//! few deployments meet a fault of the new ones. A rollout that a user asked for, or a repair, waits for no turn.

use super::manifests::{Function, Revision};
use super::pods::PodView;
use super::routing::{RoutedPod, RoutingTable};
use remoe_api::MoEDeployment;

/// Reports if all main functions, or all remote ones, of `owner` are to be followed by others that no user asked for,
/// none of which is there yet, while main functions and all remote ones that `table` routes to are there and work.
pub(crate) fn needs_turn(
    owner: &MoEDeployment,
    pods: &[PodView],
    table: &RoutingTable,
    target: &Revision,
) -> bool {
    let seen = owner.status.as_ref().and_then(|status| status.observed_generation);
    if seen.is_none() || seen != owner.metadata.generation {
        return false;
    }
    let there = || pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none());
    let mut told = table.entries.values().flat_map(|generation| &generation.endpoints);
    let is_there = |endpoint: &RoutedPod| there().any(|pod| pod.name.to_string() == endpoint.pod);
    let is_whole =
        there().filter(|pod| pod.is_main).count() >= target.main.replicas as usize && told.all(is_there);
    if !is_whole || !there().all(|pod| pod.is_sound() && pod.ready) {
        return false;
    }
    let has_begun = |function: &Function| there().any(|pod| pod.identity == function.identity);
    let mains = there().any(|pod| pod.is_main) && !has_begun(&target.main);
    let remotes = there().any(|pod| !pod.is_main) && !target.remote.is_empty();
    mains || (remotes && !target.remote.iter().any(has_begun))
}
