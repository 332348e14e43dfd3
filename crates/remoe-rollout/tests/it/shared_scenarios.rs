//! Pure step for processes, in the scenarios shared with pods.

use crate::fixtures;
use remoe_test_support::scenes;

use fixtures::{instance, listening, seconds, wanted};
use remoe_proto::v1::LayerExperts;
use remoe_rollout::action::{Action, Route};
use remoe_rollout::decide::{Desired, Instance, decide};
use remoe_rollout::memory::RestartMemory;
use remoe_rollout::time::Time;
use remoe_rollout::{FunctionId, FunctionPhase};
use scenes::{FunctionCondition, InForce, RolloutScenario, SCENES, decided, place};

/// Time of the scenarios; all states in them are old.
const NOW: Time = Time::from_secs(1000);

/// Returns the desired state: a function for each replica, by name.
fn desired(scene: &RolloutScenario) -> Desired {
    let mut desired = wanted(scene.groups.iter().sum());
    let places = scene.groups.iter().enumerate();
    let places = places.flat_map(|(group, replicas)| (0..*replicas).map(move |replica| (group, replica)));
    for (function, (group, replica)) in desired.functions.iter_mut().skip(1).zip(places) {
        function.name = format!("{group}.{replica}");
        function.hosted = vec![LayerExperts { layer: 1, experts: vec![group as u32] }];
        if scene.resting.contains(&group) {
            desired.resting.insert(function.name.clone());
        }
    }
    let experts = (0..scene.groups.len() as u32).collect();
    desired.remote = vec![LayerExperts { layer: 1, experts }];
    desired.timeouts.ready = seconds(2000.0);
    desired
}

fn seen(id: &str, is: FunctionCondition) -> Instance {
    let mut seen = instance(id, place(id).0, listening());
    seen.answered = NOW;
    match is {
        FunctionCondition::Ready => {}
        FunctionCondition::Starting => {
            (seen.observed.phase, seen.unready_since) = (FunctionPhase::Starting, Some(NOW))
        }
        FunctionCondition::Faltering => seen.unready_since = Some(NOW),
        FunctionCondition::Lost => seen.answered = NOW - seconds(60.0),
        FunctionCondition::Leaving => seen.observed.phase = FunctionPhase::Stopping,
    }
    seen
}

fn remembered(scene: &RolloutScenario) -> RestartMemory {
    let mut memory = RestartMemory::default();
    let in_force = match scene.in_force {
        InForce::Nothing => None,
        InForce::This(endpoints) => Some((0, endpoints)),
        InForce::Another(endpoints) => Some((7, endpoints)),
    };
    if let Some((revision, endpoints)) = in_force {
        let id = |id: &&str| FunctionId((*id).to_owned());
        let route = Route { revision, main: id(&"main"), endpoints: endpoints.iter().map(id).collect() };
        memory.note(&Action::Route { generation: 1, route }, Time::ZERO);
        memory.routed(true, Time::ZERO);
    }
    for (name, ago) in scene.failed {
        memory.ended(name, Time::ZERO);
        memory.ended(name, NOW - seconds(f64::from(*ago)));
    }
    memory
}

fn shown(action: &Action) -> String {
    match action {
        Action::Start { name } => format!("start {name}"),
        Action::Stop { id, .. } => format!("stop {id}"),
        Action::Forget { .. } | Action::GiveUp { .. } => unreachable!("nothing has ended"),
        Action::Route { route, .. } => {
            let endpoints: Vec<&str> = route.endpoints.iter().map(|id| id.0.as_str()).collect();
            format!("tell {}", endpoints.join(" ")).trim_end().to_owned()
        }
    }
}

#[test]
fn processes_are_decided_about_as_pods_are() {
    for scene in SCENES {
        let there: Vec<Instance> = scene.there.iter().map(|(id, is)| seen(id, *is)).collect();
        let actions = decide(&desired(scene), &there, &remembered(scene), NOW);
        let mut actions: Vec<String> = actions.iter().map(shown).collect();
        actions.sort();
        assert_eq!(actions, decided(scene, true), "{}", scene.name);
    }
}
