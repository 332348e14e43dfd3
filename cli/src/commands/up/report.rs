//! What `up` says of its models.

use super::start::StartTimes;
use crate::deployment::{MainReport, Wanted};
use crate::exit::{CliError, Code};
use crate::output::json::{self, Event, Function};
use crate::output::progress::Progress;
use crate::output::table;
use remoe_function::Role;
use remoe_launcher::{FunctionState, Status, placement};
use std::collections::BTreeMap;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

/// How one model is reported.
pub(super) struct Report {
    pub(super) wanted: Wanted,
    pub(super) times: StartTimes,
    /// Where users reach it.
    pub(super) address: SocketAddr,
    /// Clients need a key.
    pub(super) has_key: bool,
    pub(super) as_json: bool,
    pub(super) progress: Arc<Progress>,
}

impl Report {
    /// Prints an event. A service does not end because nobody reads any more what becomes of it.
    pub(super) fn say(&self, event: &str, status: &Status) -> Result<(), CliError> {
        match self.print(event, status) {
            Err(error) if error.code == Code::ClosedOutput => Ok(()),
            printed => printed,
        }
    }

    /// Says something beside the events.
    pub(super) fn note(&self, text: &str) {
        self.progress.line(text);
    }

    fn print(&self, event: &str, status: &Status) -> Result<(), CliError> {
        let endpoint = &format!("http://{}", self.address);
        let model = self.wanted.name();
        let remote = self.wanted.placement.remote();
        if self.as_json {
            let functions = status.functions.iter();
            json::print(&Event {
                event,
                model: &model,
                endpoint,
                generation: status.generation,
                start: (event == "ready").then_some(&self.times),
                main: self.wanted.main_report().filter(|_| event == "ready"),
                functions: functions
                    .map(|function| Function::of(function, &self.wanted.moe_layers, &remote, self.address))
                    .collect(),
            })?;
            return Ok(());
        }
        let mut out = anstream::stdout().lock();
        let bold = anstyle::Style::new().bold();
        writeln!(out, "{} at {bold}{endpoint}{bold:#}: {model}\n\n{}", title(event), self.table(status))?;
        if event == "ready" {
            if let Some(main) = self.wanted.main_report() {
                writeln!(out, "\n{}", main_text(&main))?;
            }
            let StartTimes { facts_s, plan_s, functions_s, placement_s } = &self.times;
            writeln!(
                out,
                "\nready after {:.2} s: inspect {facts_s:.2} s, plan {plan_s:.2} s, start functions \
                 {functions_s:.2} s, load placement {placement_s:.2} s",
                self.times.whole()
            )?;
            writeln!(out, "\nTry it:\n{}\n\nPress Ctrl-C to stop.", self.curl(endpoint))?;
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
            vec![
                function.name.clone(),
                function.pid.map_or_else(String::new, |pid| pid.to_string()),
                function.state.name().to_owned(),
                experts,
            ]
        });
        table::with_header(&["function", "pid", "state", "experts"], rows.collect())
    }

    fn curl(&self, endpoint: &str) -> String {
        let request = serde_json::json!({
            "model": self.wanted.name(),
            "prompt": "Once upon a time",
            "max_tokens": 32,
        });
        let key = match self.has_key {
            true => " -H \"Authorization: Bearer $REMOE_API_KEY\"",
            false => "",
        };
        // A quote inside a quoted word of the shell.
        let body = request.to_string().replace('\'', r"'\''");
        format!("  curl {endpoint}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'")
    }
}

/// Name of an event, for people.
fn title(event: &str) -> &str {
    match event {
        "resting" => "group asleep",
        "resumed" => "group awake",
        other => other,
    }
}

/// Capacity, threads and KV cache of the main function, in a line.
fn main_text(main: &MainReport) -> String {
    let counted =
        |count: u64, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
    format!(
        "main function: capacity for {}, {}, KV cache of {} ({})",
        counted(main.concurrency.into(), "concurrent typical request", "concurrent typical requests"),
        counted(main.threads as u64, "thread", "threads"),
        table::bytes(main.kv_cache_bytes),
        counted(main.kv_cache_tokens, "token", "tokens"),
    )
}

/// The processes that the generation in force relies on, with the names of their functions.
pub(super) fn serving(status: &Status) -> BTreeMap<u32, String> {
    let functions = status.functions.iter();
    let serving = functions.filter(|function| function.state == FunctionState::Serving);
    serving.filter_map(|function| Some((function.pid?, function.name.clone()))).collect()
}

/// The address to reach a listener at from this machine.
pub(super) fn reachable(address: SocketAddr) -> SocketAddr {
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
