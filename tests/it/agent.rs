//! The agent, as the program that the operator runs in a namespace.

use remoe_hardware::{Origin, Profile};
use remoe_test_support::binaries::{program, workspace};
use remoe_test_support::command::remoe;
use serde_json::Value;
use std::process::Output;
use tokio::process::Command;

fn demo() -> String {
    workspace().join("demo/model").to_str().unwrap().to_owned()
}

async fn agent(arguments: &[&str]) -> Output {
    // The agent looks for functions beside itself, as in an image.
    Command::new(program("remoe-agent")).env_remove("REMOE_BIN_DIR").args(arguments).output().await.unwrap()
}

/// Returns the last line of JSON. The operator reads the log of a pod, which has output and errors together.
fn said(output: &Output) -> Value {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

#[tokio::test]
async fn agent_prints_the_facts_that_the_command_prints() {
    let output = agent(&["inspect", "--model", &demo()]).await;
    assert!(output.status.success(), "{output:?}");
    let (_, facts) = remoe(&["inspect", "--model", &demo()]).await;
    assert_eq!(said(&output), facts);
}

#[tokio::test]
async fn agent_at_a_broken_checkpoint_exits_with_its_code() {
    let folder = tempfile::tempdir().unwrap();
    let output = agent(&["inspect", "--model", folder.path().to_str().unwrap()]).await;
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    let error = said(&output)["error"].clone();
    assert_eq!(error["code"], "checkpoint");
    // The operator quotes the last line.
    let log = String::from_utf8(output.stderr).unwrap();
    let last = log.lines().last().unwrap();
    assert_eq!(last, format!("error: {}", error["message"].as_str().unwrap()));
    assert!(last.contains("config.json"), "{last}");
    let wrong = agent(&["inspect", "--modle", "x"]).await;
    assert_eq!((wrong.status.code(), said(&wrong)["error"]["code"].as_str()), (Some(2), Some("arguments")));
}

#[tokio::test]
async fn agent_names_the_field_that_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(workspace().join("demo/model/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["hidden_size"] = Value::from(-1);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let output = agent(&["inspect", "--model", folder.path().to_str().unwrap()]).await;
    assert_eq!(said(&output)["error"]["field"], "hidden_size", "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_measures_a_profile_of_the_model() {
    let output =
        agent(&["profile", "--model", &demo(), "--dtype", "bfloat16", "--experts-dtype", "int8"]).await;
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let profile = Profile::from_json(text.lines().last().unwrap()).unwrap();
    let (_, facts) = remoe(&["inspect", "--model", &demo()]).await;
    assert_eq!((profile.origin, profile.model.dtype.as_str()), (Origin::Measured, "bfloat16"));
    assert_eq!(profile.model.fingerprint, facts["fingerprint"]);
    assert!(profile.remote_expert_seconds.is_some_and(|table| !table.vcpus.is_empty()));
}
