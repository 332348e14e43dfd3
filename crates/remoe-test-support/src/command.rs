//! Runs of the `remoe` command.

use crate::binaries;
use crate::deadline::LONG;
use crate::process::Process;
use serde_json::Value;
use std::process::Command;
use std::sync::mpsc;

/// Runs `remoe --json` with `arguments`. Returns the exit code and the printed object.
///
/// # Panics
/// The output is not exactly one JSON object.
pub async fn remoe(arguments: &[&str]) -> (Option<i32>, Value) {
    let (code, value, _) = remoe_with_log(arguments).await;
    (code, value)
}

/// Runs `remoe` as [`remoe()`] does and also returns the lines of its standard error.
pub async fn remoe_with_log(arguments: &[&str]) -> (Option<i32>, Value, Vec<String>) {
    let mut process = Command::new(binaries::program("remoe"));
    process.arg("--json").args(arguments);
    process.env("REMOE_BIN_DIR", binaries::folder()).env_remove("REMOE_LOG").env_remove("REMOE_API_KEY");
    let (sender, lines) = mpsc::channel();
    let mut process = Process::start("remoe", process, move |line| drop(sender.send(line)));
    let code = process.end(LONG).await.code();
    let lines: Vec<String> = lines.try_iter().collect();
    assert_eq!(lines.len(), 1, "exactly one object: {lines:?}\n{:?}", process.log());
    (code, serde_json::from_str(&lines[0]).expect("the line is JSON"), process.log())
}
