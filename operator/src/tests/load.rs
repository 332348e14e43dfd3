//! Functions that follow load, in a cluster in memory.

use crate::facts::ModelFacts;
use crate::names::{COMPONENT, Component, FUNCTION, label};
use crate::testing::example::{facts, large};
use crate::testing::world::World;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use remoe_api::{DemandPhase, GatewayDemand, RequestLoad};
use remoe_autoscale::replicas::RemoteWorkReport;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Batch size of a main function.
const ROOM: u32 = 32;

struct Scene {
    world: World,
    /// Number of requests, and its integral over time.
    requests: u32,
    occupied: u64,
    /// Compute seconds per second of remote functions for each main function, by function name.
    busy: BTreeMap<String, f64>,
    computed: BTreeMap<String, Duration>,
    age: u64,
    /// Time of the last request.
    active: Timestamp,
}

impl Scene {
    fn new(spec: Value) -> Self {
        Self::of(facts(), spec)
    }

    fn of(facts: ModelFacts, spec: Value) -> Self {
        let mut world = World::with_gateways(spec, &["a"]);
        world.facts = facts;
        world.settle();
        let (busy, computed, active) = (BTreeMap::new(), BTreeMap::new(), world.observed.now);
        Self { world, requests: 0, occupied: 0, busy, computed, age: 0, active }
    }

    /// Lets `seconds` pass; the gateway reports every ten seconds, main functions every fifteen.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            if self.age.is_multiple_of(10) {
                self.say();
            }
            if self.age.is_multiple_of(15) {
                self.hear();
            }
            let (_, diff) = self.world.reconcile();
            self.world.write(&diff, usize::MAX);
            self.world.run();
            self.age += 1;
            self.occupied += u64::from(self.requests);
            for (function, busy) in &self.busy {
                *self.computed.entry(function.clone()).or_default() += Duration::from_secs_f64(*busy);
            }
        }
    }

    fn say(&mut self) {
        let now = self.world.observed.now;
        let turn = self.world.demand().spec.turn;
        let running = self.requests.min(ROOM);
        if self.requests > 0 {
            self.active = now;
        }
        self.world.say(GatewayDemand {
            uid: "a".to_owned(),
            pod: "a".to_owned(),
            waiting: self.requests - running,
            in_flight: running,
            acknowledged: turn,
            saved: 0,
            last_active: MicroTime(self.active),
            sequence: self.age + 1,
            mix: None,
            load: Some(RequestLoad { at: MicroTime(now), occupied_ms: self.occupied * 1000 }),
            wake: None,
        });
    }

    /// One main function reports the work of remote ones, all done by the first replica.
    fn hear(&mut self) {
        let address = |pod: &Pod| Some(format!("{}:9001", pod.status.as_ref()?.pod_ip.as_ref()?));
        let computed = self.computed.iter().filter_map(|(function, computed)| {
            let mut pods = self.world.observed.pods.iter();
            let pod = pods.find(|pod| label(&pod.metadata, FUNCTION) == function)?;
            Some((address(pod)?, *computed))
        });
        let worked =
            RemoteWorkReport { age: Duration::from_secs(100 + self.age), computed: computed.collect() };
        let Some(main) = self.pods(Component::Main).first().and_then(|pod| pod.uid()) else { return };
        self.world.observed.main_observations.entry(main).or_default().worked = Some(worked);
    }

    fn pods(&self, component: Component) -> Vec<&Pod> {
        let pods = self.world.observed.pods.iter();
        pods.filter(|pod| label(&pod.metadata, COMPONENT) == component.name()).collect()
    }

    fn mains(&self) -> usize {
        self.pods(Component::Main).len()
    }

    fn uids(&self) -> BTreeSet<String> {
        self.world.observed.pods.iter().filter_map(ResourceExt::uid).collect()
    }
}

/// Several remote functions, whose replicas follow load as `scaling` says.
fn remote(scaling: Value) -> Value {
    json!({
        "main": {"memoryMB": {"max": 3000}},
        "remoteExperts": {"mode": "Always", "memoryMB": {"min": 200, "max": 1000}, "maxReplicas": 1},
        "scaling": {"remote": scaling},
        "prediction": {"replan": "Never"},
    })
}

#[test]
fn main_functions_follow_requests_and_go_a_window_later() {
    let mut scene = Scene::new(json!({"scaling": {"min": 1, "max": 5}}));
    assert!(scene.world.demand().spec.follows_load);
    let before = scene.uids();
    (scene.requests, _) = (8, scene.pass(120));
    assert_eq!(scene.mains(), 1, "one has room for them");
    scene.requests = 60;
    scene.pass(80);
    assert_eq!(scene.mains(), 3, "{ROOM} each, at 70 percent");
    scene.requests = 1000;
    scene.pass(20);
    assert_eq!(scene.mains(), 5, "no more than there may be");
    assert_eq!(scene.world.demand().spec.mains.len(), 5);
    scene.requests = 0;
    scene.pass(40);
    assert_eq!(scene.mains(), 5, "the load may come back");
    scene.pass(140);
    assert_eq!(scene.mains(), 1);
    assert!(before.is_subset(&scene.uids()), "the first went on all the time");
    let (_, diff) = scene.world.reconcile();
    assert!(diff.settled && diff.writes.is_empty(), "{:?}", diff.writes);
}

#[test]
fn who_waits_while_functions_start_gets_as_many_as_that_takes() {
    let mut scene = Scene::new(json!({"scaling": {"min": 0, "max": 4, "idleWindow": "20s"}}));
    scene.pass(60);
    assert_eq!((scene.world.demand().spec.phase, scene.mains()), (DemandPhase::Asleep, 0));
    scene.requests = 80;
    scene.say();
    scene.pass(3);
    assert_eq!(scene.mains(), 4);
}

#[test]
fn busiest_remote_function_gets_replica_without_new_plan() {
    let mut scene = Scene::of(large(), remote(json!({"max": 3, "memoryMB": 100_000})));
    let plans = scene.world.observed.plans.len();
    let functions: Vec<String> = scene
        .pods(Component::RemoteExpert)
        .iter()
        .map(|pod| label(&pod.metadata, FUNCTION).to_owned())
        .collect();
    assert!(functions.len() >= 2, "{functions:?}");
    let (before, count) = (scene.uids(), functions.len());
    scene.requests = 4;
    scene.busy = functions.iter().map(|function| (function.clone(), 0.3)).collect();
    scene.pass(120);
    assert_eq!(scene.pods(Component::RemoteExpert).len(), count);
    scene.busy.insert(functions[0].clone(), 0.9);
    scene.pass(120);
    let of_first = |scene: &Scene| {
        let pods = scene.pods(Component::RemoteExpert).into_iter();
        pods.filter(|pod| label(&pod.metadata, FUNCTION) == functions[0]).count()
    };
    assert!(of_first(&scene) >= 2, "{}", of_first(&scene));
    assert!(scene.pods(Component::RemoteExpert).len() < 2 * count, "not all of them");
    // Only routing changed.
    let routing = scene.world.observed.routing.as_ref().unwrap();
    let generation_text = serde_json::to_string(routing).unwrap();
    let pods = scene.pods(Component::RemoteExpert);
    assert!(pods.iter().all(|pod| generation_text.contains(&pod.name_any())), "{generation_text}");
    assert_eq!(scene.world.observed.plans.len(), plans);
    assert!(before.is_subset(&scene.uids()));
    scene.busy.values_mut().for_each(|busy| *busy = 0.0);
    scene.requests = 0;
    scene.pass(200);
    assert_eq!(scene.pods(Component::RemoteExpert).len(), count);
    assert!(before.is_subset(&scene.uids()));
}

#[test]
fn memory_bounds_what_load_may_ask_for() {
    let mut scene = Scene::of(large(), remote(json!({"max": 8, "memoryMB": 1})));
    let functions: Vec<String> = scene
        .pods(Component::RemoteExpert)
        .iter()
        .map(|pod| label(&pod.metadata, FUNCTION).to_owned())
        .collect();
    scene.requests = 4;
    scene.busy = functions.iter().map(|function| (function.clone(), 5.0)).collect();
    scene.pass(120);
    assert_eq!(scene.pods(Component::RemoteExpert).len(), functions.len());
}

/// Foreign pod with a replica number that is out of range.
#[test]
fn a_forged_replica_asks_for_nothing() {
    let mut scene = Scene::new(json!({"scaling": {"min": 1, "max": 3}}));
    let mut forged = scene.pods(Component::Main)[0].clone();
    let place = forged.name_any().rsplit_once('-').map(|(place, _)| place.to_owned()).unwrap();
    let place = place.rsplit_once('-').map(|(function, _)| function.to_owned()).unwrap();
    forged.metadata.name = Some(format!("{place}-4294967295-0"));
    forged.metadata.uid = Some("forged".to_owned());
    forged.labels_mut().insert("remoe.dev/replica".to_owned(), "4294967295".to_owned());
    scene.world.observed.pods.push(forged);
    scene.pass(5);
    assert!(scene.mains() <= 4, "{}", scene.mains());
}
