//! Scaling changes only the number of replicas.

use crate::manifests::{Revision, plan_hash, plan_object};
use crate::rollout::revision_hash;
use crate::testing::example::{built, deployment, plan, plan_of_groups, planning};
use crate::tests::rollout::World;
use remoe_api::{MoEDeployment, MoEPlanSpec};
use serde_json::json;

fn scaled(replicas: u32) -> MoEDeployment {
    deployment(json!({ "replicas": replicas }))
}

fn identities(revision: &Revision) -> Vec<String> {
    revision.functions().map(|function| function.identity.clone()).collect()
}

#[test]
fn counts_of_functions_are_no_part_of_a_plans_name() {
    let (one, many) = (plan_of_groups(&scaled(1), 2), plan_of_groups(&scaled(5), 2));
    // More main functions share the reserved functions: the figures differ, the plan does not.
    assert_eq!(one.inputs, many.inputs);
    assert_eq!(plan_hash(&one).unwrap(), plan_hash(&many).unwrap());
    assert_eq!(
        plan_object(&scaled(1), one.clone()).unwrap().1.metadata.name,
        plan_object(&scaled(5), many).unwrap().1.metadata.name
    );
    let mut more = one.clone();
    more.groups.iter_mut().for_each(|group| group.replicas += 3);
    assert_eq!(plan_hash(&one).unwrap(), plan_hash(&more).unwrap());
    let layered = plan(&scaled(1));
    let mut more = layered.clone();
    more.remote.iter_mut().for_each(|part| part.replicas += 3);
    assert_eq!(plan_hash(&layered).unwrap(), plan_hash(&more).unwrap());
    // A plan defines the placement of experts and the sizes of functions.
    let change = |change: fn(&mut MoEPlanSpec)| {
        let mut other = one.clone();
        change(&mut other);
        plan_hash(&other).unwrap()
    };
    let base = plan_hash(&one).unwrap();
    assert_ne!(base, change(|plan| plan.groups[0].memory_mb += 100));
    assert_ne!(base, change(|plan| plan.groups[0].cpu_millicores = Some(1)));
    assert_ne!(base, change(|plan| plan.groups[0].experts = "1:0".to_owned()));
    assert_ne!(base, change(|plan| plan.main.cpu_millicores = Some(1)));
    assert_ne!(base, change(|plan| plan.inputs = "others".to_owned()));
}

/// The existing plan applies to the scaled deployment: it is found by its inputs.
#[test]
fn a_scaled_deployment_has_the_same_inputs_and_functions() {
    let (one, many) = (scaled(1), scaled(64));
    assert_eq!(planning(&one).inputs, planning(&many).inputs);
    let plan = plan_of_groups(&one, 3);
    let (before, after) = (built(&one, &plan), built(&many, &plan));
    assert_eq!(identities(&before), identities(&after));
    assert_eq!(revision_hash(&before).unwrap(), revision_hash(&after).unwrap());
}

fn uids(world: &World) -> Vec<String> {
    world.pods.iter().filter(|pod| pod.ends_by.is_none()).map(|pod| pod.uid.clone()).collect()
}

#[test]
fn pods_stay_while_others_come_and_go() {
    let owner = scaled(1);
    let plan = plan_of_groups(&owner, 2);
    let mut world = World::new(built(&owner, &plan));
    world.settle();
    let before = uids(&world);
    let main = world.target.main.identity.clone();
    let current_generation = world.table.entries[&main].clone();
    // More main functions: nothing new is pushed.
    world.target = built(&scaled(3), &plan);
    world.settle();
    world.check_settled();
    assert_eq!(world.table.entries[&main], current_generation);
    assert!(before.iter().all(|uid| uids(&world).contains(uid)));
    assert_eq!(uids(&world).len(), before.len() + 2);
    // More of a group: the same revision, with more endpoints.
    let mut more = plan.clone();
    more.groups[0].replicas = 3;
    world.target = built(&scaled(3), &more);
    world.settle();
    world.check_settled();
    let grown = &world.table.entries[&main];
    assert_eq!(
        (&grown.plan, &grown.revision, &grown.groups),
        (&current_generation.plan, &current_generation.revision, &current_generation.groups)
    );
    assert_eq!(grown.endpoints.len(), current_generation.endpoints.len() + 2);
    assert!(before.iter().all(|uid| uids(&world).contains(uid)));
    // And back.
    world.target = built(&owner, &plan);
    world.settle();
    world.check_settled();
    assert_eq!(uids(&world), before);
}
