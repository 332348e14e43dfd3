//! Everything that a hostile tenant can write: no reconcile panics, none touches foreign objects, its writes stay
//! within the deployment, and other tenants are served as before.

use crate::fleet::OtherDeployments;
use crate::testing::corrupted::{AT_ONCE, SLEEPING, SeededChoices, as_read, check, is_healed, tenants};
use crate::testing::world::World;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::ResourceExt;
use remoe_api::GatewayDemand;
use serde_json::{Value, json};
use std::ops::Range;
use std::thread;

/// Number of corrupted objects, a few per reconcile: in every change, and by `make nightly`.
const OBJECTS: [usize; 2] = [2_000, 10_000];
/// Stride over the numbers at their limits in every change. It is below the five limits, so every number is tried.
const STRIDE: usize = 4;

/// Returns whether to try everything, which takes minutes: `make nightly` sets the variable.
fn is_nightly() -> bool {
    std::env::var_os("REMOE_ALL_PROBLEMS").is_some()
}

/// Returns variants of `value` with each number at each limit, one at a time, including nested values.
fn at_limits(value: &Value) -> Vec<Value> {
    match value {
        Value::Number(_) => {
            [json!(u32::MAX), json!(u64::MAX), json!(i64::MIN), json!(1e308), json!(0)].into()
        }
        Value::Object(map) => {
            let changed = map.iter().flat_map(|(key, inner)| {
                at_limits(inner).into_iter().map(|inner| {
                    let mut map = map.clone();
                    map.insert(key.clone(), inner);
                    Value::Object(map)
                })
            });
            changed.collect()
        }
        Value::Array(list) => {
            let changed = list.iter().enumerate().flat_map(|(index, inner)| {
                at_limits(inner).into_iter().map(move |inner| {
                    let mut list = list.clone();
                    list[index] = inner;
                    Value::Array(list)
                })
            });
            changed.collect()
        }
        Value::String(text) if text.starts_with('{') => {
            let inner = serde_json::from_str(text).unwrap_or_default();
            at_limits(&inner).into_iter().map(|inner| json!(inner.to_string())).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns such variants of `object` that the API accepts.
fn with_limits<K: serde::Serialize + DeserializeOwned>(object: &K) -> Vec<K> {
    let changed = at_limits(&serde_json::to_value(object).unwrap());
    let stride = if is_nightly() { 1 } else { STRIDE };
    changed.into_iter().step_by(stride).filter_map(|object| serde_json::from_value(object).ok()).collect()
}

/// Thousands of reconciles, each with a plan: every tenant on its own thread.
fn look_at_limits_of(positions: Range<usize>) {
    let tenants = tenants();
    let looks: usize = thread::scope(|threads| {
        let tenants = tenants[positions].iter().map(|tenant| threads.spawn(move || look_at_limits(tenant)));
        let tenants: Vec<_> = tenants.collect();
        tenants.into_iter().map(|looks| looks.join().unwrap()).sum()
    });
    println!("{looks} numbers at their limits");
}

#[test]
fn numbers_at_their_limits_are_reconciled() {
    look_at_limits_of(0..SLEEPING);
}

#[test]
fn numbers_of_a_sleeping_tenant_at_their_limits_are_reconciled() {
    look_at_limits_of(SLEEPING..SLEEPING + 1);
}

#[test]
fn numbers_of_a_busy_tenant_at_their_limits_are_reconciled() {
    look_at_limits_of(SLEEPING + 1..SLEEPING + 2);
}

#[test]
fn numbers_of_other_tenants_at_their_limits_are_reconciled() {
    look_at_limits_of(SLEEPING + 2..tenants().len());
}

/// Reconciles `tenant` with each of its numbers at each limit. Returns the number of reconciles.
fn look_at_limits(tenant: &World) -> usize {
    let mut looks = 0;
    let mut reconcile = |change: &dyn Fn(&mut World)| {
        let mut world = tenant.clone();
        change(&mut world);
        let (_, diff, stated) = world.look_and_state();
        check(&world, &diff, &stated);
        looks += 1;
    };
    with_limits(&tenant.owner).iter().for_each(|owner| reconcile(&|world| world.owner = owner.clone()));
    let existing = &tenant.observed;
    for changed in existing.demand.iter().flat_map(with_limits) {
        reconcile(&|world| world.observed.demand = Some(changed.clone()));
    }
    for changed in existing.routing.iter().flat_map(with_limits) {
        reconcile(&|world| world.observed.routing = Some(changed.clone()));
    }
    for changed in existing.model.iter().flat_map(with_limits) {
        reconcile(&|world| world.observed.model = Some(changed.clone()));
    }
    for changed in existing.plans.last().into_iter().flat_map(with_limits) {
        reconcile(&|world| *world.observed.plans.last_mut().unwrap() = changed.clone());
    }
    for (index, changed) in existing.pods.iter().map(with_limits).enumerate().take(2) {
        for pod in changed {
            reconcile(&|world| world.observed.pods[index] = pod.clone());
        }
    }
    for (name, map) in existing.details.maps.iter().filter_map(|(name, map)| Some((name, map.as_ref()?))) {
        for changed in with_limits(map) {
            reconcile(&|world| drop(world.observed.details.maps.insert(name.clone(), Some(changed.clone()))));
        }
    }
    for (name, record) in
        existing.details.profiles.iter().filter_map(|(name, record)| Some((name, record.as_ref()?)))
    {
        for changed in with_limits(record) {
            reconcile(&|world| {
                drop(world.observed.details.profiles.insert(name.clone(), Some(changed.clone())))
            });
        }
    }
    looks
}

/// The sum of two valid numbers overflows.
#[test]
fn what_gateways_say_together_is_looked_at() {
    let with_gateways = tenants().into_iter().filter(|world| world.observed.demand.is_some());
    let mut looks = 0;
    for mut world in with_gateways {
        let said = world.demand().gateways().to_vec();
        for entry in &said {
            let most = GatewayDemand { waiting: u32::MAX, in_flight: u32::MAX, load: None, ..entry.clone() };
            world.say(most);
            looks += 1;
        }
        let (_, diff, stated) = world.look_and_state();
        check(&world, &diff, &stated);
    }
    assert!(looks >= 4, "{looks}");
}

#[test]
fn corrupt_objects_are_reconciled_and_others_healed_meanwhile() {
    let tenants = tenants();
    let mut neighbour = World::new(json!({"replicas": 2}));
    neighbour.owner.metadata.name = Some("other".to_owned());
    neighbour.owner.metadata.uid = Some("uid-2".to_owned());
    neighbour.settle();
    let functions = neighbour.observed.pods.len();
    let mut dice = SeededChoices::Thrown(7);
    let (mut corrupted, mut looks) = (0, 0);
    while corrupted < OBJECTS[usize::from(is_nightly())] {
        let mut world = tenants[looks % tenants.len()].clone();
        for _ in 0..=dice.below(AT_ONCE) {
            corrupted += usize::from(dice.spoil_world(&mut world));
        }
        as_read(&mut world);
        let (_, diff, stated) = world.look_and_state();
        check(&world, &diff, &stated);
        let others = OtherDeployments::sum("theirs", [("spoiled", world.function_counts)]);
        is_healed(&neighbour, looks % functions, &world.observed.pods, others);
        looks += 1;
    }
    println!("{corrupted} spoiled objects in {looks} looks");
}

/// Corrupted objects are replaced, and then the state is as before.
#[test]
fn what_a_tenant_spoiled_is_healed() {
    let mut reference = World::new(json!({"replicas": 2}));
    reference.settle();
    for seed in 0..40 {
        let mut world = World::new(json!({"replicas": 2}));
        world.settle();
        let mut dice = SeededChoices::Thrown(seed);
        let corrupted = &mut world.observed;
        dice.spoil_option(&mut corrupted.model);
        dice.spoil_option(&mut corrupted.routing);
        dice.spoil_one(&mut corrupted.services);
        corrupted.services.retain(|service| service.uid().is_some_and(|uid| !uid.starts_with("another")));
        as_read(&mut world);
        world.settle();
        assert_eq!(world.names(), reference.names(), "seed {seed}");
    }
}

/// The seeds of the fuzz target `tenant`, and inputs that once were findings (`fuzz/regressions/tenant/`).
#[test]
fn fuzz_seeds_and_kept_findings_do_no_harm() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/regressions/tenant");
    let kept = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
    for input in crate::testing::tenant::seeds().into_iter().chain(kept) {
        crate::testing::tenant::run(&input);
    }
}
