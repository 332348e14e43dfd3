//! Plan objects: their names and hashes.

use crate::digest::digest;
use crate::ownership::owned_meta;
use kube::ResourceExt;
use remoe_api::{GroupPlan, MainPlan, MoEDeployment, MoEPlan, MoEPlanSpec, RemotePlan};

/// Returns the name of a plan's object.
pub(crate) fn plan_name(deployment: &str, hash: &str) -> String {
    format!("{deployment}-{hash}")
}

/// Returns the hash of the content of `plan`: placement, sizes, and inputs. It excludes numbers of replicas and
/// expectations, which may change while every expert stays where it is.
///
/// # Errors
/// The plan cannot be written as JSON.
pub(crate) fn plan_hash(plan: &MoEPlanSpec) -> Result<String, serde_json::Error> {
    // No `..` in the pattern: a new field must be considered here.
    let MoEPlanSpec {
        deployment,
        inputs,
        model,
        device,
        profile,
        workload,
        main: MainPlan { memory_mb, cpu_millicores, limit_mb, kv_cache_bytes, fallback_bytes },
        remote,
        groups,
        numbers: _,
        shown: _,
        verdict: _,
        warning: _,
        // These are part of the inputs.
        prediction: _,
        basis: _,
    } = plan;
    let main = (memory_mb, cpu_millicores, limit_mb, kv_cache_bytes, fallback_bytes);
    let layer_function_of = |RemotePlan { layer, experts, memory_mb, replicas: _ }: &RemotePlan| {
        (*layer, experts.clone(), *memory_mb)
    };
    let group_function_of = |GroupPlan { experts, memory_mb, cpu_millicores, replicas: _ }: &GroupPlan| {
        (experts.clone(), *memory_mb, *cpu_millicores)
    };
    let layers: Vec<_> = remote.iter().map(layer_function_of).collect();
    let groups: Vec<_> = groups.iter().map(group_function_of).collect();
    digest(&((deployment, inputs, model, device, profile, workload), main, layers, groups))
}

/// Returns the object of a plan, and its hash, which is part of its name.
///
/// # Errors
/// The plan cannot be written as JSON.
pub(crate) fn plan_object(
    owner: &MoEDeployment,
    spec: MoEPlanSpec,
) -> Result<(String, MoEPlan), serde_json::Error> {
    let hash = plan_hash(&spec)?;
    let metadata = owned_meta(owner, |deployment| plan_name(deployment, &hash));
    Ok((hash, MoEPlan { metadata, spec }))
}

/// Returns the plan of `owner` with this hash.
pub(crate) fn find_plan<'a>(
    owner: &MoEDeployment,
    plans: impl IntoIterator<Item = &'a MoEPlan>,
    hash: &str,
) -> Option<&'a MoEPlan> {
    let name = plan_name(&owner.name_any(), hash);
    plans.into_iter().find(|plan| plan.name_any() == name)
}
