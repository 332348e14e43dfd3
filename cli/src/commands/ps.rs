//! `remoe ps` and `remoe stop`: lists and stops the deployments on this machine.

use crate::endpoint::GatewayEndpoint;
use crate::exit::CliError;
use crate::machine::{self, ProcessLine};
use crate::output::{json, table};
use crate::running_commands::{self, RunningCommand};
use clap::Args;
use futures_util::future::join_all;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Print the names of models and nothing else, one per line
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// API key to read the state of models with, if their gateway needs one
    #[arg(long, value_name = "KEY", env = "REMOE_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Model name or process id, as shown by `remoe ps`; required unless --all. A name stops every process that
    /// serves this model, and with it the other models of that process
    #[arg(value_name = "NAME|PID", required_unless_present = "all", conflicts_with = "all")]
    pub(crate) what: Option<String>,
    /// Stop all deployments
    #[arg(long)]
    pub(crate) all: bool,
}

/// Timeout of a stopped command, which drains its requests first.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout of a request to a gateway, so that `ps` stays fast.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Size limit of a gateway's response, in bytes.
const RESPONSE_BYTES_LIMIT: usize = 4 << 20;

#[derive(Serialize)]
struct ProcessRow {
    pid: u32,
    command: String,
    models: Vec<String>,
    /// State of each model by name. `None` for `run`, which has no gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    states: Option<BTreeMap<String, String>>,
    endpoint: Option<String>,
    since: String,
    uptime_s: u64,
    /// Number of function processes.
    functions: usize,
    /// Resident memory of the command and its functions.
    memory_bytes: u64,
}

impl ProcessRow {
    /// Formats the states of the models in order, or a single state if all are equal.
    fn state(&self) -> String {
        let Some(states) = &self.states else { return "active".to_owned() };
        let model_states: Vec<&str> =
            self.models.iter().map(|model| states.get(model).map_or("-", String::as_str)).collect();
        match model_states.split_first() {
            Some((first, rest)) if rest.iter().all(|other| other == first) => (*first).to_owned(),
            _ => model_states.join(", "),
        }
    }
}

/// Lists the running commands.
pub(crate) async fn run(args: &PsArgs, as_json: bool) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct ProcessList {
        processes: Vec<ProcessRow>,
    }
    let processes = machine::processes();
    let mut rows: Vec<ProcessRow> =
        running_commands::list()?.into_iter().map(|running| process_row(running, &processes)).collect();
    let mut out = anstream::stdout();
    if args.quiet && !as_json {
        for model in rows.iter().flat_map(|row| &row.models) {
            writeln!(out, "{model}")?;
        }
        return Ok(());
    }
    let states = rows.iter().map(|row| query_states(row, args.api_key.as_deref()));
    let states = join_all(states).await;
    rows.iter_mut().zip(states).for_each(|(row, states)| row.states = states);
    if as_json {
        return Ok(json::print(&ProcessList { processes: rows })?);
    }
    if rows.is_empty() {
        writeln!(out, "no deployments; start one with `remoe up MODEL` or `remoe run MODEL`")?;
        return Ok(());
    }
    let cells = rows.into_iter().map(|row| {
        vec![
            row.models.join(", "),
            row.state(),
            row.endpoint.unwrap_or_else(|| "-".to_owned()),
            format_uptime(row.uptime_s),
            row.functions.to_string(),
            table::bytes(row.memory_bytes),
            row.pid.to_string(),
            row.command,
        ]
    });
    let header = ["name", "state", "endpoint", "uptime", "functions", "memory", "pid", "command"];
    writeln!(out, "{}", table::with_header(&header, cells.collect()))?;
    Ok(())
}

/// Queries the states of a deployment's models from its gateway. Returns `None` if it has none.
async fn query_states(row: &ProcessRow, api_key: Option<&str>) -> Option<BTreeMap<String, String>> {
    #[derive(Deserialize)]
    struct Status {
        models: Vec<ModelState>,
    }
    #[derive(Deserialize)]
    struct ModelState {
        model: String,
        state: String,
    }
    let all = |state: &str| row.models.iter().map(|model| (model.clone(), state.to_owned())).collect();
    let endpoint = GatewayEndpoint::new(row.endpoint.as_deref()?, api_key);
    let Ok(page) = endpoint.get("/status", RESPONSE_BYTES_LIMIT, REQUEST_TIMEOUT).await else {
        // `/health` requires no API key.
        return Some(match endpoint.get("/health", RESPONSE_BYTES_LIMIT, REQUEST_TIMEOUT).await {
            Ok(_) => all("locked"),
            Err(_) => all("unreachable"),
        });
    };
    let is_healthy = endpoint.get("/health", RESPONSE_BYTES_LIMIT, REQUEST_TIMEOUT).await.is_ok();
    let Ok(status) = serde_json::from_slice::<Status>(&page) else { return Some(all("unreachable")) };
    Some(
        status
            .models
            .into_iter()
            .map(|ModelState { model, state }| (model, displayed_state(state, is_healthy)))
            .collect(),
    )
}

/// Returns the displayed state: a model that wakes before its gateway is healthy is loading.
fn displayed_state(state: String, is_healthy: bool) -> String {
    if is_healthy || state != "waking" { state } else { "loading".to_owned() }
}

/// Formats a time in its two largest units.
fn format_uptime(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m{}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h{}m", minutes % 60),
        (days, hours, _) => format!("{days}d{}h", hours % 24),
    }
}

fn process_row(running: RunningCommand, processes: &[ProcessLine]) -> ProcessRow {
    let is_own = |process: &&ProcessLine| process.pid == running.pid || process.parent == running.pid;
    let own_processes: Vec<_> = processes.iter().filter(is_own).collect();
    let since = running.since.parse::<jiff::Timestamp>();
    let uptime =
        since.map_or(0, |since| jiff::Timestamp::now().as_second().saturating_sub(since.as_second()));
    ProcessRow {
        functions: own_processes.iter().filter(|process| process.parent == running.pid).count(),
        memory_bytes: own_processes.iter().map(|process| process.resident_bytes).sum(),
        pid: running.pid,
        command: running.command,
        models: running.models,
        states: None,
        endpoint: running.endpoint,
        since: running.since,
        // Negative if the clock was set back.
        uptime_s: u64::try_from(uptime).unwrap_or(0),
    }
}

/// Stops the selected commands, and waits until they end.
pub(crate) fn stop(args: &StopArgs, as_json: bool) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct Stopped {
        stopped: Vec<ProcessRow>,
    }
    let selected = select_commands(args, running_commands::list()?)?;
    let processes = machine::processes();
    let mut ending = Vec::new();
    for running in &selected {
        ending.extend(running.terminate()?.map(|process| (running.pid, process)));
    }
    let deadline = Instant::now() + STOP_TIMEOUT;
    for (pid, process) in &ending {
        if !ends_until(process, deadline)? {
            let message = format!(
                "cannot stop process {pid}: still running after {} s; use `kill -9 {pid}`",
                STOP_TIMEOUT.as_secs()
            );
            return Err(CliError::runtime(message));
        }
    }
    let stopped: Vec<ProcessRow> =
        selected.into_iter().map(|running| process_row(running, &processes)).collect();
    if as_json {
        return Ok(json::print(&Stopped { stopped })?);
    }
    let mut out = anstream::stdout().lock();
    if stopped.is_empty() {
        writeln!(out, "no deployments")?;
    }
    for row in stopped {
        writeln!(out, "stopped {} (process {})", row.models.join(", "), row.pid)?;
    }
    Ok(())
}

/// Selects commands by model name, process id or `--all`. A number is a process id if there is such a process.
fn select_commands(args: &StopArgs, all: Vec<RunningCommand>) -> Result<Vec<RunningCommand>, CliError> {
    let Some(name) = &args.what else { return Ok(all) };
    let by_pid: Vec<RunningCommand> =
        all.iter().filter(|running| running.pid.to_string() == *name).cloned().collect();
    let found = match by_pid.is_empty() {
        true => all.iter().filter(|running| running.models.contains(name)).cloned().collect(),
        false => by_pid,
    };
    if !found.is_empty() {
        return Ok(found);
    }
    let names: Vec<_> =
        all.iter().map(|running| format!("{} ({})", running.models.join(", "), running.pid)).collect();
    let running = match names.is_empty() {
        true => "nothing".to_owned(),
        false => names.join("; "),
    };
    Err(CliError {
        field: Some("NAME".to_owned()),
        ..CliError::runtime(format!("cannot stop {name}: no such model or process; running: {running}"))
    })
}

/// Waits until a process ends. Returns `false` at the deadline.
fn ends_until(process: &OwnedFd, deadline: Instant) -> Result<bool, CliError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let wait = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&wait)) {
            Ok(ended) => return Ok(ended > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(CliError::runtime(format!("cannot wait for a process: {error}"))),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn uptime_has_its_two_largest_units() {
        for (seconds, text) in [(0, "0s"), (59, "59s"), (61, "1m1s"), (3_700, "1h1m"), (90_000, "1d1h")] {
            assert_eq!(format_uptime(seconds), text);
        }
    }

    #[test]
    fn stop_selects_by_process_id_or_model() {
        let running = |pid: u32, models: &[&str]| -> RunningCommand {
            serde_json::from_value(serde_json::json!({
                "pid": pid, "began": 1, "command": "up", "models": models, "endpoint": null, "since": ""
            }))
            .unwrap()
        };
        let all = vec![running(11, &["a", "b"]), running(12, &["11"]), running(13, &["b"])];
        let pids = |what: Option<&str>| {
            let args = StopArgs { what: what.map(str::to_owned), all: what.is_none() };
            select_commands(&args, all.clone())
                .map(|found| found.iter().map(|one| one.pid).collect::<Vec<_>>())
        };
        assert_eq!(pids(Some("11")).unwrap(), [11]);
        assert_eq!(pids(Some("12")).unwrap(), [12]);
        assert_eq!(pids(Some("b")).unwrap(), [11, 13]);
        assert_eq!(pids(None).unwrap(), [11, 12, 13]);
        assert!(pids(Some("c")).unwrap_err().message.contains("a, b (11); 11 (12)"));
    }
}
