//! `scripts/gpu_check` on CPUs: its checks pass, and failures are reported.

use remoe_test_support::binaries::{folder, workspace};
use remoe_test_support::fake::script;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Runs a dry run. Returns the exit code, the report and the output.
fn dry_run(arguments: &[&str]) -> (Option<i32>, Value, String) {
    let scratch = tempfile::tempdir().unwrap();
    let report = scratch.path().join("report.json");
    let mut command = Command::new("python3");
    command.arg(workspace().join("scripts/gpu_check")).args(["--dry-run", "--json"]).arg(&report);
    let output = command.args(arguments).env("REMOE_BIN_DIR", folder()).env_remove("OUT").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let text = std::fs::read_to_string(&report).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code(), serde_json::from_str(&text).unwrap(), printed)
}

/// Creates a folder with the programs, with the script `text` as the main function.
fn with_main(text: &str) -> TempDir {
    let programs = tempfile::tempdir().unwrap();
    for name in ["remoe-bench", "remote-expert-fn"] {
        std::os::unix::fs::symlink(folder().join(name), programs.path().join(name)).unwrap();
    }
    script(programs.path(), "main-model-fn-torch", text);
    programs
}

fn programs(folder: &Path) -> [&str; 2] {
    ["--programs", folder.to_str().unwrap()]
}

fn check<'r>(report: &'r Value, name: &str) -> &'r Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("{name}: {report}"))
}

#[test]
fn dry_run_makes_every_check_and_all_hold() {
    let (code, report, printed) = dry_run(&[]);
    assert_eq!((code, &report["holds"]), (Some(0), &Value::Bool(true)), "{report:#}");
    let names: Vec<&str> =
        report["checks"].as_array().unwrap().iter().filter_map(|it| it["name"].as_str()).collect();
    let all = [
        "parity-float32",
        "parity-bfloat16",
        "batch",
        "prefix",
        "prefix-rows",
        "killed",
        "memory",
        "shape-olmoe",
        "shape-qwen3",
    ];
    assert_eq!(names, all);
    assert!(all.iter().all(|name| printed.contains(&format!("ok      {name}"))), "{printed}");
    assert!(
        check(&report, "parity-float32")["figures"]["prompts_compared"].as_u64() >= Some(20),
        "{report:#}"
    );
    assert!(check(&report, "killed")["figures"]["fallback"].as_u64() > Some(0), "{report:#}");
    assert!(check(&report, "memory")["figures"]["refused"].as_u64() > Some(0), "{report:#}");
    for name in ["shape-olmoe", "shape-qwen3"] {
        let figures = check(&report, name)["figures"].as_object().unwrap();
        let steps: Vec<&Value> = figures.values().filter(|figure| figure.is_object()).collect();
        // Two numbers of sequences, each at two positions, and one case with remote experts.
        assert_eq!(steps.len(), 5, "{figures:?}");
        for step in steps {
            let part = |part: &str| step[part].as_f64().unwrap();
            let parts = part("rest_ms") + part("experts_ms") + part("waited_ms");
            assert!(part("step_ms") > 0.0 && (parts - part("step_ms")).abs() < 1e-6, "{step}");
        }
    }
}

#[test]
fn check_that_fails_is_told_and_stops_no_other() {
    // A function that computes in another dtype than requested.
    let real = folder().join("main-model-fn-torch");
    let wrong = format!(
        "#!/bin/bash\narguments=(\"${{@/#float32/bfloat16}}\")\nexec '{}' \"${{arguments[@]}}\"\n",
        real.display()
    );
    let folder = with_main(&wrong);
    let only = ["--only", "parity-float32,memory,shape-olmoe"];
    let (code, report, printed) = dry_run(&[&only[..], &programs(folder.path())].concat());
    assert_eq!((code, &report["holds"]), (Some(1), &Value::Bool(false)), "{report:#}");
    let parity = check(&report, "parity-float32");
    assert_eq!(parity["holds"], false, "{parity}");
    assert!(parity["failures"].to_string().contains("differ by"), "{parity}");
    assert!(printed.contains("FAILED  parity-float32"), "{printed}");
    assert_eq!(check(&report, "shape-olmoe")["holds"], true, "{report:#}");
}

#[test]
fn check_that_hangs_ends_at_its_deadline() {
    let folder = with_main("#!/bin/sh\nexec sleep 600\n");
    let only = ["--only", "prefix,killed", "--seconds", "2"];
    let (code, report, _) = dry_run(&[&only[..], &programs(folder.path())].concat());
    assert_eq!(code, Some(1), "{report:#}");
    for name in ["prefix", "killed"] {
        let failures = check(&report, name)["failures"].to_string();
        assert!(failures.contains("not done within"), "{failures}");
    }
}

#[test]
fn function_that_does_not_start_is_named() {
    let folder = with_main("#!/bin/sh\necho 'no such library' >&2\nexit 127\n");
    let (code, report, _) = dry_run(&[&["--only", "prefix"][..], &programs(folder.path())].concat());
    assert_eq!(code, Some(1), "{report:#}");
    let failures = check(&report, "prefix")["failures"].to_string();
    assert!(failures.contains("main function") && failures.contains("no such library"), "{failures}");
}
