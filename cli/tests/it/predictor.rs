//! `remoe predictor` as its users see it.

use remoe_model::Checkpoint;
use remoe_predictor::record::{ActivationRecord, DEFAULT_FILE_BYTES, RecordHeader, RecordWriter};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral-basic")
}

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_remoe")).args(arguments).output().unwrap()
}

fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// A record file of the fixture, or of another model.
fn records(path: &Path, model: Option<&str>, count: u32) {
    let checkpoint = Checkpoint::open(fixture()).unwrap();
    let facts = checkpoint.inspect().unwrap();
    let header = RecordHeader {
        model: model.map_or_else(|| checkpoint.fingerprint().unwrap().to_string(), str::to_owned),
        layers: facts.moe_layers.iter().map(|&layer| layer as u32).collect(),
        experts: facts.experts as u32,
        top_k: facts.top_k as u32,
        dtype: "float32".to_owned(),
        tokens: false,
    };
    let cells = header.cells();
    let mut writer = RecordWriter::new(Vec::new(), header, 0, DEFAULT_FILE_BYTES).unwrap();
    for n in 0..count {
        let prompt: Vec<u32> = (0..4 + n % 7).map(|t| (n * 5 + t * t) % facts.vocab_size as u32).collect();
        let prefill = (0..cells).map(|cell| (n + prompt[0] + cell as u32 * 3) % 5).collect();
        // One in four ends before its first decode step.
        let steps = n % 4;
        let decode = (0..cells).map(|cell| steps * ((n + cell as u32) % 3)).collect();
        writer.append(&ActivationRecord { prompt, prefill, decode, steps, experts: None }).unwrap();
    }
    std::fs::write(path, writer.finish().unwrap()).unwrap();
}

#[test]
fn build_eval_and_explain_work_together() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (train, test, out, model) = (at("train.npy"), at("test.npy"), at("out"), fixture());
    let model = model.to_str().unwrap();
    records(Path::new(&train), None, 150);
    records(Path::new(&test), None, 20);

    let built =
        object(&run(&["predictor", "build", "--history", &train, "--model", model, "--out", &out, "--json"]));
    assert_eq!(built["records"], 150);
    let portable = Path::new(&out).join("portable.safetensors");
    assert_eq!(built["portable"]["bytes"], std::fs::metadata(&portable).unwrap().len());
    assert_eq!(built["portable"]["dimensions"], 64);
    assert_eq!(built["portable"]["held_out"].as_array().unwrap().len(), 4);
    // A folder of an older version has none: it is made of the whole one, which stays as it was.
    std::fs::remove_file(&portable).unwrap();
    let whole = std::fs::read(Path::new(&out).join("predictor.safetensors")).unwrap();
    let arguments = ["predictor", "build", "--convert", &out, "--model", model, "--out", &out, "--json"];
    let converted = object(&run(&[&arguments[..], &["--dimensions", "16"]].concat()));
    assert_eq!((&converted["records"], &converted["portable"]["dimensions"]), (&150.into(), &16.into()));
    assert!(portable.exists());
    assert_eq!(std::fs::read(Path::new(&out).join("predictor.safetensors")).unwrap(), whole);
    assert!(["dop", "sps", "tokens", "blend"].contains(&built["default"].as_str().unwrap()));

    let arguments = ["predictor", "eval", "--train", &train, "--test", &test, "--model", model];
    let plots = at("plots");
    let evaluation = object(&run(&[&arguments[..], &["--plots", &plots, "--json"]].concat()));
    let methods = evaluation["methods"].as_array().unwrap();
    for name in [
        "sps",
        "sps-plain",
        "var-pam",
        "var-pam-plain",
        "var-ed",
        "var-ed-plain",
        "bf",
        "dop",
        "fate",
        "ef",
        "tokens",
        "blend",
    ] {
        let method = methods.iter().find(|method| method["name"] == name).unwrap_or_else(|| panic!("{name}"));
        for phase in ["prefill", "decode"] {
            assert!((0.0..0.7).contains(&method[phase]["mean_js"].as_f64().unwrap()), "{method}");
            assert!(method[phase]["js_per_layer"].as_array().unwrap().len() > 1);
        }
        assert_eq!(method["js_mean"], method["prefill"]["mean_js"]);
        for field in ["build_seconds", "search_us_p50", "search_us_p99", "bytes"] {
            assert!(method[field].is_number(), "{name} {field}");
        }
    }
    assert!(evaluation["correlation"].is_number() && evaluation["prefill_as_decode_js"].is_number());
    for phase in ["prefill", "decode"] {
        assert!((0.0..=1.0).contains(&evaluation["covered_95"][phase].as_f64().unwrap()));
    }
    for plot in ["methods.svg", "correlation.svg"] {
        assert!(std::fs::read_to_string(Path::new(&plots).join(plot)).unwrap().ends_with("</svg>\n"));
    }
    let shown = run(&arguments);
    assert!(String::from_utf8(shown.stdout).unwrap().starts_with("method"));

    let explain = ["predictor", "explain", "--model", model, "--predictor", &out, "--prompt-ids", "1,2,3"];
    let explained = object(&run(&[&explain[..], &["--json"]].concat()));
    assert_eq!(explained["method"], built["default"]);
    let held_out = |field: &str| built[field][0]["prompts"].as_u64().unwrap();
    assert!(held_out("held_out") > held_out("decode_held_out"), "those that decoded");
    assert_eq!(explained["neighbours"].as_array().unwrap().len(), 15);
    let both = ["prediction", "decode"].map(|phase| explained[phase].as_array().unwrap());
    for layer in both.into_iter().flatten() {
        let sum: f64 = layer.as_array().unwrap().iter().map(|share| share.as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-4);
    }
    assert!(String::from_utf8(run(&explain).stdout).unwrap().contains("past prompt"));
}

#[test]
fn what_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (good, foreign, out, model) = (at("good.npy"), at("foreign.npy"), at("out"), fixture());
    let model = model.to_str().unwrap();
    records(Path::new(&good), None, 20);
    records(Path::new(&foreign), Some("abcd"), 20);
    let error = |arguments: &[&str]| {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        object(&output)["error"].take()
    };
    let build = |history: &str, more: &[&str]| {
        error(
            &[&["predictor", "build", "--history", history, "--model", model, "--out", &out, "--json"], more]
                .concat(),
        )
    };
    let refused = build(&foreign, &[]);
    assert_eq!(
        (refused["field"].as_str(), refused["path"].as_str()),
        (Some("--history"), Some(foreign.as_str()))
    );
    assert!(refused["message"].as_str().unwrap().contains("abcd"));
    assert_eq!(build(&at("none.npy"), &[])["field"], "--history");
    assert_eq!(build(&good, &["--beta", "15"])["field"], "--beta");
    let explain = ["predictor", "explain", "--model", model, "--predictor", &out, "--json"];
    assert_eq!(error(&[&explain[..], &["--prompt-ids", "1"]].concat())["field"], "--predictor");
}

#[test]
fn a_damaged_history_is_used_as_far_as_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (history, out, model) = (at("cut.npy"), at("out"), fixture());
    records(Path::new(&history), None, 10);
    let bytes = std::fs::read(&history).unwrap();
    std::fs::write(&history, &bytes[..bytes.len() - 3]).unwrap();
    let model = model.to_str().unwrap();
    let output =
        run(&["predictor", "build", "--history", &history, "--model", model, "--out", &out, "--json"]);
    assert_eq!(object(&output)["records"], 9);
    assert!(String::from_utf8(output.stderr).unwrap().contains("cut off"));
}
