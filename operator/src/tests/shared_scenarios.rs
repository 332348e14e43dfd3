//! Pure step for pods, in the scenarios shared with processes.

use crate::fleet::OtherDeployments;
use crate::manifests::{Function, Revision};
use crate::names::PodName;
use crate::pods::PodView;
use crate::rollout::{self, Rollout, revision_hash, step};
use crate::routing::{Generation, RoutedPod, RoutingTable};
use crate::status_issue::StatusIssue;
use crate::testing::example::{built, deployment, plan, plan_of_groups};
use jiff::{SignedDuration, Timestamp};
use remoe_api::RolloutStrategy;
use remoe_proto::format_listing;
use remoe_test_support::scenes::{FunctionCondition, InForce, RolloutScenario, SCENES, decided, place};
use serde_json::json;

/// Time of the scenarios.
fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

/// Returns the desired revision: one function per group.
fn revision(scene: &RolloutScenario) -> Revision {
    let groups = u32::try_from(scene.groups.len()).unwrap();
    let owner = match groups {
        0 => deployment(json!({"remoteExperts": {"mode": "Never"}})),
        _ => deployment(json!({})),
    };
    let plan = if groups == 0 { plan(&owner) } else { plan_of_groups(&owner, groups) };
    let mut revision = built(&owner, &plan);
    for (group, function) in revision.remote.iter_mut().enumerate() {
        let rests = scene.resting.contains(&group);
        function.replicas = if rests { 0 } else { u32::try_from(scene.groups[group]).unwrap() };
    }
    revision
}

/// Returns the function of `id` and its replica; absent for an earlier placement.
fn function<'a>(revision: &'a Revision, id: &str) -> Option<(&'a Function, u32)> {
    let (place, _) = place(id);
    match place.split_once('.') {
        Some((group, replica)) => {
            Some((&revision.remote[group.parse::<usize>().unwrap()], replica.parse().unwrap()))
        }
        None => (place == "main").then_some((&revision.main, 0)),
    }
}

fn name(revision: &Revision, id: &str) -> PodName {
    let place = match function(revision, id) {
        Some((function, replica)) => function.place("demo", replica),
        None => format!("demo-{id}-0"),
    };
    PodName { place, incarnation: self::place(id).1 }
}

fn pod(revision: &Revision, id: &str, is: FunctionCondition) -> PodView {
    let its = function(revision, id);
    let is_main = id.starts_with("main");
    let minute = SignedDuration::from_mins(1);
    PodView {
        name: name(revision, id),
        uid: id.to_owned(),
        owned: true,
        is_main,
        knows_gateways: false,
        function: its.map_or("earlier", |(function, _)| &function.name).to_owned(),
        identity: its.map_or("earlier", |(function, _)| &function.identity).to_owned(),
        replica: its.map_or(0, |(_, replica)| replica),
        created: now().checked_sub(SignedDuration::from_hours(1)).unwrap(),
        ends_by: (is == FunctionCondition::Leaving).then(|| now().checked_add(minute).unwrap()),
        ip: Some(address(id).parse().unwrap()),
        ready: is == FunctionCondition::Ready,
        starting: is == FunctionCondition::Starting,
        restarts: 0,
        faulty_at: (is == FunctionCondition::Faltering).then(|| now().checked_add(minute).unwrap()),
        fault: (is == FunctionCondition::Lost).then(|| StatusIssue::new("NodeLost", "node lost")),
        issue: None,
        in_force: is_main.then_some(0),
        placement: String::new(),
    }
}

/// Returns the address of the function.
fn address(id: &str) -> String {
    format!("10.0.0.{}", id.bytes().map(u32::from).sum::<u32>() % 250)
}

/// Returns the pushed generation.
fn in_force(scene: &RolloutScenario, revision: &Revision) -> Option<Generation> {
    let (hash, endpoints) = match scene.in_force {
        InForce::Nothing => return None,
        InForce::This(endpoints) => (revision_hash(revision).unwrap(), endpoints),
        InForce::Another(endpoints) => ("another".to_owned(), endpoints),
    };
    let sets = revision.remote.iter().map(|function| function.hosted.as_ref().unwrap().sets());
    let routed = |id: &&str| RoutedPod {
        pod: name(revision, id).to_string(),
        address: format!("{}:9001", address(id)),
        layers: Vec::new(),
        group: Some(id.split_once('.').map_or(0, |(group, _)| group.parse().unwrap())),
    };
    let mut endpoints: Vec<RoutedPod> = endpoints.iter().map(routed).collect();
    endpoints.sort();
    Some(Generation {
        number: 1,
        plan: revision.plan.clone(),
        revision: hash,
        remote: format_listing(&revision.remote_sets()),
        endpoints,
        groups: sets.map(format_listing).collect(),
    })
}

fn decide(scene: &RolloutScenario) -> Vec<String> {
    let target = revision(scene);
    let told = in_force(scene, &target);
    let mut pods: Vec<PodView> = scene.there.iter().map(|(id, is)| pod(&target, id, *is)).collect();
    for pod in pods.iter_mut().filter(|pod| pod.uid == "main") {
        let acts_on = told.as_ref().map(|told| (told.number, told.placement().unwrap()));
        let (number, placement) = acts_on.unwrap_or_default();
        (pod.in_force, pod.placement) = (Some(number), placement);
    }
    for (place, ago) in scene.failed {
        let failed = pod(&target, &format!("{place}'"), FunctionCondition::Lost);
        let created = now().checked_sub(SignedDuration::from_secs(i64::from(*ago))).unwrap();
        pods.push(PodView { created, ..failed });
    }
    let entries = told.map(|told| (target.main.identity.clone(), told)).into_iter().collect();
    let table = RoutingTable { entries, corrupted: false };
    let rollout = step(rollout::RolloutInput {
        deployment: "demo",
        target: &target,
        strategy: RolloutStrategy::Surge,
        main_certificate_ready: true,
        table: &table,
        pods: &pods,
        others: OtherDeployments::default(),
        now: now(),
    });
    shown(&target, &pods, rollout.unwrap())
}

fn shown(target: &Revision, pods: &[PodView], rollout: Rollout) -> Vec<String> {
    let starts = rollout.create.iter().map(|creation| match creation.function.checked_sub(1) {
        Some(group) => format!("start {group}.{}", creation.replica),
        None => "start main".to_owned(),
    });
    let stops = rollout.delete.iter().map(|deletion| format!("stop {}", deletion.uid));
    let id = |name: &String| pods.iter().find(|pod| pod.name.to_string() == *name).unwrap().uid.clone();
    let told = rollout.table.map(|table| {
        let mut ids: Vec<String> =
            table.entries[&target.main.identity].endpoints.iter().map(|routed| id(&routed.pod)).collect();
        ids.sort();
        format!("tell {}", ids.join(" ")).trim_end().to_owned()
    });
    let mut shown: Vec<String> = starts.chain(stops).chain(told).collect();
    shown.sort();
    shown
}

#[test]
fn pods_are_decided_about_as_processes_are() {
    for scene in SCENES {
        assert_eq!(decide(scene), decided(scene, false), "{}", scene.name);
    }
}
