//! Remote functions of a plan. They are checked, since plans are read from the API.

use super::functions::BuildError;
use crate::names::{group_function, layer_function, tier};
use crate::quantity::millicores_for_memory;
use remoe_api::{GroupPlan, MAX_GROUPS, MAX_REPLICAS, MoEPlanSpec, RemotePlan};
use remoe_proto::v1::LayerExperts;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of remote experts; no known model has more.
const MAX_EXPERTS: usize = 1 << 18;

/// Experts hosted by a remote function.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Hosted {
    /// All remote experts of a layer.
    Layer(LayerExperts),
    /// Some of the remote experts of several layers.
    Group(Vec<LayerExperts>),
}

impl Hosted {
    /// Returns the hosted experts by layer.
    pub(crate) fn sets(&self) -> &[LayerExperts] {
        match self {
            Self::Layer(set) => std::slice::from_ref(set),
            Self::Group(sets) => sets,
        }
    }
}

/// Remote function of a plan.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RemoteFunction {
    pub(super) name: String,
    /// Listing of its experts in the plan.
    pub(super) listing: String,
    pub(super) hosted: Hosted,
    pub(super) memory_mb: u32,
    pub(super) millicores: u32,
    pub(super) replicas: u32,
}

/// Returns the remote functions of `plan`: layers in order, or groups by number.
///
/// # Errors
/// A listing is invalid, two functions host the same expert, or a number exceeds its limit.
pub(super) fn remote_functions_of(plan: &MoEPlanSpec) -> Result<Vec<RemoteFunction>, BuildError> {
    let invalid = |message: String| Err(BuildError::Experts(message));
    if plan.groups.len() > MAX_GROUPS {
        return invalid(format!("expected at most {MAX_GROUPS} groups, got {}", plan.groups.len()));
    }
    if !plan.groups.is_empty() && !plan.remote.is_empty() {
        return invalid("expected functions of layers or of groups, got both".to_owned());
    }
    let layers = plan.remote.iter().map(layer_function_of);
    let groups = plan.groups.iter().enumerate().map(|(number, group)| group_function_of(number, group));
    let mut taken: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    let mut count = 0;
    let mut remote_functions = Vec::new();
    for remote_function in layers.chain(groups) {
        let remote_function = remote_function?;
        let name = tier(&remote_function.name);
        if !(1..=MAX_REPLICAS).contains(&remote_function.replicas) {
            return invalid(format!(
                "{name} has {} replicas, expected 1 to {MAX_REPLICAS}",
                remote_function.replicas
            ));
        }
        if remote_function.hosted.sets().iter().all(|set| set.experts.is_empty()) {
            return invalid(format!("{name} hosts no experts"));
        }
        for set in remote_function.hosted.sets() {
            let known = taken.entry(set.layer).or_default();
            if let Some(duplicate) = set.experts.iter().find(|expert| !known.insert(**expert)) {
                return invalid(format!(
                    "{name} hosts expert {duplicate} of layer {}, which another function hosts",
                    set.layer
                ));
            }
            count += set.experts.len();
        }
        if count > MAX_EXPERTS {
            return invalid(format!("expected at most {MAX_EXPERTS} remote experts"));
        }
        remote_functions.push(remote_function);
    }
    Ok(remote_functions)
}

fn layer_function_of(remote_function: &RemotePlan) -> Result<RemoteFunction, BuildError> {
    let hosted = remote_function.experts().map_err(BuildError::Experts)?;
    Ok(RemoteFunction {
        name: layer_function(remote_function.layer),
        listing: format!("{}:{}", remote_function.layer, remote_function.experts),
        hosted: Hosted::Layer(hosted),
        memory_mb: remote_function.memory_mb,
        millicores: millicores_for_memory(remote_function.memory_mb),
        replicas: remote_function.replicas,
    })
}

fn group_function_of(number: usize, group: &GroupPlan) -> Result<RemoteFunction, BuildError> {
    let hosted = group.experts().map_err(BuildError::Experts)?;
    Ok(RemoteFunction {
        name: group_function(number),
        listing: group.experts.clone(),
        hosted: Hosted::Group(hosted),
        memory_mb: group.memory_mb,
        millicores: group.cpu_millicores.unwrap_or_else(|| millicores_for_memory(group.memory_mb)),
        replicas: group.replicas,
    })
}
