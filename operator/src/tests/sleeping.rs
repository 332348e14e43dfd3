//! Scale to zero and wake in a cluster in memory, with gateways that hold requests.

use crate::names::{COMPONENT, Component, label};
use crate::testing::world::World;
use crate::write::Write;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use proptest::prelude::*;
use remoe_api::{ConditionType, DemandPhase, GatewayDemand, WakeTimeline};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Idle window in seconds.
const WINDOW: usize = 5;
/// Maximum seconds.
const ENOUGH: usize = 80;

fn spec() -> Value {
    json!({"scaling": {"min": 0, "idleWindow": "5s"}})
}

/// Gateway: it sees the demand object with a delay of one second, and reports.
#[derive(Clone, Debug, Default)]
struct Gateway {
    uid: &'static str,
    waiting: u32,
    in_flight: u32,
    served: u32,
    turn: u64,
    holds: bool,
    sequence: u64,
    active: Option<MicroTime>,
    said: Option<(u32, u32, u64)>,
    /// Timeline of the latest wake for which it held a request.
    wake: Option<WakeTimeline>,
    /// Set if it cannot reach the API server.
    is_cut_off: bool,
}

struct Scene {
    world: World,
    gateways: Vec<Gateway>,
}

impl Scene {
    /// Returns a deployment that serves, without requests.
    fn new(uids: &[&'static str]) -> Self {
        let mut world = World::with_gateways(spec(), uids);
        world.settle();
        let gateways = uids.iter().map(|uid| Gateway { uid, holds: true, ..Gateway::default() }).collect();
        let mut scene = Self { world, gateways };
        scene.until(DemandPhase::Active);
        scene
    }

    fn phase(&self) -> DemandPhase {
        self.world.demand().spec.phase
    }

    fn mains(&self) -> BTreeSet<String> {
        let mains = self.world.observed.pods.iter();
        let mains = mains.filter(|pod| label(&pod.metadata, COMPONENT) == Component::Main.name());
        mains.filter_map(ResourceExt::uid).collect()
    }

    fn ask(&mut self, gateway: usize, requests: u32) {
        self.gateways[gateway].waiting += requests;
        self.gateways[gateway].active = Some(MicroTime(self.world.observed.now));
    }

    /// Reconciles once; the operator is killed after `most` writes. Returns the number of writes.
    fn operate(&mut self, most: usize) -> usize {
        let diff = self.world.reconcile().1;
        let before = self.world.observed.demand.clone();
        let ends = diff.writes.iter().any(|write| matches!(write, Write::Delete(_)));
        let made = self.world.write(&diff, most);
        let is_asleep = before.is_some() && self.phase() == DemandPhase::Asleep;
        if ends && is_asleep && made > 1 {
            for gateway in self.gateways.iter().filter(|gateway| !gateway.is_cut_off) {
                assert!(
                    gateway.holds && gateway.in_flight == 0,
                    "functions end under a request: {gateway:?}"
                );
            }
        }
        made
    }

    /// Simulates a second of nodes, gateways and clients.
    fn pass(&mut self) {
        self.world.run();
        let serves = self.world.observed.pods.iter().any(|pod| {
            label(&pod.metadata, COMPONENT) == Component::Main.name()
                && pod.status.as_ref().is_some_and(|status| {
                    status
                        .conditions
                        .iter()
                        .flatten()
                        .any(|each| each.type_ == "Ready" && each.status == "True")
                })
        });
        let now = MicroTime(self.world.observed.now);
        let Some(demand) = self.world.observed.demand.clone() else { return };
        for gateway in self.gateways.iter_mut().filter(|gateway| !gateway.is_cut_off) {
            if gateway.in_flight > 0 {
                gateway.served += std::mem::take(&mut gateway.in_flight);
                gateway.active = Some(now.clone());
            }
            gateway.turn = demand.spec.turn;
            gateway.holds = matches!(demand.spec.phase, DemandPhase::Draining | DemandPhase::Asleep);
            if !gateway.holds && serves {
                gateway.in_flight = std::mem::take(&mut gateway.waiting);
            }
            let says = (gateway.waiting, gateway.in_flight, if gateway.holds { gateway.turn } else { 0 });
            if gateway.said != Some(says) {
                gateway.said = Some(says);
                gateway.sequence += 1;
                self.world.say(GatewayDemand {
                    uid: gateway.uid.to_owned(),
                    pod: gateway.uid.to_owned(),
                    waiting: gateway.waiting,
                    in_flight: gateway.in_flight,
                    acknowledged: gateway.turn,
                    saved: 0,
                    last_active: gateway.active.clone().unwrap_or(MicroTime(jiff::Timestamp::UNIX_EPOCH)),
                    sequence: gateway.sequence,
                    mix: None,
                    load: None,
                    wake: gateway.wake,
                });
            }
        }
    }

    fn until(&mut self, phase: DemandPhase) {
        for _ in 0..ENOUGH {
            if self.phase() == phase {
                return;
            }
            self.operate(usize::MAX);
            self.pass();
        }
        panic!("still {:?}: {:?}", self.phase(), self.gateways);
    }

    fn served(&self) -> u32 {
        self.gateways.iter().map(|gateway| gateway.served).sum()
    }

    /// Lets time pass until all requests are served and the deployment sleeps.
    fn quiet(&mut self) {
        for _ in 0..ENOUGH {
            self.operate(usize::MAX);
            self.pass();
        }
        assert_eq!(self.phase(), DemandPhase::Asleep, "{:?}", self.gateways);
        assert!(self.world.observed.pods.is_empty(), "an orphan");
        assert!(self.gateways.iter().all(|gateway| gateway.waiting + gateway.in_flight == 0));
        assert_eq!(self.world.reconcile().1.writes, []);
    }
}

#[test]
fn idle_functions_end_and_fifty_requests_wake_them_once() {
    let mut scene = Scene::new(&["a", "b"]);
    let awake = scene.world.names();
    for round in 1..=3 {
        scene.until(DemandPhase::Asleep);
        scene.operate(usize::MAX);
        let diff = scene.world.reconcile().1;
        assert!(scene.world.observed.pods.is_empty() && diff.settled && diff.polled_mains.is_empty());
        assert_eq!(scene.world.demand().spec.functions, [], "what sleeps costs nothing");
        scene.ask(0, 49);
        scene.ask(1, 1);
        scene.until(DemandPhase::Active);
        assert_eq!(scene.world.demand().spec.wakes, round);
        assert_eq!(scene.world.names(), awake, "the same functions by the same plan");
    }
    scene.quiet();
    assert_eq!(scene.served(), 150);
}

/// Each wake is reported once with its timeline, whatever gateways report it and whichever replica leads; the
/// condition has the latest.
#[test]
fn how_a_wake_went_is_told_once() {
    let mut scene = Scene::new(&["a", "b"]);
    for wake in 1..=2 {
        scene.until(DemandPhase::Asleep);
        scene.ask(0, 1);
        scene.ask(1, 1);
        scene.until(DemandPhase::Active);
        for (gateway, first_us) in scene.gateways.iter_mut().zip([4_000, 5_000]) {
            let (decide_us, schedule_us) = (100_000 * wake, 1_000_000);
            gateway.wake =
                Some(WakeTimeline { wake, decide_us, schedule_us, first_us, ..WakeTimeline::default() });
            gateway.said = None;
        }
        let times = format!(
            "time to first token 1.{wake}05 s (decide 0.{wake}00 s, schedule 1.000 s, start 0.000 s, \
             load 0.000 s, ready 0.000 s, first 0.005 s)"
        );
        let mut reported = Vec::new();
        for _ in 0..4 {
            scene.pass();
            let (_, diff, status) = scene.world.look_and_state();
            assert!(status.condition(ConditionType::Active).unwrap().message.contains(&times));
            // The operator is killed before it writes, and another one leads.
            assert!(!diff.events_after(0).iter().any(|said| said.reason == "FirstToken"));
            let diff = scene.world.reconcile().1;
            let made = scene.world.write(&diff, usize::MAX);
            reported.extend(diff.events_after(made).into_iter().filter(|said| said.reason == "FirstToken"));
        }
        let notes: Vec<&str> = reported.iter().map(|said| said.note.as_str()).collect();
        assert_eq!(notes, [format!("Wake {wake}: {times}.")]);
        assert_eq!(scene.world.demand().spec.wake_told, wake);
    }
}

/// Half an hour passes second by second, in which nothing is written; then three gateways have 500 requests at once.
#[test]
fn a_burst_after_half_an_hour_is_one_wake() {
    let mut scene = Scene::new(&["a", "b", "c"]);
    let awake = scene.world.names();
    scene.until(DemandPhase::Asleep);
    scene.operate(usize::MAX);
    let asleep = scene.world.demand().spec.clone();
    for _ in 0..30 * 60 {
        scene.pass();
        assert_eq!(scene.operate(usize::MAX), 0, "nothing happens, and something is written");
    }
    assert_eq!(scene.world.demand().spec, asleep);
    (0..3).for_each(|gateway| scene.ask(gateway, 100));
    scene.pass();
    scene.operate(usize::MAX);
    assert_eq!(scene.phase(), DemandPhase::Waking);
    // More requests come while functions start.
    (0..2).for_each(|gateway| scene.ask(gateway, 100));
    scene.until(DemandPhase::Active);
    assert_eq!((scene.world.demand().spec.wakes, scene.world.names()), (asleep.wakes + 1, awake));
    scene.quiet();
    assert_eq!(scene.served(), 500);
}

#[test]
fn who_comes_while_functions_are_about_to_end_keeps_them() {
    let mut scene = Scene::new(&["a"]);
    let mains = scene.mains();
    scene.until(DemandPhase::Draining);
    scene.ask(0, 1);
    scene.pass();
    scene.until(DemandPhase::Active);
    assert_eq!((scene.mains(), scene.world.demand().spec.wakes), (mains.clone(), 0));
    // The gateway writes between the read and the write, so the write fails.
    scene.until(DemandPhase::Draining);
    scene.pass();
    let diff = scene.world.reconcile().1;
    let wants =
        |write: &Write| matches!(write, Write::Demand(keep) if keep.wanted.spec.phase == DemandPhase::Asleep);
    assert!(
        diff.writes.iter().any(wants) && diff.writes.iter().any(|write| matches!(write, Write::Delete(_)))
    );
    scene.ask(0, 1);
    scene.pass();
    scene.world.write(&diff, usize::MAX);
    assert_eq!((scene.phase(), scene.mains()), (DemandPhase::Draining, mains));
    scene.quiet();
    assert_eq!(scene.served(), 2);
}

#[test]
fn a_gateway_that_says_nothing_holds_sleep_up_until_it_is_dead() {
    let mut scene = Scene::new(&["a", "b"]);
    scene.pass();
    scene.gateways[1].is_cut_off = true;
    for _ in 0..ENOUGH {
        scene.operate(usize::MAX);
        scene.pass();
    }
    assert_eq!(scene.phase(), DemandPhase::Draining);
    scene.world.observed.gateways.remove("b");
    scene.quiet();
    let left: Vec<&str> = scene.world.demand().gateways().iter().map(|entry| entry.uid.as_str()).collect();
    assert_eq!(left, ["a"], "what it said is forgotten");
}

#[test]
fn a_new_leader_opens_the_window_again() {
    let mut scene = Scene::new(&["a"]);
    scene.until(DemandPhase::Draining);
    scene.world.observed.since = scene.world.observed.now;
    let mains = scene.mains();
    scene.until(DemandPhase::Active);
    assert_eq!(scene.mains(), mains);
}

/// Kills the operator after every write on the way to sleep and back.
#[test]
fn killed_after_any_write_it_falls_asleep_and_wakes() {
    let diff = |scene: &mut Scene| {
        let (mut writes, mut asked) = (0, false);
        for _ in 0..ENOUGH {
            writes += scene.operate(usize::MAX);
            scene.pass();
            if scene.phase() == DemandPhase::Asleep && !asked {
                asked = true;
                scene.ask(0, 3);
            }
        }
        writes
    };
    let mut reference = Scene::new(&["a", "b"]);
    let writes = diff(&mut reference);
    assert!(writes > 10);
    for crash in 1..writes {
        let mut scene = Scene::new(&["a", "b"]);
        let (mut left, mut asked) = (crash, false);
        for _ in 0..ENOUGH {
            if left > 0 {
                left -= scene.operate(left).min(left);
            } else {
                // Another operator leads and continues from the observed state.
                scene.world.observed.main_observations.clear();
                scene.operate(usize::MAX);
            }
            scene.pass();
            if scene.phase() == DemandPhase::Asleep && !asked {
                asked = true;
                scene.ask(0, 3);
            }
        }
        scene.quiet();
        assert_eq!(
            (scene.served(), scene.world.names()),
            (3, reference.world.names()),
            "after {crash} writes"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whenever clients come, gateways are partitioned and pods die: no request is lost, no function ends with a
    /// request, nothing is left over.
    #[test]
    fn no_request_is_lost(moves in proptest::collection::vec((0_u8..8, 0_usize..3, 1_u32..4), 1..60)) {
        let mut scene = Scene::new(&["a", "b", "c"]);
        let mut asked = 0;
        for (kind, which, number) in moves {
            match kind {
                0 | 1 => {
                    scene.ask(which, number);
                    asked += number;
                }
                2 => scene.gateways[which].is_cut_off = !scene.gateways[which].is_cut_off,
                3 if !scene.world.observed.pods.is_empty() => {
                    let gone = which % scene.world.observed.pods.len();
                    scene.world.observed.pods.remove(gone);
                }
                4 => { scene.operate(number as usize); }
                _ => { scene.operate(usize::MAX); }
            }
            scene.pass();
        }
        scene.gateways.iter_mut().for_each(|gateway| gateway.is_cut_off = false);
        scene.quiet();
        prop_assert_eq!(scene.served(), asked);
    }
}

/// An idle window without gateways: it keeps running, and reports that.
#[test]
fn without_gateways_nothing_sleeps() {
    let mut world = World::new(spec());
    world.settle();
    for _ in 0..3 * WINDOW {
        world.run();
    }
    let diff = world.reconcile().1;
    assert_eq!((diff.writes, diff.issues[0].reason), (vec![], "NoGateway"));
}

/// Kubelets probe once a second, and a client may be waiting.
#[test]
fn serving_function_is_routed_to_before_its_node_reports_it() {
    let mut world = World::with_gateways(spec(), &["a"]);
    let is_remote = |pod: &&Pod| label(&pod.metadata, COMPONENT) == Component::RemoteExpert.name();
    for _ in 0..ENOUGH {
        let diff = world.reconcile().1;
        world.write(&diff, usize::MAX);
        if world.observed.pods.iter().any(|pod| is_remote(&pod)) {
            break;
        }
        world.run();
    }
    let now = world.observed.now.to_string();
    for (index, pod) in world.observed.pods.iter_mut().enumerate() {
        let status = json!({"phase": "Running", "podIP": format!("10.0.0.{}", index + 1), "startTime": now,
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": now}]});
        pod.status = serde_json::from_value(status).unwrap();
    }
    let is_told =
        |world: &mut World| world.reconcile().1.writes.iter().any(|write| matches!(write, Write::Routing(_)));
    let mains_start = |world: &mut World| {
        let polled_mains = world.reconcile().1.polled_mains;
        assert!(!polled_mains.is_empty());
        polled_mains.iter().all(|main| main.starting)
    };
    assert!(!is_told(&mut world), "no gateway has reported");
    assert!(mains_start(&mut world));
    let uids = world.observed.pods.iter().filter(is_remote).filter_map(ResourceExt::uid);
    world.observed.serving = uids.map(|uid| (uid, 0)).collect();
    assert!(!world.observed.serving.is_empty());
    assert!(is_told(&mut world));
    let containers = |world: &mut World, started: bool, restarts: i32, state: &str| {
        let state: Value =
            json!({state: if state == "terminated" { json!({"exitCode": 1}) } else { json!({}) }});
        for pod in &mut world.observed.pods {
            pod.status.as_mut().unwrap().container_statuses =
                serde_json::from_value(json!([{"name": "x", "image": "x", "imageID": "x", "ready": false,
                    "restartCount": restarts, "started": started, "state": state}]))
                .unwrap();
        }
    };
    containers(&mut world, false, 0, "running");
    assert!(is_told(&mut world));
    // Readiness of one container run does not apply to the next.
    containers(&mut world, false, 0, "terminated");
    assert!(!is_told(&mut world), "it ended");
    containers(&mut world, false, 1, "running");
    assert!(!is_told(&mut world), "another one loads");
    // After the kubelet has seen it ready, only the kubelet reports unreadiness.
    containers(&mut world, true, 0, "running");
    let later = world.observed.now.checked_add(jiff::SignedDuration::from_secs(30)).unwrap().to_string();
    for pod in &mut world.observed.pods {
        let condition = &mut pod.status.as_mut().unwrap().conditions.as_mut().unwrap()[0];
        condition.last_transition_time = serde_json::from_value(json!(later)).unwrap();
    }
    assert!(!is_told(&mut world));
    assert!(!mains_start(&mut world));
}
