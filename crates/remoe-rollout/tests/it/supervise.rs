//! Lifecycle of deployments of fake functions.

use remoe_test_support::fake;

use remoe_process::Role;
use remoe_proto::largest_generation;
use remoe_proto::v1::Routing;
use remoe_rollout::control;
use remoe_rollout::decide::{Desired, RolloutTimeouts};
use remoe_rollout::functions::deployment;
use remoe_rollout::{
    FunctionState, LogLine, ModelOptions, MoeLayer, NotReady, Placement, ProcessLauncher, RolloutEvent,
    Status, Supervisor,
};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

fn wanted(replicas: u32, http: bool) -> Desired {
    let model = [MoeLayer { layer: 1, experts: 4 }];
    deployment(
        &ModelOptions::default(),
        &Placement::from_ratio(&model, 0.5, replicas).unwrap(),
        http.then(|| "127.0.0.1:0".parse().unwrap()),
        Duration::ZERO,
        // Long timeouts, so that no function ends for silence on a busy machine, except in its own test.
        RolloutTimeouts { remote_silence: LONG, main_silence: LONG, ready: LONG },
    )
}

fn supervisor(folder: &Path, desired: Desired) -> (Supervisor, Arc<Mutex<Vec<RolloutEvent>>>) {
    let programs = fake::programs(folder);
    let launcher = ProcessLauncher::new(programs, LONG, Arc::new(|_: LogLine<'_>| {})).unwrap();
    let events = Arc::new(Mutex::new(Vec::new()));
    let sink = events.clone();
    let supervisor = Supervisor::spawn(
        launcher,
        desired,
        Arc::new(move |event: &RolloutEvent| sink.lock().unwrap().push(event.clone())),
    );
    (supervisor, events)
}

async fn until(supervisor: &Supervisor, look: impl Fn(&Status) -> bool) -> Status {
    let mut status = supervisor.status();
    let seen = status.wait_for(look);
    tokio::time::timeout(LONG, seen).await.expect("it never got there").unwrap().clone()
}

/// Waits until everything serves under a generation later than `generation`.
fn whole_after(status: &Status, generation: u64) -> bool {
    status.generation.is_some_and(|current| current > generation)
        && status.functions.iter().all(|function| function.state == FunctionState::Serving)
}

fn send(status: &Status, name: &str, signal: Signal) -> u32 {
    let function = status.functions.iter().find(|function| function.name == name).unwrap();
    let pid = function.pid.unwrap();
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
    pid
}

fn pid_of(status: &Status, name: &str) -> Option<u32> {
    status.functions.iter().find(|function| function.name == name).unwrap().pid
}

#[tokio::test]
async fn ready_means_that_a_generation_is_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let (supervisor, _) = supervisor(folder.path(), wanted(2, false));
    let status = supervisor.ready(LONG).await.unwrap();
    assert_eq!(status.generation, Some(1));
    let roles: Vec<Role> = status.functions.iter().map(|function| function.role).collect();
    assert_eq!(roles, [Role::Main, Role::Remote, Role::Remote]);
    let routings = fake::routings(folder.path());
    let mut addresses: Vec<String> =
        status.functions[1..].iter().map(|function| format!("{}=[1]", function.grpc.unwrap())).collect();
    addresses.sort();
    assert_eq!(routings, [format!("1 [{}] 1:2-3", addresses.join(" "))]);
    supervisor.shutdown(LONG).await;
}

/// Endpoints with a part of a remote set list their experts; those with a complete set only name the layer.
#[tokio::test]
async fn the_routing_says_what_each_group_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let model = [MoeLayer { layer: 1, experts: 4 }, MoeLayer { layer: 3, experts: 4 }];
    let plan = r#"{"groups": [{"experts": "1:0-1,3:2"}, {"experts": "1:3"}],
        "layers": [{"layer": 1, "remote": [0, 1, 3]}, {"layer": 3, "remote": [2], "replicas": 0}]}"#;
    let placement = Placement::from_plan(&model, plan).unwrap();
    let timeouts = RolloutTimeouts { remote_silence: LONG, main_silence: LONG, ready: LONG };
    let desired = deployment(&ModelOptions::default(), &placement, None, Duration::ZERO, timeouts);
    let (supervisor, _) = supervisor(folder.path(), desired);
    let status = supervisor.ready(LONG).await.unwrap();
    let functions = status.functions[1..].iter().zip(["1:0-1,3:2", "1:3"]);
    let mut expected: Vec<String> =
        functions.map(|(function, experts)| format!("{}={experts}", function.grpc.unwrap())).collect();
    expected.sort();
    assert_eq!(fake::routings(folder.path()), [format!("1 [{}] 1:0-1,3,3:2", expected.join(" "))]);
    supervisor.shutdown(LONG).await;
}

#[tokio::test]
async fn killed_remote_functions_come_back_in_a_later_generation() {
    let folder = tempfile::tempdir().unwrap();
    let (supervisor, _) = supervisor(folder.path(), wanted(2, false));
    let status = supervisor.ready(LONG).await.unwrap();
    let killed = ["group-0-0", "group-0-1"].map(|name| send(&status, name, Signal::KILL));
    let back = until(&supervisor, |status| {
        whole_after(status, 1)
            && pid_of(status, "group-0-0") != Some(killed[0])
            && pid_of(status, "group-0-1") != Some(killed[1])
    })
    .await;
    assert_eq!(pid_of(&back, "main"), pid_of(&status, "main"));
    let routings = fake::routings(folder.path());
    let last = routings.last().unwrap();
    for function in &back.functions[1..] {
        assert!(last.contains(&function.grpc.unwrap().to_string()), "{last}");
    }
    supervisor.shutdown(Duration::ZERO).await;
}

#[tokio::test]
async fn a_frozen_remote_function_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut desired = wanted(1, false);
    desired.timeouts.remote_silence = Duration::from_secs(3);
    let (supervisor, events) = supervisor(folder.path(), desired);
    let status = supervisor.ready(LONG).await.unwrap();
    let frozen = send(&status, "group-0-0", Signal::STOP);
    until(&supervisor, |status| whole_after(status, 1) && pid_of(status, "group-0-0") != Some(frozen)).await;
    let events = events.lock().unwrap();
    let said = events.iter().any(
        |event| matches!(event, RolloutEvent::Unhealthy { fault, .. } if fault.starts_with("unresponsive")),
    );
    assert!(said, "{events:?}");
}

#[tokio::test]
async fn a_killed_main_function_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let (supervisor, _) = supervisor(folder.path(), wanted(1, true));
    let status = supervisor.ready(LONG).await.unwrap();
    assert!(status.functions[0].http.is_some());
    let killed = send(&status, "main", Signal::KILL);
    let back =
        until(&supervisor, |status| whole_after(status, 1) && pid_of(status, "main") != Some(killed)).await;
    assert!(back.functions[0].http.is_some());
    assert_eq!(pid_of(&back, "group-0-0"), pid_of(&status, "group-0-0"));
    supervisor.shutdown(Duration::ZERO).await;
}

/// Woken at any time, even before the old functions have ended, every function starts again; a function that was
/// never stopped continues.
#[tokio::test]
async fn what_sleeps_ends_and_comes_back_when_it_is_woken() {
    let folder = tempfile::tempdir().unwrap();
    let awake = wanted(2, true);
    let (supervisor, events) = supervisor(folder.path(), awake.clone());
    let mut status = supervisor.ready(LONG).await.unwrap();
    for round in 0..6 {
        let asleep = supervisor.change(Desired { asleep: true, ..awake.clone() });
        if round % 2 == 0 {
            until(&supervisor, |status| status.functions.iter().all(|one| one.pid.is_none())).await;
        } else {
            until(&supervisor, |status| status.change == asleep).await;
        }
        let woken = supervisor.change(awake.clone());
        let generation = status.generation.unwrap();
        let next =
            until(&supervisor, |status| status.change == woken && whole_after(status, generation)).await;
        for (old, new) in status.functions.iter().zip(&next.functions) {
            assert_ne!(old.pid, new.pid, "{}", old.name);
        }
        status = next;
    }
    let failed =
        |event: &RolloutEvent| matches!(event, RolloutEvent::Ended { .. } | RolloutEvent::Unhealthy { .. });
    assert!(!events.lock().unwrap().iter().any(failed), "a sleep is no failure");
    supervisor.shutdown(LONG).await;
}

#[tokio::test]
async fn a_refusal_ends_the_deployment_with_its_words() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("refuse"), "").unwrap();
    let (supervisor, _) = supervisor(folder.path(), wanted(1, false));
    let Err(NotReady::Failed(failure)) = supervisor.ready(LONG).await else { panic!("it did not refuse") };
    assert_eq!(failure.to_string(), "main exited with code 4: no such tensor");
    assert_eq!(failure.ending.code, Some(4));
    until(&supervisor, |status| status.functions.is_empty()).await;
}

#[tokio::test]
async fn shutdown_drains_main_function_first_and_all_exit_cleanly() {
    let folder = tempfile::tempdir().unwrap();
    let (supervisor, events) = supervisor(folder.path(), wanted(2, false));
    supervisor.ready(LONG).await.unwrap();
    supervisor.shutdown(LONG).await;
    let events = events.lock().unwrap();
    let ended: Vec<(&str, Option<i32>)> = events
        .iter()
        .filter_map(|event| match event {
            RolloutEvent::Stopped { name, ending } => Some((name.as_str(), ending.code)),
            _ => None,
        })
        .collect();
    assert_eq!(ended.first(), Some(&("main", Some(0))));
    assert_eq!(ended.len(), 3);
    assert!(ended.iter().all(|(_, code)| *code == Some(0)), "{ended:?}");
}

#[tokio::test]
async fn what_is_not_ready_in_time_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let programs = remoe_rollout::process::Programs {
        main: fake::script(folder.path(), "main", "#!/bin/sh\nexec sleep 100\n"),
        remote: fake::programs(folder.path()).remote,
    };
    let launcher = ProcessLauncher::new(programs, LONG, Arc::new(|_: LogLine<'_>| {})).unwrap();
    let supervisor = Supervisor::spawn(launcher, wanted(1, false), Arc::new(|_: &RolloutEvent| {}));
    until(&supervisor, |status| {
        status.functions.iter().any(|function| function.state == FunctionState::Ready)
    })
    .await;
    let error = supervisor.ready(Duration::from_millis(100)).await.unwrap_err();
    let expected = "not ready after 100ms: waiting for main; raise --ready-timeout to wait longer";
    assert_eq!(error.to_string(), expected);
}

#[tokio::test]
async fn main_function_started_before_placement_adopts_it() {
    let folder = tempfile::tempdir().unwrap();
    let whole = wanted(2, true);
    let mut early = whole.clone();
    early.functions.truncate(1);
    early.placed = false;
    let (supervisor, _) = supervisor(folder.path(), early);
    let alone =
        until(&supervisor, |status| status.functions.iter().any(|function| function.grpc.is_some())).await;
    assert_eq!((alone.functions.len(), alone.generation), (1, None));
    supervisor.change(whole);
    let served = until(&supervisor, |status| status.functions.len() == 3 && whole_after(status, 0)).await;
    assert_eq!(served.functions[0].pid, alone.functions[0].pid);
    assert_eq!(served.functions[0].http, alone.functions[0].http);
    supervisor.shutdown(Duration::ZERO).await;
}

/// A placement that another process pushes is noticed, reported, and replaced by the deployment's own, even if a main
/// function that starts later is far behind the numbers.
#[tokio::test]
async fn foreign_placement_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let (supervisor, events) = supervisor(folder.path(), wanted(1, false));
    let status = supervisor.ready(LONG).await.unwrap();
    let own = fake::routings(folder.path()).last().unwrap().split_once(' ').unwrap().1.to_owned();
    let main = status.functions[0].grpc.unwrap();
    let push = async |generation| {
        let foreign = Routing { generation, ..Routing::default() };
        control::set_routing(main, foreign, LONG).await.unwrap().generation
    };
    let mut highest = 1;
    for _ in 0..2 {
        let foreign = largest_generation(highest);
        assert_eq!(push(foreign).await, foreign);
        let back = until(&supervisor, |status| whole_after(status, foreign)).await;
        highest = back.generation.unwrap();
        let last = fake::routings(folder.path()).last().unwrap().clone();
        assert_eq!(last, format!("{highest} {own}"));
        let found = RolloutEvent::Overruled { generation: foreign };
        assert!(events.lock().unwrap().contains(&found), "{:?}", events.lock().unwrap());
    }
    let killed = send(&status, "main", Signal::KILL);
    until(&supervisor, |status| whole_after(status, highest) && pid_of(status, "main") != Some(killed)).await;
    supervisor.shutdown(Duration::ZERO).await;
}
