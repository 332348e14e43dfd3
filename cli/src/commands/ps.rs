//! `remoe ps` and `remoe stop`: what runs on this machine, and its end.

use crate::args::StopArgs;
use crate::exit::CliError;
use crate::machine::{self, ProcessLine};
use crate::output::{json, table};
use crate::running::{self, Running};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use serde::Serialize;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// What a command may take to end: its requests are let come to their end first.
const END: Duration = Duration::from_secs(60);

#[derive(Serialize)]
struct Line {
    pid: u32,
    command: String,
    models: Vec<String>,
    endpoint: Option<String>,
    since: String,
    /// Its function processes.
    functions: usize,
    /// Memory that it and its functions have resident.
    memory_bytes: u64,
}

/// Shows what runs.
pub(crate) fn run(as_json: bool) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct List {
        processes: Vec<Line>,
    }
    let processes = machine::processes();
    let lines: Vec<Line> = running::all()?.into_iter().map(|running| line(running, &processes)).collect();
    if as_json {
        return Ok(json::print(&List { processes: lines })?);
    }
    let mut out = anstream::stdout().lock();
    if lines.is_empty() {
        writeln!(out, "no deployments; start one with `remoe up MODEL` or `remoe run MODEL`")?;
        return Ok(());
    }
    let rows = lines.into_iter().map(|line| {
        vec![
            line.pid.to_string(),
            line.command,
            line.models.join(", "),
            line.endpoint.unwrap_or_else(|| "-".to_owned()),
            line.functions.to_string(),
            table::bytes(line.memory_bytes),
            line.since,
        ]
    });
    let header = ["pid", "command", "models", "endpoint", "functions", "memory", "since"];
    writeln!(out, "{}", table::with_header(&header, rows.collect()))?;
    Ok(())
}

fn line(running: Running, processes: &[ProcessLine]) -> Line {
    let own = |process: &&ProcessLine| process.pid == running.pid || process.parent == running.pid;
    let of_it: Vec<_> = processes.iter().filter(own).collect();
    Line {
        functions: of_it.iter().filter(|process| process.parent == running.pid).count(),
        memory_bytes: of_it.iter().map(|process| process.resident_bytes).sum(),
        pid: running.pid,
        command: running.command,
        models: running.models,
        endpoint: running.endpoint,
        since: running.since,
    }
}

/// Asks what is named to end, and waits until it has.
pub(crate) fn stop(args: &StopArgs, as_json: bool) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct Stopped {
        stopped: Vec<Line>,
    }
    let chosen = chosen(args, running::all()?)?;
    let processes = machine::processes();
    let mut ending = Vec::new();
    for running in &chosen {
        ending.extend(running.ask_to_end()?.map(|process| (running.pid, process)));
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
    let stopped: Vec<Line> = chosen.into_iter().map(|running| line(running, &processes)).collect();
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

/// What a name, a process id or `--all` means. A number is a process id where there is such a process.
fn chosen(args: &StopArgs, all: Vec<Running>) -> Result<Vec<Running>, CliError> {
    let Some(name) = &args.what else { return Ok(all) };
    let by_pid: Vec<Running> =
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
    fn what_is_to_stop_is_a_process_or_a_model() {
        let running = |pid: u32, models: &[&str]| -> Running {
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
