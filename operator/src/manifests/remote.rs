//! The remote functions that a plan asks for, checked: plans are read from the API.

use super::functions::BuildError;
use crate::names::{group_function, layer_function, tier};
use crate::quantity::millicores_for_memory;
use remoe_api::{GroupPlan, MAX_GROUPS, MAX_REPLICAS, MoEPlanSpec, RemotePlan};
use remoe_proto::v1::LayerExperts;
use std::collections::{BTreeMap, BTreeSet};

/// Experts that are remote in all, at most: no model has more.
const MAX_EXPERTS: usize = 1 << 18;

/// Experts that a remote function hosts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Hosted {
    /// All remote experts of a layer.
    Layer(LayerExperts),
    /// Some of the remote experts of several layers.
    Group(Vec<LayerExperts>),
}

impl Hosted {
    /// The experts of each layer.
    pub(crate) fn sets(&self) -> &[LayerExperts] {
        match self {
            Self::Layer(set) => std::slice::from_ref(set),
            Self::Group(sets) => sets,
        }
    }
}

/// A remote function of a plan.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RemotePart {
    pub(super) name: String,
    /// Experts of the function as the plan lists them.
    pub(super) listing: String,
    pub(super) hosted: Hosted,
    pub(super) memory_mb: u32,
    pub(super) millicores: u32,
    pub(super) replicas: u32,
}

/// The remote functions of `plan`, those of layers in its order, groups by number.
///
/// # Errors
/// A listing that cannot be read, an expert in two functions, or more of something than there can be.
pub(super) fn remote_parts(plan: &MoEPlanSpec) -> Result<Vec<RemotePart>, BuildError> {
    let wrong = |message: String| Err(BuildError::Experts(message));
    if plan.groups.len() > MAX_GROUPS {
        return wrong(format!("expected at most {MAX_GROUPS} groups, got {}", plan.groups.len()));
    }
    if !plan.groups.is_empty() && !plan.remote.is_empty() {
        return wrong("expected functions of layers or of groups, got both".to_owned());
    }
    let layers = plan.remote.iter().map(of_layer);
    let groups = plan.groups.iter().enumerate().map(|(number, group)| of_group(number, group));
    let mut taken: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    let mut count = 0;
    let mut parts = Vec::new();
    for part in layers.chain(groups) {
        let part = part?;
        let name = tier(&part.name);
        if !(1..=MAX_REPLICAS).contains(&part.replicas) {
            return wrong(format!("{name} has {} replicas, expected 1 to {MAX_REPLICAS}", part.replicas));
        }
        if part.hosted.sets().iter().all(|set| set.experts.is_empty()) {
            return wrong(format!("{name} hosts no experts"));
        }
        for set in part.hosted.sets() {
            let known = taken.entry(set.layer).or_default();
            if let Some(twice) = set.experts.iter().find(|expert| !known.insert(**expert)) {
                return wrong(format!(
                    "{name} hosts expert {twice} of layer {}, which another function hosts",
                    set.layer
                ));
            }
            count += set.experts.len();
        }
        if count > MAX_EXPERTS {
            return wrong(format!("expected at most {MAX_EXPERTS} remote experts"));
        }
        parts.push(part);
    }
    Ok(parts)
}

fn of_layer(part: &RemotePlan) -> Result<RemotePart, BuildError> {
    let hosted = part.experts().map_err(BuildError::Experts)?;
    Ok(RemotePart {
        name: layer_function(part.layer),
        listing: format!("{}:{}", part.layer, part.experts),
        hosted: Hosted::Layer(hosted),
        memory_mb: part.memory_mb,
        millicores: millicores_for_memory(part.memory_mb),
        replicas: part.replicas,
    })
}

fn of_group(number: usize, group: &GroupPlan) -> Result<RemotePart, BuildError> {
    let hosted = group.experts().map_err(BuildError::Experts)?;
    Ok(RemotePart {
        name: group_function(number),
        listing: group.experts.clone(),
        hosted: Hosted::Group(hosted),
        memory_mb: group.memory_mb,
        millicores: group.cpu_millicores.unwrap_or_else(|| millicores_for_memory(group.memory_mb)),
        replicas: group.replicas,
    })
}
