//! Process launcher with real processes.

use remoe_test_support::fake;

use fake::script;
use remoe_process::Role;
use remoe_rollout::process::Programs;
use remoe_rollout::{
    Ending, FunctionId, FunctionPhase, FunctionSpec, Launcher, LogLine, ObservedFunction, ProcessLauncher,
};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
const ANNOUNCEMENT: &str = r#"echo '{"role":"remote","grpc":"127.0.0.1:9","start_us":1}'"#;

/// Returns a launcher whose remote function is the shell script `body`.
fn launcher(folder: &Path, body: &str, announce_timeout: Duration) -> ProcessLauncher {
    let program = script(folder, "function", &format!("#!/bin/sh\n{body}\n"));
    let programs = Programs { main: program.clone(), remote: program };
    ProcessLauncher::new(programs, announce_timeout, Arc::new(|_: LogLine<'_>| {})).unwrap()
}

fn spec(role: Role) -> FunctionSpec {
    FunctionSpec {
        name: "under-test".to_owned(),
        role,
        arguments: vec!["--model".into(), "folder with space".into()],
        environment: vec![("REMOE_TEST".to_owned(), "from the specification".to_owned())],
        http: None,
        hosted: Vec::new(),
        limits: None,
    }
}

/// Waits until the function satisfies the condition.
async fn until<T>(
    launcher: &ProcessLauncher,
    id: &FunctionId,
    look: impl Fn(&ObservedFunction) -> Option<T>,
) -> T {
    let seen = async {
        loop {
            let list = launcher.list().await;
            if let Some(found) = list.iter().find(|observed| observed.id == *id).and_then(&look) {
                return found;
            }
            launcher.changed().await;
        }
    };
    tokio::time::timeout(LONG, seen).await.expect("the function never got there")
}

fn ending(observed: &ObservedFunction) -> Option<Ending> {
    match &observed.phase {
        FunctionPhase::Ended(ending) => Some(ending.clone()),
        _ => None,
    }
}

fn address(observed: &ObservedFunction) -> Option<String> {
    match observed.phase {
        FunctionPhase::Listening { grpc, .. } => Some(grpc.to_string()),
        _ => None,
    }
}

#[tokio::test]
async fn an_announcement_is_heard_among_other_lines() {
    let folder = tempfile::tempdir().unwrap();
    let body = format!("echo loading; {ANNOUNCEMENT}; exec sleep 100");
    let launcher = launcher(folder.path(), &body, LONG);
    let id = launcher.start(&spec(Role::Remote)).await.unwrap();
    assert_eq!(until(&launcher, &id, address).await, "127.0.0.1:9");
    launcher.stop(&id, LONG).await;
    assert_eq!(until(&launcher, &id, ending).await.signal, Some(Signal::TERM.as_raw()));
    launcher.stop(&id, LONG).await;
    assert!(launcher.list().await.is_empty(), "an end that was acknowledged is forgotten");
}

#[tokio::test]
async fn arguments_and_environment_arrive() {
    let folder = tempfile::tempdir().unwrap();
    let body = r#"for word in "$@"; do echo "$word" >&2; done; echo "$REMOE_TEST" >&2"#;
    let launcher = launcher(folder.path(), body, LONG);
    let own_pid = std::process::id().to_string();
    let common = ["--model", "folder with space"];
    let ends = ["--launcher-pid", &own_pid, "from the specification"];
    let remote = launcher.start(&spec(Role::Remote)).await.unwrap();
    let log = until(&launcher, &remote, ending).await.log;
    assert_eq!(log, [&common[..], &ends[..]].concat());
    let silent = launcher.start(&spec(Role::Main)).await.unwrap();
    let log = until(&launcher, &silent, ending).await.log;
    assert_eq!(log, [&common[..], &["--no-http"], &ends[..]].concat());
    let http = FunctionSpec { http: Some("127.0.0.1:80".parse().unwrap()), ..spec(Role::Main) };
    let serving = launcher.start(&http).await.unwrap();
    let log = until(&launcher, &serving, ending).await.log;
    assert_eq!(log, [&common[..], &["--http-listen", "127.0.0.1:80"], &ends[..]].concat());
}

#[tokio::test]
async fn a_crash_is_told_with_its_last_words() {
    let folder = tempfile::tempdir().unwrap();
    let body = r#"echo '{"level":"ERROR","message":"tensor x is missing","field":"x"}' >&2; exit 4"#;
    let launcher = launcher(folder.path(), body, LONG);
    let id = launcher.start(&spec(Role::Remote)).await.unwrap();
    let ending = until(&launcher, &id, ending).await;
    assert_eq!(ending.to_string(), "exited with code 4: tensor x is missing");
    assert_eq!(ending.last_record().unwrap()["field"], "x");
}

#[tokio::test]
async fn a_flood_of_output_is_bounded_and_handed_on() {
    let folder = tempfile::tempdir().unwrap();
    let body = "head -c 3000000 /dev/zero | tr '\\0' x >&2; seq 1 5000 >&2";
    let program = script(folder.path(), "function", &format!("#!/bin/sh\n{body}\n"));
    let lines = Arc::new(Mutex::new(0));
    let count = lines.clone();
    let sink = Arc::new(move |line: LogLine<'_>| {
        assert!(line.text.len() <= 16 << 10);
        *count.lock().unwrap() += 1;
    });
    let programs = Programs { main: program.clone(), remote: program };
    let launcher = ProcessLauncher::new(programs, LONG, sink).unwrap();
    let id = launcher.start(&spec(Role::Remote)).await.unwrap();
    let log = until(&launcher, &id, ending).await.log;
    assert_eq!(log.last().unwrap(), "5000");
    assert_eq!(log.len(), 20);
    assert!(*lines.lock().unwrap() >= 5000);
}

#[tokio::test]
async fn silence_at_the_start_is_ended() {
    let folder = tempfile::tempdir().unwrap();
    let launcher = launcher(folder.path(), "exec sleep 100", Duration::from_millis(200));
    let id = launcher.start(&spec(Role::Remote)).await.unwrap();
    let ending = until(&launcher, &id, ending).await;
    assert_eq!(ending.signal, Some(Signal::KILL.as_raw()));
    assert!(ending.cause.unwrap().starts_with("did not announce its address"));
}

#[tokio::test]
async fn who_ignores_sigterm_is_killed_after_the_grace() {
    let folder = tempfile::tempdir().unwrap();
    let body = format!("trap '' TERM; {ANNOUNCEMENT}; while :; do sleep 1; done");
    let launcher = launcher(folder.path(), &body, LONG);
    let id = launcher.start(&spec(Role::Remote)).await.unwrap();
    until(&launcher, &id, address).await;
    launcher.stop(&id, Duration::from_millis(300)).await;
    let ending = until(&launcher, &id, ending).await;
    assert_eq!((ending.signal, ending.cause), (Some(Signal::KILL.as_raw()), None));
}

#[tokio::test]
async fn a_stopped_process_can_be_ended() {
    let folder = tempfile::tempdir().unwrap();
    let launcher = launcher(folder.path(), &format!("{ANNOUNCEMENT}; exec sleep 100"), LONG);
    let id = launcher.start(&spec(Role::Remote)).await.unwrap();
    until(&launcher, &id, address).await;
    let pid = until(&launcher, &id, |observed| observed.pid).await;
    let pid = Pid::from_raw(pid.cast_signed()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    launcher.stop(&id, Duration::ZERO).await;
    assert_eq!(until(&launcher, &id, ending).await.signal, Some(Signal::KILL.as_raw()));
}

#[tokio::test]
async fn a_missing_program_is_named() {
    let programs =
        Programs { main: "/nowhere/main-model-fn".into(), remote: "/nowhere/remote-expert-fn".into() };
    let launcher = ProcessLauncher::new(programs, LONG, Arc::new(|_: LogLine<'_>| {})).unwrap();
    let error = launcher.start(&spec(Role::Remote)).await.unwrap_err();
    assert!(error.message.starts_with("cannot start /nowhere/remote-expert-fn: "), "{error}");
}

#[tokio::test]
async fn functions_have_process_groups_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let launcher = launcher(folder.path(), &format!("{ANNOUNCEMENT}; exec sleep 100"), LONG);
    let id = launcher.start(&spec(Role::Remote)).await.unwrap();
    let pid = until(&launcher, &id, |observed| observed.pid).await;
    let pid = Pid::from_raw(pid.cast_signed()).unwrap();
    assert_eq!(rustix::process::getpgid(Some(pid)).unwrap(), pid);
}

/// Starts three functions, prints their process ids and waits to be killed.
#[test]
#[ignore = "a launcher to be killed, started by another test"]
fn doomed_launcher() {
    let Ok(folder) = std::env::var("DOOMED_FOLDER") else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let programs = fake::programs(Path::new(&folder));
        let launcher = ProcessLauncher::new(programs, LONG, Arc::new(|_: LogLine<'_>| {})).unwrap();
        for role in [Role::Main, Role::Remote, Role::Remote] {
            let id = launcher.start(&spec(role)).await.unwrap();
            until(&launcher, &id, address).await;
            println!("child {}", until(&launcher, &id, |observed| observed.pid).await);
        }
        println!("all started");
        std::future::pending::<()>().await;
    });
}

#[test]
fn no_function_survives_the_death_of_its_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "process::doomed_launcher", "--ignored", "--nocapture"])
        .env("DOOMED_FOLDER", folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(launcher.stdout.take().unwrap());
    let mut children = Vec::new();
    for line in output.lines().map(Result::unwrap) {
        if let Some((_, pid)) = line.split_once("child ") {
            children.push(Pid::from_raw(pid.parse().unwrap()).unwrap());
        }
        if line == "all started" {
            break;
        }
    }
    assert_eq!(children.len(), 3);
    // Even one that is stopped.
    kill_process(children[1], Signal::STOP).unwrap();
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    for child in children {
        let mut waits = 0;
        while is_alive(child) {
            waits += 1;
            assert!(waits < 600, "{child:?} is still there");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Returns whether the process runs; zombies do not count.
fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    let ended = stat.is_ok_and(|stat| stat.contains(") Z ") || stat.contains(") X "));
    test_kill_process(pid).is_ok() && !ended
}
