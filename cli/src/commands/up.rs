//! `remoe up`: a model as a service, until it is asked to end.

use crate::args::{StartOrder, UpArgs};
use crate::deployment::{MainReport, Wanted};
use crate::exit::{CliError, Code};
use crate::output::json::{self, Event, Function};
use crate::output::progress::Progress;
use crate::output::table;
use crate::plan_report;
use crate::planning::{Asked, plan, with_main};
use crate::programs;
use crate::remote_set::Foresight;
use crate::signals::EndSignals;
use remoe_function::Role;
use remoe_launcher::decide::Desired;
use remoe_launcher::{FunctionState, HttpSocket, Status, Supervisor, control, placement};
use remoe_planner::{Answer, MainSize, Problem, preallocate};
use serde::Serialize;
use std::collections::BTreeSet;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long functions may drain: a little more than the 34 s in which they promise to end, last words
/// included.
const DRAIN: Duration = Duration::from_secs(35);

/// What the main function may take to say how many requests run.
const ASK: Duration = Duration::from_secs(1);

/// Share of remote experts where only the number of replicas is given.
const HALF: f64 = 0.5;

/// Starts everything, reports what changes, and drains at the end.
pub(crate) async fn run(args: &UpArgs, as_json: bool, progress: &Arc<Progress>) -> Result<(), CliError> {
    let mut signals = EndSignals::catch()?;
    let started = tokio::select! {
        started = start(args, as_json, progress) => started,
        // Nobody has been served yet, so there is nothing to drain.
        () = signals.next() => return Ok(()),
    };
    let Started { wanted, http, supervisor, status, times } = started?;
    let report = Report { wanted: &wanted, times: &times, as_json };
    report.say("ready", &status)?;
    let served = tokio::select! {
        result = report.follow(&supervisor, &status) => result,
        () = signals.next() => Ok(()),
    };
    // From here on connections are the main function's alone: refused when it takes no more.
    http.close();
    let main = supervisor
        .status()
        .borrow()
        .functions
        .iter()
        .find(|one| one.role == Role::Main)
        .and_then(|one| one.grpc);
    tokio::select! {
        () = drain(supervisor, main, progress) => served,
        // Asked twice: dropping the supervisor ends the functions.
        () = signals.next() => Err(CliError::interrupted()),
    }
}

/// Says what is waited for, and lets the functions finish it. `main` is where the main function listens.
async fn drain(supervisor: Supervisor, main: Option<SocketAddr>, progress: &Progress) {
    let running = match main {
        Some(address) => control::requests_in_flight(address, ASK).await,
        None => Ok(0),
    };
    let (what, limit) = (requests(running.ok()), DRAIN.as_secs());
    progress.line(&format!("draining {what}, up to {limit} s; Ctrl-C again to stop at once"));
    progress.doing("draining");
    supervisor.shutdown(DRAIN).await;
}

fn requests(count: Option<u32>) -> String {
    match count {
        None => "what runs".to_owned(),
        Some(1) => "1 request".to_owned(),
        Some(count) => format!("{count} requests"),
    }
}

/// A deployment that answers.
struct Started {
    wanted: Wanted,
    http: Arc<HttpSocket>,
    supervisor: Supervisor,
    status: Status,
    times: StartTimes,
}

/// The parts of a cold start, one after the other, in seconds. They add up to the whole.
#[derive(Debug, Default, Serialize)]
pub(crate) struct StartTimes {
    /// Facts of the checkpoint, profile and prediction: what a plan is made from.
    facts_s: f64,
    /// The plan, as far as it was waited for.
    plan_s: f64,
    /// From the first function's start to the moment in which all of them listen.
    functions_s: f64,
    /// Until the placement was in force: local experts packed, remote functions connected.
    placement_s: f64,
}

impl StartTimes {
    fn whole(&self) -> f64 {
        self.facts_s + self.plan_s + self.functions_s + self.placement_s
    }
}

/// Decides what runs where and starts it.
async fn start(args: &UpArgs, as_json: bool, progress: &Arc<Progress>) -> Result<Started, CliError> {
    let mut clock = Stopwatch::start();
    let mut times = StartTimes::default();
    let deployment = &args.deployment;
    let is_planned =
        deployment.plan.is_none() && deployment.remote_ratio.is_none() && deployment.replicas.is_none();
    let foresight = Foresight { predictor: args.planning.predictor.as_deref(), prompt: None };
    let mut wanted = match is_planned {
        true => Wanted::unplaced(deployment)?,
        false => Wanted::of(deployment, HALF, foresight)?,
    };
    wanted.options.served_model_name.clone_from(&args.served_model_name);
    // An empty variable in the environment is no key; an empty flag is a mistake that opens the server.
    if args.api_key.as_deref() == Some("")
        && std::env::var_os("REMOE_API_KEY").is_none_or(|key| !key.is_empty())
    {
        return Err(CliError::arguments("--api-key", "is empty; leave it out to serve without a key"));
    }
    wanted.options.api_key = args.api_key.clone().filter(|key| !key.is_empty());
    wanted.options.cors_origins.clone_from(&args.cors_origins);
    wanted.options.body_limit = args.body_limit;
    wanted.options.max_requests = args.max_requests;
    if let Some(requests) = args.concurrency.concurrency {
        if let Some(most) = deployment.max_batch.filter(|most| *most < requests as usize) {
            let message = format!("is {requests}, more than the {most} sequences of --max-batch");
            return Err(CliError::arguments("--concurrency", message));
        }
        wanted.run_at_once(requests);
    }
    // What will be missing is said before a profile is measured.
    programs::find(deployment.backend, deployment.device.as_deref())?;
    let http = Arc::new(listen(SocketAddr::new(args.host, args.port))?);
    wanted.http = Some(Arc::clone(&http));
    let asked = Asked { prompt: None, concurrency: args.concurrency.concurrency };
    let problem = match is_planned && !wanted.moe_layers.is_empty() {
        true => Some(args.planning.problem_of(&wanted, deployment, asked, progress).await?),
        false => None,
    };
    times.facts_s = clock.lap();
    let supervisor = match (&problem, args.start) {
        (Some(problem), StartOrder::Preallocated) => {
            let main_bytes = preallocate(problem)?.main_bytes;
            wanted.size_main(MainSize::of(problem, main_bytes, None));
            let supervisor = wanted.launch(main_alone(wanted.desired()), progress)?;
            let problem = with_main(problem, main_bytes);
            let answer = plan(&problem, args.remote).await?;
            wanted.place_as_planned(&problem, &answer)?;
            show_plan(&problem, &answer, as_json, progress);
            times.plan_s = clock.lap();
            supervisor.change(wanted.desired());
            supervisor
        }
        (problem, order) => {
            if let Some(problem) = problem {
                let answer = plan(problem, args.remote).await?;
                wanted.place_as_planned(problem, &answer)?;
                show_plan(problem, &answer, as_json, progress);
            }
            times.plan_s = clock.lap();
            let desired = wanted.desired();
            if order == StartOrder::Sequential {
                one_after_the_other(&wanted, desired, progress).await?
            } else {
                wanted.launch(desired, progress)?
            }
        }
    };
    let functions = wanted.desired().functions.len();
    all_listen(&supervisor, functions).await;
    times.functions_s = clock.lap();
    let status = wanted.ready(&supervisor, progress).await?;
    times.placement_s = clock.lap();
    Ok(Started { wanted, http, supervisor, status, times })
}

fn listen(address: SocketAddr) -> Result<HttpSocket, CliError> {
    HttpSocket::bind(address).map_err(|error| CliError {
        field: Some("--port".to_owned()),
        ..CliError::runtime(format!("cannot listen on {address}: {error}"))
    })
}

/// Only the main function, until it is decided what else there is.
fn main_alone(mut desired: Desired) -> Desired {
    desired.functions.retain(|function| function.role == Role::Main);
    desired.placed = false;
    desired
}

/// Starts the main function, and each remote one when those before it listen.
async fn one_after_the_other(
    wanted: &Wanted,
    desired: Desired,
    progress: &Arc<Progress>,
) -> Result<Supervisor, CliError> {
    let supervisor = wanted.launch(main_alone(desired.clone()), progress)?;
    for count in 2..=desired.functions.len() {
        all_listen(&supervisor, count - 1).await;
        let mut some = Desired { placed: false, ..desired.clone() };
        some.functions.truncate(count);
        supervisor.change(some);
    }
    all_listen(&supervisor, desired.functions.len()).await;
    supervisor.change(desired);
    Ok(supervisor)
}

/// Returns when `count` functions are wanted and all of them listen, or when that will not be.
async fn all_listen(supervisor: &Supervisor, count: usize) {
    let mut status = supervisor.status();
    // What failed is said by whoever waits for readiness.
    let _ended = status
        .wait_for(|status| {
            let listening = status.functions.iter().filter(|function| function.grpc.is_some()).count();
            status.failure.is_some() || (listening == count && status.functions.len() == count)
        })
        .await;
}

fn show_plan(problem: &Problem, answer: &Answer, as_json: bool, progress: &Progress) {
    if !as_json {
        progress.line(&format!("{}\n", plan_report::answer(problem, answer)));
    }
}

/// Measures consecutive parts.
struct Stopwatch(Instant);

impl Stopwatch {
    fn start() -> Self {
        Self(Instant::now())
    }

    /// Seconds since the last lap.
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let seconds = (now - self.0).as_secs_f64();
        self.0 = now;
        seconds
    }
}

struct Report<'a> {
    wanted: &'a Wanted,
    times: &'a StartTimes,
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
                self.say("restarted", &status)?;
                known = serving;
            }
        }
        Err(CliError::runtime("the supervision of the functions ended"))
    }

    /// Prints an event. A service does not end because nobody reads any more what becomes of it.
    fn say(&self, event: &str, status: &Status) -> Result<(), CliError> {
        match self.print(event, status) {
            Err(error) if error.code == Code::ClosedOutput => Ok(()),
            printed => printed,
        }
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
                start: (event == "ready").then_some(self.times),
                main: self.wanted.main_report().filter(|_| event == "ready"),
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
            if let Some(main) = self.wanted.main_report() {
                writeln!(out, "\n{}", main_text(&main))?;
            }
            let StartTimes { facts_s, plan_s, functions_s, placement_s } = self.times;
            writeln!(
                out,
                "\nready after {:.2} s: {facts_s:.2} facts, {plan_s:.2} plan, {functions_s:.2} functions, \
                 {placement_s:.2} placement",
                self.times.whole()
            )?;
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
        let model = options.served_model_name.clone().unwrap_or_else(|| self.wanted.source.model.name());
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

/// What the main function was given, in a sentence.
fn main_text(main: &MainReport) -> String {
    let counted =
        |count: u64, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
    format!(
        "room for {} at once: {} and {} for the keys and values of {} in the main function",
        counted(main.concurrency.into(), "typical request", "typical requests"),
        counted(main.threads as u64, "thread", "threads"),
        table::bytes(main.kv_cache_bytes),
        counted(main.kv_cache_tokens, "token", "tokens"),
    )
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
