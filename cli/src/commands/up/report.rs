//! Messages of `up` about the state of its models.

use super::event::{FunctionEntry, UpEvent};
use super::start::StartTimes;
use super::summary::Summary;
use crate::deployment::DesiredDeployment;
use crate::machine;
use crate::output::json;
use crate::output::progress::{Progress, print_warning};
use crate::output::table;
use crate::placement_choice::PlacementChoice;
use remoe_local::Reporter;
use remoe_process::Role;
use remoe_rollout::{Status, placement};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

/// Prints the events of one model.
pub(super) struct Printer {
    pub(super) times: StartTimes,
    /// Address at which users reach it.
    pub(super) address: SocketAddr,
    /// Set if clients need a key.
    pub(super) has_key: bool,
    /// Reason for the placement at the start.
    pub(super) choice: PlacementChoice,
    /// Cost of an hour in which all functions of the first placement run, in dollars.
    pub(super) hourly: f64,
    /// Set if the address serves other models as well.
    pub(super) is_one_of_several: bool,
    /// Set if the machine is measured while the model runs.
    pub(super) is_measured_later: bool,
    pub(super) as_json: bool,
    pub(super) progress: Arc<Progress>,
}

impl Reporter for Printer {
    // A closed output does not end the service.
    fn say(&self, wanted: &DesiredDeployment, event: &str, status: &Status) -> io::Result<()> {
        match self.print(wanted, event, status) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            printed => printed,
        }
    }

    fn note(&self, text: &str) {
        self.progress.line(text);
    }

    fn warn(&self, text: &str) {
        print_warning(text);
    }
}

impl Printer {
    fn print(&self, wanted: &DesiredDeployment, event: &str, status: &Status) -> io::Result<()> {
        let endpoint = &format!("http://{}", self.address);
        let model = wanted.name();
        let remote = wanted.placement.remote();
        if self.as_json {
            let functions = status.functions.iter();
            json::print(&UpEvent {
                time: machine::now_micros(),
                event,
                model: &model,
                endpoint,
                generation: status.generation,
                start: (event == "ready").then_some(&self.times),
                main: wanted.main_report().filter(|_| event == "ready"),
                functions: functions
                    .map(|function| FunctionEntry::of(function, &wanted.moe_layers, &remote, self.address))
                    .collect(),
            })?;
            return Ok(());
        }
        let mut out = anstream::stdout().lock();
        if event == "ready" {
            let summary = Summary {
                wanted,
                choice: &self.choice,
                address: self.address,
                seconds: self.times.total(),
                hourly: self.hourly,
                has_key: self.has_key,
                is_one_of_several: self.is_one_of_several,
                is_measured_later: self.is_measured_later,
            };
            writeln!(out, "{}", summary.lines().join("\n"))?;
        } else {
            writeln!(out, "{}: {model} at {endpoint}, {}", event_title(event), count_states(status))?;
        }
        if self.progress.is_verbose() {
            writeln!(out, "\n{}", Self::table(wanted, status))?;
            let StartTimes { facts_s, plan_s, functions_s, placement_s } = &self.times;
            if event == "ready" {
                writeln!(
                    out,
                    "\ninspect {facts_s:.2} s, plan {plan_s:.2} s, start functions {functions_s:.2} s, load placement \
                     {placement_s:.2} s"
                )?;
            }
        }
        out.flush()?;
        Ok(())
    }

    fn table(wanted: &DesiredDeployment, status: &Status) -> String {
        let rows = status.functions.iter().map(|function| {
            let experts = match function.role {
                Role::Main => {
                    let remote = wanted.placement.remote();
                    table::experts(&placement::local_experts(&wanted.moe_layers, &remote))
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
}

/// Returns the number of functions in each state: `3 serving, 1 asleep`.
fn count_states(status: &Status) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for function in &status.functions {
        let state = function.state.name();
        match counts.iter_mut().find(|(other, _)| *other == state) {
            Some((_, count)) => *count += 1,
            None => counts.push((state, 1)),
        }
    }
    let counts: Vec<String> = counts.into_iter().map(|(state, count)| format!("{count} {state}")).collect();
    format!("functions: {}", counts.join(", "))
}

/// Returns the title of an event for the user.
fn event_title(event: &str) -> &str {
    match event {
        "resting" => "group asleep",
        "resumed" => "group awake",
        other => other,
    }
}

/// Returns an address at which this machine reaches a listener on `address`.
pub(super) fn reachable_address(address: SocketAddr) -> SocketAddr {
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
    fn listener_on_every_address_is_reached_at_this_machine() {
        let reachable = |text: &str| reachable_address(text.parse().unwrap()).to_string();
        assert_eq!(reachable("0.0.0.0:80"), "127.0.0.1:80");
        assert_eq!(reachable("[::]:80"), "[::1]:80");
        assert_eq!(reachable("10.0.0.1:80"), "10.0.0.1:80");
    }
}
