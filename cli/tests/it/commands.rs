//! The command as its users see it: output, exit codes, signals. The functions are fakes.

use remoe_test_support::fake;

use remoe_predictor::record::{ActivationRecord, DEFAULT_FILE_BYTES, RecordHeader, RecordWriter};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn fixture(name: &str) -> String {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    fixtures.join(name).to_str().unwrap().to_owned()
}

/// `remoe` with `arguments`, and fake functions in `folder`.
fn remoe(folder: &Path, arguments: &[&str]) -> Command {
    fake::programs(folder);
    let mut command = Command::new(env!("CARGO_BIN_EXE_remoe"));
    command
        .args(arguments)
        .env("REMOE_BIN_DIR", folder)
        .env_remove("REMOE_API_KEY")
        .env_remove("REMOE_LOG")
        .stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    remoe(folder.path(), arguments).output().unwrap()
}

/// The one JSON object on standard output.
fn object(output: &Output) -> Value {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("{error}: {text}\n{}", String::from_utf8_lossy(&output.stderr)))
}

fn error_of(arguments: &[&str], code: i32) -> Value {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
    let mut object = object(&output);
    let error = object["error"].take();
    let mut keys: Vec<&String> = error.as_object().unwrap().keys().collect();
    keys.sort();
    assert_eq!(keys, ["code", "field", "message", "path"]);
    error
}

#[test]
fn inspect_tells_the_facts() {
    let model = fixture("mixtral-basic");
    let facts = object(&run(&["inspect", "--model", &model, "--json"]));
    assert_eq!(facts["family"], "mixtral");
    let number = |name: &str| facts[name].as_u64().unwrap();
    let layers = facts["non_expert_layer_bytes"].as_array().unwrap();
    let non_expert: u64 = layers.iter().map(|bytes| bytes.as_u64().unwrap()).sum();
    let moe_layers = facts["moe_layers"].as_array().unwrap().len() as u64;
    let experts = moe_layers * number("experts") * number("expert_bytes");
    assert_eq!(number("total_bytes"), number("outside_bytes") + non_expert + experts);
    let shown = run(&["inspect", "--model", &model]);
    assert!(String::from_utf8(shown.stdout).unwrap().starts_with("family"));
}

/// longrope is served up to the context of its training, and more is refused before anything is started.
#[test]
fn positions_that_are_not_served_are_known_beforehand() {
    let model = fixture("phimoe-longrope");
    let facts = object(&run(&["inspect", "--model", &model, "--json"]));
    assert_eq!((facts["context_length"].as_u64(), facts["served_context"].as_u64()), (Some(128), Some(64)));
    let shown = String::from_utf8(run(&["inspect", "--model", &model]).stdout).unwrap();
    assert!(shown.contains("128 tokens, of which 64 are served"), "{shown}");
    let arguments = ["generate", "--json", "--model", &model, "--prompt-ids", "1", "--max-tokens", "64"];
    assert_eq!(error_of(&arguments, 2)["field"], "--max-tokens");
    // Fewer where that is asked for, and no more than the model is made for.
    let arguments = ["generate", "--json", "--model", &model, "--prompt-ids", "1", "--max-tokens"];
    let with = |tokens, positions| [&arguments[..], &[tokens, "--max-model-len", positions]].concat();
    assert_eq!(error_of(&with("20", "20"), 2)["field"], "--max-tokens");
    assert_eq!(error_of(&with("100", "100"), 2)["field"], "--max-tokens");
    assert_eq!(error_of(&with("1", "129"), 4)["field"], "max_position_embeddings");
}

#[test]
fn inspect_tells_what_quantising_loses() {
    let model = fixture("mixtral-basic");
    let facts = object(&run(&["inspect", "--model", &model, "--json", "--quantization-error"]));
    let lost = &facts["quantization_error"];
    let layers = lost["layers"].as_array().unwrap();
    assert_eq!(layers.len(), facts["moe_layers"].as_array().unwrap().len());
    for layer in layers {
        for what in ["weights", "outputs"] {
            let of = |form: &str| layer[form][what].as_f64().unwrap();
            // A step is a 127th, or an eighth, of the largest of 32 weights.
            assert!(of("int8") > 0.001 && of("int8") < 0.04, "{layer}");
            assert!(of("int4") > 4.0 * of("int8") && of("int4") < 0.5, "{layer}");
            // Of e2m1 the steps between the largest are wider than those of int4.
            assert!(of("mxfp4") > of("int4") && of("mxfp4") < 0.5, "{layer}");
        }
    }
    let shown = run(&["inspect", "--model", &model, "--quantization-error"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("int4 outputs") && shown.contains("mxfp4 outputs"), "{shown}");
}

/// Weights that are stored as MXFP4 lose nothing as MXFP4; the rows that they are multiplied with do.
#[test]
fn inspect_tells_that_mxfp4_keeps_what_is_mxfp4() {
    let model = fixture("gptoss-mxfp4");
    let facts = object(&run(&["inspect", "--model", &model, "--json", "--quantization-error"]));
    let layers = facts["quantization_error"]["layers"].as_array().unwrap();
    assert!(!layers.is_empty());
    for layer in layers {
        let of = |form: &str, what: &str| layer[form][what].as_f64().unwrap();
        assert_eq!(of("mxfp4", "weights"), 0.0, "{layer}");
        assert!(of("int4", "weights") > 0.01, "{layer}");
        assert!(of("mxfp4", "outputs") > 0.0005 && of("mxfp4", "outputs") < of("int4", "outputs"), "{layer}");
    }
}

#[test]
fn a_bad_checkpoint_ends_with_4_and_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().to_str().unwrap();
    for command in [
        vec!["inspect", "--model", model, "--json"],
        vec!["generate", "--model", model, "--prompt-ids", "1", "--json"],
        vec!["logits", "--model", model, "--prompt-ids", "1", "--json"],
        vec!["up", "--model", model, "--json"],
    ] {
        let error = error_of(&command, 4);
        assert_eq!(error["code"], "checkpoint");
        assert_eq!(error["path"], format!("{model}/config.json"));
    }
}

#[test]
fn arguments_that_make_no_sense_end_with_2_and_are_named() {
    let model = fixture("mixtral-basic");
    let plan = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(plan.path(), r#"{"layers":[{"layer":0,"remote":[999]}]}"#).unwrap();
    let plan = plan.path().to_str().unwrap();
    let sized = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(sized.path(), r#"{"layers":[{"layer":0,"remote":[1],"memory_bytes":100000000}]}"#)
        .unwrap();
    let sized = sized.path().to_str().unwrap();
    let common = ["--json", "--model", &model];
    for (arguments, field) in [
        (vec!["generate"], Some("--prompt")),
        (vec!["generate", "--prompt-ids", "1,x"], Some("--prompt-ids")),
        (vec!["generate", "--prompt-ids", "1,4000000"], Some("--prompt-ids")),
        (vec!["generate", "--prompt-ids", "1", "--prompt", "a"], Some("--prompt-ids")),
        (vec!["generate", "--prompt-ids", "1", "--temperature", "-1"], Some("--temperature")),
        (vec!["generate", "--prompt-ids", "1", "--temperature", "5"], Some("--temperature")),
        (vec!["generate", "--prompt-ids", "1", "--stop", ""], Some("--stop")),
        (vec!["generate", "--prompt-ids", "1", "--max-tokens", "4000000"], Some("--max-tokens")),
        (vec!["generate", "--prompt-ids", "1", "--top-p", "0"], Some("--top-p")),
        (vec!["generate", "--prompt-ids", "1", "--max-tokens", "0"], Some("--max-tokens")),
        (vec!["logits", "--prompt-ids", "1", "--remote-ratio", "1.5"], Some("--remote-ratio")),
        (vec!["logits", "--prompt-ids", "1", "--replicas", "0"], Some("--replicas")),
        (vec!["logits", "--prompt-ids", "1", "--device", "tpu"], Some("--device")),
        (vec!["logits", "--prompt-ids", "1", "--dtype", "int8"], Some("--dtype")),
        (vec!["logits", "--prompt-ids", "1", "--experts-dtype", "int2"], Some("--experts-dtype")),
        (vec!["logits", "--prompt-ids", "1", "--plan", plan], Some("layers[0].remote[0]")),
        (vec!["logits", "--prompt-ids", "1", "--plan", "/nowhere"], Some("--plan")),
        (vec!["logits", "--prompt-ids", "1", "--remote-memory", "1M"], Some("--remote-memory")),
        (vec!["logits", "--prompt-ids", "1", "--kv-cache-bytes", "0"], Some("--kv-cache-bytes")),
        (
            vec!["logits", "--prompt-ids", "1", "--remote-memory", "1MB", "--plan", sized],
            Some("--remote-memory"),
        ),
        (vec!["up", "--host", "somewhere"], Some("--host")),
        (vec!["up", "--body-limit", "2GiB"], Some("--body-limit")),
        (vec!["up", "--max-requests", "0"], Some("--max-requests")),
        (vec!["up", "/somewhere"], Some("[MODEL]")),
        (vec!["up", "--remote-ratio", "0.5", "--tpot", "1s"], Some("--remote-ratio")),
        (vec!["up", "--remote-ratio", "0.5", "--workload", "/nowhere"], Some("--remote-ratio")),
        (vec!["up", "--concurrency", "9", "--max-batch", "8"], Some("--concurrency")),
        (vec!["up", "--api-key", ""], Some("--api-key")),
        (vec!["up", "--keys", "/nowhere/keys.yaml"], Some("--keys")),
        (vec!["up", "--idle", "soon"], Some("--idle")),
        (vec!["up", "--served-model-name", "a", "--served-model-name", "b"], Some("--served-model-name")),
        (vec!["generate", "--prompt-ids", "1", "--chat"], Some("--prompt-ids")),
        (vec!["profile", "--out", "/nowhere/profile.json"], Some("--out")),
        (vec!["eval", "--out", "/nowhere/evaluation"], Some("--out")),
        (vec!["up", "--ready-timeout", "0"], Some("--ready-timeout")),
        (vec!["up", "--nonsense"], Some("--nonsense")),
    ] {
        let error = error_of(&[&arguments[..], &common[..]].concat(), 2);
        assert_eq!(error["code"], "arguments");
        assert_eq!(error["field"].as_str(), field, "{arguments:?}: {error}");
    }
}

#[test]
fn a_model_may_stand_alone() {
    let model = fixture("mixtral-basic");
    let facts = object(&run(&["inspect", &model, "--json"]));
    assert_eq!(facts["family"], "mixtral");
    let answer = object(&run(&["generate", &model, "--prompt-ids", "1", "--max-tokens", "2", "--json"]));
    assert_eq!(answer["tokens"], json!([0, 1]));
    let missing = error_of(&["inspect", "--json"], 2);
    assert_eq!(missing["field"], "MODEL");
    let message = missing["message"].as_str().unwrap();
    assert!(
        message.contains("<MODEL>") && message.contains("folder") && message.contains("hf://"),
        "{message}"
    );
    assert_eq!(error_of(&["plan", &model, "--problem", "x", "--json"], 2)["code"], "arguments");
}

#[test]
fn closed_pipe_ends_command_without_an_error() {
    let model = fixture("mixtral-basic");
    for arguments in [
        vec!["inspect", &model],
        vec!["inspect", &model, "--json"],
        vec!["generate", &model, "--prompt", "a"],
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = remoe(folder.path(), &arguments).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let output = output.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
        assert!(!String::from_utf8_lossy(&output.stderr).contains("error"), "{output:?}");
    }
}

#[test]
fn no_folder_is_made_unasked() {
    let folder = tempfile::tempdir().unwrap();
    let (missing, model) = (folder.path().join("missing"), fixture("mixtral-basic"));
    let out = missing.join("evaluation");
    let error = error_of(&["eval", "--out", out.to_str().unwrap(), "--json"], 2);
    assert_eq!(error["path"], missing.to_str().unwrap());
    let prompts = folder.path().join("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\": \"a\"}\n").unwrap();
    let (prompts, out) = (prompts.to_str().unwrap(), missing.join("records.npy"));
    let record =
        ["record", "--model", &model, "--prompts", prompts, "--out", out.to_str().unwrap(), "--json"];
    assert_eq!(error_of(&record, 2)["path"], missing.to_str().unwrap());
    assert!(!missing.exists());
}

#[test]
fn the_least_used_experts_are_remote_where_that_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("mixtral-basic");
    let facts = object(&run(&["inspect", &model, "--json"]));
    let (layers, experts) = (facts["moe_layers"].as_array().unwrap(), facts["experts"].as_u64().unwrap());
    let history = folder.path().join("history.npy");
    // The first half of the experts is used by the prompt, the first one not by what was generated.
    let header = RecordHeader {
        model: facts["fingerprint"].as_str().unwrap().to_owned(),
        layers: layers.iter().map(|layer| u32::try_from(layer.as_u64().unwrap()).unwrap()).collect(),
        experts: u32::try_from(experts).unwrap(),
        top_k: u32::try_from(facts["top_k"].as_u64().unwrap()).unwrap(),
        dtype: "float32".to_owned(),
        tokens: false,
    };
    let row =
        |of: &dyn Fn(u64) -> u32| -> Vec<u32> { layers.iter().flat_map(|_| (0..experts).map(of)).collect() };
    let record = ActivationRecord {
        prompt: vec![1, 2],
        prefill: row(&|id| u32::from(id < experts / 2)),
        decode: row(&|id| 2 * u32::from(id > 0)),
        steps: 1,
        ..Default::default()
    };
    let mut writer = RecordWriter::new(Vec::new(), header, 0, DEFAULT_FILE_BYTES).unwrap();
    writer.append(&record).unwrap();
    std::fs::write(&history, writer.finish().unwrap()).unwrap();
    let history = history.to_str().unwrap();
    let logits = ["logits", "--model", &model, "--prompt-ids", "1", "--json", "--remote-ratio", "0.25"];
    let command = [&logits[..], &["--remote-set", "history", "--history", history]].concat();
    assert!(remoe(folder.path(), &command).output().unwrap().status.success());
    // A quarter of eight: the first one, and the last of those that the prompt did not use.
    let routings = fake::routings(folder.path());
    assert_eq!((experts, layers.len()), (8, 3));
    assert!(routings[0].ends_with("] 0:0,7,1:0,7,2:0,7"), "{routings:?}");

    for (arguments, field) in [
        (&["--remote-set", "history"][..], "--history"),
        (&["--remote-set", "prediction"], "--predictor"),
        (&["--history", history], "--history"),
        (&["--remote-set", "history", "--history", "/nowhere"], "--history"),
        (&["--remote-set", "used"], "--remote-set"),
    ] {
        let error = error_of(&[&logits[..], arguments].concat(), 2);
        assert_eq!(error["field"], field, "{error}");
    }
    let without = ["logits", "--model", &model, "--prompt-ids", "1", "--json", "--remote-set", "history"];
    assert_eq!(error_of(&without, 2)["code"], "arguments");
}

#[test]
fn up_hands_its_limits_to_the_functions() {
    let folder = tempfile::tempdir().unwrap();
    let limits = ["--body-limit", "1MiB", "--max-requests", "7"];
    let memory = ["--remote-memory", "0.5GB", "--kv-cache-bytes", "2MiB"];
    let (_up, _ready) = Up::start_with(folder.path(), &[&limits[..], &memory].concat());
    let commands = fake::commands(folder.path());
    let of = |role: &str| commands.iter().find(|line| line.starts_with(role)).unwrap();
    for part in
        ["--http-listen 127.0.0.1:0", "--body-limit 1048576", "--max-requests 7", "--kv-cache-bytes 2097152"]
    {
        assert!(of("main").contains(part), "{part}: {commands:?}");
    }
    assert!(of("remote").contains("--memory-bytes 500000000"), "{commands:?}");
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in [&["--help"][..], &["--version"], &["generate", "--help"]] {
        let output = run(arguments);
        assert!(output.status.success());
        assert!(String::from_utf8(output.stdout).unwrap().contains("remoe"));
    }
}

#[test]
fn generate_answers_in_one_object() {
    let model = fixture("mixtral-basic");
    let output = run(&[
        "generate",
        "--model",
        &model,
        "--prompt",
        "hi",
        "--chat",
        "--max-tokens",
        "2",
        "--remote-ratio",
        "0.5",
        "--replicas",
        "2",
        "--json",
    ]);
    let expected = json!({
        "prompt_ids": [1, 7, 8],
        "tokens": [0, 1],
        "text": "<hi>",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "timings": {"load_s": 1.5, "ttft_s": 0.25, "prefill_s": 0.125, "decode_s": 0.5},
        "experts": {"local": 10, "remote": 20, "fallback": 1, "retries": 2},
        "forwarded_positions": 9,
    });
    assert_eq!(object(&output), expected);
    assert!(output.status.success());
}

#[test]
fn for_people_the_text_alone_is_on_standard_output() {
    let model = fixture("mixtral-basic");
    let with_text = run(&["generate", "--model", &model, "--prompt", "some text"]);
    assert_eq!(String::from_utf8(with_text.stdout).unwrap(), "some text\n");
    assert!(String::from_utf8(with_text.stderr).unwrap().contains("10 local, 20 remote"));
    let ids = run(&["generate", "--model", &model, "--prompt-ids", "3, 4", "--max-tokens", "3"]);
    assert_eq!(String::from_utf8(ids.stdout).unwrap(), "0,1,2\n");
}

#[test]
fn logits_keep_every_bit() {
    let model = fixture("mixtral-basic");
    let output = run(&["logits", "--model", &model, "--prompt-ids", "1", "--json"]);
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(text.contains(r#""weights":[0.1,0.9]"#), "{text}");
    let logits = object(&output);
    assert_eq!(logits["argmax"], 1);
    assert_eq!(logits["routing"][0][0]["experts"], json!([0, 3]));
    assert_eq!(logits["last_logits"].as_array().unwrap().len(), 3);
}

#[test]
fn what_a_function_refuses_is_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("refuse"), "").unwrap();
    let model = fixture("mixtral-basic");
    let arguments = ["generate", "--model", &model, "--prompt-ids", "1", "--max-tokens", "2", "--json"];
    let output = remoe(folder.path(), &arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    let error = object(&output)["error"].take();
    assert_eq!((&error["path"], &error["field"]), (&json!("/m/x"), &json!("gate")));
    assert_eq!(error["message"], "main exited with code 4: no such tensor");
}

#[test]
fn missing_programs_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("mixtral-basic");
    let mut command = remoe(folder.path(), &["up", "--model", &model, "--remote-ratio", "0.5", "--json"]);
    std::fs::remove_file(folder.path().join("remote-expert-fn")).unwrap();
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = object(&output)["error"].take();
    assert!(error["path"].as_str().unwrap().ends_with("/remote-expert-fn"));
    assert!(error["message"].as_str().unwrap().contains("make build"));
}

#[test]
fn an_interrupted_command_ends_with_130_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("hang"), "").unwrap();
    let model = fixture("mixtral-basic");
    let usual = ["generate", "--model", &model, "--prompt-ids", "1", "--max-tokens", "2", "--json"];
    let arguments = [&usual[..], &["--remote-ratio", "1"]].concat();
    let mut command = remoe(folder.path(), &arguments);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let pid = Pid::from_child(&child);
    wait_until(|| !fake::routings(folder.path()).is_empty());
    let functions = children_of(pid);
    assert_eq!(functions.len(), 2);
    kill_process(pid, Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(object(&output)["error"]["code"], "interrupted");
    wait_until(|| !functions.iter().any(|&function| is_alive(function)));
}

/// A running `remoe up --json`.
struct Up {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Up {
    fn start(folder: &Path) -> (Self, Value) {
        Self::start_with(folder, &[])
    }

    fn start_with(folder: &Path, arguments: &[&str]) -> (Self, Value) {
        let model = fixture("mixtral-basic");
        let usual = ["up", "--model", &model, "--port", "0", "--replicas", "2", "--json"];
        let mut command = remoe(folder, &[&usual[..], arguments].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut up = Self { child, lines };
        let ready = up.event();
        (up, ready)
    }

    fn event(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // It has ended where the test went well.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

fn pids(event: &Value) -> Vec<Pid> {
    let functions = event["functions"].as_array().unwrap().iter();
    let pids = functions.map(|function| function["pid"].as_i64().unwrap());
    pids.map(|pid| Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()).collect()
}

#[test]
fn up_reports_restarts_what_dies_and_drains() {
    let folder = tempfile::tempdir().unwrap();
    let (mut up, ready) = Up::start(folder.path());
    assert_eq!(ready["event"], "ready");
    assert!(ready["endpoint"].as_str().unwrap().starts_with("http://127.0.0.1:"));
    let functions = ready["functions"].as_array().unwrap();
    let roles: Vec<&Value> = functions.iter().map(|function| &function["role"]).collect();
    assert_eq!(roles, ["main", "remote", "remote"]);
    assert_eq!(functions[1]["experts"], functions[2]["experts"]);
    assert!(functions.iter().all(|function| function["address"].is_string()));

    kill_process(pids(&ready)[1], Signal::KILL).unwrap();
    let restarted = up.event();
    assert_eq!(restarted["event"], "restarted");
    assert_eq!(pids(&restarted)[0], pids(&ready)[0]);
    assert_ne!(pids(&restarted)[1], pids(&ready)[1]);

    kill_process(pids(&restarted)[0], Signal::KILL).unwrap();
    let again = up.event();
    assert_eq!(again["endpoint"], ready["endpoint"]);
    assert_ne!(pids(&again)[0], pids(&ready)[0]);

    // As `timeout` does it: to the process, and again to its group. It sees both at once; two of a kind would be one.
    for signal in [Signal::STOP, Signal::TERM, Signal::HUP, Signal::CONT] {
        up.signal(signal);
    }
    assert!(up.child.wait().unwrap().success());
    assert!(up.lines.next().is_none());
    assert!(!pids(&again).into_iter().any(is_alive));
}

#[test]
fn main_function_that_ends_with_an_error_is_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let (mut up, ready) = Up::start(folder.path());
    // Twice: it is not given up after the first time.
    let mut before = ready;
    for times in 1..=2 {
        std::fs::write(folder.path().join("lose"), "").unwrap();
        let after = up.event();
        assert_eq!((&after["event"], &after["endpoint"]), (&json!("restarted"), &before["endpoint"]));
        assert_ne!(pids(&after)[0], pids(&before)[0], "the main function is another process");
        assert_eq!(pids(&after)[1..], pids(&before)[1..], "the remote functions stay");
        assert_eq!(after["functions"][0]["state"], "serving");
        // It was unready before it ended.
        let unready = std::fs::read_to_string(folder.path().join("unready")).unwrap();
        assert_eq!(unready.lines().count(), times);
        assert!(!is_alive(pids(&before)[0]));
        before = after;
    }
    up.signal(Signal::TERM);
    assert!(up.child.wait().unwrap().success());
}

#[test]
fn connections_wait_while_the_main_function_is_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let (mut up, ready) = Up::start(folder.path());
    let address = ready["endpoint"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
    kill_process(pids(&ready)[0], Signal::KILL).unwrap();
    wait_until(|| !is_alive(pids(&ready)[0]));
    // There is no main function for a while, and the next one accepts nothing: it is a fake.
    let waiting: Vec<_> = (0..20).map(|_| std::net::TcpStream::connect(&address).unwrap()).collect();
    let again = up.event();
    assert_ne!(pids(&again)[0], pids(&ready)[0]);
    assert_eq!(again["endpoint"], ready["endpoint"]);
    // Those that waited are still connected: there is nothing to read, and no end.
    for mut stream in waiting {
        stream.set_nonblocking(true).unwrap();
        let read = stream.read(&mut [0]);
        assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
    up.signal(Signal::TERM);
    assert!(up.child.wait().unwrap().success());
    assert!(std::net::TcpStream::connect(&address).is_err(), "the port is closed");
}

/// `up` that has just been asked to end while its functions drain for ever; what it says, and who they are.
fn draining(folder: &Path, up: &mut Command) -> (Child, Lines<BufReader<ChildStdout>>, Vec<Pid>) {
    let mut child = up.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    std::fs::write(folder.join("linger"), "").unwrap();
    (child, lines, pids(&ready))
}

#[test]
fn a_second_signal_ends_a_drain_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("mixtral-basic");
    let mut up = remoe(folder.path(), &["up", "--model", &model, "--port", "0", "--replicas", "1", "--json"]);
    let (mut child, _lines, functions) = draining(folder.path(), up.stderr(Stdio::piped()));
    let pid = Pid::from_child(&child);
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    kill_process(pid, Signal::INT).unwrap();
    assert!(said.any(|line| line.contains("stopping; press Ctrl-C again to stop at once")));
    let asked = Instant::now();
    // Later than an echo, sooner than a second.
    std::thread::sleep(Duration::from_millis(200));
    kill_process(pid, Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // A drain takes 35 s.
    assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    wait_until(|| !functions.iter().any(|&function| is_alive(function)));
}

#[test]
fn ctrl_c_on_a_terminal_drains_and_a_second_one_ends() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("mixtral-basic");
    let arguments = ["up", "--model", &model, "--port", "0", "--replicas", "1", "--json"];
    let plain = remoe(folder.path(), &arguments);
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
    let slave = || std::fs::File::options().read(true).write(true).open(&name).unwrap();
    // In a session of its own with this terminal, so that Ctrl-C reaches its whole foreground group.
    let mut command = Command::new("setsid");
    command.args(["--ctty", "--wait"]).arg(plain.get_program()).args(arguments);
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env_remove("REMOE_LOG").stdin(slave()).stderr(slave());
    let (mut child, _lines, functions) = draining(folder.path(), &mut command);
    drop(command);
    let mut terminal = std::fs::File::from(master);
    terminal.write_all(b"\x03").unwrap();
    let mut shown = String::new();
    let mut buffer = [0; 256];
    while !shown.contains("Ctrl-C again to stop at once") {
        let count = terminal.read(&mut buffer).unwrap();
        shown.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    assert!(functions.iter().all(|&function| is_alive(function)), "Ctrl-C reached the functions, too");
    std::thread::sleep(Duration::from_millis(200));
    terminal.write_all(b"\x03").unwrap();
    let asked = Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{shown}");
    assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    wait_until(|| !functions.iter().any(|&function| is_alive(function)));
}

#[test]
fn after_the_death_of_up_no_function_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (mut up, ready) = Up::start(folder.path());
    kill_process(pids(&ready)[1], Signal::STOP).unwrap();
    up.signal(Signal::KILL);
    up.child.wait().unwrap();
    wait_until(|| !pids(&ready).into_iter().any(is_alive));
}

fn wait_until(condition: impl Fn() -> bool) {
    for _ in 0..600 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("it never came true");
}

fn children_of(pid: Pid) -> Vec<Pid> {
    let mut children = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap() {
        let listed = std::fs::read_to_string(task.unwrap().path().join("children")).unwrap();
        children.extend(listed.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap()));
    }
    children
}

/// Reports if the process runs; one that has ended and was not waited for does not.
fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    let ended = stat.is_ok_and(|stat| stat.contains(") Z ") || stat.contains(") X "));
    test_kill_process(pid).is_ok() && !ended
}
