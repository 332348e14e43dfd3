//! The pure step of pods and routing in a simulated cluster, with faults and interrupted steps.

use crate::fleet::{FunctionCounts, OtherDeployments};
use crate::manifests::{Function, Hosted, Revision};
use crate::names::PodName;
use crate::pods::PodView;
use crate::rollout::{Creation, Rollout, RolloutInput, desired_generations, step};
use crate::routing::{Generation, MAX_GENERATION, RoutingTable};
use crate::status_issue::{NOT_READY, StatusIssue};
use crate::testing::example::{built, deployment, plan, plan_of_groups};
use crate::write::Deletion;
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use remoe_api::RolloutStrategy;
use remoe_proto::v1::Endpoint;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Maximum steps of a rollout.
const ENOUGH: usize = 400;

/// Cluster in which every pod works, unless told otherwise.
pub struct World {
    pub target: Revision,
    strategy: RolloutStrategy,
    main_certificate_ready: bool,
    others: OtherDeployments,
    pub table: RoutingTable,
    pub pods: Vec<PodView>,
    now: Timestamp,
    uids: u32,
    /// Generation in force in each main function, by the UID of its pod.
    in_force: BTreeMap<String, Generation>,
}

/// Returns the number and the placement that a main function reports for a generation.
fn named(generation: &Generation) -> (u64, String) {
    (generation.number, generation.placement().unwrap())
}

impl World {
    pub fn new(target: Revision) -> Self {
        Self {
            target,
            strategy: RolloutStrategy::Surge,
            main_certificate_ready: true,
            others: OtherDeployments::default(),
            table: RoutingTable::default(),
            pods: Vec::new(),
            now: "2026-01-01T00:00:00Z".parse().unwrap(),
            uids: 0,
            in_force: BTreeMap::new(),
        }
    }

    pub fn steps(&mut self) -> Rollout {
        // Main functions are polled before every step.
        let newest = self.table.newest();
        for pod in self.pods.iter_mut().filter(|pod| pod.in_force.is_some()) {
            let (number, placement) = self.in_force.get(&pod.uid).map(named).unwrap_or_default();
            pod.note_in_force(Some(number), newest);
            pod.placement = placement;
        }
        let scene = RolloutInput {
            deployment: "demo",
            target: &self.target,
            strategy: self.strategy,
            main_certificate_ready: self.main_certificate_ready,
            table: &self.table,
            pods: &self.pods,
            others: self.others,
            now: self.now,
        };
        step(scene).unwrap()
    }

    /// Makes one step, or only its first `writes` writes.
    fn act(&mut self, steps: &Rollout, writes: usize) {
        let mut left = writes;
        let mut may = || {
            let may = left > 0;
            left = left.saturating_sub(1);
            may
        };
        for creation in steps.create.iter().filter(|_| may()) {
            self.create(creation);
        }
        for deletion in steps.delete.iter().filter(|_| may()) {
            self.delete(deletion);
        }
        if let Some(table) = steps.table.as_ref().filter(|_| may()) {
            self.table = table.clone();
        }
        let pushed_numbers: Vec<(String, Generation)> = pushes(&self.table, &self.pods)
            .into_iter()
            .filter(|_| may())
            .map(|(pod, generation)| (pod.uid.clone(), generation.clone()))
            .collect();
        for (uid, generation) in pushed_numbers {
            self.tell(&uid, generation);
        }
        // The next step reads it again.
        self.write(&self.table.clone());
    }

    fn create(&mut self, creation: &Creation) {
        let function = self.target.functions().nth(creation.function).unwrap();
        let name =
            PodName { place: function.place("demo", creation.replica), incarnation: creation.incarnation };
        assert!(self.pods.iter().all(|pod| pod.name != name), "{name} is taken");
        self.uids += 1;
        self.pods.push(PodView {
            name,
            uid: format!("pod-{}", self.uids),
            owned: true,
            is_main: function.hosted.is_none(),
            knows_gateways: false,
            function: function.name.clone(),
            identity: function.identity.clone(),
            replica: creation.replica,
            created: self.now,
            ends_by: None,
            ip: None,
            ready: false,
            starting: false,
            restarts: 0,
            faulty_at: None,
            fault: None,
            issue: None,
            in_force: None,
            placement: String::new(),
        });
    }

    fn delete(&mut self, deletion: &Deletion) {
        let now = self.now;
        let Some(pod) = self.pods.iter_mut().find(|pod| pod.uid == deletion.uid) else { return };
        let name = pod.name.to_string();
        let was_sound = pod.is_sound() && pod.ready;
        pod.ends_by = Some(now.checked_add(SignedDuration::from_secs(45)).unwrap());
        if was_sound && !pod.is_main {
            let used_by = |pod: &&PodView| {
                let generation = self.in_force.get(&pod.uid);
                pod.is_main && pod.ends_by.is_none() && generation.is_some_and(|it| leads_to(it, &name))
            };
            assert!(self.pods.iter().find(used_by).is_none(), "{name} was in use");
        }
    }

    fn tell(&mut self, uid: &str, generation: Generation) {
        if let Some(known) = self.in_force.get(uid) {
            assert!(generation.number >= known.number, "numbers grow");
            assert!(generation.number > known.number || generation == *known, "one number, two meanings");
        }
        let routing = generation.routing(String::new()).unwrap();
        for function in self.target.remote.iter().filter(|_| generation.plan == self.target.plan) {
            let hosts = routing.endpoints.iter().filter(|endpoint| hosted(endpoint, function));
            assert!(hosts.count() > 0, "{} has no host", function.name);
        }
        self.in_force.insert(uid.to_owned(), generation);
    }

    /// Lets nodes work for one second.
    fn run(&mut self) {
        self.now = self.now.checked_add(SignedDuration::from_secs(1)).unwrap();
        let now = self.now;
        self.pods.retain(|pod| pod.ends_by.is_none_or(|end| now < end));
        for (index, pod) in self.pods.iter_mut().enumerate() {
            pod.ip.get_or_insert_with(|| format!("10.0.0.{}", index + 1).parse().unwrap());
            let (number, placement) = self.in_force.get(&pod.uid).map(named).unwrap_or_default();
            pod.in_force = pod.is_main.then_some(number);
            pod.placement = placement;
            pod.ready = pod.fault.is_none() && (!pod.is_main || number > 0);
        }
    }

    /// Overwrites the number of every stored generation with `number`, as another writer could.
    fn poison(&mut self, number: u64) {
        let mut table = self.table.clone();
        for generation in table.entries.values_mut() {
            generation.number = number;
            generation.revision = "another".to_owned();
        }
        self.write(&table);
    }

    fn write(&mut self, table: &RoutingTable) {
        // A corrupted table is not written before it is healed.
        if !table.corrupted {
            self.table = RoutingTable::from_record(&table.record(&deployment(json!({}))));
        }
    }

    /// Creates a pod beside the one at `index`.
    fn stranger(&mut self, index: usize, incarnation: u32, owned: bool) {
        let Some(pod) = self.pods.get(index % self.pods.len().max(1)).cloned() else { return };
        let name = PodName { incarnation, ..pod.name.clone() };
        if self.pods.iter().any(|other| other.name == name) {
            return;
        }
        self.uids += 1;
        let fault = Some(StatusIssue::new("PodFailed", "it never worked"));
        let uid = format!("stranger-{}", self.uids);
        let ready = false;
        self.pods.push(PodView { name, uid, owned, ends_by: None, ready, fault, in_force: None, ..pod });
    }

    pub fn settle(&mut self) {
        for _ in 0..ENOUGH {
            let steps = self.steps();
            let before = self.serving();
            self.act(&steps, usize::MAX);
            assert!(before == 0 || self.serving() > 0, "the endpoint went away");
            if steps.settled {
                return;
            }
            self.run();
        }
        panic!("not settled: {:#?}", self.steps());
    }

    /// Returns the main functions that answer.
    fn serving(&self) -> usize {
        self.pods.iter().filter(|pod| pod.is_main && pod.is_sound() && pod.ready).count()
    }

    pub fn check_settled(&mut self) {
        let steps = self.steps();
        assert!(steps.create.is_empty() && steps.delete.is_empty() && steps.table.is_none(), "{steps:?}");
        let mut places: Vec<String> = self
            .pods
            .iter()
            .filter(|pod| pod.owned && pod.ends_by.is_none())
            .map(|pod| pod.name.place.clone())
            .collect();
        let mut wanted: Vec<String> = self
            .target
            .functions()
            .flat_map(|function| (0..function.replicas).map(|replica| function.place("demo", replica)))
            .collect();
        places.sort();
        wanted.sort();
        assert_eq!(places, wanted);
        assert_eq!(self.table.entries.len(), 1);
        let generation = &self.table.entries[&self.target.main.identity];
        let remote: u32 = self.target.remote.iter().map(|function| function.replicas).sum();
        assert_eq!(generation.endpoints.len(), remote as usize);
    }
}

/// Returns the main functions that get a generation: those known to be behind.
fn pushes<'a>(table: &'a RoutingTable, pods: &'a [PodView]) -> Vec<(&'a PodView, &'a Generation)> {
    let known = desired_generations(table, pods).filter_map(|(pod, generation)| Some((pod, generation?)));
    known.filter(|(pod, generation)| pod.in_force.is_some_and(|number| number < generation.number)).collect()
}

/// Returns whether `generation` says that the endpoint hosts the experts of `function`.
fn hosted(endpoint: &Endpoint, function: &Function) -> bool {
    match function.hosted.as_ref().unwrap() {
        Hosted::Layer(set) => endpoint.layers == [set.layer] && endpoint.experts.is_empty(),
        Hosted::Group(sets) => endpoint.layers.is_empty() && endpoint.experts == *sets,
    }
}

fn leads_to(generation: &Generation, pod: &str) -> bool {
    generation.endpoints.iter().any(|routed| routed.pod == pod)
}

/// Revisions that share all, some or none of their functions; planned once for all tests.
fn revisions() -> Vec<Revision> {
    static REVISIONS: LazyLock<Vec<Revision>> = LazyLock::new(planned_revisions);
    REVISIONS.clone()
}

fn planned_revisions() -> Vec<Revision> {
    let specs = [
        json!({}),
        json!({"replicas": 2}),
        json!({"remoteExperts": {"template": {"nodeSelector": {"pool": "a"}}}}),
        json!({"main": {"template": {"nodeSelector": {"pool": "b"}}}}),
        json!({"remoteExperts": {"mode": "Never"}}),
        json!({"pricing": {"cpuCoreHour": "0.05"}}),
    ];
    let of_layers = specs.map(|spec| {
        let owner = deployment(spec);
        let mut plan = plan(&owner);
        // The planner uses no replicas here, but routing must handle them.
        plan.remote.iter_mut().for_each(|part| part.replicas = 1 + part.layer % 2);
        built(&owner, &plan)
    });
    let of_groups = [1, 2, 3].map(|groups| {
        let owner = deployment(json!({}));
        built(&owner, &plan_of_groups(&owner, groups))
    });
    of_layers.into_iter().chain(of_groups).collect()
}

/// Fault of a pod.
#[derive(Debug, Clone)]
enum PodIncident {
    Crash(usize),
    Evict(usize),
    Delete(usize),
    Restart(usize),
    Run,
    Target(usize),
    Step(usize),
    LoseTable,
    /// Another writer overwrote the stored numbers with this one.
    Poison(u64),
    /// Another writer created a pod of this incarnation at the place of another, with or without the owner reference.
    Stranger(usize, u32, bool),
}

fn event() -> impl Strategy<Value = PodIncident> {
    prop_oneof![
        1 => (0..12_usize).prop_map(PodIncident::Crash),
        1 => (0..12_usize).prop_map(PodIncident::Evict),
        1 => (0..12_usize).prop_map(PodIncident::Delete),
        1 => (0..12_usize).prop_map(PodIncident::Restart),
        1 => (0..9_usize).prop_map(PodIncident::Target),
        1 => Just(PodIncident::LoseTable),
        1 => number().prop_map(PodIncident::Poison),
        1 => (0..12_usize, prop_oneof![0..20_u32, Just(u32::MAX)], any::<bool>())
            .prop_map(|(index, incarnation, owned)| PodIncident::Stranger(index, incarnation, owned)),
        6 => Just(PodIncident::Run),
        8 => (0..8_usize).prop_map(PodIncident::Step),
    ]
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..20_u64, Just(MAX_GENERATION), Just(MAX_GENERATION + 1), Just(u64::MAX - 1), Just(u64::MAX)]
}

/// Main functions with a foreign placement get theirs back with a higher number, even if both have the same number.
#[test]
fn foreign_placement_is_replaced() {
    for beyond in [0, 1, 1 << 32] {
        let mut world = World::new(revisions()[1].clone());
        world.settle();
        let main = world.pods.iter().find(|pod| pod.is_main).unwrap().uid.clone();
        let own = world.in_force[&main].clone();
        let number = own.number + beyond;
        let foreign = Generation { number, remote: String::new(), endpoints: Vec::new(), ..own.clone() };
        world.in_force.insert(main.clone(), Generation { plan: "foreign".to_owned(), ..foreign });
        assert!(!world.steps().settled, "{beyond}");
        world.settle();
        world.check_settled();
        assert_eq!(world.in_force[&main], Generation { number: number + 1, ..own });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_it_ends_as_wanted(events in prop::collection::vec(event(), 0..60)) {
        let revisions = revisions();
        let mut world = World::new(revisions[0].clone());
        for event in events {
            let pods = world.pods.len().max(1);
            match event {
                // The operator was killed after the first writes of a step.
                PodIncident::Step(writes) => { let steps = world.steps(); world.act(&steps, writes) }
                PodIncident::Run => world.run(),
                PodIncident::Target(index) => world.target = revisions[index].clone(),
                PodIncident::LoseTable => world.table = RoutingTable::default(),
                PodIncident::Poison(number) => world.poison(number),
                PodIncident::Stranger(index, incarnation, owned) => world.stranger(index, incarnation, owned),
                PodIncident::Crash(index) | PodIncident::Evict(index) => {
                    if let Some(pod) = world.pods.get_mut(index % pods) {
                        pod.fault = Some(StatusIssue::new("CrashLooping", "it crashed"));
                        pod.ready = false;
                    }
                }
                PodIncident::Delete(index) => {
                    let end = world.now.checked_add(SignedDuration::from_secs(45)).unwrap();
                    if let Some(pod) = world.pods.get_mut(index % pods) {
                        pod.ends_by.get_or_insert(end);
                    }
                }
                PodIncident::Restart(index) => {
                    if let Some(pod) = world.pods.get_mut(index % pods) {
                        world.in_force.remove(&pod.uid);
                        pod.ready = false;
                        pod.in_force = pod.is_main.then_some(0);
                    }
                }
            }
        }
        for _ in 0..ENOUGH {
            let steps = world.steps();
            world.act(&steps, usize::MAX);
            if steps.settled { break }
            world.run();
        }
        world.check_settled();
    }

    #[test]
    fn from_one_revision_to_the_next_the_endpoint_answers(order in prop::collection::vec(0..9_usize, 1..5)) {
        let revisions = revisions();
        let mut world = World::new(revisions[0].clone());
        world.settle();
        for index in order {
            world.target = revisions[index].clone();
            world.settle();
            world.check_settled();
        }
    }
}

#[test]
fn the_first_generation_waits_for_every_remote_function() {
    let mut world = World::new(revisions().remove(0));
    let steps = world.steps();
    world.act(&steps, usize::MAX);
    world.run();
    // Everything but one function is ready.
    let late = world.pods.iter().position(|pod| !pod.is_main).unwrap();
    world.pods[late].ready = false;
    assert_eq!(world.steps().table, None);
    world.pods[late].ready = true;
    assert!(world.steps().table.is_some());
}

#[test]
fn revisions_share_the_pods_that_do_not_differ() {
    let all = revisions();
    let mut world = World::new(all[0].clone());
    world.settle();
    let before: Vec<String> = world.pods.iter().map(|pod| pod.uid.clone()).collect();
    // Another price: another plan, the same functions.
    world.target = all[5].clone();
    world.settle();
    let after: Vec<String> = world.pods.iter().map(|pod| pod.uid.clone()).collect();
    assert_eq!(before, after);
    assert_eq!(world.table.entries.values().next().unwrap().number, 2);
}

#[test]
fn failing_replica_slot_is_refilled_with_growing_backoff() {
    let mut world = World::new(revisions().remove(4));
    let mut created = Vec::new();
    for _ in 0..300 {
        let steps = world.steps();
        created.extend(steps.create.iter().map(|creation| (world.now, creation.incarnation)));
        world.act(&steps, usize::MAX);
        world.run();
        for pod in &mut world.pods {
            pod.fault = Some(StatusIssue::new("CrashLooping", "it crashed"));
        }
    }
    let gaps: Vec<i64> =
        created.windows(2).map(|pair| pair[1].0.duration_since(pair[0].0).as_secs()).collect();
    assert!(gaps.len() >= 4 && gaps.len() < 8, "{gaps:?}");
    assert!(gaps.windows(2).all(|pair| pair[0] < pair[1]), "{gaps:?}");
    assert!(created.windows(2).all(|pair| pair[0].1 < pair[1].1));
}

/// There is no second device: main functions of two revisions never exist together, and the old ones serve until
/// everything but their successors is ready.
#[test]
fn recreated_main_functions_never_stand_beside_those_before() {
    for index in 1..9 {
        let mut world = World::new(revisions()[0].clone());
        world.strategy = RolloutStrategy::Recreate;
        world.settle();
        world.target = revisions()[index].clone();
        let moves = world.target.main.identity != revisions()[0].main.identity;
        let mut went = false;
        for _ in 0..ENOUGH {
            let steps = world.steps();
            let before = world.serving();
            world.act(&steps, usize::MAX);
            let mains = world.pods.iter().filter(|pod| pod.is_main);
            let identities: std::collections::BTreeSet<&String> = mains.map(|pod| &pod.identity).collect();
            assert!(identities.len() <= 1, "{identities:?}");
            if before > 0 && world.serving() == 0 && !went {
                went = true;
                let remote = world.pods.iter().filter(|pod| !pod.is_main && pod.ready).count();
                let wanted: u32 = world.target.remote.iter().map(|function| function.replicas).sum();
                assert!(remote >= wanted as usize, "the endpoint went away too early");
            }
            if steps.settled {
                break;
            }
            world.run();
        }
        world.check_settled();
        assert_eq!(went, moves, "revision {index}");
    }
}

/// No serving main function ends for one that would wait for its certificate.
#[test]
fn main_functions_stay_while_others_would_find_no_certificate() {
    let mut world = World::new(revisions()[0].clone());
    world.strategy = RolloutStrategy::Recreate;
    world.settle();
    let moves = |revision: &&Revision| revision.main.identity != revisions()[0].main.identity;
    world.target = revisions().iter().find(moves).unwrap().clone();
    world.main_certificate_ready = false;
    let before = world.serving();
    for _ in 0..ENOUGH {
        let steps = world.steps();
        world.act(&steps, usize::MAX);
        assert_eq!(world.serving(), before);
        world.run();
    }
    // The endpoint is unavailable while its successor starts, as there is no second device.
    world.main_certificate_ready = true;
    for _ in 0..ENOUGH {
        let steps = world.steps();
        world.act(&steps, usize::MAX);
        if steps.settled {
            break;
        }
        world.run();
    }
    world.check_settled();
}

/// Returns the numbers pushed next, by pod name.
fn pushed_numbers(world: &World, steps: &Rollout) -> Vec<u64> {
    let table = steps.table.as_ref().unwrap_or(&world.table);
    pushes(table, &world.pods).iter().map(|(_, generation)| generation.number).collect()
}

#[test]
fn numbers_out_of_sequence_are_replaced() {
    for number in [u64::MAX, u64::MAX - 1, MAX_GENERATION + 1, MAX_GENERATION - 1] {
        let mut world = World::new(revisions().remove(1));
        world.settle();
        world.poison(number);
        assert!(world.table.corrupted && world.table.entries.is_empty());
        // A main function that may know higher numbers does not answer: nothing is written or pushed.
        let silent = world.pods.iter().position(|pod| pod.is_main).unwrap();
        world.pods[silent].in_force = None;
        let steps = world.steps();
        assert_eq!((&steps.table, pushed_numbers(&world, &steps)), (&None, vec![]));
        world.pods[silent].in_force = Some(0);
        world.pods[silent].placement = String::new();
        let steps = world.steps();
        assert_eq!(pushed_numbers(&world, &steps), [2, 2]);
        world.act(&steps, usize::MAX);
        world.settle();
        world.check_settled();
    }
}

#[test]
fn a_main_function_that_nothing_can_follow_is_replaced_alone() {
    let mut world = World::new(revisions().remove(1));
    world.settle();
    let mains: Vec<String> = world.pods.iter().filter(|pod| pod.is_main).map(|pod| pod.uid.clone()).collect();
    for generation in world.in_force.values_mut().take(1) {
        generation.number = u64::MAX;
    }
    world.steps();
    let foreign: Vec<&PodView> = world.pods.iter().filter(|pod| pod.fault.is_some()).collect();
    assert!(foreign.len() == 1 && foreign[0].is_main, "{foreign:?}");
    let foreign = foreign[0].uid.clone();
    // In a world with numbers that no healthy one reaches.
    world.in_force.remove(&foreign);
    world.settle();
    world.check_settled();
    let stays = |uid: &&String| world.pods.iter().any(|pod| pod.uid == **uid && pod.ends_by.is_none());
    let left: Vec<&String> = mains.iter().filter(stays).collect();
    assert_eq!(left.len(), 1);
    assert_ne!(*left[0], foreign);
}

/// Makes the pods at `indices` unready.
fn function_counts(world: &mut World, indices: &[usize]) {
    for &index in indices {
        world.pods[index].fault = Some(StatusIssue::new(NOT_READY, "silent"));
        world.pods[index].ready = false;
    }
}

#[test]
fn pods_that_fall_silent_together_are_left_alone() {
    let mut world = World::new(revisions().remove(1));
    world.settle();
    let count = world.pods.len();
    assert!(count >= 6, "{count} pods");
    let many: Vec<usize> = (0..=count / 3).collect();
    function_counts(&mut world, &many);
    let steps = world.steps();
    assert_eq!((steps.create.len(), steps.delete.len()), (0, 0));
    assert_eq!(steps.paused.as_ref().map(|held| held.reason), Some("ManyNotReady"));
    assert!(!steps.settled);
    // They are ready again.
    for pod in &mut world.pods {
        pod.fault = None;
    }
    world.settle();
    world.check_settled();
    assert!(world.pods.iter().all(|pod| pod.name.incarnation == 0), "nothing was replaced");
    // Pods that certainly ended are all replaced.
    for pod in &mut world.pods {
        pod.fault = Some(StatusIssue::new("PodFailed", "evicted"));
        pod.ready = false;
    }
    let steps = world.steps();
    assert_eq!((steps.create.len(), steps.paused), (count, None));
}

/// A network partition of two minutes: one function of every deployment is unready.
#[test]
fn functions_of_many_silent_deployments_are_not_replaced() {
    let mut world = World::new(revisions().remove(1));
    world.settle();
    function_counts(&mut world, &[0]);
    assert_eq!(world.steps().create.len(), 1);
    world.others.namespace = FunctionCounts { functions: 40, unready: 20, replacing: 0 };
    for _ in 0..120 {
        let steps = world.steps();
        assert_eq!((steps.create.len(), steps.delete.len()), (0, 0));
        assert_eq!(steps.paused.as_ref().map(|held| held.reason), Some("ManyNotReady"));
        world.act(&steps, usize::MAX);
        world.now = world.now.checked_add(SignedDuration::from_secs(1)).unwrap();
    }
    // A lost node is reported as such.
    world.pods[0].fault = Some(StatusIssue::new("NodeLost", "node lost"));
    assert_eq!(world.steps().create.len(), 1);
    // Others are being replaced already.
    function_counts(&mut world, &[0]);
    world.others.namespace = FunctionCounts { functions: 40, unready: 2, replacing: 11 };
    assert_eq!(world.steps().create.len(), 0);
    world.others.namespace.replacing = 9;
    assert_eq!(world.steps().create.len(), 1);
}

/// Returns the state of deployments in other namespaces than the world's own.
fn elsewhere(silences: &[(&str, FunctionCounts)]) -> OtherDeployments {
    OtherDeployments::sum("default", silences.iter().copied())
}

/// A network partition, and each tenant has one small deployment.
#[test]
fn functions_of_many_silent_namespaces_are_not_replaced() {
    let mut world = World::new(revisions().remove(1));
    world.settle();
    function_counts(&mut world, &[0]);
    let (silent, sound) = (
        FunctionCounts { functions: 4, unready: 2, replacing: 0 },
        FunctionCounts { functions: 4, unready: 1, replacing: 0 },
    );
    world.others = elsewhere(&[("a", silent), ("b", silent), ("c", sound), ("d", FunctionCounts::default())]);
    let steps = world.steps();
    assert_eq!((steps.create.len(), steps.delete.len()), (0, 0));
    assert_eq!(steps.paused.as_ref().map(|held| held.reason), Some("ManyNotReady"));
    // Two of six are not many.
    world.others = elsewhere(&[("a", silent), ("b", silent), ("c", sound), ("d", sound), ("e", sound)]);
    assert_eq!(world.steps().create.len(), 1);
}

/// A tenant whose functions all fail leaves others their replacements.
#[test]
fn failures_in_one_namespace_delay_no_other_namespace() {
    let mut world = World::new(revisions().remove(1));
    world.settle();
    function_counts(&mut world, &[0]);
    let broken = FunctionCounts { functions: 50, unready: 50, replacing: 0 };
    let endless = FunctionCounts { functions: 50, unready: 0, replacing: 50 };
    for others in [[broken, broken], [endless, endless], [broken, endless]] {
        let others = others.map(|function_counts| ("tenant", function_counts));
        world.others = elsewhere(&others);
        let steps = world.steps();
        assert_eq!((steps.create.len(), &steps.paused), (1, &None), "{others:?}");
        // Within its own namespace it is affected.
        world.others = OtherDeployments::sum("tenant", others);
        assert_eq!(world.steps().create.len(), 0, "{others:?}");
    }
    // Neither do many such tenants together; but then only one replacement is left.
    let tenants: Vec<String> = (0..40).map(|number| format!("tenant-{number}")).collect();
    let one = FunctionCounts { functions: 1, unready: 0, replacing: 1 };
    function_counts(&mut world, &[0, 1]);
    world.others = OtherDeployments::sum("default", tenants.iter().map(|tenant| (tenant.as_str(), one)));
    let steps = world.steps();
    assert_eq!(steps.create.len(), 1);
    world.act(&steps, usize::MAX);
    assert_eq!(world.steps().create.len(), 0);
}

/// Pending replacements of the namespace count, and so do those elsewhere.
#[test]
fn replacements_are_limited_in_a_namespace_and_among_all() {
    let mut world = World::new(revisions().remove(1));
    world.settle();
    let count = world.pods.len();
    function_counts(&mut world, &[0, 1]);
    let mut left = |namespace: FunctionCounts, others: &[(&str, FunctionCounts)]| {
        world.others = OtherDeployments { namespace, ..elsewhere(others) };
        world.steps().create.len()
    };
    let of = |existing, coming| FunctionCounts { functions: existing, unready: 0, replacing: coming };
    let at_once = (count / 4).max(1);
    assert_eq!(left(FunctionCounts::default(), &[]), at_once);
    assert_eq!(left(of(2, 3), &[]), 0);
    assert_eq!(left(of(400, 3), &[]), at_once);
    // Elsewhere at most a quarter of each namespace counts, so that a namespace keeps its share.
    assert_eq!(left(of(400, 3), &[("a", of(4, 4)), ("b", of(4, 4))]), at_once);
}

#[test]
fn silent_pods_are_replaced_one_after_the_other() {
    let mut world = World::new(revisions().remove(1));
    world.settle();
    function_counts(&mut world, &[0, 1]);
    let steps = world.steps();
    assert_eq!((steps.create.len(), &steps.paused), (1, &None));
    assert!(steps.delete.iter().all(|deletion| deletion.grace_seconds == Some(45)));
    world.act(&steps, usize::MAX);
    // The first of them loads.
    assert_eq!(world.steps().create.len(), 0);
    world.run();
    world.pods.iter_mut().filter(|pod| pod.fault.is_none()).for_each(|pod| pod.ready = true);
    let steps = world.steps();
    assert_eq!(steps.create.len(), 1);
    world.act(&steps, usize::MAX);
    world.settle();
    world.check_settled();
}
