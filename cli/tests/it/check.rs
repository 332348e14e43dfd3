//! `remoe check`, and commands that refuse the same files.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

fn workspace(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn remoe(arguments: &[&str]) -> (Option<i32>, Value) {
    let output = Command::new(env!("CARGO_BIN_EXE_remoe")).args(arguments).arg("--json").output().unwrap();
    let printed = serde_json::from_slice(&output.stdout);
    (output.status.code(), printed.unwrap_or_else(|error| panic!("{arguments:?}: {error}: {output:?}")))
}

/// Checks a file with `text`: the exit code, the kind, and the message without the place of the file.
fn check(text: &str, more: &[&str]) -> (Option<i32>, Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.yaml");
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap();
    let (code, mut report) = remoe(&[&["check", path], more].concat());
    let file = report["files"][0].take();
    assert_eq!(file["path"], path);
    let message = file["error"]["message"].as_str().unwrap_or_default().replace(path, "FILE");
    assert_eq!(file["error"].is_null(), code == Some(0), "{file}");
    (code, file["kind"].clone(), message)
}

const DEPLOYMENT: &str = "apiVersion: remoe.dev/v1alpha1\nkind: MoEDeployment\nmetadata: {name: demo}\nspec:\n  \
                          model: {source: pvc://models/demo}\n  replicas: 2\n";

#[test]
fn examples_of_the_repository_pass_the_check() {
    let folders = [("examples/nodes", "nodes"), ("examples/pricing", "prices"), ("examples", "deployment")];
    for (folder, kind) in folders {
        let files = std::fs::read_dir(workspace(folder)).unwrap().map(|entry| entry.unwrap().path());
        let files: Vec<_> = files.filter(|path| path.is_file()).collect();
        assert!(!files.is_empty());
        let paths: Vec<&str> = files.iter().map(|path| path.to_str().unwrap()).collect();
        let (code, report) = remoe(&[&["check"], &paths[..]].concat());
        assert_eq!(code, Some(0), "{report}");
        let kinds = report["files"].as_array().unwrap().iter().map(|file| &file["kind"]);
        assert!(kinds.clone().count() == files.len() && kinds.clone().all(|found| found == kind), "{report}");
    }
}

#[test]
fn wrong_file_is_told_with_field_and_remedy() {
    let range = DEPLOYMENT.replace("replicas: 2", "remoteExperts: {maxGroups: 1000}");
    let workload = DEPLOYMENT.replace("replicas: 2", "workload: {concurrency: 0}");
    let prices = DEPLOYMENT.replace("replicas: 2", "pricing: {cpuCoreHour: '0.03', memoryGBHours: '1'}");
    let second =
        format!("{DEPLOYMENT}---\n{}", DEPLOYMENT.replace("demo", "other").replace("replicas", "replcas"));
    for (text, kind, says) in [
        (
            "tenants: [{name: a, keys: [k], modls: [x]}]",
            "keys",
            "`tenants[0].modls`: unknown field, expected one of",
        ),
        ("tenants: [{name: a}]", "keys", "missing field `keys`"),
        ("typicalInputTokens: 0", "workload", "FILE: typicalInputTokens is 0, expected 1 to 1e12 tokens"),
        ("arrivals: {perhour: 1}", "workload", "did you mean `perHour`?"),
        (
            "cpuCoreHour: 0.03\nmemoryGbHour: 0.004\nbilling: Reserved",
            "prices",
            "did you mean `memoryGBHour`?",
        ),
        ("nodes: []", "nodes", "nodes lists 0 shapes, expected 1 to"),
        (&DEPLOYMENT.replace("replicas", "replcas"), "deployment", "spec.replcas is an unknown field"),
        (
            &DEPLOYMENT.replace("v1alpha1", "v2"),
            "deployment",
            "apiVersion: invalid value 'remoe.dev/v2': expected remoe.dev/v1alpha1",
        ),
        (&range, "deployment", "'1000'"),
        (&workload, "deployment", "spec.workload.concurrency: invalid value '0': expected 1 to 256"),
        (&prices, "deployment", "spec.pricing.memoryGBHours is an unknown field"),
        (&second, "deployment", "FILE: other: spec.replcas is an unknown field"),
    ] {
        let (code, found, message) = check(text, &[]);
        assert_eq!((code, &found), (Some(2), &json!(kind)), "{text}: {message}");
        assert!(message.contains(says), "{text}: {message}");
    }
    assert_eq!(check(DEPLOYMENT, &[]).0, Some(0));
}

#[test]
fn file_of_unknown_kind_needs_its_kind_stated() {
    for text in ["a: 1", "[1]", "\u{0}", ""] {
        let (code, kind, message) = check(text, &[]);
        assert_eq!((code, kind), (Some(2), Value::Null), "{text:?}");
        assert!(message.contains("--kind") && message.contains("keys, workload, plan"), "{message}");
    }
    let (code, kind, message) = check("a: 1", &["--kind", "prices"]);
    assert_eq!((code, kind), (Some(2), json!("prices")));
    assert!(message.contains("FILE: a is an unknown field"), "{message}");
    let (code, report) = remoe(&["check", "/nowhere/keys.yaml"]);
    assert_eq!((code, &report["files"][0]["error"]["path"]), (Some(2), &json!("/nowhere/keys.yaml")));
}

#[test]
fn up_refuses_a_keys_file_with_a_typo() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.yaml");
    std::fs::write(&keys, "tenants:\n- name: a\n  keys: [top-secret]\n  requestsPerMinuet: 3\n").unwrap();
    let (model, file) = (workspace("demo/model"), keys.to_str().unwrap());
    let (code, refused) = remoe(&["up", Path::to_str(&model).unwrap(), "--keys", file, "--port", "0"]);
    assert_eq!((code, &refused["error"]["field"]), (Some(2), &json!("--keys")), "{refused}");
    let message = refused["error"]["message"].as_str().unwrap();
    let says = "keys.yaml (line 4): `tenants[0].requestsPerMinuet`: unknown field, expected one of";
    assert!(message.contains(says) && !message.contains("top-secret"), "{message}");
}
