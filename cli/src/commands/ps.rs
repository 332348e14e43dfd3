//! `remoe ps` and `remoe stop`: what runs on this machine, and its end.

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

/// Longest time for a command to end: it drains its requests first.
const END: Duration = Duration::from_secs(60);

/// Limits of an answer about states: `ps` is fast, whatever a gateway does.
const ANSWER: Duration = Duration::from_secs(1);
const PAGE: usize = 4 << 20;

#[derive(Serialize)]
struct ProcessRow {
    pid: u32,
    command: String,
    models: Vec<String>,
    /// State of each model by its name; empty for `run`, which has no gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    states: Option<BTreeMap<String, String>>,
    endpoint: Option<String>,
    since: String,
    uptime_s: u64,
    /// Number of its function processes.
    functions: usize,
    /// Memory that it and its functions have resident.
    memory_bytes: u64,
}

impl ProcessRow {
    /// Returns the states of its models in their order, once if all have the same.
    fn state(&self) -> String {
        let Some(states) = &self.states else { return "active".to_owned() };
        let shown: Vec<&str> =
            self.models.iter().map(|model| states.get(model).map_or("-", String::as_str)).collect();
        match shown.split_first() {
            Some((first, rest)) if rest.iter().all(|other| other == first) => (*first).to_owned(),
            _ => shown.join(", "),
        }
    }
}

/// Shows what runs.
pub(crate) async fn run(args: &PsArgs, as_json: bool) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct ProcessList {
        processes: Vec<ProcessRow>,
    }
    let processes = machine::processes();
    let mut lines: Vec<ProcessRow> =
        running_commands::list()?.into_iter().map(|running| line(running, &processes)).collect();
    let mut out = anstream::stdout();
    if args.quiet && !as_json {
        for model in lines.iter().flat_map(|line| &line.models) {
            writeln!(out, "{model}")?;
        }
        return Ok(());
    }
    let states = lines.iter().map(|line| states(line, args.api_key.as_deref()));
    let states = join_all(states).await;
    lines.iter_mut().zip(states).for_each(|(line, states)| line.states = states);
    if as_json {
        return Ok(json::print(&ProcessList { processes: lines })?);
    }
    if lines.is_empty() {
        writeln!(out, "no deployments; start one with `remoe up MODEL` or `remoe run MODEL`")?;
        return Ok(());
    }
    let rows = lines.into_iter().map(|line| {
        vec![
            line.models.join(", "),
            line.state(),
            line.endpoint.unwrap_or_else(|| "-".to_owned()),
            uptime(line.uptime_s),
            line.functions.to_string(),
            table::bytes(line.memory_bytes),
            line.pid.to_string(),
            line.command,
        ]
    });
    let header = ["name", "state", "endpoint", "uptime", "functions", "memory", "pid", "command"];
    writeln!(out, "{}", table::with_header(&header, rows.collect()))?;
    Ok(())
}

/// Returns the states of the models of a deployment, as its gateway says them; `None` if it has no gateway.
async fn states(line: &ProcessRow, api_key: Option<&str>) -> Option<BTreeMap<String, String>> {
    #[derive(Deserialize)]
    struct Status {
        models: Vec<ModelState>,
    }
    #[derive(Deserialize)]
    struct ModelState {
        model: String,
        state: String,
    }
    let all = |state: &str| line.models.iter().map(|model| (model.clone(), state.to_owned())).collect();
    let endpoint = GatewayEndpoint::new(line.endpoint.as_deref()?, api_key);
    let Ok(page) = endpoint.get("/status", PAGE, ANSWER).await else {
        // Health needs no key.
        return Some(match endpoint.get("/health", PAGE, ANSWER).await {
            Ok(_) => all("locked"),
            Err(_) => all("unreachable"),
        });
    };
    let is_well = endpoint.get("/health", PAGE, ANSWER).await.is_ok();
    let Ok(status) = serde_json::from_slice::<Status>(&page) else { return Some(all("unreachable")) };
    Some(
        status.models.into_iter().map(|ModelState { model, state }| (model, shown(state, is_well))).collect(),
    )
}

/// Returns the state of a model; one that wakes before its gateway has answered anything is loading.
fn shown(state: String, is_well: bool) -> String {
    if is_well || state != "waking" { state } else { "loading".to_owned() }
}

/// Returns a time in its two largest units.
fn uptime(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m{}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h{}m", minutes % 60),
        (days, hours, _) => format!("{days}d{}h", hours % 24),
    }
}

fn line(running: RunningCommand, processes: &[ProcessLine]) -> ProcessRow {
    let own = |process: &&ProcessLine| process.pid == running.pid || process.parent == running.pid;
    let of_it: Vec<_> = processes.iter().filter(own).collect();
    let since = running.since.parse::<jiff::Timestamp>();
    let uptime =
        since.map_or(0, |since| jiff::Timestamp::now().as_second().saturating_sub(since.as_second()));
    ProcessRow {
        functions: of_it.iter().filter(|process| process.parent == running.pid).count(),
        memory_bytes: of_it.iter().map(|process| process.resident_bytes).sum(),
        pid: running.pid,
        command: running.command,
        models: running.models,
        states: None,
        endpoint: running.endpoint,
        since: running.since,
        // Clocks may be set back.
        uptime_s: u64::try_from(uptime).unwrap_or(0),
    }
}

/// Asks what is named to end, and waits until it has.
pub(crate) fn stop(args: &StopArgs, as_json: bool) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct Stopped {
        stopped: Vec<ProcessRow>,
    }
    let chosen = chosen(args, running_commands::list()?)?;
    let processes = machine::processes();
    let mut ending = Vec::new();
    for running in &chosen {
        ending.extend(running.terminate()?.map(|process| (running.pid, process)));
    }
    let deadline = Instant::now() + END;
    for (pid, process) in &ending {
        if !ends_until(process, deadline)? {
            let message = format!(
                "cannot stop process {pid}: still running after {} s; use `kill -9 {pid}`",
                END.as_secs()
            );
            return Err(CliError::runtime(message));
        }
    }
    let stopped: Vec<ProcessRow> = chosen.into_iter().map(|running| line(running, &processes)).collect();
    if as_json {
        return Ok(json::print(&Stopped { stopped })?);
    }
    let mut out = anstream::stdout().lock();
    if stopped.is_empty() {
        writeln!(out, "no deployments")?;
    }
    for line in stopped {
        writeln!(out, "stopped {} (process {})", line.models.join(", "), line.pid)?;
    }
    Ok(())
}

/// Returns the commands that a name, a process id or `--all` means. A number is a process id if there is such a
/// process.
fn chosen(args: &StopArgs, all: Vec<RunningCommand>) -> Result<Vec<RunningCommand>, CliError> {
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

/// Waits for the end of a process.
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
            assert_eq!(uptime(seconds), text);
        }
    }

    #[test]
    fn what_is_to_stop_is_a_process_or_a_model() {
        let running = |pid: u32, models: &[&str]| -> RunningCommand {
            serde_json::from_value(serde_json::json!({
                "pid": pid, "began": 1, "command": "up", "models": models, "endpoint": null, "since": ""
            }))
            .unwrap()
        };
        let all = vec![running(11, &["a", "b"]), running(12, &["11"]), running(13, &["b"])];
        let pids = |what: Option<&str>| {
            let args = StopArgs { what: what.map(str::to_owned), all: what.is_none() };
            chosen(&args, all.clone()).map(|found| found.iter().map(|one| one.pid).collect::<Vec<_>>())
        };
        assert_eq!(pids(Some("11")).unwrap(), [11]);
        assert_eq!(pids(Some("12")).unwrap(), [12]);
        assert_eq!(pids(Some("b")).unwrap(), [11, 13]);
        assert_eq!(pids(None).unwrap(), [11, 12, 13]);
        assert!(pids(Some("c")).unwrap_err().message.contains("a, b (11); 11 (12)"));
    }
}
