//! The whole reconcile in a cluster in memory: it settles wherever it was interrupted, and writes nothing after that.

use crate::SignerName;
use crate::identity::knows_gateways;
use crate::names::{COMPONENT, Component, FUNCTION, label};
use crate::observed::Observed;
use crate::plan::PlanState;
use crate::rollout_turn;
use crate::routing::RoutingTable;
use crate::testing::corrupted::SeededChoices;
use crate::testing::world::{World, WriteFault};
use crate::write::Write;
use kube::ResourceExt;
use remoe_api::{ConditionType, MoEDeploymentSpec, MoEDeploymentStatus};
use serde_json::json;
use std::net::SocketAddrV6;

/// Reconciles with faults.
const BAD_LOOKS: usize = 25;

/// Change of a deployment.
type WorldChange = fn(&mut World);

fn scale(world: &mut World) {
    world.owner.spec.scaling.min = 3;
}

fn plan_anew(world: &mut World) {
    let spec = json!({"slo": {"ttft": "9s", "tpot": "140ms"}, "remoteExperts": {"maxReplicas": 2}});
    world.owner.spec = respecified(spec);
}

/// Another source and other nodes: inspector and profiler run again.
fn move_over(world: &mut World) {
    let spec = json!({"model": {"source": "pvc://others/demo"},
        "main": {"template": {"nodeSelector": {"pool": "a"}}}});
    world.owner.spec = respecified(spec);
}

fn respecified(spec: serde_json::Value) -> MoEDeploymentSpec {
    crate::testing::example::deployment(spec).spec
}

fn lose_everything(world: &mut World) {
    let existing = &mut world.observed;
    (existing.model, existing.routing) = (None, None);
    existing.details.profiles.clear();
    existing.services.clear();
    existing.budgets.clear();
}

/// The previous release stored everything in ConfigMaps.
fn upgrade(world: &mut World) {
    world.keep_in_config_maps();
}

/// Changes of a deployment; `None` is its creation.
const CHANGES: [Option<WorldChange>; 6] =
    [None, Some(scale), Some(plan_anew), Some(move_over), Some(lose_everything), Some(upgrade)];

fn begin(change: Option<WorldChange>) -> World {
    let mut world = World::new(json!({}));
    if let Some(change) = change {
        world.settle();
        change(&mut world);
    }
    world
}

/// Kills the operator after every write of creating a deployment, including inspector and profiler, and of every
/// change of it.
#[test]
fn killed_after_any_write_the_line_ends_at_the_same_state() {
    for change in CHANGES {
        let begin = || begin(change);
        let mut reference = begin();
        let writes = reference.settle();
        assert!(writes > 1);
        for crash in 1..writes {
            let mut world = begin();
            let mut left = crash;
            while left > 0 {
                let (_, diff) = world.reconcile();
                left -= world.write(&diff, left);
                world.run();
            }
            world.settle();
            assert_eq!(world.objects(), reference.objects(), "after {crash} writes");
        }
    }
}

/// Refused writes, writes without an answer, and stale lists, anywhere in the creation of a deployment and in every
/// change of it.
#[test]
fn reconcile_converges_whatever_the_api_server_answers() {
    let mut met = [0_u32; 3];
    for change in CHANGES {
        let mut reference = begin(change);
        reference.settle();
        for seed in 0..24 {
            let (mut world, mut dice) = (begin(change), SeededChoices::Thrown(seed));
            let mut before = world.observed.clone();
            for _ in 0..BAD_LOOKS {
                if dice.below(3) == 0 {
                    met[0] += 1;
                    world.stale = Some(partly_old(&world, &before, &mut dice));
                }
                let (_, diff) = world.reconcile();
                before = world.observed.clone();
                world.write_as(&diff, usize::MAX, |_| match dice.below(8) {
                    0 => {
                        met[1] += 1;
                        Some(WriteFault::Refused)
                    }
                    1 => {
                        met[2] += 1;
                        Some(WriteFault::Lost)
                    }
                    _ => None,
                });
                world.run();
            }
            world.settle();
            assert_eq!(world.objects(), reference.objects(), "seed {seed}");
        }
    }
    assert!(met.iter().all(|met| *met > 100), "{met:?}");
}

/// Returns the current objects, with one kind of them from one reconcile ago.
fn partly_old(world: &World, before: &Observed, dice: &mut SeededChoices<'_>) -> Observed {
    let (mut seen, old) = (world.observed.clone(), before.clone());
    match dice.below(6) {
        0 | 1 => seen.pods = old.pods,
        2 => seen.services = old.services,
        3 => seen.budgets = old.budgets,
        4 => seen.plans = old.plans,
        _ => (seen.model, seen.routing) = (old.model, old.routing),
    }
    seen
}

#[test]
fn a_settled_deployment_is_not_written() {
    let mut world = World::new(json!({"replicas": 2}));
    assert!(world.settle() > 10);
    for _ in 0..3 {
        world.run();
        assert_eq!(world.reconcile().1.writes, []);
    }
}

/// A plan that missed the progress deadline is rolled back to the serving one, until the spec changes.
#[test]
fn a_plan_that_failed_gives_way_to_the_one_that_serves() {
    let mut world = World::new(json!({}));
    world.settle();
    let served = world.reconcile().0.running.unwrap();
    let pods = world.observed.pods.len();
    plan_anew(&mut world);
    let (planned, _) = world.reconcile();
    let PlanState::Planned { hash, .. } = planned.state else { panic!("{:?}", planned.state) };
    assert_ne!(hash, served);
    assert_eq!(planned.target.unwrap().revision.plan, hash);
    world.owner.status = Some(MoEDeploymentStatus {
        observed_generation: Some(1),
        failed_plan: Some(hash.clone()),
        ..MoEDeploymentStatus::default()
    });
    let (planned, _) = world.reconcile();
    assert_eq!(planned.target.unwrap().revision.plan, served);
    assert_eq!(planned.issues[0].reason, "RolledBack");
    world.settle();
    assert_eq!(world.observed.pods.len(), pods);
    world.owner.metadata.generation = Some(2);
    assert_eq!(world.reconcile().0.target.unwrap().revision.plan, hash);
}

/// A rollout that no user requested, here to a new version of the operator, waits for its turn; until then functions
/// stay as they are. A requested rollout does not wait, nor does a repair.
#[test]
fn unrequested_rollout_waits_its_turn() {
    let mut world = World::new(json!({}));
    world.settle();
    world.owner.metadata.generation = Some(1);
    world.owner.status = Some(world.look_and_state().2);
    let is_needed = |world: &mut World| {
        let target = world.reconcile().0.target.unwrap().revision;
        let table = world.observed.table(&world.owner);
        rollout_turn::needs_turn(&world.owner, &world.observed.functions(&world.owner), &table, &target)
    };
    assert!(!is_needed(&mut world), "nothing is new");
    world.environment.main_image = "main:2".to_owned();
    assert!(is_needed(&mut world));

    let functions = |write: &&Write| matches!(write, Write::Create(_) | Write::Delete(_) | Write::Routing(_));
    world.soft_state.has_rollout_turn = false;
    let (_, diff, stated) = world.look_and_state();
    assert_eq!(diff.writes.iter().find(functions), None);
    assert!(!diff.polled_mains.is_empty() && !diff.settled, "main functions are asked on");
    let reason = |kind: ConditionType| stated.condition(kind).unwrap().reason.clone();
    assert_eq!(reason(ConditionType::Progressing), "WaitsItsTurn");
    assert_eq!(stated.condition(ConditionType::Ready).unwrap().status, "True");

    world.owner.metadata.generation = Some(2);
    assert!(!is_needed(&mut world), "it was requested");
    world.owner.metadata.generation = Some(1);
    let (before, at) = (world.clone(), world.observed.pods.len() - 1);
    for lost in [0, at] {
        world = before.clone();
        world.observed.pods.remove(lost);
        assert!(!is_needed(&mut world), "pod {lost} is missing");
    }
    world = before;
    world.soft_state.has_rollout_turn = true;
    assert!(
        world.reconcile().1.writes.iter().any(|write| matches!(write, Write::Create(_))),
        "it has its turn"
    );
    world.settle();
    assert!(!is_needed(&mut world));
}

/// A deployment without a feasible plan keeps running.
#[test]
fn what_runs_is_healed_whatever_the_plan_is() {
    let mut world = World::new(json!({}));
    world.settle();
    world.owner.spec = respecified(json!({"slo": {"ttft": "1ms", "tpot": "1ms"}}));
    world.owner.status = None;
    let lost = world.observed.pods.remove(0);
    let (planned, diff) = world.reconcile();
    assert!(matches!(planned.state, PlanState::Refused(_)), "{:?}", planned.state);
    let made = diff.writes.iter().filter_map(|write| match write {
        Write::Create(creation) => creation.pod.metadata.labels.clone(),
        _ => None,
    });
    assert_eq!(made.collect::<Vec<_>>(), [lost.metadata.labels.unwrap()]);
}

/// IPv6-only cluster: pods listen on IPv6, and addresses are in brackets before ports.
#[test]
fn functions_of_an_ipv6_cluster_find_each_other() {
    let mut world = World::with_gateways(json!({"replicas": 2}), &["a"]);
    world.network = "fd00::";
    world.settle();
    let table = RoutingTable::from_record(world.observed.routing.as_ref().unwrap());
    let routed = table.entries.values().flat_map(|generation| &generation.endpoints);
    let experts: Vec<SocketAddrV6> = routed.map(|endpoint| endpoint.address.parse().unwrap()).collect();
    let mains = world.demand().spec.mains.iter();
    let mains: Vec<SocketAddrV6> = mains.map(|main| main.address.parse().unwrap()).collect();
    assert!(!experts.is_empty() && experts.iter().all(|address| address.port() == 9001), "{experts:?}");
    assert!(mains.len() == 2 && mains.iter().all(|address| address.port() == 8000), "{mains:?}");
    for pod in &world.observed.pods {
        let spec = pod.spec.as_ref().unwrap();
        let arguments = spec.containers[0].args.iter().flatten();
        let listening = arguments.filter(|argument| argument.starts_with("[::]:")).count();
        // Main functions listen for clients and control, remote ones for experts, both for probes and metrics.
        let all = if label(&pod.metadata, COMPONENT) == Component::Main.name() { 4 } else { 3 };
        assert!(listening == all || !pod.labels().contains_key(FUNCTION), "{}", pod.name_any());
    }
}

/// A pod's spec shows if a main function accepts requests only from gateways. Those without a signer, or of an
/// earlier release, get plaintext requests until they are replaced.
#[test]
fn gateways_learn_which_main_functions_require_identity() {
    let mut world = World::with_gateways(json!({"replicas": 2}), &["a"]);
    world.environment.signer = SignerName::Unsigned;
    world.settle();
    world.environment.signer = SignerName::Operator;
    let (mut named, mut open) = (0, 0);
    for _ in 0..60 {
        let (_, diff) = world.reconcile();
        world.write(&diff, usize::MAX);
        for main in &world.demand().spec.mains {
            let pod = world.observed.pods.iter().find(|pod| pod.uid().as_ref() == Some(&main.uid));
            let Some(pod) = pod else { continue };
            let name = knows_gateways(pod).then_some("spiffe://remoe/test/uid-1/main");
            assert_eq!(main.identity.as_deref(), name, "{}", main.pod);
            *if name.is_some() { &mut named } else { &mut open } += 1;
        }
        if diff.settled && diff.writes.is_empty() {
            break;
        }
        world.run();
    }
    assert!(named > 0 && open > 0, "{named} {open}");
    assert!(world.demand().spec.mains.iter().all(|main| main.identity.is_some()));
}
