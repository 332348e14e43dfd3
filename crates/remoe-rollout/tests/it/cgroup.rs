//! Limits that the kernel enforces, if this process may create control groups.

use remoe_test_support::fake;

use remoe_process::Role;
use remoe_rollout::process::Programs;
use remoe_rollout::{
    Cgroups, Ending, FunctionPhase, FunctionSpec, Launcher, LogLine, ProcessLauncher, ResourceLimits,
};
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

fn cgroups() -> Option<Arc<Cgroups>> {
    Cgroups::find().inspect_err(|error| eprintln!("skipped: {error}")).ok()
}

/// Runs a function with the script `body` under `limits`. Returns its exit.
async fn ending(cgroups: Arc<Cgroups>, body: &str, limits: ResourceLimits) -> Ending {
    let folder = tempfile::tempdir().unwrap();
    let program = fake::script(folder.path(), "function", &format!("#!/bin/sh\n{body}\n"));
    let programs = Programs { main: program.clone(), remote: program };
    let launcher =
        ProcessLauncher::new(programs, LONG, Arc::new(|_: LogLine<'_>| {})).unwrap().with_limits(cgroups);
    let spec = FunctionSpec {
        name: "limited".to_owned(),
        role: Role::Remote,
        arguments: Vec::new(),
        environment: Vec::new(),
        http: None,
        hosted: Vec::new(),
        limits: Some(limits),
    };
    launcher.start(&spec).await.unwrap();
    let ended = async {
        loop {
            if let Some(FunctionPhase::Ended(ending)) =
                launcher.list().await.into_iter().map(|it| it.phase).next()
            {
                return ending;
            }
            launcher.changed().await;
        }
    };
    tokio::time::timeout(LONG, ended).await.unwrap()
}

#[tokio::test]
async fn function_over_memory_limit_is_killed_with_stated_cause() {
    let Some(cgroups) = cgroups() else { return };
    let limits = ResourceLimits { cpu_millis: 1000, memory_bytes: 64 << 20 };
    // It waits a second before it needs the memory, so that it is in its group by then.
    let greedy = "sleep 0.5; exec python3 -c 'x = bytearray(512 << 20)'";
    let ended = ending(cgroups.clone(), greedy, limits).await;
    assert_eq!(ended.signal, Some(9), "{ended:?}");
    assert_eq!(ended.cause.as_deref(), Some("exceeded its memory limit"));
    let ended = ending(cgroups, "sleep 0.1; exit 7", limits).await;
    assert_eq!((ended.code, ended.cause), (Some(7), None));
}

#[tokio::test]
async fn a_quota_bounds_cpu_time() {
    let Some(cgroups) = cgroups() else { return };
    // Busy for a second of wall time; prints the CPU milliseconds that it got.
    let busy = "sleep 0.3; exec python3 -c '
import time
start, cpu = time.monotonic(), time.process_time()
while time.monotonic() - start < 1: pass
raise SystemExit(int((time.process_time() - cpu) * 100))'";
    let limits = ResourceLimits { cpu_millis: 200, memory_bytes: 1 << 30 };
    let got = ending(cgroups, busy, limits).await.code.unwrap();
    // 20 %, plus unused quota from before.
    assert!((1..=30).contains(&got), "{got}");
}
