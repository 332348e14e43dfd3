//! Converts hosted experts between the planner's form, by position of the layer, and the plan's form, by index of the
//! layer.

use super::{PlanningError, whole_megabytes, whole_millicores};
use crate::quantity::MB;
use remoe_api::{GroupPlan, MoEPlanSpec, RemotePlan};
use remoe_model::Inspection;
use remoe_planner::{Group, LayerPlan, PlanDraft, Problem};
use remoe_proto::format_listing;
use remoe_proto::v1::LayerExperts;
use serde_json::json;

/// Returns the plans of the functions of `layers`, which have the indices `moe_layers`.
pub(super) fn layer_plans(moe_layers: &[u32], layers: &[LayerPlan]) -> Vec<RemotePlan> {
    let remote = moe_layers.iter().zip(layers).filter(|(_, layer)| !layer.remote.is_empty());
    let plan = |(&layer, part): (&u32, &LayerPlan)| {
        let listing = format_listing(&[LayerExperts { layer, experts: part.remote.clone() }]);
        // The listing omits the layer, which the entry names already.
        let experts = listing.split_once(':').map_or(String::new(), |(_, experts)| experts.to_owned());
        RemotePlan { layer, experts, memory_mb: whole_megabytes(part.memory_bytes), replicas: part.replicas }
    };
    remote.map(plan).collect()
}

/// Returns the plans of the functions of `groups` over the layers `moe_layers`. They are sorted by content, so that
/// equal groups have equal numbers.
pub(super) fn group_plans(moe_layers: &[u32], groups: &[Group]) -> Vec<GroupPlan> {
    let sets = |group: &Group| {
        let layers = moe_layers.iter().zip(&group.experts).filter(|(_, experts)| !experts.is_empty());
        layers.map(|(&layer, experts)| (layer, experts.clone())).collect::<Vec<_>>()
    };
    let mut groups: Vec<_> = groups.iter().map(|group| (sets(group), group)).collect();
    groups.sort_by(|(sets, _), (others, _)| sets.cmp(others));
    let plan = |(sets, group): (Vec<(u32, Vec<u32>)>, &Group)| {
        let sets: Vec<_> = sets.into_iter().map(|(layer, experts)| LayerExperts { layer, experts }).collect();
        GroupPlan {
            experts: format_listing(&sets),
            memory_mb: whole_megabytes(group.memory_bytes),
            cpu_millicores: group.vcpus.map(whole_millicores),
            replicas: group.replicas,
        }
    };
    groups.into_iter().map(plan).collect()
}

/// Converts `plan` to the planner's form, for `problem` with the layers `moe_layers`.
///
/// # Errors
/// A listing is invalid, or names a layer without experts.
pub(super) fn draft(
    plan: &MoEPlanSpec,
    moe_layers: &[u32],
    problem: &Problem,
) -> Result<PlanDraft, PlanningError> {
    let invalid = |message: String| PlanningError::Profile(format!("cannot read the stored plan: {message}"));
    let position = |layer: u32| {
        let found = moe_layers.iter().position(|known| *known == layer);
        found.ok_or_else(|| invalid(format!("the model has no experts in layer {layer}")))
    };
    let bytes = |megabytes: u32| u64::from(megabytes) * MB;
    let vcpus_are_separate = problem.specs.main_vcpus.is_some();
    let vcpus =
        |millicores: Option<u32>| millicores.filter(|_| vcpus_are_separate).map(|it| f64::from(it) / 1000.0);
    let mut groups = Vec::new();
    for group in &plan.groups {
        let mut sets = group.experts().map_err(invalid)?;
        for set in &mut sets {
            set.layer = u32::try_from(position(set.layer)?).unwrap_or(u32::MAX);
        }
        groups.push(json!({
            "experts": format_listing(&sets), "memory_bytes": bytes(group.memory_mb),
            "vcpus": vcpus(group.cpu_millicores), "replicas": group.replicas,
            // All groups sleep after the deployment's idle window, if it has one.
            "sleeps": problem.remote_idle_seconds.is_some(),
        }));
    }
    let mut layers = vec![json!({"remote": [], "memory_bytes": 0, "replicas": 0}); moe_layers.len()];
    for part in &plan.remote {
        let layer = layers.get_mut(position(part.layer)?);
        let set = part.experts().map_err(invalid)?;
        if let Some(layer) = layer {
            *layer = json!({
                "remote": set.experts, "memory_bytes": bytes(part.memory_mb), "replicas": part.replicas,
            });
        }
    }
    if !groups.is_empty() {
        // Groups host all remote experts.
        layers.clear();
    }
    let draft = json!({
        "main_bytes": bytes(plan.main.memory_mb), "main_vcpus": vcpus(plan.main.cpu_millicores),
        "layers": layers, "groups": groups,
    });
    PlanDraft::from_json(&draft.to_string()).map_err(|error| invalid(error.to_string()))
}

/// Checks that `model` has all experts that `plan` lists.
///
/// # Errors
/// Names the first missing expert, or an invalid listing.
pub(crate) fn check_hosted(plan: &MoEPlanSpec, model: &Inspection) -> Result<(), String> {
    let check = |set: &LayerExperts| {
        if !model.moe_layers.contains(&(set.layer as usize)) {
            return Err(format!("the model has no experts in layer {}", set.layer));
        }
        match set.experts.iter().find(|expert| **expert as usize >= model.experts) {
            Some(expert) => {
                let most = model.experts;
                Err(format!("layer {} has no expert {expert}, expected ids below {most}", set.layer))
            }
            None => Ok(()),
        }
    };
    plan.remote.iter().try_for_each(|part| check(&part.experts()?))?;
    plan.groups.iter().try_for_each(|group| group.experts()?.iter().try_for_each(check))
}
