//! `remoe up`: a model as a service, until it is asked to end.

use crate::args::UpArgs;
use crate::deployment::Wanted;
use crate::exit::CliError;
use crate::output::json::{self, Event, Function};
use crate::output::progress::Progress;
use crate::output::table;
use crate::signals::EndSignals;
use remoe_function::Role;
use remoe_operator::{FunctionState, Status, Supervisor, placement};
use std::collections::BTreeSet;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// How long functions may drain: a little more than the time in which they promise to end.
const DRAIN: Duration = Duration::from_secs(32);
/// Share of remote experts where nothing is said.
const DEFAULT_RATIO: f64 = 0.5;

/// Starts everything, reports what changes, and drains at the end.
pub(crate) async fn run(args: &UpArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    let mut signals = EndSignals::catch()?;
    let mut wanted = Wanted::of(&args.deployment, DEFAULT_RATIO)?;
    wanted.options.served_model_name.clone_from(&args.served_model_name);
    // An empty variable in the environment is no key.
    wanted.options.api_key = args.api_key.clone().filter(|key| !key.is_empty());
    let http = SocketAddr::new(args.host, args.port);
    let started = tokio::select! {
        started = wanted.start(Some(http), progress) => started,
        // Nobody has been served yet, so there is nothing to drain.
        () = signals.next() => return Ok(()),
    };
    let (supervisor, status) = started?;
    let report = Report { wanted: &wanted, as_json };
    report.print("ready", &status)?;
    let served = tokio::select! {
        result = report.follow(&supervisor, &status) => result,
        () = signals.next() => Ok(()),
    };
    progress.doing("draining");
    tokio::select! {
        () = supervisor.shutdown(DRAIN) => served,
        // Asked twice: dropping the supervisor ends the functions.
        () = signals.again() => Err(CliError::interrupted()),
    }
}

struct Report<'a> {
    wanted: &'a Wanted,
    as_json: bool,
}

impl Report<'_> {
    /// Prints every return to service of a function, for as long as the deployment lives.
    async fn follow(&self, supervisor: &Supervisor, first: &Status) -> Result<(), CliError> {
        let mut changes = supervisor.status();
        let mut generation = first.generation;
        let mut known = serving_processes(first);
        while changes.changed().await.is_ok() {
            let status = changes.borrow_and_update().clone();
            if status.generation == generation || status.generation.is_none() {
                continue;
            }
            generation = status.generation;
            let serving = serving_processes(&status);
            if !serving.is_subset(&known) {
                self.print("restarted", &status)?;
                known = serving;
            }
        }
        Err(CliError::runtime("the supervision of the functions ended"))
    }

    fn print(&self, event: &str, status: &Status) -> Result<(), CliError> {
        let endpoint = status
            .functions
            .iter()
            .find_map(|function| function.http)
            .map(|address| format!("http://{}", reachable(address)))
            .ok_or_else(|| CliError::runtime("the main function serves no HTTP"))?;
        let remote = self.wanted.placement.remote();
        if self.as_json {
            let functions = status.functions.iter();
            json::print(&Event {
                event,
                endpoint: &endpoint,
                generation: status.generation,
                functions: functions
                    .map(|function| Function::of(function, &self.wanted.moe_layers, &remote))
                    .collect(),
            })?;
            return Ok(());
        }
        let mut out = anstream::stdout().lock();
        let bold = anstyle::Style::new().bold();
        writeln!(out, "{event} at {bold}{endpoint}{bold:#}\n\n{}", self.table(status))?;
        if event == "ready" {
            writeln!(out, "\nTry it:\n{}\n\nCtrl-C stops it.", self.curl(&endpoint))?;
        }
        out.flush()?;
        Ok(())
    }

    fn table(&self, status: &Status) -> String {
        let rows = status.functions.iter().map(|function| {
            let experts = match function.role {
                Role::Main => {
                    let remote = self.wanted.placement.remote();
                    table::experts(&placement::local_experts(&self.wanted.moe_layers, &remote))
                }
                Role::Remote => table::experts(&function.hosted),
            };
            let state = match function.state {
                FunctionState::Waiting => "waiting",
                FunctionState::Starting => "starting",
                FunctionState::Loading => "loading",
                FunctionState::Ready => "ready",
                FunctionState::Serving => "serving",
                FunctionState::Stopping => "stopping",
            };
            vec![
                function.name.clone(),
                function.pid.map_or_else(String::new, |pid| pid.to_string()),
                state.to_owned(),
                experts,
            ]
        });
        table::with_header(&["function", "pid", "state", "experts"], rows.collect())
    }

    fn curl(&self, endpoint: &str) -> String {
        let options = &self.wanted.options;
        let folder = options.model.file_name().map(|name| name.to_string_lossy().into_owned());
        let model = options.served_model_name.clone().or(folder).unwrap_or_default();
        let request = serde_json::json!({
            "model": model,
            "prompt": "Once upon a time",
            "max_tokens": 32,
        });
        let key = match options.api_key {
            Some(_) => " -H \"Authorization: Bearer $REMOE_API_KEY\"",
            None => "",
        };
        // A quote inside a quoted word of the shell.
        let body = request.to_string().replace('\'', r"'\''");
        format!("  curl {endpoint}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'")
    }
}

/// The processes that the generation in force relies on.
fn serving_processes(status: &Status) -> BTreeSet<u32> {
    let functions = status.functions.iter();
    let serving = functions.filter(|function| function.state == FunctionState::Serving);
    serving.filter_map(|function| function.pid).collect()
}

/// The address to reach a listener at from this machine.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, address.port())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_on_every_address_is_reached_at_this_machine() {
        let shown = |text: &str| reachable(text.parse().unwrap()).to_string();
        assert_eq!(shown("0.0.0.0:80"), "127.0.0.1:80");
        assert_eq!(shown("[::]:80"), "[::1]:80");
        assert_eq!(shown("10.0.0.1:80"), "10.0.0.1:80");
    }
}
