//! Pure step for processes: tables of situations.

use crate::fixtures;

use fixtures::{ended, instance, listening, seconds, wanted};
use remoe_proto::v1::LayerExperts;
use remoe_rollout::action::Action;
use remoe_rollout::decide::{Desired, Instance, RolloutTimeouts, decide};
use remoe_rollout::memory::{FIRST_PAUSE, LONGEST_PAUSE, ROUTING_PAUSE, RestartMemory, STABLE_AFTER};
use remoe_rollout::need::by_need;
use remoe_rollout::time::Time;
use remoe_rollout::{FunctionPhase, MoeLayer};
use std::time::Duration;

/// Formats the actions.
fn shown(actions: &[Action]) -> Vec<String> {
    let show = |action: &Action| match action {
        Action::Start { name } => format!("start {name}"),
        Action::Stop { id, grace, .. } if grace.is_zero() => format!("kill {id}"),
        Action::Stop { id, .. } => format!("stop {id}"),
        Action::Forget { id, .. } => format!("forget {id}"),
        Action::GiveUp { name, .. } => format!("give up {name}"),
        Action::Route { generation, route } => {
            let endpoints: Vec<&str> = route.endpoints.iter().map(|id| id.0.as_str()).collect();
            format!("route {generation} {} -> [{}]", route.main, endpoints.join(" "))
        }
    };
    actions.iter().map(show).collect()
}

/// Decides and records the actions, as the loop does.
fn step(desired: &Desired, instances: &[Instance], memory: &mut RestartMemory, now: Time) -> Vec<String> {
    let actions = decide(desired, instances, memory, now);
    for action in &actions {
        memory.note(action, now);
    }
    shown(&actions)
}

/// Returns a memory in which a generation is in force.
fn settled(desired: &Desired, instances: &[Instance]) -> RestartMemory {
    let mut memory = RestartMemory::default();
    let actions = step(desired, instances, &mut memory, Time::ZERO);
    assert!(actions.iter().any(|action| action.starts_with("route 1 ")), "{actions:?}");
    memory.routed(true, Time::ZERO);
    memory
}

#[test]
fn everything_is_started_at_once() {
    let actions = decide(&wanted(2), &[], &RestartMemory::default(), Time::ZERO);
    assert_eq!(shown(&actions), ["start main", "start group-0-0", "start group-0-1"]);
}

#[test]
fn the_first_generation_waits_for_every_remote_function() {
    let desired = wanted(2);
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", FunctionPhase::Starting),
    ];
    let mut memory = RestartMemory::default();
    assert!(step(&desired, &instances, &mut memory, Time::ZERO).is_empty());
    instances[2].observed.phase = listening();
    instances[2].unready_since = Some(Time::ZERO);
    assert!(step(&desired, &instances, &mut memory, Time::ZERO).is_empty());
    instances[2].unready_since = None;
    assert_eq!(step(&desired, &instances, &mut memory, Time::ZERO), ["route 1 m -> [a b]"]);
    // During a push there is no second one, and none of the same routing afterwards.
    assert!(step(&desired, &instances, &mut memory, Time::ZERO).is_empty());
    memory.routed(true, Time::ZERO);
    assert!(step(&desired, &instances, &mut memory, Time::ZERO).is_empty());
    assert_eq!(memory.in_force().unwrap().0, 1);
}

#[test]
fn failed_push_is_retried_with_next_generation_after_backoff() {
    let desired = wanted(0);
    let instances = [instance("m", "main", listening())];
    let mut memory = RestartMemory::default();
    assert_eq!(step(&desired, &instances, &mut memory, Time::ZERO), ["route 1 m -> []"]);
    memory.routed(false, Time::ZERO);
    assert!(step(&desired, &instances, &mut memory, Time::ZERO).is_empty());
    assert_eq!(step(&desired, &instances, &mut memory, ROUTING_PAUSE), ["route 2 m -> []"]);
}

#[test]
fn a_lost_remote_function_is_routed_around_and_brought_back() {
    let desired = wanted(2);
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", listening()),
    ];
    let mut memory = settled(&desired, &instances);
    instances[1].observed.phase = ended(None);
    let now = seconds(1.0);
    let actions = step(&desired, &instances, &mut memory, now);
    assert_eq!(actions, ["forget a", "route 2 m -> [b]"]);
    memory.routed(true, now);
    instances.remove(1);
    assert!(step(&desired, &instances, &mut memory, now).is_empty(), "the pause is not over");
    let actions = step(&desired, &instances, &mut memory, now + FIRST_PAUSE);
    assert_eq!(actions, ["start group-0-0"]);
    instances.push(instance("c", "group-0-0", listening()));
    let actions = step(&desired, &instances, &mut memory, now + FIRST_PAUSE);
    assert_eq!(actions, ["route 3 m -> [b c]"]);
}

#[test]
fn a_new_main_function_gets_a_generation_of_its_own_at_once() {
    let desired = wanted(2);
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", listening()),
    ];
    let mut memory = settled(&desired, &instances);
    instances[0] = instance("n", "main", listening());
    instances[1].unready_since = Some(Time::ZERO);
    let actions = step(&desired, &instances, &mut memory, seconds(1.0));
    assert_eq!(actions, ["route 2 n -> [b]"]);
}

/// Asleep, everything ends at once and nothing starts. Woken, everything starts at once, and the first generation
/// waits for all functions that do not fail meanwhile.
#[test]
fn a_sleep_is_not_a_failure() {
    let mut desired = wanted(2);
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", listening()),
    ];
    let mut memory = settled(&desired, &instances);
    desired.asleep = true;
    let now = seconds(1.0);
    assert_eq!(step(&desired, &instances, &mut memory, now), ["kill m", "kill a", "kill b"]);
    // The main function ends first, wherever it is listed, so that it does not report the others as gone.
    let reversed: Vec<Instance> = instances.iter().rev().cloned().collect();
    assert_eq!(step(&desired, &reversed, &mut memory, now), ["kill m", "kill b", "kill a"]);
    instances.iter_mut().for_each(|one| one.observed.phase = ended(None));
    assert_eq!(step(&desired, &instances, &mut memory, now), ["forget m", "forget a", "forget b"]);
    assert!(step(&desired, &[], &mut memory, now).is_empty());
    desired.asleep = false;
    assert_eq!(step(&desired, &[], &mut memory, now), ["start main", "start group-0-0", "start group-0-1"]);
    let mut instances = vec![
        instance("n", "main", listening()),
        instance("c", "group-0-0", listening()),
        instance("d", "group-0-1", FunctionPhase::Starting),
    ];
    assert!(step(&desired, &instances, &mut memory, now).is_empty(), "one of them is on its way");
    instances[2].observed.phase = ended(None);
    assert_eq!(step(&desired, &instances, &mut memory, now), ["forget d", "route 2 n -> [c]"]);
}

/// Three groups with two replicas each; waiting requests use the second group's experts most, then the third's.
fn skewed() -> Desired {
    let mut desired = wanted(6);
    for (at, function) in desired.functions.iter_mut().skip(1).enumerate() {
        function.name = format!("group-{}-{}", at / 2, at % 2);
        function.hosted = vec![LayerExperts { layer: 1, experts: vec![at as u32 / 2] }];
    }
    desired.remote = vec![LayerExperts { layer: 1, experts: vec![0, 1, 2] }];
    by_need(&mut desired.functions, &[MoeLayer { layer: 1, experts: 4 }], &[vec![0.1, 0.6, 0.2, 0.1]]);
    desired
}

#[test]
fn what_those_who_wait_need_most_starts_first() {
    let desired = skewed();
    let started = ["main", "group-1-0", "group-2-0", "group-0-0", "group-1-1", "group-2-1", "group-0-1"];
    let actions = decide(&desired, &[], &RestartMemory::default(), Time::ZERO);
    assert_eq!(shown(&actions), started.map(|name| format!("start {name}")));
    // Equally needed groups are ordered by name.
    let mut alike = skewed();
    by_need(&mut alike.functions, &[MoeLayer { layer: 1, experts: 4 }], &[vec![0.25; 4]]);
    let names: Vec<&str> = alike.functions.iter().map(|function| function.name.as_str()).collect();
    assert_eq!(names[..4], ["main", "group-0-0", "group-1-0", "group-2-0"]);
}

#[test]
fn limited_starts_proceed_in_order_one_after_the_other() {
    let desired = Desired { starts_at_once: Some(2), ..skewed() };
    let mut memory = RestartMemory::default();
    let now = Time::ZERO;
    assert_eq!(step(&desired, &[], &mut memory, now), ["start main", "start group-1-0", "start group-2-0"]);
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("c", "group-1-0", FunctionPhase::Starting),
        instance("e", "group-2-0", listening()),
    ];
    // The very first generation waits for everything.
    assert_eq!(step(&desired, &instances, &mut memory, now), ["start group-0-0"]);
    instances.push(instance("a", "group-0-0", listening()));
    instances[3].unready_since = Some(now);
    assert!(step(&desired, &instances, &mut memory, now).is_empty(), "it listens, and has no experts yet");
    // An ended function is not awaited: the next one starts in its place.
    instances[1].observed.phase = ended(Some(9));
    assert_eq!(step(&desired, &instances, &mut memory, now), ["give up group-1-0", "start group-1-1"]);
}

/// Waiting requests are served by the functions that start with the main function; it loads the other experts itself
/// until their functions are ready.
#[test]
fn a_wake_with_limited_starts_serves_with_the_first_ones() {
    let limited = Desired { starts_at_once: Some(2), ..skewed() };
    let names: Vec<String> = limited.functions.iter().map(|function| function.name.clone()).collect();
    let all: Vec<Instance> = names.iter().map(|name| instance(name, name, listening())).collect();
    let mut memory = settled(&limited, &all);
    let asleep = Desired { asleep: true, ..limited.clone() };
    let now = seconds(1.0);
    assert_eq!(step(&asleep, &all, &mut memory, now).len(), 7);
    let gone: Vec<Instance> = names.iter().map(|name| instance(name, name, ended(None))).collect();
    assert_eq!(step(&asleep, &gone, &mut memory, now).len(), 7);
    let mut starts = step(&limited, &[], &mut memory, now);
    assert_eq!(starts, ["start main", "start group-1-0", "start group-2-0"]);
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("c", "group-1-0", listening()),
        instance("e", "group-2-0", FunctionPhase::Starting),
    ];
    starts = step(&limited, &instances, &mut memory, now);
    assert_eq!(starts, ["start group-0-0"], "one of the first two is on its way");
    instances.push(instance("a", "group-0-0", FunctionPhase::Starting));
    instances[2].observed.phase = listening();
    assert_eq!(step(&limited, &instances, &mut memory, now), ["start group-1-1", "route 2 m -> [c e]"]);
    memory.routed(true, now);
    instances[3].observed.phase = listening();
    instances.push(instance("d", "group-1-1", FunctionPhase::Starting));
    assert_eq!(step(&limited, &instances, &mut memory, now), ["start group-2-1", "route 3 m -> [a c e]"]);
}

#[test]
fn with_all_remote_functions_gone_the_generation_in_force_stays() {
    let desired = wanted(1);
    let mut instances = vec![instance("m", "main", listening()), instance("a", "group-0-0", listening())];
    let mut memory = settled(&desired, &instances);
    instances[1].observed.phase = ended(None);
    assert_eq!(step(&desired, &instances, &mut memory, Time::ZERO), ["forget a"]);
    instances[1] = instance("b", "group-0-0", listening());
    assert_eq!(step(&desired, &instances, &mut memory, Time::ZERO), ["route 2 m -> [b]"]);
}

/// Two groups of one function each: while one is gone, routing follows the other one and a new main function.
#[test]
fn a_group_that_is_gone_keeps_nothing_from_the_others() {
    let mut desired = wanted(2);
    desired.remote = vec![LayerExperts { layer: 1, experts: vec![3, 5] }];
    desired.functions[2].hosted = vec![LayerExperts { layer: 1, experts: vec![5] }];
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", listening()),
    ];
    let mut memory = settled(&desired, &instances);
    let now = seconds(1.0);
    instances[1].observed.phase = ended(None);
    assert_eq!(step(&desired, &instances, &mut memory, now), ["forget a"], "no other function has expert 3");
    instances.remove(1);
    instances[1] = instance("c", "group-0-1", listening());
    assert_eq!(step(&desired, &instances, &mut memory, now), ["route 2 m -> [c]"]);
    memory.routed(true, now);
    instances[0] = instance("n", "main", listening());
    assert_eq!(step(&desired, &instances, &mut memory, now), ["route 3 n -> [c]"]);
    memory.routed(true, now);
    instances.push(instance("d", "group-0-0", listening()));
    assert_eq!(step(&desired, &instances, &mut memory, now), ["route 4 n -> [c d]"]);
}

#[test]
fn main_function_may_be_silent_during_generation_switch() {
    let desired = wanted(0);
    let instances = [instance("m", "main", listening())];
    let mut memory = RestartMemory::default();
    assert_eq!(step(&desired, &instances, &mut memory, Time::ZERO), ["route 1 m -> []"]);
    let later = desired.timeouts.main_silence + seconds(1.0);
    assert!(step(&desired, &instances, &mut memory, later).is_empty());
    memory.routed(true, later);
    assert_eq!(step(&desired, &instances, &mut memory, later), ["kill m"]);
}

#[test]
fn silence_is_ended_after_the_patience_for_the_role() {
    let desired = wanted(1);
    let instances = [instance("m", "main", listening()), instance("a", "group-0-0", listening())];
    let mut memory = settled(&desired, &instances);
    let RolloutTimeouts { remote_silence, main_silence, .. } = desired.timeouts;
    let just = Duration::from_nanos(1);
    assert!(step(&desired, &instances, &mut memory, remote_silence).is_empty());
    let actions = step(&desired, &instances, &mut memory, remote_silence + just);
    assert_eq!(actions, ["kill a"]);
    let actions = step(&desired, &instances, &mut memory, main_silence + just);
    assert_eq!(actions, ["kill m", "kill a"]);
}

#[test]
fn a_function_that_answers_but_never_gets_ready_is_ended() {
    let desired = wanted(1);
    let now = desired.timeouts.ready + seconds(1.0);
    let mut stuck = instance("a", "group-0-0", listening());
    (stuck.answered, stuck.unready_since) = (now, Some(Time::ZERO));
    let mut starting = instance("m", "main", FunctionPhase::Starting);
    starting.answered = Time::ZERO;
    let actions = decide(&desired, &[starting, stuck], &RestartMemory::default(), now);
    assert_eq!(shown(&actions), ["kill a"], "how long it may start is its launcher's matter");
}

#[test]
fn pauses_double_up_to_a_limit_and_a_stable_life_resets_them() {
    let mut memory = RestartMemory::default();
    let mut now = Time::ZERO;
    let mut pauses = Vec::new();
    for _ in 0..9 {
        memory.note(&Action::Start { name: "a".to_owned() }, now);
        now += seconds(1.0);
        memory.ended("a", now);
        pauses.push((memory.not_before("a") - now).as_secs_f64());
    }
    assert_eq!(pauses, [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]);
    assert_eq!(memory.not_before("a") - now, LONGEST_PAUSE);
    memory.note(&Action::Start { name: "a".to_owned() }, now);
    now += STABLE_AFTER;
    memory.ended("a", now);
    assert_eq!(memory.not_before("a") - now, FIRST_PAUSE);
    assert_eq!(memory.not_before("b"), Time::ZERO);
}

#[test]
fn a_refusal_is_final_only_before_anything_worked() {
    let desired = wanted(0);
    let refused = [instance("m", "main", ended(Some(4)))];
    let killed = [instance("m", "main", ended(None))];
    let mut memory = RestartMemory::default();
    assert_eq!(step(&desired, &killed, &mut memory, Time::ZERO), ["forget m"]);
    assert_eq!(step(&desired, &refused, &mut memory, Time::ZERO), ["give up main"]);
    let mut memory = settled(&desired, &[instance("m", "main", listening())]);
    assert_eq!(step(&desired, &refused, &mut memory, Time::ZERO), ["forget m"]);
}

#[test]
fn the_end_takes_the_main_function_first() {
    let desired = wanted(1);
    let mut instances = vec![instance("m", "main", listening()), instance("a", "group-0-0", listening())];
    let mut memory = settled(&desired, &instances);
    let nothing = Desired { functions: Vec::new(), ..desired };
    assert_eq!(step(&nothing, &instances, &mut memory, Time::ZERO), ["stop m"]);
    instances[0].observed.phase = FunctionPhase::Stopping;
    assert!(step(&nothing, &instances, &mut memory, Time::ZERO).is_empty());
    instances[0].observed.phase = ended(Some(0));
    assert_eq!(step(&nothing, &instances, &mut memory, Time::ZERO), ["forget m", "stop a"]);
}

#[test]
fn a_remote_function_too_many_leaves_after_the_route_does() {
    let many = wanted(2);
    let instances = [
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", listening()),
    ];
    let mut memory = settled(&many, &instances);
    let few = wanted(1);
    assert_eq!(step(&few, &instances, &mut memory, Time::ZERO), ["route 2 m -> [a]"]);
    assert!(step(&few, &instances, &mut memory, Time::ZERO).is_empty(), "not in force yet");
    memory.routed(true, Time::ZERO);
    assert_eq!(step(&few, &instances, &mut memory, Time::ZERO), ["stop b"]);
}

#[test]
fn a_place_is_filled_once() {
    let desired = wanted(0);
    let instances = [
        instance("m", "main", FunctionPhase::Stopping),
        instance("n", "main", FunctionPhase::Starting),
        instance("o", "main", FunctionPhase::Starting),
    ];
    let actions = decide(&desired, &instances, &RestartMemory::default(), Time::ZERO);
    assert_eq!(shown(&actions), ["stop o"]);
}

#[test]
fn unpushed_generation_is_followed_by_a_greater_one() {
    let desired = wanted(0);
    let instances = [instance("m", "main", listening())];
    let mut memory = settled(&desired, &instances);
    assert!(!memory.found(0, Time::ZERO) && !memory.found(1, Time::ZERO), "its own");
    assert!(memory.found(1 << 40, seconds(1.0)));
    assert_eq!(memory.in_force(), None);
    assert!(!memory.found(1 << 40, seconds(1.0)), "said once");
    assert!(
        step(&desired, &instances, &mut memory, seconds(1.0)).is_empty(),
        "two launchers take turns slowly"
    );
    let now = seconds(1.0) + ROUTING_PAUSE;
    assert_eq!(step(&desired, &instances, &mut memory, now), ["route 1099511627777 m -> []"]);
    assert!(!memory.found((1 << 40) + 1, now), "what is being pushed may be in force already");
    memory.routed(true, now);
    assert_eq!(memory.in_force().unwrap().0, (1 << 40) + 1);
    // Numbers saturate.
    assert!(memory.found(u64::MAX, now));
    let now = now + ROUTING_PAUSE;
    assert_eq!(step(&desired, &instances, &mut memory, now), [format!("route {} m -> []", u64::MAX)]);
}

#[test]
fn revision_applies_as_a_whole_and_previous_serves_until_then() {
    let first = wanted(2);
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", listening()),
    ];
    let mut memory = settled(&first, &instances);
    let mut second = Desired { revision: 1, ..wanted(2) };
    for function in second.functions.iter_mut().filter(|function| function.name != "main") {
        function.name.push_str("-r1");
    }
    let now = seconds(1.0);
    let actions = step(&second, &instances, &mut memory, now);
    assert_eq!(actions, ["start group-0-0-r1", "start group-0-1-r1"], "nothing that serves is stopped");
    instances.push(instance("c", "group-0-0-r1", listening()));
    instances.push(instance("d", "group-0-1-r1", FunctionPhase::Starting));
    assert!(step(&second, &instances, &mut memory, now).is_empty(), "half of it is no placement");
    instances[4].observed.phase = listening();
    assert_eq!(step(&second, &instances, &mut memory, now), ["route 2 m -> [c d]"]);
    assert!(step(&second, &instances, &mut memory, now).is_empty(), "requests may still go the old way");
    memory.routed(true, now);
    assert_eq!(step(&second, &instances, &mut memory, now), ["stop a", "stop b"]);
}

#[test]
fn a_revision_without_remote_functions_needs_none() {
    let mut instances = vec![instance("m", "main", listening()), instance("a", "group-0-0", listening())];
    let mut memory = settled(&wanted(1), &instances);
    let local = Desired { revision: 1, ..wanted(0) };
    assert_eq!(step(&local, &instances, &mut memory, seconds(1.0)), ["route 2 m -> []"]);
    memory.routed(true, seconds(1.0));
    assert_eq!(step(&local, &instances, &mut memory, seconds(1.0)), ["stop a"]);
    instances.pop();
    assert!(step(&local, &instances, &mut memory, seconds(1.0)).is_empty());
}

/// Puts a slot of `desired` to sleep while the main function runs.
fn resting(desired: &Desired, places: &[&str]) -> Desired {
    Desired { resting: places.iter().map(|place| (*place).to_owned()).collect(), ..desired.clone() }
}

/// Two groups with one expert each.
fn apart() -> Desired {
    let mut desired = wanted(2);
    desired.remote = vec![LayerExperts { layer: 1, experts: vec![3, 5] }];
    desired.functions[2].hosted = vec![LayerExperts { layer: 1, experts: vec![5] }];
    desired
}

#[test]
fn group_sleeps_after_its_route_is_gone_and_returns_when_ready() {
    let desired = apart();
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", listening()),
    ];
    let mut memory = settled(&desired, &instances);
    let now = seconds(1.0);
    let asleep = resting(&desired, &["group-0-0"]);
    assert_eq!(
        step(&asleep, &instances, &mut memory, now),
        ["route 2 m -> [b]"],
        "no function is asked to end yet"
    );
    assert!(step(&asleep, &instances, &mut memory, now).is_empty(), "requests may still go there");
    memory.routed(true, now);
    assert_eq!(step(&asleep, &instances, &mut memory, now), ["stop a"]);
    instances[1].observed.phase = ended(Some(0));
    assert_eq!(step(&asleep, &instances, &mut memory, now), ["forget a"]);
    instances.remove(1);
    assert!(step(&asleep, &instances, &mut memory, now).is_empty(), "it is not started again");
    // The main function dies meanwhile: the next one serves without the sleeping groups.
    instances[0] = instance("n", "main", listening());
    assert_eq!(step(&asleep, &instances, &mut memory, now), ["route 3 n -> [b]"]);
    memory.routed(true, now);
    // It is used, so it starts at once, and is killed during its start. The other group continues.
    assert_eq!(step(&desired, &instances, &mut memory, now), ["start group-0-0"]);
    instances.push(instance("c", "group-0-0", ended(None)));
    assert_eq!(step(&desired, &instances, &mut memory, now), ["forget c"]);
    instances.pop();
    let now = seconds(2.0);
    assert_eq!(step(&desired, &instances, &mut memory, now), ["start group-0-0"]);
    instances.push(instance("d", "group-0-0", listening()));
    assert_eq!(step(&desired, &instances, &mut memory, now), ["route 4 n -> [b d]"]);
}

#[test]
fn a_group_that_is_woken_before_it_ended_goes_on() {
    let desired = apart();
    let instances = [
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", listening()),
    ];
    let mut memory = settled(&desired, &instances);
    let asleep = resting(&desired, &["group-0-0", "group-0-1"]);
    assert_eq!(step(&asleep, &instances, &mut memory, Time::ZERO), ["route 2 m -> []"]);
    memory.routed(true, Time::ZERO);
    assert_eq!(step(&desired, &instances, &mut memory, Time::ZERO), ["route 3 m -> [a b]"]);
}

/// Neither a waking group nor a replaced function waits for other waking groups.
#[test]
fn a_group_that_wakes_holds_nothing_up() {
    let desired = apart();
    let mut instances = vec![
        instance("m", "main", listening()),
        instance("a", "group-0-0", listening()),
        instance("b", "group-0-1", listening()),
    ];
    let mut memory = settled(&desired, &instances);
    let asleep = resting(&desired, &["group-0-0", "group-0-1"]);
    step(&asleep, &instances, &mut memory, Time::ZERO);
    memory.routed(true, Time::ZERO);
    assert_eq!(step(&asleep, &instances, &mut memory, Time::ZERO), ["stop a", "stop b"]);
    (instances[1].observed.phase, instances[2].observed.phase) = (ended(None), ended(None));
    step(&asleep, &instances, &mut memory, Time::ZERO);
    instances.truncate(1);
    let woken = step(&desired, &instances, &mut memory, Time::ZERO);
    assert_eq!(woken, ["start group-0-0", "start group-0-1"]);
    instances.push(instance("c", "group-0-0", FunctionPhase::Starting));
    instances.push(instance("d", "group-0-1", listening()));
    assert_eq!(step(&desired, &instances, &mut memory, Time::ZERO), ["route 3 m -> [d]"]);
}

#[test]
fn a_wake_starts_and_waits_for_what_does_not_rest() {
    let desired = resting(&apart(), &["group-0-1", "main"]);
    let mut memory = RestartMemory::default();
    let now = Time::ZERO;
    assert_eq!(
        step(&desired, &[], &mut memory, now),
        ["start main", "start group-0-0"],
        "a main function never rests"
    );
    let mut instances =
        vec![instance("m", "main", listening()), instance("a", "group-0-0", FunctionPhase::Starting)];
    assert!(step(&desired, &instances, &mut memory, now).is_empty());
    instances[1].observed.phase = listening();
    assert_eq!(step(&desired, &instances, &mut memory, now), ["route 1 m -> [a]"]);
}
