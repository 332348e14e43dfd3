use crate::digest::digest;
use crate::ownership::owned_meta;
use kube::ResourceExt;
use remoe_api::{GroupPlan, MainPlan, MoEDeployment, MoEPlan, MoEPlanSpec, RemotePlan};

/// The name of a plan's object.
pub(crate) fn plan_name(deployment: &str, hash: &str) -> String {
    format!("{deployment}-{hash}")
}

/// The hash of what `plan` says is where, how large it is and what that was made from. How many functions
/// are alike is none of it, nor what is expected of them: both may be others while every expert stays where
/// it is.
///
/// # Errors
/// The plan cannot be written as JSON.
pub(crate) fn plan_hash(plan: &MoEPlanSpec) -> Result<String, serde_json::Error> {
    // Without `..`: whether a new field is content is to be decided.
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
        // Part of the inputs.
        prediction: _,
        basis: _,
    } = plan;
    let main = (memory_mb, cpu_millicores, limit_mb, kv_cache_bytes, fallback_bytes);
    let of_layer = |RemotePlan { layer, experts, memory_mb, replicas: _ }: &RemotePlan| {
        (*layer, experts.clone(), *memory_mb)
    };
    let of_group = |GroupPlan { experts, memory_mb, cpu_millicores, replicas: _ }: &GroupPlan| {
        (experts.clone(), *memory_mb, *cpu_millicores)
    };
    let layers: Vec<_> = remote.iter().map(of_layer).collect();
    let groups: Vec<_> = groups.iter().map(of_group).collect();
    digest(&((deployment, inputs, model, device, profile, workload), main, layers, groups))
}

/// The object of a plan, named by its content, and that hash.
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
