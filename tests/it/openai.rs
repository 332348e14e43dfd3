//! The official `openai` Python client with a running deployment.

use remoe_test_support::binaries::workspace;
use remoe_test_support::deadline::LONG;
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::process::Process;
use remoe_test_support::up::Up;
use std::process::Command;

async fn python(name: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new("python3");
    command.args(arguments);
    let mut process = Process::start(name, command, |line| println!("{line}"));
    let status = process.end(LONG).await;
    (status.code(), process.log().join("\n"))
}

#[tokio::test(flavor = "multi_thread")]
async fn official_client_works() {
    let (code, log) = python("import openai", &["-c", "import openai"]).await;
    assert_eq!(code, Some(0), "python3 cannot import the package `openai`: run `make test`\n{log}");
    let up = Up::start(&ModelFixture::demo().folder, 1).await;
    let script = workspace().join("tests/python/openai_client.py");
    let arguments = [script.to_str().unwrap(), &up.ready.endpoint, "model"];
    let (code, log) = python("openai_client.py", &arguments).await;
    assert_eq!(code, Some(0), "{log}");
}
