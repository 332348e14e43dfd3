//! `remoe top`: what runs, waits, sleeps and costs behind an address, again and again.

mod figures;
mod screen;
mod view;

use crate::endpoint::GatewayEndpoint;
use crate::exit::CliError;
use crate::machine;
use crate::output::json;
use crate::running_commands::{self, RunningCommand};
use crate::signals::TerminationSignals;
use clap::Args;
use console::Term;
use figures::{Figures, Readings, WINDOW};
use screen::{Key, Screen};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use view::Order;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// URL of the gateway [default: that of the deployment on this machine, else http://127.0.0.1:8000]
    #[arg(long, value_name = "URL")]
    pub(crate) endpoint: Option<String>,
    /// API key, if the gateway needs one
    #[arg(long, value_name = "KEY", env = "REMOE_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Print one table and end
    #[arg(long)]
    pub(crate) once: bool,
}

/// Between two readings.
const REFRESH: Duration = Duration::from_secs(1);
/// Address of `remoe up` without flags.
const DEFAULT_ENDPOINT: &str = "http://127.0.0.1:8000";
/// Limits of an answer.
const ANSWER: Duration = Duration::from_secs(5);
const PAGE: usize = 4 << 20;
const METRICS: usize = 16 << 20;

/// Status of a gateway.
#[derive(Debug, Serialize, Deserialize)]
struct StatusPage {
    models: Vec<ModelLine>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ModelLine {
    model: String,
    state: String,
    in_flight: usize,
    waiting: usize,
    waiting_bytes: usize,
    /// Seconds since a request came or ended.
    quiet_s: f64,
    /// Without requests for so many seconds it sleeps.
    idle_s: Option<f64>,
    wakes: u64,
    /// Wakes of remote groups that slept while their main function ran.
    #[serde(default)]
    group_wakes: u64,
    last_wake_s: Option<f64>,
    /// `None` where no money is accounted for.
    #[serde(default)]
    cost: Option<CostStatus>,
    functions: Vec<FunctionLine>,
    /// Not part of the status: from `/metrics`.
    #[serde(skip_deserializing)]
    figures: Figures,
}

/// In nano-dollars.
#[derive(Debug, Serialize, Deserialize)]
struct CostStatus {
    /// Functions that are alive, in an hour.
    per_hour: u64,
    /// All functions so far; `None` for a tenant's key, and so the next.
    paid: Option<u64>,
    /// Part of `paid` for answered requests.
    requests: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FunctionLine {
    name: String,
    state: String,
    pid: Option<u32>,
}

/// Shows the status until `q` or Ctrl-C; once with `--once` or `--json`, or if standard output is no terminal.
pub(crate) async fn run(args: &TopArgs, as_json: bool) -> Result<(), CliError> {
    let url = match &args.endpoint {
        Some(url) => url.clone(),
        // Where no files of deployments can be read, none is known.
        None => only_endpoint(&running_commands::list().unwrap_or_default())?,
    };
    let endpoint = GatewayEndpoint::new(&url, args.api_key.as_deref());
    let mut source = GatewayReadings { endpoint, readings: Readings::default() };
    let first = source.look().await?;
    if !args.once && !as_json && Term::stdout().is_term() {
        return watch(source, first).await;
    }
    // Rates need two readings.
    tokio::time::sleep(REFRESH).await;
    let mut page = source.look().await?;
    if as_json {
        return Ok(json::print(&page)?);
    }
    Order::default().sort(&mut page.models);
    Term::stdout().write_line(&view::text(&page.models, None))?;
    Ok(())
}

/// Returns the endpoint of the one deployment that is `running`; the default one if none is.
///
/// # Errors
/// Several are running.
fn only_endpoint(running: &[RunningCommand]) -> Result<String, CliError> {
    let served = |one: &RunningCommand| Some((one.endpoint.clone()?, one.models.join(", ")));
    let mut found: Vec<(String, String)> = running.iter().filter_map(served).collect();
    match found.len() {
        0 => Ok(DEFAULT_ENDPOINT.to_owned()),
        1 => Ok(found.remove(0).0),
        count => {
            let each = found.iter().map(|(url, models)| format!("\n  {url} ({models})"));
            let message = format!(
                "cannot choose among {count} deployments on this machine; name one with --endpoint:{}",
                each.collect::<String>()
            );
            Err(CliError::arguments("--endpoint", message))
        }
    }
}

/// Shows the status on a screen of its own, beginning with `page`.
async fn watch(mut source: GatewayReadings, mut page: StatusPage) -> Result<(), CliError> {
    let mut signals = TerminationSignals::listen()?;
    let mut resized = signal(SignalKind::window_change())
        .map_err(|error| CliError::runtime(format!("cannot handle signals: {error}")))?;
    let endpoint = source.endpoint.url().to_owned();
    let (says, mut pages) = mpsc::channel(1);
    // Keys are answered while the gateway is slow.
    let looking = tokio::spawn(async move {
        loop {
            tokio::time::sleep(REFRESH).await;
            if says.send(source.look().await).await.is_err() {
                return;
            }
        }
    });
    let screen = Screen::enter()?;
    let mut keys = screen.keys();
    let (mut order, mut problem) = (Order::default(), None::<String>);
    loop {
        order.sort(&mut page.models);
        let footer = problem.clone().unwrap_or_else(|| {
            let seconds = WINDOW.as_secs();
            format!("{endpoint}, rates of the last {seconds} s   q quit   s, arrows sort   r reverse")
        });
        screen.draw(&view::text(&page.models, Some(order)), &footer)?;
        tokio::select! {
            () = signals.next() => break,
            Some(()) = resized.recv() => {}
            Some(looked) = pages.recv() => match looked {
                Ok(next) => (page, problem) = (next, None),
                // What was last known stays on the screen.
                Err(error) => problem = Some(format!("{}; retrying", error.message)),
            },
            Some(key) = keys.recv() => match key {
                Key::Quit => break,
                Key::Next => order.column = order.column.step(true),
                Key::Previous => order.column = order.column.step(false),
                Key::Reverse => order.is_reversed = !order.is_reversed,
            },
        }
    }
    looking.abort();
    Ok(())
}

/// The gateway, and what it said of late.
struct GatewayReadings {
    endpoint: GatewayEndpoint,
    readings: Readings,
}

impl GatewayReadings {
    /// Reads status and figures. Without metrics, as from a gateway that is busy, figures are missing.
    async fn look(&mut self) -> Result<StatusPage, CliError> {
        let status = self.endpoint.get("/status", PAGE, ANSWER).await?;
        let mut page: StatusPage = serde_json::from_slice(&status)
            .map_err(|error| self.endpoint.request_error("/status", &error))?;
        let asked = Instant::now();
        if let Ok(metrics) = self.endpoint.get("/metrics", METRICS, ANSWER).await {
            self.readings.add(asked, &String::from_utf8_lossy(&metrics));
        }
        let processes = if self.endpoint.is_local() { machine::processes() } else { Vec::new() };
        for line in &mut page.models {
            line.figures = self.readings.of(&line.model);
            let pids: Vec<u32> = line.functions.iter().filter_map(|function| function.pid).collect();
            let of_it = processes.iter().filter(|process| pids.contains(&process.pid));
            let resident: u64 = of_it.map(|process| process.resident_bytes).sum();
            // Of processes on this machine it is measured, of others it is what they were given.
            if resident > 0 {
                line.figures.memory_bytes = Some(resident);
            }
        }
        Ok(page)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn running(endpoint: Option<&str>, model: &str) -> RunningCommand {
        let fields = json!({"pid": 1, "began": 1, "command": "up", "models": [model], "endpoint": endpoint, "since": ""});
        serde_json::from_value(fields).unwrap()
    }

    #[test]
    fn endpoint_is_that_of_the_only_deployment() {
        assert_eq!(only_endpoint(&[]).unwrap(), DEFAULT_ENDPOINT);
        // `remoe run` serves nothing.
        let chat = running(None, "m");
        let one = running(Some("http://127.0.0.1:8123"), "demo");
        assert_eq!(only_endpoint(&[chat, one]).unwrap(), "http://127.0.0.1:8123");
        let two = [running(Some("http://127.0.0.1:1"), "a"), running(Some("http://127.0.0.1:2"), "b")];
        let said = only_endpoint(&two).unwrap_err().message;
        assert_eq!(
            said,
            "cannot choose among 2 deployments on this machine; name one with --endpoint:\n  http://127.0.0.1:1 (a)\n  \
             http://127.0.0.1:2 (b)"
        );
    }
}
