//! Runs of command-line tools.

use remoe_test_support::deadline::within;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;

/// Timeout of `helm` and `kubectl`, which may wait for objects themselves.
const TOOL_LIMIT: Duration = Duration::from_secs(300);

/// Runs `program` and returns its standard output.
///
/// # Panics
/// The program fails. The message has its standard error.
pub async fn run(program: &Path, kubeconfig: &Path, arguments: &[impl AsRef<OsStr>]) -> String {
    match attempt(program, kubeconfig, arguments).await {
        Ok(output) => output,
        Err(message) => panic!("{message}"),
    }
}

/// Runs a program as [`run()`] does, for commands that may fail.
///
/// # Errors
/// The program failed; the message has its standard error.
pub async fn attempt(
    program: &Path,
    kubeconfig: &Path,
    arguments: &[impl AsRef<OsStr>],
) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(arguments).env("KUBECONFIG", kubeconfig).stdin(Stdio::null()).kill_on_drop(true);
    let shown = format!("{command:?}", command = command.as_std());
    let output = within(TOOL_LIMIT, &shown, command.output()).await;
    let output = output.unwrap_or_else(|error| panic!("cannot run {shown}: {error}"));
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("{shown}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr)))
}
