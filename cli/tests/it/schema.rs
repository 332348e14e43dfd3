//! `remoe schema`: schemas that accept and refuse what the readers do.

mod validator;

use remoe_hardware::{NodeList, Prices, Profile};
use remoe_model::Checkpoint;
use remoe_planner::{PlanDraft, Problem};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use validator::is_valid;

const NAMES: [&str; 6] = ["problem", "plan", "profile", "nodes", "prices", "workload"];
/// Values that no figure of any file can have.
const IMPOSSIBLE: [f64; 2] = [-1.0, 1e300];

fn workspace(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn text(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn remoe(arguments: &[&str]) -> (Option<i32>, Value) {
    let output = Command::new(env!("CARGO_BIN_EXE_remoe")).args(arguments).output().unwrap();
    let printed = serde_json::from_slice(&output.stdout);
    (output.status.code(), printed.unwrap_or_else(|error| panic!("{arguments:?}: {error}: {output:?}")))
}

fn schema(name: &str) -> Value {
    let (code, schema) = remoe(&["schema", name]);
    assert_eq!(code, Some(0));
    schema
}

fn yaml(text: &str) -> Value {
    serde_yaml::from_str(text).unwrap()
}

/// Files of a folder of the repository.
fn files(folder: &str, ending: &str) -> Vec<Value> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(workspace(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.to_str().unwrap().ends_with(ending));
    paths.sort();
    assert!(!paths.is_empty(), "{folder}");
    paths.into_iter().map(|path| yaml(&text(path))).collect()
}

/// The first example of a section of the reference.
fn documented(section: &str) -> Value {
    let page = text(workspace("docs/reference/plan-files.md"));
    let (_, rest) = page.split_once(&format!("\n## {section}\n")).unwrap();
    let (_, block) = rest.split_once("\n```").unwrap();
    let (block, _) = block.split_once("\n```").unwrap();
    yaml(block.split_once('\n').unwrap().1)
}

fn profile(make: fn(&remoe_model::Inspection, &str) -> Profile) -> Value {
    let facts = Checkpoint::open(workspace("demo/model")).unwrap().inspect().unwrap();
    serde_json::to_value(make(&facts, "bfloat16")).unwrap()
}

/// Every example of a kind of file in the repository, and what the programs write of it.
fn examples(name: &str) -> Vec<Value> {
    let manifest = || yaml(&text(workspace("examples/groups.yaml")))["spec"].take();
    match name {
        "problem" => {
            let mut found = files("tests/fixtures/planning", "-problem.json");
            found.push(answer()["problem"].take());
            found
        }
        "plan" => {
            let worked = files("tests/fixtures/planning", "-evaluation.json");
            let mut found: Vec<Value> = worked.into_iter().map(|mut record| record["plan"].take()).collect();
            let answer = answer();
            let plan = answer["plan"].clone();
            found.extend([documented("Plan file"), answer, plan]);
            found
        }
        "profile" => vec![profile(Profile::prior), profile(Profile::prior_on_gpu)],
        "nodes" => [files("examples/nodes", ".yaml"), vec![documented("Node file")]].concat(),
        "prices" => {
            [files("examples/pricing", ".yaml"), vec![documented("Price file"), manifest()["pricing"].take()]]
                .concat()
        }
        "workload" => vec![
            documented("Workload file"),
            manifest()["workload"].take(),
            json!({"concurrency": 4, "arrivals": {"recordedSeconds": [1, 2.5], "remoteIdleSeconds": 30}}),
        ],
        other => panic!("{other}"),
    }
}

/// The planner's answer for the demo model, with its problem.
fn answer() -> Value {
    let folder = tempfile::tempdir().unwrap();
    let profile = write(folder.path(), &profile(Profile::prior));
    let model = workspace("demo/model");
    let model = ["plan", "--model", model.to_str().unwrap(), "--json"];
    let (code, answer) =
        remoe(&[&model[..], &["--profile", &profile, "--remote", "always", "--sturdy", "0.01"]].concat());
    assert_eq!(code, Some(0), "{answer}");
    answer
}

fn write(folder: &Path, value: &Value) -> String {
    let path = folder.join("file.json");
    std::fs::write(&path, value.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Reads `value` as the commands do.
fn read(name: &str, value: &Value) -> Result<(), String> {
    let text = value.to_string();
    match name {
        "problem" => Problem::from_json(&text).map(drop).map_err(|error| error.to_string()),
        "plan" => PlanDraft::from_json(&text).map(drop).map_err(|error| error.to_string()),
        "profile" => Profile::from_json(&text).map(drop).map_err(|error| error.to_string()),
        "nodes" => NodeList::from_yaml(&text).map(drop).map_err(|error| error.to_string()),
        "prices" => Prices::from_yaml(&text).map(drop).map_err(|error| error.to_string()),
        "workload" => {
            let folder = tempfile::tempdir().unwrap();
            let file = write(folder.path(), value);
            std::fs::write(folder.path().join("profile.json"), profile(Profile::prior).to_string()).unwrap();
            let profile = folder.path().join("profile.json");
            let (model, profile) = (workspace("demo/model"), profile.to_str().unwrap());
            let model = ["plan", "--model", model.to_str().unwrap(), "--preallocate", "--json"];
            match remoe(&[&model[..], &["--profile", profile, "--workload", &file]].concat()) {
                (Some(2), answer) => Err(answer["error"]["message"].as_str().unwrap().to_owned()),
                _ => Ok(()),
            }
        }
        other => panic!("{other}"),
    }
}

/// Every value in `value` by its JSON pointer; of long lists the first items.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, field)| pointers(field, &format!("{at}/{name}"), found));
        }
        Value::Array(items) => items
            .iter()
            .take(2)
            .enumerate()
            .for_each(|(index, item)| pointers(item, &format!("{at}/{index}"), found)),
        _ => {}
    }
}

/// Pointers to the values that are `wanted` and read; a few of a workload, whose reader is a program.
fn places(name: &str, value: &Value, wanted: fn(&Value) -> bool) -> Vec<String> {
    let mut all = Vec::new();
    pointers(value, "", &mut all);
    let is_answer = value.get("plan").is_some();
    let is_read = |at: &str| at.is_empty() || at.starts_with("/plan");
    all.retain(|at| wanted(value.pointer(at).unwrap()) && (!is_answer || is_read(at)));
    all.truncate(if name == "workload" { 12 } else { usize::MAX });
    all
}

#[test]
fn schemas_refuse_unknown_fields_and_describe_known_ones() {
    let (code, listed) = remoe(&["schema", "--json"]);
    assert_eq!((code, &listed["schemas"]), (Some(0), &json!(NAMES)));
    for name in NAMES {
        let schema = schema(name);
        assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
        let mut all = Vec::new();
        pointers(&schema, "", &mut all);
        for at in all.iter().filter(|at| at.ends_with("/properties") || *at == "/properties") {
            let object = schema.pointer(at.strip_suffix("/properties").unwrap()).unwrap();
            assert_eq!(object["additionalProperties"], json!(false), "{name}{at}");
            for (field, form) in object["properties"].as_object().unwrap() {
                assert!(form["description"].is_string(), "{name}{at}/{field} has no description");
            }
        }
    }
    let (code, error) = remoe(&["schema", "problems", "--json"]);
    assert_eq!(code, Some(2), "{error}");
}

#[test]
fn every_example_is_valid_and_read() {
    for name in NAMES {
        let schema = schema(name);
        for example in examples(name) {
            assert!(is_valid(&schema, &schema, &example), "{name}: {example}");
            assert_eq!(read(name, &example), Ok(()), "{name}: {example}");
        }
    }
}

#[test]
fn every_example_is_recognised_and_passes_the_check() {
    for name in NAMES {
        for example in examples(name) {
            let folder = tempfile::tempdir().unwrap();
            let (code, report) = remoe(&["check", &write(folder.path(), &example), "--json"]);
            assert_eq!((code, &report["files"][0]["kind"]), (Some(0), &json!(name)), "{report}: {example}");
        }
    }
}

#[test]
fn unknown_field_at_any_level_is_refused_by_schema_and_reader() {
    for name in NAMES {
        let schema = schema(name);
        for example in examples(name) {
            for at in places(name, &example, Value::is_object) {
                let mut wrong = example.clone();
                wrong.pointer_mut(&at).unwrap()["surplus"] = json!(1);
                assert!(!is_valid(&schema, &schema, &wrong), "{name}{at}");
                let error = read(name, &wrong).unwrap_err();
                // Names of a map are free, and what they stand for is not.
                let is_map = at == "/sources";
                assert!(is_map || error.contains("surplus is an unknown field"), "{name}{at}: {error}");
            }
        }
    }
}

#[test]
fn impossible_figure_is_refused_by_schema_and_reader() {
    for name in NAMES {
        let schema = schema(name);
        for example in examples(name) {
            for at in places(name, &example, Value::is_number) {
                for impossible in IMPOSSIBLE {
                    let mut wrong = example.clone();
                    *wrong.pointer_mut(&at).unwrap() = json!(impossible);
                    let (valid, read) = (is_valid(&schema, &schema, &wrong), read(name, &wrong));
                    // Curves of the paper's form may have any figure; layer ids and plans are checked against a problem.
                    let is_free = at.starts_with("/fit") || name == "plan";
                    assert!(is_free || !valid && read.is_err(), "{name}{at} {impossible}: {valid} {read:?}");
                    assert!(valid || name == "plan" || read.is_err(), "{name}{at} {impossible}: {read:?}");
                }
            }
        }
    }
}
