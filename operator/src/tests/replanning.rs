//! Plans that follow expert usage, in a cluster in memory.

use crate::diff::Diff;
use crate::names::{Component, FUNCTION, REPLICA, label};
use crate::planning_pool::MAX_REMOTE_HOLD;
use crate::testing::example::{
    EXPERTS, LAYERS, built, deployment, environment, gateway_service, large, mix, plan,
};
use crate::tests::scene::{ENOUGH, Scene, spec};
use crate::write::Write;
use kube::ResourceExt;
use remoe_api::{DemandPhase, MixOf, MoEDeploymentStatus, MoEPlanSpec, PredictionOrder, RequestMix};
use remoe_predictor::UsageShares;
use remoe_proto::v1::LayerExperts;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// Returns the remote experts by layer.
fn remote(plan: &MoEPlanSpec) -> Vec<Vec<u32>> {
    let owner = deployment(spec());
    built(&owner, plan).remote_sets().into_iter().map(|set| set.experts).collect()
}

/// Returns two experts that are remote in every layer of `plan`, as far as possible.
fn away(plan: &MoEPlanSpec) -> [usize; 2] {
    let remote = remote(plan);
    assert!(remote.len() >= 2, "{remote:?}");
    let everywhere = |expert: &usize| remote.iter().all(|layer| layer.contains(&(*expert as u32)));
    let mut away = (0..EXPERTS).filter(everywhere);
    [away.next().unwrap(), away.next().unwrap()]
}

/// Returns the number of experts, over all layers, that are `hot` and remote.
fn hot_remote(plan: &MoEPlanSpec, hot: &[usize]) -> usize {
    remote(plan).iter().flatten().filter(|expert| hot.contains(&(**expert as usize))).count()
}

#[test]
fn a_wake_is_planned_for_those_who_wait() {
    let mut scene = Scene::new(spec());
    scene.until(DemandPhase::Asleep);
    let first = scene.newest().clone();
    assert_eq!(first.spec.prediction, None, "nothing was known");
    let hot = away(&first.spec);
    scene.say("a", 3, 0, Some(mix(MixOf::Waiting, &hot)));
    // The usage of answered requests does not matter here.
    scene.say("b", 0, 0, Some(mix(MixOf::Answered, &[EXPERTS - 1])));
    let (planned, diff) = scene.world.reconcile();
    let target = planned.target.clone().unwrap().plan;
    let expected = target.prediction.clone().unwrap();
    assert_eq!((expected.revision, expected.of, expected.requests), (1, MixOf::Waiting, 20));
    assert_eq!(hot_remote(&target, &hot), 0, "{:?}", remote(&target));
    let kinds: Vec<usize> = diff
        .writes
        .iter()
        .filter_map(|write| match write {
            Write::Plan(_) => Some(0),
            Write::Demand(_) => Some(1),
            Write::Create(_) => Some(2),
            _ => None,
        })
        .collect();
    assert!(kinds.is_sorted() && kinds.first() == Some(&0) && kinds.contains(&2), "{kinds:?}");
    scene.world.write(&diff, usize::MAX);
    scene.say("a", 0, 3, None);
    scene.until(DemandPhase::Active);
    assert_eq!(scene.world.reconcile().0.running, planned.target.map(|target| target.revision.plan));
    // The next waking requests use the same experts: the plan is good enough.
    scene.say("a", 0, 0, None);
    scene.until(DemandPhase::Asleep);
    let before = scene.world.observed.plans.len();
    scene.say("a", 1, 0, Some(mix(MixOf::Waiting, &hot)));
    scene.until(DemandPhase::Active);
    assert_eq!(scene.world.observed.plans.len(), before);
    // Different requests need another plan.
    let others = away(&scene.newest().spec);
    scene.say("a", 0, 0, None);
    scene.until(DemandPhase::Asleep);
    scene.say("a", 1, 0, Some(mix(MixOf::Waiting, &others)));
    scene.step();
    assert_eq!(scene.newest().spec.prediction.as_ref().unwrap().revision, 2);
    scene.until(DemandPhase::Active);
    assert_eq!(hot_remote(&scene.newest().spec, &others), 0);
}

/// Steps of the Remoe paper at a wake: the main function starts first, with its pre-allocated size.
#[test]
fn main_functions_start_before_the_plan_of_a_wake_is_there() {
    let mut scene = Scene::new(spec());
    scene.until(DemandPhase::Asleep);
    let first = scene.newest().clone();
    let hot = away(&first.spec);
    scene.world.planner.slow = Some(Duration::from_millis(40));
    scene.say("a", 3, 0, Some(mix(MixOf::Waiting, &hot)));
    let (planned, diff) = scene.world.reconcile();
    let reasons = |diff: &Diff| -> Vec<String> {
        diff.events_after(usize::MAX).into_iter().map(|event| event.reason).collect()
    };
    let said = reasons(&diff);
    assert!(
        ["Predicted", "Preallocated", "Waking"].iter().all(|it| said.iter().any(|said| said == it)),
        "{said:?}"
    );
    assert!(!said.iter().any(|said| said == "Planned"), "{said:?}");
    scene.world.write(&diff, usize::MAX);
    let mains = scene.pods(Component::Main);
    assert_eq!((mains.len(), scene.pods(Component::RemoteExpert).len()), (1, 0), "remote functions wait");
    assert!(diff.requeue_after <= MAX_REMOTE_HOLD);
    let size = planned.target.unwrap().plan.main;
    // The plan arrives: main functions continue, remote ones follow the plan.
    scene.world.planner.arrive();
    let (planned, diff) = scene.world.reconcile();
    let said = reasons(&diff);
    assert!(
        ["Planned", "Partitioned", "Replanned"].iter().all(|it| said.iter().any(|said| said == it)),
        "{said:?}"
    );
    let target = planned.target.clone().unwrap().plan;
    assert_eq!((target.main, target.prediction.as_ref().unwrap().of), (size, MixOf::Waiting));
    assert_eq!(hot_remote(&target, &hot), 0, "{:?}", remote(&target));
    scene.world.write(&diff, usize::MAX);
    assert_eq!(scene.pods(Component::Main), mains, "main functions keep what they were given");
    assert!(!scene.pods(Component::RemoteExpert).is_empty());
    let chain = scene.world.demand().spec.planning.unwrap();
    assert_eq!((chain.wake, chain.predict_us, chain.plan_us), (1, 1500, 40_000));
    scene.say("a", 0, 3, None);
    scene.until(DemandPhase::Active);
    assert_eq!(scene.world.reconcile().0.running, planned.target.map(|target| target.revision.plan));
}

#[test]
fn wake_starts_remote_functions_by_last_plan_if_new_is_late() {
    let mut scene = Scene::new(spec());
    scene.until(DemandPhase::Asleep);
    let hot = away(&scene.newest().spec);
    scene.world.planner.slow = Some(Duration::from_secs(1));
    scene.say("a", 3, 0, Some(mix(MixOf::Waiting, &hot)));
    scene.step();
    let by = scene.newest().name_any();
    assert!(scene.pods(Component::RemoteExpert).is_empty());
    scene.world.planner.wait(MAX_REMOTE_HOLD);
    scene.step();
    let started = scene.pods(Component::RemoteExpert);
    assert!(!started.is_empty(), "they wait no longer");
    assert_eq!(scene.newest().name_any(), by);
    // Later plans are revisions: main functions continue.
    let mains = scene.pods(Component::Main);
    scene.world.planner.arrive();
    scene.step();
    assert_ne!(scene.newest().name_any(), by);
    assert_eq!(scene.pods(Component::Main), mains);
    scene.say("a", 0, 3, None);
    scene.until(DemandPhase::Active);
    for _ in 0..ENOUGH {
        scene.step();
    }
    assert_eq!(hot_remote(&scene.newest().spec, &hot), 0);
    assert_ne!(scene.pods(Component::RemoteExpert), started, "the revision is rolled out");
}

/// If nodes are short of resources, the scheduler places the first pods.
#[test]
fn functions_that_those_who_wait_need_most_are_made_first() {
    let mut scene = Scene::new(spec());
    scene.until(DemandPhase::Asleep);
    // The more evenly a layer's experts are used, the more of its work is remote, for any plan.
    let weight = |at: usize| if at % EXPERTS < 4 { 1.0 } else { [0.02, 0.2, 1.0][at / EXPERTS] };
    let shares = UsageShares::from_weights(EXPERTS, (0..LAYERS * EXPERTS).map(weight).collect()).unwrap();
    let text = shares.to_text(1000).unwrap();
    scene.say("a", 3, 0, Some(RequestMix { shares: text, ..mix(MixOf::Waiting, &[]) }));
    let (planned, diff) = scene.world.reconcile();
    let target = planned.target.unwrap().revision;
    let (rows, layers) = (shares.to_rows(), &scene.world.facts.inspection.moe_layers);
    let work = |name: &str| -> f64 {
        let function = target.remote.iter().find(|function| function.name == name).unwrap();
        let of_set = |set: &LayerExperts| -> f64 {
            let row = &rows[layers.iter().position(|layer| *layer == set.layer as usize).unwrap()];
            set.experts.iter().map(|expert| row[*expert as usize]).sum()
        };
        function.hosted.as_ref().unwrap().sets().iter().map(of_set).sum()
    };
    let made = diff.writes.iter().filter_map(|write| match write {
        Write::Create(creation) => Some(&creation.pod.metadata),
        _ => None,
    });
    let made: Vec<(u32, &str)> =
        made.map(|meta| (label(meta, REPLICA).parse().unwrap(), label(meta, FUNCTION))).collect();
    let (main, remote) = made.split_first().unwrap();
    assert_eq!(main.1, "main");
    assert!(remote.len() >= LAYERS && remote.is_sorted_by_key(|(replica, _)| *replica), "{remote:?}");
    for pair in remote.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        assert!(work(pair[0].1) > work(pair[1].1) - 1e-6, "{pair:?} of {remote:?}");
    }
    let first: Vec<&str> =
        remote.iter().filter(|(replica, _)| *replica == 0).map(|(_, name)| *name).collect();
    assert!(work(first[0]) > 1.1 * work(first[first.len() - 1]), "they are not needed alike: {first:?}");
    let listed: Vec<&str> = target.remote.iter().map(|function| function.name.as_str()).collect();
    assert_ne!(first, listed, "the plan lists them in another order");
}

/// The next reconcile finds the plan and reports nothing.
#[test]
fn a_plan_that_is_written_is_told_whatever_fails_after_it() {
    let mut scene = Scene::new(spec());
    scene.until(DemandPhase::Asleep);
    let hot = away(&scene.newest().spec);
    scene.say("a", 3, 0, Some(mix(MixOf::Waiting, &hot)));
    let (_, diff) = scene.world.reconcile();
    let told = |diff: &Diff, written: usize| -> usize {
        diff.events_after(written).iter().filter(|event| event.reason == "Replanned").count()
    };
    let plan = diff.writes.iter().position(|write| matches!(write, Write::Plan(_))).unwrap();
    assert_eq!((told(&diff, plan), told(&diff, plan + 1), told(&diff, diff.writes.len())), (0, 1, 1));
    // A gateway writes meanwhile, so the demand object differs from the one that was read.
    scene.say("b", 0, 0, None);
    let made = scene.world.write(&diff, usize::MAX);
    assert!(plan < made && made < diff.writes.len(), "{made} of {:?}", diff.writes);
    assert_eq!(told(&diff, made), 1);
    let (_, next) = scene.world.reconcile();
    assert_eq!(told(&next, usize::MAX), 0);
}

#[test]
fn drift_is_followed_once_in_a_while_and_main_functions_go_on() {
    let mut scene = Scene::new(spec());
    let mains = scene.pods(Component::Main);
    let before = scene.newest().clone();
    let hot = away(&before.spec);
    // Two gateways: their reports are weighted by tokens.
    scene.say("a", 0, 1, Some(mix(MixOf::Answered, &hot)));
    scene.say("b", 0, 1, Some(RequestMix { tokens: 1, ..mix(MixOf::Answered, &[EXPERTS - 1]) }));
    for _ in 0..10 {
        scene.step();
    }
    assert_eq!(scene.newest().name_any(), before.name_any(), "the plan is too young");
    scene.pass(60);
    for _ in 0..30 {
        scene.step();
    }
    let plan = scene.newest().spec.clone();
    let expected = plan.prediction.clone().unwrap();
    // A minute, one interval, has passed since their reports.
    assert_eq!((expected.of, expected.requests), (MixOf::Answered, 20));
    assert_eq!(plan.main, before.spec.main);
    assert_eq!(scene.pods(Component::Main), mains, "those that serve learn of it and go on");
    assert_eq!(hot_remote(&plan, &hot), 0, "{:?}", remote(&plan));
    let account = crate::planning::account(&plan).unwrap().unwrap();
    assert!(
        account.contains("prediction"),
        "main functions compare with what was expected of these requests"
    );
    // The deployment is settled, and no better plan is found for the same requests.
    let plans = scene.world.observed.plans.len();
    for _ in 0..3 {
        scene.pass(100);
        assert_eq!(scene.step(), 0);
    }
    assert_eq!(scene.world.observed.plans.len(), plans);
}

#[test]
fn implausible_usage_is_left_out() {
    let other = |change: fn(&mut RequestMix)| {
        let mut said = mix(MixOf::Answered, &[6, 7]);
        change(&mut said);
        said
    };
    for said in [
        other(|mix| mix.model = "another".to_owned()),
        other(|mix| mix.shares = "AAAA".to_owned()),
        other(|mix| mix.shares = UsageShares::uniform(LAYERS, EXPERTS + 1).to_text(1000).unwrap()),
        other(|mix| mix.requests = 3),
        other(|mix| mix.of = MixOf::Waiting),
    ] {
        let mut scene = Scene::new(spec());
        scene.say("a", 0, 1, Some(said.clone()));
        scene.pass(100);
        assert_eq!(scene.step(), 0, "{said:?}");
    }
    // Reports of dead gateways do not count.
    let mut scene = Scene::new(spec());
    scene.say("dead", 0, 1, Some(mix(MixOf::Answered, &[6, 7])));
    scene.say("a", 0, 1, None);
    scene.pass(100);
    assert!(scene.world.reconcile().1.writes.iter().all(|write| matches!(write, Write::ForgetGateways(_))));
}

#[test]
fn plans_stay_and_no_gateway_is_asked_when_disabled() {
    let mut off = spec();
    off["prediction"]["replan"] = json!("Never");
    let mut scene = Scene::new(off);
    assert_eq!(scene.world.demand().spec.prediction, None);
    scene.say("a", 0, 1, Some(mix(MixOf::Answered, &[6, 7])));
    scene.pass(100);
    assert_eq!(scene.step(), 0);
    let mut scene = Scene::new(spec());
    let order = PredictionOrder {
        model: "f00d".to_owned(),
        every_seconds: 60,
        counts_only: false,
        output_tokens: scene.newest().spec.workload.typical_output_tokens,
    };
    assert_eq!(scene.world.demand().spec.prediction, Some(order));
    scene.world.owner.spec.prediction.privacy = remoe_api::Privacy::CountsOnly;
    scene.step();
    assert!(scene.world.demand().spec.prediction.as_ref().unwrap().counts_only);
    // Main functions expose a primer if there are gateways to use it.
    let arguments = |gateway: Option<&str>, spec: Value| {
        let (owner, mut environment) = (deployment(spec), environment());
        environment.gateway = gateway.map(gateway_service);
        let plan = plan(&owner);
        let revision = crate::manifests::revision(&owner, "0123456789", &plan, &environment).unwrap();
        revision.main.pod(&owner, 0, 0).spec.unwrap().containers[0].args.clone().unwrap()
    };
    let primer = "--primer".to_owned();
    assert!(arguments(Some("gateway"), json!({})).contains(&primer));
    let off = json!({"prediction": {"replan": "Never"}});
    assert!(arguments(Some("gateway"), off).contains(&primer), "main functions need no restart for it");
    assert!(!arguments(None, json!({})).contains(&primer));
}

/// Wherever the operator is killed, the next one arrives at the same plan.
#[test]
fn killed_after_any_write_a_follower_ends_at_the_same_plan() {
    let begin = || {
        let mut scene = Scene::new(spec());
        scene.until(DemandPhase::Asleep);
        let hot = away(&scene.newest().spec);
        scene.say("a", 3, 0, Some(mix(MixOf::Waiting, &hot)));
        scene
    };
    let end = |scene: &mut Scene| {
        scene.until(DemandPhase::Active);
        scene.world.settle();
        scene.world.names()
    };
    let mut reference = begin();
    let writes = reference.world.reconcile().1.writes.len();
    let names = end(&mut reference);
    for crash in 1..=writes {
        let mut scene = begin();
        let (_, diff) = scene.world.reconcile();
        scene.world.write(&diff, crash);
        scene.world.run();
        assert_eq!(end(&mut scene), names, "after {crash} writes");
    }
}

/// A plan whose functions cannot start must not block waiting requests forever.
#[test]
fn a_wake_that_takes_too_long_goes_on_by_the_plan_before() {
    let mut scene = Scene::new(spec());
    scene.until(DemandPhase::Asleep);
    let first = scene.newest().name_any();
    let hot = away(&scene.newest().spec);
    scene.say("a", 3, 0, Some(mix(MixOf::Waiting, &hot)));
    let (_, diff) = scene.world.reconcile();
    scene.world.write(&diff, usize::MAX);
    let second = scene.newest().name_any();
    assert_ne!(first, second);
    let target =
        |scene: &mut Scene| format!("demo-{}", scene.world.reconcile().0.target.unwrap().revision.plan);
    scene.pass(290);
    assert_eq!(target(&mut scene), second, "no pod has a place yet");
    scene.pass(20);
    assert_eq!(target(&mut scene), first);
    for _ in 0..30 {
        scene.step();
    }
    assert_eq!(scene.phase(), DemandPhase::Active);
    assert!(
        scene.world.observed.plans.iter().all(|plan| plan.name_any() != second),
        "it is not taken up again"
    );
    assert_eq!(target(&mut scene), first);
    // Neither is a similar one used for the next requests.
    scene.say("a", 0, 0, None);
    scene.until(DemandPhase::Asleep);
    scene.say("a", 3, 0, Some(mix(MixOf::Waiting, &hot)));
    assert_eq!(target(&mut scene), first);
    scene.pass(600);
    assert_ne!(target(&mut scene), first, "but it is after a while");
}

/// Slow loading is no reason to give up.
#[test]
fn a_wake_that_loads_for_long_goes_on() {
    let mut scene = Scene::new(spec());
    scene.until(DemandPhase::Asleep);
    let hot = away(&scene.newest().spec);
    scene.say("a", 3, 0, Some(mix(MixOf::Waiting, &hot)));
    let (_, diff) = scene.world.reconcile();
    scene.world.write(&diff, usize::MAX);
    let second = scene.newest().name_any();
    for pod in &mut scene.world.observed.pods {
        pod.status = serde_json::from_value(json!({"phase": "Running", "podIP": "10.0.0.9"})).unwrap();
    }
    scene.pass(700);
    let target = scene.world.reconcile().0.target.unwrap().revision.plan;
    assert_eq!(format!("demo-{target}"), second);
}

/// A plan for drift that made no progress beside the serving one is given up for a while.
#[test]
fn drift_to_a_plan_that_fails_is_undone_and_not_repeated() {
    let mut scene = Scene::new(spec());
    let first = scene.newest().name_any();
    let hot = away(&scene.newest().spec);
    scene.say("a", 0, 1, Some(mix(MixOf::Answered, &hot)));
    scene.pass(100);
    let (_, diff) = scene.world.reconcile();
    scene.world.write(&diff, usize::MAX);
    let second = scene.newest().name_any();
    assert_ne!(first, second);
    scene.world.owner.status = Some(MoEDeploymentStatus {
        observed_generation: scene.world.owner.metadata.generation,
        failed_plan: second.strip_prefix("demo-").map(str::to_owned),
        ..MoEDeploymentStatus::default()
    });
    scene.step();
    scene.world.owner.status = None;
    for _ in 0..30 {
        scene.step();
    }
    scene.pass(100);
    scene.step();
    let target =
        |scene: &mut Scene| format!("demo-{}", scene.world.reconcile().0.target.unwrap().revision.plan);
    assert_eq!(target(&mut scene), first);
    assert!(scene.world.observed.plans.iter().all(|plan| plan.name_any() != second));
}

/// A change of the spec starts from the latest followed plan, not from the first one.
#[test]
fn the_latest_of_a_specs_plans_runs() {
    let mut scene = Scene::new(spec());
    let follow = |scene: &mut Scene| {
        let hot = away(&scene.newest().spec);
        scene.say("a", 0, 1, Some(mix(MixOf::Answered, &hot)));
        scene.pass(100);
        for _ in 0..30 {
            scene.step();
        }
        scene.newest().name_any()
    };
    let plans = [follow(&mut scene), follow(&mut scene), follow(&mut scene)];
    assert_eq!(BTreeSet::from_iter(&plans).len(), 3);
    let third = plans[2].clone();
    let before = scene.world.owner.spec.clone();
    let mut spec = spec();
    spec["slo"] = json!({"ttft": "9s"});
    scene.world.owner.spec = deployment(spec).spec;
    for _ in 0..30 {
        scene.step();
    }
    let other = scene.newest().clone();
    assert_ne!(other.name_any(), third);
    assert_eq!(other.spec.prediction.as_ref().unwrap().revision, 4, "what is known of requests stays known");
    scene.world.owner.spec = before;
    let target = scene.world.reconcile().0.target.unwrap();
    assert_eq!(format!("demo-{}", target.revision.plan), third);
}

#[test]
fn the_facts_are_those_of_the_example() {
    let model = large().inspection;
    assert_eq!((model.moe_layers.len(), model.experts), (LAYERS, EXPERTS));
}
