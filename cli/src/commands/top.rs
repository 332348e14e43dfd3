//! `remoe top`: what runs, waits, sleeps and costs behind an address, again and again.

use super::cost::dollars;
use crate::args::TopArgs;
use crate::exit::CliError;
use crate::output::{json, table};
use bytes::Bytes;
use console::Term;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Between two looks.
const REFRESH: Duration = Duration::from_secs(1);
/// What an answer may take, and how large it may be.
const ANSWER: Duration = Duration::from_secs(5);
const PAGE: usize = 4 << 20;

/// What the gateway says.
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
    /// Of remote groups that slept while their main function ran.
    #[serde(default)]
    group_wakes: u64,
    last_wake_s: Option<f64>,
    /// `None` where no money is accounted for.
    #[serde(default)]
    cost: Option<Cost>,
    functions: Vec<FunctionLine>,
}

/// In nano-dollars.
#[derive(Debug, Serialize, Deserialize)]
struct Cost {
    /// Functions that are alive, in an hour.
    per_hour: u64,
    /// All functions so far; `None` for a tenant's key, and so the next.
    paid: Option<u64>,
    /// Of which for answered requests.
    requests: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FunctionLine {
    name: String,
    state: String,
    pid: Option<u32>,
}

/// Shows the status once where nobody watches or JSON is asked for, else until it is interrupted.
pub(crate) async fn run(args: &TopArgs, as_json: bool) -> Result<(), CliError> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let terminal = Term::stdout();
    loop {
        let page = look(&client, args).await?;
        if as_json {
            return Ok(json::print(&page)?);
        }
        let text = show(&page);
        terminal.write_line(&text)?;
        if !terminal.is_term() {
            return Ok(());
        }
        tokio::time::sleep(REFRESH).await;
        terminal.clear_last_lines(text.lines().count())?;
    }
}

async fn look(client: &Client<HttpConnector, Full<Bytes>>, args: &TopArgs) -> Result<StatusPage, CliError> {
    let endpoint = args.endpoint.trim_end_matches('/');
    let failed = |problem: &dyn std::fmt::Display| CliError {
        field: Some("--endpoint".to_owned()),
        ..CliError::runtime(format!("cannot read {endpoint}/status: {problem}"))
    };
    let mut request = axum::http::Request::get(format!("{endpoint}/status"));
    if let Some(key) = args.api_key.as_deref().filter(|key| !key.is_empty()) {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let request = request.body(Full::default()).map_err(|error| failed(&error))?;
    let answered = async {
        let response = client.request(request).await.map_err(|error| match error.is_connect() {
            true => failed(&"connection failed; see `remoe ps` for the endpoints on this machine"),
            false => failed(&error),
        })?;
        let status = response.status();
        let body =
            Limited::new(response.into_body(), PAGE).collect().await.map_err(|error| failed(&error))?;
        Ok::<_, CliError>((status, body.to_bytes()))
    };
    let (status, body) = tokio::time::timeout(ANSWER, answered)
        .await
        .map_err(|_late| failed(&format!("no answer within {} s", ANSWER.as_secs())))??;
    if !status.is_success() {
        return Err(failed(&format!("{status}: {}", String::from_utf8_lossy(&body).trim())));
    }
    serde_json::from_slice(&body).map_err(|error| failed(&error))
}

fn show(page: &StatusPage) -> String {
    let seconds = |value: f64| format!("{value:.1} s");
    let rows = page.models.iter().map(|model| {
        let functions = model.functions.iter().map(|function| match function.pid {
            Some(pid) => format!("{} {} ({pid})", function.name, function.state),
            None => format!("{} {}", function.name, function.state),
        });
        vec![
            model.model.clone(),
            model.state.clone(),
            model.in_flight.to_string(),
            model.waiting.to_string(),
            seconds(model.quiet_s),
            model.idle_s.map_or_else(|| "never".to_owned(), seconds),
            model.wakes.to_string(),
            model.last_wake_s.map_or_else(String::new, seconds),
            model.group_wakes.to_string(),
            model.cost.as_ref().map_or_else(String::new, |cost| dollars(cost.per_hour)),
            model.cost.as_ref().and_then(|cost| cost.paid).map_or_else(String::new, dollars),
            functions.collect::<Vec<_>>().join(", "),
        ]
    });
    let header = [
        "model",
        "state",
        "running",
        "waiting",
        "idle for",
        "idle window",
        "wakes",
        "last wake",
        "group wakes",
        "cost/hour",
        "paid",
        "functions",
    ];
    table::with_header(&header, rows.collect())
}
