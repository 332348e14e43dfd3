//! Remote functions that sleep while main functions run, in a cluster in memory.

use crate::names::{COMPONENT, Component, FUNCTION, label};
use crate::scale::GroupTransition;
use crate::testing::example::large;
use crate::testing::world::World;
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use remoe_api::{DemandPhase, GatewayDemand, MixOf, RequestMix};
use remoe_predictor::UsageShares;
use remoe_proto::v1::LayerExperts;
use remoe_rollout::need;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Idle window of a remote function in seconds.
const WINDOW: i64 = 20;
/// Maximum reconciles.
const ENOUGH: usize = 200;

/// Neither main functions nor one remote function can hold all experts.
fn spec(scaling: Value) -> Value {
    json!({"main": {"memoryMB": {"max": 3000}}, "scaling": scaling, "prediction": {"replan": "Never"}})
}

fn awake() -> Value {
    spec(json!({"remoteIdleWindow": "20s"}))
}

struct Scene {
    world: World,
    /// Returns the remote functions of the plan.
    all: Vec<String>,
}

impl Scene {
    fn new(spec: Value) -> Self {
        let mut world = World::with_gateways(spec, &["a"]);
        world.facts = large();
        world.settle();
        let target = world.reconcile().0.target.unwrap();
        let all: Vec<String> = target.revision.remote.iter().map(|it| it.name.clone()).collect();
        assert!(all.len() > 1, "{all:?}");
        Self { world, all }
    }

    /// Returns the remote functions with pods.
    fn alive(&self) -> BTreeSet<String> {
        let pods = self.world.observed.pods.iter();
        let remote = pods.filter(|pod| label(&pod.metadata, COMPONENT) == Component::RemoteExpert.name());
        remote.map(|pod| label(&pod.metadata, FUNCTION).to_owned()).collect()
    }

    /// Returns the routed remote functions.
    fn routed(&self) -> BTreeSet<String> {
        let pods = &self.world.observed.pods;
        let table = self.world.observed.table(&self.world.owner);
        let endpoints = table.entries.values().flat_map(|generation| &generation.endpoints);
        let of = |name: &str| pods.iter().find(|pod| pod.name_any() == name);
        let missing = "a pod that is gone";
        endpoints
            .map(|to| of(&to.pod).map_or(missing, |pod| label(&pod.metadata, FUNCTION)).to_owned())
            .collect()
    }

    fn asleep(&self) -> BTreeSet<String> {
        let groups = self.world.demand().spec.groups.iter();
        groups.filter(|group| group.asleep).map(|group| group.name.clone()).collect()
    }

    fn mains(&self) -> BTreeSet<Option<String>> {
        let pods = self.world.observed.pods.iter();
        pods.filter(|pod| label(&pod.metadata, COMPONENT) == Component::Main.name())
            .map(ResourceExt::uid)
            .collect()
    }

    /// Main functions report use of `functions`.
    fn used(&mut self, functions: &[String]) {
        let now = self.world.observed.now;
        for observation in self.world.observed.main_observations.values_mut() {
            observation.recently_used.extend(functions.iter().map(|name| (name.clone(), now)));
        }
    }

    /// Lets a second pass in which `used` are used.
    fn pass(&mut self, used: &[String]) {
        let (_, diff) = self.world.reconcile();
        self.world.write(&diff, usize::MAX);
        self.world.run();
        self.used(used);
    }

    /// Lets many seconds pass in which `used` are used.
    fn rest(&mut self, used: &[String]) {
        for _ in 0..3 * WINDOW {
            self.pass(used);
        }
    }
}

fn set(names: &[String]) -> BTreeSet<String> {
    names.iter().cloned().collect()
}

#[test]
fn idle_group_ends_and_wakes_for_its_requests() {
    let mut scene = Scene::new(awake());
    let (mains, all) = (scene.mains(), scene.all.clone());
    let (busy, idle) = all.split_at(1);
    scene.rest(busy);
    assert_eq!((scene.alive(), scene.routed(), scene.asleep()), (set(busy), set(busy), set(idle)));
    let (_, diff) = scene.world.reconcile();
    assert!(diff.settled && diff.writes.is_empty(), "{:?}", diff.writes);
    let watched = scene.world.groups.watched.clone().unwrap();
    assert_eq!((watched.hosted.len(), &watched.asleep), (all.len(), &set(idle)));
    assert!(diff.polled_mains.iter().all(|polled_main| polled_main.watched.as_ref() == Some(&watched)));
    // A reconcile is due at the end of the next window.
    assert!(
        diff.requeue_after <= std::time::Duration::from_secs(WINDOW as u64 + 2),
        "{:?}",
        diff.requeue_after
    );
    let billed_pods: BTreeSet<&str> =
        scene.world.demand().spec.functions.iter().map(|pod| pod.tier.as_str()).collect();
    assert_eq!(billed_pods.len(), 2, "what sleeps costs nothing: {billed_pods:?}");

    scene.used(&idle[..1]);
    let changes = {
        scene.world.reconcile();
        scene.world.groups.changes.clone()
    };
    assert_eq!(
        changes.iter().map(|change| (&change.function, change.to)).collect::<Vec<_>>(),
        [(&idle[0], GroupTransition::Asked)]
    );
    scene.rest(&all[..2]);
    assert_eq!((scene.alive(), scene.routed()), (set(&all[..2]), set(&all[..2])), "and no other");
    // All sleep, and main functions continue.
    scene.rest(&[]);
    scene.rest(&[]);
    assert_eq!((scene.alive(), scene.routed()), (BTreeSet::new(), BTreeSet::new()));
    assert_eq!(scene.world.reconcile().1.writes, []);
    assert_eq!((scene.mains(), scene.world.demand().spec.phase), (mains, DemandPhase::Active));
    // Without a window nothing sleeps, and sleeping functions wake.
    scene.world.owner.spec.scaling.remote_idle_window = None;
    scene.world.settle();
    assert_eq!((scene.alive(), scene.world.demand().spec.groups.len()), (set(&all), 0));
}

#[test]
fn a_new_leader_opens_the_windows_again_and_knows_who_sleeps() {
    let mut scene = Scene::new(awake());
    let all = scene.all.clone();
    scene.rest(&all[..1]);
    // The new leader does not know what was used.
    scene
        .world
        .observed
        .main_observations
        .values_mut()
        .for_each(|observation| observation.recently_used.clear());
    scene.world.observed.since = scene.world.observed.now;
    for _ in 0..WINDOW - 2 {
        scene.pass(&[]);
    }
    assert_eq!((scene.alive(), scene.asleep()), (set(&all[..1]), set(&all[1..])));
}

/// A waking function does not delay routing of others, whichever of its pods die.
#[test]
fn one_that_does_not_start_holds_nothing_up() {
    let mut scene = Scene::new(awake());
    let all = scene.all.clone();
    scene.rest(&[]);
    scene.used(&all[..2]);
    let of = |scene: &Scene, name: &str| {
        scene.world.observed.pods.iter().position(|pod| label(&pod.metadata, FUNCTION) == name)
    };
    for _ in 0..WINDOW {
        scene.pass(&all[..2]);
        if let Some(at) = of(&scene, &all[0]) {
            scene.world.observed.pods.remove(at);
        }
    }
    assert_eq!(scene.routed(), set(&all[1..2]));
    scene.rest(&all[..2]);
    assert_eq!(scene.routed(), set(&all[..2]));
}

/// Kills the operator after every write on the way to sleep and back.
#[test]
fn killed_after_any_write_groups_sleep_and_wake() {
    let run = |crash: Option<usize>| {
        let mut scene = Scene::new(awake());
        let all = scene.all.clone();
        let (mut writes, mut left) = (0, crash);
        for second in 0..8 * WINDOW {
            // Half of the time all are used.
            let used = if second / (2 * WINDOW) % 2 == 0 { &all[..1] } else { &all[..] };
            let (_, diff) = scene.world.reconcile();
            let most = left.unwrap_or(usize::MAX);
            let made = scene.world.write(&diff, most);
            writes += made;
            left = match left.map(|left| left.saturating_sub(made)) {
                Some(0) => {
                    // Another operator leads.
                    scene
                        .world
                        .observed
                        .main_observations
                        .values_mut()
                        .for_each(|observation| observation.recently_used.clear());
                    scene.world.observed.since = scene.world.observed.now;
                    None
                }
                left => left,
            };
            scene.world.run();
            scene.used(used);
        }
        scene.rest(&all[..1]);
        scene.rest(&all[..1]);
        assert_eq!(
            (scene.alive(), scene.routed()),
            (set(&all[..1]), set(&all[..1])),
            "after {crash:?} writes"
        );
        writes
    };
    let writes = run(None);
    assert!(writes > 6, "{writes}");
    for crash in 1..writes {
        run(Some(crash));
    }
}

/// If waiting requests need few experts, the other functions neither start nor are awaited.
#[test]
fn a_wake_starts_what_those_who_wait_need() {
    let spec = spec(json!({"min": 0, "idleWindow": "40s", "remoteIdleWindow": "20s"}));
    let mut scene = Scene::new(spec);
    let all = scene.all.clone();
    let target = scene.world.reconcile().0.target.unwrap();
    let hosted: Vec<_> =
        target.revision.remote.iter().map(|it| it.hosted.clone().unwrap().sets().to_vec()).collect();
    let mut sequence = 0;
    let mut say = |scene: &mut Scene, waiting: u32, mix: Option<RequestMix>| {
        sequence += 1;
        let (turn, now) = (scene.world.demand().spec.turn, MicroTime(scene.world.observed.now));
        let last_active = if waiting > 0 { now } else { MicroTime(jiff::Timestamp::UNIX_EPOCH) };
        scene.world.say(GatewayDemand {
            uid: "a".to_owned(),
            pod: "a".to_owned(),
            waiting,
            in_flight: 0,
            acknowledged: turn,
            saved: 0,
            last_active,
            sequence,
            mix,
            load: None,
            wake: None,
        });
    };
    for _ in 0..ENOUGH {
        if scene.world.demand().spec.phase == DemandPhase::Asleep && scene.world.observed.pods.is_empty() {
            break;
        }
        say(&mut scene, 0, None);
        scene.pass(&[]);
    }
    assert_eq!(scene.world.demand().spec.groups, [], "they sleep with all others");
    // Waiting requests use only experts of the first function.
    let is_of = |sets: &[LayerExperts], layer: u32, expert: u32| {
        sets.iter().any(|set| set.layer == layer && set.experts.contains(&expert))
    };
    let weight = |at: u32| {
        let (layer, expert) = (at / 16 + 1, at % 16);
        if hosted[1..].iter().any(|sets| is_of(sets, layer, expert)) { 1e-9 } else { 1.0 }
    };
    let shares = UsageShares::from_weights(16, (0..48).map(weight).collect()).unwrap();
    let text = shares.to_text(1000).unwrap();
    let mix = RequestMix {
        of: MixOf::Waiting,
        model: "f00d".to_owned(),
        requests: 2,
        tokens: 100,
        shares: text,
        predicted_us: 0,
    };
    say(&mut scene, 2, Some(mix));
    let needs = |sets: &[LayerExperts]| need::work(sets, &[1, 2, 3], &shares.to_rows()) * 100.0 * 2.0 >= 1.0;
    let expected: BTreeSet<String> =
        all.iter().zip(&hosted).filter(|(_, sets)| needs(sets)).map(|(name, _)| name.clone()).collect();
    assert!(expected.len() < all.len(), "{expected:?}");
    for _ in 0..ENOUGH {
        scene.pass(&[]);
        if scene.world.demand().spec.phase == DemandPhase::Active {
            break;
        }
    }
    assert_eq!(scene.world.demand().spec.phase, DemandPhase::Active);
    assert_eq!((scene.alive(), scene.routed()), (expected.clone(), expected));
    // A function whose use was not predicted wakes when it is used.
    let before = scene.world.observed.now;
    scene.used(&all);
    scene.rest(&all);
    assert_eq!(scene.routed(), set(&all));
    assert!(scene.world.observed.now.duration_since(before) >= SignedDuration::from_secs(1));
}
