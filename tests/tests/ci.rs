//! What continuous integration does about the cluster tests, with everything that it would run replaced by
//! programs that say what they were asked.
#![allow(clippy::expect_used, clippy::unwrap_used)]

use remoe_tests::binaries::workspace;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// A copy of the scripts among programs that write down how they were called.
struct Host {
    folder: TempDir,
}

impl Host {
    /// A host on which `check` and `prepare` of the cluster do this.
    fn new(check: &str, prepare: &str) -> Self {
        let host = Self { folder: TempDir::new().unwrap() };
        for script in [".ci/run", "scripts/e2e-ci"] {
            host.program(script, &fs::read_to_string(workspace().join(script)).unwrap());
        }
        host.program(
            "tests/cluster/cluster.py",
            &format!(
                "#!/bin/sh\ncase $1 in check) {check} ;; prepare) {prepare} ;; env) echo true ;; *) : ;; esac\n"
            ),
        );
        // `make e2e-ci` is the script, as in the Makefile.
        let make = "#!/bin/sh\necho \"make $1\" >>calls\nif [ \"$1\" = e2e-ci ]; then E2E_PROGRAMS=x exec scripts/e2e-ci; fi\n";
        host.program("bin/make", make);
        for quiet in ["rustup", "cargo", "cargo-deny", "valgrind"] {
            host.program(&format!("bin/{quiet}"), "#!/bin/sh\n:\n");
        }
        host.program("bin/id", "#!/bin/sh\necho 0\n");
        host
    }

    fn program(&self, path: &str, text: &str) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Another process writes it: were it open for writing here, a child that another test starts at the same time would
        // inherit it, and it could not be executed.
        let mut writer = Command::new("sh");
        writer.args(["-c", "cat >\"$0\" && chmod 755 \"$0\""]).arg(&path).stdin(Stdio::piped());
        let mut writer = writer.spawn().unwrap();
        writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(writer.wait().unwrap().success());
    }

    /// Runs a script, `seconds` after it began by its own clock.
    fn run(&self, script: &str, ci: bool, seconds: u32) -> Output {
        let folder: &Path = self.folder.path();
        let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap());
        let mut command = Command::new(folder.join(script));
        command.env("PATH", path).env("E2E_PROGRAMS", "x").env_remove("E2E_SKIPPED").env_remove("CI");
        command.env("SECONDS", seconds.to_string());
        if ci {
            command.env("CI", "true");
        }
        command.output().unwrap()
    }

    /// The targets that were made, in their order.
    fn made(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.folder.path().join("calls")).unwrap_or_default();
        calls.lines().map(|line| line.trim_start_matches("make ").to_owned()).collect()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn last_line(output: &Output) -> String {
    text(&output.stdout).lines().last().unwrap_or_default().to_owned()
}

#[test]
fn cluster_tests_come_before_what_can_wait() {
    let host = Host::new("exit 0", "exit 0");
    let output = host.run(".ci/run", true, 0);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let order =
        ["lint", "chart", "test", "e2e-ci", "images", "e2e-run", "instructions", "fuzz-short", "deny"];
    assert_eq!(host.made(), order);
    assert_eq!(last_line(&output), "ci: passed, the cluster tests included");
}

#[test]
fn a_host_that_can_have_a_cluster_must() {
    let host = Host::new("exit 0", "echo no network >&2; exit 1");
    let output = host.run("scripts/e2e-ci", true, 0);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(!host.run(".ci/run", true, 0).status.success());
    // At a developer's own machine it is said, and no failure.
    let output = host.run("scripts/e2e-ci", false, 0);
    assert!(output.status.success());
    assert!(last_line(&output).contains("were SKIPPED"), "{}", text(&output.stdout));
}

#[test]
fn a_host_that_can_have_none_is_named_in_the_last_line() {
    let host = Host::new("echo no namespaces here; exit 1", "exit 1");
    let output = host.run(".ci/run", true, 0);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(last_line(&output), "ci: passed WITHOUT the cluster tests: no namespaces here");
    assert!(!host.made().contains(&"e2e-run".to_owned()));
}

#[test]
fn only_a_clock_that_is_far_advanced_leaves_them_out() {
    let host = Host::new("exit 0", "exit 0");
    let output = host.run(".ci/run", true, 2710);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        last_line(&output).starts_with("ci: passed WITHOUT the cluster tests: 27"),
        "{}",
        last_line(&output)
    );
    assert!(!host.made().contains(&"e2e-ci".to_owned()));
}

/// Where root is to be had without a password, it is taken; where it is not, that is said.
#[test]
fn root_is_taken_where_it_is_to_be_had() {
    let host = Host::new("if [ -e root ]; then exit 0; else echo root is needed; exit 1; fi", "exit 0");
    host.program("bin/id", "#!/bin/sh\nif [ -e root ]; then echo 0; else echo 1000; fi\n");
    host.program("bin/sudo", "#!/bin/sh\nexit 1\n");
    assert_eq!(
        last_line(&host.run(".ci/run", true, 0)),
        "ci: passed WITHOUT the cluster tests: root is needed"
    );
    let sudo = "#!/bin/sh\nshift\ncase $1 in true | chown) exit 0 ;; esac\ntouch root\nshift\nexec \"$@\"\n";
    host.program("bin/sudo", sudo);
    assert_eq!(last_line(&host.run(".ci/run", true, 0)), "ci: passed, the cluster tests included");
    // Nobody is asked for root outside of continuous integration.
    fs::remove_file(host.folder.path().join("root")).unwrap();
    let output = host.run("scripts/e2e-ci", false, 0);
    assert!(last_line(&output).contains("root is needed"), "{}", last_line(&output));
}
