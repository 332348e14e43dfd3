//! Commands of one machine beside `up`: `run`, `ps`, `top`, `stop`, `doctor`, `completions`, `man` and
//! `up --file`. The functions are fakes.

use remoe_test_support::fake;

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;

/// A folder for functions, files of what runs, and state.
struct TestMachine(tempfile::TempDir);

impl TestMachine {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn folder(&self) -> &Path {
        self.0.path()
    }

    fn remoe(&self, arguments: &[&str]) -> Command {
        fake::programs(self.folder());
        let mut command = Command::new(env!("CARGO_BIN_EXE_remoe"));
        command
            .args(arguments)
            .env("REMOE_BIN_DIR", self.folder())
            .env("XDG_RUNTIME_DIR", self.folder())
            .env("XDG_STATE_HOME", self.folder())
            .env_remove("REMOE_LOG")
            .stdin(Stdio::null());
        command
    }

    fn json(&self, arguments: &[&str]) -> (Option<i32>, Value) {
        let output = self.remoe(arguments).arg("--json").output().unwrap();
        (output.status.code(), object(&output))
    }

    /// `remoe up` of the fixture under this name, ready.
    fn up(&self, name: &str) -> Child {
        self.up_with(name, &[]).0
    }

    /// Starts `up` with more arguments, and returns its endpoint too.
    fn up_with(&self, name: &str, more: &[&str]) -> (Child, String) {
        let model = fixture("mixtral-basic");
        let arguments =
            ["up", &model, "--port", "0", "--replicas", "1", "--served-model-name", name, "--json"];
        let arguments = [&arguments[..], more].concat();
        let mut up = self.remoe(&arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(up.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let event: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(event["event"], "ready", "{line}");
        assert!(event["time"].as_str().unwrap().parse::<jiff::Timestamp>().is_ok(), "{line}");
        (up, event["endpoint"].as_str().unwrap().to_owned())
    }
}

pub(crate) fn fixture(name: &str) -> String {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    fixtures.join(name).to_str().unwrap().to_owned()
}

pub(crate) fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn what_runs_is_shown_and_stopped_by_name_and_number() {
    let machine = TestMachine::new();
    assert_eq!(machine.json(&["ps"]), (Some(0), json!({"processes": []})));
    let (mut first, mut second, mut third) = (machine.up("one"), machine.up("two"), machine.up("two"));
    // One that was killed has left its file, under the number of a process that began at another time.
    let files = machine.folder().join("remoe");
    let stale = files.join("1.json");
    let of_first = std::fs::read_to_string(files.join(format!("{}.json", first.id()))).unwrap();
    let number = format!("\"pid\":{}", first.id());
    std::fs::write(&stale, of_first.replace(&number, "\"pid\":1")).unwrap();
    let (_, listed) = machine.json(&["ps"]);
    let listed = listed["processes"].as_array().unwrap().clone();
    assert_eq!(listed.len(), 3, "{listed:?}");
    assert!(!stale.exists());
    let of_first = listed.iter().find(|line| line["pid"] == first.id()).unwrap();
    assert_eq!((&of_first["models"], &of_first["functions"]), (&json!(["one"]), &json!(2)));
    assert!(of_first["endpoint"].as_str().unwrap().starts_with("http://127.0.0.1:"));
    assert!(of_first["memory_bytes"].as_u64().unwrap() > 100_000);
    assert_eq!(of_first["states"], json!({"one": "active"}));
    assert!(of_first["uptime_s"].is_u64(), "{of_first}");
    let names = machine.remoe(&["ps", "--quiet"]).output().unwrap();
    assert_eq!(String::from_utf8(names.stdout).unwrap().split_whitespace().count(), 3);
    let table = String::from_utf8(machine.remoe(&["ps"]).output().unwrap().stdout).unwrap();
    let header: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(header, ["name", "state", "endpoint", "uptime", "functions", "memory", "pid", "command"]);

    let (code, unknown) = machine.json(&["stop", "three"]);
    assert_eq!(code, Some(1));
    assert!(unknown["error"]["message"].as_str().unwrap().contains("three"), "{unknown}");
    let (code, stopped) = machine.json(&["stop", &first.id().to_string()]);
    assert_eq!((code, &stopped["stopped"][0]["pid"]), (Some(0), &json!(first.id())));
    assert_eq!(first.wait().unwrap().code(), Some(0));
    let (code, stopped) = machine.json(&["stop", "two"]);
    assert_eq!((code, stopped["stopped"].as_array().unwrap().len()), (Some(0), 2));
    assert_eq!((second.wait().unwrap().code(), third.wait().unwrap().code()), (Some(0), Some(0)));
    assert_eq!(machine.json(&["ps"]).1, json!({"processes": []}));
    assert_eq!(machine.json(&["stop", "--all"]), (Some(0), json!({"stopped": []})));
    assert_eq!(machine.json(&["stop"]).0, Some(2));
    assert_eq!(std::fs::read_dir(&files).unwrap().count(), 0, "every file is gone");
}

#[test]
fn a_runtime_folder_that_others_may_write_into_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let machine = TestMachine::new();
    let folder = machine.folder().join("remoe");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
    let (code, refused) = machine.json(&["ps"]);
    assert_eq!((code, &refused["error"]["path"]), (Some(1), &json!(folder)));
}

#[test]
fn a_pipe_gets_an_answer_for_each_prompt() {
    let machine = TestMachine::new();
    let model = fixture("mixtral-text");
    let mut command = machine.remoe(&["run", &model, "--max-tokens", "3"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"one\n\n\"\"\"two\nlines\"\"\"\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    // The fake answers ids with as many ids.
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "0,1,2\n0,1,2\n");
    let (code, answers) = machine.json(&["run", &model, "one prompt", "--max-tokens", "2"]);
    assert_eq!((code, &answers["answers"][0]["tokens"]), (Some(0), &json!([0, 1])));
    assert_eq!(answers["answers"][0]["prompt"], "one prompt");
    let (code, refused) = machine.json(&["run", &fixture("mixtral-basic")]);
    assert_eq!(code, Some(2), "it has no tokenizer");
    assert!(refused["error"]["message"].as_str().unwrap().contains("tokenizer.json"), "{refused}");
}

/// A command at a terminal.
struct AtTerminal {
    child: Child,
    terminal: File,
    written: mpsc::Receiver<String>,
    seen: String,
}

impl AtTerminal {
    fn start(mut command: Command) -> Self {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        let name = ptsname(&controller, Vec::new()).unwrap();
        let open = || File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let child = command.env("TERM", "xterm").stdin(open()).stdout(open()).stderr(open()).spawn().unwrap();
        let terminal = File::from(controller);
        let mut reader = terminal.try_clone().unwrap();
        let (sender, written) = mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The terminal ends with the last process that has it open.
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                if sender.send(String::from_utf8_lossy(&bytes[..count]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Self { child, terminal, written, seen: String::new() }
    }

    fn types(&mut self, text: &str) {
        self.terminal.write_all(text.as_bytes()).unwrap();
    }

    /// Waits until this was written since the last look.
    fn shows(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let more = self.written.recv_timeout(std::time::Duration::from_secs(60));
            self.seen += &more.unwrap_or_else(|_| panic!("{text:?} is not in {:?}", self.seen));
        }
        self.seen = self.seen.split_off(self.seen.find(text).unwrap() + text.len());
    }
}

impl Drop for AtTerminal {
    fn drop(&mut self) {
        // It has ended where the test went well.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

#[test]
fn a_conversation_at_a_terminal() {
    let machine = TestMachine::new();
    let model = fixture("mixtral-text");
    let mut talk =
        AtTerminal::start(machine.remoe(&["run", &model, "--max-tokens", "3", "--remote-ratio", "0.5"]));
    talk.shows(">>> ");
    talk.types("hello\r");
    talk.shows("0,1,2");
    talk.shows("expert calls: 10 local, 20 remote (65 %), 1 by local fallback");
    talk.types("/set temperature 0.5\r");
    talk.shows("temperature: 0.5");
    talk.types("/set temperature 9\r");
    talk.shows("invalid temperature: expected 0 to 2");
    talk.types("/nonsense\r");
    talk.shows("unknown command /nonsense");
    // A line that was begun is thrown away, and the conversation goes on.
    talk.shows(">>> ");
    talk.types("half a li\x03");
    talk.shows(">>> ");
    // What is typed ahead is not lost.
    talk.types("\"\"\"two\rlines\"\"\"\r/bye\r");
    talk.shows("0,1,2");
    assert!(talk.child.wait().unwrap().success());
    let history = std::fs::read_to_string(machine.folder().join("remoe/history")).unwrap();
    assert!(history.contains("hello") && !history.contains("half"), "{history}");
}

#[test]
fn a_conversation_that_is_ended_gives_the_terminal_back() {
    let machine = TestMachine::new();
    let mut talk = AtTerminal::start(machine.remoe(&["run", &fixture("mixtral-text")]));
    let before = tcgetattr(&talk.terminal).unwrap().local_modes;
    talk.shows(">>> ");
    assert_ne!(tcgetattr(&talk.terminal).unwrap().local_modes, before, "the editor reads single keys");
    kill_process(Pid::from_child(&talk.child), Signal::TERM).unwrap();
    assert_eq!(talk.child.wait().unwrap().code(), Some(130));
    assert_eq!(tcgetattr(&talk.terminal).unwrap().local_modes, before);
}

#[test]
fn doctor_checks_everything_and_fails_if_serving_is_impossible() {
    let machine = TestMachine::new();
    let model = fixture("mixtral-basic");
    let (code, report) = machine.json(&["doctor", &model]);
    assert_eq!((code, &report["ok"]), (Some(0), &json!(true)), "{report}");
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<_> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "processor",
            "functions",
            "memory",
            "huge pages",
            "control groups",
            "open files",
            "disk",
            "runtime folder",
            "GPU",
            "LibTorch",
            "cluster",
            "model"
        ]
    );
    for check in checks {
        assert!(!check["found"].as_str().unwrap().is_empty(), "{check}");
        assert_eq!(check["status"] != "ok", check["advice"].is_string(), "{check}");
    }
    let mut without = machine.remoe(&["doctor", "--json"]);
    without.env("REMOE_BIN_DIR", machine.folder().join("nowhere"));
    let output = without.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let functions = &object(&output)["checks"][1];
    assert_eq!(functions["status"], "fail");
    assert!(functions["advice"].as_str().unwrap().contains("make build"));
}

#[test]
fn states_behind_a_key_are_shown_to_who_has_it() {
    let machine = TestMachine::new();
    let (mut up, endpoint) = machine.up_with("kept", &["--api-key", "secret"]);
    let shown = |arguments: &[&str]| {
        let output = machine.remoe(arguments).env_remove("REMOE_API_KEY").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let table = shown(&["top", "--once", "--endpoint", &endpoint, "--api-key", "secret"]);
    let mut lines = table.lines();
    assert!(lines.next().unwrap().contains("TTFT p99"), "{table}");
    assert!(lines.next().unwrap().starts_with("kept"), "{table}");
    assert!(shown(&["ps"]).contains("locked"));
    assert!(shown(&["ps", "--api-key", "secret"]).contains("active"));
    kill_process(Pid::from_child(&up), Signal::TERM).unwrap();
    assert!(up.wait().unwrap().success());
}

#[test]
fn top_sorts_resizes_and_gives_the_terminal_back() {
    let machine = TestMachine::new();
    let (mut up, endpoint) = machine.up_with("one", &[]);
    let start = || AtTerminal::start(machine.remoe(&["top", "--endpoint", &endpoint]));
    let resize = |top: &AtTerminal, ws_col: u16| {
        let size = Winsize { ws_row: 30, ws_col, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&top.terminal, size).unwrap();
        kill_process(Pid::from_child(&top.child), Signal::WINCH).unwrap();
    };
    let mut top = start();
    let before = tcgetattr(&top.terminal).unwrap().local_modes;
    top.shows("\x1b[?1049h");
    top.shows("model ▼");
    top.shows("active");
    assert_ne!(tcgetattr(&top.terminal).unwrap().local_modes, before);
    resize(&top, 200);
    top.types("s");
    top.shows("state ▼");
    top.types("\x1b[C");
    top.shows("running ▼");
    top.types("r");
    top.shows("running ▲");
    // Columns that have no room go on below.
    resize(&top, 40);
    top.shows("TTFT p99");
    top.types("q");
    top.shows("\x1b[?1049l");
    assert_eq!(top.child.wait().unwrap().code(), Some(0));
    assert_eq!(tcgetattr(&top.terminal).unwrap().local_modes, before);
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let mut top = start();
        let before = tcgetattr(&top.terminal).unwrap().local_modes;
        top.shows("active");
        kill_process(Pid::from_child(&top.child), signal).unwrap();
        top.shows("\x1b[?1049l");
        assert_eq!(top.child.wait().unwrap().code(), Some(0));
        assert_eq!(tcgetattr(&top.terminal).unwrap().local_modes, before);
    }
    // A gateway that ends is said at the bottom, and nothing else changes.
    let mut top = start();
    top.shows("active");
    resize(&top, 200);
    kill_process(Pid::from_child(&up), Signal::TERM).unwrap();
    assert!(up.wait().unwrap().success());
    top.shows("retrying");
    top.types("q");
    assert_eq!(top.child.wait().unwrap().code(), Some(0));
    let gone = AtTerminal::start(machine.remoe(&["top", "--endpoint", &endpoint])).child.wait().unwrap();
    assert_eq!(gone.code(), Some(1), "an endpoint that never answered is an error");
}

#[test]
fn bash_completes_names_of_running_models() {
    let machine = TestMachine::new();
    let mut up = machine.up("odd $(name)");
    let script = machine.remoe(&["completions", "bash"]).output().unwrap().stdout;
    let file = machine.folder().join("remoe.bash");
    std::fs::write(&file, script).unwrap();
    let completed = |words: &str, at: usize| {
        let lines = format!(
            "source '{}'; COMP_WORDS=({words}); COMP_CWORD={at}; \
             _remoe_or_models remoe \"${{COMP_WORDS[$COMP_CWORD]}}\" \"${{COMP_WORDS[$((COMP_CWORD - 1))]}}\"; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            file.display()
        );
        let path = Path::new(env!("CARGO_BIN_EXE_remoe")).parent().unwrap();
        let mut bash = Command::new("bash");
        bash.args(["-c", &lines]).env("PATH", format!("{}:/usr/bin:/bin", path.display()));
        let output = bash.env("XDG_RUNTIME_DIR", machine.folder()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(completed("remoe stop od", 2), "odd\\ \\$\\(name\\)\n");
    assert_eq!(completed("remoe stop x", 2), "\n");
    assert!(completed("remoe sto", 1).contains("stop"), "other words are completed as before");
    kill_process(Pid::from_child(&up), Signal::TERM).unwrap();
    assert!(up.wait().unwrap().success());
}

#[test]
fn shells_and_man_know_every_command() {
    let machine = TestMachine::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = machine.remoe(&["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains("remote-ratio") && script.contains("doctor"), "{shell}");
    }
    let pages = machine.folder().join("man");
    assert!(machine.remoe(&["man", pages.to_str().unwrap()]).status().unwrap().success());
    for page in ["remoe.1", "remoe-run.1", "remoe-predictor-build.1"] {
        let text = std::fs::read_to_string(pages.join(page)).unwrap();
        assert!(text.contains(".SH"), "{page}");
    }
    assert_eq!(machine.json(&["man", "/proc/nowhere"]).0, Some(2));
}

#[test]
fn a_resource_is_served_as_its_flags_would_be() {
    let machine = TestMachine::new();
    let file = machine.folder().join("demo.yaml");
    let resource = "apiVersion: remoe.dev/v1alpha1\nkind: MoEDeployment\nmetadata: {name: demo}\nspec:\n  \
                    model: {source: pvc://models/demo}\n  replicas: 2\n";
    std::fs::write(&file, resource).unwrap();
    let file = file.to_str().unwrap();
    let (code, refused) = machine.json(&["up", "-f", file]);
    assert_eq!((code, &refused["error"]["path"]), (Some(2), &json!(file)));
    assert!(refused["error"]["message"].as_str().unwrap().contains("models/demo"), "{refused}");
    // A port that cannot be had ends it before anything is measured.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let model = fixture("mixtral-basic");
    let output = machine.remoe(&["up", &model, "--file", file, "--port", &port]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("outside a cluster: spec.replicas") && said.contains("cannot listen"), "{said}");
}
