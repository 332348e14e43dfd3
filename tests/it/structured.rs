//! Structured output and tools with common clients, with remote experts.

use remoe_test_support::binaries::workspace;
use remoe_test_support::deadline::LONG;
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::process::Process;
use remoe_test_support::up::Up;
use std::path::Path;
use std::process::Command;

/// Number of random schemas; nightly runs use more.
const SCHEMAS: &str = "24";

async fn run(name: &str, folder: &Path, program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder);
    let mut process = Process::start(name, command, |line| println!("{line}"));
    let status = process.end(LONG).await;
    assert_eq!(status.code(), Some(0), "{name}: {}", process.log().join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_get_what_they_ask_for() {
    let up = Up::start(&ModelFixture::demo().folder, 1).await;
    let endpoint = &up.ready.endpoint;
    let schemas = std::env::var("REMOE_RANDOM_SCHEMAS").unwrap_or_else(|_| SCHEMAS.to_owned());
    let script = "tests/python/structured_client.py";
    run("structured_client.py", workspace(), "python3", &[script, endpoint, "model", &schemas]).await;

    if Command::new("npm").arg("--version").output().is_err() {
        println!("SKIPPED: the JavaScript client, there is no npm here");
        return;
    }
    let folder = workspace().join("target/javascript");
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["package.json", "structured.mjs"] {
        std::fs::copy(workspace().join("tests/javascript").join(file), folder.join(file)).unwrap();
    }
    run("npm install", &folder, "npm", &["install", "--silent", "--no-audit", "--no-fund"]).await;
    run("structured.mjs", &folder, "node", &["structured.mjs", endpoint, "model"]).await;
}
